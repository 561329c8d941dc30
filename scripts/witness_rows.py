"""The rows of the witness's table: prune commands and their perplexities, against the dense model
and against Wanda.

`train_witness.py` runs them on the model that it trains. Any model in FOLDER/model with
FOLDER/calibration.txt and FOLDER/heldout.toml has the same table.
"""

import shlex
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from emp_llm import evaluate, prune
from emp_llm.cli import parse
from emp_llm.common.machine import free_memory
from emp_llm.evaluation.comparison import Value, change_of, format_value, values_of
from emp_llm.records.run_report import RunReport

# Rows that do not fit in the time are left out, from the end.
MAIN_ROWS = (
    "--method wanda --sparsity 0.5",
    "--method wanda --sparsity 0.5 --refit",
    "--method emp-relative --sparsity 0.5",
    "--method emp-relative --sparsity 0.5 --refit",
    "--method sparsegpt --sparsity 0.5",
    "--method emp-admm --sparsity 0.5 --refit",
    "--method emp-wanda --sparsity 0.5",
    "--method wanda --pattern 2:4",
    "--method wanda --pattern 2:4 --refit",
    "--method sparsegpt --pattern 2:4",
    "--method admm --pattern 2:4 --refit",
)
FURTHER_ROWS = (
    "--method relative --sparsity 0.5 --refit",
    "--method emp-wanda --sparsity 0.5 --refit",
    "--method wanda --sparsity 0.6",
    "--method wanda --sparsity 0.6 --refit",
    "--method emp-relative --sparsity 0.6 --refit",
    "--method sparsegpt --sparsity 0.6",
    "--method emp-admm --sparsity 0.6 --refit",
    "--method sparsegpt --sparsity 0.5 --refit",
    "--method magnitude --sparsity 0.5",
    "--method emp-magnitude --sparsity 0.5",
    "--method emp-wanda",
    "--method emp-wanda --refit",
)
ROWS = tuple(
    f"{row} --targets {targets}"
    for rows in (MAIN_ROWS, FURTHER_ROWS)
    for targets in ("mlp", "all-linear")
    for row in rows
)


class Measured(NamedTuple):
    """A row: its options, the share of the targets that was removed, its perplexity, and the
    seconds it took.
    """

    options: str
    sparsity: float
    value: Value
    seconds: float

    @property
    def targets(self) -> str:
        """The last option: the layers that were pruned."""
        return self.options.rpartition(" ")[2]

    @property
    def plain_wanda(self) -> bool:
        """Whether it is Wanda with uniform rows, without a refit."""
        return (
            self.options.startswith("--method wanda ")
            and "--refit" not in self.options
            and "--pattern" not in self.options
        )


class Budget:
    """The seconds that are left.

    Args:
        seconds: from now on, in all.
    """

    def __init__(self, seconds: float) -> None:
        self._end = time.perf_counter() + seconds
        self._longest = 0.0

    def allows_another(self) -> bool:
        """Whether a row as long as the longest so far would end in time. The first row is always
        allowed.
        """
        return not self._longest or time.perf_counter() + self._longest < self._end

    def took(self, seconds: float) -> None:
        """A row has taken these seconds."""
        self._longest = max(self._longest, seconds)


def write_texts(folder: Path, articles: list[str], held_out: list[str], seqlen: int) -> None:
    """Write the calibration text, the held-out text and the suite. Articles are separated by
    empty lines.
    """
    (folder / "calibration.txt").write_text("\n\n".join(articles[:2000]) + "\n", encoding="utf-8")
    (folder / "heldout.txt").write_text("\n\n".join(held_out) + "\n", encoding="utf-8")
    about = 'about = "Wikipedia articles that are not in the training text."'
    suite = f'{about}\n\n[perplexity]\nfile = "heldout.txt"\nseqlen = {seqlen}\n'
    (folder / "heldout.toml").write_text(suite, encoding="utf-8")


