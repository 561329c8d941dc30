"""SmolLM2-135M, a widely used model: damage, answers, time and memory of every method.

    python scripts/study_smollm2.py OUT --shared DIR --model FOLDER [--rows NAME ...]
    python scripts/study_smollm2.py OUT --write docs/smollm2

DIR holds data sets; FOLDER is what `make smollm2` makes (smollm2/model). Each row runs commands as
a user does, one process at a time, and then judges the result. It is a line of OUT/points.jsonl and
is not measured again; the checkpoints stay in OUT. --rows takes the beginnings of names; default:
all. The second command writes the tables.

Perplexity: the first 40 blocks of 1024 tokens of the test split of WikiText-2. Answers: the seven
tasks of the paper, the first 200 examples of each. Seconds and memory are those of the row's own
commands: CPU seconds of the process, and its largest resident set.
"""

import argparse
import json
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench_helpers import used_by

from emp_llm.common.tables import markdown_table
from emp_llm.evaluation.comparison import change_of, values_of
from emp_llm.evaluation.results import read_results

ROOT = Path(__file__).parents[1]
TASKS = ("boolq", "rte", "hellaswag", "winogrande", "arc_easy", "arc_challenge", "openbookqa")
TELLING = ("hellaswag", "arc_easy")  # the dense model is far above chance
CHANCE = (50.0, 50.0, 25.0, 50.0, 25.0, 25.0, 25.0)
WEIGHTS = 134_515_008
IN_LINEAR = 106_168_320  # of them, in the linear layers of the blocks
TEXT = "--calibration wikitext2 --samples 128 --seqlen 512"


@dataclass(frozen=True)
class Row:
    """A row of a table.

    Attributes:
        name: of the checkpoint, and of the point.
        section: the table it stands in.
        label: how the row is called there.
        command: words after `emp-llm`; {dense}, {work} and {out} are folders.
        answers: whether the seven tasks are asked.
        needs: another row whose checkpoint the command reads.
    """

    name: str
    section: str
    label: str
    command: str
    answers: bool = False
    needs: str = ""


def pruned(
    name: str, section: str, label: str, options: str, answers: bool = False, text: str = TEXT
) -> Row:
    """A row of `emp-llm prune`."""
    command = f"prune --model {{dense}} {options} {text} --output {{out}}"
    return Row(name, section, label, " ".join(command.split()), answers)


def units(
    kind: str, shares: tuple[int, ...], label: str, options: str, answers: int = 0, name: str = ""
) -> Iterator[Row]:
    """A row for each share of the parameters, in percent, that goes as heads, neurons or layers."""
    for share in shares:
        parameters = int(WEIGHTS * (1 - share / 100))
        yield pruned(
            f"{name or kind}-{share}",
            UNITS,
            label.format(share),
            f"--structure {kind} --parameters {parameters} {options}",
            answers=share == answers,
        )


def healed(name: str, label: str, of: str, options: str, answers: bool = False) -> Row:
    """A row of `emp-llm heal`."""
    command = f"heal {{work}}/{of} --dense {{dense}} {options} {TEXT} --output {{out}}"
    return Row(name, "Healed", label, " ".join(command.split()), answers, needs=of)


