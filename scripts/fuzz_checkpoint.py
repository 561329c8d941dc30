"""Fuzzing of the readers of model folders and of packed folders, with damaged and hostile files.

    python scripts/fuzz_checkpoint.py [--reader NAME] [--executions 800000] [--minutes 15] [--write]

Each execution damages a valid safetensors file, index or config (bytes, JSON values, lengths,
structure) and reads it. Two outcomes are right: a UserError on one line, or tensors that tile the
file exactly and have the names that the safetensors library reads. In packed folders, values,
masks, lengths, names and original headers change, and all hashes are computed again. The weights of
each layer that the runtime takes must be those that `unpack` writes, and the positions of its rows
the counts of its bits; then it is multiplied. Anything else is a crash, and more than 5 seconds are
a hang. A read outside a mapping may end the script. The table shows the peak of Python's
allocations in one execution. The exit code is 1 after a crash or a hang.
"""

import argparse
import json
import math
import random
import shutil
import signal
import string
import sys
import tempfile
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from emp_llm.checkpoint.checkpoint import Checkpoint, StoredTensor, read_header
from emp_llm.checkpoint.files import file_hash
from emp_llm.checkpoint.packed import PackedShard, PackLayout, pack_checkpoint
from emp_llm.common.errors import UserError
from emp_llm.common.paths import PACK_NAME
from emp_llm.runtime.loader import StoredWeights, products_of

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
INDEX = "model.safetensors.index.json"
_SECONDS = 5
_NUMBERS = [
    0,
    1,
    -1,
    2,
    7,
    8,
    255,
    2**31,
    2**32 - 1,
    2**53,
    2**63 - 1,
    2**63,
    2**64 - 1,
    2**64,
    10**30,
    0.0,
    1.5,
    1e308,
    True,
]
_NAMES = [
    "a",
    "__metadata__",
    "dtype",
    "shape",
    "data_offsets",
    "weight_map",
    "../x.safetensors",
    "/etc/passwd",
    "..",
    ".",
    "",
]
_NAMES += [
    "a\0b.safetensors",
    "a\nb",
    "\ud800",
    "x" * 300 + ".safetensors",
    "sub/x.safetensors",
    "C:\\x.safetensors",
    *SHARDS,
]
_DTYPES = [
    "BF16",
    "F32",
    "F64",
    "BOOL",
    "F4",
    "F6_E2M3",
    "F8_E8M0",
    "C64",
    "f32",
    "F128",
    "",
    "BF16 ",
]
_RAW = [
    b'"',
    b"{",
    b"}",
    b"[",
    b"]",
    b",",
    b":",
    b"null",
    b"NaN",
    b"Infinity",
    b"-",
    b"1e999",
    b"\\u0000",
    b"\xff",
    b" ",
    b"0",
]
_RAW += [b"[" * 5000, b'{"a":' * 5000, b"9" * 5000, b'"a":1,' * 50]
_SIZES = {"BF16": 2, "F32": 4, "F64": 8, "BOOL": 1}


class Hang(BaseException):
    """An execution took too long."""


def sound_header(rng: random.Random) -> dict[str, Any]:
    """The header of a valid file with one to five small tensors."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}} if rng.random() < 0.7 else {}
    position = 0
    for i in range(rng.randint(1, 5)):
        dtype = rng.choice(list(_SIZES))
        shape = [rng.randint(0, 4) for _ in range(rng.randint(0, 3))]
        size = _SIZES[dtype]
        for length in shape:
            size *= length
        name = f"layers.{i}.weight{rng.choice(string.ascii_letters)}"
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, position + size]}
        position += size
    return header


def damaged_value(value: Any, rng: random.Random) -> Any:
    """A JSON value with one part replaced, removed, added or renamed."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        changed = dict(value)
        key = rng.choice(list(changed))
        what = rng.random()
        if what < 0.65:
            changed[key] = damaged_value(changed[key], rng)
        elif what < 0.8:
            changed[rng.choice(_NAMES)] = changed.pop(key)
        elif what < 0.9:
            del changed[key]
        else:
            changed[rng.choice(_NAMES)] = anything(rng, 3)
        return changed
    if isinstance(value, list) and value and rng.random() < 0.8:
        position = rng.randrange(len(value))
        return rng.choice(
            [
                value[:position],
                value + value,
                [*value[:position], anything(rng, 2), *value[position + 1 :]],
            ]
        )
    if type(value) is int and rng.random() < 0.7:
        return value + rng.choice([-8, -4, -2, -1, 1, 2, 4, 8, 1 << 32])
    return anything(rng, 3)


