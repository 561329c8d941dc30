"""Writing a checkpoint with fewer heads or neurons: the same shards, order and dtypes, with smaller tensors or zeros.

A shard that an interrupted run finished is not written again.
"""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from blake3 import blake3

from emp_llm.checkpoint.checkpoint import Checkpoint
from emp_llm.checkpoint.files import INDEX_LIMIT, FilePool, read_json, sync_path, write_json
from emp_llm.checkpoint.headers import StoredTensor, header_text
from emp_llm.checkpoint.matrices import Words, read_words, words_in
from emp_llm.common.paths import INDEX_NAME
from emp_llm.common.progress import progress_bar
from emp_llm.structure.smaller_config import Field, changed_config
from emp_llm.structure.tensor_edits import FittedWords, TensorEdit, bytes_of_shape

_WORDS = 1 << 22  # of an unchanged tensor, read at a time
_ALIGNMENT = 8  # of the first tensor, as in safetensors


class UnitWriter:
    """Writes one checkpoint.

    Args:
        checkpoint: the dense model.
        edits: the changed tensors, by name.
        changes: fields of config.json that change; None: units are set to zero, and all shapes stay.
        fitted: returns the fitted weights of a layer as words, or None.
    """

    def __init__(
        self, checkpoint: Checkpoint, edits: Mapping[str, TensorEdit], changes: Mapping[Field, Any] | None, fitted: FittedWords
    ) -> None:
        self._checkpoint = checkpoint
        self._edits = edits
        self._changes = changes
        self._fitted = fitted

    def write(self, folder: Path, done: Mapping[str, str], note: Callable[[dict[str, str]], None]) -> dict[str, str]:
        """Write shards and side files into a folder.

        Args:
            folder: exists; empty, or with the files of an interrupted run.
            done: BLAKE3 of the shards that an interrupted run finished, by name.
            note: called with the hashes of all finished shards after each.

        Returns:
            BLAKE3 of each shard.
        """
        checkpoint, hashes = self._checkpoint, dict(done)
        self._write_side_files(folder)
        total = sum(shard.stat().st_size for shard in checkpoint.shards)
        with progress_bar(total, "write", "B") as bar, FilePool() as files:
            for shard in checkpoint.shards:
                if shard.name not in hashes or not (folder / shard.name).is_file():
                    hashes[shard.name] = self._write_shard(shard, folder / shard.name, files)
                    note(hashes)
                bar.update(shard.stat().st_size)
        checkpoint.check_unchanged()
        return hashes

    @property
    def total_bytes(self) -> int:
        """Size of all tensors of the new checkpoint."""
        return sum(self._bytes(tensor) for tensor in self._checkpoint.tensors.values())

    @property
    def parameters(self) -> int:
        """Number of elements of all tensors of the new checkpoint."""
        count = 0
        for tensor in self._checkpoint.tensors.values():
            size = 1
            for length in self._shape(tensor):
                size *= length
            count += size
        return count

    def _write_shard(self, shard: Path, path: Path, files: FilePool) -> str:
        tensors = [tensor for tensor in self._checkpoint.tensors.values() if tensor.shard == shard]
        digest, offset, entries = blake3(), 0, {}
        for tensor in sorted(tensors, key=lambda tensor: tensor.start):
            size = self._bytes(tensor)
            entries[tensor.name] = {
                "dtype": tensor.dtype,
                "shape": list(self._shape(tensor)),
                "data_offsets": [offset, offset + size],
            }
            offset += size
        old = json.loads(header_text(shard))
        header = ({"__metadata__": old["__metadata__"]} if "__metadata__" in old else {}) | {
            name: entries[name] for name in old if name in entries
        }
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % _ALIGNMENT)
        with path.open("wb") as file:
            for piece in chain([len(text).to_bytes(8, "little") + text], self._content(tensors, files)):
                file.write(piece)
                digest.update(piece)
        sync_path(path)
        return str(digest.hexdigest())

    def _content(self, tensors: list[StoredTensor], files: FilePool) -> Iterator[bytes]:
        for tensor in sorted(tensors, key=lambda tensor: tensor.start):

            def read(first: int, count: int, tensor: StoredTensor = tensor) -> Words:
                return read_words(files.reader(tensor.shard), tensor, first, count)

            edit = self._edits.get(tensor.name)
            if edit is not None:
                pieces = edit.pieces(read, self._changes is not None, self._fitted)
            else:
                count = words_in(tensor)
                pieces = (read(first, min(_WORDS, count - first)) for first in range(0, count, _WORDS))
            for words in pieces:
                yield words.tobytes()

    def _shape(self, tensor: StoredTensor) -> tuple[int, ...]:
        edit = self._edits.get(tensor.name)
        return tensor.shape if edit is None or self._changes is None else edit.smaller_shape

    def _bytes(self, tensor: StoredTensor) -> int:
        edit = self._edits.get(tensor.name)
        if edit is None or self._changes is None:
            return tensor.end - tensor.start
        return bytes_of_shape(tensor, edit.smaller_shape)

    def _write_side_files(self, folder: Path) -> None:
        source = self._checkpoint.folder
        for relative in self._checkpoint.side_files():
            (folder / relative.parent).mkdir(parents=True, exist_ok=True)
            if self._changes is not None and str(relative) == "config.json":
                write_json(folder / relative, changed_config(read_json(source / relative), self._changes))
            elif self._changes is not None and str(relative) == INDEX_NAME:
                index = read_json(source / relative, limit=INDEX_LIMIT)
                sizes = {"total_size": self.total_bytes, "total_parameters": self.parameters}
                metadata = index.get("metadata") or {}
                known = {name: size for name, size in sizes.items() if name in metadata}
                write_json(folder / relative, index | {"metadata": metadata | known})
            else:
                shutil.copyfile(source / relative, folder / relative)
