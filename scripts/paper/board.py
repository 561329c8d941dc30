"""The board of results, docs/board.md: one row for each method and sparsity on each model, beside
the published best.

    python scripts/paper/board.py
    python scripts/paper/board.py STUDY ... --commit HASH

A study is a folder with a plan of board.toml or board_refit.toml that Snakemake has finished,
wholly or in part. Its rows are added to docs/board.jsonl, in place of older ones, and the page is
written from that file alone.
"""

import argparse
import itertools
import json
import math
import shlex
import subprocess
from pathlib import Path
from typing import Any

from emp_llm import env
from emp_llm.checkpoint.files import INDEX_LIMIT
from emp_llm.common.paths import REPORT_NAME
from emp_llm.common.tables import Rows, markdown_table
from emp_llm.evaluation.comparison import Value, shown_change
from emp_llm.records.base import read_record
from emp_llm.records.run_report import Results, RunReport
from emp_llm.reporting.studies import short_model_name
from emp_llm.study.plan import read_study

ROOT = Path(__file__).parents[2]
ROWS = ROOT / "docs" / "board.jsonl"
PAGE = ROOT / "docs" / "board.md"
Row = dict[str, Any]

ALPS = "ALPS"
ROTATED = "DenoiseRotator"
# method, perplexity at 50 % and at 2:4, source.
PUBLISHED = {
    "meta-llama/Llama-2-7b-hf": [
        ("dense", 5.472, 5.472, ROTATED),
        ("Wanda", 6.93, 12.10, ALPS),
        ("Wanda", 6.900, 12.265, ROTATED),
        ("SparseGPT", 7.00, 10.94, ALPS),
        ("SparseGPT", 7.003, 11.291, ROTATED),
        ("ALPS", 6.85, 9.95, ALPS),
        ("SparseGPT, rotated", 6.273, 8.696, ROTATED),
    ],
    "meta-llama/Meta-Llama-3-8B": [
        ("dense", 6.138, 6.138, ROTATED),
        ("Wanda", 9.87, 24.36, ALPS),
        ("Wanda", 9.864, 25.189, ROTATED),
        ("SparseGPT", 9.47, 16.35, ALPS),
        ("SparseGPT", 9.567, 17.669, ROTATED),
        ("ALPS", 9.11, 14.82, ALPS),
        ("SparseGPT, rotated", 7.597, 10.008, ROTATED),
    ],
}
_NAMES = {"wanda": "Wanda", "sparsegpt": "SparseGPT"}

INTRO = """# Board of results

Each method beside Wanda and SparseGPT, in all linear layers of the decoder blocks. Perplexity is per token; its change
from the dense model has a paired standard error. Seconds and peak memory are those of the prune, on machines that did
other work too. The best of each sparsity is bold. These commands make the rows:

    emp-llm prune --model MODEL --targets all-linear --calibration TEXT, and
        --method wanda --sparsity 0.5 --propagate pruned        (for 2:4: --pattern 2:4 in place of --sparsity)
        --method sparsegpt --sparsity 0.5 --propagate pruned
        --method emp-admm --sparsity 0.5 --refit                (for 2:4: --method admm)

Wanda removes 50 % of each row, SparseGPT 50 % of each matrix, and `emp-admm` 50 % of all layers together. No row of
ours is [healed](heal.md). ADMM's search depends on the rounding of sums: with `--batch-size 16`,
stories260K loses +87.8 % instead of +91.4 %. [Which method?](methods.md) has more points, by an older version."""
FILL = """## Models of the literature

Nobody has run emp-llm on these models yet; the published numbers are those to beat. It needs a GPU and access to the models:

<!-- not run: needs a GPU -->
```bash
emp-llm plan scripts/paper/board.toml --output board
emp-llm plan scripts/paper/board_refit.toml --output board-refit
(cd board && snakemake --cores 8) && (cd board-refit && snakemake --cores 8)
python scripts/paper/board.py board board-refit
```

The last command adds rows to `docs/board.jsonl` and to this page. [Studies](clusters.md) also run on clusters. The protocol is that
of the literature: calibration on 128 sequences of 2048 tokens of C4, perplexity of WikiText-2 in blocks of 2048 tokens."""
SOURCES = """## Sources

[ALPS](https://arxiv.org/abs/2406.07831), Tables 11 and 16, means of five runs; the best without a dense matrix between
the blocks. [DenoiseRotator](https://arxiv.org/abs/2505.23049), Tables 19 and 12; "rotated" has such a matrix, 6.7 % more
parameters for LLaMA-3-8B. At 50 %, methods that work layer by layer without one end near 9.1 for
LLaMA-3-8B. [LEAP](https://arxiv.org/abs/2605.17289) trains the mask and reports 7.66 there, in blocks of 4096 tokens.
Numbers in such blocks, as those of [Wanda's code](https://github.com/locuslab/wanda), do not compare with these."""


