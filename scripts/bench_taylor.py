"""Memory and time of Taylor scores, block by block, against one training step on the same tokens.

    python scripts/bench_taylor.py --write scripts/results/taylor.md

Each runs in a process of its own on a random Llama in float32, one sequence at a time: the scores
of all heads and neurons; a forward and a backward pass with gradients of all weights; and the same
with a step of AdamW.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SIZES = {
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 12,
}


def main(line: list[str] | None = None) -> None:
    """Measure, and write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", type=Path)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tiny", action="store_true", help="a small model, to try the script")
    parser.add_argument("--role", help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(line)
    if options.role is not None:
        print(json.dumps(measure(options.role, options.model, options.tokens)))
        return
    from bench_helpers import make_llama

    sizes = SIZES | {"hidden_size": 64, "num_attention_heads": 4} if options.tiny else SIZES
    with tempfile.TemporaryDirectory() as folder:
        weights = make_llama(Path(folder) / "model", sizes)
        taken: dict[str, list[dict[str, float]]] = {}
        for _ in range(options.rounds):
            for role in ("load", "taylor", "backward", "adamw"):
                command = [
                    sys.executable,
                    __file__,
                    "--role",
                    role,
                    "--model",
                    f"{folder}/model",
                    "--tokens",
                    str(options.tokens),
                ]
                done = subprocess.run(command, check=True, capture_output=True, text=True)
                taken.setdefault(role, []).append(json.loads(done.stdout.splitlines()[-1]))
    text = _page(options, sizes, weights, taken)
    print(text)
    if options.write is not None:
        options.write.write_text(text, encoding="utf-8")


def measure(role: str, model: Path, tokens: int) -> dict[str, float]:
    """Seconds and peak memory of one role, in this process."""
    import torch

    from emp_llm.models.loading import load_model

    loaded = load_model(model, "cpu", "float32")
    ids = torch.randint(0, 32000, (tokens // 512, 512), generator=torch.Generator().manual_seed(0))
    start = time.perf_counter()
    if role == "taylor":
        _taylor(loaded, model, ids)
    elif role != "load":
        loaded.train().requires_grad_(True)
        optimizer = torch.optim.AdamW(loaded.parameters()) if role == "adamw" else None
        for row in ids:
            loaded(row[None], labels=row[None], use_cache=False).loss.backward()
        if optimizer is not None:
            optimizer.step()
    return {
        "seconds": time.perf_counter() - start,
        "bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    }


def _taylor(model: Any, folder: Path, ids: Any) -> None:
    from emp_llm.models.blockwise import BlockwiseModel
    from emp_llm.options.recipe import Structure
    from emp_llm.structure.scores import taylor_sums
    from emp_llm.structure.unit_model import unit_model

    taylor_sums(BlockwiseModel(model), unit_model(folder, Structure(units="both")).units, ids, 1)


def _page(
    options: argparse.Namespace, sizes: Any, weights: int, taken: dict[str, list[dict[str, float]]]
) -> str:
    import statistics

    from emp_llm.common.errors import format_bytes
    from emp_llm.common.machine import processor_name
    from emp_llm.common.tables import markdown_table

    base = statistics.median(each["bytes"] for each in taken["load"])
    rows = [["what", "seconds", "peak memory", "beyond the loaded model"]]
    names = {
        "taylor": "Taylor scores of all heads and neurons",
        "backward": "forward and backward",
        "adamw": "one step of AdamW",
    }
    for role, name in names.items():
        seconds, peak = (
            statistics.median(each[key] for each in taken[role]) for key in ("seconds", "bytes")
        )
        rows.append(
            [
                name,
                f"{seconds:.1f}",
                format_bytes(int(peak)),
                format_bytes(max(0, int(peak - base))),
            ]
        )
    how = f"--tokens {options.tokens} --rounds {options.rounds} --write scripts/results/taylor.md"
    return (
        f"# Taylor scores against a training step\n\n`python scripts/bench_taylor.py {how}`: "
        f"{processor_name()}. A Llama of {2 * weights / 1e9:.2f} GB in float32 "
        f"({sizes['num_hidden_layers']} layers of width {sizes['hidden_size']}), "
        f"{options.tokens:,} tokens, one sequence of 512 at a time; medians of "
        f"{options.rounds}.\n\n{markdown_table(rows, as_markdown=True)}\n"
    )


if __name__ == "__main__":
    main()
