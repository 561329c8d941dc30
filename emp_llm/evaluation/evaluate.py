"""Measures a suite on a model: the perplexity of its text, then each of its tasks. One evaluation
for all commands.

The unfinished evaluation of a finished checkpoint lies in its folder:

    OUT/emp_llm/evaluation/pending.json   the signature of the run
    OUT/emp_llm/evaluation/dense.json     results of the dense model so far
    OUT/emp_llm/evaluation/pruned.json    results of the pruned model so far

When both models are measured, the report holds their results and the folder is deleted.
"""

import logging
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from emp_llm.calibration.data import begin_token
from emp_llm.checkpoint.files import read_json, write_json
from emp_llm.checkpoint.locks import lock
from emp_llm.common.errors import UserError, count_of
from emp_llm.common.machine import Stopwatch
from emp_llm.common.paths import EXTRAS, REPORT_NAME
from emp_llm.common.progress import stage
from emp_llm.common.ranks import ranks
from emp_llm.evaluation.harness import Harness, check_tokenizer
from emp_llm.evaluation.perplexity import block_length, perplexity, text_tokens
from emp_llm.evaluation.results import dense_measures, new_results, open_results, save_results
from emp_llm.evaluation.suites import Suite
from emp_llm.hub.local_model import LocalModel
from emp_llm.models.loading import check_head
from emp_llm.models.one_model import OneModel
from emp_llm.models.placement import check_ids
from emp_llm.records.evaluation import EvaluationRecord, Measures
from emp_llm.records.results import Results
from emp_llm.records.run_report import RunReport
from emp_llm.records.source import stage_records

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)
BATCH_SIZE = 8  # default: examples per forward pass of a task
EVALUATION_FOLDER = f"{EXTRAS}/evaluation"
_PENDING = "pending.json"


@dataclass(frozen=True)
class PreparedSuite:
    """A suite with its text and its tasks' data, as `prepare_suite` reads them.

    Attributes:
        batch_size: examples per forward pass of a task, or "auto"; perplexity chooses its own.
        tokens: of the text, int64, shape (tokens,); None without a text.
        begin: the token to put at the beginning of each block; None: none.
    """

    suite: Suite
    tokenizer: Any
    batch_size: int | str
    tokens: "Tensor | None"
    begin: int | None
    harness: Harness | None


def prepare_suite(
    suite: Suite,
    folder: Path,
    tokenizer: Any,
    batch_size: int | str = BATCH_SIZE,
    harness: Harness | None = None,
) -> PreparedSuite:
    """Read all data of a suite, so that what is missing is said before a model runs.

    Args:
        suite: the text and the tasks to measure.
        folder: of the model; it says what its blocks begin with.
        tokenizer: of the model.
        batch_size: examples per forward pass of a task, or "auto".
        harness: holds the suite's tasks, if they are loaded already.

    Raises:
        UserError: the model has no head for tokens; a text, task or data set is missing; lm-eval is
            not installed, or cannot use the tokenizer.
    """
    check_head(folder)
    if suite.tasks:
        check_tokenizer(tokenizer, suite.tasks)
    suite = suite.of_model(folder, tokenizer)
    begin = None if suite.corpus is None else begin_token(suite.corpus.bos, tokenizer)
    tokens = None if suite.corpus is None else text_tokens(suite.corpus, tokenizer)
    if tokens is not None and (folder / "config.json").is_file():
        check_ids(
            tokens,
            read_json(folder / "config.json"),
            f"suite {suite.name}, by the tokenizer of {folder}",
        )
    harness = harness or Harness(suite.tasks) if suite.tasks else None
    return PreparedSuite(suite, tokenizer, batch_size, tokens, begin, harness)


def missing(suite: Suite, measures: Measures) -> list[str | None]:
    """The parts of a suite that are not measured yet: None for the perplexity, then the names of
    tasks.
    """
    text: list[str | None] = (
        [None] if suite.corpus is not None and measures.perplexity is None else []
    )
    return text + [task.name for task in suite.tasks if task.name not in measures.tasks]


