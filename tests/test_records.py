"""Records: schemas of the code, files of real runs that are read, newer versions that are
refused, and wrong fields.
"""

import json
import os
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors import safe_open
from safetensors.torch import save_file
from write_schemas import FOLDER, FORMATS, schema_text

from emp_llm import (
    bench,
    evaluate,
    measure,
    plan,
    prune,
    report,
    sweep,
)
from emp_llm.calibration.activations import METADATA_KEY, Activations
from emp_llm.checkpoint.files import parse_own
from emp_llm.common.errors import UserError
from emp_llm.common.paths import data_folder
from emp_llm.records.base import FileRecord, converted, read_record
from emp_llm.records.run_report import RunReport


def read(path: Path) -> Any:
    def refuse(name: str) -> None:
        pytest.fail(f"{path}: {name} is not JSON")

    return json.loads(path.read_text(), parse_constant=refuse)


@pytest.fixture(scope="module")
def written(
    evaluable_llama: Path,
    runs: Path,
    task_suite: Path,
    text: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, list[dict[str, Any]]]:
    """Files that real runs wrote, by the name of their schema."""
    folder = tmp_path_factory.mktemp("written")
    model = evaluable_llama
    common = {"device_map": "cpu"}
    evaluate(
        runs / "emp",
        suite=task_suite.with_name("short.toml"),
        output=folder / "pruned.json",
        **common,
    )
    evaluate(model, suite=task_suite, output=folder / "dense.json", limit=2, **common)
    swept = {
        "methods": "emp-magnitude,magnitude",
        "betas": "1",
        "matched_baselines": True,
        "keep": True,
    }
    suite = task_suite.with_name("short.toml")
    sweep(model, output=folder / "sweep", suite=suite, **swept, **common)  # type: ignore[arg-type]
    measure(model, output=folder / "measure.json", criteria="magnitude", orders="1,2")
    report(
        [runs / "emp", runs / "uniform", folder / "sweep"], output=folder / "report", no_plots=True
    )
    prune(model, output=folder / "all", method="emp-magnitude", group="all", targets="all-linear")
    how = {
        "prompt_tokens": 8,
        "new_tokens": 2,
        "repeats": 1,
        "device": "cpu",
        "quiet": True,
    }
    bench(str(folder / "all"), output=folder / "bench.json", **how)
    study = folder / "study"
    plan(models=str(model), methods="magnitude", suite=str(suite), output=study, quiet=True)
    point = folder / "sweep" / "points" / "emp-magnitude-beta-1"
    outputs = [runs / "emp", runs / "wanda", runs / "half", folder / "all", point]
    lines = (folder / "sweep" / "sweep.jsonl").read_bytes().splitlines()
    first, *points = map(parse_own, lines)
    with safe_open(runs / "wanda" / "emp_llm" / "activations.safetensors", framework="pt") as file:
        activations = json.loads(file.metadata()[METADATA_KEY])
    return {
        "run": [*points, *(read(output / "emp_report.json") for output in outputs)],
        "manifest": [read(output / "emp_manifest.json") for output in outputs],
        "results": [read(folder / "pruned.json"), read(folder / "dense.json")],
        "sweep": [first],
        "measure": [read(folder / "measure.json")],
        "bench": [read(folder / "bench.json")],
        "report": [read(folder / "report" / "report.json")],
        "study": [yaml.safe_load((study / "study.yaml").read_text())],
        "activations": [activations],
        "corpus": [
            tomllib.loads(path.read_text()) for path in data_folder("calibration").glob("*.toml")
        ],
        "suite": [
            tomllib.loads(path.read_text())
            for path in [task_suite, *data_folder("eval").glob("*.toml")]
        ],
    }


@pytest.mark.parametrize("name", FORMATS)
def test_the_committed_schemas_are_those_of_the_code(name: str) -> None:
    """To update them: python scripts/write_schemas.py."""
    assert (FOLDER / f"{name}.schema.json").read_text() == schema_text(name)
    assert len(list(FOLDER.iterdir())) == len(FORMATS)


@pytest.mark.parametrize("name", FORMATS)
def test_files_of_real_runs_are_read(written: dict[str, list[dict[str, Any]]], name: str) -> None:
    """And what is read gives the same JSON, without unknown fields."""
    kind, _ = FORMATS[name]
    assert written[name]
    for values in written[name]:
        record = converted(values, kind, name)
        if issubclass(kind, FileRecord):
            assert record.as_dict() == values
    with pytest.raises(UserError):
        converted(values | dict.fromkeys(values, object), kind, name)


@pytest.mark.parametrize(
    ("number", "said"),
    [
        ("NaN", "NaN is not a finite number"),
        ("-Infinity", "-Infinity is not a finite number"),
        ("1e400", "1e400 is not a finite number"),
        ("1" + "0" * 400, r"10+\.\.\. has more than 64 bits"),
        ("9" * 5000, r"9+\.\.\. has more than 64 bits"),
        ('1, "command": ""', "command occurs twice"),
    ],
    ids=["nan", "infinity", "float", "400 digits", "5000 digits", "twice"],
)
def test_numbers_that_are_no_json_are_refused(
    written: dict[str, list[dict[str, Any]]], tmp_path: Path, number: str, said: str
) -> None:
    """In every reader of records: of files, of pages, and of activations."""
    values = written["run"][0] | {"extra": "here"}
    path = tmp_path / "emp_report.json"
    path.write_text(json.dumps(values).replace('"here"', number))
    bench = tmp_path / "bench.json"
    bench.write_text(json.dumps(written["bench"][0] | {"extra": "here"}).replace('"here"', number))
    norms = tmp_path / "norms.safetensors"
    held = json.dumps(written["activations"][0] | {"extra": "here", "command": ""})
    save_file({"a": torch.zeros(1)}, norms, {METADATA_KEY: held.replace('"here"', number)})
    for read_it in (
        lambda: read_record(path, RunReport),
        lambda: report([tmp_path], output=tmp_path / "page", no_plots=True),
        lambda: report([bench], output=tmp_path / "page", no_plots=True),
        lambda: Activations.load(norms),
    ):
        with pytest.raises(UserError, match=said):
            read_it()


def test_a_record_that_is_no_plain_file_is_refused(tmp_path: Path) -> None:
    """A pipe has no end."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    (tmp_path / "folder").mkdir()
    for name, said in (
        ("pipe", "no plain file"),
        ("link", "no plain file"),
        ("folder", "is a directory"),
    ):
        with pytest.raises(UserError, match=f"{name}: cannot be read as JSON .*{said}"):
            read_record(tmp_path / name, RunReport)


@pytest.mark.parametrize(
    "name", [name for name, (kind, _) in FORMATS.items() if issubclass(kind, FileRecord)]
)
def test_a_newer_version_is_refused(
    written: dict[str, list[dict[str, Any]]], tmp_path: Path, name: str
) -> None:
    """The error names the file, its version and the remedy."""
    kind = FORMATS[name][0]
    path = tmp_path / "file.json"
    values = written[name][0]
    path.write_text(
        json.dumps(values | {"format": f"emp-llm {kind.KIND} {kind.VERSION + 1}", "news": 1})
    )
    with pytest.raises(UserError) as caught:
        read_record(path, kind)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert f"version {kind.VERSION + 1}" in message
    assert "Update emp-llm" in message
    assert "\n" not in message
    for other in ("emp-llm card 1", "emp-llm", f"emp-llm {kind.KIND} two", "someone's", 3):
        path.write_text(json.dumps(values | {"format": other}))
        with pytest.raises(UserError, match=r"this is not an? .* file of emp-llm"):
            read_record(path, kind)
