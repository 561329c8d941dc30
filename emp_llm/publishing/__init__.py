"""Publishing: the model card of a pruned checkpoint, its records without folders of a machine, and the push of all files.

This room joins the others. It may use every room below it; only `runs` and the command `push` use it.
"""
