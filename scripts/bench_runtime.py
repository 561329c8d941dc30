"""Time of the sparse runtime on a CPU: one layer against dense products, and a whole model of 1
billion weights.

    python scripts/bench_runtime.py [--threads 2] [--repeats 15] [--rows 22016] [--layer-only]
    [--write]

Layer: a matrix of rows x 4096 with random zeros, of bfloat16 where nothing else is said. "copy" is
the time in which torch copies the dense matrix: a dense product at the bandwidth of a copy (bytes
copied per second) takes as long. Reading alone may be up to twice as fast. "torch" is torch's own
linear. "limit" is the ratio of the bytes: no product can be faster than a dense one by more, if
both read at full bandwidth. The runs of a table take turns; ratios are medians of the rounds. One
thread is timed by its processor time, which other programs on the machine do not lengthen as they
do the time of the clock.

Model: a random Llama of TinyLlama's shape with tied embeddings, pruned to 50 % of all linear layers
by magnitude, packed, and measured by `emp-llm bench`, each in a process of its own so that its
memory is its own.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from bench_helpers import hardware, in_turn, make_llama, wall_time
from torch.nn import functional

from emp_llm.common.machine import processor_name
from emp_llm.runtime.loader import products_of
from emp_llm.runtime.packed_rows import pack_rows

COLUMNS = 4096
ZEROS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7)
PRUNED = (0.4, 0.5, 0.6)
TOKENS = (1, 2, 4, 8, 9, 16, 32, 64, 128, 256, 512)
MODEL = {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "tie_word_embeddings": True,
}
RESULTS = Path(__file__).parent / "results" / "runtime.md"


def main(line: list[str] | None = None) -> None:
    """Measure, print, and write if asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--rows", type=int, default=22016)
    parser.add_argument(
        "--layer-only", action="store_true", help="leave out the model of 1 billion weights"
    )
    parser.add_argument(
        "--folder", type=Path, help="where to make that model (6 GB); default: a temporary folder"
    )
    parser.add_argument("--write", action="store_true", help=f"add the tables to {RESULTS.name}")
    options = parser.parse_args(line)
    torch.set_num_threads(options.threads)
    parts = [
        zeros_table(options),
        tokens_table(options, torch.bfloat16, PRUNED),
        tokens_table(options, torch.float16, (0.5,)),
        tokens_table(options, torch.float32, (0.5,)),
    ]
    if not options.layer_only:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            parts.append(model_table(Path(folder), options))
    command = (
        f"python scripts/bench_runtime.py --threads {options.threads} --repeats "
        f"{options.repeats} --rows {options.rows}"
    )
    page = (
        "\n\n".join(
            [
                f"## {processor_name()}\n\n`{command}`: {hardware('cpu')}; "
                f"{options.threads} threads.",
                *parts,
            ]
        )
        + "\n"
    )
    print(page)
    if options.write:
        RESULTS.write_text(f"{RESULTS.read_text(encoding='utf-8')}\n{page}", encoding="utf-8")


