"""Rows pruned on a GPU: launches the Triton kernels of `cuda_cut`, in the bits of the plain reference.

Triton comes with the CUDA wheels of torch on Linux, so nothing has to be installed for this; without it `rows.prune_rows` takes
the reference. A weight is loaded from memory once and stored once if the result goes to another tensor. In place it is loaded
twice, first to see that all scores are finite: what has been written cannot be taken back.

A program reads its row several times, but for the first time from the caches. Rows under way at once are as many as fit in the
level 1 caches, and two on each processor where they are longer: of 65,536 16-bit weights that is 34 MB on 132 processors, which
a level 2 cache of 40 MB or more holds. Any row is pruned, but of longer ones parts are loaded again. The numbers here were
chosen by looking at compiled code (registers, instructions for each weight), not by timing.
"""

import struct
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from emp_llm.selection.budgets import Budget, EffectiveBudget, PartsBudget, PatternBudget, RatioBudget, TotalBudget
from emp_llm.selection.criteria import check_norms
from emp_llm.selection.hill import Moments, NonFiniteError
from emp_llm.selection.kernels import cuda_cut
from emp_llm.selection.sums import LANES

_INTEGERS = {2: torch.int16, 4: torch.int32}
_INFINITY = {torch.bfloat16: 0x7F80, torch.float16: 0x7C00, torch.float32: 0x7F800000}
# Rows up to this are held in registers, 64 numbers in each of 64 threads; longer ones are read again from the caches.
_HELD = 4096
_CHUNK = 1024
_REGISTERS = 128  # of a thread: for 16 warps on a processor
# Of a processor's level 1 cache: rows under way at once should fit, or else be two, to have something to do while one waits.
_CACHE = 160 * 1024


def prune_rows(
    weight: Tensor, norms: Tensor | None, budget: Budget, offset: int = 0, out: Tensor | None = None
) -> tuple[Tensor, ...]:
    """Prune rows by magnitude, or, given norms, by wanda; arguments as for `rows.prune_rows`.

    Args:
        weight: bfloat16, float16 or float32, shape (rows, columns), contiguous, not empty; on a GPU, or anywhere if Triton runs
            in its interpreter.
        norms: shape (columns,); None: magnitude.
        budget: effective, ratio, total, parts or pattern, of order 2 and float64.
        offset: how many target weights come before this block.
        out: as `weight`, contiguous, the same tensor or one that does not overlap it; None: in place.

    Returns:
        kept, zeros (int64) and kept_mass, mass, n_eff, s_eff (float64), each of shape (rows,).

    Raises:
        NonFiniteError: scores hold NaN or infinity; `weight` is as it was then, and another `out` is of no use.
        ValueError: an N:M pattern whose M does not divide the columns; norms or out of another shape.
    """
    flag, integers, floats = enqueue(weight, norms, budget, offset, out)
    if int(flag):
        raise NonFiniteError("scores hold NaN or infinity")
    return (*integers, *floats)


