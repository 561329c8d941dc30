"""The results of a study so far, and their tables with the paper's values."""

from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath

from emp_llm.checkpoint.files import INDEX_LIMIT, read_json
from emp_llm.common.errors import UserError, count_of, printable, quotable, shorten_list
from emp_llm.common.paths import REPORT_NAME, data_folder
from emp_llm.common.tables import markdown_text
from emp_llm.evaluation.comparison import Value, in_percent
from emp_llm.options.words import recipe_of
from emp_llm.records.base import read_record
from emp_llm.records.run_report import Results
from emp_llm.reporting import studies
from emp_llm.reporting.studies import (
    Point,
    SuiteResult,
    all_columns,
    point_rows,
    points_markdown,
    points_text,
    results_point,
    short_model_name,
)
from emp_llm.study.plan import Study

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


@dataclass
class StudyResults:
    """The results of a study.

    Attributes:
        models: the points of each, in the order of the study.
        inputs: files of the results that are there, and folders of the pruned checkpoints.
        jobs: the number of all results.
        missing: files of the results that are not there.
        unreadable: sentences about files that cannot be read.
    """

    models: list[studies.Study] = field(default_factory=list)
    inputs: list[Path] = field(default_factory=list)
    jobs: int = 0
    missing: list[str] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)

    @property
    def partial(self) -> str:
        """What is missing, in a sentence; empty if nothing is."""
        if not self.missing:
            return ""
        there = self.jobs - len(self.missing) - len(self.unreadable)
        return f"Partial: {there} of {count_of(self.jobs, 'result')} are there. Missing:"


def study_results(folder: Path, study: Study, against: str | None = None) -> StudyResults:
    """Read the results of a study so far. One that cannot be read is named.

    Args:
        against: method or name of the points that the others are compared with; None: the first.
    """
    found = StudyResults()

    def read(model: str, point: str) -> Results | str:
        """A result, or why there is none."""
        name = f"results/{model}.{point}.json"
        found.jobs += 1
        run = folder / "runs" / f"{model}.{point}"
        if (run / REPORT_NAME).is_file():
            found.inputs.append(run)
        if not (folder / name).is_file():
            found.missing.append(name)
            return "missing"
        try:
            result = read_record(folder / name, Results, INDEX_LIMIT)
        except UserError as error:
            found.unreadable.append(str(error))
            return "unreadable"
        if not result.complete:
            found.missing.append(f"{name} (unfinished)")
            return "missing"
        found.inputs.append(folder / name)
        return result

    for model in study.models:
        names = ["dense", *(point.name for point in study.points)]
        results = {name: read(model.name, name) for name in names}
        title = printable(short_model_name(model.model))
        found.models.append(_model(title, results, against))
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


def _model(title: str, results: dict[str, Results | str], against: str | None) -> studies.Study:
    """The points of a model. Below the dense model and each recipe of the paper stand its values.

    Args:
        results: of each point, the dense model first; or why there are none.
    """
    points = []
    dense: list[Point] = []
    papers: list[tuple[Point, Results]] = []
    for name, result in results.items():
        if isinstance(result, str):
            sparsity = 0.0 if name == "dense" else 1.0
            points.append(Point(name, printable(name), sparsity=sparsity, zeros=result))
            continue
        point = replace(results_point(result, Path(name)), name=printable(name))
        (dense if result.pruned is None else points).append(point)
        papers.append((point, result))
    study = studies.Study.of(title, title, points, dense, against)
    published_dense: tuple[SuiteResult, ...] = ()
    for point, result in papers:
        published = published_values(result)
        if published is None:
            continue
        percent, values = published
        key = (point.results or point.dense)[0].key
        paper = (SuiteResult("paper", key, values),)
        published_dense = published_dense or paper
        zeros = "-" if percent is None or result.pruned is None else f"{percent:.2f}"
        row = Point("paper", "paper", zeros=zeros, sparsity=point.sparsity, results=paper)
        place = study.points.index(point) + 1 if point in study.points else 0
        study.points.insert(place, replace(row, dense=published_dense))
    return study


def _notes(study: studies.Study) -> list[str]:
    """What the table of points does not say."""
    papers = any(point.name == "paper" for point in study.points)
    accuracies = any(in_percent(measure) for _, measure in all_columns(study))
    missing = all(not suite.dense for suite in study.suites)
    notes = ["no changes: the dense model is missing"] * missing
    return notes + [_PROTOCOL] * (papers and accuracies)


def study_markdown(results: StudyResults) -> str:
    """All tables of a study as a page of Markdown, which says what is missing."""
    texts = ["# Results of the study"]
    if results.missing:
        texts += [results.partial, "\n".join(f"- {name}" for name in results.missing)]
    texts += [f"Unreadable: {printable(line, 400)}" for line in results.unreadable]
    for model in results.models:
        rows, notes = point_rows(model, all_columns(model), methods=False)
        texts += [f"## {markdown_text(model.title)}"]
        texts += points_markdown(rows, [*notes, *_notes(model)])
    return "\n\n".join(texts) + "\n"


def study_text(results: StudyResults) -> str:
    """The tables of a study for a terminal, and what is missing."""
    texts = []
    for model in results.models:
        texts.append(f"{model.title}\n{points_text(model, _notes(model), methods=False)}\n")
    if results.missing:
        texts.append(f"{results.partial} {shorten_list(results.missing, 6)}")
    texts += [f"warning: unreadable, so left out: {quotable(line)}" for line in results.unreadable]
    return "\n".join(texts)
