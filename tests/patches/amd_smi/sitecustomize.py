"""Lets the SMI library that Ray 2.55 loads report eight AMD GPUs, where this folder is on the path."""

import importlib.machinery
import sys

LIBRARY = "ray._private.thirdparty.pyamdsmi.pyamdsmi"


class SmiLibrary:
    """Finds Ray's binding of the library, and replaces the calls that need a driver."""

    @staticmethod
    def find_spec(name, path=None, _target=None):
        """Return the binding's spec with another loader; None for any other module."""
        if name != LIBRARY:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            module.smi_initialize = module.smi_shutdown = lambda: None
            module.smi_get_device_count = lambda: 8

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, SmiLibrary)
