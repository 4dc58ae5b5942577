"""Runs the test suites on images, in containers or from the host, and records their results.

May import ``images``, ``patches``, ``docker``, ``locks``, ``matrix`` and the modules at the top of `scripts`.
"""