def random_weight(rows: int, zeros: float) -> torch.Tensor:
    """A bfloat16 matrix with a share of zeros at random places."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(rows, COLUMNS, generator=generator)
    return weight.masked_fill_(torch.rand(rows, COLUMNS, generator=generator) < zeros, 0).bfloat16()


def zeros_table(options: argparse.Namespace) -> str:
    """One token, by the share of zeros."""
    lines = [
        f"One token, {options.rows} x {COLUMNS}, by the share of zeros:\n",
        "| zeros | sparse | copy | torch | copy / sparse | torch / sparse | limit "
        "|\n|---:|---:|---:|---:|---:|---:|---:|",
    ]
    x = torch.randn(1, COLUMNS).bfloat16()
    for zeros in ZEROS:
        weight = random_weight(options.rows, zeros)
        rows = pack_rows(weight)
        room = torch.empty_like(weight)
        product = products_of(rows)
        runs = {
            "copy": partial(room.copy_, weight),
            "sparse": partial(product, x),
            "torch": partial(functional.linear, x, weight),
        }
        times = rounds(runs, options.repeats)
        limit = weight.nbytes / (rows.mask.nbytes + rows.values.nbytes)
        lines.append(
            f"| {zeros:.0%} | {shown(times['sparse'])} | {shown(times['copy'])} | "
            f"{shown(times['torch'])} | {ratio(times['copy'], times['sparse'])} | "
            f"{ratio(times['torch'], times['sparse'])} | {limit:.2f} |"
        )
        print(lines[-1], flush=True)
    return "\n".join(lines)


def tokens_table(options: argparse.Namespace, dtype: torch.dtype, shares: Sequence[float]) -> str:
    """By the number of tokens, for some shares of zeros."""
    lines = [
        f"{options.rows} x {COLUMNS}, by the number of tokens and the share of zeros; torch is its "
        f"linear, both in {str(dtype).removeprefix('torch.')}:\n",
        "| tokens | torch |" + "".join(f" {zeros:.0%} | torch / sparse |" for zeros in shares),
        "|---:" * (2 + 2 * len(shares)) + "|",
    ]
    weight = random_weight(options.rows, 0.5).to(dtype)
    products = {
        zeros: products_of(pack_rows(random_weight(options.rows, zeros).to(dtype)))
        for zeros in shares
    }
    for tokens in TOKENS:
        x = torch.randn(tokens, COLUMNS).to(dtype)
        runs = {"torch": partial(functional.linear, x, weight)}
        runs |= {f"{zeros:.0%}": partial(product, x) for zeros, product in products.items()}
        times = rounds(runs, max(5, options.repeats // (1 + tokens // 32)))
        dense = times.pop("torch")
        cells = [f"{shown(sparse)} | {ratio(dense, sparse)}" for sparse in times.values()]
        lines.append(f"| {tokens} | {shown(dense)} | {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    return "\n".join(lines)


def model_table(folder: Path, options: argparse.Namespace) -> str:
    """A model of 1 billion weights, as the command measures it."""
    make_llama(folder / "dense", MODEL)
    run(
        "prune",
        "--model",
        folder / "dense",
        "--method",
        "magnitude",
        "--sparsity",
        0.5,
        "--targets",
        "all-linear",
        "--output",
        folder / "pruned",
        "-q",
    )
    shutil.rmtree(folder / "dense")
    run("pack", folder / "pruned", folder / "packed", "-q")
    copies = [copy_time(folder) for _ in range(3)]
    run(
        "bench",
        folder / "packed",
        "--prompt-tokens",
        256,
        "--new-tokens",
        16,
        "--batch-sizes",
        1,
        "--device",
        "cpu",
        "--output",
        folder / "bench.json",
        threads=options.threads,
    )
    found = json.loads((folder / "bench.json").read_text())
    dense, sparse, (batch,) = found["dense"], found["sparse"], found["batches"]
    prefill = batch["prefill"]
    decode = batch["decode"]
    copy = statistics.median(copies)
    return (
        f"A Llama of TinyLlama's shape with tied embeddings ({dense['weight_bytes'] / 1e9:.2f} "
        "GB), 50 % of all linear layers zero, bfloat16, by `emp-llm bench`:\n\n"
        "| | dense, torch | sparse | ratio |\n|---|---:|---:|---:|\n"
        f"| prefill of 256 tokens, tokens/s | {prefill['dense']:.1f} | {prefill['sparse']:.1f} | "
        f"{prefill['ratio']:.2f} |\n| decode, tokens/s | {decode['dense']:.2f} | "
        f"{decode['sparse']:.2f} | {decode['ratio']:.2f} |\n| weights in memory | "
        f"{dense['weight_bytes'] / 1e9:.2f} GB | {sparse['weight_bytes'] / 1e9:.2f} GB | "
        f"{sparse['weight_bytes'] / dense['weight_bytes']:.2f} |\n| memory that the process grew "
        f"by | {dense['memory_bytes'] / 1e9:.2f} GB | {sparse['memory_bytes'] / 1e9:.2f} GB | "
        f"{found['memory_ratio']:.2f} |\n| load, against `cp` of the packed folder | | "
        f"{sparse['load_seconds']:.2f} s | {sparse['load_seconds'] / copy:.2f} |"
    )


def copy_time(folder: Path) -> float:
    """Seconds that `cp` takes for the packed folder, which is in the page cache."""
    target = folder / "copy"
    seconds = wall_time(lambda: subprocess.run(["cp", "-r", folder / "packed", target], check=True))
    shutil.rmtree(target)
    return seconds


def run(*line: object, threads: int = 2) -> None:
    """A command of emp-llm."""
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    subprocess.run([sys.executable, "-m", "emp_llm", *map(str, line)], check=True, env=environment)


def rounds(runs: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Seconds of each run in each round; one round more warms up."""
    times, failed = in_turn(
        runs,
        repeats,
        measure=processor_time if torch.get_num_threads() == 1 else wall_time,
        warm_up=True,
    )
    if failed:
        raise SystemExit(str(failed))
    time.sleep(0.05)
    return times


def processor_time(run: Callable[[], object]) -> float:
    """Seconds of the processor that a call takes on this thread."""
    begin = time.thread_time()
    run()
    return time.thread_time() - begin


def shown(seconds: list[float]) -> str:
    """The median in milliseconds."""
    return f"{1000 * statistics.median(seconds):.2f} ms"


def ratio(slow: list[float], fast: list[float]) -> str:
    """The median of the rounds' ratios."""
    return f"{statistics.median(a / b for a, b in zip(slow, fast, strict=True)):.2f}"


if __name__ == "__main__":
    main()
