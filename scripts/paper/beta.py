"""Accuracy over beta, for weights, neurons, filters and heads: the paper's figure of EMP at beta
from 0.25 to 2.

    python scripts/paper/beta.py [--networks mnist:fc5 cifar10:resnet20 ...] [--units weights
    neurons filters heads] [--width F]
        [--heads MODEL] [--text TEXT] [--block N] [--limit N] [--data DIR] [--cache DIR] [--output
        DIR] [--threads N] [--train-images N] [--test-images N] [--epochs N]

Scores are magnitudes. Weights: a group is one matrix or convolution. Neurons and filters: a group
is a layer; they are removed by `prune_units.py`. Heads of a language model: all are one group, as
in gpt2_heads.py. Trained weights come from the cache. A few minutes on two cores.
"""

import argparse
import copy
import math
from collections.abc import Iterator
from pathlib import Path

from cifar_weights import network_named
from fc import trained_fc
from gpt2_heads import HeadModel
from paper_pages import Page, options_of, shown_argument, written_page
from prune_units import prune_units
from torch import nn
from training import evaluate_on
from vision_data import ImageData, image_data
from weight_pruning import effective, magnitudes, masked, select_weights

from emp_llm.common.errors import UserError
from emp_llm.common.tables import Rows, markdown_table
from emp_llm.reporting.page import COLOURS, MARKERS, Drawing, new_figure, render

BETAS = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0)
ROOT = Path(__file__).parents[2]
DEMO_MODEL = ROOT / "scripts" / "demo" / "model"
DEMO_TEXT = ROOT / "eval" / "demo" / "heldout.txt"
REASONS = {
    "the paper's figure": "The paper prints no numbers. It says that accuracy falls below beta = 1 "
    "and is level above it; the columns on both sides of 1 show how far that holds here.",
    "heads": "The paper's are those of GPT-2 on WikiText-2, which is not at hand.",
}
UNITS = ("weights", "neurons", "filters", "heads")


def main(line: list[str] | None = None) -> None:
    """Measure every curve, and write the page and its figure."""
    parser = options_of(__doc__)
    parser.add_argument(
        "--networks",
        nargs="+",
        default=["mnist:fc5", "cifar10:resnet20"],
        help="data set and network",
    )
    parser.add_argument(
        "--units", nargs="+", default=list(UNITS), choices=UNITS, help="what is pruned"
    )
    parser.add_argument(
        "--width", type=float, default=0.25, help="of VGG16, as a factor on its channels"
    )
    parser.add_argument(
        "--heads", default=str(DEMO_MODEL), help="language model whose heads are pruned"
    )
    parser.add_argument("--text", default=str(DEMO_TEXT), help="text of its perplexity")
    parser.add_argument("--block", type=int, default=512, help="tokens of a block of the text")
    parser.add_argument("--limit", type=int, default=40, help="blocks of the text")
    options = parser.parse_args(line)
    with written_page("beta", "Accuracy over beta", options, line) as page:
        curves = dict[str, list[tuple[float, float]]]()
        dense = dict[str, float]()
        for each in options.networks:
            dataset, _, name = each.partition(":")
            if not name:
                raise UserError(f"--networks {each!r} has no data set; give it as cifar10:{each}.")
            data = image_data(dataset, options.data).shortened(
                options.train_images, options.test_images
            )
            model = (
                trained_fc(name, data, 0, options)
                if name.startswith("fc")
                else network_named(name, data, options)[0]
            )
            dense[each] = evaluate_on(model, data).accuracy
            for units in options.units:
                if units == "weights" or units == (
                    "neurons" if name.startswith("fc") else "filters"
                ):
                    curves[f"{each}, {units}"] = list(_curve(model, data, units))
        _add_curves(page, curves, dense, _heads_of(options) if "heads" in options.units else None)


