"""Finds and explains faults: doctor, monitor, network check, and the check of installed patches.

May import every package except ``cli``, ``hooks`` and ``demo``.
"""
