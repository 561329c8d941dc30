"""A data-free prune of a 7 B-shaped checkpoint from end to end, beside `cp -r` of the same files, the cache cold.

    python scripts/bench_prune.py [--gigabytes 13.5] [--repeats 3] [--folder DIR] [--write]

Makes a checkpoint of random bfloat16 weights in three shards; then, in turn, copies it and prunes it (emp-magnitude, the MLP
and all linear layers) as whole processes. Before each run the files are thrown out of the page cache; each run ends with the
data on the disk: prune does so by itself, the copy is followed by sync, and `dd` with direct reads and writes tells what the
disk takes. Prints medians, and the peak memory of a prune.
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from bench_helpers import forget, run_and_watch
from measure_memory import make_checkpoint


def main() -> None:
    """Make, measure, print, and write if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=13.5)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where to work; default: a temporary folder")
    parser.add_argument("--write", action="store_true", help="put the table in scripts/results/bench_prune.md")
    arguments = parser.parse_args()
    times: dict[str, list[float]] = {"cp -r": [], "dd, past the cache": [], "prune, mlp": [], "prune, all-linear": []}
    peak = 0
    with tempfile.TemporaryDirectory(dir=arguments.folder) as scratch:
        source, output = Path(scratch) / "model", Path(scratch) / "output"
        size = make_checkpoint(source, arguments.gigabytes, shards=3)
        for _ in range(arguments.repeats):
            for name, passed in times.items():
                forget(source)
                start = time.perf_counter()
                if name == "cp -r":
                    subprocess.run(["cp", "-r", str(source), str(output)], check=True)
                    os.sync()
                elif name.startswith("dd"):
                    output.mkdir()
                    for path in source.iterdir():
                        line = ["dd", f"if={path}", f"of={output / path.name}", "bs=4M", "iflag=direct", "oflag=direct"]
                        subprocess.run([*line, "conv=fsync", "status=none"], check=True)
                else:
                    line = [sys.executable, "-m", "emp_llm.prune", "--model", str(source), "--output", str(output)]
                    peak = max(peak, run_and_watch([*line, "--method", "emp-magnitude", "--targets", name.split(", ")[1]]))
                passed.append(time.perf_counter() - start)
                shutil.rmtree(output)
    medians = {name: statistics.median(passed) for name, passed in times.items()}
    lines = ["| run | seconds | GB/s | ratio to cp -r |", "|---|---:|---:|---:|"]
    for name, seconds in medians.items():
        lines.append(f"| {name} | {seconds:.1f} | {size / 1e9 / seconds:.2f} | {seconds / medians['cp -r']:.2f} |")
    about = (
        f"{size / 1e9:.1f} GB of bfloat16 in 3 shards, medians of {arguments.repeats}, cold cache, {os.cpu_count()} cores, "
        f"torch {torch.__version__}; whole processes, imports included. Peak memory of a prune: {peak / 1e9:.2f} GB."
    )
    table = "\n".join(lines)
    print(f"{about}\n\n{table}")
    if arguments.write:
        text = f"# A prune beside a copy\n\n`python scripts/bench_prune.py`: {about}\n\n{table}\n"
        (Path(__file__).parent / "results" / "bench_prune.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
