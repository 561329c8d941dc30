"""The row kernel for NVIDIA GPUs: launches the Triton programs of `cuda_cut`, which give the same bits as the reference.

Triton comes with the CUDA wheels of torch on Linux, so it needs no installation of its own. If the result goes to another
tensor, each weight is loaded from memory once and stored once. In place, it is loaded twice: the first pass checks that all
scores are finite, because a write cannot be undone.

A program reads its row several times, but only the first time from memory. As many rows are in progress as fit in the level 1
caches, or two on each multiprocessor if the rows are longer. Two rows of 65,536 16-bit weights on each of 132 multiprocessors
take 34 MB, and a level 2 cache of 40 MB or more holds them. Longer rows are pruned as well, but parts of them are loaded from
memory again. The constants were chosen from compiled code (registers, instructions for each weight), not from timings.
"""

import struct
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from emp_llm.selection.arithmetic.definitions import LANES, NonFiniteError
from emp_llm.selection.kernels import cuda_cut
from emp_llm.selection.kernels.interface import KeepRule, RowFigures

_INTEGERS = {2: torch.int16, 4: torch.int32}
_INFINITY = {torch.bfloat16: 0x7F80, torch.float16: 0x7C00, torch.float32: 0x7F800000}
# Rows up to this length are held in registers, 64 numbers in each of 64 threads. Longer rows are reread from the caches.
_HELD = 4096
_CHUNK = 1024
_REGISTERS = 128  # of a thread, so that 16 warps fit on a multiprocessor
# Bytes of a multiprocessor's level 1 cache for the rows in progress. If not even two rows fit, two are still in progress, so
# that one can work while the other waits for memory.
_CACHE = 160 * 1024


def prune_rows_on_gpu(weight: Tensor, norms: Tensor | None, rule: KeepRule, out: Tensor | None = None) -> RowFigures:
    """Prune rows by magnitude, or, with norms, by wanda.

    Args:
        weight: bfloat16, float16 or float32, shape (rows, columns), contiguous, not empty; on a GPU, or on any device in
            Triton's interpreter.
        norms: shape (columns,), for the criterion wanda; None: magnitude.
        rule: how many weights of each row to keep.
        out: receives the result; contiguous, shape, dtype and device of `weight`; the same tensor, or one without overlap.
            None: in place.

    Returns:
        Figures of the rows, as tensors on the device of the weights.

    Raises:
        NonFiniteError: scores hold NaN or infinity. Then `weight` is unchanged, but another `out` may be partly written.
        ValueError: the norms are of another shape, or `out` is not contiguous or does not match the weights.
    """
    flag, integers, floats = enqueue(weight, norms, rule, out)
    if int(flag):
        raise NonFiniteError("scores hold NaN or infinity")
    return RowFigures(*integers, *floats)


