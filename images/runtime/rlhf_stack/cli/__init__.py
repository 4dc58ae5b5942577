"""The command ``rlhf-stack``: parses options, calls the other packages and prints their results.

May import every other package of rlhf_stack; only ``rlhf_stack.__main__`` imports it.
"""
