"""Linear layers of a sparse model: `SparseLinear` computes from packed rows,
`SemiStructuredLinear` from 2:4 weights.
"""

import logging
from collections.abc import Callable
from functools import cache, partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from emp_llm.common.errors import UserError, count_of, quotable, reason
from emp_llm.runtime.packed_rows import PackedRows, torch_product

if TYPE_CHECKING:
    from emp_llm.runtime.cpu_kernel import Instructions

logger = logging.getLogger(__name__)
_AT_MOST_TWO = np.array(
    [(byte & 15).bit_count() <= 2 and (byte >> 4).bit_count() <= 2 for byte in range(256)]
)


class SparseLinear(nn.Module):
    """y = x W^T + b, with W as packed rows. For inference only: it has no gradient.

    Products are summed in float32 and rounded to the dtype of x, whatever the dtype of W. In a
    state dict the weight is dense, under the name and in the shape that the layer had before, so
    checkpoints are those of the dense model. To load another state dict, load the model again.

    Args:
        rows: W, shape (outputs, inputs).
        bias: shape (outputs,), or None.
        transposed: the state dict holds W as (inputs, outputs), like GPT-2's Conv1D.
    """

    mask: Tensor
    values: Tensor
    offsets: Tensor
    bias: nn.Parameter | None

    def __init__(
        self, rows: PackedRows, bias: nn.Parameter | None = None, transposed: bool = False
    ) -> None:
        super().__init__()
        self.out_features = rows.rows
        self.in_features = rows.columns
        self.transposed = transposed
        self.register_parameter("bias", bias)
        for name in ("mask", "values", "offsets"):
            self.register_buffer(name, getattr(rows, name), persistent=False)
        self._products: Callable[..., Tensor] | None = None
        self._prepare()

    @property
    def rows(self) -> PackedRows:
        """W in packed form."""
        return PackedRows(self.mask, self.values, self.offsets, self.in_features)

    @property
    def weight(self) -> Tensor:
        """A dense copy of W, as it is in a state dict."""
        dense: Tensor = self.rows.dense().to(self.values.device)
        return dense.T.contiguous() if self.transposed else dense

    def forward(self, x: Tensor) -> Tensor:
        """x: shape (..., inputs); returns shape (..., outputs), in the dtype of x."""
        if self._products is None:
            self._products = products_of(self.rows)
        flat = x.detach().reshape(x.shape[:-1].numel(), self.in_features)
        return self._products(flat, None if self.bias is None else self.bias.detach()).view(
            *x.shape[:-1], self.out_features
        )

    def extra_repr(self) -> str:
        """Its sizes and its fraction of zeros."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, zeros={self.rows.zeros:.1%}"
        )

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Move or convert; products on the new device are prepared at the next call, on GPUs at
        once.
        """
        self._products = None
        applied = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._prepare()
        return applied

    def _prepare(self) -> None:
        """Prepare products on a GPU ahead, so that torch.compile and CUDA graphs see products
        alone.
        """
        self._products = products_of(self.rows) if self.values.is_cuda else None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_products": None}

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight"] = self.weight


def products_of(rows: PackedRows) -> Callable[..., Tensor]:
    """The fastest function on the device of rows for x @ W.T + bias, with x of shape (tokens,
    inputs).
    """
    if (
        rows.values.device.type == "cpu"
        and (instructions := cpu_instructions(rows.values.dtype)) is not None
    ):
        from emp_llm.runtime.cpu_kernel import CpuProducts

        return CpuProducts(rows, instructions)
    if _runs_triton(rows.values.device):
        from emp_llm.runtime.cuda_kernel import CudaProducts

        return CudaProducts(rows)
    return partial(torch_product, rows)


def _runs_triton(device: torch.device) -> bool:
    """Whether Triton is installed and runs on a device: an NVIDIA GPU of compute capability 8.0
    or higher.
    """
    if device.type != "cuda" or torch.version.cuda is None or find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


