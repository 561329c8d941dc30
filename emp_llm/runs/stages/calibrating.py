"""The stage that provides input norms: from a file, from an interrupted run, or by a calibration."""

import logging
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from emp_llm.checkpoint.checkpoint import Checkpoint
from emp_llm.common.errors import UserError
from emp_llm.common.ranks import ranks
from emp_llm.models.architecture import Architecture
from emp_llm.options.calibration import CalibrationOptions, NormOptions, Propagate
from emp_llm.options.recipe import Recipe
from emp_llm.records.source import CalibrationRecord, RecipeRecord
from emp_llm.runs.stages.run_models import RunModels

if TYPE_CHECKING:
    from emp_llm.calibration.activations import Activations
    from emp_llm.calibration.block_pass import Masker
    from emp_llm.calibration.calibration import ForwardPasses
    from emp_llm.models.layers import Layer
    from emp_llm.models.placement import Quantization

logger = logging.getLogger(__name__)


def given_norms(options: NormOptions, recipe: Recipe) -> "Activations | None":
    """The activations of --activations, if given and needed. Options without effect are logged."""
    if not recipe.needs_activations:
        unused = _changed(options) if not recipe.fits else ["--activations"] if options.activations is not None else []
        if unused:
            verb = "has" if len(unused) == 1 else "have"
            logger.warning("warning: %s %s no effect: method %s needs no activations.", ", ".join(unused), verb, recipe.method)
        return None
    if options.activations is None:
        return None
    if (options.samples, options.seqlen) != (None, None) and not recipe.fits:
        logger.info("--samples and --seqlen have no effect: the norms of --activations are used.")
    from emp_llm.calibration.activations import Activations

    return Activations.load(options.activations)


def _changed(options: NormOptions) -> list[str]:
    """The flags of the norms' options that do not have their defaults; a switch that is off has the prefix "no-"."""
    values = {
        each.name: getattr(options, each.name) for each in fields(NormOptions) if getattr(options, each.name) != each.default
    }
    return [f"--{'no-' if value is False else ''}{name.replace('_', '-')}" for name, value in values.items()]


def warn_if_foreign(activations: "Activations", identity: str, folder: Path) -> None:
    """Warn if activations come from a model with other weights, whose shapes may be the same."""
    made_by = activations.about.identity
    if made_by is not None and made_by != identity:
        name = activations.about.model or "an unnamed model"
        logger.warning("warning: the activations come from other weights than those of %s (from %s).", folder, name)


class CalibrateStage:
    """Collects input norms.

    Args:
        models: loads the dense model.
        checkpoint: of the dense model.
        calibration: the text and the forward passes; None if no norms need to be collected.
        layers: returns the layers to observe.
        resume: folder for the progress, block by block.
        given: norms from a file of the user.
        restore: returns the norms collected by an interrupted run, or None; called on the first rank.
        keep: called with the collected norms on the first rank.
        masker: decides the masks with `propagate="pruned"`; `pruned_by` is its recipe, for the record.

    Attributes:
        norms: available when the stage is finished; None if none are needed.
    """

    name = "calibrate"

    def __init__(
        self,
        models: RunModels,
        checkpoint: Checkpoint,
        calibration: "ForwardPasses | None",
        layers: "Callable[[], list[Layer]]",
        resume: Path,
        *,
        given: "Activations | None" = None,
        restore: "Callable[[], Activations | None] | None" = None,
        keep: "Callable[[Activations], None] | None" = None,
        masker: "Masker | None" = None,
        pruned_by: RecipeRecord | None = None,
    ) -> None:
        self.norms = given
        self._models = models
        self._checkpoint = checkpoint
        self._calibration = calibration
        self._layers = layers
        self._resume = resume
        self._restore = restore
        self._keep = keep
        self._masker = masker
        self._pruned_by = pruned_by

    def finished(self) -> bool:
        if self.norms is None and self._calibration is not None and self._restore is not None:
            self.norms = ranks().share(self._restore() if ranks().main else None)
            if self.norms is not None:
                from emp_llm.calibration.calibration import delete_progress

                delete_progress(self._resume)  # the interrupted run may have ended before it did
        return self.norms is not None or self._calibration is None

    def run(self) -> None:
        from emp_llm.calibration.calibration import delete_progress
        from emp_llm.checkpoint.identity import identity_of

        assert self._calibration is not None
        source = self._models.source
        identity = ranks().share(identity_of(self._checkpoint) if ranks().main else None)
        name = source.name if source.revision is not None else source.folder.name
        about = CalibrationRecord(model=name, revision=source.revision, identity=identity, pruned_by=self._pruned_by)
        model = self._models.dense(self._calibration.quantization)
        with self._models.stopwatch(self.name):
            self.norms = self._calibration.run(model, self._checkpoint, self._layers(), about, self._masker, self._resume)
        del model
        if self._calibration.quantization is not None:
            self._models.free()
        if ranks().main and self._keep is not None:
            self._keep(self.norms)
        delete_progress(self._resume)


def may_reach_images(options: CalibrationOptions) -> bool:
    """Whether the norms may cover the vision tower: they come from a file, or from data with images."""
    from emp_llm.calibration.text_mix import has_images

    return getattr(options, "activations", None) is not None or has_images(options.text_name)


def prepare_calibration(
    models: RunModels,
    architecture: Architecture,
    options: CalibrationOptions,
    propagate: Propagate = "dense",
    quantization: "Quantization | None" = None,
    blocks: str | None = None,
) -> "ForwardPasses":
    """Read and tokenise the calibration data, so that problems with it are reported before a model is loaded."""
    from emp_llm.calibration.calibration import Calibration, CalibrationText
    from emp_llm.calibration.text_mix import has_images
    from emp_llm.models.blockwise import NOT_BY_BLOCKS
    from emp_llm.models.placement import max_context

    checkpoint = architecture.checkpoint
    if checkpoint.config.get("is_encoder_decoder") and (options.execution == "blocks" or propagate == "pruned"):
        raise UserError(NOT_BY_BLOCKS.format(checkpoint.folder))
    context = max_context(checkpoint.config)
    if not has_images(options.text_name):
        text = CalibrationText.prepare(options, models.tokenizer, context)
        return Calibration(text, options, propagate, quantization, blocks)
    from emp_llm.calibration.images.image_calibration import CalibrationRows, ImageCalibration
    from emp_llm.calibration.images.image_rows import check_pillow

    check_images(architecture, options, propagate)
    check_pillow()
    rows = CalibrationRows.prepare(options, models.processor, context)
    return ImageCalibration(rows, options, quantization, blocks)


def check_images(architecture: Architecture, options: CalibrationOptions, propagate: Propagate = "dense") -> None:
    """Raise UserError if a model cannot be calibrated on images in the way that the options ask for."""
    if not architecture.reads_images:
        raise UserError(
            f"{architecture.checkpoint.folder}: the model reads only text, and --calibration names a column of images. Leave "
            "out image=."
        )
    flags = {"--execution blocks": options.execution == "blocks", "--propagate pruned": propagate == "pruned"}
    for flag, given in flags.items():
        if given:
            raise UserError(
                f"{flag}: a calibration on images runs the whole model, because the vision tower stands before the first "
                "decoder block. Leave it out, or leave out image=."
            )
    if options.batch_size != CalibrationOptions.batch_size:
        logger.warning("warning: --batch-size has no effect: rows with images run one at a time.")
