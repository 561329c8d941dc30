"""The Triton kernel against the reference in plain torch: the same bits. On a GPU if present, else in the interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import BUDGETS, DTYPES, EDGES, FIELDS, KINDS, bits, norms_of, weights
from torch import Tensor

from emp_llm.selection.arithmetic.definitions import NonFiniteError
from emp_llm.selection.available_kernels import has_triton
from emp_llm.selection.budgets import Budget, EffectiveBudget, PatternBudget, RatioBudget
from emp_llm.selection.kernels.interface import KeepRule
from emp_llm.selection.row_pruning import has_kernel, prune_rows, prune_rows_plainly

pytest.importorskip("triton")
# Without a GPU, conftest sets TRITON_INTERPRET before this import.
cuda = pytest.importorskip("emp_llm.selection.kernels.cuda")
EFFECTIVE = KeepRule(beta=1.0)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def assert_same(weight: Tensor, norms: Tensor | None, budget: Budget, in_place: bool = True) -> None:
    """The kernel and the reference give the same bits for copies of `weight`."""
    ours, theirs = weight.to(DEVICE, copy=True), weight.clone()
    out = None if in_place else torch.full_like(ours, 7)
    found = cuda.prune_rows_on_gpu(ours, norms, budget.keep_rule(weight.shape, 17), out)
    wanted = prune_rows_plainly(theirs, "magnitude" if norms is None else "wanda", norms, budget, 17)
    assert torch.equal(bits(ours if out is None else out), bits(theirs))
    assert out is None or torch.equal(bits(ours), bits(weight))
    for name, values in zip(FIELDS, found, strict=True):
        assert values.dtype == getattr(wanted, name).dtype
        assert torch.equal(values.cpu(), getattr(wanted, name)), name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_weights(dtype: torch.dtype, kind: str) -> None:
    weight, norms = weights(kind, (2 if kind == "zeros" else 1, 90), dtype, 0), norms_of(kind, 90)
    odd = (KINDS.index(kind) + DTYPES.index(dtype)) % 2 == 1
    assert_same(weight, norms, EffectiveBudget(1.7 if odd else 1.0), in_place=odd)
    assert_same(weight, None, EffectiveBudget(1.0 if odd else 1.7), in_place=not odd)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("budget", BUDGETS, ids=str)
def test_every_budget(dtype: torch.dtype, budget: Budget) -> None:
    if (BUDGETS.index(budget) + DTYPES.index(dtype)) % 2:
        assert_same(weights("normal", (1, 120), dtype, 2), torch.rand(120) + 0.1, budget)
    else:
        assert_same(weights("ties", (1, 120), dtype, 2), None, budget)


@given(
    st.integers(1, 3),
    st.integers(1, 200),
    st.sampled_from(DTYPES),
    st.sampled_from(["normal", "ties", "heavy", "zeros"]),
    st.booleans(),
    st.floats(0.05, 3),
    st.booleans(),
    st.integers(0, 1 << 30),
)
@settings(max_examples=25, deadline=None, database=None)
def test_any_shape(
    height: int, width: int, dtype: torch.dtype, kind: str, wanda: bool, beta: float, in_place: bool, seed: int
) -> None:
    norms = torch.rand(width, generator=torch.Generator().manual_seed(seed)) if wanda else None
    assert_same(weights(kind, (height, width), dtype, seed), norms, EffectiveBudget(beta), in_place)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_edges(dtype: torch.dtype) -> None:
    for number, (kind, shape, budget) in enumerate(EDGES):
        norms = torch.ones(shape[1]) if (number + DTYPES.index(dtype)) % 2 else None
        assert_same(weights(kind, shape, dtype, 0), norms, budget)


@pytest.mark.parametrize("width", [4096, 5003])
def test_long_rows(width: int) -> None:
    norms = torch.rand(width, generator=torch.Generator().manual_seed(1))
    assert_same(weights("normal", (1, width), torch.bfloat16, width), norms, EffectiveBudget())
    if width == 4096:
        assert_same(weights("normal", (1, width), torch.bfloat16, width), None, RatioBudget(0.5))
    else:
        assert_same(weights("ties", (1, width), torch.float32, width), None, EffectiveBudget(0.7), in_place=False)


def test_a_very_long_row() -> None:
    columns = 65536 + 3 if DEVICE == "cuda" else 12_003
    assert_same(weights("normal", (1, columns), torch.bfloat16, 0), None, EffectiveBudget())


@pytest.mark.parametrize("rotation", range(3))
def test_rows_in_pieces(monkeypatch: pytest.MonkeyPatch, rotation: int) -> None:
    """Rows too long for the registers, and N:M groups that do not end where a piece of the row ends."""
    monkeypatch.setattr(cuda, "_HELD", 64)
    monkeypatch.setattr(cuda, "_CHUNK", 64)
    first, second, third = DTYPES[rotation], DTYPES[rotation - 1], DTYPES[rotation - 2]
    assert_same(weights("normal", (1, 200), first, 0), torch.rand(200) + 0.1, EffectiveBudget(0.6))
    assert_same(weights("normal", (2, 129), second, 4), None, EffectiveBudget(0.6))
    assert_same(weights("ties", (1, 192), third, 1), None, EffectiveBudget())
    assert_same(weights("zeros", (2, 129), first, 2), None, RatioBudget(0.3))
    assert_same(weights("ties", (1, 130), second, 3), None, PatternBudget(3, 5))


def test_groups_of_a_pattern_longer_than_a_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "_HELD", 64)
    monkeypatch.setattr(cuda, "_CHUNK", 64)
    assert_same(weights("normal", (1, 2 * 90), torch.float16, 0), None, PatternBudget(40, 90))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_weights_stay_unchanged(dtype: torch.dtype, bad: float) -> None:
    weight = weights("normal", (3, 70), dtype, 0)
    weight[1, 69] = bad
    before = weight.clone()
    for norms in (None, torch.rand(70) + 0.1):
        for out in (None, torch.empty_like(weight).to(DEVICE)):
            given_weight = weight.to(DEVICE)
            with pytest.raises(NonFiniteError):
                cuda.prune_rows_on_gpu(given_weight, norms, EFFECTIVE, out=out)
            assert torch.equal(bits(given_weight), bits(before))


def test_a_nan_in_a_row_that_is_pruned_after_others() -> None:
    weight = weights("normal", (2, 1100), torch.bfloat16, 0).to(DEVICE)
    weight[0, 3] = float("nan")  # the last row is pruned first
    before = bits(weight).clone()
    with pytest.raises(NonFiniteError):
        cuda.prune_rows_on_gpu(weight, None, EFFECTIVE)
    assert torch.equal(bits(weight), before)


@pytest.mark.filterwarnings("ignore:overflow encountered")  # from numpy, which the interpreter uses
def test_scores_that_overflow() -> None:
    weight = weights("huge", (2, 70), torch.float32, 0).to(DEVICE)
    with pytest.raises(NonFiniteError):
        cuda.prune_rows_on_gpu(weight, torch.full((70,), 1e10), EFFECTIVE)


def test_norms_and_outputs_of_another_shape() -> None:
    weight = weights("normal", (4, 70), torch.bfloat16, 0).to(DEVICE)
    for wrong in (torch.rand(69), torch.rand(1), torch.rand(70, 1)):
        with pytest.raises(ValueError, match=r"norms have shape .* need \(70,\)"):
            cuda.prune_rows_on_gpu(weight, wrong, EFFECTIVE)
    with pytest.raises(ValueError, match="not a multiple of 3"):
        PatternBudget(1, 3).keep_rule(weight.shape)
    with pytest.raises(ValueError, match="out must be contiguous"):
        cuda.prune_rows_on_gpu(weight, None, EFFECTIVE, out=weight.float())


def test_launch_parameters() -> None:
    for columns in (1, 64, 520, 4096, 4097, 11008, 65536, 200_000):
        for m in (0, 4, 5, 1100):
            how = cuda.launch(5000, columns, 2, m, 132)
            assert how.block >= 64
            assert how.chunk >= max(64, m)
            assert 1 <= how.programs <= 5000
    assert cuda.launch(3, 4096, 2, 0, 132).programs == 3
    assert cuda.launch(10**6, 65536, 2, 0, 132).programs == 264


def test_pruning_to_another_tensor() -> None:
    weight, out = weights("normal", (3, 64), torch.bfloat16, 0), torch.empty(3, 64, dtype=torch.bfloat16)
    before, pruned = weight.clone(), weight.clone()
    prune_rows(pruned, "magnitude", None, EffectiveBudget())
    for room in (out, torch.empty(64, 3, dtype=torch.bfloat16).t()):
        prune_rows(weight, "magnitude", None, EffectiveBudget(), out=room)
        assert torch.equal(room, pruned)
        assert torch.equal(weight, before)
    for wrong in (out.float(), out[:2], torch.empty(1, 64, dtype=torch.bfloat16)):
        with pytest.raises(ValueError, match="out must match the weights"):
            prune_rows(weight, "magnitude", None, EffectiveBudget(), out=wrong)


def test_it_compiles_for_gpus(tmp_path: Path) -> None:
    """Triton's compiler needs no GPU. It is stricter than the interpreter, and its output shows the arithmetic."""
    program = Path(__file__).parent / "compile_triton.py"
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run([sys.executable, program], env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
class TestOnGpu:
    """`prune_rows` and the reference on a GPU, against the results of the CPU."""

    def check(self, weight: Tensor, criterion: str, norms: Tensor | None, budget: Budget) -> None:
        assert has_kernel(weight.cuda(), criterion, budget)
        results = []
        for device, prune in (("cpu", prune_rows), ("cuda", prune_rows), ("cuda", prune_rows_plainly)):
            pruned = weight.to(device, copy=True)
            given_norms = None if norms is None else norms.to(device)
            results.append((pruned, prune(pruned, criterion, given_norms, budget, 17)))
        (reference, wanted), *others = results
        for pruned, found in others:
            assert torch.equal(bits(pruned), bits(reference))
            for name in FIELDS:
                assert torch.equal(getattr(found, name).cpu(), getattr(wanted, name)), name

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("shape", [(300, 520), (40, 4096), (9, 11008), (3, 65536 + 3)])
    def test_cpu_and_cuda(self, dtype: torch.dtype, kind: str, shape: tuple[int, int]) -> None:
        norms = torch.rand(shape[1], generator=torch.Generator().manual_seed(1))
        for budget in BUDGETS:
            if not isinstance(budget, PatternBudget) or shape[1] % budget.m == 0:
                self.check(weights(kind, shape, dtype, 0), "magnitude", None, budget)
                self.check(weights(kind, shape, dtype, 0), "wanda", norms, budget)

    def test_non_finite_weights_stay_unchanged(self) -> None:
        weight = weights("normal", (5000, 4096), torch.bfloat16, 0).cuda()
        weight[0, 4095] = float("nan")
        before = weight.clone()
        with pytest.raises(NonFiniteError):
            prune_rows(weight, "magnitude", None, EffectiveBudget())
        assert torch.equal(bits(weight), bits(before))


def test_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    has_triton.cache_clear()
    monkeypatch.setitem(sys.modules, "emp_llm.selection.kernels.cuda", None)
    monkeypatch.delattr("emp_llm.selection.kernels.cuda", raising=False)
    try:
        assert not has_triton()
    finally:
        has_triton.cache_clear()
