"""`emp-llm verify`: a pruned checkpoint is checked by slower and simpler code than the code that
wrote it.
"""

import logging
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from emp_llm.checkpoint.checkpoint import Checkpoint
from emp_llm.cli import command
from emp_llm.common.declared import Flag
from emp_llm.common.errors import UserError, count_of
from emp_llm.common.paths import (
    ACTIVATIONS_NAME,
    CRITERION_NAME,
    MANIFEST_NAME,
    PACK_NAME,
    REPORT_NAME,
    SUMS_NAME,
)
from emp_llm.models.local_model import find_model
from emp_llm.options.criterion import criterion_origin
from emp_llm.options.recipe import Given, Own, Recipe, Score
from emp_llm.options.shared import TrustRemoteCode
from emp_llm.records.run_report import Manifest

if TYPE_CHECKING:
    from emp_llm.calibration.activations import Activations
    from emp_llm.pruning.verification import Findings

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    """Options of `verify`."""

    folder: Annotated[
        Path,
        Flag("Output folder of a finished prune.", argument=True, metavar="MODEL", flag="--model"),
    ] = field(kw_only=False)
    criterion: Annotated[
        Any, Flag("Your criterion that decided the masks, MODULE:FUNCTION or FILE.py:FUNCTION.")
    ] = None
    scores: Annotated[Any, Flag("Your scores that decided the masks: a safetensors file.")] = None
    masks: Annotated[
        Path | None,
        Flag("Pruned folder, whose zeros this one must have; then it needs no manifest."),
    ] = None
    source: Annotated[
        str | None, Flag("Folder or Hub id of the dense model, to compare bytes and masks as well.")
    ] = None
    activations: Annotated[
        Path | None, Flag("Activations file of the run; default: the one in the folder.")
    ] = None
    blocks: Annotated[
        str | None, Flag("Name of the list of decoder blocks; default: the run's.")
    ] = None
    revision: Annotated[str | None, Flag("Branch, tag or commit of a Hub model.")] = None
    trust_remote_code: TrustRemoteCode = False
    all_rows: Annotated[
        bool,
        Flag(
            "Decide the masks of all rows by the slow reference; default: of one row in sixteen, "
            "and the others by the compiled kernel."
        ),
    ] = False


@command
def verify(options: VerifyOptions) -> "Findings":
    """Check a pruned checkpoint: sizes and hashes of all files, and with --source every byte and
    every mask. It only reads.

    Of a checkpoint that was trained after it was pruned, --source compares the masks alone; --masks
    does so without the dense model.

    The exit code is 1 if anything differs.

    Returns the differences, one sentence each, and the number of checked things.

    Raises:
        UserError: the folder is no finished output, or source or activations are not those of its
            run.
    """
    from emp_llm.pruning.verification import Findings, check_files
    from emp_llm.pruning.writing import read_manifest

    for name in ("activations", "criterion", "scores", "blocks", "revision", "all_rows"):
        if getattr(options, name) not in (None, False) and options.source is None:
            flag = name.replace("_", "-")
            raise UserError(
                f"--{flag} is for a comparison with the dense model; name that with --source."
            )
    if options.criterion is not None and options.scores is not None:
        raise UserError("--criterion and --scores both define the scores; give only one.")
    if (options.folder / PACK_NAME).is_file():
        Checkpoint(options.folder)  # which says how to unpack it
    findings = Findings()
    manifest = None
    if (
        options.masks is None
        or options.source is not None
        or (options.folder / MANIFEST_NAME).is_file()
    ):
        manifest = read_manifest(options.folder)
        check_files(options.folder, manifest, findings)
        if _is_trained(options.folder):
            logger.info(
                "%s: its kept weights were trained after it was pruned, so they may differ from "
                "the dense model's; a comparison checks what was removed.",
                options.folder,
            )
    try:
        pruned = Checkpoint(options.folder)
    except UserError as error:
        findings.differences.append(str(error))
        return findings
    findings.checked["tensors"] += len(pruned.tensors)
    if options.masks is not None:
        _check_masks_of(options.masks, pruned, findings)
    if options.source is not None and manifest is not None:
        _check_against(options.source, options, pruned, manifest, findings)
    return findings


def _is_trained(folder: Path) -> bool:
    """Whether the report of a folder says that it was trained after it was pruned."""
    from emp_llm.records.run_report import read_report

    return (folder / REPORT_NAME).is_file() and read_report(folder).trained


