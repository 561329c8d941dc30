"""What became of the jobs of a study, and their results as tables and a report.

It imports what `cluster` imports.
"""
