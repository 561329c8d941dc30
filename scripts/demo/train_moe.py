"""Trains a small mixture of experts on Wikipedia text, on CPU cores.

    python scripts/demo/train_moe.py --text DIR --tokenizer FOLDER --output FOLDER
    python scripts/demo/train_moe.py --text DIR --tokenizer FOLDER --output FOLDER --balance 0.0005

DIR holds `wikipedia_train.jsonl.xz` and `wikipedia_heldout.jsonl.xz`, one JSON object with a field
`text` on each line. FOLDER receives a Qwen3Moe of 8.3 million parameters: 4 layers of 32 experts, 4
experts for each token. A small `--balance` leaves some experts that are rarely used. The weights
are not part of the repository.

The learning rate follows the clock: after a warm-up, a cosine that ends after `--minutes`. So any
machine finishes a model in that time, but no two runs have the same weights. Products use bfloat16
weights, as for the demo model (`train.py`). After each tenth of the time the script prints the
held-out loss and saves the model.

One run, with seed 1, `--balance 0.02`, one thread and the tokenizer of wiki-llama-5m (4096 tokens),
on an AMD EPYC with AVX-512 BF16 that other programs used too: 55 minutes, of which it had 26
minutes of one core; 6240 steps, 6.4 million tokens. Its perplexity in blocks of 512 tokens is 81.8
on the held-out articles, and 255.8 on WikiText-2 test (raw), whose spaces around punctuation are
rare in the training text. An expert receives 2.0 to 4.0 % of the choices in its layer; equal shares
are 3.1 %.

With `--balance 0.0005`, in 35 minutes of one core: 4828 steps, 4.9 million tokens; perplexity 87.9
on the held-out articles. An expert receives 0.1 to 11.6 % of the choices.
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
import platform
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from train import Tokens, held_out_loss, masters_of, step_of
from transformers import (
    AutoTokenizer,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    __version__,
)
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

# windows of 256 for 90 % of the time, because they are faster; then whole contexts
CONTEXT = 512
SHORT = 256
SHORT_TIME = 0.9
WARMUP = 100  # steps
ARTICLES = 256  # encoded and shuffled together


def main(line: list[str] | None = None) -> None:
    """Train, measure and save one model."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", type=Path, required=True, help="folder of the two texts")
    parser.add_argument(
        "--tokenizer",
        type=Path,
        required=True,
        help="folder of a tokenizer, or of a model with one",
    )
    parser.add_argument("--output", type=Path, required=True, help="folder of the model")
    parser.add_argument("--minutes", type=float, default=55.0, help="of training")
    parser.add_argument(
        "--balance",
        type=float,
        default=0.02,
        help="weight of the balance loss (router_aux_loss_coef)",
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--hidden", type=int, default=192)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--top", type=int, default=4, help="experts of each token")
    parser.add_argument("--intermediate", type=int, default=96, help="width of an expert")
    parser.add_argument("--batch-tokens", type=int, default=1024)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    options = parser.parse_args(line)

    torch.manual_seed(options.seed)
    torch.set_num_threads(options.threads)
    tokenizer: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(options.tokenizer)
    tokenizer.model_max_length = CONTEXT
    held_out = encoded(tokenizer, articles(options.text / "wikipedia_heldout.jsonl.xz")[:400])
    model = make_mixture(len(tokenizer), options)
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{parameters / 1e6:.2f} M parameters", flush=True)

    train_articles = articles(options.text / "wikipedia_train.jsonl.xz")
    weights, masters, optimizer = masters_of(model, weight_decay=0.1)
    whole = _loss_of(model)
    # Twice as fast; another compilation for whole contexts would not pay.
    compiled = torch.compile(whole, dynamic=False)
    rng = np.random.default_rng(options.seed)
    batches = {
        n: windows(tokenizer, train_articles, n, options.batch_tokens // n, rng)
        for n in (SHORT, CONTEXT)
    }
    started = time.time()
    cpu = time.process_time()
    step = 0
    tenth = 1
    losses = []
    while (progress := (time.time() - started) / (60 * options.minutes)) < 1:
        loss, balance = (
            compiled(next(batches[SHORT]))
            if progress < SHORT_TIME
            else whole(next(batches[CONTEXT]))
        )
        torch.autograd.backward(loss + options.balance * balance)
        rate = min(1.0, (step + 1) / WARMUP) * 0.5 * (1 + math.cos(math.pi * progress))
        step_of(weights, masters, optimizer, options.learning_rate * rate)
        step += 1
        losses.append(float(loss.detach()))
        if step % 100 == 0 or progress > tenth / 10:
            tokens = step * options.batch_tokens
            minutes = (time.time() - started) / 60
            print(
                f"{minutes:5.1f} min  step {step}  {tokens / 1e6:.2f} M tokens  loss "
                f"{np.mean(losses[-100:]):.4f}  balance "
                f"{float(balance.detach()) / options.top:.3f}  {tokens / minutes / 60:.0f} "
                "tokens/s",
                flush=True,
            )
        if progress > tenth / 10:
            tenth += 1
            model.eval()
            print(
                f"held-out loss {held_out_loss(model, held_out[: 16 * CONTEXT], CONTEXT):.4f}",
                flush=True,
            )
            save(model, tokenizer, options.output)
            model.train()
    model.eval()
    loss_at_end = held_out_loss(model, held_out[: 256 * CONTEXT], CONTEXT)
    record = {
        "made_by": "scripts/demo/train_moe.py",
        "seed": options.seed,
        "balance": options.balance,
        "parameters": parameters,
        "steps": step,
        "tokens_seen": step * options.batch_tokens,
        "training_seconds": round(time.time() - started),
        "cpu_seconds": round(time.process_time() - cpu),
        "held_out_loss": round(loss_at_end, 4),
        "held_out_perplexity": round(math.exp(loss_at_end), 2),
        "shares_of_experts": shares(model, held_out[: 64 * CONTEXT]),
        "hardware": f"{options.threads} threads, {platform.processor() or platform.machine()}",
        "torch": torch.__version__,
        "transformers": __version__,
    }
    save(model, tokenizer, options.output)
    (options.output / "training.json").write_text(json.dumps(record) + "\n", encoding="utf-8")
    print(
        json.dumps(
            {name: value for name, value in record.items() if name != "shares_of_experts"}, indent=2
        )
    )


def make_mixture(vocabulary: int, options: argparse.Namespace) -> Qwen3MoeForCausalLM:
    """A new Qwen3Moe in float32 with tied embeddings, heads of 32, and one key-value head for
    two heads.
    """
    config = Qwen3MoeConfig(
        vocab_size=vocabulary,
        hidden_size=options.hidden,
        intermediate_size=options.top * options.intermediate,
        moe_intermediate_size=options.intermediate,
        num_hidden_layers=options.layers,
        num_attention_heads=options.hidden // 32,
        num_key_value_heads=options.hidden // 64,
        head_dim=32,
        num_experts=options.experts,
        num_experts_per_tok=options.top,
        norm_topk_prob=True,
        router_aux_loss_coef=options.balance,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=1,
    )
    model = Qwen3MoeForCausalLM(config)
    model.set_attn_implementation("eager")  # both faster than the alternatives on a CPU
    model.set_experts_implementation("grouped_mm")
    return model


def _loss_of(
    model: Qwen3MoeForCausalLM,
) -> Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    experts = model.config.num_experts
    top = model.config.num_experts_per_tok

    def loss(batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        output = model.model(input_ids=batch[:, :-1], use_cache=False, output_router_logits=True)
        logits = model.lm_head(output.last_hidden_state).flatten(0, 1).float()
        # Layer by layer: over all layers together, one layer's rare expert could hide behind
        # another layer's frequent one.
        balances = [
            load_balancing_loss_func((layer.float(),), experts, top)
            for layer in output.router_logits
        ]
        return F.cross_entropy(logits, batch[:, 1:].flatten()), torch.stack(balances).mean()

    return loss


def articles(path: Path) -> list[str]:
    """The texts of a file."""
    with lzma.open(path, "rt", encoding="utf-8") as file:
        return [json.loads(line)["text"] for line in file]


def encoded(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> Tokens:
    """The tokens of texts, concatenated; each text begins with the tokenizer's own first token,
    if it has one.
    """
    return np.concatenate(
        [np.array(ids, dtype=np.int64) for ids in tokenizer(texts, verbose=False)["input_ids"]]
    )


def windows(
    tokenizer: PreTrainedTokenizerFast,
    texts: list[str],
    length: int,
    count: int,
    rng: np.random.Generator,
) -> Iterator[torch.Tensor]:
    """Batches of `count` windows of `length + 1` tokens, without end: a few hundred texts in
    random order, cut and shuffled.
    """
    while True:
        stream = encoded(tokenizer, [texts[i] for i in rng.permutation(len(texts))[:ARTICLES]])
        starts = rng.permutation((len(stream) - 1) // length) * length
        for first in range(0, len(starts) - count + 1, count):
            yield torch.from_numpy(
                np.stack([stream[s : s + length + 1] for s in starts[first : first + count]])
            )


@torch.no_grad()
def shares(model: Qwen3MoeForCausalLM, tokens: Tokens) -> list[list[float]]:
    """For each layer the share of its tokens' choices that each expert receives; they add up to
    1.
    """
    counts = torch.zeros(model.config.num_hidden_layers, model.config.num_experts)
    for ids in torch.from_numpy(tokens[: len(tokens) // CONTEXT * CONTEXT]).view(-1, 1, CONTEXT):
        routers = model.model(
            input_ids=ids, use_cache=False, output_router_logits=True
        ).router_logits
        for layer, logits in enumerate(routers):
            chosen = logits.topk(model.config.num_experts_per_tok).indices
            counts[layer] += torch.bincount(chosen.flatten(), minlength=model.config.num_experts)
    return [[round(float(share), 5) for share in layer / layer.sum()] for layer in counts]


def save(model: Qwen3MoeForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write the model as bfloat16 safetensors with a tensor for each matrix of an expert, and
    its tokenizer.
    """
    model.config.dtype = torch.bfloat16
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main()
