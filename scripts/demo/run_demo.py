"""What `make demo` and `make smollm2` run: a model pruned in three ways, and what each cost.

    python scripts/demo/run_demo.py [--model M] [--calibration T] [--suite S] [--output FOLDER]

Each command is shown as a user would type it. The models, results and messages are in FOLDER.
"""

import argparse
import re
import shlex
import subprocess
import sys
import textwrap
import time
from pathlib import Path

from emp_llm.common.paths import REPORT_NAME
from emp_llm.common.tables import percent_cell, table
from emp_llm.evaluation.comparison import (
    format_value,
    in_percent,
    main_measures,
    shown_change,
    values_of,
)
from emp_llm.records.base import read_record
from emp_llm.records.run_report import Results, read_report

# Name of the output -> row of the table, and the options of its prune.
RUNS = {
    "emp-wanda": ("EMP-Wanda: the paper's count", ""),
    "wanda": ("Wanda", " --method wanda --sparsity 0.5"),
    "emp-admm": ("emp-admm --refit", " --method emp-admm --refit --sparsity 0.5"),
}


def main(words: list[str] | None = None) -> None:
    """Run the commands, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="scripts/demo/model")
    parser.add_argument("--calibration", default="demo")
    parser.add_argument("--suite", default="demo")
    parser.add_argument("--output", default="demo-run")
    given = parser.parse_args(words)
    folder = Path(given.output)
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "log.txt"
    log.unlink(missing_ok=True)
    lines = commands(given.model, given.calibration, given.suite, given.output)
    seconds = [run(line, log) for line in lines]
    print(f"\n{costs(folder, seconds)}\n\n{notes(folder)}\n\nWhat next:")
    for line in what_next(given.model, given.calibration, given.output):
        print(f"  {line}")


def commands(model: str, calibration: str, suite: str, folder: str) -> list[str]:
    """The commands that prune, then those that evaluate. The last evaluates the dense model too."""
    lines = [
        f"emp-llm prune {model} --calibration {calibration}{options} --output {folder}/{name}"
        for name, (_, options) in RUNS.items()
    ]
    lines += [
        f"emp-llm evaluate {folder}/{name} --suite {suite} --output {folder}/{name}.json"
        for name in RUNS
    ]
    lines[-1] += f" --baseline {model}"
    return lines


def what_next(model: str, calibration: str, folder: str) -> list[str]:
    """Three commands that work as they are shown."""
    tool = Path(sys.executable).parent / "emp-llm"
    if tool.is_relative_to(Path.cwd()):
        tool = tool.relative_to(Path.cwd())
    return [
        f'{tool} generate {folder}/emp-admm --prompt "The market of Hazelbridge"',
        f"{tool} pack {folder}/emp-admm {folder}/packed",
        f"{tool} prune {model} --calibration {calibration} --loss 2% -o {folder}/within",
    ]


def run(line: str, log: Path) -> float:
    """Run a command of emp-llm and return its seconds; exit if it fails."""
    bound = re.sub(r"(--[a-z-]+) (?!--)", "\\1\0", line)  # a flag and its value on one line
    shown = textwrap.wrap(bound, 94, break_long_words=False, break_on_hyphens=False)
    print("$ " + " \\\n      ".join(shown).replace("\0", " "), flush=True)
    _, name, *arguments = shlex.split(line)
    start = time.perf_counter()
    with log.open("a", encoding="utf-8") as file:
        print(f"$ {line}", file=file, flush=True)
        program = [sys.executable, "-m", "emp_llm", name, *arguments, "--overwrite"]
        code = subprocess.run(program, stdout=file, stderr=file, check=False).returncode
    if code:
        sys.exit(f"The command failed. Its messages are in {log}.")
    return time.perf_counter() - start


def costs(folder: Path, seconds: list[float]) -> str:
    """The table: a row for the dense model, and one for each run."""
    dense = values_of(read_record(folder / "emp-admm-baseline.json", Results).measures)
    names = main_measures(dense)
    rows = [["", "zeros"], ["dense", "0 %"]]
    for name in names:
        rows[0] += ["accuracy" if in_percent(name) else "perplexity", "change"]
        rows[1] += [format_value(dense[name].value, 2 if in_percent(name) else 3), ""]
    rows[0].append("seconds")
    rows[1].append("")
    for (run_name, (label, _)), taken in zip(RUNS.items(), seconds, strict=False):
        results = read_record(folder / f"{run_name}.json", Results)
        values = values_of(results.measures)
        assert results.pruned is not None
        row = [label, f"{percent_cell(results.pruned.sparsity_of_targets)} %"]
        for name in names:
            row.append(format_value(values[name].value, 2 if in_percent(name) else 3))
            row.append(shown_change(name, dense[name], values[name]))
        rows.append([*row, f"{taken:.0f}"])
    return table(rows)


def notes(folder: Path) -> str:
    """What the columns mean."""
    targets = read_report(folder / "wanda").targets
    results = read_record(folder / "wanda.json", Results)
    parts = [
        f"zeros: of the {targets.weights or 0:,} weights of the MLP layers; the model has "
        f"{targets.parameters or 0:,}"
    ]
    if results.perplexity is not None:
        parts.append(f"perplexity: of {results.perplexity.tokens:,} tokens of other text")
    counts = [count for task in results.tasks.values() for count in task.n_samples.values()]
    if counts:
        questions = sum(count.effective for count in counts)
        parts.append(
            f"accuracy: mean of {len(results.tasks)} zero-shot tasks, {questions:,} questions"
        )
    parts += [
        "±: standard error of the change, both models judged on the same text and questions",
        "seconds: of emp-llm prune, with loading, calibration and a check on held-out text",
    ]
    if read_report(folder / "emp-wanda").warnings:
        report = folder / "emp-wanda" / REPORT_NAME
        parts.append(f"the paper's count leaves some rows next to nothing: see {report}")
    return "\n".join(parts)


if __name__ == "__main__":
    main()