MLP = "MLP layers"
ALL = "All linear layers"
C4 = "Calibrated on C4"
OF_C4 = "--calibration c4 --samples 128 --seqlen 512"
UNITS = "Neurons, heads and layers removed, beside zeros"
OWN = "--targets all-linear --propagate pruned"
REFIT = "--targets all-linear --refit"
ROWS = (
    Row("dense", "", "dense", "", answers=True),
    pruned("mlp-emp-wanda", MLP, "EMP-Wanda (the paper)", "--method emp-wanda", answers=True),
    pruned("mlp-order1", MLP, "EMP-Wanda, `--order 1`", "--method emp-wanda --order 1", True),
    pruned("mlp-emp-magnitude", MLP, "EMP-magnitude", "--method emp-magnitude", text=""),
    pruned("mlp-magnitude-50", MLP, "magnitude", "--method magnitude --sparsity 0.5", text=""),
    pruned("mlp-wanda-50", MLP, "Wanda", "--method wanda --sparsity 0.5", answers=True),
    pruned("mlp-sparsegpt-50", MLP, "SparseGPT", "--method sparsegpt --sparsity 0.5"),
    pruned(
        "mlp-emp-admm-50",
        MLP,
        "emp-admm, refit",
        "--method emp-admm --sparsity 0.5 --refit",
        answers=True,
    ),
    pruned("emp-wanda", ALL, "EMP-Wanda", f"--method emp-wanda {OWN}"),
    pruned(
        "emp-magnitude",
        ALL,
        "EMP-magnitude",
        "--method emp-magnitude --targets all-linear",
        text="",
    ),
    pruned("wanda-50", ALL, "Wanda", f"--method wanda --sparsity 0.5 {OWN}", answers=True),
    pruned("wanda-60", ALL, "Wanda", f"--method wanda --sparsity 0.6 {OWN}"),
    pruned("wanda-2of4", ALL, "Wanda, 2:4", f"--method wanda --pattern 2:4 {OWN}"),
    pruned(
        "sparsegpt-50", ALL, "SparseGPT", f"--method sparsegpt --sparsity 0.5 {OWN}", answers=True
    ),
    pruned("sparsegpt-60", ALL, "SparseGPT", f"--method sparsegpt --sparsity 0.6 {OWN}"),
    pruned("sparsegpt-2of4", ALL, "SparseGPT, 2:4", f"--method sparsegpt --pattern 2:4 {OWN}"),
    pruned(
        "emp-admm-50",
        ALL,
        "emp-admm, refit",
        f"--method emp-admm --sparsity 0.5 {REFIT}",
        answers=True,
    ),
    pruned("emp-admm-60", ALL, "emp-admm, refit", f"--method emp-admm --sparsity 0.6 {REFIT}"),
    pruned(
        "admm-2of4",
        ALL,
        "admm, refit, 2:4",
        f"--method admm --pattern 2:4 {REFIT}",
        answers=True,
    ),
    pruned("c4-wanda-50", C4, "Wanda", f"--method wanda --sparsity 0.5 {OWN}", True, OF_C4),
    pruned(
        "c4-emp-admm-50",
        C4,
        "emp-admm, refit",
        f"--method emp-admm --sparsity 0.5 {REFIT}",
        True,
        OF_C4,
    ),
    *units(
        "neurons",
        (10, 20, 30),
        "neurons, {} % of the parameters, refit",
        "--method wanda --width-multiple 8 --refit",
        answers=20,
    ),
    *units("layers", (10, 20, 30), "layers, {} % of the parameters", "--method cosine", answers=20),
    *units(
        "layers",
        (10, 20, 30),
        "layers, {} % of the parameters, refit",
        "--refit",
        answers=20,
        name="layers-refit",
    ),
    *units("heads", (5, 10), "heads, {} % of the parameters, refit", "--method wanda --refit"),
    *(
        pruned(
            f"zeros-{share}",
            UNITS,
            f"zeros, {share} % of the parameters, emp-admm, refit",
            f"--method emp-admm --sparsity {WEIGHTS * share / 100 / IN_LINEAR:.4f} {REFIT}",
            answers=share == 20,
        )
        for share in (10, 20, 30)
    ),
    healed(
        "emp-admm-50-healed",
        "emp-admm 50 %, 310 steps",
        "emp-admm-50",
        "--heal-steps 310",
        answers=True,
    ),
    healed(
        "emp-admm-50-healed-90",
        "emp-admm 50 %, 90 steps",
        "emp-admm-50",
        "--heal-steps 90",
    ),
    healed("admm-2of4-healed", "admm 2:4, 60 steps", "admm-2of4", "--heal-steps 60"),
    healed(
        "emp-admm-50-blocks",
        "emp-admm 50 %, block by block, 60 steps",
        "emp-admm-50",
        "--device-map disk --heal-steps 60",
    ),
    healed(
        "neurons-20-healed",
        "neurons, 20 %, 60 steps",
        "neurons-20",
        "--heal-steps 60",
        answers=True,
    ),
    healed(
        "layers-20-healed", "layers, 20 %, 60 steps", "layers-20", "--heal-steps 60", answers=True
    ),
    *(
        healed(
            f"{of}-healed-{steps}",
            f"{label}, 20 %, {steps} steps, all weights",
            of,
            f"--heal-steps {steps} --heal-weights all",
            answers=True,
        )
        for of, label in (("neurons-20", "neurons"), ("layers-refit-20", "layers, refit"))
        for steps in (60, 240)
    ),
)