def _check_masks_of(masks: Path, pruned: Checkpoint, findings: "Findings") -> None:
    """Check that every zero in the targets of a pruned folder is zero."""
    from emp_llm.models.architecture import Architecture
    from emp_llm.models.masks import Masks
    from emp_llm.pruning.verification import check_zeros
    from emp_llm.records.run_report import read_report

    report = read_report(masks)
    units = report.recipe.structure
    if units is not None and not units.keep_shapes:
        raise UserError(
            f"--masks {masks}: it lacks whole {units.units}, and has no zeros. "
            "Compare with the dense model: --source"
        )
    scope = report.recipe.targets
    try:
        targets = Architecture.of_checkpoint(pruned, scope.blocks).targets_of(scope)
    except UserError as error:
        findings.differences.append(str(error))
        return
    check_zeros(pruned, targets, Masks.load(masks), findings)


def _check_against(
    source: str,
    options: VerifyOptions,
    pruned: Checkpoint,
    manifest: Manifest,
    findings: "Findings",
) -> None:
    """Compare bytes and masks with those of the dense model."""
    from emp_llm.models.architecture import Architecture, healed_tensors
    from emp_llm.pruning import verification as check
    from emp_llm.pruning.scores import Scores

    dense = Checkpoint(find_model(source, options.revision, options.trust_remote_code).folder)
    asked = manifest.recipe
    _check_used(options, asked)
    trained = _is_trained(pruned.folder)
    if asked.moves and not trained:
        state = "refitted" if asked.update is not None and asked.update.refit else "updated"
        state = state if asked.heal is None else "healed"
        logger.info(
            "%s is %s: its kept weights may differ from the source, and what was removed is "
            "checked.",
            pruned.folder,
            state,
        )
    if asked.structure is not None:
        if manifest.source.identity is not None:
            check.check_source(dense, manifest)
        _check_units(dense, options, pruned, manifest, findings)
        return
    norms = _norms(options, manifest)
    recipe = asked.but(score=_with_given_scores(asked.score, options))
    blocks = options.blocks or recipe.targets.blocks
    if manifest.source.identity is None:
        from emp_llm.models.loading import build_skeleton

        logger.info(
            "save_pretrained wrote %s: its tokenizer and other files are not compared with "
            "the source.",
            pruned.folder,
        )
        model = build_skeleton(dense.folder, options.trust_remote_code)
        architecture = Architecture.of_model(dense, model, blocks)
        try:
            names = check.names_in_saved(
                model, architecture, Architecture.of_model(pruned, model, blocks)
            )
            if not trained:
                check.check_config(dense.folder, pruned.folder, options.trust_remote_code, findings)
        except UserError as error:
            findings.differences.append(str(error))
            return
    else:
        check.check_source(dense, manifest)
        architecture = Architecture.of_checkpoint(
            dense, blocks, options.trust_remote_code, names_suffice=norms is None
        )
        names = {name: name for name in dense.tensors}
        check.check_headers(dense, pruned, findings)
    targets = architecture.targets_of(recipe.targets)
    healed = healed_tensors(architecture, recipe)
    tensors = check.check_tensors(dense, pruned, names, targets, findings, healed, trained)
    if any(target.matrix.stored.name not in tensors for target in targets):
        return
    try:
        scores = Scores(dense, targets, recipe)
        if recipe.needs_activations:
            if norms is None:
                raise UserError(
                    f"{options.folder / MANIFEST_NAME}: its criterion needs "
                    "activations, and it names none."
                )
            scores = scores.with_activations(norms)
        check.check_masks(tensors, scores, findings, options.all_rows, trained)
    except UserError:
        raise
    except (KeyError, TypeError, ValueError, AssertionError) as error:
        path = options.folder / MANIFEST_NAME
        raise UserError(
            f"{path}: it does not record how the masks were decided ({error})."
        ) from error


def _check_used(options: VerifyOptions, recipe: Recipe) -> None:
    """Raise UserError for an option of scores or masks that the run's recipe does not use."""
    units = recipe.structure is not None
    given = isinstance(recipe.score, Own | Given)  # whose needs are not known by name
    used = {
        "activations": recipe.name == "wanda" if units else given or recipe.needs_activations,
        "criterion": isinstance(recipe.score, Own),
        "scores": isinstance(recipe.score, Given),
        "all_rows": not units,
    }
    for name, is_used in used.items():
        if getattr(options, name) not in (None, False) and not is_used:
            flag = name.replace("_", "-")
            how = f"--method {recipe.method}"
            if recipe.structure is not None:
                how = f"--structure {recipe.structure.units} {how}"
            raise UserError(
                f"--{flag} has no effect: {options.folder} was pruned by {how}. Leave it out."
            )