def _curve(model: nn.Module, data: ImageData, units: str) -> Iterator[tuple[float, float]]:
    """Sparsity of the weights, or share of the units removed, and accuracy at each beta."""
    for beta in BETAS:
        if units == "weights":
            selected = select_weights(magnitudes(model), effective(beta), "block")
            with masked(model, selected.masks):
                yield selected.sparsity, evaluate_on(model, data).accuracy
        else:
            pruned = copy.deepcopy(model)
            report = prune_units(pruned, data.inputs(data.test[:2]), beta=beta, remove=True)
            yield report.sparsity, evaluate_on(pruned, data).accuracy


def _heads_of(options: argparse.Namespace) -> tuple[str, list[tuple[float, float]]]:
    """Name of the language model, and the share of heads removed and the perplexity at each
    beta, the dense model first.
    """
    asked = argparse.Namespace(
        dtype="float32", samples=None, seqlen=None, block=options.block, limit=options.limit
    )
    model = HeadModel(options.heads, None, options.text, asked)
    runs = [model.run("emp-magnitude", beta) for beta in BETAS]
    points = [(0.0, model.dense)] + [
        (0.0, model.dense) if run is None else (1 - run.kept / run.heads, run.measured)
        for run in runs
    ]
    return f"{shown_argument(options.heads)}, heads", [
        (sparsity, each.perplexity or math.inf) for sparsity, each in points
    ]


def _add_curves(
    page: Page,
    curves: dict[str, list[tuple[float, float]]],
    dense: dict[str, float],
    heads: tuple[str, list[tuple[float, float]]] | None,
) -> None:
    page.figure(_drawing(curves, heads))
    rows: Rows = [["pruned", "dense", *(f"beta {beta:g}" for beta in BETAS)]]
    for name, points in curves.items():
        cells = [f"{100 * accuracy:.2f} ({100 * sparsity:.1f})" for sparsity, accuracy in points]
        rows.append([name, f"{100 * dense[name.split(',')[0]]:.2f}", *cells])
    page.add(
        "Accuracy in percent, and in brackets the sparsity in percent: of the weights, or of the "
        "units that can be pruned. Neurons and filters are removed, not only zeroed."
    )
    page.add(markdown_table(rows, as_markdown=True))
    if heads is not None:
        name, ((_, before), *points) = heads
        page.add("Perplexity, and in brackets the share of all heads set to zero, in percent:")
        cells = [f"{value:.3g} ({100 * sparsity:.1f})" for sparsity, value in points]
        page.add(markdown_table([rows[0], [name, f"{before:.3g}", *cells]], as_markdown=True))
    page.explain(REASONS)


def _drawing(
    curves: dict[str, list[tuple[float, float]]],
    heads: tuple[str, list[tuple[float, float]]] | None,
) -> Drawing:
    with new_figure(4.2) as figure:
        axes = figure.subplots()
        for place, (name, points) in enumerate(curves.items()):
            style = {
                "color": COLOURS[place % len(COLOURS)],
                "marker": MARKERS[place % len(MARKERS)],
            }
            axes.plot(BETAS, [100 * accuracy for _, accuracy in points], label=name, **style)
        axes.axvline(1, color="#888888", linewidth=0.8, linestyle="--")
        axes.set_xlabel("beta")
        axes.set_ylabel("accuracy, %")
        caption = (
            "Accuracy on the test images after magnitude pruning at beta times N_eff; the broken "
            "line is beta = 1, the method."
        )
        if heads is not None:
            name, points = heads
            right = axes.twinx()
            place = len(curves)
            style = {
                "color": COLOURS[place % len(COLOURS)],
                "marker": MARKERS[place % len(MARKERS)],
            }
            right.plot(
                BETAS,
                [value for _, value in points[1:]],
                label=f"{name} (right axis)",
                linestyle=":",
                **style,
            )
            right.grid(False)
            right.set_yscale("log")
            right.yaxis.set_major_formatter("{x:g}")
            right.yaxis.set_minor_formatter("")
            right.set_ylabel("perplexity")
            caption += " Right axis: perplexity of a language model that loses heads."
        figure.legend(loc="outside lower center", ncols=2)
        return render(figure, "beta", "Accuracy over beta", caption)


if __name__ == "__main__":
    main()
