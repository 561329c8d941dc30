"""Tables of `evaluate --activation-emp`: what pruned activations cost, and the features kept by layer."""

from collections.abc import Sequence
from pathlib import Path, PurePath

from emp_llm.common.errors import UserError
from emp_llm.common.tables import Rows, percent_cell
from emp_llm.common.errors import printable
from emp_llm.evaluation.measured_values import formatted, values_of
from emp_llm.gating.kept_table import kept_rows, mean_kept
from emp_llm.pruning.counts import REPORT_LIMIT
from emp_llm.records.base import record_of, version_of
from emp_llm.records.results import Results
from emp_llm.checkpoint.files import read_json

ACTIVATION_NOTE = (
    "Each token keeps β x N_eff of the hidden features of its MLP, by Algorithm 1 on their magnitudes. No weight changes. "
    "Kept: mean over the tokens of the suite's text, or of its tasks if it has no text."
)


def split_activations(paths: Sequence[Path]) -> tuple[list[Path], list[Results]]:
    """The paths that are no results with pruned activations, and the records of the others.

    Raises:
        UserError: results are wrong or of a newer version.
    """
    others, found = [], []
    for path in paths:
        try:
            values = read_json(path, limit=REPORT_LIMIT) if path.is_file() else {}
        except UserError:  # the reader of the others says it with the name of its option
            values = {}
        made_by = values.get("made_by")
        is_one = isinstance(made_by, dict) and made_by.get("activation_emp") is not None
        if is_one and version_of(values, Results) is not None:
            found.append(record_of(values, Results, str(path)))
        else:
            others.append(path)
    return others, found


def activation_rows(found: Sequence[Results]) -> Rows:
    """A row for each results file: the features kept, and each measure."""
    measured = [values_of(each.measures) for each in found]
    names = list(dict.fromkeys(name for values in measured for name in values))
    rows = [["model", "β", "features kept %", *(printable(name) for name in names)]]
    for each, values in zip(found, measured, strict=True):
        cells = [_cell(values[name].value, values[name].partial) if name in values else "-" for name in names]
        rows.append([_name(each), f"{each.made_by.activation_emp:g}", percent_cell(mean_kept(each.kept_features)), *cells])
    return rows


def kept_by_layer(found: Sequence[Results]) -> Rows:
    """A row for each layer, and a column for each results file."""
    rows = kept_rows(
        [f"{_name(each)}, β={each.made_by.activation_emp:g}" for each in found], [each.kept_features for each in found]
    )
    return [[printable(cell) for cell in row] for row in rows]


def activation_figures(found: Sequence[Results]) -> Rows:
    """All counts, for CSV: a row for each results file and layer."""
    rows = [["model", "beta", "layer", "tokens", "width", "kept"]]
    for each in found:
        for layer, kept in each.kept_features.items():
            counts = [str(kept.tokens), str(kept.width), str(kept.kept)]
            rows.append([each.model, str(each.made_by.activation_emp), layer, *counts])
    return rows


def _name(results: Results) -> str:
    return printable(PurePath(results.model).name or results.model)


def _cell(value: float, partial: bool) -> str:
    return formatted(value) + (" *" if partial else "")
