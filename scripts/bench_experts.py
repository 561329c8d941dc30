"""Half of the experts of a synthetic mixture removed: time and memory beside one calibration pass
and a copy of what is kept.

    python scripts/bench_experts.py [--gigabytes 4] [--samples 8] [--seqlen 256] [--folder DIR]

The mixture has the form of Qwen3-MoE: 32 experts of 768 neurons and 1024 hidden features in each
layer, random bfloat16 weights, one stored tensor for each matrix of an expert. Its weights stay on
disk and are loaded block by block. `calibrate` runs the same text through the same blocks; `cp`
copies the pruned checkpoint and syncs it. Results: scripts/results/bench_experts.md.
"""

import argparse
import json
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import Qwen3MoeConfig

from emp_llm.common.errors import format_bytes

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
tiny = import_module("tiny")
HIDDEN = 1024
INNER = 768
EXPERTS = 32
VOCABULARY = 32000


def make_mixture(folder: Path, gigabytes: float) -> int:
    """Write the mixture, a shard for each layer, and a tokenizer; returns the size of its
    weights in bytes.
    """
    each = 2 * (EXPERTS * 3 * INNER * HIDDEN + 4 * HIDDEN * HIDDEN)
    layers = max(2, round((gigabytes * 1e9 - 4 * VOCABULARY * HIDDEN) / each))
    config = Qwen3MoeConfig(
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        moe_intermediate_size=INNER,
        num_experts=EXPERTS,
        num_experts_per_tok=4,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=16,
        head_dim=HIDDEN // 16,
        vocab_size=VOCABULARY,
        dtype="bfloat16",
    )
    config.architectures = ["Qwen3MoeForCausalLM"]
    folder.mkdir(parents=True)
    config.save_pretrained(folder)
    tiny.make_tokenizer().save_pretrained(folder)
    matrix = torch.randn
    names = dict[str, str]()
    torch.manual_seed(0)

    def shard(number: int, tensors: dict[str, torch.Tensor]) -> None:
        file = f"model-{number + 1:05d}-of-{layers + 1:05d}.safetensors"
        save_file(tensors, folder / file, {"format": "pt"})
        names.update(dict.fromkeys(tensors, file))

    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        tensors = dict[str, torch.Tensor]()
        for leaf in ("q_proj", "k_proj", "v_proj", "o_proj"):
            tensors[f"{prefix}.self_attn.{leaf}.weight"] = (
                matrix(HIDDEN, HIDDEN) * 0.02
            ).bfloat16()
        for leaf in ("q_norm", "k_norm"):
            tensors[f"{prefix}.self_attn.{leaf}.weight"] = torch.ones(HIDDEN // 16).bfloat16()
        for leaf in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}.{leaf}.weight"] = torch.ones(HIDDEN).bfloat16()
        tensors[f"{prefix}.mlp.gate.weight"] = (matrix(EXPERTS, HIDDEN) * 0.02).bfloat16()
        for expert in range(EXPERTS):
            for leaf, shape in (
                ("gate_proj", (INNER, HIDDEN)),
                ("up_proj", (INNER, HIDDEN)),
                ("down_proj", (HIDDEN, INNER)),
            ):
                tensors[f"{prefix}.mlp.experts.{expert}.{leaf}.weight"] = (
                    matrix(*shape) * 0.02
                ).bfloat16()
        shard(layer, tensors)
    ends = {
        "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
        "lm_head.weight": (VOCABULARY, HIDDEN),
    }
    last = {name: (matrix(*shape) * 0.02).bfloat16() for name, shape in ends.items()}
    shard(layers, last | {"model.norm.weight": torch.ones(HIDDEN).bfloat16()})
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": names})
    )
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def timed(*command: str) -> tuple[float, int]:
    """Wall-clock seconds of a command, and the largest resident memory of all commands so far,
    in bytes.
    """
    start = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    return time.perf_counter() - start, resource.getrusage(
        resource.RUSAGE_CHILDREN
    ).ru_maxrss * 1024


def main(line: list[str] | None = None) -> None:
    """Build, measure, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gigabytes", type=float, default=4.0)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--seqlen", type=int, default=256)
    parser.add_argument("--folder", type=Path, help="for the model; default: a temporary folder")
    args = parser.parse_args(line)
    root = Path(tempfile.mkdtemp(prefix="bench-experts-", dir=args.folder))
    try:
        size = make_mixture(root / "model", args.gigabytes)
        text = [
            "--calibration",
            "demo",
            "--samples",
            str(args.samples),
            "--seqlen",
            str(args.seqlen),
            "--quiet",
        ]
        how = ["--device-map", "disk", "--batch-size", "1", *text]
        model = str(root / "model")
        run = [sys.executable, "-m"]
        pruned, memory = timed(
            *run,
            "emp_llm.prune",
            "--model",
            model,
            "--structure",
            "experts",
            "--method",
            "reap",
            "--sparsity",
            "0.5",
            *how,
            "--output",
            str(root / "out"),
        )
        passed, _ = timed(
            *run,
            "emp_llm.calibrate",
            "--model",
            model,
            *how,
            "--output",
            str(root / "norms.safetensors"),
        )
        copied, _ = timed("sh", "-c", f"cp -r {root / 'out'} {root / 'copy'} && sync")
        print(
            f"{format_bytes(size)}, {args.samples} x {args.seqlen} tokens, peak memory "
            f"{format_bytes(memory)}"
        )
        print(
            f"prune {pruned:.1f} s, calibrate {passed:.1f} s, cp and sync {copied:.1f} s: "
            f"{pruned / (passed + copied):.2f}"
        )
    finally:
        shutil.rmtree(root)


if __name__ == "__main__":
    main()
