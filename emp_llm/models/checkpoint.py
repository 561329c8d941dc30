"""Safetensors checkpoints as they lie on disk: which tensors, where their bytes are, and how to read a block of rows.

Nothing here holds a shard: bytes are read by position, and what is not asked for is never touched.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from emp_llm.models.direct import Buffers, Sink, Source, bytes_of, reading
from emp_llm.models.errors import UserError
from emp_llm.models.headers import INDEX_LIMIT, check_layer_counts, check_links, check_shard_name, read_header, read_json, shown
from emp_llm.models.headers import StoredTensor as StoredTensor

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
PACK_NAME = "emp_pack.json"  # of a packed checkpoint, which has to be unpacked first
# Weights a checkpoint may carry beside its safetensors; copying them would ship the dense model along.
OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".gguf", ".ot", ".safetensors", ".npz")

TORCH_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}


@dataclass(frozen=True)
class Matrix:
    """A stored matrix seen with one output per row, whichever way it is stored.

    Attributes:
        stored: the tensor, of two dimensions; of three, if it holds a matrix for each expert.
        transposed: it is stored as (inputs, outputs), as GPT-2's Conv1D does.
        expert: which matrix of a tensor of three dimensions.
    """

    stored: StoredTensor
    transposed: bool = False
    expert: int | None = None

    @property
    def numel(self) -> int:
        return self.rows * self.columns

    @property
    def start(self) -> int:
        """Where its first byte is in the file."""
        return self.stored.start + (self.expert or 0) * self.numel * self.dtype.itemsize

    @property
    def end(self) -> int:
        """One past its last byte."""
        return self.start + self.numel * self.dtype.itemsize

    @property
    def dtype(self) -> torch.dtype:
        return TORCH_DTYPES[self.stored.dtype]

    @property
    def rows(self) -> int:
        """Outputs."""
        return self.stored.shape[-1 if self.transposed else -2]

    @property
    def columns(self) -> int:
        """Inputs."""
        return self.stored.shape[-2 if self.transposed else -1]

    def row_blocks(self, block_weights: int) -> Iterator[tuple[int, int]]:
        """(first, last + 1) of consecutive blocks of rows, each of at most `block_weights` weights or one row."""
        step = max(1, block_weights // max(1, self.columns))
        for first in range(0, self.rows, step):
            yield first, min(first + step, self.rows)

    def read(self, file: Source, first: int, last: int, buffers: Buffers | None = None) -> Tensor:
        """Rows first to last - 1, shape (last - first, columns), from the shard.

        Contiguous and in memory that is taken from `buffers`, where they are given; to be given back there.
        """
        buffers = buffers or Buffers()
        shape = (self.columns, last - first) if self.transposed else (last - first, self.columns)
        block = buffers.take(shape, self.dtype, next(self._pieces(first, last), (0,))[0])
        raw = bytes_of(block)
        for offset, begin, end in self._pieces(first, last):
            file.read(raw[begin:end], offset)
        if not self.transposed:
            return block
        turned = buffers.take((last - first, self.columns), self.dtype).copy_(block.T)
        buffers.give(block)
        return turned

    def write(self, file: Sink, first: int, block: Tensor) -> None:
        """Put rows, shape as read, back where rows first, first + 1, ... lie."""
        last = first + block.shape[0]
        laid = (block.T if self.transposed else block).contiguous()
        raw = bytes_of(laid)
        for offset, begin, end in self._pieces(first, last):
            file.write(raw[begin:end], offset)

    def _pieces(self, first: int, last: int) -> Iterator[tuple[int, int, int]]:
        """(offset in the file, begin, end in the block's bytes) of each contiguous piece of a block of rows."""
        size = self.dtype.itemsize
        if not self.transposed:
            width = self.columns * size
            yield self.start + first * width, 0, (last - first) * width
            return
        width = (last - first) * size
        for i in range(self.columns):
            yield self.start + (i * self.rows + first) * size, i * width, (i + 1) * width


class Checkpoint:
    """A folder of safetensors files with its index, config, tokenizer and whatever lies beside them; read-only.

    Args:
        folder: the model folder.

    Raises:
        UserError: no such folder, no safetensors in it, a shard missing, truncated or corrupt, or index and shards disagree.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if not folder.is_dir():
            raise UserError(f"{folder}: no such model folder. Give a folder with safetensors, or a Hub id (owner/name).")
        check_links(folder)
        self.shards = [folder / name for name in self._shard_names()]
        self._stats = {shard: _state(shard) for shard in self.shards}
        self.tensors: dict[str, StoredTensor] = {}
        for shard in self.shards:
            for tensor in read_header(shard):
                if tensor.name in self.tensors:
                    raise UserError(f"{shard}: tensor {shown(tensor.name)} is also in {self.tensors[tensor.name].shard.name}.")
                self.tensors[tensor.name] = tensor
        self._check_index()

    @cached_property
    def config(self) -> dict[str, Any]:
        """config.json; empty where there is none."""
        path = self.folder / "config.json"
        if not path.is_file():
            return {}
        config = read_json(path)
        check_layer_counts(path, config, len(self.tensors))
        return config

    @cached_property
    def parameters(self) -> int:
        """How many numbers all tensors hold."""
        return sum(tensor.numel for tensor in self.tensors.values())

    @cached_property
    def fingerprint(self) -> dict[str, str]:
        """A few numbers of every tensor as a hash, to tell two fine-tunes of one architecture apart cheaply."""
        import hashlib

        digest = hashlib.sha256()
        files = {shard: os.open(shard, os.O_RDONLY) for shard in self.shards}
        try:
            for name in sorted(self.tensors):
                tensor = self.tensors[name]
                digest.update(f"{name} {tensor.dtype} {tensor.shape}".encode())
                middle = tensor.start + (tensor.end - tensor.start) // 2
                with reading(tensor.shard):
                    digest.update(os.pread(files[tensor.shard], min(256, tensor.end - middle), middle))
        finally:
            for file in files.values():
                os.close(file)
        return {"sha256_of_samples": digest.hexdigest()}

    def check_unchanged(self) -> None:
        """Raise UserError where a shard is not the file any more that it was when the checkpoint was opened."""
        for shard, state in self._stats.items():
            if _state(shard) != state:
                raise UserError(f"{shard}: it changed while it was read. See what writes there, and run the command again.")

    def side_files(self) -> list[Path]:
        """Files, relative to the folder, that belong to the model and hold no weights: config, tokenizer, licence, code."""
        found = []
        for path in sorted(self.folder.rglob("*")):
            relative = path.relative_to(self.folder)
            if not path.is_file() or any(part.startswith(".") for part in relative.parts):
                continue
            if path.suffix in OTHER_WEIGHTS or relative.parts[0] == "emp_llm":
                continue
            if relative.name in ("README.md", "emp_report.json", "emp_manifest.json") or relative.name.endswith(".index.json"):
                continue
            found.append(relative)
        if self._weight_map:
            found.append(Path(INDEX_NAME))
        return found

    @cached_property
    def _weight_map(self) -> dict[str, str]:
        path = self.folder / INDEX_NAME
        if (self.folder / SINGLE_NAME).is_file() or not path.is_file():
            return {}
        weight_map = read_json(path, unique=True, limit=INDEX_LIMIT).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
            raise UserError(f"{path}: its weight_map must map tensor names to file names. Download it again.")
        return weight_map

    def _check_index(self) -> None:
        """Raise UserError where the index and the shards do not tell the same."""
        index = self.folder / INDEX_NAME
        for name, file in self._weight_map.items():
            if name not in self.tensors or self.tensors[name].shard.name != file:
                raise UserError(
                    f"{index}: it places {shown(name)} in {file}, which does not hold it. Index and shards are not of one "
                    "model; download them again."
                )
        for name, tensor in self.tensors.items():
            if self._weight_map and name not in self._weight_map:
                raise UserError(
                    f"{index}: it does not name {shown(name)}, which is in {tensor.shard.name}. Index and shards are not of "
                    "one model; download them again."
                )

    def _shard_names(self) -> list[str]:
        if (self.folder / PACK_NAME).is_file():
            raise UserError(f"{self.folder}: a packed checkpoint. Unpack it first: python -m emp_llm.unpack {self.folder} DIR")
        if (self.folder / SINGLE_NAME).is_file():
            return [SINGLE_NAME]
        if not self._weight_map:
            raise UserError(_why_no_safetensors(self.folder))
        names = sorted(set(self._weight_map.values()))
        for name in names:
            check_shard_name(self.folder / INDEX_NAME, name)
            if not (self.folder / name).is_file():
                raise UserError(f"{self.folder / INDEX_NAME}: it names {name}, which is missing. Download the model again.")
        return names


def _state(path: Path) -> tuple[int, int, int] | None:
    """Size, time of the last change and number of a file: it is the same file where they are the same."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns, found.st_ino


def _why_no_safetensors(folder: Path) -> str:
    if (folder / "adapter_config.json").is_file():
        return f"{folder}: a PEFT adapter, not a model. Merge it into its base model first (merge_and_unload, save_pretrained)."
    others = sorted({path.name for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".pth")})
    if others:
        return (
            f"{folder}: weights only as {others[0]}, and pickles are not loaded here. Convert them once: "
            "AutoModelForCausalLM.from_pretrained(DIR, dtype='auto').save_pretrained(NEW_DIR), and the tokenizer likewise."
        )
    return f"{folder}: no {SINGLE_NAME} and no {INDEX_NAME} in it. Give the folder that save_pretrained wrote."
