"""Every method at the same number of removed weights, each with and without a refit: perplexities
with paired errors.

    python scripts/study_methods.py MODEL --calibration demo --text eval/demo/heldout.txt --output
    demo.jsonl python scripts/study_methods.py --tables docs/methods docs/methods/*.jsonl

The first command adds one line of JSON for each point to its output and skips the points that it
holds already, so it can be stopped and started again. The second writes the tables and the figure.

A budget is a sparsity of the targets, "beta1" (as many weights as EMP-magnitude removes at beta =
1), or "2:4". A method is that of `prune`, with its counts after a plus: "emp-wanda+magnitude",
"emp-relative+own".
"""

import argparse
import copy
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from emp_llm.options.words import recipe_of

os.environ.setdefault("HF_HUB_OFFLINE", "1")

METHODS = (
    "magnitude,wanda,ria,sparsegpt,emp-magnitude,emp-wanda,emp-wanda+magnitude,relative,emp-relative+own,"
    "emp-relative,admm,emp-admm"
)
BUDGETS = "0.5,beta1,0.4,0.6,0.7,2:4"


@dataclass(frozen=True)
class Point:
    """One pruned model of the study.

    Attributes:
        scope: "mlp" or "all-linear".
        budget, method: as in the docstring of this script.
        refit: "", "equal" or "relative": the weighting of the tokens.
    """

    scope: str
    budget: str
    method: str
    refit: str

    @property
    def possible(self) -> bool:
        """Whether the method goes with the budget."""
        return ":" not in self.budget or not self.method.startswith("emp-")

    def recipe(self, sparsity: float | None) -> Any:
        """Its recipe; `sparsity` is that of the budget, None for N:M."""

        method, _, option = self.method.partition("+")
        how: dict[str, Any] = (
            {"pattern": self.budget} if sparsity is None else {"sparsity": sparsity}
        )
        if option:
            how["count_by"] = option
        if self.refit:
            how |= {"refit": True, "refit_weighting": self.refit}
        return recipe_of(method=method, targets=self.scope, **how)


def points(scopes: str, budgets: str, methods: str, refits: str) -> list[Point]:
    """All points, in the order of the budgets."""
    every = [
        Point(scope, budget, method, refit)
        for budget in budgets.split(",")
        for scope in scopes.split(",")
        for method in methods.split(",")
        for refit in refits.split(",")
    ]
    return [point for point in every if point.possible]


class Study:
    """The dense model of a study, its calibration and its text."""

    def __init__(self, options: argparse.Namespace) -> None:
        from emp_llm.calibration.data import read_text
        from emp_llm.calibration.texts import find_corpus
        from emp_llm.evaluation.evaluate import text_tokens
        from emp_llm.models.loading import load_model, load_tokenizer
        from emp_llm.options.shared import CalibrationOptions

        folder = Path(options.model)
        self.name = options.name or folder.name
        self.model = load_model(folder)
        tokenizer = load_tokenizer(folder)
        self.options = options
        wanted = CalibrationOptions(
            calibration=options.calibration, samples=options.samples, seqlen=options.seqlen
        )
        self.tokens = read_text(wanted, tokenizer, self.model.config).tokens
        self.text = text_tokens(find_corpus(options.text), tokenizer)
        self._norms: Any = None
        self._beta1: dict[str, float] = {}

    def norms(self) -> Any:
        """The norms of all linear layers."""
        from emp_llm.runs.prune_model import prune_model

        if self._norms is None:
            report = prune_model(
                copy.deepcopy(self.model),
                recipe_of(method="wanda", targets="all-linear"),
                self.tokens,
            )
            self._norms = report.activations
        return self._norms

    def sparsity(self, point: Point) -> float | None:
        """The sparsity of a point's budget."""
        from emp_llm.runs.prune_model import prune_model

        if point.budget != "beta1":
            return None if ":" in point.budget else float(point.budget)
        if point.scope not in self._beta1:
            recipe = recipe_of(method="emp-magnitude", targets=point.scope)
            self._beta1[point.scope] = prune_model(
                copy.deepcopy(self.model), recipe
            ).targets.sparsity_of_targets
        return self._beta1[point.scope]

    def losses(self, model: Any) -> list[float]:
        """The mean loss of each block of the text."""
        from emp_llm.evaluation.evaluate import perplexity

        return list(
            perplexity(model, self.text, self.options.block, limit=self.options.limit).block_losses
        )

    def run(self, point: Point | None) -> dict[str, Any]:
        """The result of a point; None: the dense model."""
        from emp_llm.runs.prune_model import prune_model

        start = time.perf_counter()
        entry = self.about()
        model = self.model if point is None else copy.deepcopy(self.model)
        if point is not None:
            recipe = point.recipe(self.sparsity(point))
            norms = self.norms() if recipe.needs_activations else None
            data = self.tokens if recipe.updates else None
            start = time.perf_counter()
            report = prune_model(model, recipe, data, activations=norms)
            fits = report.record.fits.values()
            entry |= vars(point) | {
                "sparsity": report.targets.sparsity_of_targets,
                "beta": report.record.recipe.counts.in_force,
            }
            entry["errors"] = [
                [f.error_before, f.error_after, f.held_out_before, f.held_out_after] for f in fits
            ]
        entry["seconds"] = round(time.perf_counter() - start, 2)
        return entry | {"losses": self.losses(model)}

    def about(self) -> dict[str, Any]:
        """What all points share."""
        o = self.options
        where = {
            "calibration": o.calibration_name or Path(o.calibration).name,
            "samples": len(self.tokens),
        }
        return {
            "model": self.name,
            **where,
            "text": o.text_name or Path(o.text).name,
            "block": o.block,
        }


