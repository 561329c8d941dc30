"""The run of `calibrate`: its one stage, and the file that it writes."""

from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING

from emp_llm.checkpoint.checkpoint import Checkpoint
from emp_llm.common.ranks import ranks
from emp_llm.common.timing import Stopwatch
from emp_llm.hub.local_model import find_model
from emp_llm.models.architecture import Architecture, check_calibrated
from emp_llm.models.layers import Layer
from emp_llm.models.placement import parse_device_map, quantization_of
from emp_llm.options.commands import CalibrateOptions
from emp_llm.runs.stages.calibrating import CalibrateStage, check_images, may_reach_images, prepare_calibration
from emp_llm.runs.stages.run_models import RunModels
from emp_llm.storage.output.output_file import OutputFile, check_output_file

if TYPE_CHECKING:
    from emp_llm.calibration.activations import Activations


class CalibrateRun:
    """One calibration, as a context: `with run: run_stages([run.calibrate])`.

    Args:
        options: of the command.

    Raises:
        UserError: the model, the text or the output does not fit the options.
    """

    calibrate: CalibrateStage

    def __init__(self, options: CalibrateOptions) -> None:
        parse_device_map(options.device_map)
        self._options = options
        self._quantization = quantization_of(options.load_in_8bit, options.load_in_4bit)
        check_output_file(options.output, options.overwrite)
        self._source = find_model(options.model, options.revision, options.trust_remote_code)
        self._checkpoint = Checkpoint(self._source.folder)
        self._architecture = Architecture.of_checkpoint(self._checkpoint, options.blocks, options.trust_remote_code)
        self._layers = self._chosen_layers(options, self._architecture)
        self._stack = ExitStack()

    def _chosen_layers(self, options: CalibrateOptions, architecture: Architecture) -> list[Layer]:
        """The layers of the options; with images, all linear layers include those of the vision tower."""
        selected = architecture.select(options.targets, options.ignore, options.tower)
        chosen = [target for target in selected if target.layer.kind != "embedding"]
        architecture.coverage(chosen, options.tower).check(options.targets, options.allow_partial)
        with_images = may_reach_images(options)
        if with_images:
            check_images(architecture, options)
            if (options.targets, options.tower) == ("all-linear", "language"):
                chosen += architecture.select("all-linear", options.ignore, "vision")
        layers = [target.layer for target in chosen]
        check_calibrated(layers, with_images)
        return layers

    @property
    def norms(self) -> "Activations":
        """The norms, when the stage is finished."""
        assert self.calibrate.norms is not None
        return self.calibrate.norms

    def __enter__(self) -> "CalibrateRun":
        options = self._options
        models = RunModels(self._source, options, options.trust_remote_code, Stopwatch())
        calibration = prepare_calibration(models, self._architecture, options, "dense", self._quantization, options.blocks)
        self._output = self._stack.enter_context(OutputFile(options.output))
        self.calibrate = CalibrateStage(
            models, self._checkpoint, calibration, lambda: self._layers, self._output.progress, keep=self._keep
        )
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._stack.__exit__(kind, error, traceback)

    def _keep(self, norms: "Activations") -> None:
        norms.save(self._options.output)
        if ranks().main:
            self._output.publish()
