"""The CPU kernel against the reference in plain torch: the same bits for any weights, budget, dtype and threads."""

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import BUDGETS, DTYPES, EDGES, FIELDS, KINDS, bits, norms_of, weights
from torch import Tensor

from emp_llm import effective_mask
from emp_llm.selection import available_kernels, effective, row_pruning
from emp_llm.selection.arithmetic.definitions import NonFiniteError
from emp_llm.selection.available_kernels import has_numba
from emp_llm.selection.budgets import Budget, EffectiveBudget, PatternBudget, TotalBudget
from emp_llm.selection.kernels.interface import RowFigures
from emp_llm.selection.row_pruning import has_kernel, prune_rows, prune_rows_plainly

pytest.importorskip("numba")


def assert_same(weight: Tensor, criterion: str, norms: Tensor | None, budget: Budget) -> None:
    """The kernel and the reference give the same bits for copies of `weight`."""
    assert has_kernel(weight, criterion, budget)
    ours, theirs = weight.clone(), weight.clone()
    found = prune_rows(ours, criterion, norms, budget, offset=17)
    wanted = prune_rows_plainly(theirs, criterion, norms, budget, offset=17)
    assert torch.equal(bits(ours), bits(theirs))
    for name in FIELDS:
        assert torch.equal(getattr(found, name), getattr(wanted, name)), name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("criterion", ["magnitude", "wanda"])
def test_every_budget_on_every_kind_of_weights(dtype: torch.dtype, kind: str, criterion: str) -> None:
    weight = weights(kind, (7, 520), dtype, 0)
    for budget in BUDGETS:
        assert_same(weight, criterion, norms_of(kind, 520) if criterion == "wanda" else None, budget)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("criterion", ["magnitude", "wanda"])
def test_edges(dtype: torch.dtype, criterion: str) -> None:
    for kind, shape, budget in EDGES:
        assert_same(weights(kind, shape, dtype, 0), criterion, torch.ones(shape[1]), budget)


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
def test_any_shape(height: int, width: int, dtype: torch.dtype, kind: str, wanda: bool, beta: float, seed: int) -> None:
    norms = torch.rand(width, generator=torch.Generator().manual_seed(seed)) if wanda else None
    weight = weights(kind, (height, width), dtype, seed)
    assert_same(weight, "wanda" if wanda else "magnitude", norms, EffectiveBudget(beta))


@pytest.mark.parametrize("width", [4096, 11008, 65536 + 3])
def test_long_rows(width: int) -> None:
    for criterion, norms in (("magnitude", None), ("wanda", torch.rand(width))):
        for kind in ("normal", "ties", "uniform", "zeros"):
            assert_same(weights(kind, (3, width), torch.bfloat16, width), criterion, norms, EffectiveBudget())


def test_threads_do_not_change_a_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("emp_llm.selection.kernels.cpu._PIECE", 1000)  # 19 pieces of two rows
    weight, norms = weights("normal", (37, 500), torch.bfloat16, 3), torch.rand(500)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            for budget in (EffectiveBudget(), TotalBudget(1000, 4000), PatternBudget(2, 4)):
                assert_same(weight, "wanda", norms, budget)
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
        prune_rows(weight, criterion, torch.rand(70) + 0.1, EffectiveBudget())
    assert torch.equal(weight.nan_to_num(7, 8, 9), before.nan_to_num(7, 8, 9))
    overflow = weights("huge", (2, 70), torch.float32, 0)
    with pytest.raises(NonFiniteError):
        prune_rows(overflow, "wanda", torch.full((70,), 1e10), EffectiveBudget())


def test_missing_norms_and_norms_of_another_shape() -> None:
    weight = weights("normal", (4, 70), torch.bfloat16, 0)
    with pytest.raises(ValueError, match="needs the norms"):
        prune_rows(weight, "wanda", None, EffectiveBudget())
    for wrong in (torch.rand(69), torch.rand(71), torch.rand(1), torch.rand(70, 1)):
        with pytest.raises(ValueError, match=r"norms have shape .* need \(70,\)"):
            prune_rows(weight, "wanda", wrong, EffectiveBudget())


