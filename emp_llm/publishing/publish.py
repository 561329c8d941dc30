"""The push of a finished checkpoint: the files, their public form, and the model card."""

import logging
import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from emp_llm.calibration.activations import Activations
from emp_llm.checkpoint.checkpoint import Checkpoint, identity_of
from emp_llm.checkpoint.files import file_hash, write_text
from emp_llm.common.errors import UserError, reason
from emp_llm.common.paths import ACTIVATIONS_NAME, CARD_NAME, EXTRAS, MANIFEST_NAME, REPORT_NAME
from emp_llm.evaluation.results import EvaluatedModel, model_of_results, read_results
from emp_llm.hub.destination import Destination
from emp_llm.hub.pushed import Pushed
from emp_llm.hub.upload import upload
from emp_llm.pruning.counts import read_report
from emp_llm.pruning.verification import Findings, check_files
from emp_llm.pruning.writing import read_manifest
from emp_llm.publishing.base_model import find_origin
from emp_llm.publishing.card import Card, by_suite, is_ours
from emp_llm.publishing.public import local_folder, public
from emp_llm.records.bench import Bench
from emp_llm.records.manifest import FileEntry, Manifest
from emp_llm.records.results import Results
from emp_llm.records.run_report import RunReport
from emp_llm.reporting.speed_tables import split_benches

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Evidence:
    """Further content of the card, in addition to the report of the run.

    Attributes:
        results: results files of `evaluate`, of this checkpoint and of models to compare with; and outputs of `bench`.
        plots: PNG files, in addition to those in the checkpoint's folder `emp_llm`.
        base_model: Hub id of the dense model, if the report names a folder.
    """

    results: tuple[Path, ...] = ()
    plots: tuple[Path, ...] = ()
    base_model: str | None = None


def publish(folder: Path, to: Destination, evidence: Evidence, dry_run: bool = False) -> Pushed:
    """Push a pruned checkpoint with a model card, which is also written to its folder as README.md.

    A README.md that emp-llm did not write is pushed as it is. Report, manifest, activations and results are pushed in a public
    form: they name models and files, not folders of this machine.

    Args:
        folder: the output of a finished prune.
        to: the destination.
        evidence: further content of the card.
        dry_run: check everything and list the files; neither the folder nor the Hub is changed.

    Raises:
        UserError: the folder is no finished checkpoint, it differs from its manifest, or a results file or plot does not fit;
            or an error of `upload`.
    """
    to.check_name()
    manifest, own_report = read_manifest(folder), read_report(folder)
    _check_against_manifest(folder, manifest)
    paths, benches = split_benches(evidence.results)
    benches = _public_benches(folder, benches)
    own_results = {path: read_results(path, "--results") for path in paths}
    folders = [name for each in (own_report.source, *own_results.values()) for name in local_folder(each)]
    report = public(own_report, *folders)
    results = {path: public(each, *folders) for path, each in own_results.items()}
    evaluated = _evaluated(folder, results)
    plots = _plots(folder, evidence.plots)
    _check_names([*plots, *results])
    with TemporaryDirectory(prefix="emp-llm-push-") as scratch:
        files = _public_files(folder, manifest, report, results, Path(scratch))
        files |= {f"{EXTRAS}/{path.name}": path for path in plots}
        text = _card_text(folder, to, own_report, report, evidence, evaluated, plots, list(files), benches)
        sizes = {path: file.stat().st_size for path, file in files.items()}
        sizes[CARD_NAME] = (folder / CARD_NAME).stat().st_size if text is None else len(text.encode())
        pushed = Pushed(to.name, to.branch, sizes, dry_run=dry_run, folder=str(folder))
        if dry_run:
            return pushed
        if text is not None:
            _write_card(folder / CARD_NAME, text)
        message = f"{report.source.model} pruned by {report.recipe.method} with emp-llm"
        done = upload(files | {CARD_NAME: folder / CARD_NAME}, {}, to, message)
    return replace(pushed, commit=done.commit, url=done.url, uploaded=done.uploaded, deleted=done.deleted)


def publish_finished(folder: Path, to: Destination) -> Pushed:
    """`publish` at the end of a pruning run. If the push fails, the message holds the command that repeats it."""
    options = [*(["--private"] if to.private else []), *(["--revision", to.branch] if to.branch else [])]
    options += ["--overwrite"] if to.overwrite else []
    again = f"repeat the push: emp-llm push {shlex.join([str(folder), to.name, *options])}"
    try:
        return publish(folder, to, Evidence())
    except UserError as error:
        raise UserError(f"{error} The checkpoint is complete in {folder}; {again}") from error
    except BaseException:
        logger.warning("the checkpoint is complete in %s; %s", folder, again)
        raise


