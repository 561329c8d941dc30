"""Kernels: the masks of rows at memory speed, in the very bits of the plain torch reference."""
