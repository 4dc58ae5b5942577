"""Hashed locks of cells, bases and the host's tools: how they are resolved, written, checked and read.

May import ``matrix`` and the modules at the top of ``scripts``.
"""
