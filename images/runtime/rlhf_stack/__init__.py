"""The decisions that the patches of this distribution hand over; torch, ray and vllm are imported lazily."""

__version__ = "0.1.0"