def main(line: list[str] | None = None) -> None:
    """Run the study, or write its tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "model", help="model folder; with --tables, the first results file", nargs="?"
    )
    parser.add_argument(
        "results", nargs="*", type=Path, help="further results files, with --tables"
    )
    parser.add_argument("--tables", type=Path, help="folder for the tables and the figure")
    parser.add_argument("--name", help="of the model in the tables")
    parser.add_argument("--calibration", default="demo")
    parser.add_argument("--calibration-name")
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--seqlen", type=int, default=512)
    parser.add_argument(
        "--text", default="eval/demo/heldout.txt", help="text file or recipe to judge on"
    )
    parser.add_argument("--text-name")
    parser.add_argument("--block", type=int, default=512)
    parser.add_argument("--limit", type=int, help="blocks of the text")
    parser.add_argument("--scopes", default="mlp,all-linear")
    parser.add_argument("--budgets", default=BUDGETS)
    parser.add_argument("--methods", default=METHODS)
    parser.add_argument("--refits", default=",equal", help="weightings; empty: no refit")
    parser.add_argument("--output", type=Path, default=Path("study.jsonl"))
    options = parser.parse_args(line)
    if options.tables is not None:
        from study_tables import write_tables

        write_tables(options.tables, [Path(options.model), *options.results])
        return
    run_study(options)


def run_study(options: argparse.Namespace) -> None:
    """Run the points that the output does not hold yet."""
    study = Study(options)
    about = study.about()
    known = (
        [json.loads(text) for text in options.output.read_text().splitlines()]
        if options.output.exists()
        else []
    )
    done = {tuple(entry.get(key) for key in _KEYS) for entry in known}
    wanted: list[Point | None] = [
        None,
        *points(options.scopes, options.budgets, options.methods, options.refits),
    ]
    for number, point in enumerate(wanted, 1):
        key = tuple((about | (vars(point) if point is not None else {})).get(key) for key in _KEYS)
        if key in done:
            continue
        entry = study.run(point)
        with options.output.open("a") as file:
            file.write(json.dumps(entry) + "\n")
        mean = sum(entry["losses"]) / len(entry["losses"])
        print(f"{number}/{len(wanted)} {key} loss {mean:.4f}, {entry['seconds']} s", flush=True)


_KEYS = ("model", "calibration", "samples", "text", "block", "scope", "budget", "method", "refit")

if __name__ == "__main__":
    main()
