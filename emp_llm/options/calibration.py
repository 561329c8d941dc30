"""Options of calibration: the text, and the forward passes over it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from emp_llm.common.declared import Flag

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
