"""Training of the demo model: its tokenizer, its token stream, and the training loop.

The forward and backward passes use bfloat16 weights; the optimizer updates float32 master weights.
On a CPU with bfloat16 instructions this is several times faster than float32, and the saved weights
are exactly those that were trained.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

Tokens = np.ndarray


@dataclass(frozen=True)
class Schedule:
    """Steps, learning rate and window lengths. Most steps read short windows; the last ones read
    full contexts.
    """

    steps: int = 9500
    batch_tokens: int = 2048
    short: int = 128
    long: int = 512
    long_share: float = 0.05
    warmup: int = 200
    horizon: int = 10_000
    cooldown: int = 1700
    learning_rate: float = 3e-3
    weight_decay: float = 0.1

    def length(self, step: int) -> int:
        """Tokens per window in a step. Windows of 512 take twice the time on a CPU, and 128 are
        enough to learn the facts.
        """
        return self.long if step >= self.steps * (1 - self.long_share) else self.short

    def rate(self, step: int) -> float:
        """Learning rate of a step: a warm-up, a cosine towards `horizon`, and a linear cool-down
        over the last steps.
        """
        if step < self.warmup:
            return self.learning_rate * (step + 1) / self.warmup
        cosine = 0.5 * (1 + math.cos(math.pi * (step - self.warmup) / (self.horizon - self.warmup)))
        return self.learning_rate * cosine * min(1.0, (self.steps - step) / self.cooldown)


def make_tokenizer(texts: Iterable[str], vocab: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with <s> and </s>. It adds no tokens to plain text."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="</s>",
        clean_up_tokenization_spaces=False,
    )


def encode(tokenizer: PreTrainedTokenizerFast, pieces: list[str]) -> Tokens:
    """The tokens of all pieces, concatenated."""
    parts = [np.array(tokenizer(piece)["input_ids"], dtype=np.int16) for piece in pieces]
    return np.concatenate(parts)


def make_model(
    vocab: int, hidden: int, intermediate: int, layers: int, context: int
) -> LlamaForCausalLM:
    """A new Llama in float32 with four heads, two key-value heads and tied embeddings."""
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
        initializer_range=0.03,
    )
    model = LlamaForCausalLM(config)
    # Faster than fused attention on a CPU, for windows as short as these.
    model.set_attn_implementation("eager")
    return model


def windows(stream: Tokens, schedule: Schedule, seed: int) -> Iterator[torch.Tensor]:
    """A batch for every step: the stream cut into windows that overlap by one token, shuffled
    again for each pass.
    """
    rng = np.random.default_rng(seed)
    order: Tokens = np.empty(0, dtype=np.int64)
    length = 0
    for step in range(schedule.steps):
        count = schedule.batch_tokens // schedule.length(step)
        if length != schedule.length(step) or len(order) < count:
            length = schedule.length(step)
            order = rng.permutation((len(stream) - 1) // length) * length
        starts = order[:count]
        order = order[count:]
        yield torch.from_numpy(
            np.stack([stream[s : s + length + 1] for s in starts]).astype(np.int64)
        )


def _loss_of(model: LlamaForCausalLM) -> Callable[[torch.Tensor], torch.Tensor]:
    def loss(batch: torch.Tensor) -> torch.Tensor:
        hidden = model.model(input_ids=batch[:, :-1], use_cache=False).last_hidden_state
        logits = model.lm_head(hidden).flatten(0, 1).float()
        return F.cross_entropy(logits, batch[:, 1:].flatten())

    return loss


def masters_of(
    model: PreTrainedModel, weight_decay: float
) -> tuple[list[torch.Tensor], list[torch.Tensor], torch.optim.Optimizer]:
    """The parameters, their float32 masters, and AdamW on the masters (no decay on norms and
    embeddings).
    """
    named = list(model.named_parameters())
    weights: list[torch.Tensor] = [p for _, p in named]
    masters = [p.detach().clone().requires_grad_() for p in weights]
    # Not model.to(...), which would also round the rotary frequencies, unlike loading.
    for weight in weights:
        weight.data = weight.data.to(torch.bfloat16)
    decayed = [
        m
        for m, (name, p) in zip(masters, named, strict=True)
        if p.dim() >= 2 and "embed" not in name
    ]
    rest = [
        m for m, (name, p) in zip(masters, named, strict=True) if p.dim() < 2 or "embed" in name
    ]
    groups = [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": rest, "weight_decay": 0.0},
    ]
    return weights, masters, torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.99), fused=True)


def step_of(
    weights: list[torch.Tensor],
    masters: list[torch.Tensor],
    optimizer: torch.optim.Optimizer,
    learning_rate: float,
) -> None:
    """One step of the masters by the gradients of the weights, of norm 1 at most; the weights
    follow.
    """
    for master, weight in zip(masters, weights, strict=True):
        assert weight.grad is not None
        master.grad = weight.grad.float()
        weight.grad = None
    torch.nn.utils.clip_grad_norm_(masters, 1.0)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    optimizer.step()
    with torch.no_grad():
        for master, weight in zip(masters, weights, strict=True):
            weight.copy_(master)


def train(
    model: LlamaForCausalLM, stream: Tokens, schedule: Schedule, seed: int
) -> dict[str, float]:
    """Train in place. Returns a record: steps, tokens, seconds, mean loss of the last 100 steps
    (nats per token).
    """
    weights, masters, optimizer = masters_of(model, schedule.weight_decay)
    loss_of = torch.compile(_loss_of(model), dynamic=False)
    started = time.time()
    losses = []
    model.train()
    for step, batch in enumerate(windows(stream, schedule, seed)):
        loss = loss_of(batch)
        torch.autograd.backward(loss)
        step_of(weights, masters, optimizer, schedule.rate(step))
        losses.append(float(loss.detach()))
        if step % 100 == 99:
            recent = float(np.mean(losses[-100:]))
            speed = (step + 1) * schedule.batch_tokens / (time.time() - started)
            print(
                f"step {step + 1}/{schedule.steps}  loss {recent:.4f}  {speed:.0f} tokens/s",
                flush=True,
            )
    model.eval()
    return {
        "steps": schedule.steps,
        "tokens_seen": schedule.steps * schedule.batch_tokens,
        "final_training_loss": round(float(np.mean(losses[-100:])), 4),
        "training_seconds": round(time.time() - started),
    }


@torch.no_grad()
def held_out_loss(model: PreTrainedModel, tokens: Tokens, block: int) -> float:
    """Mean loss over whole blocks, nats per token; no block sees another."""
    count = len(tokens) // block
    total = 0.0
    for i in range(count):
        ids = torch.from_numpy(tokens[i * block : (i + 1) * block].astype(np.int64))[None]
        logits = model(input_ids=ids, use_cache=False).logits[0].float()
        total += float(F.cross_entropy(logits[:-1], ids[0, 1:]))
    return total / count
