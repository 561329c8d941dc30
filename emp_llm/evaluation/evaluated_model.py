"""A model with the measurements of a suite, read from a results file or from the report of a run."""

from dataclasses import dataclass

from emp_llm.records.evaluation import EvaluationRecord, Measures
from emp_llm.records.results import MadeBy, ModelIdentity, PrunedBy, Results, pruned_by
from emp_llm.records.run_report import RunReport


@dataclass(frozen=True)
class EvaluatedModel:
    """A model with its measures.

    Attributes:
        model: its name.
        pruned: recipe and sparsity of a pruned model; None for a dense one.
        suite: name of the suite; made_by: everything that the numbers depend on.
        measures: the numbers.
        this: whether it is the checkpoint that a model card describes.
    """

    model: str
    pruned: PrunedBy | None
    suite: str
    made_by: MadeBy
    measures: Measures
    this: bool = False


def model_of_results(results: Results, this: bool = False) -> EvaluatedModel:
    """The model of a results file."""
    return EvaluatedModel(results.model, results.pruned, results.suite, results.made_by, results.measures, this)


def models_of_report(report: RunReport) -> list[EvaluatedModel]:
    """The dense and the pruned model of a run that evaluated them; a model that is not measured yet is left out."""
    evaluation = report.evaluation
    if evaluation is None:
        return []
    made_by = made_by_of(evaluation, report)
    models = []
    if evaluation.dense is not None:
        models.append(EvaluatedModel(report.source.model, None, evaluation.suite, made_by, evaluation.dense))
    if evaluation.pruned is not None:
        pruned = pruned_by(report)
        models.append(EvaluatedModel(report.source.model, pruned, evaluation.suite, made_by, evaluation.pruned, True))
    return models


def made_by_of(evaluation: EvaluationRecord, report: RunReport) -> MadeBy:
    """Everything that the numbers of a run's evaluation depend on."""
    return MadeBy(
        model=ModelIdentity(identity=report.source.identity),
        limit=evaluation.limit,
        text=evaluation.text,
        tasks=evaluation.tasks,
        batch_size=evaluation.batch_size,
        dtype=report.dtype,
        device_map=report.device_map,
        versions=report.versions,
    )
