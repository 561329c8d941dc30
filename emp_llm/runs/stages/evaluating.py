"""The stages that evaluate the dense and the pruned model, and the folder of an unfinished evaluation in its checkpoint.

    OUT/emp_llm/evaluation/pending.json   the signature of the run
    OUT/emp_llm/evaluation/dense.json     results of the dense model so far
    OUT/emp_llm/evaluation/pruned.json    results of the pruned model so far

When both models are evaluated, the report holds their results and the folder is deleted.
"""

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from emp_llm.common.errors import UserError
from emp_llm.common.paths import REPORT_NAME
from emp_llm.common.ranks import ranks
from emp_llm.common.machine import Stopwatch
from emp_llm.common.errors import count_of
from emp_llm.evaluation.earlier_results import dense_measures
from emp_llm.evaluation.evaluator import Evaluator, is_complete
from emp_llm.evaluation.results_file import ResultsFile, new_results
from emp_llm.evaluation.suites import Suite
from emp_llm.hub.local_model import LocalModel
from emp_llm.options.commands import PruneOptions
from emp_llm.pruning.writing import EVALUATION_FOLDER
from emp_llm.records.evaluation import EvaluationRecord, Measures, SuiteRecord
from emp_llm.records.results import Results
from emp_llm.records.run_report import RunReport
from emp_llm.runs.stages.run_models import RunModels
from emp_llm.runs.stages.stage import Stage, stage_records
from emp_llm.checkpoint.files import write_json
from emp_llm.checkpoint.files import read_json
from emp_llm.checkpoint.locks import FileLock

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)
_PENDING = "pending.json"


class PendingEvaluation:
    """The unfinished evaluation of a finished checkpoint.

    Args:
        output: the folder of the checkpoint.
    """

    def __init__(self, output: Path) -> None:
        self.output = output
        self.folder = output / EVALUATION_FOLDER
        self._lock: FileLock | None = None

    @property
    def exists(self) -> bool:
        """Whether the checkpoint has an unfinished evaluation."""
        return (self.folder / _PENDING).is_file()

    def matches(self, signature: dict[str, Any]) -> bool:
        """Whether it belongs to the run with this signature."""
        return self.exists and read_json(self.folder / _PENDING) == json.loads(json.dumps(signature))

    def begin(self, files: Path, signature: dict[str, Any]) -> None:
        """Mark the files of a checkpoint, before they are published, as not evaluated yet."""
        write_json(files / EVALUATION_FOLDER / _PENDING, signature)

    def acquire(self) -> None:
        """Lock the evaluation against other runs of the same command, until `release`."""
        if ranks().main and self._lock is None:
            self._lock = FileLock(self.folder / ".lock", f"--output {self.output}")
            self._lock.acquire()

    def release(self) -> None:
        """Release the lock."""
        if self._lock is not None:
            self._lock.release()

    def finish(self, report: RunReport) -> None:
        """Write the report with the results, and delete the folder."""
        report.save(self.output / REPORT_NAME)
        shutil.rmtree(self.folder, ignore_errors=True)


class EvaluateStage:
    """Evaluates a model by a suite, and saves the results after every task.

    Args:
        name: of the stage: "evaluate dense" or "evaluate pruned".
        evaluator: of the suite.
        file: the results so far.
        results: creates empty results, to be filled.
        load: returns the model; called only if measures are missing.
        stopwatch: times the evaluation.
        given: existing measures, used instead of an evaluation.
        begin: called before results are read or measured.
        after: called when everything is measured.

    Attributes:
        measures: available when the stage is finished.
    """

    def __init__(
        self,
        name: str,
        evaluator: Evaluator,
        file: Path,
        results: Callable[[], Results],
        load: "Callable[[], PreTrainedModel]",
        stopwatch: Stopwatch,
        given: Measures | None = None,
        begin: Callable[[], None] = lambda: None,
        after: Callable[[], None] = lambda: None,
    ) -> None:
        self.name = name
        self.measures = given
        self._evaluator = evaluator
        self._file = file
        self._results = results
        self._load = load
        self._stopwatch = stopwatch
        self._begin = begin
        self._after = after
        self._kept: ResultsFile | None = None

    def finished(self) -> bool:
        self._begin()
        if self.measures is None:
            self._kept = _results_file(self._file, self._results())
            if is_complete(self._evaluator.suite, self._kept.results.measures):
                self.measures = self._kept.results.measures
        return self.measures is not None

    def run(self) -> None:
        assert self._kept is not None
        kept, measures = self._kept, self._kept.results.measures
        if measures.parts:
            logger.info("%s: resuming after %s of the suite.", self.name, count_of(measures.parts, "finished part"))
        model = self._load()
        with self._stopwatch(self.name):
            self.measures = self._evaluator.measure(model, measures, kept.save)
        kept.save(self.measures, complete=True)
        self._after()


