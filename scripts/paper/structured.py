"""Neurons and filters: the paper's table "EMP under structured pruning", and four ResNets; units
zeroed, and removed.

    python scripts/paper/structured.py [--networks mnist:fc5 mnist:fc12 cifar10:vgg16
    cifar10:resnet20 ...] [--seeds N]
        [--width F] [--gradient-images N] [--data DIR] [--cache DIR] [--output DIR] [--threads N]
        [--train-images N] [--test-images N] [--epochs N]

A neuron is a row of a linear layer, a filter one of a convolution; `prune_units.py` prunes them.
First as in the paper: by magnitude, the units of each layer zeroed for themselves. Then removed,
together with those that belong to them, by magnitude, Taylor and saliency: the network gets
smaller. Algorithm 1 stands beside fixed shares. Nothing is trained after pruning. Trained weights
come from the cache, or are made as by fc.py and cifar_weights.py.
"""

import argparse
import copy
import statistics
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from cifar_weights import gradient_batches, network_named
from fc import trained_fc
from paper_pages import Beside, Page, beside_table, options_of, written_page
from prune_units import UnitReport, magnitude_scores, prune_units, saliency_scores, taylor_scores
from torch import Tensor, nn
from torch.nn import functional
from training import evaluate_on
from vision_data import ImageData, image_data

from emp_llm.common.errors import UserError

BETAS = (0.8, 1.0, 1.2)
SHARES = (0.5, 0.7, 0.9)
NETWORKS = (
    "mnist:fc5",
    "mnist:fc12",
    "cifar10:vgg16",
    "cifar10:resnet20",
    "cifar10:resnet32",
    "cifar10:resnet44",
    "cifar10:resnet56",
)
# data set and network -> accuracy in percent, dense and pruned by EMP with beta = 1.
PUBLISHED = {
    "mnist:fc5": (97.35, 97.41),
    "mnist:fc12": (97.07, 97.68),
    "fashion-mnist:fc5": (84.57, 86.44),
    "fashion-mnist:fc12": (86.97, 86.84),
    "cifar10:vgg16": (91.12, 90.69),
    "cifar100:resnet18": (77.88, 77.67),
}
_MEASURES = ("accuracy", "change", "units removed", "parameters left", "FLOPs left")
REASONS = {
    "dense accuracy": "The training of the fully connected networks has other random numbers, and "
    "VGG16 is narrower here and has seen fewer images, as the line above its table says. The "
    "change compares without it.",
    "published gains": "The paper's networks gain up to 1.87 points (F-MNIST, FC5) by losing "
    "neurons. The paper does not say how many neurons, nor of which layers, nor whether a network "
    "was trained afterwards. Here nothing was, and the output layer stays whole; at beta = 1 "
    "hardly any neuron goes, and the accuracy hardly changes.",
    "magnitude": "The norms of a layer's units differ little, and equal scores give N_eff = N. So "
    "EMP by magnitude removes few units at beta = 1.",
    "Taylor and saliency": "These scores differ more between units, so their N_eff is lower, and "
    "EMP removes more. At the same share of units neither is better than the magnitude throughout; "
    "why was not tested. The paper has no such rows.",
    "zeroed and removed": "Zeroed for themselves, all filters compete, also those on both sides of "
    "a residual connection. Removed, the ResNets lose only filters of the first convolution of "
    "each block: their shortcuts pad channels with zeros (option A), so no channel of the other "
    "convolutions can go. Shares of units are those of the units that can be pruned.",
}


class Pruned(NamedTuple):
    """A row: a fraction of 1 for each measure; None: not known."""

    accuracy: float
    removed: float
    parameters: float | None
    flops: float | None


def main(line: list[str] | None = None) -> None:
    """Prune every network by every rule, and write the page."""
    parser = options_of(__doc__)
    parser.add_argument(
        "--networks", nargs="+", default=list(NETWORKS), help="data set and network"
    )
    parser.add_argument(
        "--seeds", type=int, default=1, help="number of trainings of the fully connected networks"
    )
    parser.add_argument(
        "--width", type=float, default=0.25, help="of VGG16, as a factor on its channels"
    )
    parser.add_argument(
        "--gradient-images", type=int, default=1000, help="training images for Taylor and saliency"
    )
    options = parser.parse_args(line)
    with written_page("structured", "Neurons and filters", options, line) as page:
        page.add(
            "Accuracy in percent on the test images; parameters and FLOPs in percent of the dense "
            "network's. beta = 1 is the method. Nothing is trained after pruning. A zeroed and a "
            "removed network compute the same."
        )
        for each in options.networks:
            _add_network(page, each, options)
        page.explain(REASONS)


