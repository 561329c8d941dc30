"""Prune or quantise: perplexity, bytes and decoding speed of a model dense, quantised, packed and
narrowed, on a CPU.

    python scripts/study_quantise.py quality wiki-llama-5m --shared DIR
    python scripts/study_quantise.py quality SmolLM2-135M --shared DIR --smollm2 FOLDER \
        --samples 128 --limit 40
    python scripts/study_quantise.py speed wiki-llama-5m --shared DIR
    python scripts/study_quantise.py tables

"quality" and "speed" append to scripts/results/prune_or_quantise.jsonl; "tables" writes the tables
beside it. "demo" needs no DIR; "SmolLM2-135M" needs --smollm2 too, the folder that `make smollm2`
makes; "large" is a random Llama, for speed alone. All linear layers of the decoder blocks are
quantised, pruned or narrowed; embeddings and head stay as they are.

- 8 bits, bitsandbytes: LLM.int8, with a scale for each output. 4 bits, bitsandbytes: NF4 in blocks
  of 64.
- 8 bits, torch: `torch._weight_int8pack_mm`; weights are rounded to the nearest of 255 numbers,
  with a bfloat16 scale for each output. 4 bits, torch: `torch._weight_int4pack_mm_for_cpu`; the
  nearest of 16 numbers from the least to the greatest weight of each group of 64, with two bfloat16
  numbers for each group. All four without data.
- packed: `prune --method emp-admm --refit --targets all-linear`, and `pack`. zstd: `pack --zstd`,
  for shipping.
- neurons: `prune --structure neurons --method wanda --refit`, to the parameters that have the bytes
  of a packed model.

Each perplexity is of what runs: torch's bfloat16 products, the kernels of the quantised models, or
the packed runtime. Speed: greedy decoding of one sequence after a prompt, all models in turn in one
process; medians of the rounds.
"""

import argparse
import copy
import gc
import json
import logging
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

os.environ.setdefault("HF_HUB_OFFLINE", "1")
ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "scripts" / "results" / "prune_or_quantise.jsonl"
SPARSITIES = (0.4, 0.5, 0.6, 0.78)  # the last has the bytes of 4 bits
NARROWED = (0.4, 0.5)  # packed models whose bytes are given to narrowed ones
QUANTISED = ("8 bits, bitsandbytes", "8 bits, torch", "4 bits, bitsandbytes", "4 bits, torch")
GROUP = 64
SAMPLES = 64
BLOCK = 512
LIMIT = 200
PROMPT = 64
LARGE = {  # 0.14 billion weights, 97 % of them in the blocks: more than a cache holds
    "vocab_size": 2048,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 3,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "tie_word_embeddings": True,
}


