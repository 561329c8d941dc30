"""Where should the weights stay? Shares of the blocks by what each of them costs alone.

    python scripts/study_shares.py OUT --shared DIR [--smollm2 FOLDER] [--models NAME ...]

DIR and FOLDER are those of study_counts.py. Each block is pruned alone, by Wanda's scores at three
sparsities; its loss on 16 held-out sequences is a line in its logarithm. At a total, the shares are
those at which the last weight of each block costs the same. They are judged on the test text, at
equal totals, beside uniform shares, OWL's, and EMP's counts; changes are from uniform shares, with
paired errors. The last table says how well N_eff of a block predicts the share that it loses.
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
import torch
from numpy.typing import NDArray
from study_counts import Model, models_of

from emp_llm import Effective, Match, Owl, Recipe, Share, Targets, Wanda
from emp_llm.calibration.activations import Activations
from emp_llm.calibration.data import calibration_data
from emp_llm.calibration.passes import calibrated, model_origin
from emp_llm.common.machine import Stopwatch
from emp_llm.common.tables import markdown_table
from emp_llm.evaluation.comparison import losses_of, paired_error_of_losses
from emp_llm.evaluation.loss_budget import HELD_OUT, LossCurve, deciding
from emp_llm.evaluation.perplexity import text_tokens
from emp_llm.evaluation.suites import find_suite
from emp_llm.models.loading import load_tokenizer
from emp_llm.models.one_model import OneModel
from emp_llm.options.calibration import NormOptions
from emp_llm.pruning.chosen import targets_of_folder
from emp_llm.pruning.outcome import Outcomes

ALONE = (0.25, 0.5, 0.75)  # sparsities of a block that is pruned alone
TOTALS = (0.3, 0.5)
_LEAST = 1e-6  # nats: a rise below it is chance
_MOST = 0.95  # of a block


def main(line: list[str] | None = None) -> None:
    """Measure the points that are missing, and print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="folder of the points")
    parser.add_argument(
        "--shared", type=Path, required=True, help="folder with models, texts and data sets"
    )
    parser.add_argument("--smollm2", type=Path, help="SmolLM2-135M, as made by scripts/smollm2.py")
    parser.add_argument("--models", nargs="+", help="only these; default: all")
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
        self.models = OneModel("cpu", "auto", False, Stopwatch())
        text = NormOptions(calibration=model.text, samples=model.samples, seqlen=512)
        data: Any = calibration_data(
            text, self.chosen.architecture, False, models=self.models, further=HELD_OUT
        )
        file = path.with_name(f"{name}.safetensors")
        if not file.is_file():
            about = model_origin(name, None, self.chosen.checkpoint)
            layers = self.chosen.layers_to_calibrate()
            calibrated(self.models.get(model.folder), data, layers, text, about).save(file)
        self.norms = Activations.load(file)
        suite = find_suite(model.suite).corpus
        assert suite is not None
        tokens = text_tokens(suite, load_tokenizer(model.folder, False))
        length = suite.seqlen or 512
        number = min(model.limit, len(tokens) // length)
        test = tokens[: number * length].view(number, length)
        texts = (deciding(data.further, model.text), test)
        self.curves = [self.curve(model, each, scratch) for each in texts]
        self.blocks = sorted(
            {each.layer.block for each in self.chosen.targets if each.layer.block is not None}
        )
        self.sizes = {
            block: sum(t.matrix.numel for t in self.chosen.targets if t.layer.block == block)
            for block in self.blocks
        }

    def curve(self, model: Model, tokens: torch.Tensor, scratch: Path) -> LossCurve:
        """What measures losses on a text."""
        return LossCurve(
            self.models,
            model.folder,
            self.chosen.checkpoint,
            self.chosen.targets,
            tokens,
            "cpu",
            scratch,
        )

    def measure(self) -> None:
        """Measure what is missing."""
        for block in self.blocks:
            if not any(point.get("block") == block for point in self.points):
                rises = []
                for sparsity in ALONE:
                    record, _ = self.curves[0].of_masks(self.at({block: sparsity}), self.norms)
                    rises.append(math.log(record.value / self.curves[0].dense.value))
                self.keep({"block": block, "size": self.sizes[block], "rises": rises})
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
        by_cost = self.at(shares_by_cost([p for p in self.points if "block" in p], total))
        return {
            "uniform": Recipe(targets=self.recipe.targets, counts=Share(total)),
            "OWL": Recipe(targets=self.recipe.targets, counts=Share(total, Owl())),
            "EMP": Recipe(targets=self.recipe.targets, counts=effective),
            "by cost": by_cost,
        }

    def at(self, shares: dict[int, float]) -> Recipe:
        """The recipe with a sparsity for each block; others lose nothing."""
        removed = {
            target.name: math.floor(shares.get(target.layer.block or 0, 0.0) * target.matrix.numel)
            for target in self.chosen.targets
        }
        counts = Match("", "matrix", removed)
        return Recipe(score=Wanda(), counts=counts, targets=self.recipe.targets)

    def keep(self, point: dict[str, Any]) -> None:
        """Keep a point."""
        point = {"model": self.name, **point}
        self.points.append(point)
        with self.path.open("a") as file:
            file.write(json.dumps(point) + "\n")


def lines_of(blocks: list[dict[str, Any]]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Slope and start of the logarithm of each block's rise, against its sparsity."""
    rises = np.log(np.maximum([each["rises"] for each in blocks], _LEAST))
    slopes, starts = np.polyfit(ALONE, rises.T, 1)
    return np.maximum(slopes, 1.0), starts


def shares_by_cost(blocks: list[dict[str, Any]], total: float) -> dict[int, float]:
    """The shares with a total at which the last weight of each block costs the same:
    slope exp(start + slope s) / size = price, with the price found by halving.
    """
    slopes, starts = lines_of(blocks)
    sizes = np.array([each["size"] for each in blocks], dtype=float)
    low = -60.0
    high = 60.0
    shares = np.zeros(len(blocks))
    for _ in range(200):
        price = (low + high) / 2
        shares = np.clip((price + np.log(sizes / slopes) - starts) / slopes, 0, _MOST)
        low, high = (price, high) if (shares * sizes).sum() < total * sizes.sum() else (low, price)
    return {each["block"]: float(share) for each, share in zip(blocks, shares, strict=True)}


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
