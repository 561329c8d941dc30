"""The signature of an unfinished run, and the manifest of a finished one."""

from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

import msgspec

from emp_llm.checkpoint.checkpoint import Checkpoint
from emp_llm.common.errors import UserError
from emp_llm.common.file_names import EXTRAS, MANIFEST_NAME, REPORT_NAME
from emp_llm.common.provenance import versions
from emp_llm.records.base import read_record
from emp_llm.records.manifest import FileEntry, Manifest, ManifestSource, NormsRecord, SchemeRecord
from emp_llm.records.source import RecipeRecord
from emp_llm.selection.block_shares import OwlBudget
from emp_llm.selection.budgets import Budget, EffectiveBudget, PartsBudget, PatternBudget, RatioBudget, TotalBudget
from emp_llm.selection.criteria import CRITERIA
from emp_llm.selection.scheme import CountBy, Group, Scheme, ScoreMap
from emp_llm.storage.hashing import file_hash
from emp_llm.storage.json_files import INDEX_LIMIT

_BUDGETS = (EffectiveBudget, RatioBudget, PatternBudget, TotalBudget, PartsBudget, OwlBudget)
EVALUATION_FOLDER = f"{EXTRAS}/evaluation"  # measurements of an unfinished evaluation


def run_signature(
    checkpoint: Checkpoint, recipe: RecipeRecord, scheme: Scheme, activations: dict[str, Any] | None
) -> dict[str, Any]:
    """Everything that the bytes of a pruned checkpoint depend on, as JSON. Known before any weight is read.

    Args:
        activations: identifies the norms; None if none are needed.
    """
    return {
        "emp-llm": versions().get("emp-llm", "unknown"),
        "source": {"files": {name: list(state) for name, state in checkpoint.states.items()}},
        "recipe": recipe.as_dict(),
        "scheme": _scheme_record(scheme).as_dict(),
        "activations": activations,
    }


def write_manifest(
    folder: Path,
    checkpoint: Checkpoint,
    identity: str | None,
    recipe: RecipeRecord,
    scheme: Scheme,
    norms: str | None,
    hashes: dict[str, str],
) -> None:
    """Write the manifest of a finished checkpoint.

    Args:
        folder: of the checkpoint.
        checkpoint, identity: the source; no identity for a model that was pruned in memory.
        recipe, scheme: of the run.
        norms: digest of the norms; None if none were needed.
        hashes: BLAKE3 of files by name, as far as known; the other files are hashed now.
    """
    files = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = str(path.relative_to(folder))
        hidden = path.name.startswith(".")  # a temporary file of an interrupted run
        if not hidden and name not in (MANIFEST_NAME, REPORT_NAME) and not name.startswith(EVALUATION_FOLDER):
            files[name] = FileEntry(bytes=path.stat().st_size, blake3=hashes.get(name) or file_hash(path))
    Manifest(
        emp_llm=versions().get("emp-llm", "unknown"),
        source=ManifestSource(identity=identity, bytes={name: state[0] for name, state in checkpoint.states.items()}),
        recipe=recipe,
        scheme=_scheme_record(scheme),
        activations=None if norms is None else NormsRecord(norms=norms),
        files=files,
    ).save(folder / MANIFEST_NAME)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a finished checkpoint; UserError if it is missing or invalid."""
    path = folder / MANIFEST_NAME
    if not path.is_file():
        raise UserError(f"{folder}: no {MANIFEST_NAME} in it; give the --output folder of a finished prune.")
    return read_record(path, Manifest, INDEX_LIMIT)


def scheme_of_manifest(manifest: Manifest) -> Scheme:
    """The scheme in a manifest; ValueError, KeyError or TypeError if it is invalid."""
    record = manifest.scheme
    fields: dict[str, Any] = dict(record.budget)
    kinds: dict[str, type[Budget]] = {kind.__name__: kind for kind in _BUDGETS}
    own = manifest.recipe.criterion
    if record.criterion not in CRITERIA and own is not None and own.function is not None:
        raise UserError(f"the criterion {record.criterion} decided the masks; add --criterion {own.function}.")
    if record.criterion not in CRITERIA or record.group not in get_args(Group):
        raise ValueError("no such criterion or group")
    if record.score_map not in (None, *get_args(ScoreMap)):
        raise ValueError("no such map of scores")
    if record.count_by not in get_args(CountBy):
        raise ValueError("no such scores for the counts")
    if manifest.recipe.method.removeprefix("emp-") != record.criterion:
        raise ValueError("its recipe and its scheme have different criteria")
    group: Group = record.group  # type: ignore[assignment]
    budget = kinds[fields.pop("kind")](**fields)
    return Scheme(record.criterion, budget, group, record.score_map, record.relative, record.count_by)  # type: ignore[arg-type]


def _scheme_record(scheme: Scheme) -> SchemeRecord:
    fields = msgspec.to_builtins(asdict(scheme.budget))  # type: ignore[call-overload]
    return SchemeRecord(
        criterion=scheme.criterion_name,
        group=scheme.group,
        budget={"kind": type(scheme.budget).__name__, **fields},
        score_map=scheme.score_map,
        relative=scheme.relative,
        count_by=scheme.count_by,
    )
