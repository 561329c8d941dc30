"""Studies: the plan of options, the tables of results, and the Snakefile, with a script in place of
emp-llm where only Snakemake's part is tried.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import Run

from emp_llm import cli, plan, report
from emp_llm.common.errors import UserError
from emp_llm.study.plan import Study, read_study

Models = Callable[[str], Path]
ROOT = Path(__file__).parents[1]


# From options to study.yaml.


def planned(made: Models, folder: Path, **options: Any) -> Study:
    values = {"models": str(made("llama")), "suite": "demo", "quiet": True}
    return plan(output=folder, **values | options).study


def prunes(study: Study) -> dict[str, str]:
    return {point.name: point.prune for point in study.points}


def test_each_point_has_its_prune(models: Models, tmp_path: Path) -> None:
    study = planned(
        models,
        tmp_path,
        models=f"{models('llama')},{models('opt')}",
        methods="emp-wanda,magnitude",
        betas="0.5,1",
        sparsities="0.4",
        samples=4,
    )
    assert study == read_study(tmp_path)
    assert [model.name for model in study.models] == ["llama", "opt"]
    assert study.models[0].model == str(models("llama"))
    assert study.models[0].memory_gb == 4  # 3 GB, and of the weights next to nothing
    norms = "--activations activations/{model}.safetensors"
    assert prunes(study) == {
        "emp-wanda-beta-0.5": f"--method emp-wanda --beta 0.5 {norms}",
        "emp-wanda-beta-1": f"--method emp-wanda --beta 1 {norms}",
        "magnitude-0.4": "--method magnitude --sparsity 0.4",
    }
    assert [point.after for point in study.points] == ["calibrate", "calibrate", None]
    assert {point.gpus for point in study.points} == {0}  # no model runs
    assert (study.calibrate, study.evaluate) == ("--samples 4", "--suite demo")
    assert study.fetch == "--suite demo --calibration wikitext2"


def test_methods_that_move_weights(models: Models, tmp_path: Path) -> None:
    """They read the text themselves, on a GPU."""
    how = {"calibration": "demo", "overwrite": True}
    pruned = {"patterns": "2:4", "prune_options": "--propagate pruned"}
    study = planned(models, tmp_path, methods="sparsegpt,admm", **how, **pruned)
    assert list(prunes(study)) == ["sparsegpt-2of4", "admm-2of4"]
    assert all("--calibration demo" in words for words in prunes(study).values())
    assert {(point.after, point.gpus) for point in study.points} == {(None, None)}
    (point,) = planned(models, tmp_path, methods="wanda", prune_options="--heal", **how).points
    assert point.prune.endswith("--calibration demo --heal")
    norms = tmp_path / "norms.safetensors"
    norms.touch()
    for further in ("--refit", f"--refit --activations {norms}"):
        methods = {"methods": "wanda,magnitude", "prune_options": further}
        found = prunes(planned(models, tmp_path, **methods, **how))
        assert all(words.endswith(f"--calibration demo {further}") for words in found.values())
    with pytest.raises(UserError, match="--refit fits weights to a calibration text"):
        planned(models, tmp_path / "none", methods="magnitude", prune_options="--refit")


def test_methods_of_units(models: Models, tmp_path: Path) -> None:
    study = planned(
        models,
        tmp_path,
        methods="wanda,fisher",
        sparsities="0.25",
        prune_options="--structure neurons --refit",
    )
    assert prunes(study) == {
        f"{method}-0.25": f"--method {method} --sparsity 0.25 --structure neurons --refit"
        for method in ("wanda", "fisher")
    }
    layers = planned(
        models,
        tmp_path / "layers",
        methods="cosine",
        calibration="demo",
        samples=4,
        prune_options="--structure layers",
    )
    assert prunes(layers) == {
        "cosine-0.5": "--method cosine --sparsity 0.5 --calibration demo --samples 4 "
        "--structure layers"
    }
    given = {"methods": "magnitude", "prune_options": "--structure neurons"}
    by_weights = planned(models, tmp_path / "by-weights", **given)
    for each in (study, layers, by_weights):
        assert {point.gpus for point in each.points} == {None}  # the model runs
    with pytest.raises(UserError, match=r"it holds a model. Name another folder"):
        planned(models, models("llama"), methods="wanda")
    assert not (models("llama") / "study.yaml").exists()


def test_a_text_that_the_model_writes_is_written_once(models: Models, tmp_path: Path) -> None:
    """All jobs that need it come after the calibration, which writes it."""
    how = {"methods": "wanda,magnitude", "prune_options": "--refit"}
    study = planned(models, tmp_path, calibration="self", **how)
    assert [point.after for point in study.points] == ["calibrate"] * 2
    assert all("--calibration self --refit" in words for words in prunes(study).values())


def test_a_table(models: Models, tmp_path: Path) -> None:
    table = tmp_path / "table.toml"
    table.write_text(
        f"models = ['{models('llama')}']\nmethods = ['magnitude']\nsparsities = [0.25, 0.5]\nsuite "
        "= 'demo'\ndiscard = true\n"
    )
    study = plan(table, output=tmp_path / "a", quiet=True).study
    assert list(prunes(study)) == ["magnitude-0.25", "magnitude-0.5"]
    assert not study.keep
    fewer = plan(table, output=tmp_path / "b", sparsities="0.75", quiet=True).study
    assert list(prunes(fewer)) == ["magnitude-0.75"]
    table.write_text("modles = ['x']")
    with pytest.raises(UserError, match=r"table\.toml: .*modles"):
        plan(table, output=tmp_path / "c")
    table.write_text("models = 'x\n")
    with pytest.raises(UserError, match="cannot be read as TOML"):
        plan(table, output=tmp_path / "c")
    with pytest.raises(UserError, match=r"is a folder.*--models"):
        plan(models("llama"), output=tmp_path / "c")


def test_the_papers_table_is_planned_without_a_network(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    study = plan(ROOT / "scripts" / "paper" / "llm_table.toml", output=tmp_path).study
    assert (len(study.models), len(study.points)) == (7, 4)
    assert "huggyllama/llama-65b: not looked for, as the Hub does not answer." in caplog.text
    assert {model.memory_gb for model in study.models} == {None}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"models": None}, "--models is missing"),
        ({"models": []}, "--models is missing"),
        *(({name: ""}, f"--{name} is empty") for name in ("models", "methods", "suite", "betas")),
        ({"methods": "best"}, "best is for prune. It is emp-admm with a refit and healing"),
        ({"methods": "fisher"}, "Add --structure"),
        (
            {"prune_options": "--structure neurons --parameters 9e9"},
            "a plan sets how much goes at each point. Leave out --parameters, and give --spars",
        ),
        ({"methods": "wandaa"}, "'wandaa' is not one of"),
        ({"betas": "x", "methods": "emp-wanda"}, "--betas 'x': expected numbers"),
        ({"betas": "1", "methods": "wanda"}, "--betas is for emp methods"),
        ({"methods": "wanda", "prune_options": "--beta 1"}, "Leave out --beta, and give"),
        ({"evaluate_options": "--suite 'demo"}, "--evaluate-options .*No closing quotation"),
        ({"suite": "none-such"}, "none-such"),
        ({"models": "no/such/folder"}, "no/such/folder"),
        ({"calibration": "nowhere"}, "nowhere"),
        ({"calibration": "nowhere.txt:5,demo:5"}, r"nowhere\.txt: no such file"),
        ({"suite": "perplexity,file=nowhere.txt"}, r"nowhere\.txt: no such file"),
        ({"calibration": "demo:5", "samples": 4}, "--samples 4: --calibration sets the numbers"),
        ({"prune_options": "--refit --calibration self"}, "give a text of the model itself to"),
        ({"prune_options": "--activations nowhere.safetensors"}, "nowhere"),
        ({"prune_options": "--evaluate perplexity --baseline=nowhere.json"}, "nowhere"),
        ({"prune_options": "--refit --calibration nowhere.txt"}, "nowhere"),
        ({"prune_options": "--evaluate perplexity,file=nowhere.txt"}, "nowhere"),
        ({"evaluate_options": "--beside nowhere.json"}, "nowhere"),
        ({"evaluate_options": "--baseline /nowhere"}, "nowhere"),
        ({"evaluate_options": "--suite nowhere.toml"}, "nowhere"),
    ],
)
def test_wrong_options_of_a_plan(
    models: Models, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        planned(models, tmp_path, **{"methods": "wanda"} | options)
    assert not (tmp_path / "study.yaml").exists()


def test_paths_become_absolute(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them: jobs run in the study's folder."""
    monkeypatch.chdir(tmp_path)
    for name in ("a, b.txt", "c.txt", "V.txt", "old.json", "my norms.safetensors"):
        (tmp_path / name).write_text("Text.")
    study = planned(
        models,
        tmp_path / "study",
        methods="wanda",
        calibration="a, b.txt:6,self:c.txt:2,demo:1",
        suite="perplexity,file=V.txt,seqlen=64",
        prune_options="--activations 'my norms.safetensors'",
        evaluate_options="--beside=old.json",
    )
    mix = f"{tmp_path}/a, b.txt,samples=6,self:{tmp_path}/c.txt,samples=2,demo,samples=1"
    assert shlex.split(study.calibrate) == ["--calibration", mix]
    judged = ["--suite", f"perplexity,file={tmp_path}/V.txt,seqlen=64"]
    assert shlex.split(study.evaluate) == [*judged, f"--beside={tmp_path}/old.json"]
    assert f"--activations '{tmp_path}/my norms.safetensors'" in study.points[0].prune


