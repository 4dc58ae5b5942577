"""What `rlhf-stack doctor` looks at: facts are gathered on each node, and judged elsewhere by pure checks."""
