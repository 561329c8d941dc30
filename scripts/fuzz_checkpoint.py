"""Fuzzing of the readers of safetensors headers, indexes and configs with damaged and hostile model folders.

    python scripts/fuzz_checkpoint.py [--executions 1000000] [--minutes 30] [--seed 0] [--folder DIR] [--write]

Each execution damages a valid safetensors file, index or config (bytes, JSON values, lengths, structure) and reads it. Two
outcomes are right: a UserError on one line, or tensors that tile the file exactly and have the names that the safetensors
library reads. Anything else is a crash, and more than 5 seconds are a hang. The table shows the peak of Python's allocations in
one execution. The exit code is 1 after a crash or a hang.
"""

import argparse
import json
import random
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

from safetensors import SafetensorError, safe_open

from emp_llm.checkpoint.checkpoint import Checkpoint
from emp_llm.checkpoint.headers import read_header
from emp_llm.common.errors import UserError

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
INDEX = "model.safetensors.index.json"
_SECONDS = 5
_NUMBERS = [0, 1, -1, 2, 7, 8, 255, 2**31, 2**32 - 1, 2**53, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 10**30, 0.0, 1.5, 1e308, True]
_NAMES = ["a", "__metadata__", "dtype", "shape", "data_offsets", "weight_map", "../x.safetensors", "/etc/passwd", "..", ".", ""]
_NAMES += ["a\0b.safetensors", "a\nb", "\ud800", "x" * 300 + ".safetensors", "sub/x.safetensors", "C:\\x.safetensors", *SHARDS]
_DTYPES = ["BF16", "F32", "F64", "BOOL", "F4", "F6_E2M3", "F8_E8M0", "C64", "f32", "F128", "", "BF16 "]
_RAW = [b'"', b"{", b"}", b"[", b"]", b",", b":", b"null", b"NaN", b"Infinity", b"-", b"1e999", b"\\u0000", b"\xff", b" ", b"0"]
_RAW += [b"[" * 5000, b'{"a":' * 5000, b"9" * 5000, b'"a":1,' * 50]
_SIZES = {"BF16": 2, "F32": 4, "F64": 8, "BOOL": 1}


class Hang(BaseException):
    """An execution took too long."""


def sound_header(rng: random.Random) -> dict[str, Any]:
    """The header of a valid file with one to five small tensors."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}} if rng.random() < 0.7 else {}
    position = 0
    for i in range(rng.randint(1, 5)):
        dtype, shape = rng.choice(list(_SIZES)), [rng.randint(0, 4) for _ in range(rng.randint(0, 3))]
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
        return rng.choice([value[:position], value + value, [*value[:position], anything(rng, 2), *value[position + 1 :]]])
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
        at, span = rng.randrange(len(raw) + 1), rng.randint(1, 20)
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
        claimed = rng.choice([0, 1, claimed - 1, claimed + 1, 10**8, 10**8 + 1, 2**31, 2**63, 2**64 - 1])
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
        header = {key.replace("layers", f"layers{number}"): value for key, value in sound_header(rng).items()}
        weight_map |= {key: name for key in header if key != "__metadata__"}
        (folder / name).write_bytes(shard_bytes(header, rng, which == "shard"))
    for name, value in ((INDEX, {"weight_map": weight_map}), ("config.json", {"num_hidden_layers": 2, "rope": {"a": [1, 2]}})):
        damage = which in name
        text = json.dumps(damaged_value(value, rng) if damage and rng.random() < 0.7 else value).encode()
        (folder / name).write_bytes(damaged_bytes(text, rng) if damage and rng.random() < 0.5 else text)
    checkpoint = Checkpoint(folder)
    assert checkpoint.config is not None
    assert {shard.parent for shard in checkpoint.shards} == {folder}, "no shard lies outside of the folder"


def outcome_of(fuzz: Callable[[Path, random.Random], None], folder: Path, rng: random.Random) -> str:
    """ "accepted", "refused", "hang", or the message of the crash."""
    signal.setitimer(signal.ITIMER_REAL, _SECONDS)
    try:
        fuzz(folder, rng)
        return "accepted"
    except UserError as error:
        message = str(error)
        return "refused" if "\n" not in message and len(message) < 600 and message.isprintable() else f"message: {message!r}"
    except Hang:
        return "hang"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def main(line: list[str] | None = None) -> None:
    """Run, print, and write if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--executions", type=int, default=1_000_000, help="default: 1,000,000")
    parser.add_argument("--minutes", type=float, default=30, help="time limit; default: 30")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", help="working folder; default: a temporary folder")
    parser.add_argument("--write", action="store_true", help="write the table to scripts/results/fuzz_checkpoint.md")
    arguments = parser.parse_args(line)

    def on_alarm(*_: object) -> None:
        raise Hang

    signal.signal(signal.SIGALRM, on_alarm)
    lines = [
        "| reader | executions | accepted | refused | crashes | hangs | peak allocation |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    bad: list[str] = []
    start = time.monotonic()
    tracemalloc.start()
    parts = {"safetensors header": (fuzz_header, 0.8), "folder: index, config and shards": (fuzz_folder, 0.2)}
    for name, (fuzz, share) in parts.items():
        counts: Counter[str] = Counter()
        peak = 0
        until = time.monotonic() + 60 * arguments.minutes * share
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            for number in range(int(arguments.executions * share)):
                if time.monotonic() > until:
                    break
                before = tracemalloc.get_traced_memory()[0]
                tracemalloc.reset_peak()
                outcome = outcome_of(fuzz, Path(folder), random.Random(f"{arguments.seed} {name} {number}"))
                peak = max(peak, tracemalloc.get_traced_memory()[1] - before)
                kind = outcome if outcome in ("accepted", "refused", "hang") else "crash"
                counts[kind] += 1
                if kind in ("hang", "crash") and len(bad) < 20:
                    bad.append(f"{name}, number {number}: {outcome}")
        done = (
            f"{sum(counts.values()):,} | {counts['accepted']:,} | {counts['refused']:,} | {counts['crash']} | {counts['hang']}"
        )
        lines.append(f"| {name} | {done} | {peak / 1e6:.1f} MB |")
    tracemalloc.stop()
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    table = "\n".join(lines)
    about = f"seed {arguments.seed}, {(time.monotonic() - start) / 60:.0f} minutes on one core"
    print(f"{about}\n\n{table}\n", *bad, sep="\n")
    if arguments.write:
        text = f"# Damaged and hostile model folders\n\n`python scripts/fuzz_checkpoint.py --write`: {about}.\n\n{table}\n"
        (Path(__file__).parent / "results" / "fuzz_checkpoint.md").write_text(text, encoding="utf-8")
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
