"""Loads a pruned or packed checkpoint as a model of transformers that computes from packed weights."""

import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from emp_llm.common.errors import UserError, reason
from emp_llm.common.wording import count_of, format_bytes, quotable
from emp_llm.hub.local_model import find_model
from emp_llm.models.loading import build_skeleton, check_complete, load_report, quiet_bar
from emp_llm.models.modules import find_names
from emp_llm.runtime.packed_rows import PackedRows, pack_rows, rows_of
from emp_llm.runtime.semi_structured import check_semi_structured, make_semi_structured
from emp_llm.runtime.sparse_linear import SparseLinear
from emp_llm.runtime.stored_weights import TORCH_DTYPES, StoredWeights, stored_weights

logger = logging.getLogger(__name__)
LEAST_ZEROS = 0.2  # of a layer that is loaded packed; docs/runtime.md has the measurement
NEVER = 2.0  # more zeros than any layer has: all layers are loaded dense


@dataclass(frozen=True)
class _Place:
    """A linear layer to replace: the name of its module and of its stored tensor, and whether that is (inputs, outputs)."""

    module: str
    stored: str
    transposed: bool


def load(
    model: str | Path,
    *,
    device: str | torch.device = "cpu",
    dtype: str | torch.dtype = "auto",
    revision: str | None = None,
    trust_remote_code: bool = False,
    least_zeros: float = LEAST_ZEROS,
    check: bool = True,
    semi_structured: bool = False,
) -> PreTrainedModel:
    """A pruned model in evaluation mode, its pruned linear layers as `SparseLinear`.

    The weights of a folder of `emp-llm pack` are mapped from its files. Those of an ordinary checkpoint are packed in memory,
    one matrix after another. Linear layers with few zeros, embeddings, tied weights and experts in stacks stay dense.

    Args:
        model: a folder or Hub id: a pruned checkpoint, or one packed by `emp-llm pack`.
        device: where the model runs.
        dtype: of the dense weights and the activations; "auto": that of the checkpoint. Packed weights keep theirs.
        revision: on the Hub.
        trust_remote_code: run code from the folder.
        least_zeros: the smallest share of zeros with which a layer is packed; more than 1: none is.
        check: compare the hashes of a packed folder before anything runs.
        semi_structured: on NVIDIA GPUs, layers with at most two of each four weights become `nn.Linear` with torch's
            semi-structured sparse weights, for long prompts and large batches. A state dict has them dense.

    Raises:
        UserError: no such model, a damaged file, a quantised model, or a mask without weights; with `semi_structured`, also
            a CPU, a dtype or a shape that torch does not take, or no 2:4 layer.
    """
    if semi_structured:
        check_semi_structured(torch.device(device))
    source = find_model(str(model), revision, trust_remote_code)
    with stored_weights(source.folder, check) as weights:
        loaded, packed, layers = _load(source.folder, weights, dtype, trust_remote_code, least_zeros)
    for place, rows in packed.items():
        hole = loaded.get_submodule(place.module)
        loaded.set_submodule(place.module, SparseLinear(rows, hole.bias, place.transposed))
    if least_zeros <= 1:
        _say(source.folder, layers, list(packed.values()))
    loaded = loaded.to(device).eval()
    if semi_structured:
        make_semi_structured(loaded)
    return loaded


def _load(
    folder: Path, weights: StoredWeights, dtype: str | torch.dtype, trust_remote_code: bool, least_zeros: float
) -> tuple[PreTrainedModel, dict[_Place, PackedRows], int]:
    """The model with holes, the packed rows for these, and the number of layers that could be packed."""
    _check_kind(weights)
    skeleton = build_skeleton(folder, trust_remote_code)
    places = _places(skeleton, weights)
    found = {place: _rows(weights, place, least_zeros) for place in places}
    packed = {place: rows for place, rows in found.items() if rows is not None}
    return _load_others(folder, skeleton, weights, list(packed), dtype), packed, len(places)


def run_device(device: str) -> str:
    """The device that a user names: for auto, a GPU if there is one.

    Raises:
        UserError: a GPU is named, and there is none of this number.
    """
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device.startswith("cuda"):
        number = int(device.partition(":")[2] or 0)
        if not torch.cuda.is_available() or number >= torch.cuda.device_count():
            raise UserError(f"{device}: torch sees {count_of(torch.cuda.device_count(), 'GPU')} here. Use cpu or auto.")
    return device


def sparse_layers(model: nn.Module) -> dict[str, SparseLinear]:
    """The packed layers of a model, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, SparseLinear)}


class _Hole(nn.Module):
    """Stands in for a packed layer while transformers loads the other weights; it has the layer's bias."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.bias = layer.bias
        self.weight = torch.empty(0)  # for models that initialise the weights of their layers by name


