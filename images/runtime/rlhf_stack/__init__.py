"""Runtime of the images: the library that patches and the command ``rlhf-stack`` call.

torch, ray and vllm are imported lazily.
"""

__version__ = "0.1.0"
