"""Rows that keep next to nothing, because their effective number is that of a few inputs that
dominate all others.
"""

from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from emp_llm.common.tables import percent_cell
from emp_llm.options.recipe import Effective
from emp_llm.pruning.counts import counts_of
from emp_llm.pruning.masks import Pruner, measure_targets
from emp_llm.pruning.outcome import Outcome, Outcomes
from emp_llm.pruning.scores import Scores
from emp_llm.selection.criteria import MAGNITUDE

LEAST = 0.05  # of a row's weights; below, it starves
_LAYERS = 3  # that are named


class _Starved(NamedTuple):
    """The starving rows of a target, and the input that carries most of their scores, with its
    mean share of these.
    """

    name: str
    rows: int
    input: int
    share: float


def starving_rows(pruner: Pruner, outcomes: Outcomes) -> str | None:
    """A sentence on rows that keep less than 5 % of their weights by an effective number, or None.

    It says which inputs carry their scores, and what other counts would remove. Order 1, exp of the
    entropy of the shares of the scores, is a larger effective number than one over the sum of their
    squares, the more so the more a few dominate. The magnitudes know no inputs.

    Args:
        pruner: reads the weights of layers with such rows again, and those of all layers for each
            other count.
        outcomes: of the pruner.
    """
    counts = pruner.scores.recipe.counts
    if not isinstance(counts, Effective) or pruner.scores.recipe.group != "row":
        return None
    starved = [outcome for outcome in outcomes.of_targets if bool(_starves(outcome).any())]
    if not starved:
        return None
    starved.sort(key=lambda outcome: -int(_starves(outcome).sum()))
    number = sum(int(_starves(outcome).sum()) for outcome in starved)
    total = sum(outcome.kept.size for outcome in outcomes.of_targets)
    places = [_place(pruner, outcome) for outcome in starved[:_LAYERS]]
    examples = "; ".join(
        f"in {layer.name}, input {layer.input} has {percent_cell(layer.share)} % of the scores"
        for layer in places
    )
    return (
        f"{number:,} of {total:,} rows keep less than {100 * LEAST:g} % of their weights, in "
        f"{len(starved)} of {len(outcomes.of_targets)} matrices: a few inputs carry their scores "
        f"({examples}). {_remedy(pruner, outcomes, counts)}"
    )


def _remedy(pruner: Pruner, outcomes: Outcomes, counts: Effective) -> str:
    """What other counts would do."""
    recipe = pruner.scores.recipe
    others: dict[str, Effective] = {}
    # Of an order above 1, the effective number is below that of order 1. The arithmetic of bfloat16
    # is for order 2.
    if counts.order > 1 and counts.neff_dtype != "bfloat16":
        others["--order 1"] = replace(counts, order=1.0)
    if recipe.score.criterion is not MAGNITUDE and not recipe.counts_by_magnitude:
        others["--count-by magnitude"] = replace(counts, count_by="magnitude", neff_dtype="float64")
    if counts.sparsity is not None:
        flags = list(others) or ["--method wanda"]
        return f"{flags[0]} removes as much, more evenly."
    remedies = []
    for flag, other_counts in others.items():
        changed = recipe.but(counts=other_counts)
        scores = Scores(pruner.checkpoint, pruner.targets, changed, pruner.scores.inputs)
        (other,) = measure_targets([Pruner(scores, counts_of(scores))])
        remedies.append(f"{flag} would remove {percent_cell(_removed(other))} %")
    if not remedies:
        return "--method wanda --sparsity 0.5 removes the same share of every row."
    return f"Instead of {percent_cell(_removed(outcomes))} %, {', and '.join(remedies)}."


def _removed(outcomes: Outcomes) -> float:
    """The share of the weights that are removed."""
    weights = sum(outcome.target.matrix.numel for outcome in outcomes.of_targets)
    return 1 - sum(int(outcome.kept.sum()) for outcome in outcomes.of_targets) / weights


def _starves(outcome: Outcome) -> NDArray[np.bool_]:
    """Which rows of a target starve: bool, shape (rows,). A row of at most 20 weights does not, for
    one of them always stays, nor does one without scores.
    """
    columns = outcome.target.matrix.columns
    return (outcome.kept < LEAST * columns) & (outcome.mass > 0)


def _place(pruner: Pruner, outcome: Outcome) -> _Starved:
    """Where the scores of a target's starving rows are."""
    import torch

    target = outcome.target
    rows = torch.from_numpy(_starves(outcome))
    shares = torch.zeros(target.matrix.columns, dtype=torch.float64)
    first = 0
    with pruner.checkpoint.open_files() as files:
        for chunk in pruner.scores.of_chunks([target], files):
            scores = chunk[rows[first : first + len(chunk)].to(chunk.device)].abs().double()
            shares += (scores / scores.sum(1, keepdim=True)).sum(0).cpu()
            first += len(chunk)
    place = int(shares.argmax())
    number = int(rows.sum())
    return _Starved(target.name, number, place, float(shares[place]) / number)
