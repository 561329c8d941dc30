"""The results of a study so far, and their tables with the paper's values."""

from dataclasses import dataclass, field
from pathlib import Path, PurePath

from emp_llm.checkpoint.files import INDEX_LIMIT, read_json
from emp_llm.common.errors import UserError, count_of, printable, quotable, shortened_list
from emp_llm.common.paths import REPORT_NAME, data_folder
from emp_llm.common.tables import Rows, markdown_table, percent_cell, table
from emp_llm.evaluation.comparison import (
    Value,
    change_notes,
    in_percent,
    shown_change,
    value_cell,
    values_of,
)
from emp_llm.options.flat import recipe_of
from emp_llm.records.base import read_record
from emp_llm.records.results import Results
from emp_llm.reporting.studies import short_model_name
from emp_llm.study.plan import Study

_DETAILED = 200  # runs, whose matrices a report shows
_PUBLISHED_BLOCK = 2048
_PUBLISHED_TEXT = {
    "dataset": "Salesforce/wikitext",
    "config": "wikitext-2-raw-v1",
    "split": "test",
    "bos": "auto",
}
_PROTOCOL = (
    "accuracies of the paper: by another protocol than lm-eval's; compare the changes from the "
    "dense model, not the values"
)


# Results.


@dataclass(frozen=True)
class StudyRow:
    """A point of a model, or the dense model.

    Attributes:
        label: its name.
        result: None if it is missing.
        status: why it is: "missing", or "unreadable".
    """

    label: str
    result: Results | None = None
    status: str = "missing"

    @property
    def values(self) -> dict[str, Value]:
        """Its measures; empty without a result."""
        return {} if self.result is None else values_of(self.result.measures)

    @property
    def sparsity(self) -> float | None:
        """Of the targets; None for the dense model, and without a result."""
        if self.result is None or self.result.pruned is None:
            return None
        return self.result.pruned.sparsity_of_targets


@dataclass(frozen=True)
class ModelResults:
    """The results of a model: the dense one, and its points.

    Attributes:
        title: its short name.
    """

    title: str
    dense: StudyRow
    rows: list[StudyRow]


@dataclass
class StudyResults:
    """The results of a study.

    Attributes:
        models: in the order of the study.
        files: of the results that are there; runs: folders of the pruned checkpoints.
        missing: files of the results that are not there.
        unreadable: sentences about files that cannot be read.
    """

    models: list[ModelResults] = field(default_factory=list)
    files: list[Path] = field(default_factory=list)
    runs: list[Path] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)

    @property
    def inputs(self) -> list[Path]:
        """What the report shows; without the matrices of the runs, if they are too many."""
        return [*(self.runs if len(self.runs) <= _DETAILED else []), *self.files]

    @property
    def partial(self) -> str:
        """What is missing, in a sentence; empty if nothing is."""
        if not self.missing:
            return ""
        jobs = len(self.missing) + len(self.files) + len(self.unreadable)
        return f"Partial: {len(self.files)} of {count_of(jobs, 'result')} are there. Missing:"


def study_results(folder: Path, study: Study) -> StudyResults:
    """Read the results of a study so far. One that cannot be read is named."""
    found = StudyResults()

    def row(model: str, point: str) -> StudyRow:
        name = f"results/{model}.{point}.json"
        run = folder / "runs" / f"{model}.{point}"
        if (run / REPORT_NAME).is_file():
            found.runs.append(run)
        if not (folder / name).is_file():
            found.missing.append(name)
            return StudyRow(point)
        try:
            result = read_record(folder / name, Results, INDEX_LIMIT)
        except UserError as error:
            found.unreadable.append(str(error))
            return StudyRow(point, status="unreadable")
        if not result.complete:
            found.missing.append(f"{name} (unfinished)")
            return StudyRow(point)
        found.files.append(folder / name)
        return StudyRow(point, result)

    for model in study.models:
        dense = row(model.name, "dense")
        rows = [row(model.name, point.name) for point in study.points]
        title = printable(short_model_name(model.model))
        found.models.append(ModelResults(title, dense, rows))
    return found


# Tables.