def measure(
    model: "PreTrainedModel",
    prepared: PreparedSuite,
    measures: Measures | None = None,
    after_each: Callable[[Measures], None] | None = None,
) -> Measures:
    """Measure the parts of a suite that `measures` does not hold yet.

    Args:
        model: in evaluation mode.
        measures: earlier measurements; new ones are added in place.
        after_each: called with `measures` after the perplexity and after every task.

    Returns:
        `measures`.
    """
    measures = measures or Measures()
    suite = prepared.suite
    wrapped = None
    for part in missing(suite, measures):
        if part is not None and prepared.harness is not None:
            wrapped = wrapped or prepared.harness.model(
                model, prepared.tokenizer, prepared.batch_size
            )
            measures.tasks[part] = record = prepared.harness.run(part, wrapped)
            logger.debug("%s: measured in %.1f s.", part, record.seconds)
        elif suite.corpus is not None and prepared.tokens is not None:
            length = block_length(suite.corpus, model.config)
            measures.perplexity = perplexity(
                model, prepared.tokens, length, limit=suite.limit, begin=prepared.begin
            )
            logger.debug("perplexity: measured in %.1f s.", measures.perplexity.seconds)
        if after_each is not None:
            after_each(measures)
    return measures


def evaluate_model(
    model: "PreTrainedModel", prepared: PreparedSuite, results: Results, path: Path
) -> None:
    """Measure what results lack of a suite, and save them after every part.

    Args:
        results: of this model and suite, from `open_results`.
        path: their file.
    """

    def save(measures: Measures, complete: bool = False) -> None:
        results.take(measures)
        results.complete = complete
        save_results(results, path)

    measures = results.measures
    if measures.parts:
        logger.info(
            "%s: resuming after %s of the suite.", path, count_of(measures.parts, "finished part")
        )
    save(measure(model, prepared, measures, save), complete=True)


def evaluation_record(
    prepared: PreparedSuite, dense: Measures | None, pruned: Measures | None
) -> EvaluationRecord:
    """The record of an evaluation in a report."""
    definition = msgspec.structs.asdict(prepared.suite.record())
    return EvaluationRecord(
        **definition, batch_size=prepared.batch_size, dense=dense, pruned=pruned
    )


def mark_pending(files: Path, signature: dict[str, Any]) -> None:
    """Mark the files of a checkpoint, before they are put in place, as not evaluated yet."""
    folder = files / EVALUATION_FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / _PENDING, signature)


def pending_signature(output: Path) -> dict[str, Any]:
    """The signature of the run whose checkpoint is finished and not yet evaluated; empty if there
    is none.
    """
    path = output / EVALUATION_FOLDER / _PENDING
    with suppress(UserError):
        return read_json(path) if path.is_file() else {}
    return {}  # damaged


def measures_of_baseline(
    baseline: Path | None,
    source: LocalModel,
    prepared: PreparedSuite,
    dtype: str,
    device_map: str,
) -> Measures | None:
    """Earlier results of the dense model; None without a baseline. UserError if they are of
    another model, suite or dtype.
    """
    if baseline is None:
        return None
    wanted = new_results(source, prepared.suite, prepared.batch_size, dtype, device_map)
    return dense_measures(baseline, wanted.made_by)


def evaluate_checkpoint(
    output: Path,
    source: LocalModel,
    report: RunReport,
    prepared: PreparedSuite,
    models: OneModel,
    stopwatch: Stopwatch,
    dense: Measures | None = None,
) -> RunReport:
    """Evaluate the dense and the pruned model of a finished checkpoint, and add the results to its
    report.

    Args:
        output: folder of the checkpoint.
        source: the dense model.
        report: of the checkpoint; it is saved again.
        dense: earlier results of the dense model, from `measures_of_baseline`, used instead of
            measuring it.

    Raises:
        UserError: another run evaluates the checkpoint.
    """
    folder = output / EVALUATION_FOLDER
    try:
        with lock(folder / "results", f"--output {output}"):
            measured = [] if dense is None else [dense]
            models_of = {"dense": source, "pruned": LocalModel(str(output), output, None)}
            for name in ("dense", "pruned")[len(measured) :]:
                model = models_of[name]
                results = new_results(
                    model, prepared.suite, prepared.batch_size, models.dtype, models.device_map
                )
                path = folder / f"{name}.json"
                try:
                    results = open_results(path, results)
                except UserError as error:
                    logger.info("%s Measuring again.", error)
                    results = open_results(path, results, overwrite=True)
                if missing(prepared.suite, results.measures):
                    with stage(f"evaluate {name}"):
                        loaded = models.get(model.folder)
                        with stopwatch(f"evaluate {name}"):
                            evaluate_model(loaded, prepared, results, path)
                        del loaded
                measured.append(results.measures)
            report.evaluation = evaluation_record(prepared, *measured)
            report.stages |= stage_records(stopwatch.record)
            if ranks().main:
                report.save(output / REPORT_NAME)
                shutil.rmtree(folder, ignore_errors=True)
    except BaseException:
        if ranks().main:
            logger.warning(
                "the checkpoint in %s is complete, but not its evaluation; the same "
                "command resumes it.",
                output,
            )
        raise
    return report
