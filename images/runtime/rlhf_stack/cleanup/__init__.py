"""Finds and removes what a dead run left on a node: processes, shared memory; reads the process table.

May import ``memory``, ``telemetry``, ``config`` and ``errors``.
"""
