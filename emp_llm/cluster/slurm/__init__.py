"""Studies on a Slurm cluster: the site file, jobs grouped into arrays, their scripts, and what was submitted.

The room calls sbatch and squeue, and nothing else of Slurm. It may use all rooms before it.
"""
