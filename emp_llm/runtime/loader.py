"""`SparseLinear`: the linear layer of a sparse model, which computes from packed rows."""

import json
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from blake3 import blake3
from safetensors import SafetensorError, safe_open
from safetensors.torch import load as safetensors_load
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from emp_llm.checkpoint.checkpoint import Checkpoint, StoredTensor
from emp_llm.checkpoint.files import FileReader
from emp_llm.checkpoint.matrices import Words, ones_in, read_words, words_in
from emp_llm.checkpoint.packed import PackedCheckpoint, PackedFolder, PackLayout, damaged
from emp_llm.common.declared import check_type, options_of
from emp_llm.common.errors import UserError, count_of, format_bytes, quotable, reason
from emp_llm.common.machine import OutOfMemory, available_memory, default_modes, runs_triton
from emp_llm.common.paths import PACK_NAME
from emp_llm.common.progress import progress_bar
from emp_llm.models.loading import build_skeleton, check_complete, loading
from emp_llm.models.local_model import find_model
from emp_llm.models.modules import find_names
from emp_llm.models.placement import visible
from emp_llm.options.shared import DeviceOptions
from emp_llm.runtime.packed_rows import (
    WORD_COLUMNS,
    PackedRows,
    pack_rows,
    pack_words,
    rows_of,
    torch_product,
)

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


# Loads a pruned or packed checkpoint as a model of transformers that computes from packed
# weights.


LEAST_ZEROS = 0.2  # the fraction of zeros from which packed rows are smaller and faster
NEVER = 2.0  # more zeros than any layer has: all layers are loaded dense
_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


@default_modes()
def load(
    model: str | Path,
    *,
    device: str | torch.device = "cpu",
    dtype: str | torch.dtype = "auto",
    revision: str | None = None,
    trust_remote_code: bool = False,
    least_zeros: float = LEAST_ZEROS,
    check: bool = True,
) -> PreTrainedModel:
    """A pruned model in evaluation mode, its pruned linear layers as `SparseLinear`.

    The weights of a folder of `emp-llm pack` are mapped from its files. Those of an ordinary
    checkpoint are packed in memory, one matrix after another. Linear layers with few zeros,
    embeddings, tied weights and experts in stacks stay dense.

    Args:
        model: a folder or Hub id: a pruned checkpoint, or one packed by `emp-llm pack`.
        device: where the model runs.
        dtype: of the dense weights and the activations; "auto": that of the checkpoint. Packed
            weights keep theirs.
        revision: branch, tag or commit on the Hub.
        trust_remote_code: run code from the model repository.
        least_zeros: the smallest fraction of zeros with which a layer is packed; above 1, all
            layers are dense.
        check: compare the hashes of a packed folder before anything runs.

    Raises:
        UserError: no such model, a damaged file, a quantised model, or a mask without weights.
    """
    if isinstance(device, str):
        device = run_device(DeviceOptions(device=device).device)
    check_type("device", device, torch.device, str)
    if not isinstance(dtype, torch.dtype):
        options_of(DeviceOptions)["dtype"].checked(dtype)
    folder = find_model(str(model), revision, trust_remote_code).folder
    weights = StoredWeights(folder)
    _refuse_quantised(weights.checkpoint)
    if check and weights.packed is not None:
        _check_hashes(weights.packed)
    skeleton = build_skeleton(folder, trust_remote_code)
    layers = _linear_layers(skeleton, weights.checkpoint)
    used = _used_tensors(folder, skeleton, weights.checkpoint)
    weights.check_memory(used - {layer.stored for layer in layers})
    packed: dict[_LinearLayer, PackedRows] = {}
    for layer in layers:
        rows = weights.rows(layer.stored, least_zeros)
        if rows is not None:
            packed[layer] = rows
    used -= {layer.stored for layer in packed}
    others = {name: weights.dense(name) for name in weights.checkpoint.tensors if name in used}
    loaded = _load_others(folder, skeleton, others, list(packed), dtype)
    for layer, rows in packed.items():
        hole = loaded.get_submodule(layer.module)
        if layer.transposed:
            rows = pack_rows(rows.dense().T)
        loaded.set_submodule(layer.module, SparseLinear(rows, hole.bias, layer.transposed))
    if least_zeros <= 1:
        _log_packed(folder, len(layers), list(packed.values()))
    loaded = loaded.to(device).eval()
    if packed and loaded.device.type == "cpu":
        smallest = min(sparse_layers(loaded).values(), key=lambda layer: layer.values.numel())
        # With nine tokens, the ways to multiply are measured, once for a processor.
        smallest(torch.zeros(9, smallest.in_features, dtype=loaded.dtype))
    return loaded