def _check_against_manifest(folder: Path, manifest: Manifest) -> None:
    """Raise UserError for everything that `verify` finds in the files: sizes, hashes, weights that the manifest lacks."""
    findings = Findings()
    check_files(folder, manifest, findings)
    if findings.differences:
        more = len(findings.differences) - 1
        rest = f" ({more} more)" if more else ""
        raise UserError(
            f"{folder / findings.differences[0]}{rest} Nothing was pushed. To see all differences: emp-llm verify {folder}"
        )


def _check_names(paths: list[Path]) -> None:
    names = [path.name for path in paths]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UserError(f"{twice}: two files of this name would be pushed to the same folder; rename one.")


def _public_files(
    folder: Path,
    manifest: Manifest,
    report: RunReport,
    results: dict[Path, Results],
    scratch: Path,
) -> dict[str, Path]:
    """All files to push except the card and the plots, by their path in the repository.

    Args:
        report, results: in their public form.
        scratch: folder for the files that differ from those of the checkpoint.
    """
    files = {name: folder / name for name in manifest.files}
    entries = dict(manifest.files)
    norms = str(ACTIVATIONS_NAME)
    if norms in files:
        activations = Activations.load(files[norms])
        about = public(activations.about, *local_folder(activations.about))
        if about != activations.about:
            files[norms] = scratch / norms
            replace(activations, about=about).save(files[norms])
            entries[norms] = FileEntry(bytes=files[norms].stat().st_size, blake3=file_hash(files[norms]))
    files[MANIFEST_NAME] = scratch / MANIFEST_NAME
    msgspec.structs.replace(public(manifest), files=entries).save(files[MANIFEST_NAME])
    files[REPORT_NAME] = scratch / REPORT_NAME
    report.save(files[REPORT_NAME])
    for path, measured in results.items():
        name = f"{EXTRAS}/{path.name}"
        files[name] = scratch / name
        measured.save(files[name])
    return files


def _evaluated(folder: Path, results: dict[Path, Results]) -> list[EvaluatedModel]:
    """The models of some results files.

    In every suite one of them must be this checkpoint, so that no other model's numbers are mistaken for its own.
    """
    if not results:
        return []
    checkpoint = Checkpoint(folder)
    evaluated: dict[Path, EvaluatedModel] = {}
    for path, measured in results.items():
        if not measured.complete:
            raise UserError(f"--results {path}: that run has not finished; run its command again to resume it.")
        if path.suffix != ".json" or path.name.startswith("."):
            raise UserError(f"--results {path}: it is pushed beside the model, so its name must end in .json.")
        model = measured.made_by.model
        this = model.identity == identity_of(checkpoint)
        evaluated[path] = model_of_results(measured, this)
    for suite in by_suite(list(evaluated.values())):
        if not any(each.this for each in suite):
            path = next(path for path, each in evaluated.items() if each is suite[0])
            raise UserError(f"--results {path}: it is of other weights than those in {folder}. Evaluate this checkpoint.")
    return list(evaluated.values())


def _public_benches(folder: Path, benches: list[Bench]) -> list[Bench]:
    """Outputs of `bench` in their public form; UserError if one is of another model."""
    identity = identity_of(Checkpoint(folder)) if benches else None
    for bench in benches:
        if bench.identity != identity:
            raise UserError(f"--results: the bench of {bench.model} is of other weights than those in {folder}.")
    return [public(each, *local_folder(each.dense), *local_folder(each.sparse)) for each in benches]


def _plots(folder: Path, given: tuple[Path, ...]) -> list[Path]:
    for path in given:
        if not path.is_file() or path.suffix.lower() != ".png":
            raise UserError(f"--plot {path}: no such PNG file.")
    return [*sorted((folder / EXTRAS).glob("*.png")), *given]


def _card_text(
    folder: Path,
    to: Destination,
    own_report: RunReport,
    report: RunReport,
    evidence: Evidence,
    evaluated: list[EvaluatedModel],
    plots: list[Path],
    files: list[str],
    benches: list[Bench],
) -> str | None:
    """The card; None if the folder has a card that emp-llm did not write. `own_report` names the dense model's folder."""
    path = folder / CARD_NAME
    if path.exists() and not is_ours(path):
        logger.info("%s: not written by emp-llm, so it is pushed as it is. Remove it to get a model card.", path)
        return None
    origin = find_origin(own_report.source, evidence.base_model)
    return Card(to, report, origin, evaluated, [f"{EXTRAS}/{plot.name}" for plot in plots], benches).text(files)


def _write_card(path: Path, text: str) -> None:
    try:
        write_text(path, text)
    except OSError as error:
        raise UserError(f"{path}: the model card cannot be written ({reason(error)}).") from error
