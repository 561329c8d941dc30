"""Hill numbers: the number of equally important components that a set of scores is worth.

The Hill number of order q of a probability vector omega is (sum_i omega_i^q)^(1/(1-q)). Order 0 counts the non-zero scores,
order 1 is exp of the Shannon entropy, order 2 is the paper's effective number N_eff = 1 / sum_i omega_i^2, and order infinity
is 1 / max omega. Scores need no normalisation: the formulas here use the scores divided by one scale for each group.
"""

import math
from array import array
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from emp_llm.selection.arithmetic.definitions import RELATIVE_TOLERANCE, NonFiniteError, check_order
from emp_llm.selection.arithmetic.sums import sum_rows, sum_vector

_DTYPES = {"d": torch.float64, "q": torch.int64}


@dataclass(frozen=True)
class Moments:
    """The sums from which the Hill number of each group follows. They are small, and groups can be merged.

    With t = |s| / scale, `total` is sum t. `power` depends on the order q: the count of t > 0 (q = 0), sum t^2 (q = 2), max t
    (q = infinity), and otherwise sum t * g(t) with g(t) = (t^(q-1) - 1) / (q - 1), which is log t at q = 1. Near q = 1, this
    form avoids cancellation.

    Attributes:
        order: q >= 0.
        size: int64, shape (groups,): the number of scores in the group.
        scale, total, power: float64, shape (groups,).
    """

    order: float
    size: Tensor
    scale: Tensor
    total: Tensor
    power: Tensor

    @classmethod
    def of_rows(cls, rows: Tensor, order: float = 2.0) -> "Moments":
        """Moments of the scores in each row; floating, shape (rows, columns). Only magnitudes matter.

        Raises:
            NonFiniteError: a row holds NaN or infinity.
            ValueError: the order is not a number >= 0.
        """
        check_order(order)
        rows = rows.abs()
        scale, term = _scale(rows, order), _power_term(order)
        if bool((scale == 1.0).all()):
            total, power = sum_rows(rows, lambda s: s, term)
        else:
            divisor = scale[:, None]
            total, power = sum_rows(rows, lambda s: s / divisor, lambda s: term(s / divisor))
        if math.isinf(order):
            power = rows.amax(1).double() / scale
        if not bool(torch.isfinite(total).all()):
            raise NonFiniteError("scores hold NaN or infinity")
        size = torch.full_like(total, rows.shape[1], dtype=torch.int64)
        return cls(order, size, scale, total, power)

    @classmethod
    def merge(cls, parts: "list[Moments]") -> "Moments":
        """The moments of one group that holds all groups of all parts, in their order."""
        order = parts[0].order
        scale = torch.cat([part.scale for part in parts])
        total = torch.cat([part.total for part in parts])
        power = torch.cat([part.power for part in parts])
        size = torch.cat([part.size for part in parts]).sum().reshape(1)
        common = scale.max()
        ratio = scale / common
        if order == 2.0:
            power = power * ratio * ratio
        elif math.isinf(order):
            power = power * ratio
        elif order != 0.0:
            power = power * ratio.pow(order) + total * _t_times_g(ratio, order)
        total = total * ratio
        merged_power = power.max() if math.isinf(order) else sum_vector(power)
        return cls(order, size, common.reshape(1), sum_vector(total).reshape(1), merged_power.reshape(1))

    @property
    def mass(self) -> Tensor:
        """sum |s| of each group, float64, shape (groups,)."""
        return self.total * self.scale

    def number(self) -> Tensor:
        """The Hill number of each group, float64, shape (groups,), between 1 and N; N for a group of zeros."""
        q, total, power = self.order, self.total, self.power
        if q == 0.0:
            number = power
        elif q == 2.0:
            number = total * total / power
        elif math.isinf(q):
            number = total / power
        elif q == 1.0:
            number = total * torch.exp(-power / total)
        else:
            number = total * torch.exp(-torch.log1p((q - 1) * power / total) / (q - 1))
        size = self.size.double()
        number = torch.where(total == 0, size, number)
        nearest = number.round()
        number = torch.where((number - nearest).abs() <= RELATIVE_TOLERANCE * nearest, nearest, number)
        return number.clamp(min=1.0).minimum(size)


class CollectedMoments:
    """The moments of the blocks of a group, to be merged.

    They are numbers in arrays on the CPU. Small tensors, made between the large ones of each block and kept, would prevent the
    C library from using the memory of these again: a prune would grow by its targets.
    """

    def __init__(self) -> None:
        self._order = 0.0
        self._columns = tuple(array(code) for code in "dddq")

    def add(self, part: Moments) -> None:
        """Append the moments of a block's rows."""
        self._order = part.order
        for column, values in zip(self._columns, (part.scale, part.total, part.power, part.size), strict=True):
            column.extend(values.tolist())

    def merged(self) -> Moments:
        """The moments of the group, as by `Moments.merge`; the collection is empty afterwards."""
        columns, self._columns = self._columns, tuple(array(code) for code in "dddq")
        scale, total, power, size = (torch.frombuffer(column, dtype=_DTYPES[column.typecode]) for column in columns)
        return Moments.merge([Moments(self._order, size, scale, total, power)])


def _scale(rows: Tensor, order: float) -> Tensor:
    """A divisor for each row that keeps powers in range: at order 2 a power of two, which is exact; else the largest score."""
    if order == 2.0 and rows.dtype != torch.float64:
        # Squares of 32-bit floats, subnormal or huge, are normal float64 numbers, so they need no scale.
        return torch.ones(rows.shape[0], dtype=torch.float64, device=rows.device)
    largest = rows.amax(1).double()
    scale = largest
    if order == 2.0:
        exponent = torch.frexp(largest).exponent.clamp(min=-1020)
        scale = torch.ldexp(torch.ones_like(largest), exponent - 1)
    # The smallest scale for a row of zeros: it must not set the common scale when groups are merged.
    return torch.where(largest > 0, scale, torch.finfo(torch.float64).tiny)


def _power_term(order: float) -> Callable[[Tensor], Tensor]:
    if order == 0.0:
        return lambda t: (t > 0).double()
    if order == 2.0:
        return lambda t: t * t
    if math.isinf(order):
        return torch.zeros_like
    return lambda t: _t_times_g(t, order)


def _t_times_g(t: Tensor, order: float) -> Tensor:
    """t * (t^(q-1) - 1) / (q - 1), elementwise; t log t at q = 1; 0 where t = 0."""
    log = torch.log(t)
    g = log if order == 1.0 else torch.expm1((order - 1) * log) / (order - 1)
    return torch.where(t > 0, t * g, 0.0)
