"""``ray start`` done right on one machine: what is declared is what is there, and nobody else gets in."""
