"""What commands cost by the size of the model: CPU and wall seconds, memory and disk, for Llamas of
random weights with 0.1, 1 and 7 billion weights.

    python scripts/study_scale.py OUT [--sizes 0.1 1 7] [--commands NAME ...]
    python scripts/study_scale.py OUT --write scripts/results/scale.md

Each command is a process of its own, as a user types it. A measurement is a line of
OUT/points.jsonl and is not made again. A checkpoint stays in OUT until its size is done: 7 billion
weights take 55 GB. The second command writes the table, with the exponent of each cost between the
two largest sizes: 1 means that twice as many weights cost twice as much.
"""

import argparse
import json
import math
import os
import shutil
import sys
import threading
from pathlib import Path
from typing import Any

from bench_helpers import TOKENIZER, hardware, used_by
from synthetic import make_checkpoint

from emp_llm.common.tables import markdown_table

# Billions of weights -> gigabytes, and the sizes of the layers.
MODELS = {"0.1": (0.27, 768, 2048), "1": (2.1, 2048, 5632), "7": (13.4, 4096, 11008)}
_HEAD = """# Cost by size

`python scripts/study_scale.py OUT`: {hardware}. Llamas of random bfloat16 weights, all linear
layers; each command is a process of its own, with one thread, beside other work. CPU seconds of the
process, its largest resident set, and the disk that it takes beside the model. Exponents are
between the two largest sizes: 1 means that twice as many weights cost twice as much.
"""
_TEXT = "--calibration demo --samples 8 --seqlen 512"
# Name -> the command; {model} and {out} are folders.
COMMANDS = {
    "prune by magnitude": "prune {model} --method magnitude --targets all-linear "
    "--output {out}/magnitude",
    "verify": "verify {out}/magnitude --source {model}",
    "prune by EMP-Wanda, 8 x 512 tokens, from disk": "prune {model} --method emp-wanda "
    f"--targets all-linear --device-map disk {_TEXT} --no-check --output {{out}}/wanda",
    "pack": "pack {out}/wanda --output {out}/packed",
    "heal by blocks, 2 steps, from disk": "heal {out}/wanda --dense {model} --device-map disk "
    f"--heal-steps 2 {_TEXT} --output {{out}}/healed",
}


class Disk:
    """The most bytes that a folder takes inside this context."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self.most = 0

    def __enter__(self) -> "Disk":
        self._before = self._size()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _size(self) -> int:
        total = 0
        for path in self._folder.rglob("*"):
            try:
                total += 512 * path.stat().st_blocks
            except OSError:  # it was renamed in the meantime
                continue
        return total

    def _watch(self) -> None:
        while not self._ended.wait(0.2):
            self.most = max(self.most, self._size() - self._before)


def measure(size: str, names: list[str], out: Path) -> None:
    """Run the commands that are missing for a size, and delete its checkpoints if all are done."""
    path = out / "points.jsonl"
    done = {point["command"] for point in read_points(out) if point["size"] == size}
    wanted = [name for name in COMMANDS if name in names and name not in done]
    if not wanted:
        return
    gigabytes, hidden, intermediate = MODELS[size]
    folder = out / size
    model = folder / "model"
    if not (model / "tokenizer.json").is_file():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        make_checkpoint(model, gigabytes, 3, hidden, intermediate)
        for name in ("tokenizer_config.json", "tokenizer.json"):
            shutil.copyfile(TOKENIZER / name, model / name)
    for name in wanted:
        words = [word.format(model=model, out=folder) for word in COMMANDS[name].split()]
        with Disk(folder) as disk:
            used = used_by([sys.executable, "-m", "emp_llm", *words, "-q"], out, out / "log.txt")
        if "failed" in used:
            raise SystemExit(f"{' '.join(words)}: {used['failed']}")
        point: dict[str, Any] = {"size": size, "command": name, "disk": disk.most}
        point["weights"] = sum(file.stat().st_size for file in model.glob("*.safetensors")) // 2
        point["threads"] = int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1))
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(point | used) + "\n")
        print(point | used, flush=True)
    if {point["command"] for point in read_points(out) if point["size"] == size} >= set(COMMANDS):
        shutil.rmtree(folder)


def read_points(out: Path) -> list[dict[str, Any]]:
    """The points that are measured."""
    path = out / "points.jsonl"
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def table(points: list[dict[str, Any]]) -> str:
    """A row for each command and cost, with a column for each size."""
    sizes = [size for size in MODELS if any(point["size"] == size for point in points)]
    rows = [["", *(f"{size} billion weights" for size in sizes), "exponent"]]
    for name in COMMANDS:
        found = {point["size"]: point for point in points if point["command"] == name}
        if not found:
            continue
        costs = {
            "CPU seconds": [(point["user"] + point["system"], 0) for point in found.values()],
            "memory, GB": [(point["memory"], 2) for point in found.values()],
            "disk, GB": [(point["disk"] / 1e9, 2) for point in found.values()],
        }
        for cost, values in costs.items():
            if not any(value for value, _ in values):  # verify writes nothing
                continue
            of_size = dict(zip(found, values, strict=True))
            cells = [
                f"{of_size[size][0]:.{of_size[size][1]}f}" if size in of_size else "-"
                for size in sizes
            ]
            rows.append([f"{name}: {cost}", *cells, _exponent(found, of_size)])
    return markdown_table(rows)


def _exponent(found: dict[str, dict[str, Any]], values: dict[str, tuple[float, int]]) -> str:
    """Between the two largest sizes."""
    if len(found) < 2:
        return "-"
    small, large = list(found)[-2:]
    growth = math.log(values[large][0] / values[small][0])
    return f"{growth / math.log(found[large]['weights'] / found[small]['weights']):.2f}"


def main(line: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="folder of the points and checkpoints")
    parser.add_argument("--sizes", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--commands", nargs="+", default=list(COMMANDS), help="default: all")
    parser.add_argument("--write", type=Path, help="page for the table")
    options = parser.parse_args(line)
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    if options.write is None:
        for size in options.sizes:
            measure(size, options.commands, out)
    text = f"{_HEAD.format(hardware=hardware('cpu'))}\n{table(read_points(out))}\n"
    print(text)
    if options.write is not None:
        options.write.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
