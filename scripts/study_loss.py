"""Does --loss keep its promise? What it promised, what untouched text says, and what it cost.

    python scripts/study_loss.py OUT --shared DIR [--smollm2 FOLDER] [--models NAME ...]
    python scripts/study_loss.py OUT --write docs/loss

DIR and FOLDER are those of study_counts.py. Each row runs `emp-llm prune MODEL --loss 2%` on all
linear layers as a user does, and judges the result on text that no part of the run has seen: the
test text of the model's own domain, and for the models of English another domain, C4. SmolLM2-135M
answers the seven tasks of the paper too, the first 200 examples of each. A row is a line of
OUT/points.jsonl, and is not measured again; its checkpoint stays in OUT.
"""

import argparse
import json
import math
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec
from bench_helpers import used_by
from study_counts import Model, models_of
from study_smollm2 import TASKS, TELLING, read_points

from emp_llm.common.tables import markdown_table
from emp_llm.evaluation.comparison import Value, change_of, losses_of, values_of
from emp_llm.evaluation.results import read_results
from emp_llm.records.base import read_record
from emp_llm.records.run_report import RunReport

METHODS = {
    "wanda": "--method wanda",
    "emp-admm --refit": "--method emp-admm --refit",
    "best": "--method best --heal-steps {steps}",
}
OTHER = """[perplexity]
dataset = "allenai/c4"
config = "en"
split = "validation"
column = "text"
join = "\\n\\n"
seqlen = {seqlen}
"""


def main(line: list[str] | None = None) -> None:
    """Measure the rows that are missing, or write the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="folder of the points and checkpoints")
    parser.add_argument("--shared", type=Path, help="folder with models, texts and data sets")
    parser.add_argument("--smollm2", type=Path, help="SmolLM2-135M, as made by scripts/smollm2.py")
    parser.add_argument("--models", nargs="+", help="only these; default: all")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), help="default: all")
    parser.add_argument("--budgets", nargs="+", default=["2%"], help="default: 2%%")
    parser.add_argument("--write", type=Path, help="folder for the tables")
    options = parser.parse_args(line)
    path = options.out.resolve() / "points.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    if options.write is None:
        with tempfile.TemporaryDirectory() as scratch:
            for name, model in models_of(options, Path(scratch)).items():
                if name in (options.models or [name]):
                    study = LossStudy(name, model, options.shared.resolve(), path)
                    for method in options.methods:
                        for budget in options.budgets:
                            study.measure(method, budget)
    text = tables(read_points(path))
    print(text)
    if options.write is not None:
        options.write.mkdir(parents=True, exist_ok=True)
        (options.write / "tables.md").write_text(text + "\n", encoding="utf-8")


class LossStudy:
    """The rows of a model."""

    def __init__(self, name: str, model: Model, shared: Path, path: Path) -> None:
        self._name = name
        self._model = model
        self._folder = shared / "datasets"  # load_dataset finds the data sets here
        self._path = path
        self._work = path.parent / name
        self._work.mkdir(exist_ok=True)
        self._large = name == "SmolLM2-135M"
        self._judges = {"own": ["--suite", model.suite, "--limit", str(model.limit)]}
        if model.text == "wikitext2":
            other = self._work / "other.toml"
            other.write_text(OTHER.format(seqlen=1024 if self._large else 512), encoding="utf-8")
            self._judges["other"] = ["--suite", str(other), "--limit", str(model.limit)]
        if self._large:
            self._judges["answers"] = ["--tasks", ",".join(TASKS), "--limit", "200"]

    def measure(self, method: str, budget: str) -> None:
        """Run a row that is missing, and judge it."""
        about: dict[str, Any] = {"model": self._name, "method": method, "budget": budget}
        if any(about.items() <= point.items() for point in read_points(self._path)):
            return
        out = self._work / f"{method.replace(' --', '-')}-{budget.rstrip('%')}"
        words = METHODS[method].format(steps=30 if self._large else 300)
        text = f"--calibration {self._model.text} --samples {self._model.samples} --seqlen 512"
        command = f"prune --model {self._model.folder} {words} --loss {budget} {text}"
        about["used"] = self._run([*command.split(), "--targets", "all-linear", "--output", out])
        for kind in self._judges:  # of an earlier row
            self._output(out, kind).unlink(missing_ok=True)
        report = read_record(out / "emp_report.json", RunReport)
        about["loss"] = msgspec.to_builtins(report.loss)
        about["check"] = list(check_of(report))
        about["removed"] = report.targets.sparsity_of_targets
        about["judged"] = {kind: self._judge(out, kind) for kind in self._judges}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(about) + "\n")
        print(about, flush=True)

    def _judge(self, folder: Path, kind: str) -> dict[str, list[float | None]]:
        """Measure -> its value, its change from the dense model's, and the error of that."""
        values = values_of(read_results(self._judged(folder, kind), "").measures)
        base = values_of(read_results(self._judged(self._model.folder, kind), "").measures)
        found = {}
        for name, value in values.items():
            if not name.endswith("acc_norm"):
                change = change_of(name, value, base[name])
                found[name.partition(",")[0]] = [value.value, change.value, change.stderr]
        return found

    def _judged(self, folder: Path, kind: str) -> Path:
        """The results of a checkpoint."""
        output = self._output(folder, kind)
        if not output.exists():
            words = ["evaluate", "--model", str(folder), *self._judges[kind]]
            self._run([*words, "--output", str(output)])
        return output

    def _output(self, folder: Path, kind: str) -> Path:
        dense = folder == self._model.folder
        return self._work / f"{'dense' if dense else folder.name}.{kind}.json"

    def _run(self, words: list[Any]) -> dict[str, Any]:
        """What a command used."""
        log = self._work / "log.txt"
        command = [sys.executable, "-m", "emp_llm", *map(str, words), "--overwrite", "-q"]
        used = used_by(command, self._folder, log)
        if "failed" in used:
            raise SystemExit(f"{command}: {used['failed']}; see {log}")
        return used


