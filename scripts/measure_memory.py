"""Peak memory and time of a data-free prune of a large checkpoint, measured from outside the process.

    python scripts/measure_memory.py [--gigabytes 4] [--group row|matrix|all] [--folder DIR]

Makes a Llama-shaped checkpoint of random bfloat16 weights in two shards (without ever holding one), prunes its MLP linears
with emp-magnitude in a subprocess, and prints the kernel's high-water mark of its memory.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

import torch
from bench_helpers import run_and_watch

HIDDEN, INTERMEDIATE, VOCABULARY = 4096, 11008, 32000
PIECE = 1 << 24


def main() -> None:
    """Make, prune, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=4.0)
    parser.add_argument("--group", default="row")
    parser.add_argument("--folder", type=Path, help="where to work; default: a temporary folder")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as scratch:
        source, output = Path(scratch) / "model", Path(scratch) / "pruned"
        size = make_checkpoint(source, arguments.gigabytes)
        command = [sys.executable, "-m", "emp_llm.prune", "--model", str(source), "--output", str(output)]
        command += ["--method", "emp-magnitude", "--group", arguments.group]
        start = time.perf_counter()
        peak = run_and_watch(command)
        seconds = time.perf_counter() - start
        stage = json.loads((output / "emp_report.json").read_text())["stages"]["prune"]
        print(f"\n{size / 1e9:.2f} GB in 2 shards, group {arguments.group}, {os.cpu_count()} CPUs:")
        print(f"peak resident memory {peak / 1e6:.0f} MB, wall {seconds:.1f} s (pruning itself {stage['seconds']:.1f} s)")


def make_checkpoint(folder: Path, gigabytes: float, shards: int = 2) -> int:
    """Write the checkpoint tensor by tensor, in some shards; returns its size in bytes."""
    layer = {
        "self_attn.q_proj": (HIDDEN, HIDDEN),
        "self_attn.k_proj": (HIDDEN, HIDDEN),
        "self_attn.v_proj": (HIDDEN, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HIDDEN),
        "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
        "mlp.up_proj": (INTERMEDIATE, HIDDEN),
        "mlp.down_proj": (HIDDEN, INTERMEDIATE),
        "input_layernorm": (HIDDEN,),
        "post_attention_layernorm": (HIDDEN,),
    }
    ends = {"model.embed_tokens": (VOCABULARY, HIDDEN), "lm_head": (VOCABULARY, HIDDEN), "model.norm": (HIDDEN,)}
    bytes_per_layer = 2 * sum(torch.Size(shape).numel() for shape in layer.values())
    bytes_of_ends = 2 * sum(torch.Size(shape).numel() for shape in ends.values())
    layers = max(2, round((gigabytes * 1e9 - bytes_of_ends) / bytes_per_layer))
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": shape for name, shape in ends.items()}
    for i in range(layers):
        shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    folder.mkdir()
    names = list(shapes)
    weight_map: dict[str, str] = {}
    for number in range(shards):
        part = names[len(names) * number // shards : len(names) * (number + 1) // shards]
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        weight_map |= dict.fromkeys(part, file)
        _write_shard(folder / file, {name: shapes[name] for name in part})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": layers,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "vocab_size": VOCABULARY,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return sum(path.stat().st_size for path in folder.iterdir())


def _write_shard(path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        size = 2 * torch.Size(shape).numel()
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)  # as the library does, so that weights lie at multiples of their size
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(PIECE, generator=generator).mul_(0.02).bfloat16()
    with path.open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        for shape in shapes.values():
            left = torch.Size(shape).numel()
            while left:
                # The same noise from another start each time: random enough for timing, and quick to make.
                start = int(torch.randint(0, PIECE // 2, (1,), generator=generator))
                piece = noise[start : start + min(left, PIECE // 2)]
                file.write(piece.view(torch.uint8).numpy().tobytes())
                left -= piece.numel()


if __name__ == "__main__":
    main()
