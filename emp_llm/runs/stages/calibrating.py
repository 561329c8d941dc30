"""The stage that provides input norms: from a file, from an interrupted run, or by a calibration."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from emp_llm.architecture.architecture import Architecture
from emp_llm.checkpoint.checkpoint import Checkpoint
from emp_llm.common.ranks import ranks
from emp_llm.options.calibration import CalibrationOptions, Propagate
from emp_llm.records.source import CalibrationRecord, RecipeRecord
from emp_llm.runs.stages.run_models import RunModels

if TYPE_CHECKING:
    from emp_llm.architecture.layers import Layer
    from emp_llm.calibration.activations import Activations
    from emp_llm.calibration.data import CalibrationRows, CalibrationText
    from emp_llm.calibration.passes import Masker
    from emp_llm.execution.quantization import Quantization


@dataclass(frozen=True)
class PreparedCalibration:
    """Calibration data and how it is run. A bridge for runs that still have stages; the functions are those of `passes`."""

    data: "CalibrationText | CalibrationRows"
    options: CalibrationOptions
    propagate: Propagate
    quantization: "Quantization | None"
    blocks: str | None

    @property
    def text(self) -> Any:
        """The data, which is a text."""
        return self.data

    @property
    def of_text(self) -> bool:
        """Whether the data is text alone."""
        return hasattr(self.data, "tokens")

    @property
    def signature(self) -> dict[str, Any]:
        """Everything that the norms depend on, except the model."""
        from emp_llm.calibration.passes import calibration_signature

        return calibration_signature(self.data, self.options, self.propagate, self.quantization)

    def origin(self, about: CalibrationRecord) -> CalibrationRecord:
        """The origin of a fit to this data."""
        from emp_llm.calibration.passes import fit_origin

        return fit_origin(self.data, self.options, about)


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
        calibration: PreparedCalibration | None,
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
                from emp_llm.calibration.passes import delete_progress

                delete_progress(self._resume)  # the interrupted run may have ended before it did
        return self.norms is not None or self._calibration is None

    def run(self) -> None:
        from emp_llm.calibration.passes import calibrated, delete_progress, model_origin

        assert self._calibration is not None
        source, how = self._models.source, self._calibration
        about = model_origin(source.name, source.revision, self._checkpoint, how.quantization, self._pruned_by)
        model = self._models.dense(how.quantization)
        with self._models.stopwatch(self.name):
            self.norms = calibrated(
                model,
                how.data,
                self._layers(),
                how.options,
                about,
                masker=self._masker,
                blocks=how.blocks,
                resume=self._resume,
            )
        del model
        if how.quantization is not None:
            self._models.free()
        if ranks().main and self._keep is not None:
            self._keep(self.norms)
        delete_progress(self._resume)


def prepare_calibration(
    models: RunModels,
    architecture: Architecture,
    options: CalibrationOptions,
    propagate: Propagate = "dense",
    quantization: "Quantization | None" = None,
    blocks: str | None = None,
) -> PreparedCalibration:
    """Read and tokenise the calibration data, so that problems with it are reported before a model is loaded."""
    from emp_llm.calibration.data import calibration_data

    data = calibration_data(options, architecture, models.trust_remote_code, propagate)
    return PreparedCalibration(data, options, propagate, quantization, blocks)
