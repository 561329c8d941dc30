"""Earlier results, for a column of a table or instead of a new measurement. They must be of the same suite."""

import logging
from pathlib import Path

from emp_llm.common.errors import UserError
from emp_llm.common.file_names import REPORT_NAME
from emp_llm.evaluation.evaluated_model import made_by_of
from emp_llm.evaluation.results_file import difference, read_results
from emp_llm.pruning.recipe import read_report
from emp_llm.records.evaluation import Measures
from emp_llm.records.results import MadeBy, Results

logger = logging.getLogger(__name__)

_REMEDY = "Leave out --baseline to measure the dense model now."


def results_to_compare(path: Path, option: str, wanted: MadeBy) -> Results:
    """Earlier results for a table. Differences that can change the last digits are logged as a warning.

    Args:
        path: a results file.
        option: the option that names it, for errors.
        wanted: the suite that the table is of.

    Raises:
        UserError: it is not a results file, its results are of another suite or limit, or they are not complete.
    """
    results = read_results(path, option)
    _check_complete(results, path, option)
    found = _first_difference(results.made_by, wanted, ("text", "tasks", "limit"))
    if found is not None:
        raise UserError(f"{option} {path}: its results are of another suite or limit ({found}); use the same ones.")
    found = _first_difference(results.made_by, wanted, ("batch_size", "dtype", "device", "versions"))
    if found is not None:
        logger.warning("warning: %s was measured differently (%s), so the last digits may differ.", path, found)
    return results


def dense_measures(baseline: Path, wanted: MadeBy) -> Measures:
    """Earlier measurements of a dense model, used instead of measuring it.

    Args:
        baseline: a results file of `evaluate`, or the output folder of a prune that evaluated the dense model.
        wanted: everything that a new measurement would depend on.

    Raises:
        UserError: they are of another model, suite, dtype or quantisation, or not complete.
    """
    if baseline.is_dir():
        report = read_report(baseline)
        evaluation = report.evaluation
        if evaluation is None or evaluation.dense is None:
            raise UserError(f"--baseline {baseline}: its {REPORT_NAME} holds no evaluation of the dense model; name another.")
        made_by, measures = made_by_of(evaluation, report), evaluation.dense
    else:
        results = read_results(baseline, "--baseline")
        _check_complete(results, baseline, "--baseline")
        made_by, measures = results.made_by, results.measures
    found = _first_difference(made_by, wanted, ("text", "tasks", "limit", "dtype", "quantization"))
    if found is not None:
        what = "suite, dtype or quantisation"
        raise UserError(f"--baseline {baseline}: its results are of another {what} ({found}). {_REMEDY}")
    _check_model(baseline, made_by, wanted)
    return measures


def _check_complete(results: Results, path: Path, option: str) -> None:
    if not results.complete:
        raise UserError(f"{option} {path}: that run has not finished; run its command again to resume it.")


def _check_model(baseline: Path, made_by: MadeBy, wanted: MadeBy) -> None:
    """Raise UserError for results of another model. A folder records no hash of config and tokenizer."""
    if made_by.model.identity is None:
        raise UserError(f"--baseline {baseline}: an older emp-llm wrote it, without the identity of the weights. {_REMEDY}")
    if made_by.model.identity != wanted.model.identity:
        raise UserError(f"--baseline {baseline}: its results are of other weights than those of --model. {_REMEDY}")
    digest = made_by.model.sha256_of_config_and_tokenizer
    if digest is not None and digest != wanted.model.sha256_of_config_and_tokenizer:
        raise UserError(f"--baseline {baseline}: its results are of another config or tokenizer than --model has. {_REMEDY}")


def _first_difference(held: MadeBy, wanted: MadeBy, fields: tuple[str, ...]) -> str | None:
    """The first of some fields that differs, in words; None if all are equal."""
    before, now = held.as_dict(), wanted.as_dict()
    return next((found for key in fields if (found := difference(before[key], now[key], key)) is not None), None)
