"""The CPU kernel against the reference in plain torch: the same bits for any weights, budget,
dtype and threads.
"""

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import (
    BUDGETS,
    DTYPES,
    EDGES,
    FIELDS,
    KINDS,
    Budget,
    bits,
    effective,
    norms_of,
    pattern,
    prune_plainly,
    prune_rows,
    total,
    weights,
)
from torch import Tensor

from emp_llm import effective_mask
from emp_llm.selection import effective as algorithm
from emp_llm.selection import rows
from emp_llm.selection.rows import has_kernel, has_numba
from emp_llm.selection.rule import KeepRule, NonFiniteError, RowFigures

pytest.importorskip("numba")


def assert_same(weight: Tensor, norms: Tensor | None, budget: Budget) -> None:
    """The compiled kernel and the reference give the same bits for copies of `weight`."""
    rule = budget((weight.shape[0], weight.shape[1]))
    assert has_kernel(weight, rule)
    plain = weight.clone()
    wanted = prune_plainly(plain, norms, rule)
    pruned = weight.clone()
    found = prune_rows(pruned, norms, rule)
    assert torch.equal(bits(pruned), bits(plain))
    for field in FIELDS:
        assert torch.equal(getattr(found, field), getattr(wanted, field)), field


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("criterion", ["magnitude", "wanda"])
def test_every_budget_on_every_kind_of_weights(
    dtype: torch.dtype, kind: str, criterion: str
) -> None:
    weight = weights(kind, (7, 520), dtype, 0)
    for budget in BUDGETS:
        assert_same(weight, norms_of(kind, 520) if criterion == "wanda" else None, budget)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("criterion", ["magnitude", "wanda"])
def test_edges(dtype: torch.dtype, criterion: str) -> None:
    for kind, shape, budget in EDGES:
        assert_same(
            weights(kind, shape, dtype, 0),
            torch.ones(shape[1]) if criterion == "wanda" else None,
            budget,
        )


@given(
    st.integers(1, 9),
    st.integers(1, 300),
    st.sampled_from(DTYPES),
    st.sampled_from(["normal", "ties", "heavy", "zeros"]),
    st.booleans(),
    st.floats(0.05, 3),
    st.integers(0, 1 << 30),
)
@settings(max_examples=150, deadline=None)
def test_any_shape(
    height: int, width: int, dtype: torch.dtype, kind: str, by_norms: bool, beta: float, seed: int
) -> None:
    norms = torch.rand(width, generator=torch.Generator().manual_seed(seed)) if by_norms else None
    weight = weights(kind, (height, width), dtype, seed)
    assert_same(weight, norms, effective(beta))


@pytest.mark.parametrize("width", [4096, 11008, 65536 + 3])
def test_long_rows(width: int) -> None:
    for norms in (None, torch.rand(width)):
        for kind in ("normal", "ties", "uniform", "zeros"):
            assert_same(weights(kind, (3, width), torch.bfloat16, width), norms, effective())


def test_threads_do_not_change_a_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("emp_llm.selection.cpu_kernel._PIECE", 1000)  # up to ten pieces
    weight = weights("normal", (37, 500), torch.bfloat16, 3)
    norms = torch.rand(500)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            for budget in (effective(), total(1000, 4000), pattern(2, 4)):
                assert_same(weight, norms, budget)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("criterion", ["magnitude", "wanda"])
def test_non_finite_weights_stay_unchanged(dtype: torch.dtype, bad: float, criterion: str) -> None:
    weight = weights("normal", (4, 70), dtype, 0)
    weight[2, 69] = bad
    before = weight.clone()
    with pytest.raises(NonFiniteError):
        prune_rows(
            weight, torch.rand(70) + 0.1 if criterion == "wanda" else None, KeepRule(beta=1.0)
        )
    assert torch.equal(weight.nan_to_num(7, 8, 9), before.nan_to_num(7, 8, 9))
    overflow = weights("huge", (2, 70), torch.float32, 0)
    with pytest.raises(NonFiniteError):
        prune_rows(overflow, torch.full((70,), 1e10), KeepRule(beta=1.0))


def test_a_compiler_that_cannot_be_loaded(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A missing compiler is normal and gives no message; any other reason gives one warning."""

    class Broken:
        def find_spec(self, name: str, *_: object) -> None:
            if name == "emp_llm.selection.cpu_kernel":
                raise RuntimeError("no folder for its cache")

    monkeypatch.delattr("emp_llm.selection.cpu_kernel", raising=False)
    monkeypatch.setitem(sys.modules, "emp_llm.selection.cpu_kernel", None)
    try:
        has_numba.cache_clear()
        assert not has_kernel(torch.ones(2, 2), KeepRule(beta=1.0))
        assert not caplog.messages
        has_numba.cache_clear()
        monkeypatch.delitem(sys.modules, "emp_llm.selection.cpu_kernel")
        monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
        for _ in range(2):
            assert not has_kernel(torch.ones(2, 2), KeepRule(beta=1.0))
        (message,) = caplog.messages
        assert "numba cannot be loaded (no folder for its cache)" in message
    finally:
        has_numba.cache_clear()


@contextmanager
def counted_kernel_calls() -> Iterator[list[str]]:
    """The dtypes of the weights in each call of the CPU kernel, which `effective_mask` calls for
    tensors of any size.
    """
    calls = []
    compiled = rows.prune_words

    def counted(words: Any, dtype: str, *more: Any) -> RowFigures:
        calls.append(dtype)
        return compiled(words, dtype, *more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "prune_words", counted)
        patch.setattr(algorithm, "_LEAST_FOR_KERNEL", 1)
        yield calls


@st.composite
def tensors_of_scores(draw: st.DrawFn) -> Tensor:
    """Signed scores of 1 to 3 dimensions, in any order in memory, with ties, zeros of both signs
    and groups of zeros.
    """
    shape = draw(st.lists(st.integers(1, 20), min_size=1, max_size=3))
    kind = draw(st.sampled_from(["normal", "ties", "heavy", "zeros", "negative zeros", "uniform"]))
    dtype = draw(st.sampled_from((*DTYPES, torch.float64)))
    scores = weights(
        kind, (shape[0], math.prod(shape[1:])), dtype, draw(st.integers(0, 1 << 30))
    ).reshape(shape)
    return scores.permute(draw(st.permutations(range(len(shape)))))


@given(tensors_of_scores(), st.data(), st.sampled_from([0.3, 1.0, 1.7, 4.0]))
@settings(max_examples=200, deadline=None)
def test_effective_mask_by_kernel_and_in_plain_torch(
    scores: Tensor, data: st.DataObject, beta: float
) -> None:
    dims = st.sets(st.integers(0, scores.dim() - 1), min_size=1).map(tuple)
    dim = data.draw(st.one_of(st.none(), st.integers(-scores.dim(), scores.dim() - 1), dims))
    before = scores.clone()
    with counted_kernel_calls() as calls:
        compiled = effective_mask(scores, dim, beta=beta)
        assert calls == ([] if scores.dtype == torch.float64 else [rows._name(scores)])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rows, "has_numba", lambda: False)
            plain = effective_mask(scores, dim, beta=beta)
        assert len(calls) <= 1
    assert compiled.dtype == torch.bool
    assert torch.equal(compiled, plain)
    assert torch.equal(scores, before)
