"""The host's side of rlhf-stacks: each module runs as ``python -m scripts.<name>``."""