def _check_units(
    dense: Checkpoint,
    options: VerifyOptions,
    pruned: Checkpoint,
    manifest: Manifest,
    findings: "Findings",
) -> None:
    """Compare a checkpoint without some heads or neurons with the dense model."""
    from emp_llm.models.architecture import Architecture
    from emp_llm.models.loading import build_skeleton
    from emp_llm.records.run_report import read_report
    from emp_llm.structure.prune_structure import unit_model
    from emp_llm.structure.writing import check_shapes, check_units, read_tensors

    recipe = manifest.recipe
    blocks = options.blocks or recipe.targets.blocks
    report = read_report(options.folder)
    record = report.structure
    if recipe.structure is None or record is None:
        raise UserError(
            f"{options.folder}: its report names no heads or neurons. Download it again."
        )
    model = unit_model(dense.folder, recipe.structure, blocks, options.trust_remote_code)
    if recipe.name not in ("magnitude", "wanda"):
        feature: Any = read_tensors(options.folder / SUMS_NAME).get
    else:
        norms = _norms(options, manifest)
        feature = None if norms is None else norms.of
    check_units(model, pruned, recipe, record, feature, findings, report.trained)
    try:
        skeleton = build_skeleton(pruned.folder, options.trust_remote_code)
        check_shapes(Architecture.of_model(pruned, skeleton, blocks), findings)
    except UserError as error:
        findings.differences.append(str(error))


def _with_given_scores(score: Score, options: VerifyOptions) -> Score:
    """The scores of a manifest, with the criterion or file that the user gives for the one that it
    names. No code is run by that name.
    """
    from emp_llm.pruning.scores import GivenScores

    if isinstance(score, Own):
        if options.criterion is None:
            raise UserError(_how_to_give(score, options.folder))
        given = replace(score, function=options.criterion, named=None, source=None)
        if criterion_origin(given.criterion)[1] != score.source:
            logger.warning(
                "warning: the file of the criterion %s, or one that it reads, has changed since "
                "the masks were decided.",
                score.function,
            )
        return given
    if not isinstance(score, Given):
        return score
    if options.scores is None:
        return score  # which cannot score
    if GivenScores(options.scores, []).digest != score.digest:
        raise UserError(f"--scores {options.scores}: not the scores that decided these masks.")
    return replace(score, scores=options.scores, digest=None)


def _how_to_give(score: Own, folder: Path) -> str:
    """How to give a criterion of the user's own to `verify`."""
    kept = folder / CRITERION_NAME
    name = score.method
    if kept.is_file():
        return (
            f"the criterion {name} decided the masks. Add --criterion {kept}:{name}: this runs the "
            "whole file, so read it first."
        )
    if str(score.function).startswith("__main__:"):
        return (
            f"the criterion {name} decided the masks, and its function was in no file. Write it to "
            f"one, and add --criterion FILE.py:{name}."
        )
    return f"the criterion {name} decided the masks; add --criterion {score.function}."


def _norms(options: VerifyOptions, manifest: Manifest) -> "Activations | None":
    """The norms that decided the masks; None if the criterion needs none."""
    from emp_llm.calibration.activations import Activations
    from emp_llm.pruning.verification import check_activations

    if manifest.activations is None:
        return None
    path: Path = options.activations or options.folder / ACTIVATIONS_NAME
    if options.activations is None and not path.is_file():
        raise UserError(
            f"{options.folder}: it does not hold the norms that decided its masks. Give their "
            "file: --activations FILE"
        )
    norms = Activations.load(path)
    check_activations(norms, manifest, str(path))
    return norms


def show(result: "Findings") -> None:
    """Print the differences; exit with 1 if there are any."""
    for sentence in result.differences:
        print(sentence)
    checked = ", ".join(f"{number:,} {things}" for things, number in result.checked.items())
    print(f"{count_of(len(result.differences), 'difference')}; checked {checked}.")
    if result.differences:
        raise SystemExit(1)
