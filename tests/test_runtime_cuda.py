"""Packed rows on CUDA against float64, on a GPU if present, else in Triton's interpreter; and
the choice of 2:4 weights.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import DTYPES, bits
from torch import Tensor, nn

from emp_llm.runtime import SparseLinear, loader
from emp_llm.runtime.packed_rows import pack_rows

pytest.importorskip("triton")
# Without a GPU, conftest sets TRITON_INTERPRET before these imports.
cuda = pytest.importorskip("emp_llm.runtime.cuda_kernel")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter rounds towards zero.
ULP = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 2**-23}


def matrix(columns: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Rows without values, full, with one value at either end, with negative zeros, large, and
    random ones.
    """
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(7, columns, generator=generator)
    weight[2:] *= torch.rand(5, columns, generator=generator) < 0.5
    weight[0] = 0
    weight[2, 1:], weight[3, :-1], weight[2, 0], weight[3, -1] = 0, 0, 2, -3
    weight[4, ::3] = -0.0
    weight[5] *= 300
    return weight.to(dtype)


def inputs(tokens: int, columns: int, dtype: torch.dtype, seed: int = 1) -> Tensor:
    return torch.randn(tokens, columns, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_close(found: Tensor, weight: Tensor, x: Tensor) -> None:
    """To one rounding of the result, and roundings of float32 in the sum."""
    w = weight.double()
    v = x.cpu().double()
    exact = v @ w.T
    size = v.abs() @ w.abs().T
    assert found.shape == exact.shape
    assert found.dtype == x.dtype
    allowed = ULP[x.dtype] * exact.abs() + 2**-21 * size + 1e-7
    assert bool(((found.cpu().double() - exact).abs() <= allowed).all())


def products(weight: Tensor) -> Callable[[Tensor], Tensor]:
    return cuda.CudaProducts(pack_rows(weight).to(DEVICE))  # type: ignore[no-any-return]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", [64, 1000])
def test_products(dtype: torch.dtype, columns: int) -> None:
    weight = matrix(columns, dtype)
    multiply = products(weight)
    turn = DTYPES.index(dtype) + columns
    for tokens in {1, (3, 16)[turn % 2], (17, 40)[turn % 2]}:
        x = inputs(tokens, columns, dtype).to(DEVICE)
        found = multiply(x)
        assert_close(found, weight, x)
        if tokens == 1:
            assert torch.equal(bits(multiply(x)), bits(found))


def test_inputs_of_other_dtypes_and_strides() -> None:
    for stored, given_dtype, tokens in (
        (DTYPES[0], DTYPES[2], 1),
        (DTYPES[2], DTYPES[0], 6),
        (DTYPES[1], DTYPES[2], 18),
    ):
        weight = matrix(65, stored)
        wide = inputs(2 * tokens, 100, given_dtype).to(DEVICE)
        for x in (wide[::2, 5:70], inputs(65, tokens, given_dtype).to(DEVICE).T):
            assert_close(products(weight)(x), weight, x)


@pytest.mark.filterwarnings("ignore:overflow encountered")  # from numpy, which the interpreter uses
def test_large_and_infinite_values() -> None:
    """A product that overflows is infinite, and an input that is not finite spoils only the rows
    that read it.
    """
    weight = torch.zeros(3, 70)
    weight[0, 3], weight[1, 69], weight[2, 4] = 3e38, 1, 1
    x = torch.ones(1, 70)
    x[0, 3], x[0, 68] = 10, float("nan")
    found = products(weight)(x.to(DEVICE)).cpu()
    assert found.tolist() == [[float("inf"), 1, 1]]


@pytest.mark.parametrize("tokens", [0, 1, 20])
def test_matrices_without_values(tokens: int) -> None:
    for rows, columns in ((0, 64), (5, 130)):
        found = products(torch.zeros(rows, columns))(torch.ones(tokens, columns, device=DEVICE))
        assert torch.equal(found.cpu(), torch.zeros(tokens, rows))


@settings(max_examples=12, deadline=None, database=None)
@given(
    st.integers(1, 12),
    st.integers(1, 140),
    st.sampled_from(DTYPES),
    st.sampled_from([1, 2, 4, 7, 16]),
    st.floats(0, 1),
    st.integers(0, 1 << 30),
)
def test_any_mask(
    rows: int, columns: int, dtype: torch.dtype, tokens: int, share: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator) * (
        torch.rand(rows, columns, generator=generator) < share
    )
    weight = weight.to(dtype)
    x = inputs(tokens, columns, dtype, seed).to(DEVICE)
    assert_close(products(weight)(x), weight, x)
    packed = pack_rows(weight).to(DEVICE)
    dense = cuda.expand_rows(cuda.device_rows(packed), 0, rows, dtype)
    assert torch.equal(bits(dense), bits(weight))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", [33, 64, 1000])
def test_expanded_rows_are_the_same_bits(dtype: torch.dtype, columns: int) -> None:
    weight = matrix(columns, dtype)
    bits(weight)[6, 7] = -1  # a NaN with all its bits
    packed = pack_rows(weight).to(DEVICE)
    rows = cuda.device_rows(packed)
    for first, last in ((0, 7), (3, 6), (6, 7), (4, 4)):
        assert torch.equal(
            bits(cuda.expand_rows(rows, first, last, dtype)), bits(weight[first:last])
        )
    assert torch.equal(cuda.expand_rows(rows, 0, 6, torch.float32).cpu(), weight[:6].float())


@pytest.mark.parametrize("dot", [False, True])
def test_rows_that_are_split(dot: bool) -> None:
    """Parts of rows are added in one order, also where the last part is short."""
    weight = matrix(300, torch.bfloat16)
    packed = pack_rows(weight).to(DEVICE)
    rows = cuda.device_rows(packed)
    x = inputs(3, 300, torch.bfloat16).to(DEVICE)
    sizes = cuda.ProductSizes(16 if dot else 4, 16 if dot else 8, 16, dot, 4, 128, 3)
    found = cuda.multiply(rows, x, sizes)
    assert_close(found, weight, x)
    assert torch.equal(found, cuda.multiply(rows, x, sizes))


def test_rows_too_long_for_starts_of_16_bits() -> None:
    for columns in (65_535, 70_001):
        weight = torch.ones(2, columns, dtype=torch.bfloat16)
        packed = pack_rows(weight).to(DEVICE)
        rows = cuda.device_rows(packed)
        starts = rows.starts.cpu().int() & (0xFFFF if rows.starts.dtype == torch.int16 else -1)
        assert torch.equal(starts, torch.arange(0, columns, 64, dtype=torch.int32).expand(2, -1))
        x = inputs(1, columns, torch.float32).to(DEVICE)
        # The interpreter takes long for many tiles, and a compiler for large ones.
        sizes = cuda.ProductSizes(1, 2, 16384, False, 8, 1 << 17, 1) if DEVICE == "cpu" else None
        assert_close(cuda.multiply(rows, x, sizes), weight, x)


def test_a_sparse_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes the kernel where Triton compiles, and torch where it does not."""
    weight = matrix(72, torch.float32)
    bias = nn.Parameter(torch.arange(7.0), requires_grad=False)
    x = inputs(6, 72, torch.float32).view(2, 3, 72).to(DEVICE)
    wanted = x.cpu() @ weight.T + bias
    monkeypatch.setattr(loader, "cpu_instructions", lambda dtype: None)
    for runs, name in ((True, "CudaProducts"), (False, "partial")):
        monkeypatch.setattr(loader, "runs_triton", lambda device, runs=runs: runs)
        layer = SparseLinear(pack_rows(weight), bias).to(DEVICE)
        assert torch.allclose(layer(x).cpu(), wanted, atol=1e-4)
        assert type(layer._products).__name__ == name
        assert torch.equal(layer.state_dict()["weight"].cpu(), weight)


def test_it_compiles_for_gpus() -> None:
    """Triton's compiler needs no GPU. It is stricter than the interpreter, and its output shows
    the arithmetic. Triton keeps its output by the source and the compiler; the folder is beside
    compiled Python files.
    """
    program = Path(__file__).parent / "compile_triton.py"
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(Path(__file__).parent / "__pycache__" / "triton")
    done = subprocess.run(
        [sys.executable, program],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
