"""Results of a suite on a model: the file that is written after every task, and results that are read again.

Earlier results resume an evaluation, stand in a table, or take the place of a new measurement; they must be of the same suite.
"""

import hashlib
import json
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from emp_llm.checkpoint.checkpoint import Checkpoint, identity_of
from emp_llm.checkpoint.files import INDEX_LIMIT
from emp_llm.checkpoint.output import first_difference
from emp_llm.checkpoint.packed_format import PackedFolder
from emp_llm.common.errors import UserError
from emp_llm.common.machine import command_line, versions
from emp_llm.common.paths import PACK_NAME, REPORT_NAME
from emp_llm.common.ranks import ranks
from emp_llm.evaluation.suites import Suite
from emp_llm.hub.local_model import LocalModel
from emp_llm.models.placement import Quantization, quantization_record
from emp_llm.pruning.counts import read_report
from emp_llm.records.base import read_record
from emp_llm.records.evaluation import EvaluationRecord, Measures
from emp_llm.records.results import MadeBy, ModelIdentity, PrunedBy, Results, pruned_by
from emp_llm.records.run_report import RunReport

# The numbers depend on these files as well as on the weights: the config, and the tokenizer in any of its forms.
_CONFIG_AND_TOKENIZER = (
    "config.json",
    "tokenizer*",
    "*.model",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
)


def new_results(
    source: LocalModel,
    suite: Suite,
    batch_size: int | str,
    dtype: str,
    device_map: str,
    quantization: Quantization | None = None,
    runtime: str = "dense",
) -> Results:
    """Results of a suite and a model with nothing measured yet; UserError if the folder is not a checkpoint."""
    import torch  # a data-free prune prints its table without it

    record = suite.record()
    identity = ModelIdentity(
        identity=ranks().share(_identity(source.folder, runtime) if ranks().main else None),
        sha256_of_config_and_tokenizer=_files_digest(source.folder),
    )
    made_by = MadeBy(
        model=identity,
        limit=record.limit,
        text=record.text,
        tasks=record.tasks,
        batch_size=batch_size,
        dtype=dtype,
        quantization=quantization_record(quantization),
        device_map=device_map,
        runtime=None if runtime == "dense" else runtime,
        ranks=ranks().count,
        device=torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        versions=versions(),
    )
    return Results(
        model=source.name,
        revision=source.revision,
        pruned=pruned_by_of(source.folder),
        suite=suite.name,
        made_by=made_by,
        command=command_line(),
    )


def pruned_by_of(folder: Path) -> PrunedBy | None:
    """Recipe and sparsity of a pruned checkpoint, from its report; None if it has no report that can be read."""
    if not (folder / REPORT_NAME).is_file():
        return None
    try:
        return pruned_by(read_record(folder / REPORT_NAME, RunReport, 4 * INDEX_LIMIT))
    except UserError:
        return None


def _identity(folder: Path, runtime: str) -> str | None:
    """The identity of a model; UserError for a packed folder, unless the sparse runtime runs it."""
    return folder_identity(folder) if runtime == "sparse" else identity_of(Checkpoint(folder))


def folder_identity(folder: Path) -> str | None:
    """The identity of a model folder: a packed one has that of its original, or None if an earlier version packed it."""
    if (folder / PACK_NAME).is_file():
        return PackedFolder(folder).identity
    return identity_of(Checkpoint(folder))


def open_results(path: Path, results: Results, overwrite: bool = False) -> Results:
    """Results with the earlier measures of their file. Under several ranks, all hold the same.

    Args:
        path: the file; it need not exist.
        results: from `new_results`. If the file holds results of the same model and suite, their measurements are added.
        overwrite: measure everything again, whatever the file holds.

    Raises:
        UserError: the file holds other results (the first field that differs is named), or cannot be written.
    """
    parent = next(folder for folder in path.absolute().parents if folder.exists())
    if path.is_dir() or not parent.is_dir() or not os.access(parent, os.W_OK):
        raise UserError(f"--output {path}: a file cannot be written there; name a file in a folder.")
    if path.exists() and not overwrite:
        older = read_results(path, "--output")
        field = difference(older.made_by.as_dict(), results.made_by.as_dict())
        if field is not None:
            raise UserError(f"--output {path}: it holds other results ({field}). Name another file, or add --overwrite.")
        results.command = older.command
        results.take(older.measures)
        results.complete = older.complete
    shared: Results = ranks().share(results)
    return shared


def read_results(path: Path, option: str) -> Results:
    """The results in a file; UserError, naming the option, if it is not a results file."""
    try:
        return read_record(path, Results, INDEX_LIMIT)
    except UserError as error:
        raise UserError(f"{option} {error}") from error


def difference(old: Any, new: Any, name: str = "") -> str | None:
    """The first field in which two nested records differ, in words; None if they are equal."""
    found = first_difference(old, new, name)
    if found is None:
        return None
    words = [text if len(text := json.dumps(value)) <= 60 else f"{text[:57]}..." for value in found[1:]]
    return f"{found[0]}: {words[0]} there, {words[1]} now"


def _files_digest(folder: Path) -> str:
    digest = hashlib.sha256()
    for file in sorted({file for pattern in _CONFIG_AND_TOKENIZER for file in folder.glob(pattern) if file.is_file()}):
        digest.update(file.name.encode() + b"\0" + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


# A model with its results, read from a results file or from the report of a run.


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


# Earlier results in place of new ones.


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
