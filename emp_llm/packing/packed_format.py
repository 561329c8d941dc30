"""The format of packed checkpoints.

The packed folder of a model holds every shard `NAME.safetensors` as `NAME.packed.safetensors`, every other file unchanged, and
`emp_pack.json`, which lists them all. Packed shards are ordinary safetensors files, and every byte of the original shard can be
restored from them.

**emp_pack.json**: `format` is "emp-llm pack 3"; `kind` "weights" or "mask"; `codec` "raw" or "zstd"; `block`, a number of
words, a multiple of 64; `shards` maps the name of each original shard to its size in `bytes`, its `blake3`, the text of its
`header`, and `packed`, the `blake3` of the packed file, which earlier versions left out; `files` maps the path of each other
file to its `bytes` and `blake3`; `base` is the source in the report of the pruning run, or null. In format 2 the hashes are
`xxh3_128` of shards and `sha256` of files.

**Tensors** are sequences of words: numbers of 1, 2, 4 or 8 bytes in their stored order, whatever the shape; numbers of less
than 8 bits are taken as bytes. A word is zero if no bit of it is set; -0.0 is a value. A packed shard holds a tensor

- dense, raw: as `NAME`, unchanged. (A mask would cost more than the zeros save.)
- sparse, raw: as `NAME.mask`, U8: one bit for each word, the lowest bit of the first byte first, 1 if the word is not zero;
  padded with zeros to a multiple of 8 bytes. And `NAME.values`, of the original's dtype, one dimension: the words that are not
  zero, in order.
- dense or sparse, zstd: as `NAME.frames`, U8: the zstd frames of each block of `block` words, concatenated and padded with
  zeros to a multiple of 8 bytes. And `NAME.sizes`, U32, shape (blocks, frames in a block): their sizes. If sparse, the first
  frame of a block is its mask. The others are byte planes of its values, the highest plane first, each value rotated left by
  one bit, so that the sign is next to the lowest bits of the mantissa. The highest plane of BF16 and F32 is the exponent. It is
  written as 15 frequent bytes; then half a byte for each byte of the plane, the low half first: its index in that list, or 15
  for a byte that is not in the list and for the missing half of a last pair; then the bytes that are not in the list.
- in a folder of kind "mask": as the mask alone, `NAME.mask` or its frames; a tensor without zeros has no entry.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from emp_llm.checkpoint.safetensors_header import StoredTensor
from emp_llm.checkpoint.words import mask_bytes, word_bytes, words_in
from emp_llm.common.wording import quotable

FORMAT = "emp-llm pack 3"
OLD_FORMAT = "emp-llm pack 2"
SUFFIX = ".packed.safetensors"
BLOCK = 1 << 20
_LARGEST_BLOCK = 1 << 23

PackKind = Literal["weights", "mask"]
Codec = Literal["raw", "zstd"]
Form = Literal["sparse", "dense", "base"]  # base: no entry, the words of the base model


@dataclass(frozen=True)
class PackLayout:
    """How a folder is packed, in the words of emp_pack.json.

    Raises:
        ValueError: an unknown kind or codec, or a block that is no multiple of 64 or too large.
    """

    kind: PackKind = "weights"
    codec: Codec = "raw"
    block: int = BLOCK

    def __post_init__(self) -> None:
        if self.kind not in ("weights", "mask") or self.codec not in ("raw", "zstd"):
            raise ValueError(f"unknown kind {quotable(str(self.kind))} or codec {quotable(str(self.codec))}")
        if type(self.block) is not int or not 64 <= self.block <= _LARGEST_BLOCK or self.block % 64:
            raise ValueError(f"its block is not a multiple of 64 from 64 to {_LARGEST_BLOCK}")

    def blocks(self, tensor: StoredTensor) -> Iterator[tuple[int, int]]:
        """(first word, number of words) of each block of a tensor."""
        words = words_in(tensor)
        return ((first, min(self.block, words - first)) for first in range(0, words, self.block))

    def frames(self, tensor: StoredTensor, form: Form) -> int:
        """The number of zstd frames in a block of a tensor."""
        return (form == "sparse") + (word_bytes(tensor) if self.kind == "weights" else 0)

    def parts(self, tensor: StoredTensor, form: Form) -> dict[str, tuple[str, tuple[int | None, ...]]]:
        """Name -> (dtype, shape) of each entry that a packed shard has for a tensor; None for lengths that depend on values."""
        name, mask = tensor.name, ("U8", (mask_bytes(words_in(tensor)),))
        if form == "base":
            return {}
        if self.codec == "zstd":
            sizes = (-(-words_in(tensor) // self.block), self.frames(tensor, form))
            return {f"{name}.frames": ("U8", (None,)), f"{name}.sizes": ("U32", sizes)}
        if form == "dense":
            return {name: (tensor.dtype, tensor.shape)}
        if self.kind == "mask":
            return {f"{name}.mask": mask}
        return {f"{name}.mask": mask, f"{name}.values": (tensor.dtype, (None,))}


def packed_name(shard: str) -> str:
    """The name of a shard's packed file."""
    return shard.removesuffix(".safetensors") + SUFFIX
