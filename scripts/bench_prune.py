"""Time of a data-free prune relative to `cp -r` and sync of the same files.

    python scripts/bench_prune.py [--gigabytes 5] [--repeats 5] [--cache cold|warm] [--folder DIR]
    [--write]

Creates a synthetic bfloat16 checkpoint in three shards. Each round runs, as whole processes,
`cp -r` with a sync of the copy, `dd` with direct reads and writes (the speed of the disk itself),
and `emp-llm prune --method emp-magnitude` of the MLP and of all linear layers; every second round
runs them in reverse order. A run ends when its output is on the disk; prune itself syncs its
output. Before each run the source is dropped from the page cache (cold) or read into it (warm). A
first prune, not counted, compiles the kernel. Prints medians and ranges of the seconds, and of the
ratios within a round.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from bench_helpers import forget, processor, read_to_cache, run_and_watch
from synthetic import make_checkpoint

from emp_llm.checkpoint.files import sync_tree
from emp_llm.common.errors import count_of

COPY = "cp -r, sync"
DIRECT = "dd, direct"
TARGETS = ("mlp", "all-linear")
CACHES: dict[str, tuple[Callable[[Path], None], str]] = {
    "cold": (forget, "the source is dropped from the page cache before each run"),
    "warm": (read_to_cache, "the source is read into the page cache before each run"),
}


class Bench:
    """The runs, and their measurements.

    Args:
        source: the checkpoint.
        output: the folder that each run creates; deleted after it.
        prepare: called with the source before each run.
    """

    def __init__(self, source: Path, output: Path, prepare: Callable[[Path], None]) -> None:
        self._source = source
        self._output = output
        self._prepare = prepare
        self._runs: dict[str, Callable[[], None]] = {COPY: self._copy, DIRECT: self._direct}
        self._runs |= {f"prune, {targets}": partial(self._prune, targets) for targets in TARGETS}
        self.seconds: dict[str, list[float]] = {name: [] for name in self._runs}
        self.stages: list[float] = []
        self.peak = 0

    def round(self, backward: bool) -> None:
        """Run each program once."""
        for name in reversed(self._runs) if backward else self._runs:
            self._prepare(self._source)
            start = time.perf_counter()
            self._runs[name]()
            self.seconds[name].append(time.perf_counter() - start)
            print(f"{name}: {self.seconds[name][-1]:.2f} s", flush=True)
            if name.startswith("prune"):
                report = json.loads((self._output / "emp_report.json").read_text())
                self.stages.append(report["stages"]["prune"]["seconds"])
            shutil.rmtree(self._output)
            os.sync()  # the next run does not pay for the deletion

    def table(self, size: int) -> str:
        """The measurements; `size` of the checkpoint in bytes."""
        lines = [f"| run | seconds | GB/s | ratio to {COPY} |", "|---|---:|---:|---:|"]
        for name, seconds in self.seconds.items():
            ratios = [one / copy for one, copy in zip(seconds, self.seconds[COPY], strict=True)]
            speed = size / 1e9 / statistics.median(seconds)
            lines.append(f"| {name} | {_spread(seconds, 1)} | {speed:.2f} | {_spread(ratios, 2)} |")
        return "\n".join(lines)

    def _copy(self) -> None:
        subprocess.run(["cp", "-r", self._source, self._output], check=True)
        sync_tree(self._output)

    def _direct(self) -> None:
        self._output.mkdir()
        for path in self._source.iterdir():
            line = [
                "dd",
                f"if={path}",
                f"of={self._output / path.name}",
                "bs=4M",
                "iflag=direct",
                "oflag=direct",
            ]
            subprocess.run([*line, "conv=fsync", "status=none"], check=True)

    def _prune(self, targets: str) -> None:
        self.peak = max(
            self.peak,
            run_and_watch(prune_command(self._source, self._output, targets), output=False),
        )


def main(line: list[str] | None = None) -> None:
    """Create the checkpoint, measure, print, and write if asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--gigabytes", type=float, default=5.0, help="least size of the checkpoint; default: 5"
    )
    parser.add_argument("--repeats", type=int, default=5, help="rounds; default: 5")
    parser.add_argument(
        "--cache",
        choices=tuple(CACHES),
        default="cold",
        help="the source before each run; default: cold",
    )
    parser.add_argument(
        "--folder",
        type=Path,
        help="working folder, on the disk to measure; default: a temporary folder",
    )
    parser.add_argument(
        "--write", action="store_true", help="write the table to scripts/results/bench_prune.md"
    )
    arguments = parser.parse_args(line)
    prepare, treatment = CACHES[arguments.cache]
    with tempfile.TemporaryDirectory(dir=arguments.folder) as scratch:
        source = Path(scratch) / "model"
        output = Path(scratch) / "output"
        size = make_checkpoint(source, arguments.gigabytes, shards=3)
        # Compiles the kernel on a new machine.
        run_and_watch(prune_command(source, output, "mlp"), output=False)
        shutil.rmtree(output)
        bench = Bench(source, output, prepare)
        loads = [os.getloadavg()[0]]
        for number in range(arguments.repeats):
            bench.round(backward=number % 2 == 1)
        loads.append(os.getloadavg()[0])
    about = (
        f"{size / 1e9:.2f} GB of bfloat16 in 3 shards; medians of "
        f"{count_of(arguments.repeats, 'round')} (ranges), in alternating order; {treatment}, and "
        f"libraries stay in it. {processor()}; torch {torch.__version__}; load average "
        f"{loads[0]:.1f} before, {loads[1]:.1f} after. Whole processes, imports included: the "
        f"stage prune itself takes {_spread(bench.stages, 1)} s. Peak memory of a prune: "
        f"{bench.peak / 1e9:.2f} GB."
    )
    print(f"\n{about}\n\n{bench.table(size)}")
    if arguments.write:
        command = (
            f"python scripts/bench_prune.py --gigabytes {arguments.gigabytes:g} --repeats "
            f"{arguments.repeats}"
        )
        text = (
            f"# A prune beside a copy\n\n`{command} --cache {arguments.cache} --write`: "
            f"{about}\n\n{bench.table(size)}\n"
        )
        (Path(__file__).parent / "results" / "bench_prune.md").write_text(text, encoding="utf-8")


def prune_command(source: Path, output: Path, targets: str) -> list[str]:
    """The command that is measured."""
    command = [
        sys.executable,
        "-m",
        "emp_llm",
        "prune",
        "--model",
        str(source),
        "--output",
        str(output),
    ]
    return [*command, "--method", "emp-magnitude", "--targets", targets]


def _spread(values: list[float], digits: int) -> str:
    """ "1.05 (0.98–1.12)": the median and the range."""
    return (
        f"{statistics.median(values):.{digits}f} "
        f"({min(values):.{digits}f}–{max(values):.{digits}f})"
    )


if __name__ == "__main__":
    main()
