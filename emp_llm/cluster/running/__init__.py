"""Jobs in processes of their own: how they are started, on one machine or several, and the files that tell what became of them.

It imports what `cluster` imports.
"""