def main(line: list[str] | None = None) -> None:
    """Measure, or write the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["quality", "speed", "tables"])
    parser.add_argument(
        "model",
        nargs="?",
        choices=["demo", "wiki-llama-5m", "SmolLM2-135M", "large"],
        default="demo",
    )
    parser.add_argument(
        "--shared", type=Path, help="folder with models/wiki-llama-5m and datasets/ by Hub id"
    )
    parser.add_argument("--smollm2", type=Path, help="SmolLM2-135M, as made by scripts/smollm2.py")
    parser.add_argument("--ways", nargs="+", default=[""], help="beginnings of names; default: all")
    parser.add_argument(
        "--folder",
        type=Path,
        help="working folder, whose pruned models are kept; default: a temporary folder",
    )
    parser.add_argument(
        "--samples", type=int, default=SAMPLES, help=f"calibration sequences; default: {SAMPLES}"
    )
    parser.add_argument(
        "--limit", type=int, default=LIMIT, help=f"blocks of the text; default: {LIMIT}"
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(line)
    logging.disable(logging.WARNING)
    options.results = options.results.resolve()
    options.smollm2 = options.smollm2 and options.smollm2.resolve()
    options.shared = options.shared and options.shared.resolve()
    options.folder = options.folder and options.folder.resolve()
    if options.what == "tables":
        text = tables(
            [json.loads(line) for line in options.results.read_text(encoding="utf-8").splitlines()]
        )
        options.results.with_suffix(".md").write_text(text, encoding="utf-8")
        print(text)
        return
    if options.model in ("wiki-llama-5m", "SmolLM2-135M"):
        # load_dataset finds the data sets here by their Hub ids.
        os.chdir(options.shared / "datasets")
    with tempfile.TemporaryDirectory() as scratch:
        folder = (options.folder or Path(scratch)) / options.model
        folder.mkdir(parents=True, exist_ok=True)
        entries = quality(options, folder) if options.what == "quality" else speed(options, folder)
    with options.results.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps({"model": options.model} | entry) + "\n" for entry in entries)


def source_of(options: argparse.Namespace) -> tuple[Path, str, str]:
    """The dense model, the calibration text, and the suite of the held-out text."""
    if options.model == "demo":
        return ROOT / "scripts" / "demo" / "model", "demo", "demo,seqlen=512"
    if options.model == "SmolLM2-135M":
        return options.smollm2, "wikitext2", "perplexity,seqlen=1024"
    return options.shared / "models" / options.model, "wikitext2", "perplexity,seqlen=512"


def quality(options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Losses and bytes of each way."""
    from emp_llm.evaluation.perplexity import block_length, perplexity, text_tokens
    from emp_llm.evaluation.suites import find_suite
    from emp_llm.models.loading import load_tokenizer

    dense, _, suite = source_of(options)
    corpus = find_suite(suite).corpus
    assert corpus is not None
    text = text_tokens(corpus, load_tokenizer(dense))
    entries = []
    for name, make in ways(options, folder).items():
        start = time.perf_counter()
        model, shipped = make()
        block = block_length(corpus, model.config)
        found = perplexity(model, text, block, limit=options.limit)
        entries.append(
            {
                "way": name,
                "bytes": bytes_of(model),
                "shipped": shipped,
                "losses": [round(loss, 6) for loss in found.block_losses],
                "tokens": list(found.block_tokens),
                "seconds": round(time.perf_counter() - start, 1),
            }
        )
        print(name, entries[-1]["bytes"], shipped, found.value, entries[-1]["seconds"], flush=True)
        del model
        gc.collect()
    return entries


def ways(
    options: argparse.Namespace, folder: Path
) -> dict[str, Callable[[], tuple[Any, int | None]]]:
    """Name -> a function that returns the model, and the bytes of its packed shards if it has any.

    The models of "large" are random, and pruned by magnitude: they are for speed alone.
    """
    from emp_llm.models.loading import load_model

    if options.model == "large":
        return {
            "dense, bfloat16": lambda: (copy.deepcopy(large()), None),
            **{name: partial(quantised, None, name) for name in QUANTISED},
            **{
                f"packed, {sparsity:.0%} zeros": partial(sparse, sparsity)
                for sparsity in SPARSITIES
            },
        }
    dense, calibration, _ = source_of(options)

    def packed(sparsity: float) -> tuple[Any, int | None]:
        from emp_llm.runtime.loader import load

        pruned = folder / f"pruned-{sparsity}"
        made = [folder / f"{pruned.name}{end}" for end in ("-packed", "-zstd")]
        if not pruned.exists():
            run(
                "prune",
                "--model",
                dense,
                "--method",
                "emp-admm",
                "--sparsity",
                sparsity,
                "--refit",
                "--targets",
                "all-linear",
                "--calibration",
                calibration,
                "--samples",
                options.samples,
                "--seqlen",
                BLOCK,
                "--output",
                pruned,
            )
        if not made[-1].exists():
            run("pack", pruned, made[0], "--overwrite")
            run("pack", pruned, made[1], "--zstd")
        shipped = sum(path.stat().st_size for path in made[1].glob("*.safetensors"))
        return load(made[0]), shipped

    def narrow(sparsity: float) -> tuple[Any, int | None]:
        output = folder / f"neurons-{sparsity}"
        if not output.exists():
            size = bytes_of(packed(sparsity)[0]) // 2
            run(
                "prune",
                "--model",
                dense,
                "--structure",
                "neurons",
                "--method",
                "wanda",
                "--refit",
                "--parameters",
                size,
                "--width-multiple",
                8,
                "--calibration",
                calibration,
                "--samples",
                options.samples,
                "--seqlen",
                BLOCK,
                "--output",
                output,
            )
        return load_model(output, "cpu"), None

    found: dict[str, Callable[[], tuple[Any, int | None]]] = {
        "dense, bfloat16": lambda: (load_model(dense, "cpu"), None),
        **{name: partial(quantised, dense, name) for name in QUANTISED},
        **{f"packed, {sparsity:.0%} zeros": partial(packed, sparsity) for sparsity in SPARSITIES},
        **{
            f"neurons, the bytes of packed {sparsity:.0%}": partial(narrow, sparsity)
            for sparsity in NARROWED
        },
    }
    return {name: way for name, way in found.items() if name.startswith(tuple(options.ways))}


