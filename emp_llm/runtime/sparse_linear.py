"""`SparseLinear`: the linear layer of a sparse model, which computes from packed rows."""

import logging
from collections.abc import Callable
from functools import cache, partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from emp_llm.common.machine import runs_triton
from emp_llm.runtime.packed_rows import PackedRows, torch_product

if TYPE_CHECKING:
    from emp_llm.runtime.cpu_kernel import Instructions

logger = logging.getLogger(__name__)


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
        """Move or convert, and prepare the products for the new device. Of other than 16 or 32
        bits, such as after `double`, the weights stay as they are; the products take every x.
        """
        self._products = None
        before = self.values
        applied = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.values.element_size() not in (2, 4):
            self.values = before.to(self.values.device)
        self._prepare()
        return applied

    def _prepare(self) -> None:
        """On a GPU, prepare the products now, so that torch.compile and CUDA graphs see nothing
        else. On a CPU, the first call does.
        """
        self._products = products_of(self.rows) if self.values.is_cuda else None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_products": None}

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight"] = self.weight


def products_of(rows: PackedRows) -> Callable[..., Tensor]:
    """The fastest function (x, bias=None) -> x @ W.T + bias on the device of the rows W.

    x has the shape (tokens, inputs), bias (outputs,), and the result (tokens, outputs).
    """
    if (
        rows.values.device.type == "cpu"
        and (instructions := cpu_instructions(rows.values.dtype)) is not None
    ):
        from emp_llm.runtime.cpu_kernel import CpuProducts

        return CpuProducts(rows, instructions)
    if runs_triton(rows.values.device):
        from emp_llm.runtime.cuda_kernel import CudaProducts

        return CudaProducts(rows)
    return partial(torch_product, rows)


@cache
def cpu_instructions(dtype: torch.dtype) -> "Instructions | None":
    """The fastest instructions of this processor for weights of a dtype; None, with one warning,
    if there are none.
    """
    if find_spec("llvmlite") is None:
        logger.warning(
            "warning: numba is missing, so sparse layers run by torch alone, slowly. "
            "Install it: pip install numba"
        )
        return None
    from emp_llm.runtime.cpu_kernel import instructions_for

    instructions = instructions_for(dtype)
    if instructions:
        return instructions[0]
    logger.warning(
        "warning: this processor has neither AVX-512 nor AVX2, so sparse layers run by torch "
        "alone, slowly."
    )
    return None
