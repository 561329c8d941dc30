"""What has become of a study: the status of its jobs, the results of the finished ones, and
their tables with the paper's values.
"""

import logging
from dataclasses import dataclass, field
from pathlib import Path, PurePath

from emp_llm.checkpoint.files import INDEX_LIMIT, read_json
from emp_llm.cluster.jobs import Job, JobFiles, JobState, option_of, read_plan
from emp_llm.cluster.slurm import queued_jobs
from emp_llm.common.errors import UserError, count_of, printable
from emp_llm.common.paths import REPORT_NAME, SWEEP_NAME, data_folder
from emp_llm.common.tables import Rows, markdown_table, percent_cell, table
from emp_llm.evaluation.comparison import (
    Value,
    change_notes,
    in_percent,
    shown_change,
    value_cell,
    values_of,
)
from emp_llm.evaluation.results import results_of_report
from emp_llm.options.flat import recipe_of
from emp_llm.records.base import read_record
from emp_llm.records.results import Results
from emp_llm.records.run_report import REPORT_LIMIT, RunReport
from emp_llm.records.sweep import Sweep
from emp_llm.reporting.studies import short_model_name

logger = logging.getLogger(__name__)
_DENSE = "dense.evaluate"  # the end of the id of a model's first job
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


# Status.


@dataclass(frozen=True)
class JobView:
    """A job with what has become of it.

    Attributes:
        files: the job's plan line, state, lock and log.
        status: that of `JobFiles.status`; "queued" if it waits in Slurm; "foreign" if its output
            was made by another command.
        state: what its last attempt has come to.
        message: why it failed, or is foreign.
    """

    files: JobFiles
    status: str
    state: JobState | None
    message: str = ""

    @property
    def job(self) -> Job:
        return self.files.job


def job_views(study: Path) -> list[JobView]:
    """All jobs of a study, in the order of its plan; nothing is changed. UserError if the plan
    is wrong.
    """
    plan = read_plan(study)
    try:
        queued = queued_jobs(study.resolve())
    except UserError as error:
        logger.warning("warning: %s", error)
        queued = {}
    views = []
    for files in [JobFiles(study, job) for job in plan]:
        state = files.state()
        status = "foreign"
        message = ""
        try:
            status = files.status()
        except UserError as error:
            message = str(error)
        if files.job.id in queued and status in ("missing", "stopped", "failed"):
            status = "queued"
        if status == "failed" and state is not None:
            message = state.message
        views.append(JobView(files, status, state, message))
    return views


# Results.


@dataclass(frozen=True)
class StudyRow:
    """A recipe of a model, or the dense model.

    Attributes:
        label: short name.
        status: that of its job, as in `JobView`.
        result: None if it is missing.
    """

    label: str
    status: str
    result: Results | None = None

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


@dataclass
class StudyModel:
    """A model of a study: its dense results, and those of its recipes.

    Attributes:
        name: as the plan's commands name it.
    """

    name: str
    dense: StudyRow = StudyRow("dense", "missing")
    rows: list[StudyRow] = field(default_factory=list)

    @property
    def title(self) -> str:
        """Its short name."""
        return printable(short_model_name(self.name))


@dataclass(frozen=True)
class StudyResults:
    """The results of a study.

    Attributes:
        models: in the order of the plan.
        runs: outputs of finished prunes; outputs: of finished evaluations and sweeps.
        unreadable: sentences about outputs that cannot be read.
    """

    models: list[StudyModel]
    runs: list[Path]
    outputs: list[Path]
    unreadable: list[str]


def study_results(views: list[JobView]) -> StudyResults:
    """Read the results of the finished jobs. An output that cannot be read is missing, and
    named.
    """
    models: dict[str, StudyModel] = {}
    prefixes: dict[str, str] = {}  # model -> the beginning of the ids of its jobs
    sources: dict[str, str] = {}  # output of a prune -> its model
    runs = list[Path]()
    outputs = list[Path]()
    unreadable = list[str]()
    for view in views:
        job = view.job
        status = view.status
        named = option_of(job, "--model")
        if job.kind == "prune":
            sources[job.output] = named
            runs += [view.files.output] if status == "done" else []
        if job.kind not in ("evaluate", "sweep"):
            continue
        name = sources.get(named, named)
        model = models.setdefault(name, StudyModel(name))
        measured: list[tuple[str, Results]] = []
        if status == "done":
            try:
                measured = _measured(view)
                outputs.append(view.files.output)
            except UserError as error:
                unreadable.append(str(error))
                status = "unreadable"
        if job.kind == "sweep":
            dense = next(
                (results for _, results in measured if results.pruned is None),
                None,
            )
            model.dense = StudyRow("dense", status, dense)
            points = [
                StudyRow(point, status, results)
                for point, results in measured
                if results.pruned is not None
            ]
            model.rows += points or [StudyRow(job.id, status)]
            continue
        result = measured[0][1] if measured else None
        if named in sources:
            model.rows.append(
                StudyRow(
                    job.id.removeprefix(prefixes.get(name, "")).removesuffix(".evaluate"),
                    status,
                    result,
                )
            )
        else:
            prefixes[name] = job.id.removesuffix(_DENSE) if job.id.endswith(_DENSE) else ""
            model.dense = StudyRow("dense", status, result)
    return StudyResults(list(models.values()), runs, outputs, unreadable)


def _measured(view: JobView) -> list[tuple[str, Results]]:
    """(name, results) of an evaluation, or of each point of a sweep and of its dense model.
    UserError for a damaged output.
    """
    output = view.files.output
    if view.job.kind == "evaluate":
        return [("", read_record(output, Results, INDEX_LIMIT))]
    return [
        (point.name, results)
        for point in read_record(output / SWEEP_NAME, Sweep, REPORT_LIMIT).points
        for results in results_of_report(
            read_record(output / "points" / point.name / REPORT_NAME, RunReport, REPORT_LIMIT)
        )
    ]


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


def _model_table(model: StudyModel) -> tuple[Rows, list[str]]:
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


def study_markdown(results: StudyResults, done: int, jobs: int, missing: list[str]) -> str:
    """All tables of a study as a page of Markdown, which says what is missing."""
    texts = ["# Results of the study"]
    if done == jobs:
        texts.append(f"All {count_of(jobs, 'job')} are done.")
    else:
        texts.append(f"Partial: {done:,} of {count_of(jobs, 'job')} are done. Missing:")
        texts.append("\n".join(f"- {line}" for line in missing))
    texts += [f"Unreadable: {printable(line, 400)}" for line in results.unreadable]
    for model in results.models:
        rows, notes = _model_table(model)
        texts += [f"## {model.title}", markdown_table(rows), *notes]
    return "\n\n".join(texts) + "\n"


def study_text(results: StudyResults) -> str:
    """All tables of a study for a terminal."""
    texts = []
    footnotes = dict[str, None]()
    for model in results.models:
        rows, notes = _model_table(model)
        texts.append(f"{model.title}\n{table(rows)}\n")
        footnotes |= dict.fromkeys(notes)
    return "\n".join([*texts, *footnotes])
