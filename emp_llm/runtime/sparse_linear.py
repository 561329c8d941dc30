"""`SparseLinear`: a linear layer that computes from packed rows."""

import logging
from functools import cache
from importlib.util import find_spec
from typing import Any

from torch import Tensor, nn

from emp_llm.runtime.packed_rows import PackedRows, pack_rows
from emp_llm.runtime.torch_products import TorchProducts
from emp_llm.selection.available_kernels import has_triton, triton_compiles_for

logger = logging.getLogger(__name__)


class SparseLinear(nn.Module):
    """y = x W^T + b, with W as packed rows. For inference only: it has no gradient.

    Products are summed in float32 and rounded to the dtype of x, whatever the dtype of W. In a state dict the weight is
    dense, under the name and in the shape that the layer had before, so checkpoints are those of the dense model.

    Args:
        rows: W, shape (outputs, inputs).
        bias: shape (outputs,), or None.
        transposed: the state dict holds W as (inputs, outputs), like GPT-2's Conv1D.
    """

    mask: Tensor
    values: Tensor
    offsets: Tensor
    bias: nn.Parameter | None

    def __init__(self, rows: PackedRows, bias: nn.Parameter | None = None, transposed: bool = False) -> None:
        super().__init__()
        self.out_features, self.in_features = rows.shape
        self.transposed = transposed
        self.register_parameter("bias", bias)
        for name in ("mask", "values", "offsets"):
            self.register_buffer(name, getattr(rows, name), persistent=False)
        self._products: Any = None
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
        if self.bias is not None and not flat.is_cuda:
            y: Tensor = self._products(flat.float()).add_(self.bias).to(x.dtype)  # rounded after the sum
        else:
            y = self._products(flat)
            y = y if self.bias is None else y.add_(self.bias)
        return y.view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        """Its sizes and its share of zeros."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"zeros={self.rows.zeros:.1%}"
        )

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Move or convert; products on the new device are prepared at the next call, on GPUs at once."""
        self._products = None
        applied = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._prepare()
        return applied

    def _prepare(self) -> None:
        """Prepare products on a GPU ahead, so that torch.compile and CUDA graphs see products alone."""
        self._products = products_of(self.rows) if self.values.is_cuda else None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_products": None}

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight"] = self.weight

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *others: Any) -> None:
        weight = state_dict.get(f"{prefix}weight")
        if weight is not None:
            self._take(weight.T if self.transposed else weight)
        super()._load_from_state_dict({k: v for k, v in state_dict.items() if k != f"{prefix}weight"}, prefix, *others)

    def _take(self, weight: Tensor) -> None:
        if tuple(weight.shape) != (self.out_features, self.in_features):
            raise ValueError(f"its weight is {list(weight.shape)}; {[self.out_features, self.in_features]} is expected")
        rows = pack_rows(weight.to(self.values.dtype)).to(self.values.device)
        self.mask, self.values, self.offsets = rows.mask, rows.values, rows.offsets
        self._prepare()


def products_of(rows: PackedRows) -> Any:
    """The fastest products of rows on their device: a function of x, shape (tokens, inputs)."""
    if rows.values.device.type == "cpu" and _compiles():
        from emp_llm.runtime.cpu_products import CpuProducts

        products = CpuProducts(rows)
        _tell(products.instructions)
        return products
    if triton_compiles_for(rows.values.device) and has_triton():
        from emp_llm.runtime.cuda_products import CudaProducts

        return CudaProducts(rows)
    return TorchProducts(rows)


@cache
def _tell(instructions: str | None) -> None:
    """Say once that this processor has no instructions for packed rows."""
    if instructions is None:
        logger.warning("warning: this processor has neither AVX-512 nor AVX2, so sparse layers run by plain loops, slowly.")


@cache
def _compiles() -> bool:
    """Whether the loops for CPUs can be compiled here; says once if not."""
    if find_spec("llvmlite") is not None:
        return True
    logger.warning("warning: numba is missing, so sparse layers run by torch alone, slowly. Install it: pip install numba")
    return False
