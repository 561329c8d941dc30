"""What a mask is still worth after healing: every method healed with the same steps and text,
beside the same methods unhealed.

    python scripts/study_healing.py MODEL --name NAME --calibration TEXT --text TEXT --output
    docs/healing/study.jsonl python scripts/study_healing.py --output docs/healing/study.jsonl
    --write docs/healing

The first command adds a line of JSON for each point to its output, and skips the points that it
holds already, so it can be stopped and started again. --work keeps the pruned checkpoints. The
second writes the page of tables of all models.

A point is a mask, its size, and what follows: nothing, `heal` (the whole model), or `blocks` (block
by block, as for models larger than memory). All linear layers are pruned. --points chooses some:
"wanda 0.5 heal,emp-admm 2:4 blocks".
"""

import argparse
import json
import math
import os
import time
from pathlib import Path
from typing import Any

import numpy as np

os.environ.setdefault("HF_HUB_OFFLINE", "1")
Entry = dict[str, Any]
MASKS: dict[str, Entry] = {
    "magnitude": {"method": "magnitude"},
    "wanda": {"method": "wanda"},
    "sparsegpt": {"method": "sparsegpt"},
    "emp-admm": {"method": "emp-admm", "refit": True},
    "admm": {"method": "admm", "refit": True},
}
SIZES = ("0.5", "0.6", "0.7", "2:4")
HOW = {"": "as it is", "heal": "healed", "blocks": "healed by blocks"}


def points() -> list[str]:
    """All points, the telling ones first."""
    names = [
        f"{mask} {size} {how}".strip()
        for size in SIZES
        for how in ("", "heal")
        for mask in ("wanda", "emp-admm")
    ]
    names += [f"{mask} 0.5 blocks" for mask in ("wanda", "emp-admm")]
    names += [
        f"{mask} 0.5 {how}".strip() for how in ("", "heal") for mask in ("magnitude", "sparsegpt")
    ]
    return [name.replace("emp-admm 2:4", "admm 2:4") for name in names]


def run(options: argparse.Namespace, point: str, texts: list[Any]) -> Entry:
    """The result of a point."""
    from emp_llm import heal, prune
    from emp_llm.models.loading import load_model

    mask, size, how = (*point.split(), "")[:3]
    text = {
        "calibration": options.calibration,
        "samples": options.samples,
        "seqlen": options.seqlen,
    }
    pruned = options.work / f"{options.name}-{mask}-{size.replace(':', '-')}-{options.samples}"
    started = time.perf_counter()
    if not pruned.exists():
        how_many: Entry = {"pattern": size} if ":" in size else {"sparsity": float(size)}
        prune(
            options.model,
            output=pruned,
            targets="all-linear",
            quiet=True,
            **MASKS[mask],
            **how_many,
            **text,
        )
    folder = pruned
    about = Entry()
    if how:
        folder = options.work / f"{pruned.name}-{how}"
        device = "disk" if how == "blocks" else "cpu"
        started = time.perf_counter()
        own = {"calibration": options.heal_calibration} if options.heal_calibration else {}
        report = heal(
            pruned,
            dense=options.model,
            output=folder,
            device_map=device,
            overwrite=True,
            quiet=True,
            **text | own,
        )
        assert report.healing is not None
        about = {
            "curve": report.healing.curve,
            "best": report.healing.best,
            "tokens": report.healing.tokens,
        }
    seconds = round(time.perf_counter() - started, 1)
    return about | {"seconds": seconds, "losses": losses(load_model(folder, "cpu"), texts, options)}


def losses(model: Any, texts: list[Any], options: argparse.Namespace) -> list[list[float]]:
    """The mean loss of each block of each text."""
    from emp_llm.evaluation.evaluate import perplexity

    return [
        list(perplexity(model, text, options.block, limit=options.limit).block_losses)
        for text in texts
    ]


def increase(entry: Entry, base: Entry, place: int) -> tuple[float, float]:
    """The increase of the perplexity in percent, and its paired standard error."""
    changes = np.subtract(entry["losses"][place], base["losses"][place])
    mean = float(changes.mean())
    return 100 * math.expm1(mean), 100 * math.exp(mean) * float(changes.std(ddof=1)) / math.sqrt(
        len(changes)
    )


