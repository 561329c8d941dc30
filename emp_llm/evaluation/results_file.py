"""Results files: written after every task, so that the same command resumes after the last finished one."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch

from emp_llm.checkpoint.checkpoint import Checkpoint
from emp_llm.checkpoint.identity import identity_of
from emp_llm.common.errors import UserError
from emp_llm.common.file_names import PACK_NAME, REPORT_NAME
from emp_llm.common.provenance import command_line, versions
from emp_llm.common.ranks import ranks
from emp_llm.evaluation.suites import Suite
from emp_llm.execution.quantization import Quantization, quantization_record
from emp_llm.hub.local_model import LocalModel
from emp_llm.packing.packed_folder import PackedFolder
from emp_llm.records.base import read_record
from emp_llm.records.evaluation import Measures
from emp_llm.records.results import MadeBy, ModelIdentity, PrunedBy, Results, pruned_by
from emp_llm.records.run_report import RunReport
from emp_llm.storage.json_files import INDEX_LIMIT
from emp_llm.storage.output.signature import first_difference

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


class ResultsFile:
    """A results file, written atomically. Under several ranks the first writes it, and all hold the same content.

    Args:
        path: the file.
        results: from `new_results`. If the file holds results of the same model and suite, their measurements are added.
        overwrite: measure everything again, whatever the file holds.

    Raises:
        UserError: the file holds other results (the first field that differs is named), or cannot be written.
    """

    def __init__(self, path: Path, results: Results, overwrite: bool = False) -> None:
        self.path = Path(path)
        parent = next(folder for folder in self.path.absolute().parents if folder.exists())
        if self.path.is_dir() or not parent.is_dir() or not os.access(parent, os.W_OK):
            raise UserError(f"--output {path}: a file cannot be written there; name a file in a folder.")
        if self.path.exists() and not overwrite:
            self._add_earlier_measures(results)
        self.results: Results = ranks().share(results)

    def _add_earlier_measures(self, results: Results) -> None:
        older = read_results(self.path, "--output")
        field = difference(older.made_by.as_dict(), results.made_by.as_dict())
        if field is not None:
            raise UserError(f"--output {self.path}: it holds other results ({field}). Name another file, or add --overwrite.")
        results.command = older.command
        results.take(older.measures)

    def save(self, measures: Measures, complete: bool = False) -> None:
        """Write the measurements so far."""
        self.results.take(measures)
        self.results.complete = complete
        if not ranks().main:
            return
        try:
            self.results.save(self.path)
        except OSError as error:
            raise UserError(f"--output {self.path}: cannot be written ({error.strerror}).") from error


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
