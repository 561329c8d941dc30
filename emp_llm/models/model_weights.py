"""The weights of a model in memory, seen as a checkpoint: the pruner reads them by name and
offset, as it reads files.
"""

import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from emp_llm.checkpoint.checkpoint import Checkpoint, StoredTensor
from emp_llm.checkpoint.files import FilePool, FileReader, tensor_bytes
from emp_llm.checkpoint.matrices import Matrix
from emp_llm.common.errors import UserError
from emp_llm.models.architecture import Architecture
from emp_llm.models.layers import MIXES_TOKENS, Layer
from emp_llm.models.loading import resident_parameter
from emp_llm.models.masks import check_merged, check_not_sharded
from emp_llm.models.modules import Towers, block_lists, model_layers, rows_in

# In the names of wrapped parts.
_WRAPPED = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_DTYPES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32", torch.float64: "F64"}


class ModelWeights(Checkpoint):
    """The parameters of a model, under the names and with the shapes that they have in a saved
    checkpoint.

    Args:
        model: of `plain_model`, on any devices; parts may be offloaded to the CPU.

    Raises:
        UserError: adapters are not merged, a part is wrapped, or a weight is on the meta device, on
            disk or sharded over processes.
    """

    def __init__(self, model: nn.Module) -> None:
        check_not_sharded(model)
        check_merged(model)
        for name, _ in model.named_modules():
            if name.rpartition(".")[2] in _WRAPPED:
                raise UserError(
                    f"{name}: this part of the model is compiled or wrapped. Give the "
                    "model as it was before."
                )
        self.folder = Path(name_of(model))
        self.shards = []
        self._states = {}
        self._values = {name: _values_of(model, name) for name, _ in model.named_parameters()}
        self._versions = {name: values._version for name, values in self._values.items()}
        self._places: dict[Path, Callable[[], Tensor]] = {}
        self.tensors = {}
        for name, tensor in _as_saved(model, self._values).items():
            dtype = _DTYPES.get(tensor.dtype, str(tensor.dtype).removeprefix("torch."))
            self.tensors[name] = StoredTensor(
                name, Path(name), dtype, tuple(tensor.shape), 0, tensor.nbytes
            )

    def locate(self, structure: Architecture) -> None:
        """Note where the stored tensors of a model's layers are in its parameters."""
        for name, stored in structure.stored_names.items():
            if name in self._values:
                self._places[Path(stored)] = partial(
                    _in_shape, self._values[name], self.tensors[stored].shape
                )
        for layer in structure.layers:
            if layer.expert is None:
                continue
            matrix = structure.experts[layer.name]
            values = self._values[layer.expert.parameter]
            if matrix.expert is not None:  # all experts are stored in one tensor
                self._places[matrix.stored.shard] = partial(_in_shape, values, matrix.stored.shape)
            else:
                self._places[matrix.stored.shard] = partial(_expert_matrix, values, layer, matrix)

    def open_files(self) -> FilePool:
        return _Parameters(self._places)

    def check_unchanged(self) -> None:
        """Raise UserError if a parameter has changed since the model was given."""
        for name, values in self._values.items():
            if values._version != self._versions[name]:
                raise UserError(
                    f"{name}: it changed while it was read. Do not train the model meanwhile."
                )


def name_of(model: nn.Module) -> str:
    """The name under which a model was loaded, or that of its class."""
    return str(getattr(getattr(model, "config", None), "_name_or_path", "") or type(model).__name__)


def is_convolution(model: nn.Module, layer: Layer) -> bool:
    """Whether a layer of a model is a convolution."""
    return layer.expert is None and isinstance(model.get_submodule(layer.name), _CONVOLUTIONS)


def architecture_of(
    model: nn.Module, weights: ModelWeights, blocks: str | None = None
) -> Architecture:
    """The layers of a model in memory.

    Args:
        model: of transformers, or any module. The linear layers of a module without blocks are its
            MLP, except those whose names say that they mix tokens; its convolutions are linear
            layers too, with a row for each filter.
        weights: its weights.
        blocks: name of the list of decoder blocks; None: detected.

    Raises:
        UserError: a model of transformers has no decoder blocks, or there are none of this name.
    """
    if isinstance(model, PreTrainedModel):
        structure = Architecture.of_model(weights, model, blocks)
    else:
        structure = _plain_structure(model, weights, blocks)
    weights.locate(structure)
    return structure