def run_device(device: str) -> str:
    """The device that a user means: for "auto", a GPU if there is one.

    Raises:
        UserError: a GPU is named, and there is none of this number.
    """
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device.startswith("cuda"):
        number = int(device.partition(":")[2] or 0)
        if not torch.cuda.is_available() or number >= torch.cuda.device_count():
            seen = visible(torch.cuda.device_count(), "GPU")
            raise UserError(f"{device}: {seen} Use cpu or auto.")
    return device


def sparse_layers(model: nn.Module) -> dict[str, SparseLinear]:
    """The packed layers of a model, by name."""
    return {
        name: module for name, module in model.named_modules() if isinstance(module, SparseLinear)
    }


@dataclass(frozen=True)
class _LinearLayer:
    """A linear layer: the name of its module and of its stored tensor, and whether that is
    (inputs, outputs).
    """

    module: str
    stored: str
    transposed: bool


class StoredWeights:
    """The weights of a pruned or packed folder, as packed rows or dense tensors: in memory, or
    mapped from the files.
    """

    def __init__(self, folder: Path) -> None:
        self.packed = PackedFolder(folder) if (folder / PACK_NAME).is_file() else None
        if self.packed is not None and self.packed.layout.mask_only:
            raise UserError(
                f"{folder}: a mask holds no weights. Unpack it first: emp-llm unpack {folder} DIR "
                f"--base {self.packed.base_name}"
            )
        self.checkpoint = (
            Checkpoint(folder) if self.packed is None else PackedCheckpoint(self.packed)
        )
        shards = [] if self.packed is None else self.packed.shards.values()
        self._shards = {tensor.name: shard for shard in shards for tensor in shard.tensors}
        self._mapped: dict[Path, Any] = {}

    def rows(self, name: str, least_zeros: float) -> PackedRows | None:
        """The rows of a matrix as it is stored; None if it is empty, or its fraction of zeros is
        less than `least_zeros`.

        Loops in machine code rely on these rows. Lengths and dtypes of mask and values were checked
        when the folder was opened. The bits are counted here, in every load.

        Raises:
            UserError: the number of set bits is not that of the values, or bits are set after the
                last weight; or the file has changed; or there is not enough memory.
        """
        tensor = self.checkpoint.tensors[name]
        shard = self._shards.get(name)
        words = words_in(tensor)
        rows, columns = tensor.shape
        if not words or least_zeros > 1:
            return None
        if shard is not None and not shard.layout.zstd:
            if shard.forms[name] == "dense" or shard.zeros_in(tensor) < least_zeros * words:
                return None
            mask = self._map(shard.entry(f"{name}.mask"))
            values = self._map(shard.entry(f"{name}.values"))
        else:
            mask, values = pack_words(self._words(tensor), _DTYPES[tensor.dtype])
            if words - values.numel() < least_zeros * words:
                return None
        # The bits of a row do not begin a word, so they are moved, as bytes.
        if columns % WORD_COLUMNS:
            self._check_free(rows * (2 * columns + WORD_COLUMNS), quotable(name))
        try:
            ones_in(mask.numpy(), words)
            return rows_of(mask, values, rows, columns)
        except ValueError as error:
            damaged(tensor.shard, f"{quotable(name)}: {error}")

    def dense(self, name: str) -> Tensor:
        """A tensor with its zeros."""
        tensor = self.checkpoint.tensors[name]
        if not self._expands(tensor):
            return self._map(tensor)
        raw = b"".join(words.tobytes() for words in self._words(tensor))
        header = json.dumps(
            {name: {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [0, len(raw)]}}
        ).encode()
        tensors: dict[str, Tensor] = safetensors_load(
            len(header).to_bytes(8, "little") + header + raw
        )
        return tensors[name]

    def check_memory(self, names: Collection[str], copies: int = 1) -> None:
        """Raise UserError if those of the tensors that must be expanded need more than the free
        memory, `copies` of each at a time.
        """
        stored = [self.checkpoint.tensors[name] for name in names]
        tensors = [tensor for tensor in stored if self._expands(tensor)]
        what = quotable(tensors[0].name) if len(tensors) == 1 else count_of(len(tensors), "tensor")
        self._check_free(copies * sum(tensor.end - tensor.start for tensor in tensors), what)

    def _check_free(self, needed: int, what: str) -> None:
        if needed > (free := available_memory()):
            raise OutOfMemory(
                f"{self.checkpoint.folder}: {what} needs {format_bytes(needed)} of memory, and "
                f"{format_bytes(free)} are free."
            )

    def _expands(self, tensor: StoredTensor) -> bool:
        """Whether a tensor is compressed or without its zeros in its file."""
        shard = self._shards.get(tensor.name)
        return shard is not None and (shard.layout.zstd or shard.forms[tensor.name] == "sparse")

    def _words(self, tensor: StoredTensor) -> Iterator[Words]:
        if self.packed is not None:
            self.check_memory([tensor.name], copies=3)
            yield from self._shards[tensor.name].words(tensor)
            return
        with FileReader(tensor.shard) as file:
            yield from (read_words(file, tensor, *chunk) for chunk in PackLayout().chunks(tensor))

    def _map(self, stored: StoredTensor) -> Tensor:
        """A tensor of a safetensors file, mapped into memory; a copy if its address there is not a
        multiple of the size of its numbers.

        Raises:
            UserError: the file is not the one whose header was checked.
        """
        try:
            if stored.shard not in self._mapped:
                self._mapped[stored.shard] = safe_open(stored.shard, framework="pt")
            tensor: Tensor = self._mapped[stored.shard].get_tensor(stored.name)
        except (SafetensorError, OSError) as error:
            raise UserError(
                f"{stored.shard}: {quotable(stored.name)} cannot be mapped ({reason(error)})."
            ) from error
        if tuple(tensor.shape) != stored.shape or tensor.nbytes != stored.end - stored.start:
            raise UserError(
                f"{stored.shard}: it changed while it was read. Make sure that nothing writes "
                "there, and run again."
            )
        return tensor.clone() if tensor.data_ptr() % tensor.element_size() else tensor


