"""Masks and figures of every budget against stored digests. A change of one bit anywhere fails a test.

The weights come from the raw integers of a generator whose stream numpy guarantees, so they are the same on every machine.
"""

import hashlib
from collections.abc import Callable, Iterable

import numpy as np
import pytest
import torch
from kernel_cases import Budget, effective, pattern, prune_plainly, prune_rows, ratio, total
from torch import Tensor

from emp_llm import effective_mask
from emp_llm.selection.reference import GroupSelector
from emp_llm.selection.rule import KeepRule, RowFigures

Prune = Callable[[Tensor, Tensor | None, KeepRule], RowFigures]
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
SHAPES = ((9, 360), (2, 5040))
BUDGETS: dict[str, tuple[Budget, str]] = {
    "effective": (effective(), "057ee29ece293b2f32ae50b926ebab40"),
    "effective, beta 0.6": (effective(0.6), "091074e1d222a18bdcd752dfd5ae73ce"),
    "effective, beta 1.7": (effective(1.7), "02dfac6c723538eb64e7ecf1cd1e9302"),
    "effective, order 1": (effective(order=1.0), "03bdb60d98d7db799a4bbbdd4c27dc28"),
    "effective, bfloat16": (effective(dtype="bfloat16"), "ca6d52495ac3fc38414e259fe2027a19"),
    "ratio": (ratio(0.5), "6bddcc7df9cc77b840701bd87d23aa93"),
    "ratio, nothing removed": (ratio(0.0), "63e7547132ac6b783eba8aad5d66dd87"),
    "total": (total(5000, 20_000, 360), "001f628073f553f8fb5efe87a66d48c3"),
    "parts": (total(4000, 20_000, 0), "43fa4a615f769fdf8665ed96931fec5a"),
    "pattern 2:4": (pattern(2, 4), "39b944818add14e7a9e1b9d21b344ab2"),
    "pattern 3:5": (pattern(3, 5), "629df1ca878adf9816d26be340a6eb48"),
    "pattern 70:90": (pattern(70, 90), "3cc178fa0aa84b7665cb0af630b8e0d5"),
}
GROUPS = {
    "effective": "a24346b6fd2c829d0d1ecaf65d3639aa",
    "effective, beta 0.6": "3e3781efa1d5c0705167f69eb765fa1b",
    "ratio": "330b410817a08199c1b4af12f6d6fdce",
    "total": "b631ab65d96d3741e9059767635e3048",
}
EFFECTIVE_MASKS = "0e240f915ba1646ea3eb03cb99e2ee00"


def raw_bytes(seed: int, count: int) -> np.ndarray:
    """Random bytes as float64, shape (count, 8)."""
    return np.random.PCG64(seed).random_raw(count).view(np.uint8).reshape(count, 8).astype(np.float64)


def weights(kind: str, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Nearly normal weights with outliers ("smooth"), few distinct values ("ties"), or mostly zeros of both signs ("zeros")."""
    raw = raw_bytes(shape[1], shape[0] * shape[1])
    values = (raw[:, :4].sum(1) - 510 + raw[:, 5] / 256 + raw[:, 6] / 65536) / 4096
    values[raw[:, 4] == 7] *= 64
    if kind == "ties":
        values = np.sign(values) * (raw[:, 4] % 3)
    elif kind == "zeros":
        values *= raw[:, 4] < 40
    values = values.reshape(shape)
    if kind == "zeros":
        values[::3] *= 0
    return torch.from_numpy(values).to(dtype)


def norms(columns: int) -> Tensor:
    """Norms with one outlier and one zero."""
    values = torch.from_numpy((1 + raw_bytes(7, columns)[:, 0]) / 16 + raw_bytes(8, columns)[:, 1] / 4096).float()
    values[columns // 3], values[columns // 2] = 3000.0, 0.0
    return values


def digest(tensors: Iterable[Tensor]) -> str:
    """The first half of the SHA-256 of the tensors' bytes."""
    found = hashlib.sha256()
    for tensor in tensors:
        tensor = tensor.contiguous()
        found.update((tensor if tensor.dtype == torch.bool else tensor.view(INTEGERS[tensor.element_size()])).numpy().tobytes())
    return found.hexdigest()[:32]


def pruned(budget: Budget, prune: Prune) -> Iterable[Tensor]:
    """Pruned weights and the figures of their rows, for every dtype, kind and criterion.

    The last bit of a logarithm may differ between processors, so orders other than 2 give only the weights, kept and zeros.
    """
    for dtype in DTYPES:
        for kind in ("smooth", "ties", "zeros"):
            for shape in SHAPES:
                for criterion in ("magnitude", "wanda"):
                    weight = weights(kind, shape, dtype)
                    figures = prune(weight, norms(shape[1]) if criterion == "wanda" else None, budget(shape))
                    yield weight
                    yield from list(figures)[: 6 if budget(shape).order == 2.0 else 2]


@pytest.mark.parametrize("prune", [prune_rows, prune_plainly], ids=["kernels", "plain"])
@pytest.mark.parametrize("name", BUDGETS)
def test_rows(name: str, prune: Prune) -> None:
    budget, expected = BUDGETS[name]
    assert digest(pruned(budget, prune)) == expected


def selected(budget: Budget) -> Iterable[Tensor]:
    """Masks and figures of matrices that are one group each, in blocks of 4 rows."""
    for dtype in DTYPES:
        for kind in ("smooth", "ties", "zeros"):
            blocks = weights(kind, SHAPES[0], dtype).abs().split(4)
            selector = GroupSelector(budget((1, SHAPES[0][0] * SHAPES[0][1])))
            for block in blocks:
                selector.add(block)
            while selector.searching():
                for block in blocks:
                    selector.search(block)
            for block in blocks:
                part = selector.select(block)
                yield from (part.mask, part.kept, part.kept_mass, part.mass)
            yield from (selector.moments.number(), torch.tensor(selector.effective_mass(), dtype=torch.float64))


@pytest.mark.parametrize("name", GROUPS)
def test_matrices_as_groups(name: str) -> None:
    assert digest(selected(BUDGETS[name][0])) == GROUPS[name]


def test_effective_masks() -> None:
    scores = [weights("smooth", SHAPES[0], dtype).reshape(9, 20, 18) for dtype in DTYPES]
    dims: tuple[int | tuple[int, ...] | None, ...] = (-1, 0, 1, (0, 2), None)
    masks = [effective_mask(s, dim, beta=beta) for s in scores for dim in dims for beta in (1.0, 0.6)]
    assert digest(masks) == EFFECTIVE_MASKS
