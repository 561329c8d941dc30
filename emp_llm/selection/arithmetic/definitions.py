"""Constants and rules of the definition of a mask, shared by every implementation."""

import math

# Element i of a row is added to lane i mod 64 (see `sums`).
LANES = 64
# A number within this relative distance of an integer counts as that integer. The tolerance is far above the rounding error of
# a float64 sum of 10^9 terms and far below any meaningful difference. So uniform scores give exactly N, whatever their common
# value.
RELATIVE_TOLERANCE = 2.0**-44


class NonFiniteError(ValueError):
    """Scores hold NaN or infinity, so they have no effective number."""


def check_order(order: float) -> None:
    """Raise ValueError unless `order` is a Hill order: a number >= 0, or infinity."""
    if math.isnan(order) or order < 0:
        raise ValueError(f"order must be a number >= 0 (the paper uses 2), got {order:g}")


def check_beta(beta: float) -> None:
    """Raise ValueError unless beta is a positive finite number."""
    if not 0 < beta < math.inf:
        raise ValueError(f"beta must be a number above 0 (the paper uses 1), got {beta:g}")


def floor_count(value: float) -> int:
    """Floor of a number. A number below an integer by no more than rounding error counts as that integer."""
    return math.floor(value * (1 + RELATIVE_TOLERANCE))
