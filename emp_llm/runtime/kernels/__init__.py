"""Products with packed rows on CPUs and GPUs: bare arrays and pointers, and nothing of the other rooms.

The loops for CPUs are LLVM IR, compiled for the processor on which they run; those for CUDA are Triton.
"""

WORD_COLUMNS = 64  # weights that a word of a mask covers; each row begins with a new word