def published_values(result: Results) -> tuple[float | None, dict[str, Value]] | None:
    """The paper's values for a model and its recipe.

    Returns:
        The percentage of the MLP linears that is removed, and the measures; None if the paper has
        no such model or recipe.
    """
    pruned = result.pruned
    if result.made_by.quantization is not None:
        return None
    source = result.model if pruned is None else pruned.of
    method = "dense" if pruned is None else pruned.recipe.method
    models = read_json(data_folder("eval") / "published" / "llama.json")["results"]
    methods = {PurePath(name).name: methods for name, methods in models.items()}
    row = methods.get(PurePath(source).name, {}).get(method)
    if row is None:
        return None
    if pruned is not None and pruned.recipe != recipe_of(method):
        return None
    accuracies = row["accuracy_percent"]
    numbers = {f"{task} acc": number for task, number in accuracies.items()}
    numbers[f"mean acc of {len(accuracies)}"] = row.get("mean_accuracy_percent")
    text = result.made_by.text
    if text is not None and all(
        getattr(text, name) == value for name, value in _PUBLISHED_TEXT.items()
    ):
        numbers[f"perplexity, blocks of {_PUBLISHED_BLOCK}"] = row.get("wikitext2_perplexity")
    values = {name: Value(number) for name, number in numbers.items() if number is not None}
    return row.get("sparsity_percent"), values


def _model_table(model: ModelResults) -> tuple[Rows, list[str]]:
    """The table of a model with its footnotes. Below a recipe of the paper stand its values."""
    studied = [model.dense, *model.rows]
    dense = model.dense.values
    names = list(dict.fromkeys(name for row in studied for name in row.values))
    rows: Rows = [["", "zeros, %", *names]]
    published_dense: dict[str, Value] = {}
    for row in studied:
        zeros = row.status if row.result is None else percent_cell(row.sparsity)
        rows.append([printable(row.label), zeros, *_cells(names, row.values, dense)])
        published = None if row.result is None else published_values(row.result)
        if published is not None:
            percent, values = published
            if row is model.dense:
                published_dense = values
            zeros = "-" if percent is None or row is model.dense else f"{percent:.2f}"
            rows.append(["paper", zeros, *_cells(names, values, published_dense)])

    notes = [
        "in brackets the changes from the dense model: of perplexities in percent, of "
        "accuracies in points"
    ]
    if model.dense.result is None:
        notes.append("no changes: the dense model is missing")
    notes += change_notes(names, dense, [row.values for row in model.rows])
    if len({percent_cell(row.sparsity) for row in studied if row.sparsity is not None}) > 1:
        notes.append(
            "the rows differ in their zeros too; plan --emp-sparsities compares methods "
            "at the same share"
        )
    if any(value.partial for row in studied for value in row.values.values()):
        notes.append("* partial: only some of the examples or of the text")
    if published_dense and any(map(in_percent, names)):
        notes.append(_PROTOCOL)
    return rows, notes


def _cells(names: list[str], values: dict[str, Value], dense: dict[str, Value]) -> list[str]:
    """The measures, with their changes from the dense model's in brackets."""
    cells = []
    for name in names:
        cell = value_cell(name, values.get(name))
        if values != dense and name in values and name in dense:
            cell += f" ({shown_change(name, dense[name], values[name])})"
        cells.append(cell)
    return cells


def study_markdown(results: StudyResults) -> str:
    """All tables of a study as a page of Markdown, which says what is missing."""
    texts = ["# Results of the study"]
    if results.missing:
        texts += [results.partial, "\n".join(f"- {name}" for name in results.missing)]
    texts += [f"Unreadable: {printable(line, 400)}" for line in results.unreadable]
    for model in results.models:
        rows, notes = _model_table(model)
        texts += [f"## {model.title}", markdown_table(rows), *notes]
    return "\n\n".join(texts) + "\n"


def study_text(results: StudyResults) -> str:
    """All tables of a study for a terminal, and what is missing."""
    texts = []
    footnotes = dict[str, None]()
    for model in results.models:
        rows, notes = _model_table(model)
        texts.append(f"{model.title}\n{table(rows)}\n")
        footnotes |= dict.fromkeys(notes)
    texts += footnotes
    if results.missing:
        texts.append(f"{results.partial} {shortened_list(results.missing, 6)}")
    texts += [f"warning: unreadable, so left out: {quotable(line)}" for line in results.unreadable]
    if len(results.runs) > _DETAILED:
        texts.append(f"the report leaves out the matrices of more than {_DETAILED} runs")
    return "\n".join(texts)
