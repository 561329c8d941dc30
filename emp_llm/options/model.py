"""Options of the model and of loading it."""

from dataclasses import dataclass, field
from typing import Annotated

from emp_llm.common.errors import UserError
from emp_llm.options.base import Opt, Options

DTYPES = ("auto", "bfloat16", "float16", "float32")


@dataclass(frozen=True, kw_only=True)
class ModelOptions(Options):
    """A model from a folder or from the Hub."""

    model: Annotated[str, Opt("Model folder or Hub id.")] = field(kw_only=False)
    revision: Annotated[str | None, Opt("Branch, tag or commit of a Hub model.")] = None
    trust_remote_code: Annotated[bool, Opt("Run code from the model repository.")] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.model, str):
            raise UserError(
                f"--model must be a model folder or a Hub id (owner/name), got {type(self.model).__name__}. For a model in "
                "memory there is prune_model; or save it with save_pretrained and give the folder."
            )


@dataclass(frozen=True, kw_only=True)
class LoadingOptions(Options):
    """Loading for forward passes."""

    device_map: Annotated[str, Opt("Place of the weights: auto, balanced, cpu, cuda:N, disk, or a JSON map.")] = "auto"
    dtype: Annotated[str, Opt("Dtype of forward passes: auto, bfloat16, float16 or float32.")] = "auto"

    def check_loading(self) -> None:
        """Raise UserError for an unknown dtype."""
        if self.dtype not in DTYPES:
            raise UserError(f"--dtype {self.dtype!r} is not one of {', '.join(DTYPES)}.")


@dataclass(frozen=True, kw_only=True)
class QuantizationOptions(Options):
    """Quantisation by bitsandbytes at load time."""

    load_in_8bit: Annotated[bool, Opt("Run forward passes in 8 bits (bitsandbytes, LLM.int8).", flag="--load-in-8bit")] = False
    load_in_4bit: Annotated[bool, Opt("Run forward passes in 4 bits (bitsandbytes, NF4).", flag="--load-in-4bit")] = False
