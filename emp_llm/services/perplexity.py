"""Perplexity of a causal language model on a text."""

import logging
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from emp_llm.models.blockwise import BlockwiseModel
from emp_llm.models.corpora import Corpus, token_ids
from emp_llm.models.errors import UserError
from emp_llm.models.loading import input_device, max_context
from emp_llm.models.memory import OutOfMemory
from emp_llm.models.ranks import ranks
from emp_llm.models.residency import is_offloaded

logger = logging.getLogger(__name__)

DEFAULT_BLOCK = 2048
_LOGITS_AT_A_TIME = 1 << 28


@dataclass(frozen=True)
class Perplexity:
    """A perplexity and what it was measured on.

    Attributes:
        perplexity: exp of the mean of the blocks' mean next-token losses, each weighted by its number of tokens.
        tokens, blocks, block_length: what was measured; the last block may be shorter.
        seconds: of the forward passes.
        block_losses: the mean loss of each block in order, seven decimals; what the uncertainty of a difference is made of.
        partial: `limit` left some of the text out.
    """

    perplexity: float
    tokens: int
    blocks: int
    block_length: int
    seconds: float
    partial: bool = False
    block_losses: list[float] = field(default_factory=list)


def text_tokens(corpus: Corpus, tokenizer: Any) -> Tensor:
    """The text of a suite as token ids, int64, shape (tokens,): all of it, whatever the length of a block."""
    return token_ids(replace(corpus, samples=None, seqlen=None), tokenizer)


def block_length(corpus: Corpus, model_config: Any) -> int:
    """Tokens to a block: `corpus.seqlen` (default 2048), but no more than the model's context."""
    wanted = corpus.seqlen or DEFAULT_BLOCK
    return min(wanted, max_context(model_config) or wanted)


def perplexity(
    model: PreTrainedModel, tokens: Tensor, block_length: int, batch_size: int | None = None, limit: int | None = None
) -> Perplexity:
    """exp of the mean next-token loss over consecutive blocks, the shorter last one included.

    Under several ranks each measures its share of the batches, and all return the same, to the last bit that of one rank.

    Args:
        model: a causal language model in evaluation mode.
        tokens: int64, shape (tokens,).
        block_length: tokens to a block; no block sees another.
        batch_size: blocks to a forward pass; None: as many as keep the logits below 2^28 numbers, at most 16.
        limit: measure the first so many blocks only.

    Returns:
        The perplexity; log-softmax in float32, sums in float64. A last block of one token predicts nothing and is left out.

    Raises:
        UserError: fewer than two tokens, or a loss that is not finite.
    """
    whole = tokens.numel()
    tokens = tokens if limit is None else tokens[: limit * block_length]
    if tokens.numel() < 2:
        raise UserError(f"perplexity needs a text of at least 2 tokens, got {tokens.numel()}.")
    if batch_size is None:
        vocabulary = max(1, int(getattr(model.config, "vocab_size", 1) or 1))
        batch_size = max(1, min(16, _LOGITS_AT_A_TIME // (block_length * vocabulary)))
    full = tokens.numel() // block_length * block_length
    batches = list(torch.split(tokens[:full].reshape(-1, block_length), batch_size)) if full else []
    if tokens.numel() - full > 1:
        batches.append(tokens[full:].reshape(1, -1))
    total, weight, blocks = 0.0, 0, 0
    losses: dict[int, Tensor] = {}
    start = time.perf_counter()
    own = ranks().part(range(len(batches)))
    for number, logits in zip(own, _logits(model, [batches[number] for number in own]), strict=True):
        losses[number] = _mean_losses(logits, batches[number])
    for share in ranks().gather(losses):
        losses |= share
    for number, batch in enumerate(batches):
        total += float(losses[number].sum()) * batch.shape[1]
        weight += batch.numel()
        blocks += batch.shape[0]
    mean = total / weight
    if not math.isfinite(mean):
        raise UserError("the model's loss is not finite; try --dtype float32 or bfloat16.")
    seconds = round(time.perf_counter() - start, 3)
    each = [round(loss, 7) for number in range(len(batches)) for loss in losses[number].tolist()]
    return Perplexity(math.exp(mean), weight, blocks, block_length, seconds, tokens.numel() < whole, each)


def _logits(model: PreTrainedModel, batches: list[Tensor]) -> Iterator[Tensor]:
    """The logits of each batch. A model that does not fit runs block by block, so that its weights are read once in all."""
    if batches and is_offloaded(model):
        runner = BlockwiseModel(model)
        try:
            runner.prepare(batches[0])
        except OutOfMemory:
            raise
        except UserError as error:
            logger.info("%s (perplexity: every batch reads all weights.)", error)
        else:
            yield from runner.forward(batches)
            return
    total = sum(batch.numel() for batch in batches)
    quiet = None if ranks().main else True
    with torch.no_grad(), tqdm(total=total, desc="perplexity", unit="tok", unit_scale=True, disable=quiet) as bar:
        for batch in batches:
            yield model(input_ids=batch.to(input_device(model)), use_cache=False).logits
            bar.update(batch.numel())


@torch.no_grad()
def _mean_losses(logits: Tensor, batch: Tensor, piece: int = 256) -> Tensor:
    """Mean next-token loss of each sequence, float64, shape (batch,); float32 logits of a few positions at a time."""
    logits = logits[:, :-1]
    labels = batch[:, 1:].to(logits.device)
    sums = torch.zeros(batch.shape[0], dtype=torch.float64, device=logits.device)
    for first in range(0, labels.shape[1], piece):
        log_probabilities = torch.log_softmax(logits[:, first : first + piece].float(), dim=-1)
        picked = log_probabilities.gather(2, labels[:, first : first + piece, None])
        sums -= picked.double().sum((1, 2))
    return (sums / labels.shape[1]).cpu()
