"""vLLM engines in a run: actor hooks, worker classes, startup, request balancing and GPU contention.

May import ``sync``, ``placement``, ``cluster``, ``compat``, ``accelerator``, ``telemetry``, ``config``,
``inputs`` and ``errors``.
"""
