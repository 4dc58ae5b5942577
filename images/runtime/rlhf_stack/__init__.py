"""The runtime of this distribution, which its patches call; torch, ray and vllm are imported lazily."""

__version__ = "0.1.0"
