"""Tables of the hidden features that tokens kept, by layer."""

from collections.abc import Sequence

from emp_llm.common.tables import Rows, percent_cell
from emp_llm.records.evaluation import KeptFeatures

KEPT_NOTE = "hidden features of the MLP kept, in percent: mean over the tokens"
ALL_LAYERS = "all layers"


def kept_rows(labels: Sequence[str], kept: Sequence[dict[str, KeptFeatures]]) -> Rows:
    """A row for each layer and one for all, and a column for each model.

    Args:
        labels: of the models.
        kept: of each model, by layer.
    """
    layers = list(dict.fromkeys(layer for of_model in kept for layer in of_model))
    rows = [["layer", *labels]]
    for layer in layers:
        found = [of_model.get(layer) for of_model in kept]
        rows.append([layer, *(percent_cell(None if each is None else each.fraction) for each in found)])
    rows.append([ALL_LAYERS, *(percent_cell(mean_kept(of_model)) for of_model in kept)])
    return rows


def mean_kept(kept: dict[str, KeptFeatures]) -> float | None:
    """The share kept of all features of all layers and tokens; None if there are none."""
    seen = sum(each.tokens * each.width for each in kept.values())
    return sum(each.kept for each in kept.values()) / seen if seen else None
