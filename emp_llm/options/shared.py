"""The options of commands: groups of fields, or parameters, each annotated with a `Flag`."""

import inspect
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from emp_llm.common.declared import Flag, Node, Option, number_in, options_of
from emp_llm.common.errors import UserError


class Some:
    """The options of a group that a command has: `Annotated[ModelOptions, Some("dtype")]`. The
    others keep their defaults.

    Args:
        wanted: names of options, and nodes with all of theirs.
    """

    def __init__(self, *wanted: str | type[Node]) -> None:
        self._wanted = wanted

    def of(self, options: dict[str, Option]) -> dict[str, Option]:
        """Those of the options that the command has."""
        names: list[str] = []
        for each in self._wanted:
            names += [each] if isinstance(each, str) else [*options_of(each)]
        return {name: options[name] for name in options if name in names}


class GivenOptions(frozenset[str]):
    """The names of the options that a call of a command gives, even if their values equal the
    defaults. A command with a parameter of this type gets them.
    """


def options_in(parameter: inspect.Parameter) -> tuple[Any, dict[str, Option]]:
    """The group of options that a parameter of a command is, or None for a single option; and
    its options by name.
    """
    annotation = parameter.annotation
    if annotation is GivenOptions:
        return GivenOptions, {}
    marks = []
    if get_origin(annotation) is Annotated:
        annotation, *marks = get_args(annotation)
    for mark in marks:
        if isinstance(mark, Flag):
            return None, {parameter.name: Option(parameter, annotation, mark)}
    own = getattr(annotation, "options", None)
    options = options_of(annotation) if own is None else own()
    for mark in marks:
        if isinstance(mark, Some):
            return annotation, mark.of(options)
    return annotation, options


def check_values(options: Any) -> None:
    """Raise UserError for a value of a group that its option does not allow."""
    for name, option in options_of(options.__class__).items():
        option.checked(getattr(options, name))


def parse_list(text: str, flag: str) -> list[str]:
    """The values in an option with commas; UserError if one is empty."""
    values = [value.strip() for value in text.split(",")]
    if not all(values):
        raise UserError(f"{flag} {text!r}: expected values separated by commas.")
    return values


def parse_numbers(text: str, flag: str) -> list[float]:
    """The numbers in an option with commas; UserError if a value is not a number."""
    try:
        numbers = [number_in(number) for number in text.split(",")]
    except ValueError:
        numbers = [math.nan]
    if any(math.isnan(number) for number in numbers):
        raise UserError(f"{flag} {text!r}: expected numbers separated by commas.")
    return numbers


# Options of the model, of loading it, and of the device that runs it.


Dtype = Literal["auto", "bfloat16", "float16", "float32"]
Runtime = Literal["dense", "sparse"]
MaskDevice = Annotated[
    Literal["cpu", "cuda"], Flag("Device that computes the masks. They are the same on both.")
]
TrustRemoteCode = Annotated[bool, Flag("Run code from the model repository.")]
ReportTo = Annotated[
    Literal["none", "trackio", "tensorboard", "wandb"],
    Flag("Send the numbers of the healing to this tracker while it runs."),
]
DEVICE_NAME = re.compile(r"auto|cpu|cuda(:\d+)?")


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """A model from a folder or from the Hub."""

    model: Annotated[str, Flag("Model folder or Hub id.", argument=True, flag="--model")] = field(
        kw_only=False
    )
    revision: Annotated[str | None, Flag("Branch, tag or commit of a Hub model.")] = None
    trust_remote_code: TrustRemoteCode = False


@dataclass(frozen=True, kw_only=True)
class LoadingOptions:
    """Loading for forward passes."""

    device_map: Annotated[
        str, Flag("Place of the weights: auto, balanced, cpu, cuda:N, disk, or a JSON map.")
    ] = "auto"
    dtype: Annotated[Dtype, Flag("Dtype of forward passes.")] = "auto"


