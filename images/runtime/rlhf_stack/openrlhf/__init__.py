"""OpenRLHF's arguments: parsed, and turned into a placement request and a run specification.

May import ``sync``, ``engine``, ``placement``, ``cluster``, ``compat``, ``accelerator``, ``memory``,
``telemetry``, ``config``, ``inputs`` and ``errors``.
"""
