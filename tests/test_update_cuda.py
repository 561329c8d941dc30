"""The Triton kernels of searches, on a GPU if present, else in Triton's interpreter."""

import pytest
import torch
from kernel_cases import DTYPES, weights
from test_solvers import inputs_of, layer, moments, slow_sparsegpt

from emp_llm.common import machine
from emp_llm.selection.reference import keep_mask, order_keys, row_cuts
from emp_llm.update import least_squares
from emp_llm.update import update as module
from emp_llm.update.update import sparsegpt

pytest.importorskip("triton")
# Without a GPU, conftest sets TRITON_INTERPRET before these imports.
update = pytest.importorskip("emp_llm.update.cuda_kernel")
selection = pytest.importorskip("emp_llm.selection.cuda_kernel")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize(
    ("count", "pattern", "block"),
    [
        (288, None, 16),
        (363, None, 128),  # a block wider than the matrix
        (0, None, 40),  # none of its columns, and a last block of 8
        (None, (2, 4), 16),
        (None, (5, 8), 128),
        (None, (3, 6), 16),
        (None, (8, 24), 16),
        (None, (1, 3), 128),
    ],
)
def test_sparsegpt_agrees_with_a_slow_one(
    monkeypatch: pytest.MonkeyPatch,
    count: int | None,
    pattern: tuple[int, int] | None,
    block: int,
) -> None:
    x = inputs_of("correlated", 48)
    x[:, 11] = 0
    weight = layer(12, 48)[0]
    monkeypatch.setattr(machine, "runs_triton", lambda device: True)
    launched = []
    launch = update.prune_columns
    monkeypatch.setattr(
        update, "prune_columns", lambda *given: launched.append(given) or launch(*given)
    )
    found = sparsegpt(
        weight.to(DEVICE), moments(x).to(DEVICE), count=count, pattern=pattern, block=block
    )
    expected, mask = slow_sparsegpt(weight, moments(x), count, pattern, block, 0.01)
    width = block if pattern is None else max(block // pattern[1], 1) * pattern[1]
    assert len(launched) == -(-48 // width)
    assert torch.equal(found.mask.cpu(), mask)
    torch.testing.assert_close(found.weight.cpu().double(), expected, rtol=1e-3, atol=1e-3)
    assert not bool(found.weight[~found.mask].any())


@pytest.mark.parametrize(
    ("pattern", "transposed"), [(None, False), (None, True), ((2, 4), True), ((7, 11), False)]
)
def test_a_block_with_equal_scores_and_many_rows(
    pattern: tuple[int, int] | None, transposed: bool
) -> None:
    """The kernel gives what the loop gives, in a slice of a matrix, whose rows may be the columns
    of the stored one.
    """
    generator = torch.Generator().manual_seed(0)
    columns = 44
    weight = torch.randint(-3, 4, (70, 90), generator=generator).float()
    mask = torch.rand(70, 90, generator=generator) < 0.5
    factor = torch.eye(columns) + 0.02 * torch.randn(columns, columns, generator=generator)
    factor = factor.triu_()
    factor.diagonal().fill_(1.0)
    here = slice(30, 30 + columns)
    results = []
    for prune in (module._prune_block, update.prune_columns):
        device = DEVICE if prune is update.prune_columns else "cpu"
        values, kept = weight.to(device, copy=True), mask.to(device, copy=True)
        if transposed:
            values, kept = values.T.contiguous().T, kept.T.contiguous().T
        errors = prune(values[:, here], kept[:, here], factor.to(device), pattern)
        results.append([each.cpu() for each in (values, kept, errors)])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cuts_of_rows_are_those_of_a_sort(dtype: torch.dtype) -> None:
    """None, all or any number of the keys are kept."""
    for number, kind in enumerate(("ties", "zeros", "subnormal", "huge")):
        columns = (1500, 100, 2, 1)[number]
        keys = order_keys(weights(kind, (4, columns), dtype, number))
        counts = torch.randint(columns + 1, (2, 4), generator=torch.Generator().manual_seed(number))
        counts[0, :2] = torch.tensor([0, columns])
        found = selection.cuts_of_rows(keys.to(DEVICE), counts.to(DEVICE))
        mask = selection.masks_of_rows(keys.to(DEVICE), counts[0].to(DEVICE))
        assert torch.equal(mask.cpu(), keep_mask(keys, row_cuts(keys, counts[0])[0])), kind
        for key, ties, cut in zip(*found, row_cuts(keys, *counts), strict=True):
            assert key.dtype == cut.key.dtype
            assert torch.equal(key.cpu(), cut.key[:, 0]), kind
            assert torch.equal(ties.cpu(), cut.ties[:, 0]), kind


@pytest.fixture
def bfloat16_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: products of bfloat16 with sums in float32."""
    if DEVICE == "cuda":
        return
    mm = torch.mm
    monkeypatch.setattr(torch, "mm", lambda a, b, out_dtype: mm(a.to(out_dtype), b.to(out_dtype)))
    monkeypatch.setattr(least_squares, "_multiplies_bfloat16", lambda device: True)


@pytest.mark.usefixtures("bfloat16_products")
@pytest.mark.parametrize(("parts", "close"), [(3, 1e-6), (2, 3e-5)])
def test_products_of_parts(parts: int, close: float) -> None:
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(90, 90, generator=generator) for _ in range(2))
    left[3] *= 1e20
    factors = [least_squares._in_bfloat16(each.to(DEVICE), parts) for each in (left, right)]
    assert [each.dtype for each in factors[0]] == [torch.bfloat16] * parts
    start = torch.ones(90, 90)
    found = least_squares._add_product_on_gpu(*factors, start.to(DEVICE, copy=True)).cpu()
    exact = left.double() @ right.double() + 1
    sizes = left.double().norm(dim=1)[:, None] * right.double().norm(dim=0)
    assert float(((found - exact) / sizes).abs().max()) < close


@pytest.mark.usefixtures("bfloat16_products")
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_moments_on_a_gpu(dtype: torch.dtype, wide: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where one side has float32, as the wanted outputs of a block have."""
    monkeypatch.setattr(least_squares, "_GPU_TOKENS", 100)
    monkeypatch.setattr(least_squares, "_GPU_PANEL", 30)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(230, 70, generator=generator).to(dtype).to(DEVICE)
    y = torch.randn(230, 40, generator=generator).to(torch.float32 if wide else dtype).to(DEVICE)
    add = least_squares._add_moments_on_gpu
    gram = least_squares.symmetric(add(x, x, add(x, x, None))).cpu()
    cross = add(y, x, None).cpu()
    x, y = x.cpu().double(), y.cpu().double()
    torch.testing.assert_close(gram.double() / 2, x.T @ x, rtol=0, atol=1e-4)
    torch.testing.assert_close(cross.double(), y.T @ x, rtol=0, atol=1e-4)
