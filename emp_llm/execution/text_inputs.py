"""The inputs of a forward pass on text: token ids, and for an encoder-decoder model those of its decoder."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from emp_llm.architecture.towers import find_towers
from emp_llm.common.errors import UserError, reason
from emp_llm.common.machine import ran_out
from emp_llm.execution.loading import input_device

NOT_BY_BLOCKS = (
    "{}: an encoder-decoder model has two lists of blocks and cannot run block by block. Use --execution model, and "
    "--propagate dense."
)


def text_inputs(model: PreTrainedModel, batch: Tensor) -> dict[str, Any]:
    """The keyword arguments of a forward pass on text.

    The encoder of an encoder-decoder model reads the text, and its decoder the same text shifted right by one token, as in
    training it to repeat its input.

    Args:
        model: on any devices.
        batch: token ids, int64, shape (sequences, length).

    Raises:
        UserError: the model's config names no token to begin the decoder's text with.
    """
    ids = batch.to(input_device(model))
    inputs: dict[str, Any] = {"input_ids": ids, "use_cache": False}
    if reads_twice(model):
        inputs["decoder_input_ids"] = decoder_ids(model, ids)
    return inputs


def reads_twice(model: PreTrainedModel) -> bool:
    """Whether a model has an encoder and a decoder that both read text."""
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def run_on_text(model: PreTrainedModel, body: nn.Module, batch: Tensor) -> Any:
    """The output of a model, or of a part of it, for a batch of text.

    Raises:
        UserError: the model needs other inputs than text.
    """
    try:
        return body(**text_inputs(model, batch))
    except (TypeError, ValueError, AttributeError) as error:
        if ran_out(error) or isinstance(error, UserError) or not find_towers(model).others:
            raise
        raise UserError(
            f"{type(model).__name__}: it does not run on text alone ({reason(error)}). Use a magnitude method, which needs no "
            "forward pass."
        ) from error


def decoder_ids(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """The decoder's token ids for an encoder's, int64, both of shape (sequences, length): the same text shifted right by one.

    Raises:
        UserError: the model's config names no token to begin with.
    """
    configs = (model.config, model.config.get_text_config(decoder=True))
    names = ("decoder_start_token_id", "bos_token_id")
    values = [getattr(config, name, None) for name in names for config in configs]
    start = next((value for value in values if value is not None), None)
    if start is None:
        raise UserError(
            f"{type(model).__name__}: its config has no decoder_start_token_id to begin the decoder's text with. Add it to "
            "config.json."
        )
    return torch.cat([torch.full_like(ids[:, :1], start), ids[:, :-1]], dim=1)
