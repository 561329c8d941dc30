"""Input norms from a file of the user, in place of a calibration. Imports no torch before a file
is read.
"""

import logging
from collections.abc import Collection, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from emp_llm.calibration.texts import generates
from emp_llm.checkpoint.checkpoint import Checkpoint, config_digest
from emp_llm.checkpoint.output import OutputFolder, describe_difference
from emp_llm.common.errors import UserError, count_of
from emp_llm.common.machine import Stopwatch, free_memory
from emp_llm.common.paths import REPORT_NAME
from emp_llm.common.ranks import ranks
from emp_llm.healing.planning import HealingPlan, plan_healing
from emp_llm.models.architecture import Target
from emp_llm.models.layers import Layer
from emp_llm.models.local_model import LocalModel
from emp_llm.models.one_model import OneModel
from emp_llm.models.placement import Quantization
from emp_llm.options.recipe import Recipe
from emp_llm.options.shared import (
    CalibrationOptions,
    GivenOptions,
    NormOptions,
    QuantizationOptions,
)
from emp_llm.pruning.counts import Chosen
from emp_llm.pruning.scores import as_recorded, sign
from emp_llm.pruning.writing import criterion_source, keep_criterion, write_manifest
from emp_llm.records.base import CalibrationRecord, Corpus, ModelIdentity, samples_of
from emp_llm.records.evaluation import CheckRecord
from emp_llm.records.run_report import RunReport

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from emp_llm.calibration.activations import Activations
    from emp_llm.calibration.data import CalibrationText
    from emp_llm.calibration.passes import Masker
    from emp_llm.records.evaluation import PerplexityRecord
    from emp_llm.records.run_report import HealingRecord

logger = logging.getLogger(__name__)


_OF_NORMS = tuple(field.name for field in fields(NormOptions))
_OF_TEXT = {"calibration", "samples", "seqlen", "seed"}
_OF_PASSES = tuple(field.name for field in fields(QuantizationOptions))  # of prune


def read_given_norms(
    options: NormOptions, recipe: Recipe, given: GivenOptions, checks: bool = False
) -> "Activations | None":
    """The activations of --activations, if given and needed. Options without effect, of the
    `given` ones, are logged.

    Args:
        checks: a text that is given checks the run, also if the recipe needs none.
    """
    if checks and options.calibration is not None:
        given = GivenOptions(given - _OF_TEXT)
    if not recipe.needs_activations:
        unused = _flags(
            options,
            given & ({"activations", "execution"} if recipe.moves else {*_OF_NORMS, *_OF_PASSES}),
        )
        if unused:
            verb = "has" if len(unused) == 1 else "have"
            logger.warning(
                "warning: %s %s no effect: method %s needs no activations.",
                ", ".join(unused),
                verb,
                recipe.method,
            )
        return None
    if options.activations is None:
        return None
    if not recipe.moves and generates(options.text_name):
        raise UserError(
            "--calibration self: --activations holds the norms of a text already. "
            "Leave out one of them."
        )
    unused = (
        [] if recipe.moves else _flags(options, given & {*_OF_NORMS, *_OF_PASSES} - {"activations"})
    )
    if unused:
        logger.info(
            "no effect, because the norms of --activations are used: %s.", ", ".join(unused)
        )
    from emp_llm.calibration.activations import Activations

    return Activations.load(options.activations)


def _flags(options: NormOptions, names: Set[str]) -> list[str]:
    """The flags of options; a switch that is off has the prefix "no-"."""
    ordered = [name for name in (*_OF_NORMS, *_OF_PASSES) if name in names]
    return [
        f"--{'no-' if getattr(options, name) is False else ''}{name.replace('_', '-')}"
        for name in ordered
    ]


def warn_if_foreign(activations: "Activations", identity: str, folder: Path) -> None:
    """Warn if activations come from a model with other weights or another config, whose shapes may
    be the same.
    """
    about = activations.about
    model = ModelIdentity(identity=identity, sha256_of_config=config_digest(folder))
    words = None if about.identity is None else about.difference(model)
    if words is not None:
        name = about.model or "an unnamed model"
        logger.warning("warning: the activations come from %s %s (from %s).", words, folder, name)


