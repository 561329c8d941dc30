"""results.json: what was measured of a model and what made it, kept after every task so that a rerun goes on from there."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch

from emp_llm.models.checkpoint import Checkpoint
from emp_llm.models.errors import UserError
from emp_llm.models.headers import read_json
from emp_llm.models.loading import Quantization, quantization_record
from emp_llm.models.provenance import command_line, versions
from emp_llm.models.ranks import ranks
from emp_llm.models.recipe import REPORT_NAME
from emp_llm.models.work import first_difference
from emp_llm.services.hub import Source
from emp_llm.services.suites import Suite

Record = dict[str, Any]

# What beside the weights decides a number: the config, and the tokenizer in any of its forms.
_READ_BY_MODELS = (
    "config.json",
    "tokenizer*",
    "*.model",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
)


def new_record(
    source: Source,
    suite: Suite,
    batch_size: int | str,
    dtype: str,
    device_map: str,
    quantization: Quantization | None = None,
) -> Record:
    """A record with nothing measured yet.

    Returns:
        "model", "revision": as the user named it, and its commit; "pruned": what its emp_report.json tells, or null; "suite";
        "made_by": all that a number depends on, the same for the same numbers; "command"; "complete": false; "perplexity"
        and "tasks" will follow.

    Raises:
        UserError: the folder is not a checkpoint.
    """
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    made_by = {
        "model": Checkpoint(source.folder).fingerprint | {"sha256_of_config_and_tokenizer": _files_digest(source.folder)},
        **{key: value for key, value in suite.record().items() if key != "suite"},
        "batch_size": batch_size,
        "dtype": dtype,
        "quantization": quantization_record(quantization),
        "device_map": device_map,
        "ranks": ranks().count,
        "device": device,
        "versions": versions(),
    }
    record = {"model": source.name, "revision": source.revision, "pruned": pruned_by(source.folder), "suite": suite.name}
    return record | {"made_by": made_by, "command": command_line(), "complete": False}


def pruned_by(folder: Path) -> dict[str, Any] | None:
    """From the report that a pruning run left beside a checkpoint: of which model it is, by which recipe, how sparse."""
    if not (folder / REPORT_NAME).is_file():
        return None
    report = read_json(folder / REPORT_NAME)
    try:
        return pruned_record(report)
    except (KeyError, TypeError):
        return None


def pruned_record(report: dict[str, Any]) -> dict[str, Any]:
    """What a results file keeps of a pruning report."""
    sparsity = report["targets"]["sparsity_of_targets"]
    return {"of": report["source"]["model"], **report["recipe"], "sparsity_of_targets": sparsity}


def evaluation_records(report: dict[str, Any]) -> list[Record]:
    """What `prune --evaluate` measured, as records of the dense and of the pruned model."""
    evaluation = report["evaluation"]
    about = {"model": report["source"]["model"], "suite": evaluation["suite"], "made_by": evaluation}
    return [
        about | {"pruned": None} | evaluation["dense"],
        about | {"pruned": pruned_record(report)} | evaluation["pruned"],
    ]


class ResultsFile:
    """A results file, written whole or not at all; under several ranks by the first, and what it holds is the same to all.

    Args:
        path: where it lies, or will.
        record: what will be measured, of `new_record`.
        overwrite: measure everything anew, whatever the file holds.

    Raises:
        UserError: it holds results that something else made (the first field that differs is named), or cannot be written.
    """

    def __init__(self, path: Path, record: Record, overwrite: bool = False) -> None:
        self.path = Path(path)
        self.record = record
        parent = next(folder for folder in self.path.absolute().parents if folder.exists())
        if self.path.is_dir() or not parent.is_dir() or not os.access(parent, os.W_OK):
            raise UserError(f"--output {path}: a file cannot be written there; name a file in a folder.")
        if self.path.exists() and not overwrite:
            self._take_over(record)
        self.record = ranks().share(record)

    def _take_over(self, record: Record) -> None:
        older = read_results(self.path, "--output")
        # as JSON has it: a tuple that went through a file is a list
        made_by = json.loads(json.dumps(record["made_by"]))
        field = difference(older["made_by"], made_by)
        if field is not None:
            raise UserError(f"--output {self.path}: it holds other results ({field}). Name another file, or add --overwrite.")
        record.update({key: older[key] for key in ("command", "perplexity", "tasks") if key in older})

    def save(self, complete: bool = False) -> None:
        """Write the record."""
        self.record["complete"] = complete
        if not ranks().main:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_name(f".{self.path.name}.partial-{os.getpid()}")
        try:
            partial.write_text(json.dumps(self.record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
            partial.replace(self.path)
        except OSError as error:
            raise UserError(f"--output {self.path}: cannot be written ({error.strerror}).") from error
        finally:
            partial.unlink(missing_ok=True)


def read_results(path: Path, option: str) -> Record:
    """The record in a results file; UserError, naming the option, where it is not one."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{option} {path}: cannot be read as JSON.") from error
    if not isinstance(record, dict) or not isinstance(record.get("made_by"), dict) or "model" not in record:
        raise UserError(f"{option} {path}: not a results file of emp_llm.evaluate.")
    return record


def difference(old: Any, new: Any, name: str = "") -> str | None:
    """The first field in which two nested records differ, in words; None where they are equal."""
    found = first_difference(old, new, name)
    if found is None:
        return None
    words = [text if len(text := json.dumps(value)) <= 60 else f"{text[:57]}..." for value in found[1:]]
    return f"{found[0]}: {words[0]} there, {words[1]} now"


def _files_digest(folder: Path) -> str:
    digest = hashlib.sha256()
    for file in sorted({file for pattern in _READ_BY_MODELS for file in folder.glob(pattern) if file.is_file()}):
        digest.update(file.name.encode() + b"\0" + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()
