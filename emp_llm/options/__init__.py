"""The options of all commands: small frozen dataclasses, one per topic; each field is declared once, with its help.

The command line and the Python functions are generated from them. May use `selection` (names and rules only) and `common`.
"""
