"""Workarounds for upstream libraries (DeepSpeed, vLLM, flash_attn, Python), and Ray's private API.

May import ``accelerator``, ``memory``, ``telemetry``, ``config``, ``inputs`` and ``errors``.
"""
