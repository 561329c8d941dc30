"""2:4 sparse weights for the matrix units of NVIDIA GPUs: layers with at most two of each four weights."""

import logging
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from emp_llm.common.errors import UserError, reason
from emp_llm.common.wording import count_of, quotable
from emp_llm.runtime.packed_rows import PackedRows
from emp_llm.runtime.sparse_linear import SparseLinear

logger = logging.getLogger(__name__)
_ROWS, _COLUMNS = 32, 64  # of which torch takes multiples, whatever library multiplies
_AT_MOST_TWO = np.array([(byte & 15).bit_count() <= 2 and (byte >> 4).bit_count() <= 2 for byte in range(256)])


class SemiStructuredLinear(nn.Linear):
    """An `nn.Linear` whose weight is one of torch's semi-structured sparse tensors. For inference only.

    In a state dict the weight is dense, under the name and in the shape that the layer had before, so `save_pretrained` writes
    the plain checkpoint. To load another state dict, load the model again.

    Args:
        weight: semi-structured, shape (outputs, inputs).
        bias: shape (outputs,), or None.
        transposed: the state dict holds the weight as (inputs, outputs).
    """

    def __init__(self, weight: torch.Tensor, bias: nn.Parameter | None, transposed: bool) -> None:
        super().__init__(weight.shape[1], weight.shape[0], bias=False, device="meta")
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.register_parameter("bias", bias)
        self.transposed = transposed

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        dense = self.weight.detach().to_dense()
        destination[f"{prefix}weight"] = dense.T.contiguous() if self.transposed else dense


def is_two_of_four(rows: PackedRows) -> bool:
    """Whether at most two of each four consecutive weights of a row are stored, and the row divides into such groups."""
    return rows.columns % 4 == 0 and bool(_AT_MOST_TWO[rows.mask.cpu().numpy()].all())


def check_semi_structured(device: torch.device) -> None:
    """Raise UserError where the matrix units for 2:4 weights are missing."""
    if device.type != "cuda" or torch.version.cuda is None:
        raise UserError(
            f"semi_structured=True: 2:4 weights need an NVIDIA GPU, and the device is {str(device)!r}. Give device='cuda', or "
            "leave semi_structured out."
        )
    if not torch.cuda.is_available():
        raise UserError(
            "semi_structured=True: torch sees no NVIDIA GPU here. Leave semi_structured out, and give device='cpu'."
        )
    if torch.cuda.get_device_capability(device) < (8, 0):
        raise UserError(
            f"semi_structured=True: {torch.cuda.get_device_name(device)} does not multiply 2:4 weights; that takes compute "
            "capability 8.0 or higher. Leave semi_structured out."
        )


def two_of_four_layers(model: nn.Module, dtype: torch.dtype) -> dict[str, SparseLinear]:
    """The packed layers of a model that can become semi-structured, by name.

    Args:
        dtype: of the activations, which the weights will have.

    Raises:
        UserError: no layer is 2:4, or torch does not take its dtype or shape.
    """
    packed = {name: module for name, module in model.named_modules() if isinstance(module, SparseLinear)}
    found = {name: module for name, module in packed.items() if is_two_of_four(module.rows)}
    if not found:
        raise UserError(
            f"semi_structured=True: none of {count_of(len(packed), 'packed layer')} has at most two of each four consecutive "
            "weights. Prune with --pattern 2:4, or leave semi_structured out."
        )
    for name, module in found.items():
        if dtype not in (torch.bfloat16, torch.float16):
            raise UserError(
                f"semi_structured=True: {quotable(name)} computes in {str(dtype).removeprefix('torch.')}; 2:4 weights are "
                "bfloat16 or float16. Give dtype='bfloat16'."
            )
        if module.out_features % _ROWS or module.in_features % _COLUMNS:
            raise UserError(
                f"semi_structured=True: {quotable(name)} has {module.out_features} outputs and {module.in_features} inputs; "
                f"torch takes multiples of {_ROWS} and {_COLUMNS}. Leave semi_structured out."
            )
    return found


def make_semi_structured(model: PreTrainedModel) -> None:
    """Replace the 2:4 layers of a model on a GPU by `SemiStructuredLinear`; the others stay packed.

    Raises:
        UserError: as `two_of_four_layers`, or torch refuses a layer.
    """
    layers = two_of_four_layers(model, model.dtype)
    for name, layer in layers.items():
        dense = layer.rows.dense().to(layer.values.device, model.dtype)
        try:
            weight = torch.sparse.to_sparse_semi_structured(dense)
        except RuntimeError as error:
            raise UserError(
                f"semi_structured=True: torch does not take {quotable(name)} ({reason(error)}). Leave semi_structured out."
            ) from error
        model.set_submodule(name, SemiStructuredLinear(weight, layer.bias, layer.transposed))
    logger.info("%s with 2:4 weights for the matrix units.", count_of(len(layers), "linear layer"))
