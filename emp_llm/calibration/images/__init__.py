"""Calibration on images: rows of a text and its images, the inputs that a model's processor makes of them, and their passes.

May use `calibration`, which knows nothing of images but the name of their column.
"""
