"""The options of each command, combined from the topics."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from emp_llm.common.errors import UserError
from emp_llm.options.base import LoudnessOptions, Opt
from emp_llm.options.calibration import CalibrationOptions, NormOptions, PropagationOptions
from emp_llm.options.criterion import CriterionOptions, ScoreOptions
from emp_llm.options.evaluation import EvaluationStageOptions, SuiteOptions
from emp_llm.options.model import LoadingOptions, ModelOptions, QuantizationOptions
from emp_llm.options.output import MaskDeviceOptions, OutputOptions, PushOptions
from emp_llm.options.recipe import Recipe, ShareOptions, TargetOptions
from emp_llm.options.runtime import DEVICE_NAME, Runtime, check_runtime
from emp_llm.options.structure import StructureOptions, check_structured
from emp_llm.selection.criteria import CRITERIA
from emp_llm.selection.scheme import Group

BETAS = "0.5,0.75,1,1.25,1.5,2"
METHODS = "emp-wanda,wanda,emp-magnitude,magnitude"
CURVE_BETAS = "0.5,0.6,0.7,0.8,0.9,1,1.1,1.2,1.3,1.4,1.5,1.75,2"
TableFormat = Literal["terminal", "markdown", "csv"]
PrunedFolder = Annotated[Path, Opt("Output folder of a finished prune.", argument=True)]


@dataclass(frozen=True, kw_only=True)
class PruneOptions(
    LoudnessOptions,
    PushOptions,
    EvaluationStageOptions,
    QuantizationOptions,
    LoadingOptions,
    PropagationOptions,
    NormOptions,
    MaskDeviceOptions,
    StructureOptions,
    Recipe,
    OutputOptions,
    ModelOptions,
):
    """Options of `prune`."""

    output: Annotated[Path | None, Opt("Folder to write; default: MODEL-METHOD in the current folder.")] = None
    overwrite: Annotated[bool, Opt("Replace an existing checkpoint at the output, and on the Hub.")] = False
    dry_run: Annotated[bool, Opt("Print the plan of the run, and write nothing.")] = False

    def check(self) -> None:
        """Raise UserError for invalid or conflicting options."""
        self.check_structure()
        if self.structure is not None:
            check_structured(self)
        elif self.criterion_name == "taylor":
            raise UserError(f"--method {self.method} scores heads and neurons, not weights. Add --structure, or use emp-wanda.")
        else:
            self.check_recipe()
        self.check_loading()
        self.check_calibration()
        if self.structure is not None:
            self.check_evaluation()
            self.check_push()
            return
        self.check_propagation(self.execution)
        self.check_mask_device()
        self.check_evaluation()
        self.check_push()
        if self.propagate == "pruned":
            self._check_pruned_propagation()
        if self.fits:
            self._check_fits()

    @property
    def needs_activations(self) -> bool:
        return super().needs_activations if self.structure is None else self.criterion_name != "magnitude"

    @property
    def fits(self) -> bool:
        return super().fits if self.structure is None else self.refit

    def _check_fits(self) -> None:
        """Raise UserError if weights cannot be fitted, because there is no text to fit them to or they are quantised."""
        flag, fits = self.fit_flag, CRITERIA[self.criterion_name].fits
        if self.load_in_8bit or self.load_in_4bit:
            raise UserError(f"{flag} cannot change quantised weights; leave out --load-in-8bit and --load-in-4bit.")
        if self.calibration is not None or (self.activations is None and fits):
            return
        if self.activations is not None:
            raise UserError(
                f"{flag} fits weights to the calibration text, and --activations holds only its norms. Leave out "
                f"--activations{'' if fits else ', or --refit'}; or name the text with --calibration."
            )
        if not self.needs_activations:
            raise UserError(
                f"--refit fits weights to a calibration text, and method {self.method} needs none. Leave out --refit, or name "
                "the text with --calibration."
            )

    def _check_pruned_propagation(self) -> None:
        if self.activations is not None:
            raise UserError("--propagate pruned collects its norms itself; leave out --activations.")
        if self.load_in_8bit or self.load_in_4bit:
            raise UserError(
                "--propagate pruned cannot set quantised weights to zero; leave out --load-in-8bit and --load-in-4bit."
            )
        self.check_propagated()


@dataclass(frozen=True, kw_only=True)
class CalibrateOptions(
    LoudnessOptions, QuantizationOptions, LoadingOptions, CalibrationOptions, TargetOptions, OutputOptions, ModelOptions
):
    """Options of `calibrate`."""

    model: Annotated[str, Opt("Model folder or Hub id.")] = field(default="", kw_only=False)
    output: Annotated[Path, Opt("Activations file to write.")] = Path("activations.safetensors")
    targets: Annotated[str | list[str], Opt("Layers, as for prune; the default covers any later choice.")] = "all-linear"
    compare: Annotated[tuple[Path, Path] | None, Opt("Compare two activations files, and run no model.")] = None

    def check(self) -> None:
        """Raise UserError for invalid or conflicting options."""
        if self.compare is not None and self.model:
            raise UserError("--compare reads two files and runs no model; leave out --model.")
        if self.compare is None and not self.model:
            raise UserError("--model is missing; give the folder or Hub id of the model to run.")
        self.check_targets()
        self.check_loading()
        self.check_calibration()


@dataclass(frozen=True, kw_only=True)
class MeasureOptions(
    LoudnessOptions, LoadingOptions, NormOptions, ScoreOptions, CriterionOptions, TargetOptions, OutputOptions, ModelOptions
):
    """Options of `measure`."""

    output: Annotated[Path | None, Opt("File to write; default: MODEL-measure.json in the current folder.")] = None
    criteria: Annotated[str | None, Opt("Criteria, separated by commas; default: magnitude,wanda and your own.")] = None
    orders: Annotated[str, Opt("Hill orders of the effective number, separated by commas.")] = "2"
    betas: Annotated[str, Opt("Betas at which to show the sparsity, separated by commas.")] = CURVE_BETAS
    activations: Annotated[Path | None, Opt("Activations file; default: calibrate now, if wanda is measured.")] = None


@dataclass(frozen=True, kw_only=True)
class SweepOptions(
    LoudnessOptions,
    SuiteOptions,
    LoadingOptions,
    NormOptions,
    MaskDeviceOptions,
    ShareOptions,
    ScoreOptions,
    CriterionOptions,
    TargetOptions,
    OutputOptions,
    ModelOptions,
):
    """Options of `sweep`."""

    output: Annotated[Path | None, Opt("Folder of the sweep; default: MODEL-sweep in the current folder.")] = None
    overwrite: Annotated[bool, Opt("Discard a sweep with other options at the output.")] = False
    methods: Annotated[str | None, Opt(f"Methods, separated by commas; default: {METHODS} and those of your criterion.")] = None
    betas: Annotated[str | None, Opt(f"Betas of the emp methods; default: {BETAS}.")] = None
    orders: Annotated[str | None, Opt("Hill orders of the emp methods; default: 2.")] = None
    sparsities: Annotated[str | None, Opt("Sparsities of the other methods; default: 0.5.")] = None
    emp_sparsities: Annotated[str | None, Opt("Sparsities of the emp methods, in place of betas; their beta is found.")] = None
    patterns: Annotated[str | None, Opt("N:M patterns of the other methods.")] = None
    matched_baselines: Annotated[
        bool, Opt("Add two uniform baselines to each emp point: the same total, and the same count in every matrix.")
    ] = False
    group: Annotated[Group, Opt("Weights that compete with each other: of a row, a matrix, or all targets.")] = "row"
    activations: Annotated[Path | None, Opt("Activations file; default: calibrate once.")] = None
    keep: Annotated[bool, Opt("Also write the checkpoint of every point.")] = False
    dry_run: Annotated[bool, Opt("Print the plan of the sweep, and write nothing.")] = False

    def check(self) -> None:
        """Raise UserError for invalid or conflicting options."""
        if self.group == "all" and self.matched_baselines:
            raise UserError("--matched-baselines fixes the count of every matrix; use --group row or matrix, not all.")
        self.check_targets()
        self.check_loading()
        self.check_calibration()
        self.check_mask_device()


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions(LoudnessOptions, QuantizationOptions, LoadingOptions, SuiteOptions, OutputOptions, ModelOptions):
    """Options of `evaluate`."""

    model: Annotated[str, Opt("Model folder or Hub id.")] = field(default="", kw_only=False)
    output: Annotated[Path | None, Opt("Results file; default: MODEL-SUITE.json in the current folder.")] = None
    overwrite: Annotated[bool, Opt("Evaluate again if the output already holds results.")] = False
    baseline: Annotated[str | None, Opt("Model to compare with, or its results file.")] = None
    beside: Annotated[list[Path] | None, Opt("Results file of another model to add to the table; repeatable.")] = None
    batch_size: Annotated[str, Opt("Examples per forward pass of a task, or auto.")] = "8"
    runtime: Annotated[Runtime, Opt("Run the model dense, or from packed weights (sparse); baselines run dense.")] = "dense"
    form: Annotated[TableFormat, Opt("Format of the table.", flag="--format")] = "terminal"
    prepare: Annotated[bool, Opt("Only download the data of the suite (and the model) into the cache.")] = False

    def check(self) -> None:
        """Raise UserError for invalid or conflicting options."""
        self.check_loading()
        check_runtime(self.runtime)
        if self.runtime == "dense":
            return
        if self.load_in_8bit or self.load_in_4bit:
            raise UserError("--runtime sparse computes from packed weights; leave out --load-in-8bit and --load-in-4bit.")
        if DEVICE_NAME.fullmatch(self.device_map) is None:
            raise UserError(f"--runtime sparse runs on one device: --device-map auto, cpu or cuda:N, not {self.device_map}.")


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
    plot: Annotated[list[Path] | None, Opt("PNG for the card, in addition to those in DIR/emp_llm; repeatable.")] = None
    base_model: Annotated[str | None, Opt("Hub id of the dense model, if it was pruned from a folder.")] = None
    overwrite: Annotated[bool, Opt("Replace other weights on the branch.")] = False
    dry_run: Annotated[bool, Opt("Print the files to push, and push nothing.")] = False


@dataclass(frozen=True, kw_only=True)
class VerifyOptions(LoudnessOptions, CriterionOptions):
    """Options of `verify`."""

    folder: PrunedFolder = field(kw_only=False)
    source: Annotated[str | None, Opt("Folder or Hub id of the dense model, to compare bytes and masks as well.")] = None
    activations: Annotated[Path | None, Opt("Activations file of the run; default: the one in the folder.")] = None
    blocks: Annotated[str | None, Opt("Name of the list of decoder blocks; default: the run's.")] = None
    revision: Annotated[str | None, Opt("Branch, tag or commit of a Hub model.")] = None
    trust_remote_code: Annotated[bool, Opt("Run code from the model repository.")] = False
