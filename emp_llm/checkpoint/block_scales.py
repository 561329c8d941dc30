"""FP8 matrices with a scale for each block: DeepSeek-V3, Qwen3-FP8, and FineGrainedFP8 of transformers.

A weight is its 8-bit float times the scale of its block. Scales and bits are kept when weights are removed, and zero has exact
bits, so a pruned matrix stays FP8.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from emp_llm.checkpoint.safetensors_header import StoredTensor
from emp_llm.checkpoint.words import read_words
from emp_llm.common.errors import UserError
from emp_llm.storage.direct_io import FileReader

if TYPE_CHECKING:
    from torch import Tensor

FP8_DTYPE = "F8_E4M3"
_SCALE_DTYPES = ("F32", "BF16", "F16", "F8_E8M0")


@dataclass(frozen=True)
class BlockScales:
    """The scales of a matrix.

    Attributes:
        stored: the tensor of the scales: one for each block, or a single one.
        rows, columns: of a block; the last blocks may be smaller.
    """

    stored: StoredTensor
    rows: int
    columns: int

    def dequantised(self, first: int, weights: "Tensor") -> "Tensor":
        """Rows of the matrix times their scales: float32, each product rounded once.

        Args:
            first: number of the first row.
            weights: float8_e4m3fn, shape (rows, inputs).

        Raises:
            UserError: a scale is not finite, or below zero.
        """
        import torch

        scales = _values(self.stored).to(weights.device)
        blocks = torch.arange(first, first + weights.shape[0], device=weights.device) // self.rows
        by_column = scales[blocks].repeat_interleave(self.columns, dim=1)[:, : weights.shape[1]]
        return weights.float() * by_column


def block_scales(weight: StoredTensor, tensors: dict[str, StoredTensor], config: dict[str, Any]) -> BlockScales:
    """The scales of an FP8 matrix of a checkpoint.

    Args:
        weight: of two dimensions.
        tensors: of the checkpoint, by name.
        config: its config.json.

    Raises:
        UserError: the checkpoint has no scales for the matrix, or their shape does not fit.
    """
    name = f"{weight.name}_scale_inv"
    scales = tensors.get(name)
    if scales is None:
        raise UserError(
            f"{weight.shard}: {weight.name} is stored as FP8 without its scales {name}, so its weights are unknown. Prune the "
            "original model of 16 bits and quantise the result."
        )
    settings = config.get("quantization_config")
    size = settings.get("weight_block_size") if isinstance(settings, dict) else None
    rows, columns = _lengths(weight.shape if scales.numel == 1 else size)
    fits = scales.numel == 1 or scales.shape == (-(-weight.shape[0] // rows), -(-weight.shape[1] // columns))
    if not fits or scales.dtype not in _SCALE_DTYPES:
        problem = f"{name} is {scales.dtype} {list(scales.shape)}, which does not fit a weight of {list(weight.shape)}"
        raise UserError(
            f"{scales.shard}: {problem} in blocks of {size} (weight_block_size in config.json). Download the model again."
        )
    return BlockScales(scales, rows, columns)


def _lengths(size: Any) -> tuple[int, int]:
    """Two lengths from config.json; (1, 1), which fits no scales, if they are something else."""
    if isinstance(size, list | tuple) and len(size) == 2 and all(type(length) is int and length > 0 for length in size):
        return size[0], size[1]
    return 1, 1


@lru_cache(maxsize=4)
def _values(stored: StoredTensor) -> "Tensor":
    """Scales as float32, shape (blocks of rows, blocks of columns)."""
    import torch

    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu)
    with FileReader(stored.shard) as file:
        words = read_words(file, stored, 0, stored.numel)
    scales = torch.from_numpy(words).view(dtypes[_SCALE_DTYPES.index(stored.dtype)]).float()
    if not bool(torch.isfinite(scales).all()) or bool((scales < 0).any()):
        raise UserError(f"{stored.shard}: {stored.name} holds NaN, infinity or a scale below zero. Download the model again.")
    # A block of zeros may have the scale zero. Above it, a score is zero only where the weight's bits are.
    return scales.clamp(min=torch.finfo(torch.float32).tiny).reshape(stored.shape if len(stored.shape) == 2 else (1, 1))
