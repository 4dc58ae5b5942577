"""Environment variables that configure the runtime.

May import ``errors``.
"""
