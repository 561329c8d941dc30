"""The memory that commands take, beside the estimate of a plan, for models of 1 B and 3 B random
weights.

    python scripts/measure_needs.py [--models 1B,3B] [--jobs calibrate,prune] [--folder DIR]
    [--output FILE]

Each job runs in a process of its own, and its memory is read every 10 ms: anonymous and shared
pages, of the process and its children, and (every 0.2 s) the pages of the checkpoint that it has
mapped. On the CPU, weights in their own dtype are such pages: the system could take them back, but
would read them again for every batch. Other pages of files do not count: mapped libraries, and the
page cache of what is read or written.

What is measured is kept in FOLDER/measured.jsonl, so that a further run measures only what is
missing, and the page has all of it. The models (2.3 and 6.3 GB) are made in the folder when first
needed, and deleted unless --folder is given.
"""

import argparse
import contextlib
import json
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench_helpers import hardware, make_llama
from measure_calibration import SHAPES

from emp_llm.cluster.jobs import JobKind
from emp_llm.cluster.planning import Work, estimated_needs, model_size
from emp_llm.common.tables import markdown_table
from emp_llm.evaluation.suites import find_suite

# seconds between two readings
EVERY = 0.01
MAPPED_EVERY = 0.2
ROOT = Path(__file__).parents[1]
PAGE = """# Memory of jobs beside its estimate

`python scripts/measure_needs.py`: {machine}; one thread. Llamas of random weights in bfloat16, run on the CPU ({models}).

{table}

Each command runs in a process of its own, and is read every 10 ms. "own" are its anonymous and shared pages. "weights" are the
pages of the checkpoint that it has mapped: on the CPU, transformers maps weights in their own dtype, so the system could take
these pages back, but would read them again for every batch. They do not count where --dtype converts the weights, which reads
them once. "measured" is the highest sum. Mapped libraries (0.15 GB) and the page cache of what is read or written do not count.

The estimate is that of `emp-llm plan` today, from the counts of config.json alone; its constants of 0.35, 0.12 and 0.42 GB were
chosen after the first of these runs. The texts are short, because bfloat16 is slow on this processor: what grows with the
tokens is a small part
of the memory. A prune of one large group runs no compiled kernel and takes less. A refit was not measured, and there was no
GPU: the memory of GPUs is computed, not measured.
"""
TEXT = str(ROOT / "calibration" / "demo.txt")


@dataclass(frozen=True)
class Measured:
    """A job to measure.

    Attributes:
        kind: the command.
        options: of the command, without model and output.
        work: what the estimate takes it for.
    """

    kind: JobKind
    options: str
    work: Work


def jobs_of(folder: Path, model: str) -> dict[str, Measured]:
    """The jobs to measure on a model, in order; later ones use the activations of the first."""
    text = find_suite(str(folder / "text.toml"))
    tasks = find_suite(str(folder / "tasks.toml"))
    activations = f"--activations {shlex.quote(str(folder / f'{model}.safetensors'))}"
    words = f"--calibration {shlex.quote(TEXT)} --samples 4 --seqlen 128"
    calibration = Work(calibrates=True, samples=4, seqlen=128)
    on_text = f"--suite {shlex.quote(str(folder / 'text.toml'))}"
    return {
        "calibrate": Measured("calibrate", words, calibration),
        "calibrate, float32": Measured(
            "calibrate",
            f"--calibration {shlex.quote(TEXT)} --samples 4 --seqlen 512 --dtype float32",
            replace(calibration, seqlen=512, dtype="float32"),
        ),
        "prune": Measured("prune", f"--method emp-wanda {activations}", Work()),
        "prune, all targets": Measured(
            "prune", f"--method magnitude --sparsity 0.5 --group all {activations}", Work()
        ),
        "prune, calibrating": Measured("prune", f"--method emp-wanda {words}", calibration),
        "prune, propagating": Measured(
            "prune",
            f"--method emp-wanda {words} --propagate pruned",
            replace(calibration, propagates=True),
        ),
        "evaluate, text": Measured("evaluate", f"{on_text} --limit 2", Work(suite=text, limit=2)),
        "evaluate, tasks": Measured(
            "evaluate",
            f"--suite {shlex.quote(str(folder / 'tasks.toml'))} --limit 2",
            Work(suite=tasks, limit=2),
        ),
        "sweep": Measured(
            "sweep",
            f"--methods wanda --sparsities 0.5 {activations} {on_text} --limit 1",
            Work(suite=text, limit=1, points=1),
        ),
    }


