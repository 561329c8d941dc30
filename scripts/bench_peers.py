"""emp-llm beside other codes: CPU seconds, memory and perplexity of the same prune of one model.

    python scripts/bench_peers.py OUT --model FOLDER --shared DIR [--samples 32] [--repeats 3]
        [--rows NAME ...] [--write docs/smollm2]

FOLDER is what `make smollm2` makes (smollm2/model); DIR holds datasets/ by Hub id. The peers are
installed into OUT/environment from the package index: llm-compressor, and the two papers' methods
from their equations (scripts/peers.py). All linear layers of the blocks are pruned, with the same
tokens of WikiText-2, in processes of one thread (OMP_NUM_THREADS changes that), one after the other
and in turn. Perplexity: 40 blocks of 1024 tokens of the test split. OUT/rows.jsonl keeps every
run, so a stopped bench goes on. A peer that does not install or run has a row that says so.

Peak memory is that of the process with the files that it maps, such as a model's; then the part
that is in no file, which the system cannot take back.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from bench_helpers import used_by
from safetensors.torch import save_file

from emp_llm.calibration.data import read_text
from emp_llm.checkpoint.files import read_json
from emp_llm.common.errors import UserError
from emp_llm.common.tables import markdown_table
from emp_llm.evaluation.comparison import change_of, values_of
from emp_llm.evaluation.results import read_results
from emp_llm.models.loading import load_tokenizer
from emp_llm.options.shared import CalibrationOptions

PEERS = Path(__file__).with_name("peers.py")
PACKAGES = ("torch==2.13.0", "llmcompressor==0.14.0.1")
CODES = {"ours": "emp-llm", "papers": "the paper's equations", "llm-compressor": "llm-compressor"}
OURS = {
    "wanda": "--method wanda --propagate pruned",
    "sparsegpt": "--method sparsegpt",
    "admm": "--method emp-admm --refit",
}
NAMES = {"wanda": "Wanda", "sparsegpt": "SparseGPT", "admm": "emp-admm, refit"}
ROWS = tuple(
    (method, size, code)
    for method, size in (
        ("wanda", "0.5"),
        ("sparsegpt", "0.5"),
        ("sparsegpt", "2:4"),
        ("admm", "0.5"),
    )
    for code in CODES
    if method != "admm" or code == "ours"
)


def main(line: list[str] | None = None) -> None:
    """Run the rows that are missing, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="folder of the runs")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--shared", type=Path, required=True)
    parser.add_argument("--samples", type=int, default=32, help="sequences of 512 tokens")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--rows",
        nargs="+",
        default=[""],
        help="as 'wanda', 'sparsegpt 2:4', 'papers'; default: all",
    )
    parser.add_argument("--write", type=Path, help="folder for the table")
    options = parser.parse_args(line)
    for path, flag in ((options.model / "config.json", "--model"), (options.shared, "--shared")):
        if not path.exists():
            parser.error(f"{flag}: {path}: no such file or folder.")
    if min(options.samples, options.repeats) < 1:
        parser.error("--samples and --repeats must be at least 1.")
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    chosen = [
        row
        for row in ROWS
        if any(" ".join(row).startswith(name) or row[2] == name for name in options.rows)
    ]
    if not chosen:
        parser.error(f"--rows: none is named so. They are: {'; '.join(map(' '.join, ROWS))}.")
    bench = Bench(options, out)
    for number in range(options.repeats):
        for row in chosen:
            bench.run(row, number)
    table = bench.table()
    print(table)
    if options.write is not None:
        options.write.mkdir(parents=True, exist_ok=True)
        (options.write / "peers.md").write_text(table + "\n", encoding="utf-8")


