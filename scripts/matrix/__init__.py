"""The cells of ``matrix.yaml``: their types, how the file is read and validated, and its JSON Schema.

May import only the modules at the top of ``scripts``.
"""
