"""The reference in plain torch, on any device: sums, effective numbers, cuts and masks. All other
code gives the same bits.

Floating-point addition is not associative. If the order of a sum followed the thread count, the
device or the size of a chunk of rows, the last bit of the sum could change, and with it the number
of weights that are kept. Here the order is part of the definition: element i of a row is added to
lane i mod 64, in order of i; then the 64 lanes are folded in halves. Each step is an elementwise
IEEE addition.

The bits of non-negative IEEE floats, read as integers, are in the same order as the floats. These
integers are the keys of the scores. The k-th largest key is found without rounding, so the mask is
the same on every device.
"""

import math
from array import array
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from emp_llm.common.machine import runs_triton
from emp_llm.selection.rule import (
    LANES,
    RELATIVE_TOLERANCE,
    KeepRule,
    NonFiniteError,
    RowFigures,
    check_order,
    counts_at,
)

# Numbers converted to float64 at a time: they stay in a core's cache, and are too few for torch to
# use several threads.
_PIECE = 1 << 15
_GPU_PIECE = 1 << 24  # as many for each launch
_KEY_DTYPES = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_SIGNED = {1: torch.int8} | _KEY_DTYPES
_RADIX_BITS = 16
_LONG_ROW = 64  # columns from which numpy's sort is the fastest way


# Sums.


