"""The Ray cluster of a run: ``ray start``, connections, readiness, and records shared through the GCS.

May import ``compat``, ``accelerator``, ``telemetry``, ``config``, ``inputs`` and ``errors``.
"""
