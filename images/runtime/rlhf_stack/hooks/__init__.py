"""Façades: the only modules of this package that patches of upstream packages import, one for each package.

May import every package but `cli` and `demo`; only patches and tests import it.
"""
