"""Where should the weights stay? Shares of the blocks by what each of them costs alone.

    python scripts/study_shares.py OUT --shared DIR [--smollm2 FOLDER] [--models NAME ...]

DIR and FOLDER are those of study_counts.py. Each block is pruned alone, by Wanda's scores at three
sparsities; its loss on 16 held-out sequences is a line in its logarithm. At a total, the shares are
those at which the last weight of each block costs the same. They are judged on the test text, at
equal totals, beside uniform shares and EMP's counts; changes are from uniform shares, with paired
errors. OWL's shares are of version 0.2, the last that had them. The last table says how well N_eff
of a block predicts the share that it loses.
Points and blocks are lines of OUT/shares.jsonl, and are not measured again.
"""

import argparse
import json
import logging
import math
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from study_counts import Model, add_model_options, models_of

from emp_llm import ByCost, Effective, Recipe, Share, Targets, Wanda
from emp_llm.calibration.activations import Activations
from emp_llm.calibration.data import CHOOSING, calibration_data
from emp_llm.common.machine import Stopwatch
from emp_llm.common.tables import markdown_table
from emp_llm.evaluation.comparison import losses_of, paired_error_of_losses
from emp_llm.evaluation.perplexity import text_tokens
from emp_llm.evaluation.suites import find_suite
from emp_llm.hub.local_model import LocalModel
from emp_llm.models.loading import load_tokenizer
from emp_llm.models.one_model import OneModel
from emp_llm.options.calibration import NormOptions
from emp_llm.pruning.chosen import targets_of_folder
from emp_llm.pruning.outcome import Outcomes
from emp_llm.runs.block_shares import (
    BlockCost,
    costs_of_blocks,
    removed_weights,
    shares_by_cost,
)
from emp_llm.runs.loss_budget import LossCurve
from emp_llm.runs.prune_run import split_held_out
from emp_llm.runs.run import Run, collected_norms

TOTALS = (0.3, 0.5)