@contextmanager
def _undrawn_weights() -> Iterator[None]:
    """Leave out the initial values of linear layers: all weights are loaded, and drawing them takes longer than that."""
    draw = nn.Linear.reset_parameters
    nn.Linear.reset_parameters = lambda self: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Linear.reset_parameters = draw  # type: ignore[method-assign]


def _check_kind(weights: StoredWeights) -> None:
    """Raise UserError for a quantised model."""
    kind = weights.checkpoint.config.get("quantization_config")
    if kind is not None:
        method = kind.get("quant_method") if isinstance(kind, dict) else kind
        raise UserError(
            f"{weights.checkpoint.folder}: it is quantised ({quotable(str(method))}). The runtime takes bfloat16, float16 and "
            "float32 weights; give the pruned model before quantisation."
        )


def _places(skeleton: PreTrainedModel, weights: StoredWeights) -> list[_Place]:
    """The linear layers whose weights are matrices of their own in the checkpoint, in a dtype that can be packed."""
    tensors = weights.checkpoint.tensors
    stored = find_names(skeleton, weights.checkpoint, {}).names
    shared = Counter(id(parameter) for _, parameter in skeleton.named_parameters(remove_duplicate=False))
    places: list[_Place] = []
    others: Counter[str] = Counter()
    for name, module in skeleton.named_modules():
        if type(module) not in (nn.Linear, Conv1D) or shared[id(module.weight)] > 1:
            continue
        tensor = tensors.get(stored.get(f"{name}.weight", ""))
        if tensor is None or tensor.shape != tuple(module.weight.shape):
            continue
        if tensor.dtype in TORCH_DTYPES:
            places.append(_Place(name, tensor.name, isinstance(module, Conv1D)))
        else:
            others[tensor.dtype] += 1
    for dtype, number in others.items():
        folder = weights.checkpoint.folder
        logger.warning("warning: %s: %s in %s, which is never packed; dense.", folder, count_of(number, "linear layer"), dtype)
    return places


def _rows(weights: StoredWeights, place: _Place, least_zeros: float) -> PackedRows | None:
    """The packed rows of a layer; None if it has too few zeros."""
    parts = weights.packed(place.stored, least_zeros)
    if parts is None:
        return None
    height, width = weights.checkpoint.tensors[place.stored].shape
    try:
        rows = rows_of(*parts, height, width)
    except ValueError as error:
        raise UserError(f"{weights.checkpoint.folder}: {quotable(place.stored)} is damaged ({reason(error)}).") from error
    return pack_rows(rows.dense().T) if place.transposed else rows


def _load_others(
    folder: Path, skeleton: PreTrainedModel, weights: StoredWeights, packed: list[_Place], dtype: str | torch.dtype
) -> PreTrainedModel:
    """The model with its dense weights, and a hole in the place of each packed layer."""
    kind = type(skeleton)

    def build(self: Any, *arguments: Any, **keywords: Any) -> None:
        with _undrawn_weights():
            kind.__init__(self, *arguments, **keywords)
        for place in packed:
            self.set_submodule(place.module, _Hole(self.get_submodule(place.module)))

    with_holes = type(kind.__name__, (kind,), {"__init__": build, "__module__": kind.__module__})
    left = weights.checkpoint.tensors.keys() - {place.stored for place in packed}
    with load_report() as report, quiet_bar():
        try:
            model, info = with_holes.from_pretrained(  # type: ignore[attr-defined]
                None,
                config=skeleton.config,
                state_dict={name: weights.dense(name) for name in weights.checkpoint.tensors if name in left},
                dtype=dtype if dtype == "auto" or isinstance(dtype, torch.dtype) else getattr(torch, dtype),
                ignore_mismatched_sizes=True,  # listed in `info`, and refused below
                output_loading_info=True,
            )
        except (ValueError, KeyError, OSError, ImportError, RuntimeError) as error:
            report.refuse_conversions(folder, error)
            raise UserError(f"{folder}: transformers cannot load it ({reason(error, whole=True)}).") from error
    check_complete(folder, model, info)
    model.__class__ = kind
    if (folder / "generation_config.json").is_file():
        model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    loaded: PreTrainedModel = model
    return loaded


def _say(folder: Path, layers: int, packed: list[PackedRows]) -> None:
    """Log how much of the model is packed."""
    if not packed:
        logger.warning("warning: %s has no linear layer with enough zeros to gain by packing; it runs dense.", folder)
        return
    dense = format_bytes(sum(rows.rows * rows.columns * rows.values.element_size() for rows in packed))
    small = format_bytes(sum(rows.nbytes for rows in packed))
    logger.info("%s: %d of %s packed, %s in place of %s.", folder, len(packed), count_of(layers, "linear layer"), small, dense)
