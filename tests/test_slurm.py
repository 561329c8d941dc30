"""`emp-llm submit`: site files, arrays, scripts, and a study on a real Slurm, where there is
one.
"""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from conftest import Run
from studies import TOKEN, command_job, job, stand_in, study_of

from emp_llm.cli import options_from
from emp_llm.cluster.downloads import wanted_by
from emp_llm.cluster.jobs import Job, Needs
from emp_llm.cluster.slurm import JobArray, Site, grouped_jobs, needs_text, read_site, script_text

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "scripts" / "slurm"


def arrays_of(
    jobs: list[Job], site: Site | None = None, queued: dict[str, str] | None = None
) -> list[JobArray]:
    return grouped_jobs(jobs, site or Site(), queued or {}, 1)


# Grouping


# Jobs, and their arrays: the jobs, and the arrays that come first.
FOUR = [job(f"a{i}") for i in range(4)]
GROUPS = {
    "recipes of a model": (
        [
            job("c"),
            *(job(f"p{i}", "c") for i in range(2)),
            *(job(f"e{i}", f"p{i}") for i in range(2)),
        ],
        ["c", "p0 p1 after 001", "e0 e1 after 002"],
    ),
    "jobs that wait for several": (
        [
            job("d", gpus=1),
            job("p0"),
            job("p1"),
            *(job(f"e{i}", "d", f"p{i}", hours=9.0) for i in range(2)),
        ],
        ["d", "p0 p1", "e0 e1 after 001 002"],
    ),
    "others are done or queued": ([job("e0", "done"), job("e1", "queued")], ["e0 e1 after 7"]),
    "large arrays are divided": (
        [*FOUR, job("last", *(each.id for each in FOUR))],
        ["a0 a1 a2", "a3", "last after 001 002"],
    ),
}


@pytest.mark.parametrize(
    ("kind", "options", "reads"),
    [
        ("calibrate", "", True),
        ("evaluate", "--suite paper", False),
        ("prune", "--method magnitude", False),
        ("prune", "--method magnitude --heal", True),
        ("prune", "--method wanda", True),
        ("prune", "--method wanda --activations norms", False),
        ("prune", "--method wanda --activations norms --refit", True),
        ("prune", "--method wanda --activations norms --heal", True),
        ("sweep", "--methods magnitude,emp-magnitude", False),
        ("sweep", "--methods magnitude,wanda", True),
    ],
)
def test_the_text_that_a_job_reads_is_downloaded(kind: str, options: str, reads: bool) -> None:
    job = command_job("a", kind, f"--model m {options}")
    assert wanted_by([job], [], options_from).texts == ["wikitext2"] * reads


@pytest.mark.parametrize("name", GROUPS)
def test_arrays_of_jobs(name: str) -> None:
    jobs, expected = GROUPS[name]
    arrays = arrays_of(jobs, Site(largest_array=3), {"queued": "7_3"})
    assert [each.name for each in arrays] == [
        f"{number:03d}-calibrate" for number in range(1, 1 + len(arrays))
    ]
    shown = []
    for each in arrays:
        words = [job.id for job in each.jobs] + ["after"] * bool(each.after)
        shown.append(" ".join([*words, *(name.removesuffix("-calibrate") for name in each.after)]))
    assert shown == expected


def test_needs_are_the_plans_then_the_sites(tmp_path: Path) -> None:
    lines = (
        '"export HF_TOKEN=$(cat ~/.token)", "export API_KEY=\\"$MINE\\""'  # of a file: no secrets
    )
    (tmp_path / "site.toml").write_text(
        f"prolog = [{lines}]\nmax_hours = 10\n[needs.all]\nhours = 2\nmemory_gb = 9\n"
        "[needs.calibrate]\nhours = 3"
    )
    site = read_site(tmp_path / "site.toml")
    needs = site.needs_of(job("a", memory_gb=2.0))
    assert needs == Needs(memory_gb=2.0, hours=3.0)
    assert needs_text(needs, site) == "4 cores, 2 GB, 3:03 h"
    assert site.needs_of(command_job("a", "prune", "")) == Needs(memory_gb=9.0, hours=2.0)
    assert site.minutes_of(Needs(hours=100.0)) == site.minutes_of(Needs()) == 600
    assert needs_text(Needs(gpus=4), site) == "4 GPUs, 4 cores, 10:00 h"


# Scripts


@pytest.mark.parametrize("example", sorted(EXAMPLES.glob("*.toml")), ids=lambda path: path.stem)
def test_scripts_of_the_examples_are_good_shell(example: Path, tmp_path: Path) -> None:
    site = read_site(example)
    text = script_text(arrays_of([job(name, gpus=2) for name in "ab"], site)[0], site, tmp_path)
    for script in (text, (EXAMPLES / "job.sh").read_text()):
        assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0
    assert "#@" not in text
    assert f"#SBATCH {site.gpus.format(gpus=2)}\n" in text
    assert (
        "HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 TRANSFORMERS_OFFLINE=1 HF_EVALUATE_OFFLINE=1"
        in text
    )
    assert f"command=({f'{site.container} emp-llm'.strip()})\n" in text
    assert ("module load gcc/13.2 cuda/12.4 python/3.12" in text) == bool(site.modules)
    assert f"#SBATCH --partition={site.partition}\n" in text
    without = script_text(arrays_of([job("a", gpus=0)], site)[0], site, tmp_path)
    assert f"#SBATCH --partition={site.cpu_partition or site.partition}\n" in without
    assert "--gpus" not in without