def _add_network(page: Page, each: str, options: argparse.Namespace) -> None:
    """The table of a network; of a fully connected one, the means over its trainings."""
    dataset, _, name = each.partition(":")
    if not name:
        raise UserError(f"--networks {each!r} has no data set; give it as cifar10:{each}.")
    data = image_data(dataset, options.data).shortened(options.train_images, options.test_images)
    if name.startswith("fc"):
        models = [trained_fc(name, data, seed, options) for seed in range(options.seeds)]
        origin = f"Means over {options.seeds} trainings." if options.seeds > 1 else "One training."
    else:
        model, origin = network_named(name, data, options)
        models = [model]
    dense = 100 * statistics.mean(evaluate_on(model, data).accuracy for model in models)
    runs = [dict(rows_of(model, data, options.gradient_images)) for model in models]
    rows = []
    for key in runs[0]:
        ours = _mean([run[key] for run in runs])
        published: tuple[float | None, ...] = ()
        if key == ("zeroed alone", "magnitude", "EMP, beta 1") and each in PUBLISHED:
            before, after = PUBLISHED[each]
            published = (after, after - before)
        rows.append(Beside(key, (ours[0], ours[0] - dense, *ours[1:]), published))
    theirs = f" (published {PUBLISHED[each][0]:.2f} %)" if each in PUBLISHED else ""
    page.add(f"## {name} on {data.name}")
    page.add(f"{origin} Dense accuracy {dense:.2f} %{theirs} on {len(data.test):,} test images.")
    page.add(beside_table(("units", "score", "rule"), _MEASURES, rows, (2, 2, 1, 1, 1)))


def rows_of(
    model: nn.Module, data: ImageData, images: int
) -> Iterator[tuple[tuple[str, str, str], Pruned]]:
    """(how, score, rule) and its effect on a network, for all rows of its table.

    Args:
        images: number of training images for the gradients.
    """
    magnitude = magnitude_scores(model)
    for rule, budget in _rules():
        yield (
            ("zeroed alone", "magnitude", rule),
            _measure(model, data, magnitude, {"coupled": "alone", **budget}),
        )
    batches = list(gradient_batches(data, images))
    loss = functional.cross_entropy
    scores = {
        "magnitude": magnitude,
        "Taylor": taylor_scores(model, batches, loss),
        "saliency": saliency_scores(model, batches, loss),
    }
    for criterion, score in scores.items():
        for rule, budget in _rules():
            yield (
                ("removed", criterion, rule),
                _measure(model, data, score, {"remove": True, **budget}),
            )


def _rules() -> Iterator[tuple[str, dict[str, float]]]:
    for beta in BETAS:
        yield f"EMP, beta {beta:g}", {"beta": beta}
    for share in SHARES:
        yield f"{100 * share:.0f} %", {"sparsity": share}


def _measure(
    model: nn.Module, data: ImageData, scores: Mapping[str, Tensor], how: dict[str, Any]
) -> Pruned:
    """Prune a copy of a network and evaluate it."""
    pruned = copy.deepcopy(model)
    report = prune_units(pruned, data.inputs(data.test[:1]), score=scores, **how)
    return Pruned(evaluate_on(pruned, data).accuracy, report.sparsity, *(_left(report)))


def _left(report: UnitReport) -> tuple[float | None, float | None]:
    """The shares of parameters and FLOPs that removal leaves."""
    shares = [
        None if after is None else after / before
        for before, after in (report.parameters, report.flops)
    ]
    return shares[0], shares[1]


def _mean(runs: list[Pruned]) -> tuple[float, float | None, float | None, float | None]:
    """The means over trainings, in percent."""
    accuracy, *rest = (
        None if any(value is None for value in values) else 100 * statistics.mean(values)
        for values in zip(*runs, strict=True)
    )
    return accuracy, *rest  # type: ignore[return-value]


if __name__ == "__main__":
    main()
