"""Docker on this machine: a client, the command that builds, registries, and the installation of Docker.

Imports ``errors`` and ``paths`` only; everything that runs containers or builds images imports it.
"""
