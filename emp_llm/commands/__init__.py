"""The commands: a file each, with a function of its name, and `show`, which prints what it returns.

`emp_llm.cli` runs them from the shell. `from emp_llm import prune` is the function.
"""
