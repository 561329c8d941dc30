"""`emp-llm heal`: pruned checkpoint + its dense model + text -> the same zeros, with kept
weights that were trained.
"""

import logging
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from emp_llm.cli import command
from emp_llm.common.declared import Flag
from emp_llm.common.errors import UserError
from emp_llm.common.paths import SELF_NAME
from emp_llm.common.progress import load_packages
from emp_llm.options.recipe import Heal
from emp_llm.options.shared import (
    CalibrationOptions,
    GivenOptions,
    LoadingOptions,
    ReportTo,
    Some,
    TrustRemoteCode,
)
from emp_llm.records.run_report import RunReport

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class HealOptions(LoadingOptions, CalibrationOptions):
    """The options of `heal` beside those of the recipe."""

    dense: Annotated[str, Flag("Folder or Hub id of the dense model.")]
    revision: Annotated[str | None, Flag("Branch, tag or commit of a dense model on the Hub.")] = (
        None
    )
    trust_remote_code: TrustRemoteCode = False
    output: Annotated[Path | None, Flag("Folder to write; default: PRUNED-healed.")] = None
    overwrite: Annotated[bool, Flag("Replace an existing checkpoint at the output.")] = False
    report_to: ReportTo = "none"


_MODELS = ("dense", "revision", "trust_remote_code", "device_map", "dtype")
_TEXT = ("calibration", "samples", "seqlen", "batch_size", "hidden_states", "seed")
_OWN = ("output", "overwrite", "report_to")