def main(line: list[str] | None = None) -> None:
    """Measure the rows that are missing, or write the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="folder of the points and checkpoints")
    parser.add_argument("--shared", type=Path, help="folder with datasets/ by Hub id")
    parser.add_argument("--model", type=Path, help="SmolLM2-135M, as made by scripts/smollm2.py")
    parser.add_argument("--rows", nargs="+", default=[""], help="beginnings of names")
    parser.add_argument("--write", type=Path, help="folder for the tables")
    options = parser.parse_args(line)
    path = options.out.resolve() / "points.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    if options.write is None:
        study = Study(options, path)
        for row in ROWS:
            if row.name.startswith(tuple(options.rows)):
                study.measure(row)
    points = {point["name"]: point for point in read_points(path)}
    text = tables(points)
    print(text)
    if options.write is not None:
        options.write.mkdir(parents=True, exist_ok=True)
        (options.write / "tables.md").write_text(text + "\n", encoding="utf-8")
        draw(points, options.write / "damage.svg")


def read_points(path: Path) -> list[dict[str, Any]]:
    """The points that are measured."""
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


class Study:
    """Runs rows, and appends their points."""

    def __init__(self, options: argparse.Namespace, path: Path) -> None:
        self._path = path
        self._work = path.parent
        self._dense = options.model.resolve()
        # load_dataset finds the data sets here by their Hub ids.
        self._folder = options.shared.resolve() / "datasets"

    def measure(self, row: Row) -> None:
        """Run a row that is missing, and the row it needs."""
        points = {point["name"] for point in read_points(self._path)}
        if row.name in points:
            return
        if row.needs:
            self.measure(next(other for other in ROWS if other.name == row.needs))
        out = self._work / row.name
        about: dict[str, Any] = {"name": row.name, "command": row.command}
        checkpoint = out if row.command else self._dense
        if row.command:
            places = {"dense": self._dense, "work": self._work, "out": out}
            about |= self._run([word.format_map(places) for word in row.command.split()])
            about |= sizes(json.loads((out / "emp_report.json").read_text()))
        judged = self._judge(row, checkpoint)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(about | judged) + "\n")
        print(about, judged, flush=True)

    def _run(self, words: list[str]) -> dict[str, Any]:
        """CPU seconds, wall seconds and peak memory of a command."""
        log = self._work / "log.txt"
        command = [sys.executable, "-m", "emp_llm", *words, "--overwrite", "-q"]
        used = used_by(command, self._folder, log)
        if "failed" in used:
            raise SystemExit(f"{' '.join(words)}: {used['failed']}; see {log}")
        return {
            "cpu": round(used["user"] + used["system"], 1),
            "wall": used["wall"],
            "memory": used["memory"],
            "threads": int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1)),
        }

    def _judge(self, row: Row, checkpoint: Path) -> dict[str, Any]:
        """Perplexity and answers, with their changes from the dense model's."""
        suites = {"text": ["--suite", "perplexity,seqlen=1024,limit=40"]}
        if row.answers:
            suites["answers"] = ["--tasks", ",".join(TASKS), "--limit", "200"]
        found: dict[str, Any] = {}
        for name, suite in suites.items():
            output = self._work / f"{row.name}.{name}.json"
            self._run(["evaluate", "--model", str(checkpoint), *suite, "--output", str(output)])
            values = values_of(read_results(output, "--output").measures)
            base = values_of(read_results(self._work / f"dense.{name}.json", "").measures)
            for key, value in values.items():
                if not key.endswith("acc_norm"):
                    change = change_of(key, value, base[key])
                    found[key.partition(",")[0]] = [value.value, change.value, change.stderr]
        return {"values": found}


def sizes(report: dict[str, Any]) -> dict[str, Any]:
    """Zeros and parameters of a report."""
    targets = report.get("targets") or {}
    structure = report.get("structure") or {}
    return {
        "zeros": targets.get("sparsity_of_targets"),
        "of_all": targets.get("sparsity_of_all_parameters"),
        "parameters": (structure.get("after") or {}).get("parameters"),
    }


BARS = {
    "50 % zeros": ("wanda-50", "sparsegpt-50", "emp-admm-50", "emp-admm-50-healed"),
    "2:4": ("wanda-2of4", "sparsegpt-2of4", "admm-2of4", "admm-2of4-healed"),
}
BAR_NAMES = ("Wanda", "SparseGPT", "emp-llm: admm, refit", "healed")