def sum_rows(rows: Tensor, *terms: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Sum each row in float64, once for each term. The rows are read once.

    Args:
        rows: shape (rows, columns), any floating dtype.
        terms: elementwise maps, applied to float64 pieces of the rows before they are summed; none:
            the rows themselves.

    Returns:
        One float64 tensor of shape (rows,) for each term.
    """
    rows = rows.detach()
    count, columns = rows.shape
    # Lanes without an element hold zero and change no bit of the sum, so short rows have only as
    # many as they need.
    width = min(LANES, 1 << max(columns - 1, 0).bit_length())
    terms = terms or (lambda s: s,)
    lanes = [torch.zeros(count, width, dtype=torch.float64, device=rows.device) for _ in terms]
    piece_size = _GPU_PIECE if rows.is_cuda else _PIECE
    step = max(piece_size // max(count, 1) // LANES, 1) * LANES
    for start in range(0, columns, step):
        piece = rows[:, start : start + step].double()
        for lane, term in zip(lanes, terms, strict=True):
            values: Any = term(piece)
            sums: Any = lane
            # Numpy makes the same additions, with less overhead for each call.
            if lane.device.type == "cpu":
                sums = lane.numpy()
                values = values.numpy()
            for first in range(0, values.shape[1], LANES):
                added = values[:, first : first + LANES]
                sums[:, : added.shape[1]] += added
    return [_fold(lane) for lane in lanes]


def sum_vector(values: Tensor) -> Tensor:
    """Sum a tensor of any shape in the same order, flattened; returns a float64 scalar tensor."""
    return sum_rows(values.reshape(1, -1))[0][0]


def _fold(lanes: Tensor) -> Tensor:
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    return lanes[:, 0]


# Effective numbers.


@dataclass(frozen=True)
class PowerSums:
    """The sums of powers from which the Hill number of each group follows. Groups can be merged.

    The Hill number of order q of a probability vector omega is (sum_i omega_i^q)^(1/(1-q)):

    - order 0: the number of scores other than zero
    - order 1: exp of the Shannon entropy
    - order 2: the paper's N_eff = 1 / sum_i omega_i^2
    - order infinity: 1 / max omega

    With t = |s| / scale, `total` is sum t. `power` is the number of t > 0 at order 0, sum t^2 at
    order 2 and max t at order infinity. At all other orders it is sum t * g(t) with g(t) = (t^(q-1)
    - 1) / (q - 1), or log t at q = 1. This form avoids cancellation near q = 1.

    Attributes:
        order: q >= 0.
        size: the number of scores in each group.
        scale, total, power: float64, shape (groups,).
    """

    order: float
    size: int
    scale: Tensor
    total: Tensor
    power: Tensor

    @classmethod
    def of_rows(cls, rows: Tensor, order: float = 2.0) -> "PowerSums":
        """The sums of the scores in each row; floating, shape (rows, columns). Only magnitudes
        matter.

        Raises:
            NonFiniteError: a row holds NaN or infinity.
            ValueError: the order is not a number >= 0.
        """
        check_order(order)
        rows = rows.abs()
        scale = _scale(rows, order)
        term = _power_term(order)
        if bool((scale == 1.0).all()):
            total, power = sum_rows(rows, lambda s: s, term)
        else:
            divisor = scale[:, None]
            total, power = sum_rows(rows, lambda s: s / divisor, lambda s: term(s / divisor))
        if math.isinf(order):
            power = rows.amax(1).double() / scale
        if not bool(torch.isfinite(total).all()):
            raise NonFiniteError("scores hold NaN or infinity")
        return cls(order, rows.shape[1], scale, total, power)

    def merged(self, size: int) -> "PowerSums":
        """The sums of one group of `size` scores that holds all groups, in their order."""
        order = self.order
        total = self.total
        power = self.power
        common = self.scale.max()
        ratio = self.scale / common
        if order == 2.0:
            power = power * ratio * ratio
        elif math.isinf(order):
            power = power * ratio
        elif order != 0.0:
            power = power * ratio.pow(order) + total * _t_times_g(ratio, order)
        power = power.max() if math.isinf(order) else sum_vector(power)
        return PowerSums(
            order, size, common.reshape(1), sum_vector(total * ratio).reshape(1), power.reshape(1)
        )

    @property
    def mass(self) -> Tensor:
        """sum |s| of each group, float64, shape (groups,)."""
        return self.total * self.scale

    def number(self) -> Tensor:
        """The Hill number of each group, float64, shape (groups,), between 1 and N; N for a
        group of zeros.
        """
        q = self.order
        total = self.total
        power = self.power
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
        number = torch.where(total == 0, float(self.size), number)
        nearest = number.round()
        number = torch.where(
            (number - nearest).abs() <= RELATIVE_TOLERANCE * nearest, nearest, number
        )
        return number.clamp(1.0, float(self.size))

    def counts(self, beta: float = 1.0) -> Tensor:
        """clip(floor(beta * N_eff), 1, N) of each group: int64, shape (groups,); N for a group
        of zeros.
        """
        counts: Tensor = counts_at(self.number(), self.total, beta, float(self.size))
        return counts.long()


class PowerSumsOfGroup:
    """Collects the sums of one group, chunk of rows by chunk.

    They are kept in arrays on the CPU. Small tensors that lie between the large ones of each chunk
    would keep the C library from reusing their memory, and a prune would grow with each target.
    """

    def __init__(self, order: float) -> None:
        self.order = order
        self.size = 0
        self._columns = array("d"), array("d"), array("d")

    def add(self, rows: Tensor) -> None:
        """Add the sums of a chunk of scores, shape (rows, columns); errors as for
        `PowerSums.of_rows`.
        """
        of_chunk = PowerSums.of_rows(rows, self.order)
        columns = of_chunk.scale, of_chunk.total, of_chunk.power
        self.size += rows.numel()
        for column, values in zip(self._columns, columns, strict=True):
            column.extend(values.tolist())

    def merged(self) -> PowerSums:
        """The sums of the group."""
        scale, total, power = (
            torch.frombuffer(column, dtype=torch.float64) for column in self._columns
        )
        return PowerSums(self.order, 0, scale, total, power).merged(self.size)


def _scale(rows: Tensor, order: float) -> Tensor:
    """A divisor for each row that keeps powers in range: at order 2 a power of two, which is
    exact; else the largest score.
    """
    if order == 2.0 and rows.dtype != torch.float64:
        # Squares of 32-bit floats, subnormal or huge, are normal float64 numbers, so they need no
        # scale.
        return torch.ones(rows.shape[0], dtype=torch.float64, device=rows.device)
    largest = rows.amax(1).double()
    scale = largest
    if order == 2.0:
        exponent = torch.frexp(largest).exponent.clamp(min=-1020)
        scale = torch.ldexp(torch.ones_like(largest), exponent - 1)
    # The smallest scale for a row of zeros: it must not set the common scale when groups are
    # merged.
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


def _bfloat16_counts(rows: Tensor, sums: PowerSums, beta: float) -> Tensor:
    """`counts_at` with omega, omega^2, their sum and N_eff rounded to bfloat16."""
    scores = rows.abs().bfloat16()
    total = sum_rows(scores)[0].bfloat16()
    squares = (scores / total[:, None]).square()
    n_eff = sum_rows(squares)[0].bfloat16().reciprocal().double()
    counts = torch.floor(beta * n_eff).clamp(1.0, float(sums.size))
    return torch.where(sums.total == 0, float(sums.size), counts).long()


# Keys, cuts and masks.


def order_keys(scores: Tensor) -> Tensor:
    """Integer keys in the order of |scores|, of the same shape: int16 for bfloat16 and float16,
    else int32 or int64.
    """
    return scores.abs().view(_KEY_DTYPES[scores.element_size()])


def _masked_scores(keys: Tensor, mask: Tensor, dtype: torch.dtype) -> Tensor:
    """|scores| from their keys, in the dtype of the scores, where the mask is true; 0 elsewhere."""
    return (keys * mask).view(dtype)


@dataclass(frozen=True)
class Cut:
    """The cut of each group.

    Attributes:
        key: shape (groups, 1), the key of the k-th largest score. All larger scores are kept.
        ties: int64, shape (groups, 1), how many of the scores equal to it are kept, lowest index
            first.
    """

    key: Tensor
    ties: Tensor


def row_cuts(keys: Tensor, *counts: Tensor) -> list[Cut]:
    """The cuts of rows of keys, for one or more counts of each row.

    Args:
        keys: from `order_keys`, shape (rows, columns).
        counts: int64, each of shape (rows,): how many scores of each row are kept, 0 to the number
            of columns.

    Returns:
        One cut of `rows` groups for each of the counts. The rows are sorted once; on a GPU, a
        kernel finds the cuts of those that fit into its registers.
    """
    columns = keys.shape[1]
    if _has_kernel(keys):
        from emp_llm.selection.cuda_kernel import cuts_of_rows

        found = cuts_of_rows(keys, torch.stack(counts))
        return [Cut(key[:, None], ties[:, None]) for key, ties in zip(*found, strict=True)]
    ordered = _sorted(keys)
    cuts = []
    for count in counts:
        # If none is kept, the cut is the largest key.
        places = (columns - count).clamp(max=columns - 1)[:, None]
        key = ordered.gather(1, places)
        cuts.append(
            Cut(key, count[:, None] - (columns - torch.searchsorted(ordered, key, right=True)))
        )
    return cuts


def keep_mask(keys: Tensor, cut: Cut) -> Tensor:
    """The mask of rows of keys: bool, shape of `keys`. `cut` holds one for each row, or one for
    all.
    """
    tied = keys == cut.key
    # Seldom are there more than may stay; to count them along the row takes ten times as long. On a
    # GPU, waiting for an answer takes longer.
    if keys.is_cuda or not bool((tied.sum(1, keepdim=True) <= cut.ties).all()):
        counter = torch.int32 if keys.shape[1] < 2**31 else torch.int64
        tied &= tied.cumsum(1, dtype=counter) <= cut.ties
    return tied.logical_or_(keys > cut.key)


def largest_mask(scores: Tensor, counts: Tensor) -> Tensor:
    """Keep the `counts[r]` largest |scores| of each row r.

    Args:
        scores: shape (rows, columns), floating, finite.
        counts: int64, shape (rows,), each between 0 and the number of columns.

    Returns:
        bool, shape (rows, columns), exactly `counts[r]` true in row r; ties go to the lowest
        column.
    """
    keys = order_keys(scores)
    if _has_kernel(keys):
        from emp_llm.selection.cuda_kernel import masks_of_rows

        return masks_of_rows(keys, counts)
    if keys.is_cuda:  # in a few launches
        order = keys.argsort(dim=1, descending=True, stable=True)
        places = torch.arange(keys.shape[1], device=keys.device)
        return torch.empty_like(keys, dtype=torch.bool).scatter_(1, order, places < counts[:, None])
    (cut,) = row_cuts(keys, counts)
    return keep_mask(keys, cut)


def _has_kernel(keys: Tensor) -> bool:
    """Whether a kernel finds the cuts of these rows on their GPU."""
    if not keys.numel() or keys.element_size() == 8 or not runs_triton(keys.device):
        return False
    from emp_llm.selection.cuda_kernel import LONGEST

    return keys.shape[1] <= LONGEST


def pattern_mask(keys: Tensor, n: int, m: int) -> Tensor:
    """Keep the n largest of every m consecutive keys of a row; bool, shape of `keys`. The
    columns are a multiple of m.
    """
    groups = keys.reshape(-1, m)
    if m >= _LONG_ROW:
        (cut,) = row_cuts(groups, torch.full((groups.shape[0],), n, device=keys.device))
        return keep_mask(groups, cut).reshape(keys.shape)
    places = groups.t().contiguous()
    # How many keys of its group are ahead of each key.
    ahead = torch.zeros(places.shape, dtype=torch.uint8, device=keys.device)
    for distance in range(1, m):
        first_wins = places[:-distance] >= places[distance:]
        ahead[distance:] += first_wins
        ahead[:-distance] += ~first_wins
    return (ahead < n).t().reshape(keys.shape)


def mass_of_largest(keys: Tensor, dtype: torch.dtype, cut: Cut, sums: PowerSums) -> Tensor:
    """s_eff: the share of each row's sum |s| above a cut: float64, shape (rows,); 1 for a row of
    zeros.

    Args:
        keys: of the scores, from `order_keys`, shape (rows, columns).
        dtype: of the scores.
        cut: of each row, at its floor(N_eff) largest scores.
        sums: of the rows.
    """
    (above,) = sum_rows(_masked_scores(keys, keys > cut.key, dtype))
    mass = (above + cut.ties[:, 0] * cut.key.view(dtype).double()[:, 0]) / sums.mass
    return torch.where(sums.total == 0, 1.0, mass).clamp(max=1.0)


def _sorted(keys: Tensor) -> Tensor:
    """Each row of keys in ascending order. On CPUs numpy sorts long rows of integers up to ten
    times as fast as torch.
    """
    keys = keys.contiguous()
    if keys.device.type != "cpu" or keys.shape[1] < _LONG_ROW:
        return keys.sort(dim=1).values
    # Stable means radix sort for 16 bits.
    method: Literal["stable"] | None = "stable" if keys.element_size() == 2 else None
    return torch.from_numpy(np.sort(keys.numpy(), axis=1, kind=method))


# Selection from rows, and from larger groups.


@dataclass(frozen=True)
class Selection:
    """The weights of a chunk of rows that are kept.

    Attributes:
        mask: bool, shape (rows, columns), true where kept.
        kept: int64, shape (rows,), how many are kept.
        kept_mass, mass: float64, shape (rows,), sum |s| over the kept scores, and over all.
        n_eff, s_eff: float64, shape (rows,): the effective number of each row, and the share of sum
            |s| that its floor(N_eff) largest scores hold; None where a group is larger than a row.
    """

    mask: Tensor
    kept: Tensor
    kept_mass: Tensor
    mass: Tensor
    n_eff: Tensor | None = None
    s_eff: Tensor | None = None


def select_rows(scores: Tensor, rule: KeepRule) -> Selection:
    """Select from a chunk of rows, each a group of its own.

    Args:
        scores: shape (rows, columns), floating, non-negative.
        rule: how many scores of each row to keep.

    Raises:
        NonFiniteError: scores hold NaN or infinity.
    """
    sums = PowerSums.of_rows(scores, rule.order)
    keys = order_keys(scores)
    counts = _counts(rule, sums, scores)
    cut, at_n_eff = row_cuts(keys, counts, sums.counts())
    mask = keep_mask(keys, cut) if rule.pattern is None else pattern_mask(keys, *rule.pattern)
    (kept_mass,) = sum_rows(_masked_scores(keys, mask, scores.dtype))
    s_eff = mass_of_largest(keys, scores.dtype, at_n_eff, sums)
    return Selection(mask, counts, kept_mass, sums.mass, sums.number(), s_eff)


def _counts(rule: KeepRule, sums: PowerSums, scores: Tensor | None = None) -> Tensor:
    """How many scores of each group a rule keeps: int64, shape (groups,)."""
    if rule.beta is not None and rule.dtype == "bfloat16" and scores is not None:
        return _bfloat16_counts(scores, sums, rule.beta)
    if rule.beta is not None:
        return sums.counts(rule.beta)
    counts = (
        sums.size // rule.pattern[1] * rule.pattern[0] if rule.pattern is not None else rule.counts
    )
    known = torch.as_tensor(counts, dtype=torch.int64, device=sums.total.device)
    return known.expand(sums.total.shape)


def apply_selection(weight: Tensor, selection: Selection) -> RowFigures:
    """Set to zero, in place, the weights that a selection does not keep."""
    # As integers: fast, and never -0.0.
    weight.view(_SIGNED[weight.element_size()]).mul_(selection.mask)
    zeros = weight.shape[1] - (weight != 0).sum(1, dtype=torch.int32).long()
    return RowFigures(
        selection.kept, zeros, selection.kept_mass, selection.mass, selection.n_eff, selection.s_eff
    )


class GroupSelector:
    """Selects from one group larger than a row: a matrix, or all targets together.

    The scores of such a group may not fit in memory, so the caller feeds them chunk by chunk, the
    same chunks in the same order in several rounds: one for the sums, up to four for the cut, and
    one for the masks.

    for chunk in chunks: selector.add(chunk)
    while selector.searching():
        for chunk in chunks: selector.search(chunk)
    for chunk in chunks: selector.select(chunk).mask

    Args:
        rule: how many scores of the group to keep; without a pattern.

    Attributes:
        kept_ties: how many scores at the cut the last round has kept so far.
    """

    def __init__(self, rule: KeepRule) -> None:
        self._rule = rule
        self._power_sums = PowerSumsOfGroup(rule.order)
        self._dtype = torch.float32
        self._searches: dict[int, _RadixSearch] = {}
        self._above_n_eff = array("d")
        self.kept_ties = 0

    def add(self, scores: Tensor) -> None:
        """First round: the sums. `scores` as for `select_rows`."""
        self._dtype = scores.dtype
        self._power_sums.add(scores)

    def searching(self) -> bool:
        """End the current round of the search for the cut; returns whether another round is
        needed.
        """
        if not self._searches:
            self.sums = self._power_sums.merged()
            self.count = int(_counts(self._rule, self.sums)[0])
            self.nu = int(self.sums.counts()[0])
            self._searches = {
                k: _RadixSearch(k, self._dtype.itemsize) for k in {self.count, self.nu}
            }
        else:
            for search in self._searches.values():
                search.end_round()
        return any(search.bits_left for search in self._searches.values())

    def search(self, scores: Tensor) -> None:
        """One round of the search for the cut."""
        keys = order_keys(scores)
        for search in self._searches.values():
            search.feed(keys)

    def select(self, scores: Tensor) -> Selection:
        """Last round: the mask of a chunk. Of the scores at the cut, those with the lowest index
        in the group are kept.
        """
        keys = order_keys(scores)
        cut = self._searches[self.count].cut(scores.device)
        ties_left = torch.full_like(cut.ties, int(cut.ties) - self.kept_ties)
        mask = keep_mask(keys.reshape(1, -1), replace(cut, ties=ties_left)).reshape(keys.shape)
        self.kept_ties += int((mask & (keys == cut.key)).sum())
        above_n_eff = _masked_scores(
            keys, keys > self._searches[self.nu].cut(scores.device).key, scores.dtype
        )
        self._above_n_eff.extend(sum_rows(above_n_eff)[0].tolist())
        return Selection(
            mask,
            mask.sum(1),
            sum_rows(_masked_scores(keys, mask, scores.dtype))[0],
            sum_rows(scores)[0],
        )

    def effective_mass(self) -> float:
        """s_eff of the whole group, after the last round."""
        total = float(self.sums.mass)
        cut = self._searches[self.nu].cut(torch.device("cpu"))
        at_n_eff = float(cut.key.view(self._dtype).double())
        above = float(sum_vector(torch.frombuffer(self._above_n_eff, dtype=torch.float64)))
        return min(1.0, (above + int(cut.ties) * at_n_eff) / total) if total else 1.0


class _RadixSearch:
    """The k-th largest key of a group, 16 bits of it in each round, from a histogram of 65,536
    counts.

    Args:
        count: k, how many keys of the group are kept; may be 0.
        key_bytes: bytes of a key: 2, 4 or 8.
    """

    def __init__(self, count: int, key_bytes: int) -> None:
        self.bits_left = key_bytes * 8
        self._dtype = _KEY_DTYPES[key_bytes]
        self._prefix = 0
        self._above = 0
        self._count = count
        self._histogram = torch.zeros(1 << _RADIX_BITS, dtype=torch.int64)

    def feed(self, keys: Tensor) -> None:
        """Count a chunk of the group, of any shape, in this round."""
        keys = keys.reshape(-1)
        if self.bits_left < keys.element_size() * 8:
            keys = keys[(keys >> self.bits_left) == self._prefix]
        digits = (keys >> (self.bits_left - _RADIX_BITS)) & ((1 << _RADIX_BITS) - 1)
        self._histogram += torch.bincount(digits.long(), minlength=1 << _RADIX_BITS).cpu()

    def end_round(self) -> None:
        """Fix the next 16 bits of the key."""
        from_top = self._histogram.flip(0).cumsum(0)
        rank = max(self._count, 1) - self._above  # if none is kept, the cut is the largest key
        position = int(torch.searchsorted(from_top, rank))
        self._above += int(from_top[position - 1]) if position else 0
        self._prefix = (self._prefix << _RADIX_BITS) | ((1 << _RADIX_BITS) - 1 - position)
        self.bits_left -= _RADIX_BITS
        self._histogram.zero_()

    def cut(self, device: torch.device) -> Cut:
        """The cut, as tensors of shape (1, 1), after the last round."""
        key = torch.tensor([[self._prefix]], dtype=self._dtype, device=device)
        return Cut(key, torch.tensor([[self._count - self._above]], device=device))
