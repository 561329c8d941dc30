"""Options of the sparse runtime, and of the commands that run it."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal, get_args

from emp_llm.common.errors import UserError
from emp_llm.options.base import LoudnessOptions, Opt, Options
from emp_llm.options.model import DTYPES, ModelOptions

Runtime = Literal["dense", "sparse"]
DEVICE_NAME = re.compile(r"auto|cpu|cuda(:\d+)?")


def check_runtime(runtime: str) -> None:
    """Raise UserError for an unknown runtime."""
    if runtime not in get_args(Runtime):
        raise UserError(f"--runtime {runtime!r} is not one of {', '.join(get_args(Runtime))}.")


@dataclass(frozen=True, kw_only=True)
class DeviceOptions(Options):
    """One device, and the dtype of its activations."""

    device: Annotated[str, Opt("Device that runs the model: auto, cpu, cuda or cuda:N.")] = "auto"
    dtype: Annotated[str, Opt("Dtype of forward passes: auto, bfloat16, float16 or float32.")] = "auto"

    def check_device(self) -> None:
        """Raise UserError for an unknown device or dtype."""
        if not DEVICE_NAME.fullmatch(self.device):
            raise UserError(f"--device {self.device!r} is not auto, cpu, cuda or cuda:N.")
        if self.dtype not in DTYPES:
            raise UserError(f"--dtype {self.dtype!r} is not one of {', '.join(DTYPES)}.")


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(LoudnessOptions, DeviceOptions, ModelOptions):
    """Options of `generate`."""

    prompt: Annotated[str, Opt("Text to continue; - reads it from standard input.")]
    runtime: Annotated[Runtime, Opt("Compute from packed weights (sparse), or as transformers does (dense).")] = "sparse"
    max_new_tokens: Annotated[int, Opt("Most tokens to generate.", minimum=1)] = 128
    temperature: Annotated[float, Opt("Randomness of the choice; 0: always the most probable token.")] = 0.0
    top_p: Annotated[float, Opt("Choose among the most probable tokens of this total probability.")] = 1.0
    seed: Annotated[int, Opt("Seed of the choice.")] = 0
    chat: Annotated[bool, Opt("Give the prompt as a user's message, by the tokenizer's chat template.")] = False

    def check(self) -> None:
        """Raise UserError for invalid options."""
        check_runtime(self.runtime)
        self.check_device()
        if not 0 <= self.temperature < float("inf"):
            raise UserError(f"--temperature must be 0 or more, got {self.temperature}.")
        if not 0 < self.top_p <= 1:
            raise UserError(f"--top-p must be above 0 and at most 1, got {self.top_p}.")
        if self.top_p < 1 and self.temperature == 0:
            raise UserError("--top-p has no effect at temperature 0; add --temperature, such as 0.8.")


@dataclass(frozen=True, kw_only=True)
class BenchOptions(LoudnessOptions, DeviceOptions):
    """Options of `bench`."""

    model: Annotated[str, Opt("Pruned or packed model: a folder or Hub id.", argument=True, metavar="DIR")] = field(
        kw_only=False
    )
    baseline: Annotated[str | None, Opt("Dense model to compare with; default: the same model, run dense.")] = None
    revision: Annotated[str | None, Opt("Branch, tag or commit of a Hub model.")] = None
    trust_remote_code: Annotated[bool, Opt("Run code from the model repository.")] = False
    prompt_tokens: Annotated[int, Opt("Tokens of the prompt.", minimum=1)] = 512
    new_tokens: Annotated[int, Opt("Tokens to decode after it.", minimum=1)] = 32
    batch_size: Annotated[int, Opt("Sequences at a time.", minimum=1)] = 1
    repeats: Annotated[int, Opt("Rounds; both models run in each, and medians are reported.", minimum=1)] = 5
    output: Annotated[Path | None, Opt("File for the figures, which report and push read; default: MODEL-bench.json.")] = None
    overwrite: Annotated[bool, Opt("Replace an existing file.")] = False

    def check(self) -> None:
        """Raise UserError for invalid options."""
        self.check_device()
