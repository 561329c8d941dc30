"""The recipe, and the options that several commands share: frozen dataclasses, one per topic.

Each option is declared once, with its help; one of a single command is a parameter of its function.
The command line and the arguments in Python are generated from them. May use `selection` (names and
rules only) and `common`.
"""