class Bench:
    """Runs rows, and keeps what they took."""

    def __init__(self, options: argparse.Namespace, out: Path) -> None:
        self._options = options
        self._out = out
        self._model = options.model.resolve()
        self._datasets = options.shared.resolve() / "datasets"
        self._file = out / "rows.jsonl"
        self._threads = os.environ.get("OMP_NUM_THREADS", "1")
        self._conditions = {"samples": options.samples, "threads": self._threads}
        self._problem: str | None = None

    def run(self, row: tuple[str, str, str], number: int) -> None:
        """Run a row once, if its run of this number is missing."""
        for done in self._rows():
            if done["row"] == list(row) and done["number"] == number and "failed" not in done:
                return
        method, size, code = row
        name = f"{method}-{size.replace(':', 'of')}-{code}"
        folder = self._out / name
        about: dict[str, Any] = {"row": row, "number": number} | self._conditions
        words = self._words(method, size, code, folder)
        if words is None:
            about["failed"] = self._problem
        else:
            # A run that was stopped would resume, and take less.
            for left in (folder, folder.with_name(f".{name}.partial")):
                shutil.rmtree(left, ignore_errors=True)
            about |= self._measured(words, name)
        if "failed" not in about and number == 0:
            about |= self._judged(folder, name)
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(about) + "\n")
        print(about, flush=True)

    def _words(self, method: str, size: str, code: str, folder: Path) -> list[str] | None:
        """The command of a row; None if the peers do not install."""
        samples = str(self._options.samples)
        if code == "ours":
            how = "--pattern" if ":" in size else "--sparsity"
            line = f"prune {OURS[method]} {how} {size} --targets all-linear --no-check --overwrite"
            text = f"--calibration wikitext2 --samples {samples} --seqlen 512 --quiet"
            given = ["--model", str(self._model), "--output", str(folder)]
            return [sys.executable, "-m", "emp_llm", *line.split(), *text.split(), *given]
        python = self._environment()
        if python is None:
            return None
        tokens = self._tokens()
        return [python, str(PEERS), code, method, size, str(self._model), str(tokens), str(folder)]

    def _environment(self) -> str | None:
        """The Python of the peers' environment, which is made once; None if that fails."""
        folder = self._out / "environment"
        python = folder / "bin" / "python"
        done = folder / "complete"
        if not done.exists() and self._problem is None:
            print("installing the peers", flush=True)
            make = [sys.executable, "-m", "venv", "--clear", str(folder)]
            install = [str(python), "-m", "pip", "install", "--quiet", *PACKAGES]
            for words in (make, install):
                ended = subprocess.run(words, capture_output=True, text=True, check=False)
                if ended.returncode:
                    said = ended.stderr.strip().splitlines() or ["no message"]
                    self._problem = f"does not install: {said[-1]}"
                    return None
            done.touch()
        return None if self._problem else str(python)

    def _tokens(self) -> Path:
        """A file with the tokens of our calibration, for the peers."""
        path = self._out / f"tokens-{self._options.samples}.safetensors"
        if not path.exists():
            how = CalibrationOptions(
                calibration="wikitext2", samples=self._options.samples, seqlen=512
            )
            before = Path.cwd()
            os.chdir(self._datasets)
            try:
                config = read_json(self._model / "config.json")
                text = read_text(how, load_tokenizer(self._model), config)
            finally:
                os.chdir(before)
            save_file({"tokens": text.tokens}, path)
        return path

    def _measured(self, words: list[str], name: str) -> dict[str, Any]:
        """CPU seconds, wall seconds and peak memory of a command, or how it failed."""
        log = self._out / f"{name}.log"
        return used_by(words, self._datasets, log, OMP_NUM_THREADS=self._threads)

    def _judged(self, folder: Path, name: str) -> dict[str, Any]:
        """The perplexity of a checkpoint, and its change from the dense model's; empty if a model
        could not be evaluated.
        """
        try:
            values = [self._perplexity(self._model, "dense"), self._perplexity(folder, name)]
        except UserError as error:
            print(error, flush=True)
            return {}
        change = change_of("perplexity", values[1], values[0])
        return {"perplexity": values[1].value, "change": [change.value, change.stderr]}

    def _perplexity(self, model: Path, name: str) -> Any:
        output = self._out / f"{name}.json"
        if not output.exists() or name != "dense":
            output.unlink(missing_ok=True)
            suite = ["--suite", "perplexity,seqlen=1024,limit=40"]
            words = [sys.executable, "-m", "emp_llm", "evaluate", "--model", str(model), *suite]
            self._measured([*words, "--output", str(output)], f"evaluate-{name}")
        return next(iter(values_of(read_results(output, "--output").measures).values()))

    def _rows(self) -> list[dict[str, Any]]:
        if not self._file.exists():
            return []
        runs = [json.loads(line) for line in self._file.read_text().splitlines()]
        return [run for run in runs if run.items() >= self._conditions.items()]

    def table(self) -> str:
        """Medians and ranges of all rows."""
        rows = [["", "code", "CPU seconds", "wall seconds", "peak memory", "perplexity", "runs"]]
        found = self._rows()
        for method, size, code in ROWS:
            runs = [run for run in found if run["row"] == [method, size, code]]
            label = f"{NAMES[method]}, {size if ':' in size else f'{float(size):.0%}'}"
            good = [run for run in runs if "failed" not in run]
            if not good:
                if runs:
                    rows.append([label, CODES[code], runs[-1]["failed"], "", "", "", "0"])
                continue
            first = next((run for run in good if "change" in run), None)
            change = ""
            if first is not None:
                change = f"{first['change'][0]:+.1f} ± {first['change'][1]:.1f} %"
            cpu = [run["user"] + run["system"] for run in good]
            memory = statistics.median(run["memory"] for run in good)
            anonymous = statistics.median(run["anonymous"] for run in good)
            rows.append(
                [
                    label,
                    CODES[code],
                    spread(cpu, 0),
                    spread([run["wall"] for run in good], 0),
                    f"{memory:.2f}, {anonymous:.2f} GB",
                    change,
                    str(len(good)),
                ]
            )
        return markdown_table(rows, as_markdown=True)


def spread(values: list[float], digits: int) -> str:
    """The median, and the range if there are several values."""
    middle = f"{statistics.median(values):.{digits}f}"
    if len(values) == 1:
        return middle
    return f"{middle} ({min(values):.{digits}f} to {max(values):.{digits}f})"


if __name__ == "__main__":
    main()
