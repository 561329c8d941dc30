"""The plan of a study: models x recipes -> jobs, with their needs estimated from the models' configs.

It imports what `cluster` imports.
"""
