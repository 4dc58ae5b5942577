"""Patches: their headers, the wheels that they are applied to, and the checks that keep them few and valid.

May import ``docker``, ``locks``, ``matrix`` and the modules at the top of ``scripts``.
"""
