"""Docker on this machine: a client, the command that builds, registries, and what sets Docker up.

Imports ``locks``, ``matrix`` and what is below them in the host's layers.
"""
