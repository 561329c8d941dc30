"""Studies of many jobs: their plan, how the jobs run on this machine or on Slurm, and the tables
of their results.
"""