class ReportStage:
    """Adds the results of the evaluation to the report.

    Args:
        report: returns the report of the run.
        dense, pruned: the finished evaluation stages.
        evaluator: of the suite.
        pending: the evaluation, which this stage finishes.
        stopwatch: its record is added to the report.
    """

    name = "report"

    def __init__(
        self,
        report: Callable[[], RunReport],
        dense: EvaluateStage,
        pruned: EvaluateStage,
        evaluator: Evaluator,
        pending: PendingEvaluation,
        stopwatch: Stopwatch,
    ) -> None:
        self._report = report
        self._dense = dense
        self._pruned = pruned
        self._evaluator = evaluator
        self._pending = pending
        self._stopwatch = stopwatch

    def finished(self) -> bool:
        return False

    def run(self) -> None:
        report = self._report()
        suite, size = self._evaluator.suite.record(), self._evaluator.batch_size
        report.evaluation = evaluation_record(suite, size, self._dense.measures, self._pruned.measures)
        report.stages |= stage_records(self._stopwatch)
        if ranks().main:
            self._pending.finish(report)


def evaluation_record(
    suite: SuiteRecord, batch_size: int | str, dense: Measures | None, pruned: Measures | None
) -> EvaluationRecord:
    """The record of an evaluation in a report."""
    return EvaluationRecord(
        suite=suite.suite,
        limit=suite.limit,
        text=suite.text,
        tasks=suite.tasks,
        batch_size=batch_size,
        dense=dense,
        pruned=pruned,
    )


def _results_file(path: Path, results: Results) -> ResultsFile:
    """The results file of this run; results of a run with other settings are discarded."""
    try:
        return ResultsFile(path, results)
    except UserError as error:
        logger.info("%s Measuring again.", error)
        return ResultsFile(path, results, overwrite=True)


def evaluation_stages(
    models: RunModels,
    suite: Suite,
    options: PruneOptions,
    pending: PendingEvaluation,
    report: Callable[[], RunReport],
    stopwatch: Stopwatch,
) -> list[Stage]:
    """The stages that evaluate the dense and the pruned model of a prune, and report the results.

    Args:
        models: of the run.
        suite: evaluates them.
        options: of the run.
        pending: keeps unfinished results.
        report: returns the report of the run.
        stopwatch: times the stages.
    """
    evaluator = Evaluator(suite, models.tokenizer)

    def results(source: LocalModel) -> Results:
        return new_results(source, suite, evaluator.batch_size, options.dtype, options.device_map)

    def pruned_model() -> "PreTrainedModel":
        models.free()
        return models.load(pending.output)

    written = LocalModel(str(pending.output), pending.output, None)
    given = None if options.baseline is None else dense_measures(options.baseline, results(models.source).made_by)
    files, begin = pending.folder, pending.acquire
    dense = EvaluateStage(
        "evaluate dense", evaluator, files / "dense.json", lambda: results(models.source), models.dense, stopwatch, given, begin
    )
    pruned = EvaluateStage(
        "evaluate pruned", evaluator, files / "pruned.json", lambda: results(written), pruned_model, stopwatch, begin=begin
    )
    return [dense, pruned, ReportStage(report, dense, pruned, evaluator, pending, stopwatch)]