# A run: a dense model, what goes from it, and the text that it reads. A run is complete when it
# is made, and never changes; its steps are functions of it.
#
# Torch is imported when a step needs it: a run without a text decides and writes without it.


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a run works with.

    Attributes:
        source: the dense model.
        recipe: what goes from it.
        chosen: the weights that the recipe chooses.
        options: of the text, and of the passes over it.
        text: None: the run reads none.
        path: of the output.
        models: loads models, and holds one.
        stopwatch: times the steps.
        quantization: of the dense model while it is calibrated and checked.
        held_out: the sequences that the run is checked on, int64, shape (sequences, length); None:
            there is no check.
        by_blocks: the check runs the model block by block alone.
        signature: what the bytes of the output depend on, as JSON.
    """

    source: LocalModel
    recipe: Recipe
    chosen: Chosen
    options: CalibrationOptions
    text: "CalibrationText | None"
    path: Path
    models: OneModel
    stopwatch: Stopwatch
    quantization: Quantization | None = None
    held_out: "Tensor | None" = None
    by_blocks: bool = False
    signature: dict[str, Any] = field(default_factory=dict)

    @property
    def targets(self) -> list[Target]:
        """The weights that the recipe chooses."""
        return self.chosen.targets

    @property
    def checkpoint(self) -> Checkpoint:
        """The files of the dense model."""
        return self.chosen.checkpoint

    @property
    def data(self) -> "CalibrationText":
        """The text of a run that reads one."""
        assert self.text is not None
        return self.text

    @cached_property
    def origin(self) -> CalibrationRecord:
        """The part of the origin of norms and of fitted weights that concerns the model. Hashes its
        weights, once: a collective call.
        """
        from emp_llm.calibration.passes import model_origin

        source = self.source
        return model_origin(source.name, source.revision, self.checkpoint, self.quantization)

    @cached_property
    def in_memory(self) -> bool:
        """Whether the loaded weights are the stored ones, and can be pruned and restored; offloaded
        ones are not.
        """
        from emp_llm.pruning.updates import holds_stored_weights

        if holds_stored_weights(dense_model(self), self.checkpoint, self.targets):
            return True
        logger.info(
            "the loaded weights differ from the stored ones; each point is written to a temporary "
            "checkpoint."
        )
        self.models.free()
        return False


def dense_model(run: Run, by_blocks: bool = False) -> "PreTrainedModel":
    """The dense model. Callers keep no reference to it.

    Args:
        by_blocks: it runs block by block alone.
    """
    return model_in(run, run.source.folder, by_blocks)


def model_in(run: Run, folder: Path, by_blocks: bool = False) -> "PreTrainedModel":
    """The model in a folder, dense or pruned, placed like the dense one."""
    if by_blocks:  # transformers would write to disk what it puts together or dequantises
        layers = [target.layer for target in run.chosen.architecture.select("all-linear")]
        quantised = "quantization_config" in run.checkpoint.config
        by_blocks = not quantised and all(layer.expert is None for layer in layers)
    return run.models.get(folder, run.quantization, by_blocks)


def calibrate(
    run: Run,
    layers: list[Layer],
    statistics: Collection[str],
    resume: Path,
    masker: "Masker | None" = None,
    *,
    file: Path | None = None,
    out: OutputFolder | None = None,
) -> "Activations":
    """The norms of the inputs of layers, over the text, or those of an interrupted run. A
    collective call.

    Args:
        statistics: names of further statistics.
        resume: folder for the progress. It is deleted once the norms are in `file`; without one,
            by the caller.
        masker: of a pruned propagation; None: dense.
        file: of unfinished work, for the norms; None: they are not kept.
        out: the output that notes the file, if one does.
    """
    from emp_llm.calibration.activations import own_norms
    from emp_llm.calibration.passes import collect_norms, delete_progress

    norms = None
    if file is not None and (out is None or out.has("calibrated", file, run.stopwatch)):
        norms = ranks().first(partial(own_norms, file, run.targets))
    if norms is None:
        options = run.options
        pruned_by = None if masker is None else as_recorded(run.recipe)
        about = msgspec.structs.replace(run.origin, pruned_by=pruned_by)
        dense = dense_model(run, by_blocks=masker is not None)
        with run.stopwatch("calibrate"):
            norms = collect_norms(
                dense,
                run.data,
                layers,
                about,
                options,
                statistics=statistics,
                masker=masker,
                blocks=run.recipe.targets.blocks,
                resume=resume if options.resumable_calibration else None,
            )
        del dense
        if run.quantization is not None:
            run.models.free()
        if file is not None:
            keep_norms(run, norms, file, out)
    if file is not None:
        delete_progress(resume)
    return norms


def keep_norms(run: Run, norms: "Activations", file: Path, out: OutputFolder | None) -> None:
    """Save norms for resuming; `file` and `out` are those of `calibrate`."""
    if ranks().main:
        norms.save(file)
    if out is not None:
        out.keep("calibrated", file, run.stopwatch)


def check(run: Run, folder: Path) -> "PerplexityRecord | None":
    """The perplexity of the held-out sequences by the model in a folder, which stays in memory;
    None if there are none, or it has none. A failure is logged, and ends no run. A collective call.
    """
    if run.held_out is None:
        return None
    from emp_llm.evaluation.evaluate import measure_held_out

    with run.stopwatch("check"):
        return measure_held_out(
            lambda: model_in(run, folder, run.by_blocks), run.checkpoint.config, run.held_out
        )


def check_pruned(run: Run, folder: Path, dense: "PerplexityRecord | None") -> CheckRecord | None:
    """The check of the pruned model in a folder, after which no model is in memory; None if `dense`
    is, or fails. A collective call.
    """
    if dense is None:
        return None
    pruned = check(run, folder)
    run.models.free()
    return None if pruned is None else CheckRecord(text=run.data.name, dense=dense, pruned=pruned)


def why_unchecked(run: Run) -> str:
    """What a check of a run without held-out sequences would need."""
    if run.text is None:
        return "give --calibration"
    if all(corpus.generate for corpus in run.text.corpora):
        return "the model writes no text beyond the calibration; use emp-llm evaluate"
    return "the text ends with the calibration; give fewer --samples"


def choose_healing(
    chosen: Chosen,
    recipe: Recipe,
    options: CalibrationOptions,
    models: OneModel,
    shape: Sequence[int],
    timed: bool,
    kept: HealingPlan | None = None,
) -> HealingPlan:
    """How a model heals.

    Args:
        shape: number and length of the sequences.
        timed: whether minutes have chosen the steps of the healing, or will.
        kept: the plan of an interrupted run.

    Raises:
        UserError: memory does not suffice, or the minutes are of a healing block by block.
    """
    assert recipe.heal is not None
    plan = plan_healing(
        chosen.checkpoint,
        chosen.targets,
        recipe,
        recipe.heal,
        device_map=models.device_map,
        length=shape[1],
        samples=shape[0],
        batch_size=options.batch_size,
        hidden_states=options.hidden_states,
        kept=kept,
    )
    if timed and plan.by == "blocks":
        raise UserError(
            f"--heal-minutes: healing goes {plan.words()}. Give --heal-steps, which are those of "
            "each block."
        )
    return plan


def count_steps(
    chosen: Chosen,
    recipe: Recipe,
    options: CalibrationOptions,
    models: OneModel,
    pruned: Checkpoint,
    corpora: Sequence[Corpus],
    left: dict[str, Any],
    overwrite: bool,
) -> Recipe:
    """The recipe with as many steps of healing as a run does in its minutes. A collective call.

    Args:
        pruned: what trains. The dense model takes as long.
        corpora: the text; all have the same seqlen.
        left: the signature of an interrupted run. If it is of the same run, its steps are kept.
        overwrite: discard other work.

    Raises:
        UserError: it heals block by block, or the minutes do not suffice for a step.
    """
    from emp_llm.healing.training import steps_of_minutes

    heal = recipe.heal
    assert heal is not None
    assert heal.minutes is not None
    length = corpora[0].seqlen or 0
    # Work of another run, or none of ours, is refused later unless it may be discarded.
    with suppress(AttributeError, LookupError, TypeError, ValueError):
        work = left | (left.get("activations") or {})
        if work.get("minutes") == heal.minutes:
            steps = int(work["recipe"]["heal"]["steps"])
            kept = recipe.but(heal=replace(heal, steps=steps, minutes=None))
            work["seqlen"] = (work.get("texts") or [work["text"]])[0].get("seqlen")
            same = {
                "recipe": sign(kept),
                "seqlen": length,
                "dtype": models.dtype,
                "device_map": models.device_map,
            }
            differs = pruned.states not in (work.get("heals"), work.get("source", {}).get("files"))
            differs |= describe_difference({key: work.get(key) for key in same}, same) is not None
            if not (differs and overwrite):
                return kept
    shape = samples_of(corpora), length
    plan = choose_healing(chosen, recipe, options, models, shape, timed=True)
    steps = steps_of_minutes(
        heal.minutes,
        pruned,
        chosen.checkpoint.folder,
        recipe,
        heal,
        plan,
        length,
        dtype=models.dtype,
        trust_remote_code=models.trust_remote_code,
    )
    free_memory()  # for the plan of the training
    logger.info("--heal-minutes %g: %s.", heal.minutes, count_of(steps, "step"))
    return recipe.but(heal=replace(heal, steps=steps, minutes=None))


def heal(
    run: Run, out: OutputFolder, plan: HealingPlan, report: RunReport, report_to: str
) -> "HealingRecord":
    """Train the weights of the pruned checkpoint in the work folder, and put that into the report;
    a tracker (`report_to`) gets its numbers. A collective call.
    """
    from emp_llm.healing.training import heal_folder, healing_warnings

    assert run.recipe.heal is not None
    with run.stopwatch("heal"):
        report.healing = heal_folder(
            out,
            run.source.folder,
            run.recipe,
            run.recipe.heal,
            run.data,
            run.origin,
            plan,
            dtype=run.models.dtype,
            trust_remote_code=run.models.trust_remote_code,
            batch_size=run.options.batch_size,
            seed=run.options.seed,
            report_to=report_to,
        )
    report.warnings += healing_warnings(report.healing)
    return report.healing


def write_records(
    run: Run,
    files: Path,
    report: RunReport,
    identity: str | None,
    norms: str | None,
    hashes: dict[str, str],
) -> None:
    """Write the report and the manifest of a checkpoint, whose other files are written.

    Args:
        identity: of the dense model; None if it is unknown.
        norms: digest of those that scored; None: no norms did.
        hashes: BLAKE3 of files by name, as far as known.
    """
    if ranks().main:
        report.save(files / REPORT_NAME)
        keep_criterion(files, criterion_source(run.recipe))
        write_manifest(files, run.checkpoint, identity, report.recipe, norms, hashes)