def draw(points: dict[str, dict[str, Any]], path: Path) -> None:
    """The increase of the perplexity of the main methods."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    matplotlib.rcParams["svg.hashsalt"] = "smollm2"  # the same file for the same points
    figure, plots = pyplot.subplots(1, 2, figsize=(8, 2.2), layout="constrained", sharey=True)
    for axes, (title, names) in zip(plots, BARS.items(), strict=True):
        known = [
            (label, changes(points[name]))
            for label, name in zip(BAR_NAMES, names, strict=True)
            if name in points
        ]
        colours = ["#9aa0a6", "#9aa0a6", "#1a73e8", "#174ea6"][: len(known)]
        values = [value for _, (value, _) in known]
        errors = [error for _, (_, error) in known]
        labels = [label for label, _ in known]
        steps = [steps_of(points[name]) for name in names if name in points]
        bars = axes.barh(labels, values, xerr=errors, color=colours)
        texts = [
            f" +{value:.0f} %{of_steps}" for value, of_steps in zip(values, steps, strict=True)
        ]
        axes.bar_label(bars, texts, padding=3)
        axes.set_xlim(0, 1.2 * max(values))
        axes.set_title(title, fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
    plots[0].invert_yaxis()
    figure.supxlabel("increase of WikiText-2's perplexity in %, SmolLM2-135M", fontsize=9)
    figure.savefig(path, metadata={"Date": None})


def steps_of(point: dict[str, Any]) -> str:
    """The steps of a healing, as the end of a label; empty for other points."""
    found = re.search(r"--heal-steps (\d+)", point["command"])
    return f" ({found[1]} steps)" if found else ""


def changes(point: dict[str, Any]) -> tuple[float, float]:
    """The change of the perplexity in percent, and its error."""
    name = next(key for key in point["values"] if key.startswith("perplexity"))
    _, change, error = point["values"][name]
    return change, error


def tables(points: dict[str, dict[str, Any]]) -> str:
    """A table for each section, and one of the answers."""
    parts = []
    for section in dict.fromkeys(row.section for row in ROWS if row.section):
        rows = [["", "removed", "perplexity", "change", "CPU seconds", "memory"]]
        for row in ROWS:
            if row.section == section and row.name in points:
                rows.append(cells(row, points[row.name]))
        if len(rows) > 1:
            parts.append(f"## {section}\n\n{markdown_table(rows, as_markdown=True)}")
    heads = [task.replace("_", " ") for task in TASKS]
    rows = [["accuracy in percent", "removed", *heads, "mean of 7", "the two that tell"]]
    telling = [TASKS.index(task) for task in TELLING]
    rows.append(
        [
            "chance",
            "",
            *(f"{each:.0f}" for each in CHANCE),
            mean_text(CHANCE),
            mean_text([CHANCE[place] for place in telling]),
        ]
    )
    for row in ROWS:
        values = points.get(row.name, {}).get("values", {})
        if f"{TASKS[0]} acc" in values:
            accuracies = [values[f"{task} acc"][0] for task in TASKS]
            rows.append(
                [
                    f"{row.label}{', ' + row.section if row.section in (MLP, ALL, C4) else ''}",
                    removed(points[row.name]),
                    *(f"{each:.1f}" for each in accuracies),
                    mean_text(accuracies),
                    mean_text([accuracies[place] for place in telling]),
                ]
            )
    parts.append(f"## Answers\n\n{markdown_table(rows, as_markdown=True)}")
    return "# SmolLM2-135M: all rows\n\n" + "\n\n".join(parts)


def cells(row: Row, point: dict[str, Any]) -> list[str]:
    """A row of a table."""
    values = point["values"]
    value = values[next(key for key in values if key.startswith("perplexity"))][0]
    change, error = changes(point)
    return [
        row.label,
        removed(point),
        f"{value:.2f}",
        f"{change:+.1f} ± {error:.1f} %",
        f"{point['cpu']:.0f}",
        f"{point['memory']:.2f} GB",
    ]


def removed(point: dict[str, Any]) -> str:
    """What a row removed: a share of the targets, or of the parameters."""
    if point.get("parameters"):
        return f"{100 * (1 - point['parameters'] / WEIGHTS):.1f} % of the parameters"
    if point.get("zeros") is not None:
        return f"{100 * point['zeros']:.1f} %"
    return ""


def mean_text(accuracies: Any) -> str:
    """The mean of accuracies."""
    return f"{sum(accuracies) / len(accuracies):.1f}"


if __name__ == "__main__":
    main()
