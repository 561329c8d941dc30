"""Time of a study beside its jobs: a plan of 2,000 jobs, its collection, and the overhead of a job.

    python scripts/bench_study.py [--jobs 2000] [--models 10] [--folder DIR] [--write
    scripts/results/study.md]

The plan has models of Llama 2 7B's shape, of which only config.json exists. The outputs of its jobs
are copies of those of the demo model, with the matrices of a 7B model (96 in a report, the paper's
suite of tasks in results). The overhead is the time of plan, run and collect beyond the seconds of
the jobs themselves, for a study of the demo model by one worker. Each command is a process of its
own, imports included.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench_helpers import processor, run_and_watch

from emp_llm.cluster.jobs import Job, JobFiles, read_plan
from emp_llm.evaluation.suites import find_suite

DEMO = Path(__file__).parent / "demo" / "model"
_LLAMA = {
    **{
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 11008,
    },
    **{
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "vocab_size": 32000,
    },
    **{
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        "rms_norm_eps": 1e-5,
    },
}


def main(line: list[str] | None = None) -> None:
    """Measure, print, and write if asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--jobs", type=int, default=2000, help="jobs of the large plan; default: 2000"
    )
    parser.add_argument("--models", type=int, default=10, help="its models; default: 10")
    parser.add_argument("--folder", type=Path, help="working folder; default: a temporary folder")
    parser.add_argument("--write", type=Path, help="page to write")
    arguments = parser.parse_args(line)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as scratch:
        rows, jobs = _large(Path(scratch), arguments.jobs, arguments.models)
        overhead = _overhead(Path(scratch))
    page = "\n".join(
        [
            "# A study beside its jobs",
            "",
            f"`python scripts/bench_study.py --jobs {arguments.jobs} --models {arguments.models}`: "
            f"{processor()}.",
            "",
            f"A plan of {jobs:,} jobs over {arguments.models} models, and {jobs:,} finished "
            "outputs.",
            "",
            "| command | seconds | peak memory |",
            "|---|---:|---:|",
            *(f"| {name} | {seconds:.1f} | {peak / 1e6:.0f} MB |" for name, seconds, peak in rows),
            "",
            overhead,
            "",
        ]
    )
    print(page)
    if arguments.write is not None:
        arguments.write.write_text(page)


def _large(scratch: Path, jobs: int, models: int) -> tuple[list[tuple[str, float, int]], int]:
    """(command, seconds, peak memory) of plan, status and collect; and the number of jobs."""
    names = []
    for number in range(models):
        folder = scratch / "models" / f"llama-{number}"
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(_LLAMA))
        names.append(str(folder))
    recipes = max(
        1, (jobs // models - 2) // 2
    )  # of each model: a dense evaluation, a calibration, and two jobs for each recipe
    betas = ",".join(f"{0.5 + 0.01 * number:g}" for number in range(recipes))
    study = scratch / "study"
    words = [
        "plan",
        "--models",
        ",".join(names),
        "--methods",
        "emp-wanda",
        "--betas",
        betas,
        "--suite",
        "paper",
    ]
    rows = [_watched("plan", [*words, "--output", str(study), "--quiet"])]
    planned = read_plan(study)
    _fill(study, planned, scratch)
    rows.append(_watched("status", ["status", str(study)]))
    rows.append(_watched("collect", ["collect", str(study), "--quiet"]))
    rows.append(
        _watched("collect without figures", ["collect", str(study), "--no-plots", "--quiet"])
    )
    return rows, len(planned)


def _watched(name: str, words: list[str]) -> tuple[str, float, int]:
    begin = time.perf_counter()
    peak = run_and_watch([sys.executable, "-m", "emp_llm", *words], output=False)
    return name, time.perf_counter() - begin, peak


def _fill(study: Path, jobs: list[Job], scratch: Path) -> None:
    """Write the output of every job."""
    report, results = _templates(scratch)
    for job in jobs:
        path = study / job.output
        path.parent.mkdir(parents=True, exist_ok=True)
        words = dict(zip(job.arguments[1::2], job.arguments[2::2], strict=False))
        beta = float(job.id.partition("beta-")[2].rpartition(".")[0] or 1)
        model = str(scratch / "models" / job.id.partition(".")[0])
        identity = f"identity of {model}"
        if job.kind == "calibrate":
            path.write_bytes(b"norms")
        elif job.kind == "prune":
            path.mkdir()
            source = report["source"] | {"model": model, "identity": identity}
            recipe = report["recipe"] | {"beta": beta}
            values = report | {"command": job.command, "source": source, "recipe": recipe}
            (path / "emp_report.json").write_text(json.dumps(values))
        else:
            pruned = (
                None if ".dense." in job.id else results["pruned"] | {"of": model, "beta": beta}
            )
            made_by = results["made_by"] | {"model": {"identity": identity}}
            values = results | {
                "command": job.command,
                "model": words["--model"],
                "pruned": pruned,
                "made_by": made_by,
            }
            path.write_text(json.dumps(values))


def _templates(scratch: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The report and the results of the demo model, with as many matrices and tasks as a 7B
    model by the paper's suite.
    """
    small = scratch / "small"
    _run(
        "prune",
        "--model",
        DEMO,
        "--method",
        "emp-wanda",
        "--calibration",
        "demo",
        "--samples",
        "2",
        "--output",
        small,
    )
    _run(
        "evaluate",
        "--model",
        small,
        "--suite",
        "demo",
        "--limit",
        "20",
        "--output",
        scratch / "small.json",
    )
    report = json.loads((small / "emp_report.json").read_text())
    results = json.loads((scratch / "small.json").read_text())
    entries = [entry for entry in report["matrices"].values() if entry["block"] == 0]
    report["matrices"] = {
        f"model.layers.{block}.{entry['role']}": entry | {"block": block}
        for block in range(32)
        for entry in entries
    }
    first = next(iter(results["tasks"]))
    task = json.dumps(results["tasks"][first])
    names = [name for task in find_suite("paper").tasks for name in [task.name]]
    results["tasks"] = {name: json.loads(task.replace(f'"{first}"', f'"{name}"')) for name in names}
    return report, results


def _overhead(scratch: Path) -> str:
    """A sentence on the seconds beyond those of the jobs."""
    study = scratch / "demo"
    begin = time.perf_counter()
    _run(
        "plan",
        "--models",
        DEMO,
        "--suite",
        "demo",
        "--limit",
        "2",
        "--calibration",
        "demo",
        "--output",
        study,
    )
    _run("run", study, "--workers", "1")
    _run("collect", study)
    total = time.perf_counter() - begin
    jobs = read_plan(study)
    own = sum(state.seconds for job in jobs if (state := JobFiles(study, job).state()) is not None)
    shutil.rmtree(study)
    return (
        f"Plan, run and collect of a study of {len(jobs)} jobs of the demo model took {total:.1f} "
        f"s, its jobs {own:.1f} s: {(total - own) / len(jobs):.2f} s of overhead a job."
    )


def _run(*words: object) -> None:
    subprocess.run(
        [sys.executable, "-m", "emp_llm", *map(str, words), "--quiet"],
        check=True,
        stdout=subprocess.DEVNULL,
    )


if __name__ == "__main__":
    main()
