"""Finds and removes the processes and shared memory that a dead run left on a node.

May import ``memory``, ``telemetry``, ``config``, ``inputs`` and ``errors``.
"""
