"""Environment variables that configure the runtime.

May import ``inputs`` and ``errors``.
"""
