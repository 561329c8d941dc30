"""A finished checkpoint on the Hub: which of its files go there, its model card, and the push itself."""

import logging
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from emp_llm.models.checkpoint import Checkpoint
from emp_llm.models.errors import UserError, reason
from emp_llm.models.files import replace_text
from emp_llm.models.manifest import MANIFEST_NAME, read_manifest
from emp_llm.models.recipe import REPORT_NAME, read_report
from emp_llm.services.card import CARD_NAME, Card, by_suite, is_ours
from emp_llm.services.origin import find_origin
from emp_llm.services.results import Record, read_results
from emp_llm.services.upload import Destination, upload

logger = logging.getLogger(__name__)
_EXTRAS = "emp_llm"  # the folder of what is no part of the model


@dataclass(frozen=True)
class Evidence:
    """What the card shows beside the report of the run.

    Attributes:
        results: results files of `evaluate`: of this checkpoint, and of what stands beside it.
        plots: PNG files, beside those in the checkpoint's folder `emp_llm`.
        base_model: Hub id of the dense model, where the report does not tell.
    """

    results: tuple[Path, ...] = ()
    plots: tuple[Path, ...] = ()
    base_model: str | None = None


def publish(folder: Path, to: Destination, evidence: Evidence, dry_run: bool = False) -> dict[str, Any]:
    """Push a pruned checkpoint with a model card, which is also kept in its folder as README.md.

    A README.md there that was not written by this is pushed as it is.

    Args:
        folder: the output of a finished prune.
        to: where to.
        dry_run: tell what would be pushed; neither the folder nor the Hub is touched.

    Returns:
        "repository", "branch", "files": sizes in bytes by path in the repository, "bytes": of all of them; for a dry run
        "dry_run"; else "folder" and what `upload` returns.

    Raises:
        UserError: the folder is no finished checkpoint, or not the one its manifest describes; or of `upload`.
    """
    to.check_name()
    folder = Path(folder)
    manifest = read_manifest(folder)
    files = _checkpoint_files(folder, manifest)
    records = [(path, read_results(path, "--results")) for path in evidence.results]
    _check_results(folder, records)
    plots = _plots(folder, evidence.plots)
    names = [path.name for path in (*plots, *evidence.results)]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UserError(f"{twice}: two files of this name, and they are kept in one folder; rename one.")
    files |= {f"{_EXTRAS}/{path.name}": path for path in (*plots, *evidence.results)}
    report = read_report(folder)
    card_path = folder / CARD_NAME
    card = None
    if not card_path.exists() or is_ours(card_path):
        origin = find_origin(report, evidence.base_model)
        card = Card(to, report, origin, [record for _, record in records], [f"{_EXTRAS}/{path.name}" for path in plots])
    else:
        logger.info("%s: not written by emp-llm, so it is pushed as it is; remove it to have one written.", card_path)
    text = None if card is None else card.text(files)
    sizes = {path: file.stat().st_size for path, file in files.items()}
    sizes[CARD_NAME] = card_path.stat().st_size if text is None else len(text.encode())
    about = {"repository": to.name, "branch": to.branch, "files": sizes, "bytes": sum(sizes.values())}
    if dry_run:
        return {"dry_run": True} | about
    if text is not None:
        try:
            replace_text(card_path, text)
        except OSError as error:
            raise UserError(f"{card_path}: the model card cannot be written ({reason(error)}).") from error
    digests = {path: entry["sha256"] for path, entry in manifest["files"].items()}
    done = upload(files | {CARD_NAME: card_path}, digests, to, _message(report))
    return about | {"folder": str(folder)} | done


def publish_finished(folder: Path, to: Destination) -> dict[str, Any]:
    """`publish` of what has just been pruned; where it fails, how to push it again is said too."""
    options = [*(["--private"] if to.private else []), *(["--revision", to.branch] if to.branch else [])]
    options += ["--overwrite"] if to.overwrite else []
    again = f"push it again: python -m emp_llm.push {shlex.join([str(folder), to.name, *options])}"
    try:
        return publish(folder, to, Evidence())
    except UserError as error:
        raise UserError(f"{error} The checkpoint is complete in {folder}; {again}") from error
    except BaseException:
        logger.warning("the checkpoint is complete in %s; %s", folder, again)
        raise


def _message(report: dict[str, Any]) -> str:
    return f"{Path(report['source']['model']).name} pruned by {report['recipe']['method']} with emp-llm"


def _checkpoint_files(folder: Path, manifest: dict[str, Any]) -> dict[str, Path]:
    """What the manifest names, the manifest and the report; nothing else that lies in the folder."""
    for name, entry in manifest["files"].items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != entry["bytes"]:
            what = "it has another size than" if path.is_file() else "it is missing, but named by"
            raise UserError(f"{path}: {what} {MANIFEST_NAME}, so nothing is pushed. Look: python -m emp_llm.verify {folder}")
    return {name: folder / name for name in [*manifest["files"], MANIFEST_NAME, REPORT_NAME]}


def _check_results(folder: Path, records: list[tuple[Path, Record]]) -> None:
    """Of every suite among the results, one has to be of this checkpoint, so that no other model's numbers stand for it."""
    if not records:
        return
    ours = Checkpoint(folder).fingerprint["sha256_of_samples"]
    for path, record in records:
        if not record.get("complete"):
            raise UserError(f"--results {path}: that run has not finished; run its command again, it goes on.")
        if path.suffix != ".json" or path.name.startswith("."):
            raise UserError(f"--results {path}: it is kept beside the model, so its name must end in .json.")
        measured = record["made_by"].get("model", {}).get("sha256_of_samples")
        if measured == ours:
            record["this"] = True
    for suite in by_suite([record for _, record in records]):
        if not any(record.get("this") for record in suite):
            path = next(path for path, record in records if record is suite[0])
            raise UserError(f"--results {path}: it is of other weights than those in {folder}; evaluate these.")


def _plots(folder: Path, given: tuple[Path, ...]) -> list[Path]:
    for path in given:
        if not path.is_file() or path.suffix.lower() != ".png":
            raise UserError(f"--plot {path}: no such PNG file.")
    return [*sorted((folder / _EXTRAS).glob("*.png")), *given]
