"""The weights of a pruned or packed checkpoint, each packed or dense, as tensors in memory or mapped from the files."""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from blake3 import blake3
from safetensors import safe_open
from safetensors.torch import load as safetensors_load
from torch import Tensor

from emp_llm.checkpoint.checkpoint import Checkpoint
from emp_llm.checkpoint.safetensors_header import StoredTensor
from emp_llm.checkpoint.words import Words, read_words, words_in
from emp_llm.common.errors import UserError
from emp_llm.common.file_names import PACK_NAME
from emp_llm.common.progress_bars import progress_bar
from emp_llm.packing.packed_folder import PackedCheckpoint, PackedFolder, PackedShard, damaged
from emp_llm.packing.packed_format import BLOCK
from emp_llm.packing.unpacker import words_of
from emp_llm.runtime.packed_rows import pack_words
from emp_llm.storage.file_pool import FilePool
from emp_llm.storage.hashing import file_hash

TORCH_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


class StoredWeights(ABC):
    """The weights of a folder, as a context: it ends when their hashes are compared.

    Attributes:
        checkpoint: names, dtypes and shapes of the dense tensors.
        check: compares the hashes meanwhile; None: nothing to compare.
    """

    checkpoint: Checkpoint
    check: "_Background | None" = None

    def __init__(self) -> None:
        self._files: dict[Path, Any] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Wait for the hashes. Their error explains an error of the reader, so it takes its place."""
        if self.check is not None:
            self.check.result()

    def mapped(self, shard: Path, name: str) -> Tensor:
        """A tensor of a safetensors file, mapped into memory."""
        if shard not in self._files:
            self._files[shard] = safe_open(shard, framework="pt")
        tensor: Tensor = self._files[shard].get_tensor(name)
        return tensor

    @abstractmethod
    def packed(self, name: str, least_zeros: float) -> tuple[Tensor, Tensor] | None:
        """Mask and values of a tensor, as they are in a packed file; None if fewer of its weights are zero."""

    @abstractmethod
    def dense(self, name: str) -> Tensor:
        """A tensor with its zeros."""


class CheckpointWeights(StoredWeights):
    """Those of an ordinary checkpoint: packed one after another while they are read."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.checkpoint = Checkpoint(folder)

    def packed(self, name: str, least_zeros: float) -> tuple[Tensor, Tensor] | None:
        tensor = self.checkpoint.tensors[name]
        words = words_in(tensor)
        with FilePool() as files:
            reader = files.reader(tensor.shard)
            starts = range(0, words, BLOCK)
            blocks = (read_words(reader, tensor, first, min(BLOCK, words - first)) for first in starts)
            mask, values = pack_words(blocks, TORCH_DTYPES[tensor.dtype])
        return (mask, values) if words - values.numel() >= least_zeros * words else None

    def dense(self, name: str) -> Tensor:
        return self.mapped(self.checkpoint.tensors[name].shard, name)


class PackedWeights(StoredWeights):
    """Those of a packed folder: masks and values are mapped from its files, or decoded from zstd.

    Args:
        packed: the folder, with weights.
    """

    def __init__(self, packed: PackedFolder) -> None:
        if packed.layout.kind == "mask":
            raise UserError(
                f"{packed.folder}: a mask holds no weights. Unpack it first: emp-llm unpack {packed.folder} DIR --base "
                f"{packed.base_name}"
            )
        super().__init__()
        self.checkpoint: Checkpoint = PackedCheckpoint(packed)
        self._packed = packed
        self._shard_of = {tensor.name: shard for shard in packed.shards.values() for tensor in shard.tensors}

    def packed(self, name: str, least_zeros: float) -> tuple[Tensor, Tensor] | None:
        tensor, shard = self.checkpoint.tensors[name], self._shard_of[name]
        if shard.forms[name] != "sparse":
            return None
        words = words_in(tensor)
        if self._packed.layout.codec == "raw":
            kept = words_in(shard.part(tensor, ".values"))
            return self._parts(shard, name) if words - kept >= least_zeros * words else None
        mask, values = pack_words(self.words(shard, tensor), TORCH_DTYPES[tensor.dtype])
        return (mask, values) if words - values.numel() >= least_zeros * words else None

    def dense(self, name: str) -> Tensor:
        tensor, shard = self.checkpoint.tensors[name], self._shard_of[name]
        if self._packed.layout.codec == "raw" and shard.forms[name] == "dense":
            return self.mapped(shard.path, name)
        raw = b"".join(words.tobytes() for words in self.words(shard, tensor))
        entry = {name: {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [0, len(raw)]}}
        header = json.dumps(entry).encode("utf-8")
        tensors: dict[str, Tensor] = safetensors_load(len(header).to_bytes(8, "little") + header + raw)
        return tensors[name]

    def words(self, shard: PackedShard, tensor: StoredTensor) -> Iterator[Words]:
        """The words of a dense tensor, block by block."""
        with FilePool() as files:
            yield from words_of(shard, tensor, files, self._packed.coder)

    def _parts(self, shard: PackedShard, name: str) -> tuple[Tensor, Tensor]:
        return self.mapped(shard.path, f"{name}.mask"), self.mapped(shard.path, f"{name}.values")


def stored_weights(folder: Path, check: bool) -> StoredWeights:
    """The weights of a pruned or packed folder.

    Args:
        folder: the model folder.
        check: compare the hashes of a packed folder: of its other files at once, of its shards while the caller goes on.

    Raises:
        UserError: the folder is no checkpoint, it is damaged, or it is packed as a mask alone.
    """
    if not (folder / PACK_NAME).is_file():
        return CheckpointWeights(folder)
    packed = PackedFolder(folder)
    weights = PackedWeights(packed)
    if check:
        _check_files(packed)
        weights.check = _Background(partial(_check_shards, packed, weights))
    return weights


class _Background:
    """Work in a thread; `result` waits for it and raises its error."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="emp-llm-check")
        self._future = self._pool.submit(work)

    def result(self) -> None:
        self._pool.shutdown()
        self._future.result()


def _check_files(packed: PackedFolder) -> None:
    for name, (size, kind, wanted) in packed.files.items():
        path = packed.folder / name
        # Files that a model does not need, such as its card, are not downloaded from the Hub.
        if path.is_file() and (path.stat().st_size != size or file_hash(path, kind) != wanted):
            damaged(path, f"its content is not what {PACK_NAME} says")


def _check_shards(packed: PackedFolder, weights: PackedWeights) -> None:
    with progress_bar(sum(shard.path.stat().st_size for shard in packed.shards.values()), "check", "B") as bar:
        for shard in packed.shards.values():
            if shard.packed_digest is not None:
                found, wanted = blake3(max_threads=blake3.AUTO).update_mmap(shard.path).hexdigest(), shard.packed_digest
            else:  # packed by an earlier version, which hashed only the originals
                digest = shard.hasher()
                digest.update(shard.header)
                for tensor in shard.tensors:
                    for words in weights.words(shard, tensor):
                        digest.update(words.view("u1").data)
                found, wanted = digest.hexdigest(), shard.digest
            if found != wanted:
                damaged(shard.path, "its weights do not have the announced checksum")
            bar.update(shard.path.stat().st_size)
