"""Proofs of the ROCm recipes without AMD's software: compiled by Debian's HIP, kernels executed on a CPU.

May import every other package of `scripts` but `cli` and `lint`.
"""
