"""The values that the paper publishes for a measured model."""

from pathlib import PurePath

import msgspec

from emp_llm.common.data_folders import data_folder
from emp_llm.evaluation.evaluated_model import EvaluatedModel
from emp_llm.records.base import converted
from emp_llm.storage.json_files import read_json

_BLOCK = 2048
_RECIPE = {
    **{"beta": 1.0, "order": 2.0, "sparsity": 0.5, "pattern": None, "match": None},
    **{"group": "row", "targets": "mlp", "ignore": None, "score": None, "count_by": None, "shares": None},
}
_TEXT = {"dataset": "Salesforce/wikitext", "config": "wikitext-2-raw-v1", "split": "test"}


class _Values(msgspec.Struct, kw_only=True):
    """A row of the published tables, as in `eval/published`."""

    sparsity_percent: float | None = None
    wikitext2_perplexity: float | None = None
    accuracy_percent: dict[str, float] = {}
    mean_accuracy_percent: float | None = None


class PublishedRow:
    """The paper's values for one model and one method.

    Attributes:
        name: the paper's model and method.
        sparsity_percent: of the MLP linears.
    """

    def __init__(self, name: str, row: _Values, same_text: bool) -> None:
        self.name = name
        self.sparsity_percent = row.sparsity_percent
        self._row = row
        self._same_text = same_text

    def value(self, measure: str) -> float | None:
        """The published value of a measure; None if the paper has none."""
        row = self._row
        if measure == f"perplexity, blocks of {_BLOCK}":
            return row.wikitext2_perplexity if self._same_text else None
        if measure == f"mean acc of {len(row.accuracy_percent)}":
            return row.mean_accuracy_percent
        return row.accuracy_percent.get(measure.removesuffix(" acc")) if measure.endswith(" acc") else None


def published_row(model: EvaluatedModel) -> PublishedRow | None:
    """The paper's values for a model and its recipe; None if the paper has no such model or recipe."""
    pruned = model.pruned
    if model.made_by.quantization is not None:
        return None
    if pruned is not None and any(getattr(pruned, key) not in (None, value) for key, value in _RECIPE.items()):
        return None
    source, method = (pruned.of, pruned.method) if pruned else (model.model, "dense")
    for file in sorted((data_folder("eval") / "published").glob("*.json")):
        results = converted(read_json(file)["results"], dict[str, dict[str, _Values]], str(file))
        for name, methods in results.items():
            if (source == name or PurePath(source).name == PurePath(name).name) and method in methods:
                return PublishedRow(f"{name} {method}", methods[method], _is_published_text(model))
    return None


def _is_published_text(model: EvaluatedModel) -> bool:
    text = model.made_by.text
    return text is not None and all(getattr(text, key) == value for key, value in _TEXT.items())
