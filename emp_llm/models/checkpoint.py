"""Safetensors checkpoints as they lie on disk: which tensors, where their bytes are, and how to read a block of rows.

Nothing here holds a shard: bytes are read by position, and what is not asked for is never touched.
"""

import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from emp_llm.models.errors import UserError, reason
from emp_llm.models.files import read_exactly, write_exactly

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
# Weights a checkpoint may carry beside its safetensors; copying them would ship the dense model along.
OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".gguf", ".ot", ".safetensors", ".npz")

TORCH_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a shard.

    Attributes:
        name: its name in the checkpoint.
        shard: the file it lies in.
        dtype: as safetensors writes it ("BF16").
        shape: as stored.
        start, end: first byte and one past the last, from the start of the file.
    """

    name: str
    shard: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


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

    def read(self, file: int, first: int, last: int) -> Tensor:
        """Rows first to last - 1, shape (last - first, columns), from an open file descriptor of the shard."""
        block = torch.empty((self.columns, last - first) if self.transposed else (last - first, self.columns), dtype=self.dtype)
        raw = _bytes_of(block)
        for offset, begin, end in self._pieces(first, last):
            read_exactly(file, raw[begin:end], offset, self.stored.shard)
        return block.T if self.transposed else block

    def write(self, file: int, first: int, block: Tensor) -> None:
        """Put rows, shape as read, back where rows first, first + 1, ... lie."""
        last = first + block.shape[0]
        laid = (block.T if self.transposed else block).contiguous()
        raw = _bytes_of(laid)
        for offset, begin, end in self._pieces(first, last):
            write_exactly(file, raw[begin:end], offset)

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
        self.shards = [folder / name for name in self._shard_names()]
        self.tensors: dict[str, StoredTensor] = {}
        for shard in self.shards:
            for tensor in read_header(shard):
                if tensor.name in self.tensors:
                    raise UserError(f"{shard}: tensor {tensor.name} is also in {self.tensors[tensor.name].shard.name}.")
                self.tensors[tensor.name] = tensor
        for name, file in self._weight_map.items():
            if name not in self.tensors or self.tensors[name].shard.name != file:
                raise UserError(
                    f"{folder / INDEX_NAME}: it places {name} in {file}, which does not hold it. Index and shards are not of "
                    "one model; download them again."
                )

    @cached_property
    def config(self) -> dict[str, Any]:
        """config.json; empty where there is none."""
        return read_json(self.folder / "config.json") if (self.folder / "config.json").is_file() else {}

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
                digest.update(os.pread(files[tensor.shard], min(256, tensor.end - middle), middle))
        finally:
            for file in files.values():
                os.close(file)
        return {"sha256_of_samples": digest.hexdigest()}

    def side_files(self) -> list[Path]:
        """Files, relative to the folder, that belong to the model and hold no weights: config, tokenizer, licence, code."""
        found = []
        for path in sorted(self.folder.rglob("*")):
            relative = path.relative_to(self.folder)
            if not path.is_file() or any(part.startswith(".") for part in relative.parts):
                continue
            if path.suffix in OTHER_WEIGHTS or relative.parts[0] == "emp_llm":
                continue
            if relative.name in ("README.md", "emp_report.json") or relative.name.endswith(".index.json"):
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
        weight_map = read_json(path).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
            raise UserError(f"{path}: its weight_map must map tensor names to file names. Download it again.")
        return weight_map

    def _shard_names(self) -> list[str]:
        if (self.folder / SINGLE_NAME).is_file():
            return [SINGLE_NAME]
        if not self._weight_map:
            raise UserError(_why_no_safetensors(self.folder))
        names = sorted(set(self._weight_map.values()))
        for name in names:
            if Path(name).name != name:
                raise UserError(
                    f"{self.folder / INDEX_NAME}: {name!r} is not the plain name of a file in this folder. Do not trust it."
                )
            if not (self.folder / name).is_file():
                raise UserError(f"{self.folder / INDEX_NAME}: it names {name}, which is missing. Download the model again.")
        return names


def read_header(shard: Path) -> list[StoredTensor]:
    """The tensors of a safetensors file in the order of their bytes; every byte after the header belongs to one.

    Raises:
        UserError: the file is truncated or corrupt.
    """
    try:
        with safe_open(shard, framework="pt"):  # the library's own checks: sizes, overlaps, gaps, duplicates
            pass
        with shard.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
    except (SafetensorError, OSError, ValueError) as error:
        raise UserError(f"{shard}: not a complete safetensors file ({reason(error)}). Download or convert it again.") from error
    base = 8 + length
    tensors = [
        StoredTensor(name, shard, entry["dtype"], tuple(entry["shape"]), *(base + o for o in entry["data_offsets"]))
        for name, entry in header.items()
        if name != "__metadata__"
    ]
    return sorted(tensors, key=lambda tensor: (tensor.start, tensor.end))


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; UserError where it is not one."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read as JSON ({reason(error)}). Download it again.") from error
    if not isinstance(value, dict):
        raise UserError(f"{path}: expected a JSON object.")
    return value


def _bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    view: Any = tensor.view(torch.uint8).reshape(-1).numpy()
    return memoryview(view)


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
