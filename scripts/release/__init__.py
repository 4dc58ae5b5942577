"""Releases: facts measured from the images, the pages generated from them, and publishing to a registry.

May import every other package of ``scripts``.
"""