def enqueue(weight: Tensor, norms: Tensor | None, rule: KeepRule, out: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """As `prune_rows_on_gpu`, without waiting for the GPU.

    Returns:
        flag: int32, shape (1,); once the GPU has finished, not 0 if scores hold NaN or infinity.
        integers: int64, shape (2, rows): kept, zeros.
        floats: float64, shape (4, rows): kept_mass, mass, n_eff, s_eff.
    """
    out = weight if out is None else out
    _check_arguments(weight, norms, out)
    rows, columns = weight.shape
    device = weight.device
    bits, result = (tensor.detach().view(_INTEGERS[weight.element_size()]) for tensor in (weight, out))
    factors = None if norms is None else norms.detach().to(device, torch.float32).contiguous()
    n, m = rule.pattern or (0, 0)
    counts = _counts_on_device(rule, rows, device)
    flag = torch.zeros(1, dtype=torch.int32, device=device)
    integers = torch.empty(2, rows, dtype=torch.int64, device=device)
    floats = torch.empty(4, rows, dtype=torch.float64, device=device)
    kind = {
        "KIND": str(weight.dtype).removeprefix("torch."),
        "NORMS": norms is not None,
        "TOP": _INFINITY[weight.dtype if norms is None else torch.float32],
    }
    parameters = launch(rows, columns, weight.element_size(), m, _processors(device))
    out_of_place = result.data_ptr() != bits.data_ptr()
    with _on(device):
        if not out_of_place:
            cuda_cut.check_kernel[(rows,)](bits, factors, flag, columns, **kind, BLOCK=_CHUNK, num_warps=4)
        cuda_cut.prune_kernel[(parameters.programs,)](
            bits,
            result,
            factors,
            integers if counts is None else counts,  # not read if there are no counts
            flag,
            integers,
            floats,
            rows,
            columns,
            _bits_of(rule.beta or 0.0),
            n,
            BUDGET=_budget_code(rule),
            M=m,
            **kind,
            BLOCK=parameters.block,
            WHOLE=parameters.block >= columns,
            CHUNK=parameters.chunk,
            ALIGNED=columns % LANES == 0,
            OUT_OF_PLACE=out_of_place,
            num_warps=parameters.warps,
            maxnreg=_REGISTERS,
        )
    return flag, integers, floats


class Launch(NamedTuple):
    """Launch parameters: BLOCK and CHUNK of `cuda_cut.prune_kernel`, the number of programs, and the warps of each program."""

    block: int
    chunk: int
    programs: int
    warps: int


def launch(rows: int, columns: int, item: int, m: int, processors: int) -> Launch:
    """The launch parameters for a matrix.

    A program has two warps, one thread for each of the 64 lanes. More threads would only repeat the sums of the lanes.

    Args:
        rows, columns: of the matrix.
        item: bytes of a weight.
        m: of an N:M pattern, or 0.
        processors: number of multiprocessors of the GPU.
    """
    block = triton.next_power_of_2(max(columns, LANES))
    if block > _HELD:
        block = _CHUNK
    chunk = max(min(block, _CHUNK), triton.next_power_of_2(max(m, 1)))
    rows_at_once = max(_CACHE // (columns * item), 2)
    return Launch(block, chunk, min(rows, processors * rows_at_once), 1 if block <= 1024 and columns <= block else 2)


def _check_arguments(weight: Tensor, norms: Tensor | None, out: Tensor) -> None:
    columns = weight.shape[1]
    if out.shape != weight.shape or out.dtype != weight.dtype or out.device != weight.device or not out.is_contiguous():
        expected = f"{tuple(weight.shape)}, {weight.dtype}, {weight.device}"
        raise ValueError(f"out must be contiguous and match the weights: {expected}")
    if norms is not None and tuple(norms.shape) != (columns,):  # the kernel reads without checking bounds
        raise ValueError(f"norms have shape {tuple(norms.shape)}; weights with {columns} inputs need ({columns},)")


def _counts_on_device(rule: KeepRule, rows: int, device: torch.device) -> Tensor | None:
    if isinstance(rule.counts, int):
        return torch.full((rows,), rule.counts, dtype=torch.int64, device=device)  # nothing to copy from the CPU
    return None if rule.counts is None else torch.tensor(rule.counts, dtype=torch.int64).to(device)


def _budget_code(rule: KeepRule) -> int:
    """The BUDGET of `cuda_cut.prune_kernel` for a rule."""
    code = cuda_cut.GIVEN
    if rule.pattern is not None:
        code = cuda_cut.PATTERN
    elif rule.beta is not None:
        code = cuda_cut.EFFECTIVE if rule.beta == 1.0 else cuda_cut.BETA
    return int(code.value)


def _bits_of(value: float) -> int:
    """The bits of a float64. Triton would pass the number itself as a float32."""
    (bits,) = struct.unpack("<q", struct.pack("<d", value))
    return int(bits)


def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def _on(device: torch.device) -> AbstractContextManager[object]:
    """A context in which Triton launches on the GPU of the weights, which need not be the current one."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