def _plain_structure(model: nn.Module, weights: ModelWeights, blocks: str | None) -> Architecture:
    """The structure of any module. All of it is its language tower."""
    try:
        layers = [
            replace(layer, tower="language")
            for layer in model_layers(model, block_lists(model, blocks))
        ]
    except UserError:
        if blocks is not None:
            raise
        layers = [_with_purpose(layer) for layer in model_layers(model, Towers((), "", {}))]
    layers = _with_convolutions(model, weights, layers)
    names = {name: name for name in weights.tensors}
    in_blocks = {layer.parameter for layer in layers if layer.block is not None}
    shapes = {name: tensor.shape for name, tensor in weights.tensors.items()}
    block_shapes = {name: shape for name, shape in shapes.items() if name in in_blocks}
    return Architecture(weights, layers, names, block_shapes, shapes)


def _with_purpose(layer: Layer) -> Layer:
    """A layer of a module without blocks: attention if its name says that it mixes tokens, else
    MLP.
    """
    if layer.purpose == "embedding":
        return layer
    mixes = MIXES_TOKENS.search(re.sub(r"\.\d+", "", layer.name))
    return replace(layer, purpose="attention" if mixes else "mlp")


def _with_convolutions(model: nn.Module, weights: ModelWeights, layers: list[Layer]) -> list[Layer]:
    """Layers and the convolutions of a module, in its order. A convolution's weight becomes a
    matrix, a row for each filter.
    """
    by_name = {layer.name: layer for layer in layers}
    for name, module in model.named_modules():
        stored = weights.tensors.get(f"{name}.weight")
        if isinstance(module, _CONVOLUTIONS) and stored is not None:
            by_name[name] = Layer(name, "mlp", None)
            weights.tensors[stored.name] = replace(
                stored, shape=(stored.shape[0], math.prod(stored.shape[1:]))
            )
    return [by_name[name] for name, _ in model.named_modules() if name in by_name]


def _values_of(model: nn.Module, name: str) -> Tensor:
    values = resident_parameter(model, name)
    if values is None or values.device.type == "meta":
        raise UserError(
            f"{name}: its values are not in memory (device meta). Load the model without "
            "offloading to disk, or prune its folder with emp-llm prune."
        )
    if str(values.dtype).startswith("torch.float8"):
        raise UserError(
            f"{name}: it is {values.dtype}, with scales beside it. Prune the model's folder with "
            "emp-llm prune, and load the result."
        )
    return values


def _as_saved(model: nn.Module, values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Stored name -> meta tensor of its shape and dtype, as `save_pretrained` would write them."""
    parameters = {
        name: torch.empty(value.shape, dtype=value.dtype, device="meta")
        for name, value in values.items()
    }
    if not isinstance(model, PreTrainedModel):
        return parameters
    if getattr(model.config, "quantization_config", None) is not None:
        return parameters
    saved: dict[str, Tensor] = revert_weight_conversion(model, parameters)
    dtypes = {tensor.dtype for tensor in parameters.values()}
    # A model dequantised while loading would be quantised again.
    return saved if all(tensor.dtype in dtypes for tensor in saved.values()) else parameters


def _in_shape(values: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A parameter as it is stored: as it is, flat after its first dimension, or with its last
    two dimensions exchanged.
    """
    if values.dim() > len(shape):
        return values.reshape(shape)
    return values if tuple(values.shape) == shape else values.transpose(-1, -2)


def _expert_matrix(values: Tensor, layer: Layer, matrix: Matrix) -> Tensor:
    """The part of a parameter of all experts that is stored as one matrix of one expert."""
    rows = rows_in(values, layer)
    return rows.T if matrix.transposed else rows


class _Parameters(FilePool):
    """Stored tensors as open files. One of them at a time is copied, if it is not in order on
    the CPU already.
    """

    def __init__(self, places: dict[Path, Callable[[], Tensor]]) -> None:
        super().__init__()
        self._places = places
        self._last: _ParameterReader | None = None

    def reader(self, path: Path) -> FileReader:
        if self._last is None or self._last.path != path:
            self._last = _ParameterReader(path, self._places[path]())
        return self._last


class _ParameterReader(FileReader):
    """The bytes of a stored tensor."""

    def __init__(self, path: Path, values: Tensor) -> None:
        self.path = path
        self._bytes = memoryview(tensor_bytes(values.detach().cpu().contiguous()))

    def read(self, raw: memoryview, offset: int) -> None:
        raw[:] = self._bytes[offset : offset + len(raw)]
