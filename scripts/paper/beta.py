"""Accuracy over beta, for weights: the paper's figure of EMP at beta from 0.5 to 2.

    python scripts/paper/beta.py [--networks mnist:fc5 cifar10:resnet20 ...] [--units weights] [--width F]
        [--data DIR] [--cache DIR] [--output DIR] [--threads N] [--train-images N] [--test-images N] [--epochs N]

Scores are magnitudes. A group is one matrix or convolution. Trained weights come from the cache. A few minutes on two cores.
"""

from collections.abc import Iterator

from cifar_weights import network_named
from fc import trained_fc
from paper_pages import Page, options_of, written_page
from torch import nn
from training import evaluate_on
from vision_data import ImageData, image_data
from weight_pruning import effective, magnitudes, masked, select_weights

from emp_llm.common.errors import UserError
from emp_llm.common.tables import Rows, markdown_table
from emp_llm.reporting.figures.style import COLOURS, MARKERS, drawn, new_figure, styled

BETAS = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0)
UNITS = ("weights",)


def main(line: list[str] | None = None) -> None:
    """Measure every curve, and write the page and its figure."""
    parser = options_of(__doc__)
    parser.add_argument("--networks", nargs="+", default=["mnist:fc5", "cifar10:resnet20"], help="data set and network")
    parser.add_argument("--units", nargs="+", default=list(UNITS), choices=UNITS, help="what is pruned")
    parser.add_argument("--width", type=float, default=0.25, help="of VGG16, as a factor on its channels")
    options = parser.parse_args(line)
    with written_page("beta", "Accuracy over beta", options, line) as page:
        curves, dense = dict[str, list[tuple[float, float]]](), dict[str, float]()
        for each in options.networks:
            dataset, _, name = each.partition(":")
            if not name:
                raise UserError(f"--networks {each!r} has no data set; give it as cifar10:{each}.")
            data = image_data(dataset, options.data).shortened(options.train_images, options.test_images)
            model = trained_fc(name, data, 0, options) if name.startswith("fc") else network_named(name, data, options)[0]
            dense[each] = evaluate_on(model, data).accuracy
            for units in options.units:
                curves[f"{each}, {units}"] = list(_curve(model, data))
        _add_curves(page, curves, dense)


def _curve(model: nn.Module, data: ImageData) -> Iterator[tuple[float, float]]:
    """Sparsity and accuracy at each beta."""
    for beta in BETAS:
        selected = select_weights(magnitudes(model), effective(beta), "block")
        with masked(model, selected.masks):
            yield selected.sparsity, evaluate_on(model, data).accuracy


def _add_curves(page: Page, curves: dict[str, list[tuple[float, float]]], dense: dict[str, float]) -> None:
    with styled():
        figure = new_figure(3.4)
        axes = figure.subplots()
        for place, (name, points) in enumerate(curves.items()):
            style = {"color": COLOURS[place % len(COLOURS)], "marker": MARKERS[place % len(MARKERS)]}
            axes.plot(BETAS, [100 * accuracy for _, accuracy in points], label=name, **style)
        axes.axvline(1, color="#888888", linewidth=0.8, linestyle="--")
        axes.set_xlabel("beta")
        axes.set_ylabel("accuracy, %")
        figure.legend(loc="outside right upper")
        caption = (
            "Accuracy on the test images after magnitude pruning at beta times N_eff; the broken line is beta = 1, the method."
        )
        page.figure(drawn(figure, "beta", "Accuracy over beta", caption))
    rows: Rows = [["pruned", "dense", *(f"beta {beta:g}" for beta in BETAS)]]
    for name, points in curves.items():
        cells = [f"{100 * accuracy:.2f} ({100 * sparsity:.1f})" for sparsity, accuracy in points]
        rows.append([name, f"{100 * dense[name.split(',')[0]]:.2f}", *cells])
    page.add("Accuracy in percent, and in brackets the sparsity in percent: of the weights.")
    page.add(markdown_table(rows))
    page.explain(
        {
            "the paper's figure": "The paper prints no numbers. It says that accuracy falls below beta = 1 and is level above "
            "it; the columns on both sides of 1 show how far that holds here."
        }
    )


if __name__ == "__main__":
    main()