def shown_command(command: str) -> str:
    """A command without its output, with paths relative to the checkout, or names of files
    alone.
    """
    words = [
        word if not Path(word).is_absolute() else _shown(Path(word))
        for word in shlex.split(command)
    ]
    place = words.index("--output")
    return shlex.join(words[:place] + words[place + 2 :])


def _shown(path: Path) -> str:
    """A path below a checkout's folder of scripts, or the last part."""
    parts = path.parts
    return str(Path(*parts[parts.index("scripts") :])) if "scripts" in parts else path.name


def rows_of(study: Path, commit: str) -> list[Row]:
    """The rows of the finished evaluations of a study."""
    found = []
    planned = read_study(study)
    names = ["dense", *(point.name for point in planned.points)]
    machine = env()
    for model, name in itertools.product(planned.models, names):
        path = study / "results" / f"{model.name}.{name}.json"
        if not path.exists():
            continue
        results = read_record(path, Results, INDEX_LIMIT)
        measured = results.perplexity
        made_by = results.made_by
        text = results.made_by.text
        if not results.complete or measured is None or text is None:
            continue
        row: Row = {
            "model": model.model,
            "command": "",
            "text": text.file or f"{text.dataset} {text.split}",
            "block": measured.block_length,
            "partial": measured.partial,
            "losses": [round(loss, 6) for loss in measured.block_losses],
            "tokens": measured.block_tokens,
            "commit": commit,
            "machine": f"{machine['processor']}, {machine['instructions']}"
            if made_by.device == "cpu"
            else made_by.device,
            "versions": {
                name: made_by.versions[name] for name in ("python", "torch", "transformers")
            },
        }
        if Path(row["model"]).is_absolute():
            row["model"] = _shown(Path(row["model"]))
        if name != "dense":
            run = study / "runs" / f"{model.name}.{name}" / REPORT_NAME
            report = read_record(run, RunReport, 4 * INDEX_LIMIT)
            stages = report.stages.values()
            row |= {
                "command": shown_command(report.command),
                "seconds": round(sum(stage.seconds for stage in stages), 1),
                "bytes": max(stage.peak_bytes for stage in stages),
                "gpu_bytes": max(stage.peak_cuda_bytes or 0 for stage in stages),
            }
        found.append(row)
    return found


def value_of(row: Row) -> Value:
    """The perplexity of a row, with the losses of the blocks."""
    losses = tuple(zip(row["losses"], row["tokens"], strict=True))
    mean = math.fsum(loss * tokens for loss, tokens in losses) / sum(row["tokens"])
    return Value(math.exp(mean), partial=row["partial"], losses=losses)


def cells_of(command: str) -> tuple[str, str]:
    """Method and sparsity of a command, as cells."""
    words = shlex.split(command)
    method = _NAMES.get(name := words[words.index("--method") + 1], name) + (
        ", refit" if "--refit" in words else ""
    )
    method += ", healed" if "--heal" in words else ""
    return (
        method,
        "2:4"
        if "--pattern" in words
        else f"{float(words[words.index('--sparsity') + 1]):.0%}".replace("%", " %"),
    )


def text_options(command: str) -> str:
    """The options of a command that name its calibration text."""
    words = shlex.split(command)
    text = words[words.index("--calibration") :]
    return shlex.join(text).removesuffix(" --propagate pruned").removesuffix(" --refit")