def _check_hashes(packed: PackedFolder) -> None:
    """Raise UserError if a file of a packed folder has another hash than announced."""
    for name in packed.files:
        # Files that a model does not need, such as its card, are not downloaded.
        if (packed.folder / name).is_file():
            packed.check_file(name)
    with progress_bar(
        sum(shard.path.stat().st_size for shard in packed.shards.values()), "check", "B"
    ) as bar:
        for shard in packed.shards.values():
            if (
                blake3(max_threads=blake3.AUTO).update_mmap(shard.path).hexdigest()
                != shard.packed_digest
            ):
                damaged(shard.path, "its weights do not have the announced checksum")
            bar.update(shard.path.stat().st_size)


def _refuse_quantised(checkpoint: Checkpoint) -> None:
    config = checkpoint.config.get("quantization_config")
    if config is not None:
        method = config.get("quant_method") if isinstance(config, dict) else config
        raise UserError(
            f"{checkpoint.folder}: it is quantised ({quotable(str(method))}). The runtime takes "
            "bfloat16, float16 and float32 weights; give the pruned model before quantisation."
        )


def _linear_layers(skeleton: PreTrainedModel, checkpoint: Checkpoint) -> list[_LinearLayer]:
    """The linear layers whose weights can be packed: stored as a matrix for this layer alone, in
    bfloat16, float16 or float32.
    """
    stored = find_names(skeleton, checkpoint, {}).names
    shared = Counter(
        id(parameter) for _, parameter in skeleton.named_parameters(remove_duplicate=False)
    )
    layers: list[_LinearLayer] = []
    others: Counter[str] = Counter()
    for name, module in skeleton.named_modules():
        if type(module) not in (nn.Linear, Conv1D) or shared[id(module.weight)] > 1:
            continue
        tensor = checkpoint.tensors.get(stored.get(f"{name}.weight", ""))
        if tensor is None or tensor.shape != tuple(module.weight.shape):
            continue
        if tensor.dtype in _DTYPES:
            layers.append(_LinearLayer(name, tensor.name, isinstance(module, Conv1D)))
        else:
            others[tensor.dtype] += 1
    for dtype, number in others.items():
        linear = count_of(number, "linear layer")
        logger.warning(
            "warning: %s: %s in %s, which is never packed; dense.", checkpoint.folder, linear, dtype
        )
    return layers


