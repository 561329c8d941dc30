"""The board of results, docs/board.md: one row for each method and sparsity on each model, beside
the published best.

    python scripts/paper/board.py
    python scripts/paper/board.py STUDY ... --commit HASH

A study is a folder with a plan of board.toml or board_refit.toml that `emp-llm run` has finished,
here or in part. Its rows are added to docs/board.jsonl, in place of older ones, and the page is
written from that file alone. Models of the literature that nobody has run have empty rows with
commands.
"""

import argparse
import json
import math
import shlex
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from emp_llm.checkpoint.files import INDEX_LIMIT
from emp_llm.cluster.jobs import option_of, read_plan
from emp_llm.common.paths import REPORT_NAME
from emp_llm.common.tables import Rows, markdown_table
from emp_llm.env import env
from emp_llm.evaluation.comparison import Value, shown_change
from emp_llm.plan import plan
from emp_llm.records.base import read_record
from emp_llm.records.results import Results
from emp_llm.records.run_report import RunReport
from emp_llm.reporting.studies import short_model_name

ROOT = Path(__file__).parents[2]
ROWS = ROOT / "docs" / "board.jsonl"
PAGE = ROOT / "docs" / "board.md"
TABLES = [ROOT / "scripts" / "paper" / name for name in ("board.toml", "board_refit.toml")]
# Any local model: a plan of a model on the Hub would download its config.
DEMO = ROOT / "scripts" / "demo" / "model"
Row = dict[str, Any]

ALPS = "[ALPS](https://arxiv.org/abs/2406.07831), Tables 11 and 16"
ROTATED = "[DenoiseRotator](https://arxiv.org/abs/2505.23049), Table "
# method, perplexity at 50 % and at 2:4, source; the last two of a model are the best without and
# with rotations.
PUBLISHED = {
    "meta-llama/Llama-2-7b-hf": [
        ("dense", 5.472, 5.472, f"{ROTATED}19"),
        ("Wanda", 6.93, 12.10, ALPS),
        ("Wanda", 6.900, 12.265, f"{ROTATED}19"),
        ("SparseGPT", 7.00, 10.94, ALPS),
        ("SparseGPT", 7.003, 11.291, f"{ROTATED}19"),
        ("ALPS", 6.85, 9.95, ALPS),
        ("SparseGPT, rotated", 6.273, 8.696, f"{ROTATED}19"),
    ],
    "meta-llama/Meta-Llama-3-8B": [
        ("dense", 6.138, 6.138, f"{ROTATED}12"),
        ("Wanda", 9.87, 24.36, ALPS),
        ("Wanda", 9.864, 25.189, f"{ROTATED}12"),
        ("SparseGPT", 9.47, 16.35, ALPS),
        ("SparseGPT", 9.567, 17.669, f"{ROTATED}12"),
        ("ALPS", 9.11, 14.82, ALPS),
        ("SparseGPT, rotated", 7.597, 10.008, f"{ROTATED}12"),
    ],
}
_NAMES = {"wanda": "Wanda", "sparsegpt": "SparseGPT"}

