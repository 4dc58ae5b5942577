"""GPUs of this process and machine: device calls, visible-device variables, and AMD detection.

May import ``config``, ``inputs`` and ``errors``.
"""