def main(line: list[str] | None = None) -> None:
    """Run the study of a model, or write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", help="folder of a model")
    parser.add_argument("--name", help="of the model on the page")
    parser.add_argument("--calibration", default="demo")
    parser.add_argument("--heal-calibration", help="another text to heal on")
    parser.add_argument("--calibration-name", help="of the text on the page")
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--seqlen", type=int, default=512)
    parser.add_argument(
        "--text",
        nargs="+",
        default=["eval/demo/heldout.txt"],
        help="text files or recipes to judge on",
    )
    parser.add_argument("--text-name", nargs="+")
    parser.add_argument("--block", type=int, default=512)
    parser.add_argument("--limit", type=int, default=100, help="blocks of each text")
    parser.add_argument("--points", help="points, separated by commas; default: all")
    parser.add_argument("--work", type=Path, default=Path("healing"))
    parser.add_argument("--output", type=Path, default=Path("study.jsonl"))
    parser.add_argument("--write", type=Path, help="folder for the page")
    options = parser.parse_args(line)
    known = (
        [json.loads(text) for text in options.output.read_text().splitlines()]
        if options.output.exists()
        else []
    )
    if options.write is not None:
        write_page(options.write, known)
        return
    from emp_llm.calibration.texts import find_corpus
    from emp_llm.evaluation.evaluate import text_tokens
    from emp_llm.models.loading import load_model, load_tokenizer

    tokenizer = load_tokenizer(Path(options.model))
    texts = [text_tokens(find_corpus(text), tokenizer) for text in options.text]
    options.work.mkdir(parents=True, exist_ok=True)
    name = options.calibration_name or Path(options.calibration).name
    about = {
        "model": options.name,
        "calibration": f"{options.samples} x {options.seqlen} tokens of {name}",
    }
    done = {(entry["model"], entry["calibration"], entry["point"]) for entry in known}
    for point in ["dense", *(options.points.split(",") if options.points else points())]:
        if (*about.values(), point) in done:
            continue
        if point == "dense":
            entry: Entry = {
                "losses": losses(load_model(Path(options.model), "cpu"), texts, options),
                "seconds": 0.0,
            }
            entry["texts"] = options.text_name or [Path(text).name for text in options.text]
        else:
            entry = run(options, point, texts)
        with options.output.open("a") as file:
            file.write(json.dumps(about | {"point": point} | entry) + "\n")
        told = " ".join(f"{math.exp(sum(each) / len(each)):.3f}" for each in entry["losses"])
        print(f"{options.name} {point}: {told}, {entry['seconds']} s", flush=True)


def write_page(folder: Path, known: list[Entry]) -> None:
    """Write `study.md` into a folder."""
    from emp_llm.common.tables import Rows, markdown_table

    parts = [
        "# Healing: all points",
        "Increase of the perplexity over the dense model in percent, with its paired standard "
        "error over the blocks. `emp-admm` and `admm` (2:4) are with a refit. Healed: 300 steps of "
        "4 sequences of the calibration text, 614,400 tokens. Seconds are those of the healing "
        "alone, on one thread of a machine that other programs used too.",
    ]
    for model, calibration in dict.fromkeys(
        (entry["model"], entry["calibration"]) for entry in known
    ):
        found = {
            each["point"]: each
            for each in known
            if (each["model"], each["calibration"]) == (model, calibration)
        }
        dense = found.get("dense") or next(
            each for each in known if (each["model"], each["point"]) == (model, "dense")
        )
        told = ", ".join(
            f"{math.exp(sum(each) / len(each)):.2f} on {text}"
            for each, text in zip(dense["losses"], dense["texts"], strict=True)
        )
        rows: Rows = [["mask", "size", "then", *dense["texts"], "held-out divergence", "seconds"]]
        for point, entry in found.items():
            if point == "dense":
                continue
            mask, size, how = (*point.split(), "")[:3]
            cells = [
                "{:+.2f} ± {:.2f}".format(*increase(entry, dense, place))
                for place in range(len(dense["texts"]))
            ]
            curve = {int(step): loss for step, loss in entry.get("curve", [])}
            divergence = f"{curve[0]:.4f} to {curve[entry['best']]:.4f}" if curve else ""
            rows.append(
                [mask, size, HOW[how], *cells, divergence, f"{entry['seconds']:.0f}" if how else ""]
            )
        parts += [
            f"## {model}, {calibration}",
            f"Dense perplexity: {told}.",
            markdown_table(rows, as_markdown=True),
        ]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "study.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