# Site files


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('partiton = "gpu"', "unknown field partiton"),
        ("max_hours = 0.05", "signal_seconds 180 must be less than max_hours, 180 seconds"),
        ("[needs.calibrate]\nprocesses = 2", "unknown field processes"),
        ("[needs.prun]\ngpus = 2", r"toml: needs: unknown key 'prun'"),
        ('gpus = "--gres=gpu"', "gpus must be an option with {gpus}"),
        ('cache = "$NOT_SET_HERE/hf"', "cache $NOT_SET_HERE/hf must be an absolute path"),
        ("cpus = 0", "cpus: expected int >= 1"),
        ("partition = [", "cannot be read as TOML"),
        (f'prolog = ["export HF_TOKEN={TOKEN}"]', "line 1 seems to hold a secret (HF_TOKEN)"),
        (
            f'cpus = 1\ncontainer = "run --env {TOKEN}"',
            "line 2 seems to hold a secret (an access token of the Hub)",
        ),
        ('options = ["--comment=api_key=abc"]', "line 1 seems to hold a secret (api_key)"),
    ],
)
def test_wrong_site_files_are_refused(command: Run, tmp_path: Path, text: str, words: str) -> None:
    study = study_of(tmp_path / "study", [job("a")], text)
    done = command("submit", study, "--site", study / "site.toml", "--dry-run", code=2)
    assert f"{study / 'site.toml'}: " in done.stderr
    assert words in done.stderr
    assert TOKEN not in done.stderr
    assert not (study / "slurm").exists()


# sbatch, as a stand-in


