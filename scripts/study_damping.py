"""How strongly should a refit be damped? Output errors on tokens that it has not seen, for damping
and number of tokens.

    python scripts/study_damping.py [--model DIR] [--text FILE] [--output
    scripts/results/damping.md]

The inputs of some linear layers (first, middle and last block) are recorded on a text. Half of the
weights of each are removed by Wanda, the others are fitted to the first tokens, and the output
error is measured on the last ones. The table has the mean over the layers of (error of the fit /
error of the kept weights unmoved); below 1 the fit helps. FILE is a .txt file, or a .jsonl.xz file
with a field `text`; default: the demo model and its calibration text.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch
from bench_helpers import hardware
from torch import Tensor
from train_witness import read_articles

from emp_llm.models.loading import load_model, load_tokenizer
from emp_llm.update.least_squares import output_error, refit_rows
from emp_llm.update.update import damping_for

ROOT = Path(__file__).parents[1]
DAMPINGS = (0.001, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
COUNTS = (512, 1024, 2048, 4096, 8192, 16384)
LAYERS = ("self_attn.q_proj", "mlp.gate_proj", "mlp.down_proj")
SEQLEN = 256


def main(line: list[str] | None = None) -> None:
    """Print the table, and write if asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=ROOT / "scripts" / "demo" / "model")
    parser.add_argument("--text", type=Path, default=ROOT / "calibration" / "demo.txt")
    parser.add_argument(
        "--tokens",
        type=int,
        default=2 * COUNTS[-1],
        help="of the text; the second half is held out",
    )
    parser.add_argument("--rows", type=int, default=64, help="outputs of each layer")
    parser.add_argument("--output", type=Path, help="append the table to this file")
    options = parser.parse_args(line)
    counts = [count for count in COUNTS if 2 * count <= options.tokens]
    ratios = [
        [ratios_of(weight, inputs[:count], inputs[len(inputs) // 2 :]) for count in counts]
        for weight, inputs in recorded(options.model, options.text, options.tokens, options.rows)
    ]
    means = torch.tensor(ratios).mean(0)
    lines = [
        f"## {options.model.parent.name if options.model.name == 'model' else options.model.name}, "
        f"{len(ratios)} layers\n",
        f"| tokens | {' | '.join(f'{damping:g}' for damping in DAMPINGS)} | inputs / tokens |",
        "|---:|" + "---:|" * (len(DAMPINGS) + 1),
    ]
    for count, row in zip(counts, means.tolist(), strict=True):
        cells = [f"**{each:.3f}**" if each == min(row) else f"{each:.3f}" for each in row]
        lines.append(f"| {count:,} | {' | '.join(cells)} |")
    page = "\n".join(lines) + "\n"
    print(page)
    if options.output is not None:
        head = (
            "# Damping of a refit\n\n`python scripts/study_damping.py --model DIR --text FILE "
            f"--output {options.output}`: {hardware('cpu')}. Output error of the fit on tokens "
            "that it has not seen, relative to that of the kept weights unmoved; mean over layers. "
            "Columns: damping, as a share of the mean second moment.\n\n"
        )
        before = (
            options.output.read_text(encoding="utf-8") + "\n" if options.output.is_file() else head
        )
        options.output.write_text(before + page, encoding="utf-8")


def recorded(folder: Path, text: Path, count: int, rows: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The first rows of the weights of each layer, and its inputs on the first tokens of a text."""
    model = load_model(folder, "cpu")
    tokenizer = load_tokenizer(folder)
    words = (
        text.read_text(encoding="utf-8")
        if text.suffix == ".txt"
        else "\n\n".join(read_articles(text, 2000))
    )
    tokens = torch.tensor(tokenizer(words, verbose=False)["input_ids"][:count])
    sequences = tokens[: len(tokens) // SEQLEN * SEQLEN].view(-1, SEQLEN)
    blocks = model.model.layers
    found: list[tuple[Tensor, list[Tensor]]] = []
    for number in sorted({0, len(blocks) // 2, len(blocks) - 1}):
        for name in LAYERS:
            layer = blocks[number].get_submodule(name)
            inputs = list[Tensor]()
            layer.register_forward_pre_hook(
                lambda _, given, kept=inputs: kept.append(given[0].flatten(0, -2).float())
            )
            found.append((layer.weight.detach()[:rows].float(), inputs))
    with torch.no_grad():
        for batch in torch.split(sequences, 8):
            model.model(input_ids=batch, use_cache=False)
    for weight, inputs in found:
        yield weight, torch.cat(inputs)


def ratios_of(weight: Tensor, seen: Tensor, unseen: Tensor) -> list[float]:
    """The error on unseen tokens after each fit to the seen ones, relative to that before; last,
    with `damping_for`.
    """
    gram = seen.T @ seen
    other = unseen.T @ unseen
    scores = weight.abs() * gram.diagonal().sqrt()
    places = scores.topk(weight.shape[1] // 2, dim=1).indices
    mask = torch.zeros_like(weight, dtype=torch.bool).scatter_(1, places, True)
    unmoved = output_error(weight * mask, weight, other).sum()
    found = []
    for damping in (*DAMPINGS, damping_for(weight.shape[1], len(seen))):
        fitted = refit_rows(weight, mask, gram, damping=damping).weight
        found.append(float(output_error(fitted, weight, other).sum() / unmoved))
    return found


if __name__ == "__main__":
    main()
