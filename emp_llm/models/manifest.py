"""What a run is and what it made: the signature of an unfinished run, and the manifest of a finished one.

`emp_manifest.json` of a pruned checkpoint names every file that the run wrote with its size and SHA-256, and what decided the
masks, so that `verify` can decide them again. The report is not in it: its times differ from run to run, and an evaluation
adds to it.
"""

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

from emp_llm.models.activations import Activations
from emp_llm.models.checkpoint import Checkpoint
from emp_llm.models.digests import digest_of
from emp_llm.models.direct import bytes_of
from emp_llm.models.errors import UserError
from emp_llm.models.files import replace_json
from emp_llm.models.headers import read_json
from emp_llm.models.provenance import versions
from emp_llm.models.recipe import REPORT_NAME
from emp_llm.selection.budgets import Budget, EffectiveBudget, PartsBudget, PatternBudget, RatioBudget, TotalBudget
from emp_llm.selection.criteria import CRITERIA
from emp_llm.selection.scheme import Group, Scheme

MANIFEST_NAME = "emp_manifest.json"
ACTIVATIONS_NAME = Path("emp_llm") / "activations.safetensors"
_FORMAT = "emp-llm manifest 1"
_PARTS: dict[str, Any] = {  # what is read of a manifest, here and elsewhere
    "files": dict,
    "source": {"sha256_of_samples": str},
    "recipe": {"targets": str | list, "ignore": str | list | None},
    "scheme": dict,
    "activations": dict | None,
}
_BUDGETS = (EffectiveBudget, RatioBudget, PatternBudget, TotalBudget, PartsBudget)


def definition(
    checkpoint: Checkpoint, recipe: dict[str, Any], scheme: Scheme, activations: dict[str, Any] | None
) -> dict[str, Any]:
    """What the bytes of a pruned checkpoint depend on, as JSON: the signature of the run that makes it.

    Args:
        recipe: `Recipe.record()`.
        activations: what tells the norms from others; None where none are needed.
    """
    fields = json.loads(json.dumps(asdict(scheme.budget)))  # type: ignore[call-overload]
    budget = {"kind": type(scheme.budget).__name__, **fields}
    return {
        "emp-llm": versions().get("emp-llm", "unknown"),
        "source": checkpoint.fingerprint | {"bytes": {shard.name: shard.stat().st_size for shard in checkpoint.shards}},
        "recipe": recipe,
        "scheme": {"criterion": scheme.criterion_name, "group": scheme.group, "budget": budget},
        "activations": activations,
    }


def scheme_of(definition: dict[str, Any]) -> Scheme:
    """The scheme that a definition records; ValueError, KeyError or TypeError where it does not."""
    scheme = definition["scheme"]
    fields: dict[str, Any] = dict(scheme["budget"])
    kinds: dict[str, type[Budget]] = {kind.__name__: kind for kind in _BUDGETS}
    if scheme["criterion"] not in CRITERIA or scheme["group"] not in get_args(Group):
        raise ValueError("no such criterion or group")
    return Scheme(scheme["criterion"], kinds[fields.pop("kind")](**fields), scheme["group"])


def norms_digest(activations: Activations) -> str:
    """SHA-256 of the norms of all layers and their tokens, whatever file they are in and whoever made them."""
    digest = hashlib.sha256()
    for layer in sorted(activations.input_of):
        norm = activations.norms[activations.input_of[layer]]
        digest.update(f"{layer} {norm.dtype} {tuple(norm.shape)} {activations.tokens_of(layer)}\n".encode())
        digest.update(bytes_of(norm.contiguous()))
    return digest.hexdigest()


def write_manifest(folder: Path, definition: dict[str, Any], digests: dict[str, str]) -> None:
    """Write the manifest of a finished checkpoint; files whose digests are not given are read for them."""
    files = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = str(path.relative_to(folder))
        half = path.name.startswith(".")  # of a run that was stopped just here
        if not half and name not in (MANIFEST_NAME, REPORT_NAME):
            files[name] = {"bytes": path.stat().st_size, "sha256": digests.get(name) or digest_of(path)}
    replace_json(folder / MANIFEST_NAME, {"format": _FORMAT} | definition | {"files": files})


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a finished checkpoint.

    Raises:
        UserError: there is none, or it is not one.
    """
    path = folder / MANIFEST_NAME
    if not path.is_file():
        raise UserError(f"{folder}: no {MANIFEST_NAME} in it; give the --output folder of a finished prune.")
    manifest = read_json(path, unique=True)
    if manifest.get("format") != _FORMAT or not _has(manifest, _PARTS):
        raise UserError(f"{path}: not a manifest that this version of emp-llm can read.")
    for name, entry in manifest["files"].items():
        inside = name.isprintable() and not Path(name).is_absolute() and ".." not in Path(name).parts
        if not inside or not _has(entry, {"bytes": int, "sha256": str}):
            raise UserError(f"{path}: its entry for {name[:80]!r} is not that of a file in this folder.")
    return manifest


def _has(value: Any, parts: dict[str, Any]) -> bool:
    """Whether it is an object with these parts, of these types; of lists, lists of text."""
    if not isinstance(value, dict) or not parts.keys() <= value.keys():
        return False
    for name, kind in parts.items():
        part = value[name]
        if not (_has(part, kind) if isinstance(kind, dict) else isinstance(part, kind)):
            return False
        if isinstance(part, list) and not all(isinstance(text, str) for text in part):
            return False
    return True