def test_without_sbatch(command: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study = study_of(tmp_path / "study", [job("a")])
    (tmp_path / "empty").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    done = command("submit", study, "--site", study / "site.toml", code=2)
    assert (
        "sbatch: not found; submit on a login node of a Slurm cluster. Without Slurm, emp-llm run "
        f"{study}" in done.stderr
    )
    assert not (study / "slurm").exists()
    assert (
        "--site site.toml: no such file. Copy an example from "
        in command("submit", study, code=2).stderr
    )


def test_a_refusal_is_told_in_the_words_of_sbatch(
    command: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second array is refused; after a correction, the same command submits it and not the
    first.
    """
    study = study_of(tmp_path / "study", [job("a"), job("b", "a")], "offline = false")
    refuse = (
        "echo 'sbatch: error: invalid partition specified: gpu' >&2\necho 'sbatch: error: "
        "Batch job submission failed' >&2"
    )
    line = f'for last; do :; done; case "$last" in *001*) echo 41;; *) {refuse}; exit 1;; esac'
    stand_in(
        tmp_path / "bin", monkeypatch, sbatch=line, squeue=f"echo '41_0|001-calibrate|{study}'"
    )
    done = command("submit", study, "--site", study / "site.toml", code=2)
    assert (
        "sbatch said: invalid partition specified: gpu; Batch job submission failed." in done.stderr
    )
    assert "The arrays before it (1) are submitted." in done.stderr
    stand_in(tmp_path / "bin", monkeypatch, sbatch='echo "$@" > called; echo "42;cluster"')
    done = command("submit", study, "--site", study / "site.toml")
    assert "1 job submitted; 1 already queued" in done.stdout
    called = (study / "called").read_text()
    assert "--dependency=afterany:41 slurm/003-calibrate.sh" in called
    assert (study / "slurm" / "003-calibrate.jobs").read_text() == "b\n"


def test_nothing_is_submitted_twice(
    command: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tasks are known by their array and folder, also if submit was killed as sbatch took them.
    No answer, no submission.
    """
    study = study_of(tmp_path / "study", [job("a"), job("b")], "offline = false")
    queue = f"echo '41_1|001-calibrate|{study}'; echo '43_0|001-calibrate|/elsewhere'"
    stand_in(
        tmp_path / "bin", monkeypatch, sbatch='echo "$@" >> called; kill -9 $PPID', squeue=queue
    )
    line = [
        sys.executable,
        "-m",
        "emp_llm",
        "submit",
        str(study),
        "--site",
        str(study / "site.toml"),
    ]
    assert subprocess.run(line, check=False, env=os.environ).returncode == -9
    stand_in(tmp_path / "bin", monkeypatch, sbatch='echo "$@" >> called; echo 42')
    done = command("submit", study, "--site", study / "site.toml")
    assert "1 job submitted; 1 already queued" in done.stdout  # a was not in the queue; b was
    assert (study / "slurm" / "002-calibrate.jobs").read_text() == "a\n"
    stand_in(tmp_path / "bin", monkeypatch, squeue=f"{queue}; echo '42_0|002-calibrate|{study}'")
    assert (
        "nothing to submit: 2 already queued"
        in command("submit", study, "--site", study / "site.toml").stdout
    )
    stand_in(
        tmp_path / "bin", monkeypatch, squeue="echo 'squeue: error: Unable to contact' >&2; exit 1"
    )
    done = command("submit", study, "--site", study / "site.toml", code=2)
    assert (
        "nobody knows whether they are still queued: squeue said: Unable to contact. Nothing is "
        "submitted" in done.stderr
    )


def test_a_dry_run_shows_all_and_writes_nothing(command: Run, tmp_path: Path) -> None:
    study = study_of(tmp_path / "study", [job("a", gpus=1), job("b", "a", gpus=1)])
    before = sorted(study.rglob("*"))
    done = command("submit", study, "--site", EXAMPLES / "gpu-modules.toml", "--dry-run")
    assert sorted(study.rglob("*")) == before
    assert "2 jobs to submit" in done.stdout
    assert "#SBATCH --gpus-per-node=1\n" in done.stdout
    calls = [
        shlex.split(line.removeprefix("$ "))
        for line in done.stdout.splitlines()
        if line.startswith("$ sbatch")
    ]
    assert [call[-1] for call in calls] == ["slurm/001-calibrate.sh", "slurm/002-calibrate.sh"]
    assert "--dependency=afterany:001-calibrate" in calls[1]
    (study / "activations").mkdir()
    for name in "ab":
        (study / "activations" / name).touch()
    done = command("submit", study, "--site", EXAMPLES / "gpu-modules.toml", "--dry-run")
    assert (done.returncode, done.stdout) == (0, "nothing to submit: 2 done\n")


# Other schedulers


def test_the_example_for_another_scheduler_runs(tmp_path: Path) -> None:
    """The shell blocks of the documentation, with a stand-in for emp-llm: task 2 runs the second
    prune.
    """
    page = (ROOT / "docs" / "clusters.md").read_text().partition("## Another scheduler")[2]
    script, listing, *_ = re.findall(r"^```sh\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    jobs = [
        msgspec.structs.replace(job(name), kind="prune", command="emp-llm prune")
        for name in ("one", "two")
    ]
    study = study_of(tmp_path / "study", [job("calibrate"), *jobs])
    (tmp_path / "emp-llm").write_text('#!/bin/sh\necho "$PWD: $@"; exit 143\n')
    (tmp_path / "emp-llm").chmod(0o755)
    (tmp_path / "python").symlink_to(sys.executable)
    environment = {
        "PATH": f"{tmp_path}:/usr/bin:/bin",
        "PBS_O_WORKDIR": str(study),
        "PBS_ARRAY_INDEX": "2",
    }
    subprocess.run(["sh", "-c", listing], cwd=study, env=environment, check=True)
    done = subprocess.run(
        ["sh", "-c", script], env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (143, f"{study}: run . --only two\n")


# The cache of offline nodes


def test_a_streamed_text_cannot_be_cached(
    command: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only jobs that read it: not one with activations, and not one by magnitude."""
    lines = ("--activations a", "--method magnitude")
    harmless = [
        command_job(f"p{i}", "prune", f"--model {tmp_path} {line}") for i, line in enumerate(lines)
    ]
    stand_in(tmp_path / "bin", monkeypatch, sbatch="echo 41")
    study = study_of(tmp_path / "study", harmless)
    command("submit", study, "--site", study / "site.toml")
    streamed = command_job("c", "calibrate", f"--model {tmp_path} --calibration c4")
    study = study_of(tmp_path / "streamed", [*harmless, streamed])
    done = command("submit", study, "--site", study / "site.toml", code=2)
    assert "allenai/c4/en/train is streamed from the Hub and never in the cache" in done.stderr
    done = command("submit", study, "--site", study / "site.toml", "--no-prepare")


# Names of folders in a script


@pytest.mark.parametrize("name", ["a\n#SBATCH --wrap=id\nid", 'a"b', "a\\b", "a\rb"])
def test_names_of_folders_that_a_script_cannot_hold(
    command: Run, tmp_path: Path, name: str
) -> None:
    study = study_of(tmp_path / name, [job("a")], "cpus = 1")
    done = command("submit", study, "--site", study / "site.toml", "--dry-run", code=2)
    assert "a batch script cannot hold its name. Rename the folder" in done.stderr
    assert done.stderr.strip().isprintable()


def test_other_names_are_quoted(tmp_path: Path) -> None:
    text = script_text(arrays_of([job("a")])[0], Site(), tmp_path / "it's #1")
    assert f'#SBATCH --chdir="{tmp_path}/it\'s #1"\n' in text
