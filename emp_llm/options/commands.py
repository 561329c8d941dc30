"""The options of each command, combined from the topics."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from emp_llm.common.errors import UserError
from emp_llm.options.base import LoudnessOptions, Opt, Options
from emp_llm.options.calibration import CalibrationOptions
from emp_llm.options.model import LoadingOptions, ModelOptions, QuantizationOptions
from emp_llm.options.output import OutputOptions
from emp_llm.options.recipe import Tower, check_targets

METHODS = "emp-wanda,wanda,emp-magnitude,magnitude"
PrunedFolder = Annotated[Path, Opt("Output folder of a finished prune.", argument=True)]


@dataclass(frozen=True, kw_only=True)
class TargetOptions(Options):
    """The layers to calibrate."""

    targets: Annotated[str | list[str], Opt("Layers, as for prune; the default covers any later choice.")] = "all-linear"
    ignore: Annotated[str | list[str] | None, Opt("Layers to leave out: name suffixes a,b, or a regex.")] = None
    tower: Annotated[Tower, Opt("Part of a multimodal model to prune: language, vision, or all.")] = "language"
    blocks: Annotated[str | None, Opt("Name of the list of decoder blocks; default: detected.")] = None
    min_expert_tokens: Annotated[int, Opt("Score experts by magnitude if they see fewer tokens.", minimum=0)] = 32
    allow_partial: Annotated[bool, Opt("Continue if more than half of the weights in blocks cannot be pruned.")] = False


@dataclass(frozen=True, kw_only=True)
class CalibrateOptions(
    LoudnessOptions, QuantizationOptions, LoadingOptions, CalibrationOptions, TargetOptions, OutputOptions, ModelOptions
):
    """Options of `calibrate`."""

    model: Annotated[str, Opt("Model folder or Hub id.")] = field(default="", kw_only=False)
    output: Annotated[Path, Opt("Activations file to write.")] = Path("activations.safetensors")
    compare: Annotated[tuple[Path, Path] | None, Opt("Compare two activations files, and run no model.")] = None

    def check(self) -> None:
        """Raise UserError for invalid or conflicting options."""
        if self.compare is not None and self.model:
            raise UserError("--compare reads two files and runs no model; leave out --model.")
        if self.compare is None and not self.model:
            raise UserError("--model is missing; give the folder or Hub id of the model to run.")
        check_targets(self.tower, self.blocks)
        self.check_loading()
        self.check_calibration()


@dataclass(frozen=True, kw_only=True)
class ReportOptions(LoudnessOptions, OutputOptions):
    """Options of `report`."""

    runs: Annotated[list[Path], Opt("Outputs of prune, sweep, measure and bench, and results of evaluate.", argument=True)] = (
        field(kw_only=False)
    )
    output: Annotated[Path, Opt("Folder to write.")] = Path("report")
    overwrite: Annotated[bool, Opt("Replace an existing report at the output.")] = False
    title: Annotated[str, Opt("Heading of the page.")] = "Effective Model Pruning"
    no_plots: Annotated[bool, Opt("Write tables only, without matplotlib.")] = False


@dataclass(frozen=True, kw_only=True)
class PackOptions(LoudnessOptions):
    """Options of `pack`."""

    folder: Annotated[Path, Opt("Pruned checkpoint.", argument=True, metavar="DIR")] = field(kw_only=False)
    output: Annotated[Path, Opt("Folder to write.", argument=True, metavar="OUT")] = field(kw_only=False)
    zstd: Annotated[bool, Opt("Also compress values and masks (zstandard).")] = False
    mask_only: Annotated[bool, Opt("Pack the mask without weights, for users who have the dense model.")] = False
    overwrite: Annotated[bool, Opt("Replace an existing folder at OUT.")] = False


@dataclass(frozen=True, kw_only=True)
class UnpackOptions(LoudnessOptions):
    """Options of `unpack`."""

    packed: Annotated[Path, Opt("Folder written by emp-llm pack.", argument=True, metavar="OUT")] = field(kw_only=False)
    folder: Annotated[Path, Opt("Model folder to write.", argument=True, metavar="DIR")] = field(kw_only=False)
    base: Annotated[str | None, Opt("For a mask: folder or Hub id of the dense model.")] = None
    revision: Annotated[str | None, Opt("Branch, tag or commit of a dense model from the Hub.")] = None
    overwrite: Annotated[bool, Opt("Replace an existing model folder at DIR.")] = False


@dataclass(frozen=True, kw_only=True)
class PushCommandOptions(LoudnessOptions):
    """Options of `push`."""

    folder: PrunedFolder = field(kw_only=False)
    repository: Annotated[str, Opt("USER/NAME on the Hub; created if missing.", argument=True)] = field(kw_only=False)
    private: Annotated[bool, Opt("Create the repository as private.")] = False
    revision: Annotated[str | None, Opt("Branch to push to; created from main if missing.")] = None
    results: Annotated[
        list[Path] | None, Opt("Results of evaluate or bench for the card: of this checkpoint, or its baseline; repeatable.")
    ] = None
    base_model: Annotated[str | None, Opt("Hub id of the dense model, if it was pruned from a folder.")] = None
    overwrite: Annotated[bool, Opt("Replace other weights on the branch.")] = False
    dry_run: Annotated[bool, Opt("Print the files to push, and push nothing.")] = False


@dataclass(frozen=True, kw_only=True)
class VerifyOptions(LoudnessOptions):
    """Options of `verify`."""

    folder: PrunedFolder = field(kw_only=False)
    criterion: Annotated[Any, Opt("Your criterion that decided the masks, MODULE:FUNCTION or FILE.py:FUNCTION.")] = None
    scores: Annotated[Any, Opt("Your scores that decided the masks: a safetensors file.")] = None
    source: Annotated[str | None, Opt("Folder or Hub id of the dense model, to compare bytes and masks as well.")] = None
    activations: Annotated[Path | None, Opt("Activations file of the run; default: the one in the folder.")] = None
    blocks: Annotated[str | None, Opt("Name of the list of decoder blocks; default: the run's.")] = None
    revision: Annotated[str | None, Opt("Branch, tag or commit of a Hub model.")] = None
    trust_remote_code: Annotated[bool, Opt("Run code from the model repository.")] = False
