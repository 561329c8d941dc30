"""Peak memory and time of a data-free prune of a large checkpoint, measured from outside the
process.

    python scripts/measure_memory.py [--gigabytes 4] [--group row|matrix|all] [--folder DIR]

Creates a synthetic checkpoint in two shards, prunes its MLP by emp-magnitude in a process of its
own, and prints the highest resident memory of that process.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

from bench_helpers import processor, run_and_watch
from synthetic import make_checkpoint


def main(line: list[str] | None = None) -> None:
    """Create the checkpoint, prune it, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--gigabytes", type=float, default=4.0, help="least size of the checkpoint; default: 4"
    )
    parser.add_argument("--group", choices=("row", "matrix", "all"), default="row")
    parser.add_argument("--folder", type=Path, help="working folder; default: a temporary folder")
    arguments = parser.parse_args(line)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as scratch:
        source = Path(scratch) / "model"
        output = Path(scratch) / "pruned"
        size = make_checkpoint(source, arguments.gigabytes)
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
        start = time.perf_counter()
        peak = run_and_watch([*command, "--method", "emp-magnitude", "--group", arguments.group])
        seconds = time.perf_counter() - start
        stage = json.loads((output / "emp_report.json").read_text())["stages"]["prune"]
        print(f"\n{size / 1e9:.2f} GB in 2 shards, group {arguments.group}; {processor()}:")
        print(
            f"peak resident memory {peak / 1e6:.0f} MB, wall {seconds:.1f} s (stage prune: "
            f"{stage['seconds']:.1f} s)"
        )


if __name__ == "__main__":
    main()
