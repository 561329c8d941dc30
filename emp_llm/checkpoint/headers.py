"""Headers of untrusted safetensors files.

Sizes claimed by a file are checked before memory is allocated, and a contradictory header is
refused in a sentence.
"""

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from emp_llm.checkpoint.files import parse_json, unique_keys
from emp_llm.common.errors import UserError, quotable, reason

HEADER_LIMIT = 100_000_000  # the limit in safetensors
_DIMENSIONS = 32
_LARGEST = 1 << 63
BITS = {  # bits per number, by the safetensors name of the dtype
    "F4": 4,
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(
        ("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8
    ),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
}


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a shard.

    Attributes:
        name: its name in the checkpoint.
        shard: its file.
        dtype: its safetensors name ("BF16").
        shape: as stored.
        start, end: offsets in the file of the first byte and of the byte after the last one.
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


def read_header(shard: Path) -> list[StoredTensor]:
    """The tensors of a safetensors file in the order of their bytes. Every byte after the header
    belongs to exactly one tensor.

    Raises:
        UserError: the file is truncated or corrupt, or its header is invalid.
    """
    try:
        return parse_header(header_text(shard), shard, shard.stat().st_size)
    except (OSError, ValueError) as error:
        raise UserError(
            f"{shard}: not a complete safetensors file ({reason(error)}). Download or "
            "convert it again."
        ) from error


def header_text(shard: Path) -> bytes:
    """The JSON text of a safetensors file's header, with its trailing spaces; ValueError if it is
    incomplete.
    """
    with shard.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            raise ValueError("it ends before its header does")
        if length > HEADER_LIMIT:
            raise ValueError(
                f"its header claims {length:,} bytes, and {HEADER_LIMIT:,} are allowed"
            )
        return file.read(length)


def parse_header(raw: bytes, shard: Path, size: int) -> list[StoredTensor]:
    """The tensors of a safetensors file of `size` bytes, from the JSON text of its header;
    ValueError if the header is invalid.
    """
    if not raw.startswith(b"{"):
        raise ValueError("its header is not a JSON object")
    header = parse_json(
        raw,
        object_pairs_hook=unique_keys,
        parse_int=_whole,
        parse_float=_no_number,
        parse_constant=_no_number,
    )
    _check_metadata(header.pop("__metadata__", {}))
    tensors = [_tensor(name, entry, shard, 8 + len(raw), size) for name, entry in header.items()]
    tensors.sort(key=lambda tensor: (tensor.start, tensor.end))
    position = 8 + len(raw)
    for tensor in tensors:
        if tensor.start < position:
            raise ValueError(f"tensor {quotable(tensor.name)} overlaps the tensor before it")
        if tensor.start > position:
            raise ValueError(f"tensor {quotable(tensor.name)} leaves a gap before it")
        position = tensor.end
    if position != size:
        raise ValueError(f"{size - position:,} bytes at its end belong to no tensor")
    return tensors


def _whole(text: str) -> int:
    return int(text) if text != "-0" else _no_number(text)


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{quotable(text)} is not a whole number")


def _check_metadata(metadata: Any) -> None:
    if metadata is None:  # as safetensors reads it
        return
    is_map = isinstance(metadata, dict)
    if not is_map or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError("its __metadata__ is not a map of strings")


def _tensor(name: str, entry: Any, shard: Path, base: int, size: int) -> StoredTensor:
    title = quotable(name)
    if not name.isprintable():
        raise ValueError(f"the tensor name {title} is not printable")
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise ValueError(f"tensor {title} has no dtype, shape and data_offsets")
    dtype = entry["dtype"]
    shape = entry["shape"]
    offsets = entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS:
        raise ValueError(f"tensor {title} is of an unknown dtype, {quotable(str(dtype))}")
    if not _naturals(shape) or len(shape) > _DIMENSIONS:
        raise ValueError(
            f"the shape of tensor {title} is not a list of at most {_DIMENSIONS} sizes"
        )
    if not _naturals(offsets) or len(offsets) != 2 or not offsets[0] <= offsets[1] <= size - base:
        raise ValueError(f"the data_offsets of tensor {title} do not lie within the file")
    if math.prod(shape) * BITS[dtype] >= _LARGEST or math.prod(filter(None, shape)) >= _LARGEST:
        raise ValueError(f"the shape of tensor {title} is too large")
    if math.prod(shape) * BITS[dtype] != (offsets[1] - offsets[0]) * 8:
        raise ValueError(f"tensor {title} does not have the bytes that its dtype and shape need")
    return StoredTensor(name, shard, dtype, tuple(shape), base + offsets[0], base + offsets[1])


def _naturals(value: Any) -> bool:
    return isinstance(value, list) and all(
        type(number) is int and 0 <= number < _LARGEST for number in value
    )
