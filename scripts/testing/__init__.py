"""Runs the test suites on images, in containers or from the host, and records their results.

Imports ``images``, ``patches``, ``docker``, ``locks``, ``matrix`` and what is below them in the host's layers.
"""
