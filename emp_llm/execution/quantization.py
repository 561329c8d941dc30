"""Quantisation of a model's linear layers by bitsandbytes while the model is loaded."""

import logging
from importlib.metadata import version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Literal

from emp_llm.common.errors import UserError
from emp_llm.records.source import QuantizationRecord

if TYPE_CHECKING:
    import transformers

Quantization = Literal["8bit", "4bit"]


def quantization_of(load_in_8bit: bool, load_in_4bit: bool) -> Quantization | None:
    """The quantisation that the two options request; UserError if both are given, or bitsandbytes is not installed."""
    if load_in_8bit and load_in_4bit:
        raise UserError("--load-in-8bit and --load-in-4bit exclude each other; give only one.")
    if not (load_in_8bit or load_in_4bit):
        return None
    if find_spec("bitsandbytes") is None:
        raise UserError("--load-in-8bit and --load-in-4bit need bitsandbytes. Install it: pip install 'emp-llm[quantize]'")
    return "8bit" if load_in_8bit else "4bit"


def quantization_record(quantization: Quantization | None) -> QuantizationRecord | None:
    """The record of a quantisation for a report."""
    if quantization is None:
        return None
    form = {"8bit": "LLM.int8", "4bit": "NF4, computed in bfloat16"}[quantization]
    return QuantizationRecord(bits=quantization, format=form, bitsandbytes=version("bitsandbytes"))


def quantization_config(quantization: Quantization | None) -> "transformers.BitsAndBytesConfig | None":
    """The configuration with which transformers loads the model."""
    import torch
    import transformers

    if quantization is None:
        return None
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it warns of every cast, and LLM.int8 consists of casts
    if quantization == "8bit":
        return transformers.BitsAndBytesConfig(load_in_8bit=True)
    return transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
