"""Studies of many jobs: planned as a file, run here or by a scheduler, watched, and collected.

A job is a command of emp-llm in a process of its own; what the room knows of it are its files. The room may use all others.
"""