def test_a_compiler_that_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A missing compiler is normal and gives no message; any other reason gives one warning."""

    def fails(module: str) -> None:
        raise RuntimeError("no folder for its cache")

    has_numba.cache_clear()
    monkeypatch.setitem(sys.modules, "emp_llm.selection.kernels.cpu", None)
    monkeypatch.delattr("emp_llm.selection.kernels.cpu", raising=False)
    try:
        assert not has_kernel(torch.ones(2, 2), "magnitude", EffectiveBudget())
        assert not caplog.messages
        has_numba.cache_clear()
        monkeypatch.setattr(available_kernels, "import_module", fails)
        for _ in range(2):
            assert not has_kernel(torch.ones(2, 2), "magnitude", EffectiveBudget())
        (message,) = caplog.messages
        assert "numba cannot be loaded (no folder for its cache)" in message
    finally:
        has_numba.cache_clear()


def test_without_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = weights("normal", (5, 64), torch.bfloat16, 0)
    compiled, plain = weight.clone(), weight.clone()
    with counted_kernel_calls() as calls:
        found = prune_rows(compiled, "magnitude", None, EffectiveBudget())
        assert len(calls) == 1
        monkeypatch.setattr(row_pruning, "has_numba", lambda: False)
        assert torch.equal(prune_rows(plain, "magnitude", None, EffectiveBudget()).kept, found.kept)
        assert len(calls) == 1
    assert torch.equal(plain, compiled)
    with pytest.raises(ValueError, match="not a multiple of 3"):
        prune_rows(weight, "magnitude", None, PatternBudget(1, 3))


@contextmanager
def counted_kernel_calls(least: int = 1) -> Iterator[list[torch.dtype]]:
    """The dtypes of the weights in each call of the CPU kernel; `effective_mask` may call it from `least` scores on."""
    calls: list[torch.dtype] = []
    compiled = row_pruning._prune_by_numba

    def counted(weight: Tensor, *more: Any) -> RowFigures:
        calls.append(weight.dtype)
        return compiled(weight, *more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_pruning, "_prune_by_numba", counted)
        patch.setattr(effective, "_LEAST_FOR_KERNEL", least)
        yield calls


@st.composite
def tensors_of_scores(draw: st.DrawFn) -> Tensor:
    """Signed scores of 1 to 3 dimensions, in any order in memory, with ties, zeros of both signs and groups of zeros."""
    shape = draw(st.lists(st.integers(1, 20), min_size=1, max_size=3))
    kind = draw(st.sampled_from(["normal", "ties", "heavy", "zeros", "negative zeros", "uniform"]))
    dtype = draw(st.sampled_from((*DTYPES, torch.float64)))
    scores = weights(kind, (shape[0], math.prod(shape[1:])), dtype, draw(st.integers(0, 1 << 30))).reshape(shape)
    return scores.permute(draw(st.permutations(range(len(shape)))))


@given(tensors_of_scores(), st.data(), st.sampled_from([0.3, 1.0, 1.7, 4.0]))
@settings(max_examples=200, deadline=None)
def test_effective_mask_by_kernel_and_in_plain_torch(scores: Tensor, data: st.DataObject, beta: float) -> None:
    dims = st.sets(st.integers(0, scores.dim() - 1), min_size=1).map(tuple)
    dim = data.draw(st.one_of(st.none(), st.integers(-scores.dim(), scores.dim() - 1), dims))
    before = scores.clone()
    with counted_kernel_calls() as calls:
        compiled = effective_mask(scores, dim, beta=beta)
        assert calls == ([] if scores.dtype == torch.float64 else [scores.dtype])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(row_pruning, "has_numba", lambda: False)
            plain = effective_mask(scores, dim, beta=beta)
        assert len(calls) <= 1
    assert compiled.dtype == torch.bool
    assert torch.equal(compiled, plain)
    assert torch.equal(scores, before)


def test_effective_mask_uses_the_kernel_for_large_tensors_of_order_2() -> None:
    scores = weights("ties", (1024, 1024), torch.bfloat16, 0)
    with counted_kernel_calls() as calls:
        effective_mask(scores, order=1.0)
        effective_mask(scores.double())
        assert calls == []
    with counted_kernel_calls(effective._LEAST_FOR_KERNEL) as calls:
        effective_mask(scores[:1000])
        assert calls == []
        effective_mask(scores)
        effective_mask(scores, dim=0)
        assert calls == [torch.bfloat16] * 2


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_effective_mask_of_non_finite_scores(dtype: torch.dtype, bad: float) -> None:
    scores = weights("normal", (4, 70), dtype, 0)
    scores[2, 69] = bad
    with counted_kernel_calls() as calls, pytest.raises(NonFiniteError, match="NaN or infinity"):
        effective_mask(scores)
    assert len(calls) == (dtype != torch.float64)