@command
def heal(
    folder: Annotated[
        Path, Flag("Pruned checkpoint.", argument=True, metavar="PRUNED", flag="--model")
    ],
    how: Heal,
    options: Annotated[HealOptions, Some(*_MODELS, *_TEXT, *_OWN)],
    given: GivenOptions,
) -> RunReport:
    """Train the kept weights of a pruned checkpoint on the dense model's next-token probabilities.
    Zeros stay zero.

    The text is that of a calibration; one sequence of sixteen is held out and chooses the step
    whose weights are kept. An interrupted run resumes. prune --heal does both in one run.

    Returns the report of the checkpoint, with the training as `healing`.
    """
    load_packages()
    from emp_llm.calibration.data import calibration_data, keep_generated
    from emp_llm.calibration.passes import calibration_signature
    from emp_llm.calibration.texts import calibration_corpora
    from emp_llm.checkpoint.checkpoint import (
        Checkpoint,
        check_agreement,
        config_digest,
        identity_of,
    )
    from emp_llm.checkpoint.output import OutputFolder
    from emp_llm.common.machine import Stopwatch, command_line, machine_name
    from emp_llm.common.ranks import ranks
    from emp_llm.healing.planning import (
        HealingPlan,
        check_healable,
        check_tracker,
        check_trains,
        in_steps,
        sequences_for,
    )
    from emp_llm.models.architecture import Architecture
    from emp_llm.models.local_model import find_model
    from emp_llm.models.one_model import OneModel
    from emp_llm.models.placement import max_context
    from emp_llm.pruning.counts import Chosen
    from emp_llm.pruning.report import log_warnings
    from emp_llm.pruning.scores import sign
    from emp_llm.pruning.writing import check_as_written, files_beside, read_manifest
    from emp_llm.records.base import samples_of, stage_records
    from emp_llm.records.run_report import read_report
    from emp_llm.runs import run as runs

    # Which models, and by which text.
    check_tracker(options.report_to)
    report = read_report(folder)
    manifest = read_manifest(folder)
    if report.recipe.heal is not None:
        raise UserError(
            f"{folder}: it is healed already. Give the checkpoint before it was healed."
        )
    source = find_model(options.dense, options.revision, options.trust_remote_code)
    dense = Checkpoint(source.folder)
    corpora = calibration_corpora(
        options.text_name, max_context(dense.config), options.samples, options.seqlen
    )
    recipe = report.recipe.but(heal=in_steps(how, corpora))
    pruned = Checkpoint(folder)
    if manifest.source.identity not in (None, identity_of(dense)):
        raise UserError(
            f"--dense {options.dense}: its weights are not those that were pruned. "
            f"Give {report.source.model}."
        )
    check_as_written(pruned)
    models = OneModel(options.device_map, options.dtype, options.trust_remote_code)
    architecture = Architecture.of_checkpoint(
        dense, recipe.targets.blocks, options.trust_remote_code
    )
    targets = architecture.targets_of(recipe.targets)
    chosen = Chosen(architecture, targets, architecture.coverage(targets))
    named = folder if folder.name not in ("", "..") else folder.resolve()
    path = options.output or named.with_name(f"{named.name}-healed")
    out = OutputFolder(path, [folder, source.folder], pruned.output_bytes, options.overwrite)
    check_healable(dense.config, targets)
    check_trains(samples_of(corpora), corpora[0].seqlen or 0)
    timed = how.minutes is not None
    if timed:
        left = ranks().first(lambda: out.left)
        again = options.overwrite
        recipe = runs.count_steps(chosen, recipe, options, models, pruned, corpora, left, again)
    assert recipe.heal is not None
    wanted = sequences_for(recipe.heal.steps)
    text = calibration_data(options, architecture, models, training=wanted)
    models.free()
    made_of = {"recipe": sign(recipe)} | calibration_signature(text.for_training, options)
    made_of |= {"dtype": options.dtype, "device_map": options.device_map}
    made_of["seed"] = options.seed  # of the order of the sequences
    if timed:
        made_of["minutes"] = how.minutes
    check_agreement({"ids": made_of["ids"]} | made_of, pruned=pruned, dense=dense)
    run = runs.Run(
        source=source,
        recipe=recipe,
        chosen=chosen,
        options=options,
        text=text,
        path=path,
        models=models,
        stopwatch=Stopwatch(),
        held_out=text.held_out,
        signature={
            "heals": pruned.states,
            "configs": [config_digest(folder), config_digest(source.folder)],
            **made_of,
        },
    )

    # Train, and write.
    with out:
        out.begin(run.signature, machine_name())
        kept = out.get("healing_plan", HealingPlan)
        shape = text.tokens.shape
        plan = runs.choose_healing(chosen, recipe, options, models, shape, timed, kept)
        if "batch_size" in given and plan.by == "model" and plan.device == "cpu":
            logger.warning(
                "warning: --batch-size has no effect on a CPU: healing takes one sequence at a "
                "time there."
            )
        if ranks().main:  # an interrupted run may have healed some of the shards
            shards = [Path(shard.name) for shard in pruned.shards]
            names = [*shards, *pruned.side_files(), *files_beside(folder, manifest)]
            for name in dict.fromkeys(names):
                copy = out.files / name
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(folder / name, copy)
            keep_generated(out.files / SELF_NAME, text)
        ranks().broadcast(None)  # all of them read the copy
        healing = runs.heal(run, out, plan, report, options.report_to)
        before = runs.check(run, source.folder)
        models.free()
        report.check = runs.check_pruned(run, out.files, before)
        healing.command = command_line()
        report.recipe = recipe
        report.unchecked = None if text.held_out is not None else runs.why_unchecked(run)
        report.evaluation = None
        report.stages |= stage_records(run.stopwatch.record)
        if report.sizes is not None:
            report.sizes.mask = 0
        norms = None if manifest.activations is None else manifest.activations.norms
        runs.write_records(run, out.files, report, manifest.source.identity, norms, {})
        out.complete()
    log_warnings(report.warnings)
    logger.info("written to %s (%.1f s)", path, report.stages["heal"].seconds)
    return report


def show(report: RunReport) -> None:
    """Print the divergence before and after, and the perplexity of held-out text."""
    from emp_llm.reporting.run_tables import check_lines, healing_lines

    print("\n".join([*healing_lines(report), *check_lines(report)]))