def main(line: list[str] | None = None) -> None:
    """Measure the points that are missing, and print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_model_options(parser)
    options = parser.parse_args(line)
    logging.disable(logging.WARNING)
    path = options.out.resolve() / "shares.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        models = models_of(options, Path(scratch))
        os.chdir(options.shared / "datasets")  # load_dataset finds the data sets here
        for name, model in models.items():
            if name in (options.models or [name]):
                ModelStudy(name, model, path, Path(scratch)).measure()
    print(tables([json.loads(row) for row in path.read_text().splitlines()]))


class ModelStudy:
    """The points of a model."""

    def __init__(self, name: str, model: Model, path: Path, scratch: Path) -> None:
        self.name = name
        self.path = path
        rows = path.read_text().splitlines() if path.is_file() else []
        self.points = [each for each in map(json.loads, rows) if each["model"] == name]
        self.recipe = Recipe(score=Wanda(), counts=Share(0.5), targets=Targets("all-linear"))
        self.chosen = targets_of_folder(model.folder, name, self.recipe, False)
        models = OneModel("cpu")
        text = NormOptions(calibration=model.text, samples=model.samples, seqlen=512)
        data: Any = calibration_data(text, self.chosen.architecture, models, held_out=CHOOSING)
        run = Run(
            source=LocalModel(name, model.folder, None),
            recipe=self.recipe,
            chosen=self.chosen,
            options=text,
            text=data,
            path=path,
            models=models,
            stopwatch=Stopwatch(),
        )
        file = path.with_name(f"{name}.safetensors")
        if not file.is_file():
            layers = self.chosen.layers_to_calibrate()
            collected_norms(run, layers, (), scratch / "calibration").save(file)
        self.norms = Activations.load(file)
        suite = find_suite(model.suite).corpus
        assert suite is not None
        tokens = text_tokens(suite, load_tokenizer(model.folder, False))
        length = suite.seqlen or 512
        number = min(model.limit, len(tokens) // length)
        test = tokens[: number * length].view(number, length)
        texts = (split_held_out(data.held_out, model.text)[0], test)
        self.curves = [LossCurve(run, each, "cpu", scratch) for each in texts]
        self.blocks = sorted(
            {each.layer.block for each in self.chosen.targets if each.layer.block is not None}
        )
        self.sizes = {
            block: sum(t.matrix.numel for t in self.chosen.targets if t.layer.block == block)
            for block in self.blocks
        }

    def measure(self) -> None:
        """Measure what is missing."""
        if not any("block" in point for point in self.points):
            for cost in costs_of_blocks(self.curves[0], self.chosen.targets, self.norms):
                self.keep({"block": cost.block, "size": cost.weights, "rises": cost.rises})
        for total in TOTALS:
            for label, recipe in self.allocations(total).items():
                if not any(
                    (point.get("label"), point.get("total")) == (label, total)
                    for point in self.points
                ):
                    self.judge(label, recipe, total)

    def judge(self, label: str, recipe: Recipe, total: float) -> None:
        """A point on the test text."""
        curve = self.curves[1]
        record, outcomes = curve.of_masks(recipe, self.norms)
        self.keep(
            {
                "label": label,
                "total": total,
                "rise": math.log(record.value / curve.dense.value),
                "losses": losses_of(record),
                "removed": self.removed(outcomes),
            }
        )

    def removed(self, outcomes: Outcomes) -> dict[str, float]:
        """The share that goes of each block."""
        zeros = dict.fromkeys(self.blocks, 0)
        for outcome in outcomes.of_targets:
            zeros[outcome.target.layer.block or 0] += outcome.zeros
        return {str(block): zeros[block] / self.sizes[block] for block in self.blocks}

    def allocations(self, total: float) -> dict[str, Recipe]:
        """Recipes with a total sparsity."""
        effective = Effective(sparsity=total)
        costs = [
            BlockCost(point["block"], point["size"], tuple(point["rises"]))
            for point in self.points
            if "block" in point
        ]
        removed = removed_weights(self.chosen.targets, shares_by_cost(costs, total))
        by_cost = Share(total, ByCost(removed))
        return {
            "uniform": Recipe(targets=self.recipe.targets, counts=Share(total)),
            "EMP": Recipe(targets=self.recipe.targets, counts=effective),
            "by cost": Recipe(targets=self.recipe.targets, counts=by_cost),
        }

    def keep(self, point: dict[str, Any]) -> None:
        """Keep a point."""
        point = {"model": self.name, **point}
        self.points.append(point)
        with self.path.open("a") as file:
            file.write(json.dumps(point) + "\n")


def tables(points: list[dict[str, Any]]) -> str:
    """Changes of the perplexity, and the correlation of the shares with N_eff."""
    names = list(dict.fromkeys(point["model"] for point in points))
    rows = [["all linear layers, Wanda's masks", *names]]
    corr = [["rank correlation over the blocks, at 50 %", *names]]
    found = {(p["model"], p["label"], p["total"]): p for p in points if "label" in p}
    for total in TOTALS:
        for label in ("uniform", "OWL", "EMP", "by cost"):
            cells = []
            for name in names:
                point = found.get((name, label, total))
                base = found.get((name, "uniform", total))
                cells.append("" if point is None or base is None else cell(point, base))
            rows.append([f"{100 * total:.0f} %, {label}", *cells])
    for label in ("EMP", "OWL"):
        cells = []
        for name in names:
            both = [found.get((name, each, 0.5)) for each in (label, "by cost")]
            cells.append("" if None in both else f"{rank_correlation(*both):+.2f}")  # type: ignore[arg-type]
        corr.append([f"share by {label} and by cost", *cells])
    return "\n\n".join(markdown_table(each, as_markdown=True) for each in (rows, corr))


def cell(point: dict[str, Any], base: dict[str, Any]) -> str:
    """The rise from the dense model; and for others than uniform shares the change from these."""
    rise = f"{100 * math.expm1(min(point['rise'], 50)):+.1f} %"
    if point is base:
        return rise
    change = point["rise"] - base["rise"]
    error = paired_error_of_losses(point["losses"], base["losses"]) or 0.0
    factor = math.exp(change)
    return f"{rise} ({100 * (factor - 1):+.1f} ± {100 * factor * error:.1f})"


def rank_correlation(first: dict[str, Any], other: dict[str, Any]) -> float:
    """Spearman's, of the shares that blocks lose."""
    mine, its = (
        np.argsort(np.argsort(list(each["removed"].values()))).astype(float)
        for each in (first, other)
    )
    return float(np.corrcoef(mine, its)[0, 1])


if __name__ == "__main__":
    main()