def run(command: str, *line: object) -> None:
    """A command of emp-llm."""
    subprocess.run([sys.executable, "-m", "emp_llm", command, *map(str, line), "-q"], check=True)


@cache
def large() -> Any:
    """A random Llama in bfloat16."""
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(max_position_embeddings=4096, **LARGE)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def linear_layers(model: Any) -> dict[str, nn.Linear]:
    """Those of the decoder blocks, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if type(module) is nn.Linear and ".layers." in name
    }


def quantised(folder: Path | None, way: str) -> tuple[Any, None]:
    """The model of a folder, or the large one, with other linear layers."""
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    how: dict[str, Any] = {"dtype": torch.bfloat16}
    if way == "8 bits, bitsandbytes":
        how |= {"quantization_config": BitsAndBytesConfig(load_in_8bit=True), "device_map": "cpu"}
    elif way == "4 bits, bitsandbytes":
        four = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
        )
        how |= {"quantization_config": four, "device_map": "cpu"}
    with tempfile.TemporaryDirectory() as scratch:
        if folder is None:
            large().save_pretrained(scratch)
        model = AutoModelForCausalLM.from_pretrained(folder or scratch, **how).eval()
    if way.endswith("torch"):
        for name, layer in linear_layers(model).items():
            model.set_submodule(name, (Eight if way[0] == "8" else Four)(layer.weight.detach()))
    return model, None


def sparse(sparsity: float) -> tuple[Any, None]:
    """The large model, packed, whose rows have lost their smallest weights."""
    from emp_llm.runtime import SparseLinear
    from emp_llm.runtime.packed_rows import pack_rows

    model = copy.deepcopy(large())
    for name, layer in linear_layers(model).items():
        weight = layer.weight.detach()
        least = weight.abs().float().topk(round(sparsity * weight.shape[1]), largest=False).indices
        model.set_submodule(name, SparseLinear(pack_rows(weight.scatter(1, least, 0))))
    return model, None


class Eight(nn.Module):
    """Eight bits for each weight, a scale for each output."""

    words: Tensor
    scales: Tensor

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.register_buffer("scales", (weight.float().abs().amax(1) / 127).bfloat16())
        self.register_buffer(
            "words",
            (weight.float() / self.scales.float()[:, None]).round().clamp(-127, 127).to(torch.int8),
        )

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        return torch._weight_int8pack_mm(flat, self.words, self.scales).view(*x.shape[:-1], -1)


class Four(nn.Module):
    """Four bits for each weight, two numbers for each group of inputs: value = scale (word - 8)
    + middle.
    """

    words: Tensor
    scales: Tensor

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        groups = weight.float().view(weight.shape[0], -1, GROUP)
        low = groups.amin(-1, keepdim=True)
        high = groups.amax(-1, keepdim=True)
        scales = ((high - low) / 15).clamp(min=1e-8).bfloat16().float()
        middles = (low + 8 * scales).bfloat16().float()
        words = (
            ((groups - middles) / scales + 8)
            .round()
            .clamp(0, 15)
            .to(torch.int32)
            .view(weight.shape)
        )
        self.register_buffer("words", torch._convert_weight_to_int4pack_for_cpu(words, 1))
        self.register_buffer(
            "scales", torch.cat([scales, middles], -1).permute(1, 0, 2).contiguous().bfloat16()
        )

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        return torch._weight_int4pack_mm_for_cpu(flat, self.words, GROUP, self.scales).view(
            *x.shape[:-1], -1
        )


def bytes_of(model: Any) -> int:
    """The bytes of a model's weights in memory, with the scales of quantised ones."""
    total: int = sum(
        {each.data_ptr(): each.nbytes for each in [*model.parameters(), *model.buffers()]}.values()
    )
    for module in model.modules():
        if type(module).__name__ == "Linear8bitLt":
            total += 4 * module.out_features  # a float32 scale for each, held in its state
        if type(module).__name__ == "Linear4bit":
            total += module.weight.quant_state.absmax.nbytes
    return total


