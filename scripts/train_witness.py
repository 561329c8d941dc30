"""Trains a Llama of about 100 million parameters on Wikipedia text, and runs the main rows of the
study on it.

    python scripts/train_witness.py --text DIR --output FOLDER --table docs/witness.md
    python scripts/train_witness.py --text DIR --output FOLDER --tiny

The first takes less than ten minutes on one data-centre GPU; `WITNESS=DIR bash scripts/on_gpu.sh`
runs it. The second tries everything on a CPU, with a model of 0.1 million parameters.

DIR holds `wikipedia_train.jsonl.xz` and `wikipedia_heldout.jsonl.xz`, one JSON object with a field
`text` on each line. The script trains a tokenizer and the model on the first file, calibrates on
its first articles, and evaluates on the second file. The learning rate follows a cosine over the
steps or the seconds, whichever end first. FOLDER receives the checkpoint and the texts; a
checkpoint that is already there is used again. The rows are commands (`witness_rows.py`), and the
table shows them.
"""

import argparse
import json
import lzma
import math
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from bench_helpers import hardware
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from witness_rows import Budget, rows_of_the_table, write_texts

sys.path.insert(0, str(Path(__file__).parent / "demo"))

from train import make_tokenizer

TRAIN = "wikipedia_train.jsonl.xz"
HELD_OUT = "wikipedia_heldout.jsonl.xz"


@dataclass(frozen=True)
class Plan:
    """The model and its training.

    Attributes:
        vocabulary, hidden, intermediate, layers, heads: of the Llama; embeddings are tied.
        context: tokens of a training sequence, of a calibration sequence, and of a block of the
            evaluation.
        steps, batch: training steps at most, and sequences in each.
        micro_batch: sequences in a forward pass.
        seconds: of the training, at most.
        learning_rate, warmup, weight_decay: AdamW with a warm-up over some steps and a cosine to a
            tenth of the rate.
        articles: of the training text; None: all.
        samples, blocks: calibration sequences; blocks of the evaluation, None: all.
    """

    vocabulary: int = 16384
    hidden: int = 768
    intermediate: int = 2304
    layers: int = 12
    heads: int = 12
    context: int = 1024
    steps: int = 2600
    batch: int = 64
    micro_batch: int = 64
    seconds: float = 240.0
    learning_rate: float = 1.5e-3
    warmup: int = 100
    weight_decay: float = 0.1
    articles: int | None = None
    samples: int = 128
    blocks: int | None = None


TINY = Plan(512, 64, 160, 2, 4, 64, 30, 8, 8, 60.0, 3e-3, 5, articles=200, samples=16, blocks=8)


