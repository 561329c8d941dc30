"""The definition of a mask in plain torch: sums in a fixed order, effective numbers, counts of kept scores, and cuts.

Every kernel matches these functions bit for bit. The folder imports torch and numpy, and nothing else of this package;
`definitions` needs neither, so that kernels can share it.
"""