def anything(rng: random.Random, depth: int) -> Any:
    """A random JSON value."""
    what = rng.random()
    if depth and what < 0.15:
        return {rng.choice(_NAMES): anything(rng, depth - 1) for _ in range(rng.randint(0, 3))}
    if depth and what < 0.3:
        return [anything(rng, depth - 1) for _ in range(rng.randint(0, 3))]
    if what < 0.35:
        return [2**40] * 2000
    return rng.choice([None, *_NUMBERS, *_NAMES, *_DTYPES])


def damaged_bytes(raw: bytes, rng: random.Random) -> bytes:
    """Bytes with a few of them flipped, inserted, removed or repeated."""
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(raw) + 1)
        span = rng.randint(1, 20)
        what = rng.randrange(4)
        if what == 0 and at < len(raw):
            raw = raw[:at] + bytes([raw[at] ^ 1 << rng.randrange(8)]) + raw[at + 1 :]
        elif what == 1:
            raw = raw[:at] + rng.choice(_RAW) + raw[at:]
        elif what == 2:
            raw = raw[:at] + raw[at + span :]
        else:
            raw = raw[:at] + raw[at : at + span] * 2 + raw[at + span :]
    return raw


def shard_bytes(header: dict[str, Any], rng: random.Random, damage: bool) -> bytes:
    """A safetensors file with a header, damaged or not."""
    sizes = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    length = max(sizes, default=0)
    if damage and rng.random() < 0.6:
        for _ in range(rng.randint(1, 2)):
            header = damaged_value(header, rng)
    raw = json.dumps(header).encode()
    if damage and rng.random() < 0.3:
        raw = damaged_bytes(raw, rng)
    claimed = len(raw)
    if damage and rng.random() < 0.15:
        claimed = rng.choice(
            [0, 1, claimed - 1, claimed + 1, 10**8, 10**8 + 1, 2**31, 2**63, 2**64 - 1]
        )
    if damage and rng.random() < 0.1:
        length += rng.choice([-1, 1, 8])
    whole = (claimed % 2**64).to_bytes(8, "little") + raw + b"\1" * max(0, length)
    return whole[: rng.randrange(len(whole))] if damage and rng.random() < 0.05 else whole


def fuzz_header(folder: Path, rng: random.Random) -> None:
    """Read one damaged file."""
    shard = folder / "x.safetensors"
    shard.write_bytes(shard_bytes(sound_header(rng), rng, rng.random() < 0.97))
    tensors = read_header(shard)
    with shard.open("rb") as file:
        position = 8 + int.from_bytes(file.read(8), "little")
    for tensor in tensors:
        assert tensor.start == position, "tensors tile the file"
        position = tensor.end
    assert position == shard.stat().st_size
    try:
        with safe_open(shard, framework="numpy") as file:
            assert set(file.keys()) == {tensor.name for tensor in tensors}
    except SafetensorError as error:
        raise AssertionError(f"accepted here and refused by safetensors: {error}") from error


def fuzz_folder(folder: Path, rng: random.Random) -> None:
    """Read a folder of two shards, an index and a config, one of them damaged."""
    which = rng.choice(["index", "index", "config", "shard", "none"])
    weight_map: dict[str, Any] = {}
    for number, name in enumerate(SHARDS):
        header = {
            key.replace("layers", f"layers{number}"): value
            for key, value in sound_header(rng).items()
        }
        weight_map |= {key: name for key in header if key != "__metadata__"}
        (folder / name).write_bytes(shard_bytes(header, rng, which == "shard"))
    for name, value in (
        (INDEX, {"weight_map": weight_map}),
        ("config.json", {"num_hidden_layers": 2, "rope": {"a": [1, 2]}}),
    ):
        damage = which in name
        text = json.dumps(
            damaged_value(value, rng) if damage and rng.random() < 0.7 else value
        ).encode()
        (folder / name).write_bytes(
            damaged_bytes(text, rng) if damage and rng.random() < 0.5 else text
        )
    checkpoint = Checkpoint(folder)
    assert checkpoint.config is not None
    assert {shard.parent for shard in checkpoint.shards} == {folder}, (
        "no shard lies outside of the folder"
    )


