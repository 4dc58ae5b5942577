"""Workarounds for upstream libraries (DeepSpeed, vLLM, flash_attn, Python), and Ray's private API.

May import ``accelerator``, ``telemetry``, ``config``, ``inputs`` and ``errors``.
"""