class _Hole(nn.Module):
    """Takes the place of a packed layer while transformers loads the other weights, and the
    layer's bias.
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.bias = layer.bias
        # For models that initialise the weights of their layers by name.
        self.weight = torch.empty(0)


def _used_tensors(folder: Path, skeleton: PreTrainedModel, checkpoint: Checkpoint) -> set[str]:
    """The names of the stored tensors that the model has. transformers loads them without their
    values, on the meta device.

    Raises:
        UserError: a weight of the model is missing, or has another shape.
    """
    stored = checkpoint.tensors.values()
    empty = {
        tensor.name: torch.empty(tensor.shape, dtype=_DTYPES.get(tensor.dtype), device="meta")
        for tensor in stored
    }
    with loading(folder):
        model, info = type(skeleton).from_pretrained(
            None,
            config=skeleton.config,
            state_dict=empty,
            device_map={"": "meta"},
            ignore_mismatched_sizes=True,  # listed in `info`, and refused below
            output_loading_info=True,
        )
    check_complete(folder, model, info)
    return set(checkpoint.tensors) - set(info["unexpected_keys"])


def _load_others(
    folder: Path,
    skeleton: PreTrainedModel,
    others: dict[str, Tensor],
    packed: list[_LinearLayer],
    dtype: str | torch.dtype,
) -> PreTrainedModel:
    """The model with its dense weights, `others` by their stored names, and a hole in the place of
    each packed layer.
    """
    model_class = type(skeleton)

    def build(self: Any, *arguments: Any, **keywords: Any) -> None:
        model_class.__init__(self, *arguments, **keywords)
        for layer in packed:
            self.set_submodule(layer.module, _Hole(self.get_submodule(layer.module)))

    members = {"__init__": build, "__module__": model_class.__module__}
    with_holes = type(model_class.__name__, (model_class,), members)
    if isinstance(dtype, str) and dtype != "auto":
        dtype = getattr(torch, dtype)
    with loading(folder):
        model = with_holes.from_pretrained(  # type: ignore[attr-defined]
            None,
            config=skeleton.config,
            state_dict=others,
            dtype=dtype,
        )
    model.__class__ = model_class
    if (folder / "generation_config.json").is_file():
        model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    loaded: PreTrainedModel = model
    return loaded


def _log_packed(folder: Path, layers: int, packed: list[PackedRows]) -> None:
    """Log how much of the model is packed."""
    if not packed:
        logger.warning(
            "warning: %s has no linear layer with enough zeros to gain by packing; it runs dense.",
            folder,
        )
        return
    dense = format_bytes(
        sum(rows.rows * rows.columns * rows.values.element_size() for rows in packed)
    )
    small = format_bytes(sum(rows.nbytes for rows in packed))
    logger.info(
        "%s: %d of %s packed, %s in place of %s.",
        folder,
        len(packed),
        count_of(layers, "linear layer"),
        small,
        dense,
    )
