"""Results of a suite on a model: the file that is written after every task, and results that are
read again.

Earlier results resume an evaluation, stand in a table, or take the place of a new measurement; they
must be of the same suite.
"""

import logging
import os
from functools import partial
from pathlib import Path

import msgspec

from emp_llm.checkpoint.agreement import check_agreement
from emp_llm.checkpoint.checkpoint import Checkpoint, identity_of
from emp_llm.checkpoint.files import INDEX_LIMIT
from emp_llm.checkpoint.output import describe_difference
from emp_llm.checkpoint.packed_format import PackedFolder
from emp_llm.common.errors import ReadError, UserError
from emp_llm.common.machine import command_line, versions
from emp_llm.common.paths import PACK_NAME, REPORT_NAME
from emp_llm.common.ranks import ranks
from emp_llm.evaluation.suites import Suite
from emp_llm.hub.local_model import LocalModel
from emp_llm.models.placement import Quantization, device_name, quantization_record
from emp_llm.pruning.writing import report_of_weights
from emp_llm.records.base import read_record
from emp_llm.records.evaluation import Measures
from emp_llm.records.results import MadeBy, Results, pruned_by
from emp_llm.records.run_report import RunReport, read_report
from emp_llm.records.source import ModelIdentity

logger = logging.getLogger(__name__)


def new_results(
    source: LocalModel,
    suite: Suite,
    batch_size: int | str,
    dtype: str,
    device_map: str,
    quantization: Quantization | None = None,
    runtime: str = "dense",
) -> Results:
    """Results of a suite and a model with nothing measured yet; UserError if the folder is not a
    checkpoint.
    """
    record = suite.record()
    # `Checkpoint` refuses a packed folder, which only the sparse runtime runs.
    read = folder_identity if runtime == "sparse" else _identity_of_checkpoint
    made_of = {"suite": msgspec.to_builtins(record)}
    made_of |= ModelIdentity.of(source.folder, None).as_dict()
    if (source.folder / PACK_NAME).is_file():
        check_agreement(made_of | {"weights": folder_identity(source.folder)})
    else:
        check_agreement(made_of, model=Checkpoint(source.folder))
    identity = ranks().first(partial(read, source.folder))
    try:
        packed = (source.folder / PACK_NAME).is_file()
        read_it = read_report if packed else partial(report_of_weights, identity=identity)
        report = read_it(source.folder)
    except ReadError:
        raise
    except UserError:  # it has no report that can be read
        report = None
    pruned = None if report is None else pruned_by(report)
    made_by = MadeBy(
        model=ModelIdentity.of(source.folder, identity),
        limit=record.limit,
        text=record.text,
        tasks=record.tasks,
        batch_size=batch_size,
        dtype=dtype,
        quantization=quantization_record(quantization),
        device_map=device_map,
        runtime=None if runtime == "dense" else runtime,
        ranks=ranks().count,
        device=device_name(device_map),
        versions=versions(),
    )
    return Results(
        model=source.name,
        revision=source.revision,
        pruned=pruned,
        suite=suite.name,
        made_by=made_by,
        command=command_line(),
    )


def _identity_of_checkpoint(folder: Path) -> str:
    return identity_of(Checkpoint(folder))


def folder_identity(folder: Path) -> str | None:
    """The identity of a model folder; of a packed one, that of its original."""
    return (
        PackedFolder(folder).identity
        if (folder / PACK_NAME).is_file()
        else identity_of(Checkpoint(folder))
    )


def save_results(results: Results, path: Path) -> None:
    """Save results, on the first rank. UserError if the file cannot be written."""
    if not ranks().main:
        return
    try:
        results.save(path)
    except OSError as error:
        raise UserError(f"--output {path}: cannot be written ({error.strerror}).") from error


def open_results(path: Path, results: Results, overwrite: bool = False) -> Results:
    """Results with the earlier measures of their file. Under several ranks, all hold the same.

    Args:
        path: the file; it need not exist.
        results: from `new_results`. If the file holds results of the same model and suite, their
            measurements are added.
        overwrite: measure everything again, whatever the file holds.

    Raises:
        UserError: the file holds other results (the first field that differs is named), or cannot
            be written.
    """
    parent = next(folder for folder in path.absolute().parents if folder.exists())
    if path.is_dir() or not parent.is_dir() or not os.access(parent, os.W_OK):
        raise UserError(
            f"--output {path}: a file cannot be written there; name a file in a folder."
        )
    if path.exists() and not overwrite:
        older = read_results(path, "--output")
        field = describe_difference(older.made_by.as_dict(), results.made_by.as_dict())
        if field is not None:
            raise UserError(
                f"--output {path}: it holds other results ({field}). Name another "
                "file, or add --overwrite."
            )
        results.command = older.command
        results.take(older.measures)
        results.complete = older.complete
    shared: Results = ranks().broadcast(results)
    return shared


