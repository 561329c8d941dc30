"""Studies of many models and recipes: a plan for Snakemake, and the tables of its results."""