def table_of(model: str, rows: dict[tuple[str, str], Row]) -> Rows:
    """One row for each command that was run on a model."""
    dense = rows.get((model, ""))
    base = None if dense is None else value_of(dense)
    measured = {
        command: value_of(row) for (name, command), row in rows.items() if name == model and command
    }
    lines = [
        [
            "method",
            "sparsity",
            "perplexity",
            "change",
            "seconds",
            "peak memory",
        ]
    ]
    for command in sorted(measured, key=lambda each: "--pattern" in each):
        method, sparsity = cells_of(command)
        row = rows[model, command]
        value = measured[command]
        best = min(other.value for each, other in measured.items() if cells_of(each)[1] == sparsity)
        mark = "**" if value.value == best else ""
        memory = f"{row['bytes'] / 1e9:.2f} GB"
        if row["gpu_bytes"]:
            memory += f", GPU {row['gpu_bytes'] / 1e9:.1f} GB"
        lines.append(
            [
                method,
                sparsity,
                f"{mark}{value.value:.3f}{mark}",
                shown_change("perplexity", base, value),
                f"{row['seconds']:.0f}",
                memory,
            ]
        )
    return lines


def heading(marks: str, model: str, rows: dict[tuple[str, str], Row]) -> str:
    """The model, the text that it is judged on, and the machine."""
    title = f"{marks} {short_model_name(model)}"
    row = rows.get((model, ""))
    if row is None:
        return title
    versions = ", ".join(f"{name} {version}" for name, version in row["versions"].items())
    text = (
        f"{row['text']}, {'the first ' if row['partial'] else ''}{sum(row['tokens']):,} tokens "
        f"in blocks of {row['block']}"
    )
    calibrated = {text_options(command) for name, command in rows if name == model and command}
    options = " or ".join(f"`{each}`" for each in sorted(calibrated))
    commits = dict.fromkeys(each["commit"] for (name, _), each in rows.items() if name == model)
    return (
        f"{title}\n\nDense perplexity {value_of(row).value:.3f} on {text}; calibrated with {options}. "
        f"{row['machine']}; {versions}; commit {', '.join(commits)}."
    )


def page_of(rows: dict[tuple[str, str], Row]) -> str:
    """The page."""
    parts = [INTRO]
    models = dict.fromkeys(model for model, _ in rows)
    for model in models:
        if model not in PUBLISHED:
            parts += section("##", model, rows)
    parts.append(FILL)
    for model, published in PUBLISHED.items():
        parts += section("###", model, rows)
        printed = [
            [name, f"{half:.2f}", f"{pattern:.2f}", source]
            for name, half, pattern, source in published
        ]
        parts.append(
            markdown_table([["published", "50 %", "2:4", "source"], *printed], as_markdown=True)
        )
    return "\n\n".join([*parts, SOURCES]) + "\n"


def section(marks: str, model: str, rows: dict[tuple[str, str], Row]) -> list[str]:
    """The heading of a model, and the table of its rows if it has any."""
    table = table_of(model, rows)
    heads = [heading(marks, model, rows)]
    return heads if len(table) == 1 else [*heads, markdown_table(table, as_markdown=True)]


def main(line: list[str] | None = None) -> None:
    """Add the rows of studies, and write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("studies", nargs="*", type=Path, metavar="STUDY")
    parser.add_argument("--commit", help="that the studies ran on; default: the checkout's")
    parser.add_argument("--rows", type=Path, default=ROWS, help="the file of the rows")
    parser.add_argument("--page", type=Path, default=PAGE, help="the page to write")
    options = parser.parse_args(line)
    rows: dict[tuple[str, str], Row] = {}
    texts = options.rows.read_text(encoding="utf-8").splitlines() if options.rows.exists() else []
    commit = options.commit
    if options.studies and commit is None:
        commit = subprocess.check_output(
            ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, text=True
        ).strip()
    for row in [
        *map(json.loads, texts),
        *(row for study in options.studies for row in rows_of(study, commit)),
    ]:
        rows[row["model"], row["command"]] = row
    if options.studies:
        options.rows.write_text(
            "".join(json.dumps(row) + "\n" for row in rows.values()), encoding="utf-8"
        )
    options.page.write_text(page_of(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
