"""Packing a checkpoint: block after block out of each shard, taken apart and written; see `packed` for the format."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm
from xxhash import xxh3_128

from emp_llm.models.bits import WORD, Words, mask_bytes, mask_of, values_of
from emp_llm.models.checkpoint import OTHER_WEIGHTS, PACK_NAME, Checkpoint
from emp_llm.models.codec import Zstd
from emp_llm.models.digests import Digests, digest_of
from emp_llm.models.direct import Buffers, bytes_of
from emp_llm.models.errors import UserError
from emp_llm.models.files import Behind, OpenFiles, Stream, ahead, replace_json
from emp_llm.models.headers import BITS, StoredTensor, header_text, read_json
from emp_llm.models.packed import (
    FORMAT,
    SUFFIX,
    Form,
    Manner,
    packed_bytes,
    packed_name,
    read_words,
    word_bytes,
    words_in,
)
from emp_llm.models.recipe import REPORT_NAME

THREADS = min(4, os.cpu_count() or 1)
_GUESSED = 1 << 16  # words of a tensor that suggest its form


class Packer:
    """Packs one checkpoint.

    Args:
        checkpoint: the source; only read.
        manner: how.

    Raises:
        UserError: zstd is not installed, or a mask would carry other weights along.
    """

    def __init__(self, checkpoint: Checkpoint, manner: Manner) -> None:
        self.checkpoint, self.manner = checkpoint, manner
        self.coder = Zstd("--zstd") if manner.codec == "zstd" else None
        self.files = [path for path in _files(checkpoint.folder) if checkpoint.folder / path not in checkpoint.shards]
        for path in self.files:
            if path.name.endswith(SUFFIX):
                raise UserError(f"{checkpoint.folder / path}: a file of a packed checkpoint; move it away.")
            if manner.kind == "mask" and path.suffix in OTHER_WEIGHTS and path.parts[0] != "emp_llm":
                raise UserError(f"{checkpoint.folder / path}: other weights, which a mask shall not carry; move the file away.")

    @property
    def largest(self) -> int:
        """Bytes that the packed folder has at most."""
        files = sum((self.checkpoint.folder / path).stat().st_size for path in self.files)
        if self.manner.kind == "mask":
            return files + sum(mask_bytes(words_in(tensor)) for tensor in self.checkpoint.tensors.values())
        return files + sum(shard.stat().st_size for shard in self.checkpoint.shards)

    def write(self, folder: Path) -> dict[str, Any]:
        """Write the packed files into a folder that exists.

        Returns:
            "dense_bytes" and "packed_bytes" of the shards, "file_bytes" of the others, "tensors", and how many are "sparse".

        Raises:
            UserError: a file changed while it was read, or there are no zeros for a mask to tell of.
        """
        sizes = {shard.name: shard.stat().st_size for shard in self.checkpoint.shards}
        forms: list[Form] = []
        bar = tqdm(total=sum(sizes.values()), desc="pack", unit="B", unit_scale=True, disable=None)
        with bar, Digests(new=xxh3_128) as digests:
            for shard in self.checkpoint.shards:
                tensors = [tensor for tensor in self.checkpoint.tensors.values() if tensor.shard == shard]
                forms += ShardPacker(self, tensors, shard, folder / packed_name(shard.name), digests, bar).write()
            checksums = digests.finish()
        self.checkpoint.check_unchanged()
        if self.manner.kind == "mask" and "sparse" not in forms:
            raise UserError(f"{self.checkpoint.folder}: it has no zeros, so there is no mask. Give a pruned checkpoint.")
        for path in self.files:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(self.checkpoint.folder / path, folder / path)
        shards = {
            shard.name: {
                "bytes": sizes[shard.name],
                "xxh3_128": checksums[shard.name],
                "header": header_text(shard).decode("utf-8"),
            }
            for shard in self.checkpoint.shards
        }
        files = {
            path.as_posix(): {"bytes": (folder / path).stat().st_size, "sha256": digest_of(folder / path)}
            for path in self.files
        }
        told = {"format": FORMAT, "kind": self.manner.kind, "codec": self.manner.codec, "block": self.manner.block}
        replace_json(folder / PACK_NAME, told | {"base": self._base(), "shards": shards, "files": files})
        return {
            "dense_bytes": sum(sizes.values()),
            "packed_bytes": sum((folder / packed_name(name)).stat().st_size for name in sizes),
            "file_bytes": sum(entry["bytes"] for entry in files.values()),
            "tensors": len(forms),
            "sparse": forms.count("sparse"),
        }

    def _base(self) -> dict[str, Any] | None:
        path = self.checkpoint.folder / REPORT_NAME
        source = read_json(path).get("source") if path.is_file() else None
        return source if isinstance(source, dict) else None


class ShardPacker:
    """The packing of one shard.

    A tensor's form depends on its zeros, which are known at its end: it is written in the form that its first block suggests,
    and again where that was wrong, which is rare and costs less than to read everything twice.
    """

    def __init__(
        self, packer: Packer, tensors: list[StoredTensor], shard: Path, target: Path, digests: Digests, bar: Any
    ) -> None:
        self.manner, self.coder, self.shard, self.target = packer.manner, packer.coder, shard, target
        self.digests, self.bar = digests, bar
        # Larger numbers first: so each tensor begins at a multiple of its own numbers' size.
        self.tensors = sorted(tensors, key=lambda tensor: (-word_bytes(tensor), tensor.start, tensor.end))
        self._names = {tensor.name for tensor in tensors}
        self._parts: dict[str, dict[str, Any]] = {}  # as in the header
        self._position = self._base = 0
        self._buffers = Buffers()

    def write(self) -> list[Form]:
        """Write the packed shard, its header last: its length is not exceeded, but what stands in it is known only then.

        Returns:
            The form of each tensor.
        """
        self._base = self._position = len(self._header(self._largest()))
        forms = []
        self.digests.advance(self.shard, 0, min((tensor.start for tensor in self.tensors), default=0))
        with OpenFiles() as files:
            self._here, self._there = files.reading(self.shard), files.writing(self.target)
            with Behind() as self._behind:
                for tensor in self.tensors:
                    forms.append(self._pack(tensor))
                    self.bar.update(tensor.end - tensor.start)
            header = self._header(self._parts)[8:].ljust(self._base - 8)
            self._there.write(memoryview(bytearray(len(header).to_bytes(8, "little") + header)), 0)
        os.truncate(self.target, self._position)
        return forms

    def _pack(self, tensor: StoredTensor) -> Form:
        start = self._position
        first = read_words(self._here, tensor, 0, min(_GUESSED, words_in(tensor)))
        form = self._form(tensor, first.size, first.size - int(np.count_nonzero(first)))
        right = self._form(tensor, words_in(tensor), self._put(tensor, form))
        if right != form:
            for name in self.manner.parts(tensor, form):
                del self._parts[name]
            self._position = start
            self._put(tensor, right)
        return right

    def _form(self, tensor: StoredTensor, words: int, zeros: int) -> Form:
        """The form for a tensor, of which so many words hold so many zeros."""
        if self.manner.kind == "mask":
            return "sparse" if zeros else "base"
        pays = packed_bytes(words, word_bytes(tensor), zeros) < words * word_bytes(tensor) and BITS[tensor.dtype] >= 8
        taken = {f"{tensor.name}{suffix}" for suffix in (".mask", ".values")} & self._names
        return "sparse" if pays and not taken else "dense"

    def _put(self, tensor: StoredTensor, form: Form) -> int:
        """Write a tensor in a form; returns how many zeros it has."""
        if form == "base" or self.coder is None:
            return self._put_raw(tensor, form)
        coder, sizes, total, zeros, stream = self.coder, [], 0, 0, self._stream(0)
        encode = partial(coder.encode, dtype=tensor.dtype, sparse=form == "sparse", values=self.manner.kind == "weights")
        for ones, count, frames in self._over(tensor, lambda words: (np.count_nonzero(words), words.size, encode(words))):
            zeros += count - int(ones)
            sizes.append([len(frame) for frame in frames])
            for frame in frames:
                stream.write(memoryview(frame))
                total += len(frame)
        stream.write(memoryview(bytes(-total % 8)))
        stream.write(memoryview(np.array(sizes, dtype="<u4").tobytes()))
        stream.close()
        self._note(tensor, form, total + -total % 8)
        return zeros

    def _put_raw(self, tensor: StoredTensor, form: Form) -> int:
        words, kept = words_in(tensor), 0
        masks, values = self._stream(0), self._stream(mask_bytes(words) if form == "sparse" else 0)
        wanted = self.manner.kind == "weights"
        for mask, numbers, ones in self._over(tensor, partial(_taken, form=form, values=wanted)):
            if mask is not None:
                masks.write(mask.data)
            if numbers is not None:
                values.write(numbers.view(np.uint8).data)
            kept += ones
        masks.close()
        values.close()
        self._note(tensor, form, kept)
        return words - kept

    def _over(self, tensor: StoredTensor, work: Callable[[Words], Any]) -> Iterator[Any]:
        """What some work returns for each block of a tensor, which is hashed meanwhile, if it comes next in the shard."""
        size = word_bytes(tensor)

        def job(first: int, count: int) -> tuple[int, torch.Tensor, Any]:
            at = tensor.start + first * size
            block = self._buffers.take((1, count * size), torch.uint8, at)
            self._here.read(bytes_of(block), at)
            return at, block, work(np.frombuffer(bytes_of(block), dtype=WORD[size]))

        for at, block, done in ahead((partial(job, *part) for part in self.manner.blocks(tensor)), THREADS):
            digest = self.digests.add(self.shard, at, bytes_of(block))
            yield done
            if digest is not None:
                digest.result()
            self._buffers.give(block)

    def _stream(self, offset: int) -> Stream:
        """Where to write a part of the tensor that is being packed."""
        return Stream(self._there, self._position + offset, self._buffers, self._behind)

    def _note(self, tensor: StoredTensor, form: Form, length: int) -> None:
        """A tensor is written: put its parts into the header, the one of unknown length with that, and go behind them."""
        for name, (dtype, shape) in self.manner.parts(tensor, form).items():
            known = [length if side is None else side for side in shape]
            end = self._position + _bytes(known, dtype)
            self._parts[name] = {
                "dtype": dtype,
                "shape": known,
                "data_offsets": [self._position - self._base, end - self._base],
            }
            self._position = end

    def _header(self, parts: dict[str, dict[str, Any]]) -> bytes:
        raw = json.dumps({"__metadata__": {"format": "pt"}} | parts, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
        raw = raw.ljust(-(-len(raw) // 8) * 8)
        return len(raw).to_bytes(8, "little") + raw

    def _largest(self) -> dict[str, dict[str, Any]]:
        """Parts whose header is at least as long as the one to be written."""
        most = 10 ** len(str(4 * self.shard.stat().st_size)) - 1
        return {
            f"{tensor.name}{suffix}": {
                "dtype": tensor.dtype,
                "shape": [*tensor.shape, most, most],
                "data_offsets": [most, most],
            }
            for tensor in self.tensors
            for suffix in (".values", ".frames")
        }


def _taken(words: Any, form: Form, values: bool) -> tuple[Any, Any, int]:
    """Of a block: its mask and its values, as far as a form has them, and how many words are not zero."""
    if form == "sparse":
        kept = values_of(words) if values else None
        return mask_of(words), kept, int(np.count_nonzero(words)) if kept is None else kept.size
    return None, words if form == "dense" else None, int(np.count_nonzero(words))


def _bytes(shape: list[int], dtype: str) -> int:
    numbers = 1
    for side in shape:
        numbers *= side
    return numbers * BITS[dtype] // 8


def _files(folder: Path) -> list[Path]:
    """Every file of a model folder, relative to it, but hidden ones, which downloads leave."""
    found = []
    for path in sorted(folder.rglob("*")):
        relative = path.relative_to(folder)
        if path.is_file() and not any(part.startswith(".") for part in relative.parts):
            found.append(relative)
    return found