def fuzz_packed(folder: Path, rng: random.Random) -> None:
    """Read a packed folder, damaged or not, and multiply its layers."""
    model = folder / "model"
    packed = folder / "packed"
    for each in (model, packed):
        shutil.rmtree(each, ignore_errors=True)
        each.mkdir()
    header, data = sparse_shard(rng)
    write_shard(model / "model.safetensors", header, data)
    zstd = rng.choice([False, False, False, True])
    layout = PackLayout(zstd=zstd, chunk=rng.choice([64, 128, 1 << 20]))
    pack_checkpoint(Checkpoint(model), layout, [], packed)
    told = json.loads((packed / PACK_NAME).read_text())
    raw = (packed / "model.packed.safetensors").read_bytes()
    end = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:end])
    data = bytearray(raw[end:])
    odd = 0
    for _ in range(rng.choice([0, 1, 1, 1, 2, 3])):
        what = rng.randrange(10)
        if what < 4:
            header, data = other_numbers(header, data, rng)
        elif what < 6:
            other_original(told, header, rng)
        elif what == 6:
            odd = rng.randint(1, 7)
        elif what == 7:
            header = damaged_value(header, rng)
        elif what == 8:
            told = damaged_value(told, rng)
        else:
            told["shards"]["more.safetensors"] = told["shards"].get("model.safetensors")
        if (
            not isinstance(header, dict)
            or not isinstance(told, dict)
            or not isinstance(told.get("shards"), dict)
        ):
            break
    for name, entry in (
        told["shards"].items()
        if isinstance(told, dict) and isinstance(told.get("shards"), dict)
        else ()
    ):
        if name in ("model.safetensors", "more.safetensors"):
            path = packed / name.replace(".", ".packed.")
            write_shard(path, header, data, odd)
            if isinstance(entry, dict) and isinstance(entry.get("packed"), dict):
                entry["packed"]["blake3"] = file_hash(path)
    (packed / PACK_NAME).write_text(json.dumps(told))
    weights = StoredWeights(packed)
    assert weights.packed is not None
    found = [
        (shard, tensor) for shard in weights.packed.shards.values() for tensor in shard.tensors
    ]
    assert len({tensor.name for _, tensor in found}) == len(found), "a name has one tensor"
    used = [
        (shard, name)
        for shard, each in found
        for name in shard.layout.entries(each, shard.forms[each.name])
    ]
    assert len(set(used)) == len(used), "no two tensors share bytes"
    for shard, tensor in found:
        check_weights(weights, shard, tensor)


