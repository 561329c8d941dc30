"""Results files: the measurements of `evaluate` on a model, and everything that they depend on."""

from typing import ClassVar

from emp_llm.records.base import FileRecord, Part, RecordedRecipe
from emp_llm.records.evaluation import Measures, PerplexityRecord, SuiteTask, TaskRecord
from emp_llm.records.run_report import RunReport, Share
from emp_llm.records.source import ModelIdentity, QuantizationRecord, TextRecord


class MadeBy(Part, kw_only=True, omit_defaults=False):
    """Everything that the numbers depend on.

    Attributes:
        runtime: "sparse" if the model ran from packed weights.
    """

    model: ModelIdentity
    limit: int | None = None
    text: TextRecord | None = None
    tasks: list[SuiteTask] = []
    batch_size: int | str | None = None
    dtype: str | None = None
    quantization: QuantizationRecord | None = None
    device_map: str | None = None
    runtime: str | None = None
    ranks: int = 1
    device: str = ""
    versions: dict[str, str] = {}


class PrunedBy(Part, kw_only=True):
    """From the report of a pruned checkpoint: the name of the dense model, the recipe, and the
    sparsity of the targets, and whether it was trained since.
    """

    of: str = ""
    recipe: RecordedRecipe
    sparsity_of_targets: Share = 0.0
    trained: bool = False


class Results(FileRecord, kw_only=True, omit_defaults=False):
    """The measurements of a suite on one model.

    Attributes:
        model: the name that the user gave; revision: its commit on the Hub.
        pruned: recipe and sparsity of a pruned model; null for a dense one.
        suite, command: name of the suite, and the command line; made_by: everything that the
            numbers depend on.
        complete: whether the whole suite is measured.
        perplexity, tasks: what was measured so far.
    """

    KIND: ClassVar[str] = "results"
    VERSION: ClassVar[int] = 4

    model: str
    revision: str | None = None
    pruned: PrunedBy | None = None
    suite: str = "suite"
    made_by: MadeBy
    command: str = ""
    complete: bool = False
    perplexity: PerplexityRecord | None = None
    tasks: dict[str, TaskRecord] = {}

    @property
    def measures(self) -> Measures:
        """The measurements so far."""
        return Measures(perplexity=self.perplexity, tasks=self.tasks)

    def take(self, measures: Measures) -> None:
        """Replace the measurements by these."""
        self.perplexity = measures.perplexity
        self.tasks = measures.tasks


def pruned_by(report: RunReport) -> PrunedBy:
    """The part of a pruning report that a results file keeps."""
    return PrunedBy(
        of=report.source.model,
        recipe=report.recipe,
        sparsity_of_targets=report.targets.sparsity_of_targets,
        trained=report.trained,
    )