@dataclass(frozen=True, kw_only=True)
class QuantizationOptions:
    """Quantisation by bitsandbytes at load time."""

    load_in_8bit: Annotated[
        bool, Flag("Run forward passes in 8 bits (bitsandbytes, LLM.int8).")
    ] = False
    load_in_4bit: Annotated[bool, Flag("Run forward passes in 4 bits (bitsandbytes, NF4).")] = False


@dataclass(frozen=True, kw_only=True)
class DeviceOptions:
    """One device, and the dtype of its activations."""

    device: Annotated[str, Flag("Device that runs the model: auto, cpu, cuda or cuda:N.")] = "auto"
    dtype: Annotated[Dtype, Flag("Dtype of forward passes.")] = "auto"

    def __post_init__(self) -> None:
        if not DEVICE_NAME.fullmatch(self.device):
            raise UserError(f"--device {self.device!r} is not auto, cpu, cuda or cuda:N.")


# Options of calibration: the text, and the forward passes over it.


Execution = Literal["auto", "model", "blocks"]
Propagate = Literal["dense", "pruned"]
Place = Literal["auto", "device", "cpu", "disk"]
TEXT = "wikitext2"  # the default calibration text


@dataclass(frozen=True, kw_only=True)
class CalibrationOptions:
    """The calibration text and the forward passes over it.

    Attributes:
        execution: the whole model at once, or block by block; auto: block by block if any part of
            the model is offloaded.
        hidden_states: where they are stored between blocks.
        resumable_calibration: by blocks, keep the sums so far and the hidden states on disk, so
            that an interrupted calibration resumes.
    """

    calibration: Annotated[
        str | None,
        Flag(
            "Calibration text: recipe, file, Hub id or self[:PROMPTS]; ,field=value; a mix: "
            f"a:64,b:64; default: {TEXT}."
        ),
    ] = None
    samples: Annotated[
        int | None, Flag("Number of calibration sequences; default: the recipe's.", minimum=1)
    ] = None
    seqlen: Annotated[
        int | None, Flag("Tokens per sequence; default: the recipe's.", minimum=1)
    ] = None
    batch_size: Annotated[int, Flag("Sequences per calibration pass.", minimum=1)] = 4
    execution: Annotated[
        Execution, Flag("Run the whole model at once, or by blocks; auto: by blocks if offloaded.")
    ] = "auto"
    hidden_states: Annotated[Place, Flag("Where hidden states are kept between blocks.")] = "auto"
    resumable_calibration: Annotated[
        bool,
        Flag(
            "By blocks, save sums and hidden states to disk now and then, so that an interrupted "
            "run can resume.",
            flag="--resumable-calibration/--no-resumable-calibration",
        ),
    ] = True
    seed: Annotated[
        int,
        Flag(
            "Random seed of shuffled or generated texts, of training and of searches.",
            minimum=0,
            maximum=2**32 - 1,
        ),
    ] = 0

    @property
    def text_name(self) -> str:
        """The name of the calibration text."""
        return TEXT if self.calibration is None else self.calibration


@dataclass(frozen=True, kw_only=True)
class NormOptions(CalibrationOptions):
    """The source of the input norms: a calibration now, or an activations file."""

    activations: Annotated[Path | None, Flag("Activations file; default: calibrate now.")] = None


# Options of evaluation.


TableFormat = Literal["terminal", "markdown"]


@dataclass(frozen=True, kw_only=True)
class SuiteOptions:
    """The suite, or tasks without one, and a limit on their size."""

    suite: Annotated[
        str | None,
        Flag("Evaluation suite: a name from eval/, or your own .toml file; default: perplexity."),
    ] = None
    tasks: Annotated[str | list[str] | None, Flag("lm-eval tasks a,b instead of a suite.")] = None
    num_fewshot: Annotated[
        int | None,
        Flag(
            "Examples before each question, for --tasks; default: each task's own number.",
            minimum=0,
        ),
    ] = None
    apply_chat_template: Annotated[
        bool, Flag("Ask the questions of tasks through the tokenizer's chat template.")
    ] = False
    limit: Annotated[
        int | None,
        Flag(
            "Use at most this many examples per task and blocks of text; results are partial.",
            minimum=1,
        ),
    ] = None