def main(line: list[str] | None = None) -> None:
    """Train if necessary, run the rows, and write the table after each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", type=Path, required=True, help="folder with the two texts")
    parser.add_argument(
        "--output",
        type=Path,
        required=True,
        help="folder for the checkpoint, the texts and the pruned models",
    )
    parser.add_argument(
        "--table", type=Path, help="file of the table; default: witness.md in the output folder"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--seconds",
        type=float,
        default=570,
        help="no row starts that would probably end later than this",
    )
    parser.add_argument(
        "--train-seconds", type=float, default=Plan.seconds, help="of the training, at most"
    )
    parser.add_argument(
        "--micro-batch", type=int, help="sequences in a forward pass; lower it if memory runs out"
    )
    parser.add_argument("--no-compile", action="store_true", help="train without torch.compile")
    parser.add_argument(
        "--tiny", action="store_true", help="a model of 0.1 million parameters and a few steps"
    )
    options = parser.parse_args(line)
    budget = Budget(options.seconds)
    plan = TINY if options.tiny else replace(Plan(), seconds=options.train_seconds)
    plan = replace(plan, micro_batch=min(options.micro_batch or plan.micro_batch, plan.batch))
    options.output.mkdir(parents=True, exist_ok=True)
    model = options.output / "model"
    record = model / "training.json"
    if not record.is_file():
        os.environ["TOKENIZERS_PARALLELISM"] = "true"
        articles = list(read_articles(options.text / TRAIN, plan.articles))
        write_texts(
            options.output, articles, list(read_articles(options.text / HELD_OUT)), plan.context
        )
        make(
            model, articles, plan, options.device, compiled=not (options.no_compile or options.tiny)
        )
    table = options.table or options.output / "witness.md"
    about = f"{hardware(options.device)}. Training: `{record.read_text(encoding='utf-8').strip()}`"
    for page in rows_of_the_table(
        options.output, plan.samples, plan.context, plan.blocks, options.device, about, budget
    ):
        table.parent.mkdir(parents=True, exist_ok=True)
        table.write_text(page, encoding="utf-8")
    print(table.read_text(encoding="utf-8"))


def read_articles(path: Path, count: int | None = None) -> Iterator[str]:
    """The texts of a .jsonl.xz file, or the first of them."""
    with lzma.open(path, "rt", encoding="utf-8") as lines:
        for number, line in enumerate(lines):
            if number == count:
                return
            yield json.loads(line)["text"]


def make(folder: Path, articles: list[str], plan: Plan, device: str, compiled: bool) -> None:
    """Train the tokenizer and the model, and write them with a record of the training."""
    torch.manual_seed(0)
    start = time.perf_counter()
    tokenizer = make_tokenizer(articles[::4], plan.vocabulary)
    stream = encode(tokenizer, articles)
    model = make_model(plan, len(tokenizer)).to(device)
    parameters = sum(weight.numel() for weight in model.parameters())
    prepared = time.perf_counter() - start
    print(
        f"{parameters / 1e6:.1f} M parameters, {len(stream) / 1e6:.1f} M tokens; {prepared:.0f} s",
        flush=True,
    )
    found = train(model, torch.from_numpy(stream).to(device), plan, compiled)
    # Not model.to(...), which would also round the rotary frequencies, unlike loading.
    for weight in model.parameters():
        weight.data = weight.data.to(torch.bfloat16)
    model.config.dtype = torch.bfloat16
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    counts: dict[str, object] = {
        "parameters": parameters,
        "text_tokens": len(stream),
        "preparation_seconds": round(prepared),
    }
    (folder / "training.json").write_text(
        json.dumps(asdict(plan) | counts | found) + "\n", encoding="utf-8"
    )


def encode(tokenizer: PreTrainedTokenizerFast, articles: list[str]) -> np.ndarray:
    """The tokens of all articles in one int32 stream, separated by an empty line, as in the
    texts of the evaluation.
    """
    parts = []
    for start in range(0, len(articles), 1000):
        encoded = tokenizer.backend_tokenizer.encode_batch(
            [text + "\n\n" for text in articles[start : start + 1000]]
        )
        parts += [np.array(each.ids, dtype=np.int32) for each in encoded]
    return np.concatenate(parts)


def make_model(plan: Plan, vocabulary: int) -> LlamaForCausalLM:
    """A new Llama in float32."""
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=plan.hidden,
        intermediate_size=plan.intermediate,
        num_hidden_layers=plan.layers,
        num_attention_heads=plan.heads,
        num_key_value_heads=plan.heads // 2,
        max_position_embeddings=plan.context,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
        initializer_range=0.02,
    )
    return LlamaForCausalLM(config)


def train(model: LlamaForCausalLM, stream: Tensor, plan: Plan, compiled: bool) -> dict[str, object]:
    """Train in place, with bfloat16 products and float32 weights; returns steps, tokens, seconds
    and the last losses.
    """
    decayed = [
        weight
        for name, weight in model.named_parameters()
        if weight.dim() == 2 and "embed" not in name
    ]
    others = [
        weight for name, weight in model.named_parameters() if weight.dim() != 2 or "embed" in name
    ]
    groups = [
        {"params": decayed, "weight_decay": plan.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), fused=True)
    device = stream.device.type

    def loss_of(batch: Tensor) -> Tensor:
        with torch.autocast(device, torch.bfloat16):
            logits = model(input_ids=batch[:, :-1], use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())

    run = torch.compile(loss_of, dynamic=False) if compiled else loss_of
    generator = torch.Generator().manual_seed(0)
    parts = math.ceil(plan.batch / plan.micro_batch)
    losses: list[float] = []
    start = time.perf_counter()
    step = 0
    compiling = 0.0
    model.train()
    while (done := max(step / plan.steps, _share_of_time(start, compiling, plan.seconds))) < 1:
        total = torch.zeros((), device=stream.device)
        for batch in batches(stream, plan, generator).chunk(parts):
            loss = run(batch) * (len(batch) / plan.batch)
            torch.autograd.backward(loss)
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = (
                plan.learning_rate
                * min(1.0, (step + 1) / plan.warmup)
                * (0.55 + 0.45 * math.cos(math.pi * done))
            )
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        losses.append(float(total))
        compiling = compiling or time.perf_counter() - start
        if step % 100 == 0 or step <= 3:
            speed = step * plan.batch * plan.context / (time.perf_counter() - start)
            print(
                f"step {step}/{plan.steps}  loss {np.mean(losses[-100:]):.3f}  {speed:,.0f} "
                "tokens/s",
                flush=True,
            )
    model.eval()
    return {
        "steps_done": step,
        "tokens_seen": step * plan.batch * plan.context,
        "training_seconds": round(time.perf_counter() - start),
        "training_loss": round(float(np.mean(losses[-100:])), 3),
    }


def _share_of_time(start: float, compiling: float, seconds: float) -> float:
    """How much of the time after the first step has passed: the learning rate does not fall
    while the first step compiles.
    """
    if not compiling:
        return 0.0
    return (time.perf_counter() - start - compiling) / max(seconds - compiling, seconds / 2)


def batches(stream: Tensor, plan: Plan, generator: torch.Generator) -> Tensor:
    """A batch of windows at random places of the stream, with one token more than the context:
    int64.
    """
    starts = torch.randint(0, len(stream) - plan.context - 1, (plan.batch, 1), generator=generator)
    places = starts + torch.arange(plan.context + 1)
    return stream[places.to(stream.device)].long()


if __name__ == "__main__":
    main()