def check_weights(weights: StoredWeights, shard: PackedShard, tensor: StoredTensor) -> None:
    """Both readers of a tensor refuse it, or have the same words; and the places of a layer's
    values lie within them.
    """

    def refused(read: Callable[[], Any]) -> Any:
        try:
            return read()
        except UserError as error:
            return error

    words = refused(lambda: b"".join(each.tobytes() for each in shard.words(tensor)))
    if len(tensor.shape) != 2 or tensor.dtype not in ("BF16", "F16", "F32"):
        if isinstance(words, UserError):
            raise words
        return
    rows = refused(lambda: weights.rows(tensor.name, 0))
    dense = refused(lambda: weights.dense(tensor.name)) if rows is None else rows
    assert isinstance(dense, UserError) == isinstance(words, UserError), (
        f"unpack: {words}; the runtime: {dense}"
    )
    if isinstance(dense, UserError):
        raise dense
    if rows is not None:
        counts = np.bitwise_count(rows.mask.numpy()).sum(axis=1, dtype=np.int64)
        assert rows.offsets.tolist() == [0, *counts.cumsum().tolist()], (
            "the offsets count the bits of the rows"
        )
        assert rows.offsets[-1] == rows.values.numel(), "the values are as many as the bits"
        assert rows.mask.shape == (tensor.shape[0], -(-tensor.shape[1] // 64) * 8), (
            "rows begin with a word"
        )
        assert rows.values.data_ptr() % rows.values.element_size() == 0, "values are aligned"
        dense = rows.dense()
        for tokens in (1, 3):
            products_of(rows)(torch.ones(tokens, tensor.shape[1]))
    assert dense.shape == tensor.shape
    assert dense.contiguous().view(torch.uint8).numpy().tobytes() == words, (
        "the runtime has the words that unpack writes"
    )


def sparse_shard(rng: random.Random) -> tuple[dict[str, Any], bytearray]:
    """The header and the data of a file with a few tensors, in which many words are zero."""
    header: dict[str, Any] = {}
    data = bytearray()
    for i in range(rng.randint(1, 3)):
        dtype, size = rng.choice(
            [("BF16", 2), ("BF16", 2), ("F16", 2), ("F32", 4), ("I64", 8), ("U8", 1)]
        )
        shape = rng.choice(
            [[rng.randint(1, 6), rng.choice([0, 1, 50, 64, 100, 128])]] * 4 + [[130], [2, 3, 64]]
        )
        zeros = rng.random()
        words = bytearray()
        for _ in range(math.prod(shape)):
            words += bytes(size) if rng.random() < zeros else rng.randbytes(size)
        header[f"layers.{i}.weight"] = {
            "dtype": dtype,
            "shape": shape,
            "data_offsets": [len(data), len(data) + len(words)],
        }
        data += words
    return header, data


def write_shard(path: Path, header: Any, data: bytearray, odd: int = 0) -> None:
    """A safetensors file; `odd` bytes more in its header shift the data."""
    raw = json.dumps(header).encode()
    raw = raw.ljust(-(-len(raw) // 8) * 8 + odd)
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + data)


def other_numbers(
    header: dict[str, Any], data: bytearray, rng: random.Random
) -> tuple[dict[str, Any], bytearray]:
    """A packed file with other bits, lengths or names of its entries, whose header fits its
    data.
    """
    entries = {
        name: entry
        for name, entry in header.items()
        if isinstance(entry, dict) and "data_offsets" in entry
    }
    if not entries:
        return header, data
    name = rng.choice([*entries, *(each for each in entries if not each.endswith("weight"))])
    try:
        start, end = entries[name]["data_offsets"]
        what = rng.randrange(4)
        if what < 2 and end > start:  # of a mask or of values, often the last ones
            for _ in range(rng.choice([1, 1, 8])):
                data[rng.choice([end - 1, rng.randrange(start, end)])] = rng.choice(
                    [0, 255, rng.randrange(256)]
                )
        elif what == 2:
            size = max(1, (end - start) // max(1, math.prod(entries[name]["shape"])))
            more = max(rng.choice([-8, -1, 1, 8]), -len(data[start:end]) // size)
            data[end:end] = bytes(max(0, more) * size)
            del data[end + more * size : end]
            for other in entries.values():
                other["data_offsets"] = [
                    at + more * size * (at >= end and at > start) for at in other["data_offsets"]
                ]
            entries[name]["data_offsets"][0] = start
            entries[name]["shape"] = [(end - start) // size + more]
        else:
            twin = rng.choice(list(entries))
            header[name], header[twin] = header[twin], header[name]
    except (TypeError, ValueError, KeyError, IndexError, OverflowError):  # damaged before
        pass
    return header, data


def other_original(told: dict[str, Any], header: dict[str, Any], rng: random.Random) -> None:
    """Another header of the original shard: larger shapes, or tensors with the names of entries
    of others.
    """
    try:
        entry = told["shards"]["model.safetensors"]
        original = json.loads(entry["header"])
        name = rng.choice(list(original))
        what = rng.randrange(3)
        if what == 0:
            original = damaged_value(original, rng)
        else:
            other = rng.choice(list(header)) if what == 1 else name
            length = max(each["data_offsets"][1] for each in original.values())
            copy = dict(
                header.get(other, original[name]),
                shape=rng.choice([[64, 64], original[name]["shape"]]),
            )
            size = (
                math.prod(copy["shape"])
                * {"BF16": 2, "F16": 2, "F32": 4, "I64": 8, "U8": 1}[copy["dtype"]]
            )
            original[other] = copy | {"data_offsets": [length, length + size]}
        entry["header"] = json.dumps(original)
        entry["bytes"] = (
            8 + len(entry["header"]) + max(each["data_offsets"][1] for each in original.values())
        )
    # damaged before.
    except (TypeError, ValueError, KeyError, IndexError, AttributeError, OverflowError):
        pass


def outcome_of(
    fuzz: Callable[[Path, random.Random], None], folder: Path, rng: random.Random
) -> str:
    """ "accepted", "refused", "hang", or the message of the crash."""
    signal.setitimer(signal.ITIMER_REAL, _SECONDS)
    try:
        fuzz(folder, rng)
        return "accepted"
    except UserError as error:
        message = str(error)
        return (
            "refused"
            if "\n" not in message and len(message) < 600 and message.isprintable()
            else f"message: {message!r}"
        )
    except Hang:
        return "hang"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def main(line: list[str] | None = None) -> None:
    """Run, print, and write if asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--reader", choices=list(READERS), action="append", help="default: all of them"
    )
    parser.add_argument(
        "--executions", type=int, default=800_000, help="of each reader; default: 800,000"
    )
    parser.add_argument(
        "--minutes", type=float, default=15, help="time limit of each reader; default: 15"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", help="working folder; default: a temporary folder")
    parser.add_argument(
        "--write",
        action="store_true",
        help="write their rows to scripts/results/fuzz_checkpoint.md",
    )
    arguments = parser.parse_args(line)

    def on_alarm(*_: object) -> None:
        raise Hang

    signal.signal(signal.SIGALRM, on_alarm)
    rows: dict[str, str] = {}
    bad: list[str] = []
    tracemalloc.start()
    for name in arguments.reader or READERS:
        counts: Counter[str] = Counter()
        peak = 0
        start = time.monotonic()
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            for number in range(arguments.executions):
                if time.monotonic() > start + 60 * arguments.minutes:
                    break
                before = tracemalloc.get_traced_memory()[0]
                tracemalloc.reset_peak()
                outcome = outcome_of(
                    READERS[name], Path(folder), random.Random(f"{arguments.seed} {name} {number}")
                )
                peak = max(peak, tracemalloc.get_traced_memory()[1] - before)
                kind = outcome if outcome in ("accepted", "refused", "hang") else "crash"
                counts[kind] += 1
                if kind in ("hang", "crash") and len(bad) < 20:
                    bad.append(f"{name}, number {number}: {outcome}")
        figures = [
            sum(counts.values()),
            *(counts[kind] for kind in ("accepted", "refused", "crash", "hang")),
        ]
        cells = [
            *(f"{figure:,}" for figure in figures),
            f"{peak / 1e6:.1f} MB",
            f"{(time.monotonic() - start) / 60:.0f}",
        ]
        rows[name] = f"| {' | '.join([name, *cells])} |\n"
    tracemalloc.stop()
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    print(HEAD + "".join(rows.values()), *bad, sep="\n")
    if arguments.write:
        old = {
            row.split(" | ")[0].removeprefix("| "): row
            for row in RESULTS.read_text(encoding="utf-8").splitlines(True)
        }
        RESULTS.write_text(
            HEAD + "".join(rows.get(name, old.get(name, "")) for name in READERS), encoding="utf-8"
        )
    sys.exit(1 if bad else 0)


READERS = {
    "safetensors header": fuzz_header,
    "folder: index, config and shards": fuzz_folder,
    "packed folder": fuzz_packed,
}
RESULTS = Path(__file__).parent / "results" / "fuzz_checkpoint.md"
HEAD = """# Damaged and hostile model folders

`python scripts/fuzz_checkpoint.py --write`, on one core. The last row multiplies the layers of the folders that are accepted.

| reader | executions | accepted | refused | crashes | hangs | peak allocation | minutes |
|---|---:|---:|---:|---:|---:|---:|---:|
"""

if __name__ == "__main__":
    main()
