"""Images: their base root filesystems, the build context of a cell, the digest of its inputs, and the build.

May import ``patches``, ``docker``, ``locks``, ``matrix`` and the modules at the top of ``scripts``.
"""
