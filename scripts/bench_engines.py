"""SmolLM2-135M in llama.cpp: dense, narrower, shallower, in three types; beside our own runtime.

    pip install llama-cpp-python
    python scripts/bench_engines.py OUT --shared DIR --model FOLDER --points FOLDER

FOLDER of --model is what `make smollm2` makes; that of --points holds the checkpoints of
scripts/study_smollm2.py. Each row is exported by `emp-llm export` and measured in a process of its
own: the largest resident set, tokens a second of a prompt of 512 tokens and of 64 new tokens (the
medians of three, two threads), and the perplexity of the first ten blocks of 1024 tokens of
WikiText-2's test split, by llama.cpp's own logits. Rows are lines of OUT/engines.jsonl.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from bench_helpers import hardware

from emp_llm.common.tables import markdown_table

ROWS = {
    "dense": "",
    "neurons, 20 % of the parameters": "neurons-20-healed",
    "neurons, 20 %, `--per-layer --order 1`": "order1-neurons-20-healed",
    "8 of 30 layers": "layers-20-healed",
}
TYPES = ("bf16", "q8_0", "q4_1")
ZEROS = "emp-admm-50-healed"
PROMPT = 512
NEW = 64
BLOCK = 1024
BLOCKS = 10
THREADS = 2


def main(line: list[str] | None = None) -> None:
    """Measure the rows that are missing, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="folder of the files and rows")
    parser.add_argument("--shared", type=Path, help="folder with datasets/ by Hub id")
    parser.add_argument("--model", type=Path, help="SmolLM2-135M, as made by scripts/smollm2.py")
    parser.add_argument("--points", type=Path, help="checkpoints of scripts/study_smollm2.py")
    parser.add_argument("--measure", help="of one row: a GGUF file, or a pruned folder")
    options = parser.parse_args(line)
    if options.measure is not None:
        tokens = json.loads((options.out / "tokens.json").read_text())
        ours = Path(options.measure).is_dir()
        found = by_runtime(options.measure, tokens) if ours else by_llama(options.measure, tokens)
        print(json.dumps(found))
        return
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "engines.jsonl"
    rows = [json.loads(row) for row in path.read_text().splitlines()] if path.exists() else []
    write_tokens(options)
    for name, folder in [*ROWS.items(), ("50 % zeros, emp-llm's runtime", ZEROS)]:
        source = options.points / folder if folder else options.model
        for kind in ("",) if folder == ZEROS else TYPES:
            if any((row["name"], row["type"]) == (name, kind) for row in rows):
                continue
            file = source
            if kind:
                file = options.out / f"{folder or 'dense'}-{kind}.gguf"
                run("-m", "emp_llm", "export", source, "--type", kind, "-o", file, "--overwrite")
            measured = json.loads(run(__file__, options.out, "--measure", file))
            size = file.stat().st_size if kind else None
            rows.append({"name": name, "type": kind, "bytes": size} | measured)
            with path.open("a") as lines:
                lines.write(json.dumps(rows[-1]) + "\n")
    print(table(rows))
    print(f"\n{hardware('cpu')}; {THREADS} threads.")