def check_of(report: RunReport) -> tuple[float, float]:
    """The change of the perplexity of the untouched sequences of a run, with its error."""
    assert report.check is not None
    pruned, dense = (
        Value(record.value, losses=losses_of(record))
        for record in (report.check.pruned, report.check.dense)
    )
    change = change_of("perplexity", pruned, dense)
    assert change.stderr is not None
    return change.value, change.stderr


def tables(points: list[dict[str, Any]]) -> str:
    """The promises, and the answers."""
    rows = [
        [
            "model",
            "method",
            "budget",
            "removes",
            "the sequences that decide",
            "those of the last line",
            "test text",
            "another domain",
            "points",
            "CPU seconds",
        ]
    ]
    answers = [["", "budget", "removes", *(task.replace("_", " ") for task in TASKS), "two"]]
    for point in points:
        # The point of the masks comes first, that of the whole run, with moved weights, last.
        taken = [
            each
            for each in point["loss"]["points"]
            if each["sparsity"] == point["loss"]["sparsity"]
        ][-1]
        judged = point["judged"]
        removed = f"{100 * point['removed']:.1f} %"
        rows.append(
            [
                point["model"],
                point["method"],
                point["budget"],
                removed,
                percent_of_nats(taken["rise"], taken["error"]),
                percent(*point["check"]),
                perplexity_of(judged["own"]),
                perplexity_of(judged["other"]) if "other" in judged else "",
                str(len(point["loss"]["points"])),
                f"{point['used']['user'] + point['used']['system']:.0f}",
            ]
        )
        if "answers" in judged:
            values = [judged["answers"][f"{task} acc"] for task in TASKS]
            telling = [judged["answers"][f"{task} acc"][0] for task in TELLING]
            cells = [f"{value:.1f} ({change:+.1f})" for value, change, _ in values]
            mean = f"{sum(telling) / len(telling):.1f}"
            answers.append([point["method"], point["budget"], removed, *cells, mean])
    parts = [
        "# Promised and judged: all rows",
        markdown_table(rows, as_markdown=True),
        "Accuracy in percent, and its change from the dense model's in points:",
        markdown_table(answers, as_markdown=True),
    ]
    return "\n\n".join(parts)


def percent(change: float, error: float | None) -> str:
    """A change with its error."""
    return f"{change:+.2f} ± {error:.2f} %"


def percent_of_nats(rise: float, error: float) -> str:
    """A rise of the loss in nats, as one of the perplexity."""
    factor = math.exp(rise)
    return percent(100 * (factor - 1), 100 * factor * error)


def perplexity_of(judged: dict[str, list[float]]) -> str:
    """The change of the perplexity among some measures."""
    _, change, error = next(value for name, value in judged.items() if name.startswith("perp"))
    return percent(change, error)


if __name__ == "__main__":
    main()
