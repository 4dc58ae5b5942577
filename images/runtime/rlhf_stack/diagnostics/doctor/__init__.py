"""The checks of `rlhf-stack doctor`: nodes collect their facts, and pure functions check and compare them."""