def test_another_plan_is_kept(models: Models, tmp_path: Path) -> None:
    planned(models, tmp_path, methods="magnitude")
    (tmp_path / "Snakefile").write_text("# mine\n")
    planned(models, tmp_path, methods="magnitude")  # the same
    with pytest.raises(
        UserError, match=r"it holds another plan\. Name another --output, or --overwrite"
    ):
        planned(models, tmp_path, methods="wanda")
    assert (tmp_path / "Snakefile").read_text() == "# mine\n"
    planned(models, tmp_path, methods="wanda", overwrite=True)
    assert len((tmp_path / "Snakefile").read_text().splitlines()) <= 120


def test_nothing_is_written_through_a_link(models: Models, tmp_path: Path) -> None:
    """A link in the place of a file of a plan or of a log is replaced, and one in that of a folder
    refused.
    """
    folder = tmp_path / "study"
    outside = tmp_path / "outside"
    outside.mkdir()
    folder.mkdir()
    for name in ("study.yaml", "Snakefile"):
        (outside / name).write_text("kept")
        (folder / name).symlink_to(outside / name)
    planned(models, folder, methods="magnitude", overwrite=True)
    assert not (folder / "study.yaml").is_symlink()
    assert not (folder / "Snakefile").is_symlink()
    shutil.rmtree(folder / "profiles")
    (folder / "profiles").symlink_to(outside)
    with pytest.raises(UserError, match=r"profiles/default lies behind a link"):
        planned(models, folder, methods="magnitude", overwrite=True)

    job = re.search(r'JOB = r"""\n(.*?)"""', (folder / "Snakefile").read_text(), re.DOTALL)
    assert job is not None
    (folder / "logs").mkdir()
    (folder / "logs" / "a.log").symlink_to(outside / "Snakefile")
    (folder / "logs" / "b.log").symlink_to(outside / "Snakefile")
    (folder / "logs" / "b.log.wrong").write_text("error\n")
    for line, shown in (
        ("job logs/a.log 0 1 echo done", "$ echo done\ndone\n"),
        ("job logs/b.log 0 2 no", "error\n"),
    ):
        subprocess.run(["bash", "-c", f"{job[1]}\n{line}"], cwd=folder, check=False)
        assert (folder / line.split()[1]).read_text() == shown
    assert [path.read_text() for path in sorted(outside.iterdir())] == ["kept"] * 2


