"""Docker on this machine: its client, the command that builds, registries, and Docker's installation.

May import ``locks``, ``matrix`` and the modules at the top of ``scripts``.
"""
