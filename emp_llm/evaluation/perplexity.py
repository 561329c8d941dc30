"""Perplexity of a causal language model on a text."""

import logging
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import torch
from torch import Tensor
from transformers import PreTrainedModel

from emp_llm.calibration.data import sequences, token_ids
from emp_llm.common.errors import UserError, is_of_disk
from emp_llm.common.machine import OutOfMemory
from emp_llm.common.progress import progress_bar
from emp_llm.common.ranks import ranks
from emp_llm.models.blockwise import BlockwiseModel, run_on_text
from emp_llm.models.loading import headless_class
from emp_llm.models.modules import is_encoder_decoder, mean_losses
from emp_llm.models.offload import is_offloaded
from emp_llm.models.placement import max_context
from emp_llm.records.corpus import Corpus
from emp_llm.records.evaluation import PerplexityRecord

logger = logging.getLogger(__name__)

DEFAULT_BLOCK = 2048
_LOGITS_AT_A_TIME = 1 << 28
_LARGEST_LOSS = 709  # exp of more overflows a float


def text_tokens(corpus: Corpus, tokenizer: Any) -> Tensor:
    """All of a suite's text as token ids: int64, shape (tokens,)."""
    return token_ids(msgspec.structs.replace(corpus, samples=None, seqlen=None), tokenizer)


def block_length(corpus: Corpus, model_config: Any) -> int:
    """Tokens in a block: `corpus.seqlen` (default 2048), at most the model's context."""
    wanted = corpus.seqlen or DEFAULT_BLOCK
    return min(wanted, max_context(model_config) or wanted)


def perplexity(
    model: PreTrainedModel,
    tokens: Tensor,
    block_length: int,
    batch_size: int | None = None,
    limit: int | None = None,
    begin: int | None = None,
) -> PerplexityRecord:
    """Perplexity: exp of the mean next-token loss over consecutive blocks; the last block may be
    shorter.

    Each block's mean loss is weighted by its number of tokens. Under several ranks each measures a
    share of the batches; all ranks return the same record, and its numbers equal those of a single
    rank to the last bit.

    Args:
        model: a causal language model in evaluation mode.
        tokens: int64, shape (tokens,).
        block_length: tokens in a block; no block sees another.
        batch_size: blocks per forward pass; None: as many as keep the logits below 2^28 numbers, at
            most 16.
        limit: number of blocks to measure, from the first; None: all.
        begin: the token at the beginning of each block, of whose length it is a part; it is given,
            not predicted. None: blocks begin with the text.

    Returns:
        The perplexity and its parts: log-softmax in float32, sums in float64. A last block of a
        single token predicts nothing and is left out. A mean loss above 709, too large for exp, is
        an infinite perplexity (None in the record).

    Raises:
        UserError: there are fewer than two tokens, or the loss is not finite.
    """
    if is_encoder_decoder(model):
        raise UserError(
            f"{type(model).__name__}: perplexity is for models that continue a text. Evaluate an "
            "encoder-decoder on --tasks."
        )
    every = list(sequences(tokens, block_length, begin))
    blocks = [block for block in every[:limit] if block.numel() > 1]
    if not blocks:
        raise UserError(
            f"perplexity needs a text of at least 2 tokens, got {tokens.numel()} in "
            f"blocks of {block_length}."
        )
    if batch_size is None:
        vocabulary = max(1, int(getattr(model.config.get_text_config(), "vocab_size", 1) or 1))
        batch_size = max(1, min(16, _LOGITS_AT_A_TIME // (block_length * vocabulary)))
    full = [block for block in blocks if block.numel() == block_length]
    batches = [
        torch.stack(full[first : first + batch_size]) for first in range(0, len(full), batch_size)
    ]
    batches += [block[None] for block in blocks[len(full) :]]
    start = time.perf_counter()
    losses = _losses(model, batches)
    weight = sum(batch.numel() for batch in batches)
    mean = (
        sum(float(loss.sum()) * batch.shape[1] for loss, batch in zip(losses, batches, strict=True))
        / weight
    )
    if not math.isfinite(mean):
        raise UserError("the model's loss is not finite; try --dtype float32 or bfloat16.")
    seconds = round(time.perf_counter() - start, 3)
    return PerplexityRecord(
        perplexity=math.exp(mean) if mean < _LARGEST_LOSS else None,
        loss=mean,
        tokens=weight,
        blocks=len(blocks),
        block_length=block_length,
        seconds=seconds,
        partial=limit is not None and limit < len(every),
        block_losses=[round(loss, 7) for of_batch in losses for loss in of_batch.tolist()],
    )


def _losses(model: PreTrainedModel, batches: list[Tensor]) -> list[Tensor]:
    """The mean loss of each block, batch by batch; each rank computes its share of the batches,
    and all ranks return all.
    """
    assigned = ranks().assigned(range(len(batches)))
    logits = _logits(model, [batches[number] for number in assigned])
    # No name keeps the logits of a batch while the next ones are computed.
    losses = {number: mean_losses(next(logits), batches[number]) for number in assigned}
    assert next(logits, None) is None
    for share in ranks().gather(losses):
        losses |= share
    return [losses[number] for number in range(len(batches))]


def _logits(model: PreTrainedModel, batches: list[Tensor]) -> Iterator[Tensor]:
    """Yield the logits of each batch. An offloaded model runs block by block over all batches:
    its weights are read once.
    """
    if batches and is_offloaded(model):
        runner = BlockwiseModel(model)
        try:
            runner.prepare(batches[0])
        except OutOfMemory:
            raise
        except UserError as error:
            logger.info("%s Perplexity reads all weights for every batch.", error)
        else:
            yield from runner.forward(batches)
            return
    with (
        torch.no_grad(),
        progress_bar(sum(batch.numel() for batch in batches), "perplexity", "tok") as bar,
    ):
        for batch in batches:
            yield run_on_text(model, model, batch).logits
            bar.update(batch.numel())


def measure_held_out(
    load: Callable[[], PreTrainedModel], config: dict[str, Any], tokens: Tensor
) -> PerplexityRecord | None:
    """The perplexity of held-out sequences, shape (sequences, length), by a model that is loaded.

    None if the model has none, or it fails, which is logged and ends no run. A failing disk does. A
    collective call.
    """
    if config.get("is_encoder_decoder") or headless_class(config) is not None:
        return None
    try:
        record = perplexity(load(), tokens.flatten(), tokens.shape[1], batch_size=1)
    except UserError as error:
        if is_of_disk(error):  # the same command, run again, measures it
            raise
        logger.warning("warning: the perplexity of held-out text was not measured: %s", error)
        return None
    # The stage has the time; equal runs have equal reports.
    return msgspec.structs.replace(record, seconds=0.0)
