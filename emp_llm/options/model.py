"""Options of the model, of loading it, and of the device that runs it."""

import re
from dataclasses import dataclass, field
from typing import Annotated, Literal

from emp_llm.common.declared import Flag
from emp_llm.common.errors import UserError

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