def test_what_to_type_next(
    command: Run, tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    line = f"plan --methods wanda --suite demo --models {tiny_llama}"
    shown = command(line, "--calibration", "demo").stdout
    assert shown.splitlines() == [
        "1 model, 1 point: 4 jobs in study",
        "Snakemake is not installed: pip install 'emp-llm[cluster]'",
        "next: cd study",
        "      snakemake --cores 4",
    ]


# The tables of real results.


@pytest.fixture(scope="module")
def study(models: Models, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study whose jobs ran in this process. Copy it before changing it."""
    folder = tmp_path_factory.mktemp("study")
    (folder / "suite.txt").write_text(text.read_text()[:1500])
    (folder / "suite.toml").write_text(
        'about = "A text."\n[perplexity]\nfile = "suite.txt"\nseqlen = 64\n'
    )
    given = {"methods": "emp-wanda,magnitude", "calibration": str(text), "samples": 4, "seqlen": 32}
    planned(models, folder, suite=str(folder / "suite.toml"), **given)
    run_here(folder)
    return folder


def run_here(folder: Path) -> None:
    """Run the jobs of a study of one model in this process."""
    study = read_study(folder)
    (model,) = study.models
    dense = f"results/{model.name}.dense.json"
    lines = [f"evaluate {model.model} {study.evaluate} --output {dense}"]
    norms = f"activations/{model.name}.safetensors"
    lines += [f"calibrate {model.model} {study.calibrate} --output {norms}"]
    for point in study.points:
        name = f"{model.name}.{point.name}"
        options = point.prune.replace("{model}", model.name)
        lines += [f"prune {model.model} {options} --output runs/{name}"]
        lines += [f"evaluate runs/{name} {study.evaluate} --output results/{name}.json"]
    for line in lines:
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            patch.setattr(sys, "argv", ["emp-llm", *shlex.split(line)])
            cli.main([*shlex.split(line), "--quiet"])


def tables_of(folder: Path) -> str:
    report([folder], overwrite=True, no_plots=True)
    return (folder / "tables" / "tables.md").read_text()


def rows_of(page: str) -> list[list[str]]:
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in page.splitlines()
        if line.startswith("|")
    ]


def test_tables_of_a_study(study: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(study, tmp_path / "study"))
    page = tables_of(folder)
    assert "Partial" not in page
    rows = rows_of(page)
    assert rows[0] == ["point", "removed %", "perplexity, blocks of 64", "change"]
    assert [row[0] for row in rows[2:]] == ["dense", "emp-wanda-beta-1", "magnitude-0.5"]
    result = json.loads((folder / "results" / "llama.magnitude-0.5.json").read_text())
    dense = json.loads((folder / "results" / "llama.dense.json").read_text())
    change = 100 * (result["perplexity"]["perplexity"] / dense["perplexity"]["perplexity"] - 1)
    assert rows[-1][1] == "50.00"
    assert "no two methods have as many zeros, within 1 % of the targets" in page
    assert rows[-1][2] == f"{result['perplexity']['perplexity']:.3f}"
    assert rows[-1][3].startswith(f"{change:+.2f} ± ")
    lines = (folder / "tables" / "points.csv").read_text().splitlines()
    assert len(lines) == 4
    assert repr(result["perplexity"]["perplexity"]) in lines[-1]


def test_a_partial_study_says_so(study: Path, tmp_path: Path, command: Run) -> None:
    """Missing, unfinished and damaged results are left out and named."""
    folder = Path(shutil.copytree(study, tmp_path / "study"))
    dense = folder / "results" / "llama.dense.json"
    dense.write_text(dense.read_text().replace('"complete": true', '"complete": false'))
    damaged = folder / "results" / "llama.magnitude-0.5.json"
    damaged.write_bytes(damaged.read_bytes()[:200])
    page = tables_of(folder)
    missing = "- results/llama.dense.json (unfinished)"
    assert f"Partial: 1 of 3 results are there. Missing:\n\n{missing}\n" in page
    assert "| dense | missing | - |" in page
    assert "no changes: the dense model is missing" in page
    assert "| magnitude-0.5 | unreadable | - |" in page
    assert "Unreadable:" in page
    for name in ("runs", "results", "activations"):
        shutil.rmtree(folder / name)
    assert "Partial: 0 of 3 results are there" in tables_of(folder)
    shown = command(f"report --overwrite --no-plots {folder}").stdout
    assert "Missing: results/llama.dense.json, results/llama.emp-wanda-beta-1.json" in shown
    with pytest.raises(UserError, match=r"it exists and holds no report\.json"):
        report([folder], output=folder)


def test_beside_the_papers_values(study: Path, tmp_path: Path) -> None:
    """A model and a recipe of the paper: its values stand below ours, with its own change."""
    folder = Path(shutil.copytree(study, tmp_path / "study"))
    name = "meta-llama/Llama-2-7b-hf"
    old = json.loads((folder / "results" / "llama.dense.json").read_text())["model"]
    text = {"dataset": "Salesforce/wikitext", "config": "wikitext-2-raw-v1", "split": "test"}
    for path in (folder / "results").iterdir():
        result = json.loads(
            path.read_text().replace(old, name).replace("blocks of 64", "blocks of 2048")
        )
        result["made_by"]["text"] = text
        result["perplexity"] |= {"block_length": 2048, "block_losses": []}
        path.write_text(json.dumps(result))
    shutil.rmtree(folder / "runs")
    rows = rows_of(tables_of(folder))[2:]
    points = ("dense", "emp-wanda-beta-1", "magnitude-0.5")
    assert [row[0] for row in rows] == [name for point in points for name in (point, "paper")]
    published = json.loads((ROOT / "eval" / "published" / "llama.json").read_text())["results"][
        name
    ]
    dense, pruned = (published[key]["wikitext2_perplexity"] for key in ("dense", "emp-wanda"))
    assert rows[3][2:] == [f"{pruned:.3f}", f"{100 * (pruned / dense - 1):+.2f} %"]


# Snakemake.

needs_snakemake = pytest.mark.skipif(
    find_spec("snakemake") is None, reason="needs Snakemake: pip install 'emp-llm[cluster]'"
)
# A stand-in for emp-llm: it notes its tries and its GPU, and writes its output, or fails.
STAND_IN = """#!/bin/bash
out="${@: -1}"
name="$1 $(basename "$out" .json.partial)"
case "$name" in report*) mkdir -p tables; ls results > tables/tables.md; exit ;; esac
echo "$name" >> tries
gpu="gpu $CUDA_VISIBLE_DEVICES"  # two jobs with one GPU fail
[ "$gpu" = "gpu " ] || { mkdir "$gpu" || exit 3; sleep 0.3; rmdir "$gpu"; echo "$gpu" >> used; }
case "$name" in
    *wrong) echo "error: no such model." >&2; exit 2 ;;
    *crashes) echo "Traceback" >&2; exit 1 ;;
    *killed) [ -e part ] || { touch part; kill -9 $$; } ;;
