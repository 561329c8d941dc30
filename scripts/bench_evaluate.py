"""Time of `emp-llm evaluate` relative to the lm_eval command line: same tasks, model and batch
size, in alternating pairs.

    python scripts/bench_evaluate.py [--pairs 5] [--model DIR --tasks arc_easy,openbookqa] [--limit
    N]

Measures whole processes, from start to results. Prints the median ratios of wall time and of
processor time, and checks that the accuracies are equal. By default the model and the tasks are the
demo's, and no network is needed.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench_helpers import processor

from emp_llm.common.errors import count_of

ROOT = Path(__file__).parents[1]
DEMO_TASKS = "demo_facts,demo_inference,demo_stories"


def main(line: list[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=5, help="runs of both programs; default: 5")
    parser.add_argument(
        "--model",
        type=Path,
        default=ROOT / "scripts" / "demo" / "model",
        help="folder; default: the demo model",
    )
    parser.add_argument("--tasks", default=DEMO_TASKS, help="tasks of lm-eval, separated by commas")
    parser.add_argument("--limit", type=int, help="examples of each task; default: all")
    arguments = parser.parse_args(line)
    names = arguments.tasks.split(",")
    walls = []
    processors = []
    for number in range(arguments.pairs):
        with tempfile.TemporaryDirectory() as scratch:
            commands = {
                "lm_eval": _lm_eval(arguments, Path(scratch)),
                "emp-llm": our_command(arguments, names, Path(scratch)),
            }
            order = [*commands] if number % 2 == 0 else [*reversed(commands)]
            times = {program: _timed(commands[program]) for program in order}
            theirs = times["lm_eval"]
            ours = times["emp-llm"]
            walls.append(ours[0] / theirs[0])
            processors.append(ours[1] / theirs[1])
            print(
                f"lm_eval {theirs[0]:.1f} s wall, {theirs[1]:.1f} s CPU; emp-llm evaluate "
                f"{ours[0]:.1f} s, {ours[1]:.1f} s"
            )
            _check(names, Path(scratch))
    print(
        f"\n{', '.join(names)}: emp-llm evaluate / lm_eval, median of "
        f"{count_of(arguments.pairs, 'pair')}:"
    )
    print(
        f"wall {statistics.median(walls):.3f}, processor {statistics.median(processors):.3f}; "
        "the accuracies are equal"
    )
    print(processor())


def _lm_eval(arguments: argparse.Namespace, scratch: Path) -> list[str]:
    line = [
        sys.executable,
        "-m",
        "lm_eval",
        "run",
        "--model",
        "hf",
        "--model_args",
        f"pretrained={arguments.model}",
    ]
    line += [
        "--tasks",
        arguments.tasks,
        "--device",
        "cpu",
        "--batch_size",
        "8",
        "--output_path",
        str(scratch / "theirs.json"),
    ]
    line += ["--include_path", str(ROOT / "eval" / "demo")]
    return line + (["--limit", str(arguments.limit)] if arguments.limit else [])


def our_command(arguments: argparse.Namespace, names: list[str], scratch: Path) -> list[str]:
    """The command of emp-llm; `names` are the tasks."""
    suite = scratch / "suite.toml"
    demo = (
        f"folder = {json.dumps(str(ROOT / 'eval' / 'demo'))}\n"
        if set(names) <= set(DEMO_TASKS.split(","))
        else ""
    )
    suite.write_text(f"[[tasks]]\nnames = {json.dumps(names)}\n{demo}")
    line = [
        sys.executable,
        "-m",
        "emp_llm",
        "evaluate",
        "--model",
        str(arguments.model),
        "--suite",
        str(suite),
    ]
    line += ["--device-map", "cpu", "--batch-size", "8", "--output", str(scratch / "ours.json")]
    return line + (["--limit", str(arguments.limit)] if arguments.limit else [])


def _timed(line: list[str]) -> tuple[float, float]:
    """Wall and processor time of a command, in seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.perf_counter()
    done = subprocess.run(
        line, capture_output=True, text=True, env=os.environ | {"HF_HUB_OFFLINE": "1"}, check=False
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (
        time.perf_counter() - start,
        after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
    )


def _check(names: list[str], scratch: Path) -> None:
    """End the script if an accuracy differs."""
    (file,) = scratch.glob("theirs*.json")
    theirs = json.loads(file.read_text())["results"]
    ours = json.loads((scratch / "ours.json").read_text())["tasks"]
    for name in names:
        found = ours[name]["results"][name]
        if not any(key.startswith("acc") for key in found):
            raise SystemExit(f"{name}: no accuracy to compare")
        if any(found[key] != theirs[name][key] for key in found if key.startswith("acc")):
            raise SystemExit(f"{name}: {found} differs from {theirs[name]}")


if __name__ == "__main__":
    main()