def enqueue(
    weight: Tensor, norms: Tensor | None, budget: Budget, offset: int = 0, out: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """As `prune_rows`, without waiting for the GPU.

    Returns:
        flag: int32, shape (1,), not 0 in the end if scores hold NaN or infinity; integers: int64, shape (2, rows): kept, zeros;
        floats: float64, shape (4, rows): kept_mass, mass, n_eff, s_eff.
    """
    out = weight if out is None else out
    _check_arguments(weight, norms, budget, out)
    rows, columns = weight.shape
    device = weight.device
    bits, room = (tensor.detach().view(_INTEGERS[weight.element_size()]) for tensor in (weight, out))
    factors = None if norms is None else norms.detach().to(device, torch.float32).contiguous()
    pattern = budget if isinstance(budget, PatternBudget) else None
    counts = _given_counts(budget, rows, columns, offset, device)
    flag = torch.zeros(1, dtype=torch.int32, device=device)
    integers = torch.empty(2, rows, dtype=torch.int64, device=device)
    floats = torch.empty(4, rows, dtype=torch.float64, device=device)
    kind = {
        "KIND": str(weight.dtype).removeprefix("torch."),
        "NORMS": norms is not None,
        "TOP": _INFINITY[weight.dtype if norms is None else torch.float32],
    }
    how = launch(rows, columns, weight.element_size(), pattern.m if pattern else 0, _processors(device))
    apart = room.data_ptr() != bits.data_ptr()
    with _on(device):
        if not apart:
            cuda_cut.check[(rows,)](bits, factors, flag, columns, **kind, BLOCK=_CHUNK, num_warps=4)
        cuda_cut.prune[(how.programs,)](
            bits,
            room,
            factors,
            integers if counts is None else counts,  # not read where there are none
            flag,
            integers,
            floats,
            rows,
            columns,
            _bits_of(budget.beta) if isinstance(budget, EffectiveBudget) else 0,
            pattern.n if pattern else 0,
            BUDGET=_code(budget),
            M=pattern.m if pattern else 0,
            **kind,
            BLOCK=how.block,
            WHOLE=how.block >= columns,
            CHUNK=how.chunk,
            EVEN=columns % LANES == 0,
            APART=apart,
            num_warps=how.warps,
            maxnreg=_REGISTERS,
        )
    return flag, integers, floats


class Launch(NamedTuple):
    """How the kernel is launched: BLOCK and CHUNK of `cuda_cut.prune`, how many programs, and the warps of each."""

    block: int
    chunk: int
    programs: int
    warps: int


def launch(rows: int, columns: int, item: int, m: int, processors: int) -> Launch:
    """How to launch the kernel.

    Two warps, a thread for each of the 64 lanes: what is added up lane by lane would only be done twice by more.

    Args:
        rows, columns: of the matrix; item: bytes of a weight; m: of an N:M pattern, or 0.
        processors: multiprocessors of the GPU.
    """
    block = triton.next_power_of_2(max(columns, LANES))
    if block > _HELD:
        block = _CHUNK
    chunk = max(min(block, _CHUNK), triton.next_power_of_2(max(m, 1)))
    at_once = max(_CACHE // (columns * item), 2)
    return Launch(block, chunk, min(rows, processors * at_once), 1 if block <= 1024 and columns <= block else 2)


def _check_arguments(weight: Tensor, norms: Tensor | None, budget: Budget, out: Tensor) -> None:
    columns = weight.shape[1]
    if out.shape != weight.shape or out.dtype != weight.dtype or out.device != weight.device or not out.is_contiguous():
        raise ValueError(f"out must be contiguous and as the weights: {tuple(weight.shape)}, {weight.dtype}, {weight.device}")
    if norms is not None:
        check_norms(norms, columns)  # the kernel does not look where it reads
    if isinstance(budget, PatternBudget):
        budget.kept_of(columns)  # raises where M does not divide them


def _given_counts(budget: Budget, rows: int, columns: int, offset: int, device: torch.device) -> Tensor | None:
    """The counts of a budget that needs the sizes of the rows and nothing else of them; counted on the CPU."""
    if not isinstance(budget, RatioBudget | TotalBudget | PartsBudget):
        return None
    alike = isinstance(budget, RatioBudget)
    size = torch.full((1 if alike else rows,), columns, dtype=torch.int64)
    nothing = torch.zeros(size.shape, dtype=torch.float64)
    counts = budget.counts(Moments(2.0, size, nothing + 1, nothing, nothing), offset)
    if not alike:
        return counts.to(device)
    return torch.full((rows,), int(counts), dtype=torch.int64, device=device)  # the same for all, and nothing to copy


def _code(budget: Budget) -> int:
    """Which of the kernel's budgets this is."""
    code = cuda_cut.GIVEN
    if isinstance(budget, PatternBudget):
        code = cuda_cut.PATTERN
    elif isinstance(budget, EffectiveBudget):
        code = cuda_cut.EFFECTIVE if budget.beta == 1.0 else cuda_cut.BETA
    return int(code.value)


def _bits_of(value: float) -> int:
    """The bits of a float64: Triton would pass the number itself as a float32."""
    (bits,) = struct.unpack("<q", struct.pack("<d", value))
    return int(bits)


def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def _on(device: torch.device) -> AbstractContextManager[object]:
    """Triton launches on the current GPU, which need not be that of the weights."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