@cache
def cpu_instructions(dtype: torch.dtype) -> "Instructions | None":
    """The fastest instructions of this processor for weights of a dtype; None if there are none,
    said once.
    """
    if find_spec("llvmlite") is None:
        logger.warning(
            "warning: numba is missing, so sparse layers run by torch alone, slowly. "
            "Install it: pip install numba"
        )
        return None
    from emp_llm.runtime.cpu_kernel import instructions_for

    found = instructions_for(dtype)
    if not found:
        logger.warning(
            "warning: this processor has neither AVX-512 nor AVX2, so sparse layers run "
            "by torch alone, slowly."
        )
    return found[0] if found else None


class SemiStructuredLinear(nn.Linear):
    """An `nn.Linear` whose weight is one of torch's semi-structured sparse tensors. For inference
    only.

    In a state dict the weight is dense, under the name and in the shape that the layer had before,
    so `save_pretrained` writes the plain checkpoint. To load another state dict, load the model
    again.

    Args:
        weight: semi-structured, shape (outputs, inputs).
        bias: shape (outputs,), or None.
        transposed: the state dict holds the weight as (inputs, outputs).
    """

    def __init__(self, weight: Tensor, bias: nn.Parameter | None, transposed: bool) -> None:
        super().__init__(weight.shape[1], weight.shape[0], bias=False, device="meta")
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.register_parameter("bias", bias)
        self.transposed = transposed

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        dense = self.weight.detach().to_dense()
        destination[f"{prefix}weight"] = dense.T.contiguous() if self.transposed else dense


def is_two_of_four(rows: PackedRows) -> bool:
    """Whether at most two of each four consecutive weights of a row are stored, and the row
    divides into such groups.
    """
    return rows.columns % 4 == 0 and bool(_AT_MOST_TWO[rows.mask.cpu().numpy()].all())


def check_semi_structured(device: torch.device) -> None:
    """Raise UserError where the matrix units for 2:4 weights are missing."""
    if device.type != "cuda" or torch.version.cuda is None or not torch.cuda.is_available():
        raise UserError(
            "semi_structured=True: 2:4 weights need an NVIDIA GPU, and the device is "
            f"{str(device)!r}. Give device='cuda' on a machine with such a GPU, or leave "
            "semi_structured out."
        )
    if torch.cuda.get_device_capability(device) < (8, 0):
        raise UserError(
            f"semi_structured=True: {torch.cuda.get_device_name(device)} does not multiply 2:4 "
            "weights; that takes compute capability 8.0 or higher. Leave semi_structured out."
        )


def make_semi_structured(model: PreTrainedModel) -> None:
    """Replace the 2:4 layers of a model on a GPU by `SemiStructuredLinear`; the others stay packed.

    Raises:
        UserError: no layer is 2:4, or torch does not take the dtype or the shape of one.
    """
    packed = {
        name: module for name, module in model.named_modules() if isinstance(module, SparseLinear)
    }
    found = {name: layer for name, layer in packed.items() if is_two_of_four(layer.rows)}
    if not found:
        raise UserError(
            f"semi_structured=True: none of {count_of(len(packed), 'packed layer')} has at most "
            "two of each four consecutive weights. Prune with --pattern 2:4, or leave "
            "semi_structured out."
        )
    for name, layer in found.items():
        dense = layer.rows.dense().to(layer.values.device, model.dtype)
        try:
            weight = torch.sparse.to_sparse_semi_structured(dense)
        except RuntimeError as error:
            raise UserError(
                f"semi_structured=True: torch does not take {quotable(name)}, {model.dtype} "
                f"{list(dense.shape)} ({reason(error)}). Give another dtype, or leave "
                "semi_structured out."
            ) from error
        model.set_submodule(name, SemiStructuredLinear(weight, layer.bias, layer.transposed))
    logger.info("%s with 2:4 weights for the matrix units.", count_of(len(found), "linear layer"))
