"""A tiny model, prompts, rewards and a command line with which the real pipeline runs on two CPU cores.

May import every package except ``cli`` and ``hooks``.
"""