def run(*words: Any) -> str:
    """A Python process; its output."""
    command = [sys.executable, *map(str, words)]
    environment = os.environ | {"OMP_NUM_THREADS": str(THREADS), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    return done.stdout


def write_tokens(options: argparse.Namespace) -> None:
    """The tokens of the test text."""
    from emp_llm.evaluation.perplexity import text_tokens
    from emp_llm.evaluation.suites import find_suite
    from emp_llm.models.loading import load_tokenizer

    corpus = find_suite("perplexity").corpus
    assert corpus is not None
    here = Path.cwd()
    os.chdir(options.shared / "datasets")  # load_dataset finds the data sets here
    tokens = text_tokens(corpus, load_tokenizer(options.model.resolve()))
    os.chdir(here)
    (options.out / "tokens.json").write_text(
        json.dumps(tokens.flatten()[: BLOCKS * BLOCK].tolist())
    )


def by_llama(file: str, tokens: list[int]) -> dict[str, Any]:
    """The measurements of a GGUF file in llama.cpp."""
    import llama_cpp
    import numpy as np

    model = llama_cpp.Llama(
        file, n_ctx=BLOCK, n_batch=PROMPT, n_threads=THREADS, n_threads_batch=THREADS, verbose=False
    )
    prompts = []
    decodes = []
    for number in range(4):
        model.reset()
        start = time.perf_counter()
        model.eval(tokens[:PROMPT])
        middle = time.perf_counter()
        for token in tokens[PROMPT : PROMPT + NEW]:
            model.eval([token])
        if number:
            prompts.append(PROMPT / (middle - start))
            decodes.append(NEW / (time.perf_counter() - middle))
    memory = peak()
    del model
    model = llama_cpp.Llama(
        file,
        n_ctx=BLOCK,
        logits_all=True,
        n_threads=THREADS,
        n_threads_batch=THREADS,
        verbose=False,
    )
    losses = []
    for first in range(0, len(tokens), BLOCK):
        block = tokens[first : first + BLOCK]
        model.reset()
        model.eval(block)
        scores = model.scores[: BLOCK - 1].astype(np.float64)
        scores -= scores.max(1, keepdims=True)
        chosen = scores[np.arange(BLOCK - 1), block[1:]]
        losses.append(float((np.log(np.exp(scores).sum(1)) - chosen).mean()))
    return measured(memory, prompts, decodes, losses)


def by_runtime(folder: str, tokens: list[int]) -> dict[str, Any]:
    """The same of a pruned folder in our own runtime."""
    import torch
    from transformers import DynamicCache

    from emp_llm.runtime import load

    torch.set_num_threads(THREADS)
    model = load(folder)
    prompts = []
    decodes = []
    ids = torch.tensor([tokens])
    losses = []
    with torch.no_grad():
        for number in range(4):
            cache = DynamicCache(config=model.config)
            start = time.perf_counter()
            model(ids[:, :PROMPT], past_key_values=cache, logits_to_keep=1)
            middle = time.perf_counter()
            for place in range(PROMPT, PROMPT + NEW):
                model(ids[:, place : place + 1], past_key_values=cache)
            if number:
                prompts.append(PROMPT / (middle - start))
                decodes.append(NEW / (time.perf_counter() - middle))
        memory = peak()
        for block in torch.split(ids[0], BLOCK):
            logits = model(block[None], use_cache=False).logits[0, :-1].float()
            losses.append(torch.nn.functional.cross_entropy(logits, block[1:]).item())
    return measured(memory, prompts, decodes, losses)


def measured(
    memory: float, prompts: list[float], decodes: list[float], losses: list[float]
) -> dict[str, Any]:
    """A row's numbers."""
    return {
        "memory": memory,
        "prompt": statistics.median(prompts),
        "decode": statistics.median(decodes),
        "perplexity": math.exp(sum(losses) / len(losses)),
    }


def peak() -> float:
    """The largest resident set so far, in GB."""
    status = Path("/proc/self/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024 / 1e9


def table(rows: list[dict[str, Any]]) -> str:
    """A row for each model and type."""
    cells = [["", "type", "file", "memory", "prompt, tokens/s", "decode, tokens/s", "perplexity"]]
    names = [*ROWS]
    for row in sorted(rows, key=lambda row: (*names, row["name"]).index(row["name"])):
        cells.append(
            [
                row["name"],
                row["type"] or "bf16",
                f"{row['bytes'] / 1e6:.0f} MB" if row["bytes"] else "",
                f"{row['memory']:.2f} GB",
                f"{row['prompt']:.0f}",
                f"{row['decode']:.1f}",
                f"{row['perplexity']:.2f}",
            ]
        )
    return markdown_table(cells, as_markdown=True)


if __name__ == "__main__":
    main()