INTRO = """# Board of results

All linear layers of the decoder blocks are pruned. The perplexity is per token; its change from the dense model has a paired
standard error. Seconds and peak memory are those of the prune, on machines that did other work too. The best of each
sparsity is bold.

Wanda calibrates each block on the outputs of the pruned blocks before it, as in its code: `--propagate pruned`. SparseGPT and
ADMM always do. Wanda removes 50 % of each row, SparseGPT 50 % of each matrix, and `emp-admm` 50 % of all layers together: EMP
says how many weights of each row stay.

[Which method?](methods.md) has more points of the same models, with Wanda by the default, `--propagate dense`, by an older
version on another processor, and wiki-llama-5m on other blocks of WikiText-2. ADMM's search depends on the rounding of sums:
with `--batch-size 16`, the same command gives +87.8 % in place of +91.4 % on stories260K; the study found +87.0 %.

No row of ours is healed. After [healing](heal.md), the mask is worth little: at 50 % Wanda and `emp-admm` with a refit come to
−2.9 and −2.9 % on the demo model, +38.7 and +36.3 % on stories260K, +1.5 and +0.5 % on wiki-llama-5m; at 2:4 to −1.8 and −2.1,
+72 and +77, +3.7 and +2.9 %. Nor is any [rotated](rotate.md)."""
FILL = """## Models of the literature

These rows are empty: nobody has run them yet. They need a GPU and access to the models:

<!-- not run: needs a GPU -->
```bash
emp-llm plan scripts/paper/board.toml --output board
emp-llm plan scripts/paper/board_refit.toml --output board-refit
emp-llm run board && emp-llm run board-refit
python scripts/paper/board.py board board-refit
```

The last command writes the rows into `docs/board.jsonl` and into this page. With [a site file](clusters.md), `submit` takes
the place of `run`. The protocol is that of the literature: calibration on 128 sequences of 2048 tokens of C4, perplexity of
WikiText-2 in blocks of 2048 tokens."""
SOURCES = """## Sources

The published numbers stand in the tables named beside them. Those of ALPS are means of five runs. "SparseGPT, rotated" is
DenoiseRotator: it puts a dense matrix between the blocks, 6.7 % more parameters for LLaMA-3-8B. ALPS is the best without one.
The [code of Wanda](https://github.com/locuslab/wanda) (its [paper](https://arxiv.org/abs/2306.11695)) gives LLaMA-2-7B in
blocks of 4096 tokens: Wanda 6.42 and 11.02, SparseGPT 6.51 and 10.17 at 50 % and 2:4, dense 5.12. These do not compare with
ours. [SparseGPT's paper](https://arxiv.org/abs/2301.00774) is older than these models."""


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
    plan_of_study = {job.output: job for job in read_plan(study)}
    machine = env()
    for job in plan_of_study.values():
        if job.kind != "evaluate" or not (study / job.output).exists():
            continue
        results = read_record(study / job.output, Results, INDEX_LIMIT)
        measured = results.perplexity
        made_by = results.made_by
        text = results.made_by.text
        if not results.complete or measured is None or text is None:
            continue
        judged = option_of(job, "--model")
        pruning = plan_of_study.get(judged)
        row: Row = {
            "model": option_of(pruning or job, "--model"),
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
        if pruning is not None:
            report = read_record(study / judged / REPORT_NAME, RunReport, 4 * INDEX_LIMIT)
            stages = report.stages.values()
            row |= {
                "command": shown_command(pruning.command),
                "seconds": round(sum(stage.seconds for stage in stages), 1),
                "bytes": max(stage.peak_bytes for stage in stages),
                "gpu_bytes": max(stage.peak_cuda_bytes or 0 for stage in stages),
            }
        found.append(row)
    return found


def planned_commands(model: str) -> list[str]:
    """The commands of the rows of a model, by the tables."""
    with tempfile.TemporaryDirectory() as folder:
        jobs = [
            job
            for table in TABLES
            for job in plan(table, models=f"{DEMO}", output=Path(folder), overwrite=True).jobs
        ]
    commands = [shown_command(job.command) for job in jobs if job.kind == "prune"]
    return [command.replace(_shown(DEMO), model) for command in commands]


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


def table_of(model: str, commands: list[str], rows: dict[tuple[str, str], Row]) -> Rows:
    """One row for each command; those that were not run are empty."""
    dense = rows.get((model, ""))
    base = None if dense is None else value_of(dense)
    measured = {
        command: value_of(row) for command in commands if (row := rows.get((model, command)))
    }
    lines = [
        [
            "method",
            "sparsity",
            "perplexity",
            "change",
            "seconds",
            "peak memory",
            "commit",
            "command",
        ]
    ]
    for command in sorted(commands, key=lambda each: "--pattern" in each):
        method, sparsity = cells_of(command)
        row = rows.get((model, command))
        value = measured.get(command)
        cells = [method, sparsity, "", "", "", "", "", f"`{command}`"]
        if row is not None and value is not None:
            best = min(
                other.value for each, other in measured.items() if cells_of(each)[1] == sparsity
            )
            mark = "**" if value.value == best else ""
            memory = f"{row['bytes'] / 1e9:.2f} GB" + (
                f", GPU {row['gpu_bytes'] / 1e9:.1f} GB" if row["gpu_bytes"] else ""
            )
            change = shown_change("perplexity", base, value)
            cells[2:7] = [
                f"{mark}{value.value:.3f}{mark}",
                change,
                f"{row['seconds']:.0f}",
                memory,
                row["commit"],
            ]
        lines.append(cells)
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
    return (
        f"{title}\n\nDense perplexity {value_of(row).value:.3f} on {text}. {row['machine']}; "
        f"{versions}."
    )


def page_of(rows: dict[tuple[str, str], Row]) -> str:
    """The page."""
    parts = [INTRO]
    for model in dict.fromkeys(model for model, _ in rows if model not in PUBLISHED):
        commands = [command for name, command in rows if name == model and command]
        parts += [
            heading("##", model, rows),
            markdown_table(table_of(model, commands, rows), as_markdown=True),
        ]
    parts.append(FILL)
    for model, published in PUBLISHED.items():
        lines = table_of(model, planned_commands(model), rows)
        numbers = {
            "50 %": [row[1] for row in published[1:]],
            "2:4": [row[2] for row in published[1:]],
        }
        lines[0].insert(3, "published best")
        for line in lines[1:]:
            line.insert(3, f"{numbers[line[1]][-2]:.2f}; rotated {numbers[line[1]][-1]:.2f}")
        printed = [
            [name, f"{half:.2f}", f"{pattern:.2f}", source]
            for name, half, pattern, source in published
        ]
        parts += [heading("###", model, rows), markdown_table(lines, as_markdown=True)]
        parts.append(
            markdown_table([["published", "50 %", "2:4", "source"], *printed], as_markdown=True)
        )
    return "\n\n".join([*parts, SOURCES]) + "\n"


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
