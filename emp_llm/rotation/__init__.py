"""Rotation: a model that computes the same in a basis in which pruning does less harm."""