def read_results(path: Path, option: str) -> Results:
    """The results in a file; UserError, naming the option, if it is not a results file."""
    try:
        return read_record(path, Results, INDEX_LIMIT)
    except UserError as error:
        raise UserError(f"{option} {error}") from error


def results_of_report(report: RunReport) -> list[Results]:
    """The results of the dense and of the pruned model of a run that evaluated them; one that is
    not measured is left out.
    """
    evaluation = report.evaluation
    if evaluation is None:
        return []
    made_by = MadeBy(
        model=msgspec.convert(report.source, ModelIdentity, from_attributes=True),
        limit=evaluation.limit,
        text=evaluation.text,
        tasks=evaluation.tasks,
        batch_size=evaluation.batch_size,
        dtype=report.dtype,
        device_map=report.device_map,
        versions=report.versions,
    )
    results = []
    for pruned, measures in ((None, evaluation.dense), (pruned_by(report), evaluation.pruned)):
        if measures is not None:
            results.append(
                Results(
                    model=report.source.model,
                    pruned=pruned,
                    suite=evaluation.suite,
                    made_by=made_by,
                )
            )
            results[-1].take(measures)
    return results


# Earlier results in place of new ones.


def results_to_compare(path: Path, option: str, wanted: MadeBy) -> Results:
    """Earlier results for a table. Differences that can change the last digits are logged as a
    warning.

    Args:
        path: a results file.
        option: the option that names it, for errors.
        wanted: the suite that the table is of.

    Raises:
        UserError: it is not a results file, its results are of another suite or limit, or they are
            not complete.
    """
    results = complete_results(path, option)
    difference = _difference(results.made_by, wanted, "text", "tasks", "limit")
    if difference is not None:
        raise UserError(
            f"{option} {path}: its results are of another suite or limit ({difference}); "
            "use the same ones."
        )
    difference = _difference(results.made_by, wanted, "batch_size", "dtype", "device", "versions")
    if difference is not None:
        logger.warning(
            "warning: %s was measured differently (%s), so the last digits may differ.",
            path,
            difference,
        )
    return results


def dense_measures(baseline: Path, wanted: MadeBy) -> Measures:
    """Earlier measurements of a dense model, used instead of measuring it.

    Args:
        baseline: a results file of `evaluate`, or the output folder of a prune that evaluated the
            dense model.
        wanted: everything that a new measurement would depend on.

    Raises:
        UserError: they are of another model, suite, dtype or quantisation, or not complete.
    """
    if baseline.is_dir():
        dense = [
            results
            for results in results_of_report(read_report(baseline))
            if results.pruned is None
        ]
        if not dense:
            raise UserError(
                f"--baseline {baseline}: its {REPORT_NAME} holds no evaluation of the "
                "dense model; name another."
            )
        results = dense[0]
    else:
        results = complete_results(baseline, "--baseline")
    made_by = results.made_by
    other = None
    remedy = "Leave out --baseline to measure the dense model now."
    differs = _difference(made_by, wanted, "text", "tasks", "limit", "dtype", "quantization")
    if differs is not None:
        other = f"another suite, dtype or quantisation ({differs})"
    elif (words := made_by.model.difference(wanted.model)) is not None:
        other = f"{words} --model"
    if other is not None:
        raise UserError(f"--baseline {baseline}: its results are of {other}. {remedy}")
    return results.measures


def complete_results(path: Path, option: str) -> Results:
    """The results in a file; UserError if the suite is not measured to its end."""
    results = read_results(path, option)
    if not results.complete:
        raise UserError(
            f"{option} {path}: that run has not finished; run its command again to resume it."
        )
    return results


def _difference(held: MadeBy, wanted: MadeBy, *fields: str) -> str | None:
    """The first of some fields that differs, in words; None if all are equal."""
    before = held.as_dict()
    now = wanted.as_dict()
    return describe_difference(
        {field: before[field] for field in fields}, {field: now[field] for field in fields}
    )