def speed(options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Seconds of the new tokens of each way, in rounds."""
    from bench_helpers import hardware

    from emp_llm.commands.bench import _timed_run
    from emp_llm.common.errors import count_of

    models = {name: make()[0] for name, make in ways(options, folder).items()}
    prompt = torch.randint(3, 1000, (1, PROMPT), generator=torch.Generator().manual_seed(0))
    times: dict[str, list[float]] = {name: [] for name in models}
    for number in range(options.repeats + 1):
        for name, model in models.items():
            seconds = _timed_run(model, prompt, options.new_tokens).decode
            if number:  # the first round warms up
                times[name].append(seconds)
    machine = f"{hardware('cpu')}; {count_of(torch.get_num_threads(), 'thread')}"
    return [
        {
            "way": name,
            "bytes": bytes_of(models[name]),
            "decode_seconds": seconds,
            "new_tokens": options.new_tokens,
            "machine": machine,
        }
        for name, seconds in times.items()
    ]


def tables(entries: list[dict[str, Any]]) -> str:
    """A table for each model; later measurements of a way replace earlier ones."""
    from emp_llm.common.tables import markdown_table
    from emp_llm.evaluation.comparison import Value, change_of

    parts = [
        "# Prune or quantise?\n\n`python scripts/study_quantise.py tables`: its beginning "
        "says what each row is."
    ]
    for model in dict.fromkeys(entry["model"] for entry in entries):
        found: dict[str, dict[str, Any]] = {}
        for entry in entries:
            if entry["model"] == model:
                found.setdefault(entry["way"], {}).update(entry)
        base = found["dense, bfloat16"]
        values = {}
        for way, entry in found.items():
            if "losses" in entry:
                losses = tuple(zip(entry["losses"], entry["tokens"], strict=True))
                mean = sum(loss * count for loss, count in losses) / sum(entry["tokens"])
                values[way] = Value(math.exp(mean), losses=losses)
        rows = [
            [
                "",
                "weights in memory",
                "",
                "to ship",
                "perplexity",
                "decode, tokens/s",
                "against dense",
            ]
        ]
        for way, entry in found.items():
            shipped = f"{entry['shipped'] / base['bytes']:.1%}" if entry.get("shipped") else ""
            cells = [
                way,
                f"{entry['bytes'] / 1e6:.2f} MB",
                f"{entry['bytes'] / base['bytes']:.1%}",
                shipped,
            ]
            if entry is base or way not in values:
                cells.append(f"{values[way].value:.3f}" if way in values else "")
            else:
                change = change_of("perplexity", values[way], values["dense, bfloat16"])
                cells.append(f"{change.value:+.2f} ± {change.stderr:.2f} %")
            if "decode_seconds" in entry:
                seconds = entry["decode_seconds"]
                ratios = sorted(a / b for a, b in zip(base["decode_seconds"], seconds, strict=True))
                rate = entry["new_tokens"] / statistics.median(seconds)
                cells += [
                    f"{rate:.1f}",
                    f"{statistics.median(ratios):.2f} x ({ratios[0]:.2f} to {ratios[-1]:.2f})",
                ]
            rows.append([*cells, *[""] * (len(rows[0]) - len(cells))])
        parts.append(f"## {model}\n\n{markdown_table(rows, as_markdown=True)}")
        if "machine" in base:
            parts.append(
                f"Speed: {base['machine']}; {base['new_tokens']} new tokens after {PROMPT}."
            )
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    main()
