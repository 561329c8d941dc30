"""The results of a study's finished jobs, by model, in the order of the plan."""

from dataclasses import dataclass, field
from pathlib import Path

from emp_llm.checkpoint.files import INDEX_LIMIT
from emp_llm.cluster.collecting.study_status import StudyStatus
from emp_llm.cluster.plan_file import Job
from emp_llm.common.errors import UserError
from emp_llm.common.paths import REPORT_NAME, SWEEP_NAME
from emp_llm.evaluation.results import EvaluatedModel, model_of_results, models_of_report
from emp_llm.pruning.counts import REPORT_LIMIT
from emp_llm.records.base import read_record
from emp_llm.records.results import Results
from emp_llm.records.run_report import RunReport
from emp_llm.records.sweep import Sweep

_DENSE = "dense.evaluate"  # the end of the id of a model's first job


@dataclass(frozen=True)
class StudyRow:
    """A recipe of a model.

    Attributes:
        label: short name.
        result: None if it is missing.
        status: of its job.
    """

    label: str
    result: EvaluatedModel | None
    status: str


@dataclass
class StudyModel:
    """A model of a study: its dense results, and those of its recipes.

    Attributes:
        name: as the plan's commands name it; prefix: of the ids of its jobs.
    """

    name: str
    prefix: str = ""
    dense: EvaluatedModel | None = None
    dense_status: str = "missing"
    rows: list[StudyRow] = field(default_factory=list)


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


def study_results(status: StudyStatus) -> StudyResults:
    """Read the results of the finished jobs. An output that cannot be read is missing, and named."""
    models: dict[str, StudyModel] = {}
    sources: dict[str, str] = {}  # output of a prune -> its model
    runs: list[Path] = []
    outputs: list[Path] = []
    unreadable: list[str] = []
    for view in status.views:
        job, done = view.job, view.status == "done"
        if job.kind == "calibrate":
            continue
        name = _option(job, "--model")
        if job.kind == "prune":
            sources[job.output] = name
            runs += [view.files.output] if done else []
            continue
        model = models.setdefault(sources.get(name, name), StudyModel(sources.get(name, name)))
        try:
            if job.kind == "sweep":
                rows = _swept(model, view.files.output) if done else [StudyRow(job.id, None, view.status)]
                model.rows += rows
                model.dense_status = view.status
            else:
                result = _measured(view.files.output) if done else None
                _take(model, job, name in sources, result, view.status)
            outputs += [view.files.output] if done else []
        except UserError as error:
            unreadable.append(str(error))
            _take(model, job, job.kind == "sweep" or name in sources, None, "unreadable")
    return StudyResults(list(models.values()), runs, outputs, unreadable)


def _take(model: StudyModel, job: Job, pruned: bool, result: EvaluatedModel | None, status: str) -> None:
    if pruned:
        label = job.id.removeprefix(model.prefix).removesuffix(f".{job.kind}")
        model.rows.append(StudyRow(label, result, status))
    else:
        model.dense, model.dense_status = result, status
        model.prefix = job.id.removesuffix(_DENSE) if job.id.endswith(_DENSE) else ""


def _measured(path: Path) -> EvaluatedModel:
    return model_of_results(read_record(path, Results, INDEX_LIMIT))


def _swept(model: StudyModel, folder: Path) -> list[StudyRow]:
    """The points of a sweep; the dense model's results are those of the first."""
    rows = []
    for point in read_record(folder / SWEEP_NAME, Sweep, REPORT_LIMIT).points:
        for found in models_of_report(read_record(folder / "points" / point.name / REPORT_NAME, RunReport, REPORT_LIMIT)):
            if found.pruned is not None:
                rows.append(StudyRow(point.name, found, "done"))
            elif model.dense is None:
                model.dense = found
    return rows


def _option(job: Job, flag: str) -> str:
    """The value of an option of a job's command; empty if it has none."""
    words = job.arguments
    for number, word in enumerate(words):
        if word == flag:
            return words[number + 1] if number + 1 < len(words) else ""
        if word.startswith(f"{flag}="):
            return word.partition("=")[2]
    return ""