esac
if [ "$1" = prune ]; then mkdir -p "$out"; else mkdir -p "$(dirname "$out")"; touch "$out"; fi
"""


def snakemake(folder: Path, *options: str, **more: str) -> "subprocess.CompletedProcess[str]":
    environment = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""} | more
    line = [sys.executable, "-m", "snakemake", *(options or ("--cores", "4"))]
    return subprocess.run(
        line, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=300
    )


def edited(folder: Path, **changes: Any) -> Path:
    """A study with fields of study.yaml changed."""
    path = folder / "study.yaml"
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | changes))
    return folder


@pytest.fixture
def scripted(models: Models, tmp_path: Path) -> Path:
    """A study of two models, for the stand-in."""
    folder = tmp_path / "study"
    planned(models, folder, models=f"{models('llama')},{models('opt')}", methods="magnitude")
    program = tmp_path / "program"
    program.write_text(STAND_IN)
    program.chmod(0o755)
    need = {"gpus": 1, "memory_gb": 1, "hours": 1, "cores": 1}
    needs = dict.fromkeys(("calibrate", "prune", "evaluate"), need)
    return edited(folder, command=str(program), needs=needs)


@needs_snakemake
def test_jobs_that_fail_and_jobs_that_are_killed(scripted: Path) -> None:
    """A killed job starts again, wrong input does not; what waits for a failed job does not run,
    the rest does. Two GPUs are given to one job each.
    """
    names = ("fine", "killed", "wrong", "crashes")
    points = [{"name": name, "prune": "", "after": "calibrate"} for name in names]
    edited(scripted, points=points)
    done = snakemake(scripted, CUDA_VISIBLE_DEVICES="7,GPU-b")
    assert done.returncode == 1
    tries = (scripted / "tries").read_text().splitlines()
    once = (
        "calibrate {}.safetensors|prune {}.fine|prune {}.wrong|evaluate {}.fine|evaluate {}.dense"
    )
    for model in ("llama", "opt"):
        assert [tries.count(name) for name in once.format(*[model] * 5).split("|")] == [1] * 5
        assert tries.count(f"prune {model}.crashes") == 4  # with three retries
        assert tries.count(f"evaluate {model}.killed") == 1
    assert len([line for line in tries if line.startswith("prune") and "killed" in line]) == 3
    assert not any("evaluate" in line and ("wrong" in line or "crash" in line) for line in tries)
    assert set((scripted / "used").read_text().splitlines()) == {"gpu 7", "gpu GPU-b"}
    assert "error: no such model.\n" in done.stderr
    log = (scripted / "logs" / "llama.wrong.prune.log").read_text()
    assert log.endswith("error: no such model.\nexit code 2\n")
    assert "prune --model" in log.splitlines()[0]
    shown = (scripted / "tables" / "tables.md").read_text().split()
    assert shown == sorted(f"{m}.{p}.json" for m in ("llama", "opt") for p in ("dense", *names[:2]))


@needs_snakemake
def test_finished_results_are_reused(study: Path, tmp_path: Path) -> None:
    """Of an earlier version too: only the tables are made."""
    folder = Path(shutil.copytree(study, tmp_path / "study"))
    edited(folder, command=f"{sys.executable} -m emp_llm")
    done = snakemake(folder)
    assert done.returncode == 0, done.stderr
    assert "1 of 1 steps (100%) done" in done.stderr
    made = (folder / "tables" / "tables.md").read_bytes()
    assert tables_of(folder).encode() == made
    assert "Nothing to be done" in snakemake(folder).stderr


@needs_snakemake
@pytest.mark.parametrize(
    "profile", sorted((ROOT / "scripts" / "slurm").iterdir()), ids=lambda p: p.name
)
def test_the_profiles_for_slurm(scripted: Path, profile: Path) -> None:
    """Models and data are downloaded first."""
    shown = snakemake(scripted, "-n", "--workflow-profile", str(profile)).stdout
    assert re.search(r"^fetch +2$", shown, re.MULTILINE), shown
    assert "gpu=1" in shown


@needs_snakemake
@pytest.mark.parametrize(
    ("points", "message"),
    [
        ([{"name": "a", "prune": ""}] * 2, "points: 'a': a name has only letters"),
        ([{"name": "a/b c", "prune": ""}], "points: 'a/b c': a name has only letters"),
        (None, "study.yaml is not present or accessible|configfile study.yaml but it is not"),
    ],
)
def test_wrong_studies(scripted: Path, points: Any, message: str) -> None:
    if points is None:
        (scripted / "study.yaml").unlink()
    else:
        edited(scripted, points=points)
    done = snakemake(scripted, "-n")
    assert done.returncode == 1
    shown = done.stdout + done.stderr
    assert any(words in shown for words in message.split("|")), shown
