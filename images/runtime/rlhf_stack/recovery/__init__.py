"""Submits a run again after a fault: when, from which checkpoint, on which nodes, and with how many engines.

May import every package except ``cli``, ``hooks``, ``demo``, ``diagnostics`` and ``planning``.
"""
