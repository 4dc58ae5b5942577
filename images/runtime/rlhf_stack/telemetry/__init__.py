"""Events, log lines and throughput of a run.

May import ``config``, ``inputs`` and ``errors``.
"""
