"""Models with fewer neurons or layers: ours beside those of published methods, at the same size.

    python scripts/study_peers.py OUT --model FOLDER --shared DIR [--rows NAME ...] [--shares 20]
        [--samples 64] [--block 512] [--blocks 40] [--heal-steps 60]
    python scripts/study_peers.py OUT

DIR holds datasets/ by Hub id. All methods see the same sequences of 512 tokens of WikiText-2; a
peer (scripts/peers.py) keeps as many neurons in each layer, or as many layers, as ours. The
perplexity is that of the first blocks of the test split. --heal-steps also heals each smaller
model by `heal_model`: all linear layers and norms, on new text. Each row is a line of
OUT/points.jsonl and is not measured again; the checkpoints stay in OUT. The second command only
prints the table.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import peers
from study_tables import increase
from transformers import AutoModelForCausalLM

from emp_llm import heal_model, prune
from emp_llm.calibration.data import read_text
from emp_llm.common.tables import markdown_table
from emp_llm.evaluation.evaluate import perplexity, text_tokens
from emp_llm.evaluation.results import find_suite
from emp_llm.models.loading import load_tokenizer
from emp_llm.options.shared import CalibrationOptions

OURS: dict[str, dict[str, Any]] = {
    "wanda": {"structure": "neurons", "method": "wanda", "width_multiple": 8},
    "taylor": {"structure": "neurons", "method": "taylor", "width_multiple": 8},
    "fisher": {"structure": "neurons", "method": "fisher", "width_multiple": 8},
    "layers": {"structure": "layers", "method": "cosine"},
    "perplexity": {"structure": "layers", "method": "perplexity"},
}
NAMES = {
    "wanda": "neurons, `wanda --refit`",
    "taylor": "neurons, `taylor --refit`",
    "fisher": "neurons, `fisher --refit`",
    "flap": "neurons, FLAP with its bias",
    "2ssp": "neurons, 2SSP's first stage",
    "llm-pruner": "neurons, LLM-Pruner's Taylor",
    "layers": "layers, `cosine --refit`",
    "perplexity": "layers, `perplexity --refit`",
    "replaceme": "layers, ReplaceMe",
    "shortgpt": "layers, ShortGPT",
}
LIKE = dict.fromkeys(("flap", "2ssp", "llm-pruner"), "wanda")  # whose size a peer takes
LIKE |= dict.fromkeys(("replaceme", "shortgpt"), "layers")
FIELDS = {"wanda": "intermediate_size", "layers": "num_hidden_layers"}


def main(line: list[str] | None = None) -> None:
    """Measure the rows that are missing, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="folder of the points and checkpoints")
    parser.add_argument("--model", type=Path, help="a Llama; without it, only the table")
    parser.add_argument("--shared", type=Path, help="folder with datasets/ by Hub id")
    parser.add_argument("--rows", nargs="+", choices=NAMES, default=[*NAMES])
    parser.add_argument("--shares", nargs="+", type=int, default=[10, 20, 30], help="in percent")
    parser.add_argument("--samples", type=int, default=64, help="sequences of 512 tokens")
    parser.add_argument("--block", type=int, default=512, help="tokens in a block")
    parser.add_argument("--blocks", type=int, default=40, help="of the test split")
    parser.add_argument("--heal-steps", type=int, default=0)
    options = parser.parse_args(line)
    if options.model is not None:
        if options.shared is None:
            parser.error("--model needs --shared.")
        options.out.mkdir(parents=True, exist_ok=True)
        options.out = options.out.resolve()
        options.model = options.model.resolve()
        os.chdir(options.shared / "datasets")  # load_dataset finds the data sets here
        measure(options)
    print(table(read_points(options.out)))


def measure(options: argparse.Namespace) -> None:
    """Measure the rows that are missing."""
    tokenizer = load_tokenizer(options.model)
    corpus = find_suite("perplexity").corpus
    assert corpus is not None
    judged = text_tokens(corpus, tokenizer)
    wanted = [("dense", 0, 0)]
    for steps in dict.fromkeys((0, options.heal_steps)):
        wanted += [(name, share, steps) for share in options.shares for name in options.rows]
    for name, share, steps in wanted:
        done = {(each["name"], each["share"], each["steps"]) for each in read_points(options.out)}
        if (name, share, steps) in done:
            continue
        started = time.process_time()
        folder = options.model if name == "dense" else smaller(options, name, share)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
        point = {"name": name, "share": share, "steps": steps, "parameters": model.num_parameters()}
        if steps:
            point |= healed(options, model, tokenizer, steps)
        point["seconds"] = round(time.process_time() - started, 1)
        record = perplexity(model, judged, options.block, limit=options.blocks)
        point["losses"] = list(record.block_losses)
        with (options.out / "points.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(point) + "\n")
        said = {key: value for key, value in point.items() if key != "losses"}
        print(said, f"perplexity {record.perplexity:.2f}", file=sys.stderr, flush=True)


def smaller(options: argparse.Namespace, name: str, share: int) -> Path:
    """The checkpoint of a row, which is made if it is missing."""
    out: Path = options.out / f"{name}-{share}"
    text = {"calibration": "wikitext2", "samples": options.samples, "seqlen": 512}
    if out.exists():
        return out
    if name in OURS:
        whole = AutoModelForCausalLM.from_pretrained(options.model).num_parameters()
        left = str(int(whole * (1 - share / 100)))
        how = OURS[name] | text
        prune(
            options.model, parameters=left, refit=True, check=False, quiet=True, output=out, **how
        )
        return out
    ours = LIKE[name]
    config = json.loads((smaller(options, ours, share) / "config.json").read_text())
    given = CalibrationOptions(**text)
    tokens = read_text(given, load_tokenizer(options.model), config).tokens
    partial = out.with_name(f".{out.name}")
    peers.units(name, str(config[FIELDS[ours]]), str(options.model), tokens, str(partial))
    partial.rename(out)
    return out


def healed(options: argparse.Namespace, model: Any, tokenizer: Any, steps: int) -> dict[str, Any]:
    """Heal a smaller model in place; returns the divergence before and after."""
    record = heal_model(
        model,
        AutoModelForCausalLM.from_pretrained(options.model, dtype="auto").eval(),
        "wikitext2",
        tokenizer,
        masks={},
        weights="all",
        steps=steps,
        samples=options.samples,
        seqlen=512,
    )
    curve = {int(step): loss for step, loss, *_ in record.curve}
    return {"divergence": [curve[0], curve[record.best]]}


def read_points(out: Path) -> list[dict[str, Any]]:
    """The points that are measured."""
    path = out / "points.jsonl"
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def table(points: list[dict[str, Any]]) -> str:
    """The increase of the perplexity of each method at each size, before and after healing."""
    dense = next((point for point in points if point["name"] == "dense"), None)
    if dense is None:
        return "no points"
    found = {(point["name"], point["share"], point["steps"]): point for point in points}
    columns = sorted({(share, steps) for name, share, steps in found if name != "dense"})
    heads = [f"{share} %{f', {steps} steps' if steps else ''}" for share, steps in columns]
    rows = [["", *heads]]
    for name, label in NAMES.items():
        cells = [cell(found.get((name, *column)), dense) for column in columns]
        if any(cells):
            rows.append([label, *cells])
    return markdown_table(rows, as_markdown=True)


def cell(point: dict[str, Any] | None, dense: dict[str, Any]) -> str:
    """The increase of a point, with its error."""
    if point is None:
        return ""
    return "{:+.1f} ± {:.1f} %".format(*increase(point, dense))


if __name__ == "__main__":
    main()