def main(line: list[str] | None = None) -> None:
    """Measure what is missing, and write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default="1B,3B", help="1B, 3B or both")
    parser.add_argument("--jobs", help="the jobs to measure, separated by semicolons; default: all")
    parser.add_argument(
        "--folder", type=Path, help="keeps models and measurements; default: a temporary folder"
    )
    parser.add_argument(
        "--output", type=Path, help="file for the page; default: it is only printed"
    )
    options = parser.parse_args(line)
    with contextlib.ExitStack() as stack:
        folder = options.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        write_suites(folder)
        for model in options.models.split(","):
            for name, job in jobs_of(folder, model).items():
                if options.jobs is None or name in options.jobs.split(";"):
                    measure(folder, model, name, job)
        page = page_of(folder)
    print(page)
    if options.output is not None:
        options.output.write_text(page)


def write_suites(folder: Path) -> None:
    """The suites of the jobs: text alone, and tasks alone."""
    demo = ROOT / "eval" / "demo"
    (folder / "text.toml").write_text(
        f'[perplexity]\nfile = {json.dumps(str(demo / "heldout.txt"))}\njoin = ""\nseqlen = 256\n'
    )
    (folder / "tasks.toml").write_text(
        f'[[tasks]]\nnames = ["demo_facts"]\nfolder = {json.dumps(str(demo))}\n'
    )


def measure(folder: Path, model: str, name: str, job: Measured) -> None:
    """Measure a job, unless it is measured already."""
    if any((entry["model"], entry["job"]) == (model, name) for entry in entries(folder)):
        return
    if not (folder / model / "config.json").is_file():
        make_llama(folder / model, SHAPES[model])
    activations = folder / f"{model}.safetensors"
    if "--activations" in job.options and not activations.is_file():
        raise SystemExit(f"{activations} is missing; measure the job calibrate first.")
    output = activations if name == "calibrate" else folder / "output" / job.kind
    command = [
        sys.executable,
        "-m",
        "emp_llm",
        job.kind,
        "--model",
        str(folder / model),
        *shlex.split(job.options),
    ]
    began = time.perf_counter()
    shutil.rmtree(folder / "output", ignore_errors=True)
    (folder / "output").mkdir()
    command += ["--output", str(output), "--overwrite", "--quiet"]
    peak = highest_memory(command, folder / "log.txt", maps=job.work.dtype == "auto")
    entry = {
        "model": model,
        "job": name,
        "options": job.options.replace(str(folder), "DIR").replace(str(ROOT) + "/", ""),
        "peak": peak,
        "seconds": time.perf_counter() - began,
    }
    print(entry, file=sys.stderr)
    with (folder / "measured.jsonl").open("a") as file:
        file.write(json.dumps(entry) + "\n")


def highest_memory(command: list[str], log: Path, maps: bool = True) -> dict[str, int]:
    """Run a process to its end; returns its highest memory in bytes, with that of its children.

    Args:
        command: the program and its arguments.
        log: file for its output.
        maps: it runs on mapped weights; if it converts them, it reads the pages once.

    Returns:
        The highest "sum", and its parts at that moment: "own" (anonymous and shared pages) and
        "weights" (pages of mapped safetensors).

    Raises:
        SystemExit: the command fails.
    """
    peak = {"own": 0, "weights": 0, "sum": 0}
    weights = 0
    mapped_at = 0.0
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
        while process.poll() is None:
            numbers = list(family_of(process.pid))
            if maps and time.perf_counter() - mapped_at > MAPPED_EVERY:
                weights = sum(mapped_weights(number) for number in numbers)
                mapped_at = time.perf_counter()
            own = sum(own_memory(number) for number in numbers)
            if own + weights > peak["sum"]:
                peak = {"own": own, "weights": weights, "sum": own + weights}
            time.sleep(EVERY)
    if process.returncode:
        raise SystemExit(f"{shlex.join(command)} failed:\n{log.read_text()[-2000:]}")
    return peak


def family_of(number: int) -> Iterator[int]:
    """A process and its children, and theirs."""
    yield number
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{number}/task").iterdir():
            for child in (thread / "children").read_text().split():
                yield from family_of(int(child))


def own_memory(number: int) -> int:
    """Bytes of a process's anonymous and shared pages; 0 if it has ended."""
    with contextlib.suppress(OSError, KeyError):
        lines = Path(f"/proc/{number}/status").read_text().splitlines()
        fields = {name: value.split() for name, _, value in (line.partition(":") for line in lines)}
        return 1024 * (int(fields["RssAnon"][0]) + int(fields["RssShmem"][0]))
    return 0


def mapped_weights(number: int) -> int:
    """Bytes of the safetensors that a process has mapped, read and not changed; 0 if it has
    ended.
    """
    found = 0
    counts = False
    with contextlib.suppress(OSError), Path(f"/proc/{number}/smaps").open() as file:
        for line in file:
            if "-" in line.split(" ", 1)[0]:  # the head of a mapping
                counts = line.rstrip().endswith(".safetensors")
            # A page that the process changed is its own.
            elif counts and line.startswith(("Rss:", "Anonymous:")):
                found += 1024 * int(line.split()[1]) * (1 if line.startswith("R") else -1)
    return found


def entries(folder: Path) -> list[dict[str, Any]]:
    """What is measured so far."""
    file = folder / "measured.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []


def page_of(folder: Path) -> str:
    """The page of the measurements, with the estimates as they are now."""
    rows = [["model", "command", "own", "weights", "measured", "estimated", "difference"]]
    found = {(entry["model"], entry["job"]): entry for entry in entries(folder)}
    for model, name, job in [
        (each, *item) for each in ("1B", "3B") for item in jobs_of(folder, each).items()
    ]:
        if (model, name) not in found:
            continue
        entry = found[model, name]
        peak = entry["peak"]
        options = entry["options"].replace("|", "\\|")
        needs = estimated_needs(job.kind, model_size(str(folder / model)), job.work)
        share = needs.memory_gb * 1e9 / peak["sum"] - 1
        sizes = [f"{peak[name] / 1e9:.2f} GB" for name in ("own", "weights", "sum")]
        rows.append(
            [
                model,
                f"`{job.kind} {options}`",
                *sizes,
                f"{needs.memory_gb:.2f} GB",
                f"{100 * share:+.0f} %",
            ]
        )
    sizes = [
        f"{model}: {model_size(str(folder / model)).parameters:,} parameters"
        for model in SHAPES
        if (folder / model).is_dir()
    ]
    return PAGE.format(
        machine=hardware("cpu"),
        models="; ".join(sizes),
        table=markdown_table(rows, as_markdown=True),
    )


if __name__ == "__main__":
    main()