def rows_of_the_table(
    folder: Path,
    samples: int,
    seqlen: int,
    blocks: int | None,
    device: str,
    about: str,
    budget: Budget,
) -> Iterator[str]:
    """The page, again after each row.

    Args:
        folder: of the model and the texts; pruned models are written there and deleted.
        samples, seqlen: of the calibration.
        blocks: of the held-out text; None: all.
        device: `--device-map`.
        about: the machine and the training.
        budget: no row starts that would probably end too late.
    """
    suite = str(folder / "heldout.toml") + (f",limit={blocks}" if blocks else "")
    dense = folder / "dense.json"
    place = ["--device-map", "cuda:0" if device == "cuda" else device, "--quiet"]
    line = [
        "--model",
        str(folder / "model"),
        "--suite",
        suite,
        "--output",
        str(dense),
        "--overwrite",
        *place,
    ]
    evaluate(**parse(evaluate, line, "evaluate"))
    common = [
        "--calibration",
        f"{folder / 'calibration.txt'},samples={samples},seqlen={seqlen}",
        "--evaluate",
        suite,
    ]
    common += ["--baseline", str(dense), *place]
    found: list[Measured] = []
    for options in ROWS:
        if budget.allows_another():
            row, base = measured(folder, options, common)
            found.append(row)
            budget.took(row.seconds)
            yield page(about, base, found, samples, seqlen)


def measured(folder: Path, options: str, common: list[str]) -> tuple[Measured, Value]:
    """Prune, evaluate, and delete the checkpoint; returns the row and the perplexity of the
    dense model.
    """
    output = folder / "pruned"
    shutil.rmtree(output, ignore_errors=True)
    line = [
        "--model",
        str(folder / "model"),
        "--output",
        str(output),
        *shlex.split(options),
        *common,
    ]
    start = time.perf_counter()
    report = prune(**parse(prune, line, "prune"))
    seconds = time.perf_counter() - start
    assert isinstance(report, RunReport)
    assert report.evaluation is not None
    assert report.evaluation.dense is not None
    assert report.evaluation.pruned is not None
    (base,) = values_of(report.evaluation.dense).values()
    (value,) = values_of(report.evaluation.pruned).values()
    shutil.rmtree(output)
    free_memory()
    print(f"{options}: {value.value:.3f}, {seconds:.0f} s", flush=True)
    return Measured(options, report.targets.sparsity_of_targets, value, seconds), base


def page(about: str, base: Value, found: list[Measured], samples: int, seqlen: int) -> str:
    """The table, with what made it."""
    lines = [
        "| `emp-llm prune` | removed | perplexity | from dense | of Wanda's increase | seconds |",
        "|---|---:|---:|---:|---:|---:|",
        f"| (dense) | | {format_value(base.value)} | | | |",
    ]
    lines += [_line(row, base, found) for row in found]
    left = len(ROWS) - len(found)
    extent = "the first blocks of held-out articles" if base.partial else "held-out articles"
    return (
        "# A witness of 100 million parameters\n\n"
        "A Llama trained on Wikipedia text and pruned, by `python scripts/train_witness.py`. "
        f"Calibration: {samples} × {seqlen} tokens of the training text. Perplexities: of "
        f"{extent}, with paired standard errors. *Of Wanda's increase*: the increase of the "
        "perplexity, as a share of that of uniform Wanda with the same targets and as many weights "
        "removed. *Seconds*: calibration, pruning and "
        f"evaluation.{f' {left} of {len(ROWS)} rows did not fit in the time.' if left else ''}\n\n"
        + "\n".join(lines)
        + f"\n\n{about}\n"
    )


def _line(row: Measured, base: Value, found: list[Measured]) -> str:
    change = change_of("perplexity", row.value, base)
    error = "" if change.stderr is None else f" ± {change.stderr:.2f}"
    wanda = [
        other.value.value - base.value
        for other in found
        if other.targets == row.targets
        and other.plain_wanda
        and abs(other.sparsity - row.sparsity) < 5e-3
    ]
    share = f"{(row.value.value - base.value) / wanda[0]:.2f}" if wanda and wanda[0] > 0 else ""
    return (
        f"| `{row.options}` | {row.sparsity:.2%} | {format_value(row.value.value)} | "
        f"{change.value:+.2f}{error} % | {share} | {row.seconds:.0f} |"
    )
