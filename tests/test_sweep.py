"""Sweeps: every point equals the checkpoint that prune writes, measured alone; finished parts
are not repeated.
"""

import gc
import json
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
from conftest import Run
from safetensors.torch import load_file, save_file
from tiny import weights_of
from torch import equal

from emp_llm import prune, sweep, verify
from emp_llm.checkpoint.files import own_line
from emp_llm.common.errors import UserError
from emp_llm.evaluation import evaluate
from emp_llm.evaluation.evaluate import measure, prepare_suite
from emp_llm.evaluation.results import find_suite
from emp_llm.models import loading
from emp_llm.models.loading import load_model, load_tokenizer
from emp_llm.options.recipe import Match, Pattern, Recipe
from emp_llm.options.sweep import SweepOptions, plan_points
from emp_llm.options.words import RecipeWords
from emp_llm.records.run_report import read_sweep
from emp_llm.reporting.studies import sweep_table
from emp_llm.runs.sweep import SweepFolder

Models = Callable[[str], Path]
Record = dict[str, Any]


@pytest.fixture(scope="module")
def suite(text: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A suite of one text, 3,000 tokens."""
    folder = tmp_path_factory.mktemp("suite")
    (folder / "text.txt").write_text(text.read_text()[:3000])
    (folder / "short.toml").write_text('[perplexity]\nfile = "text.txt"\nseqlen = 100\n')
    return str(folder / "short.toml")


@pytest.fixture(scope="module")
def options(text: Path, suite: str) -> Record:
    """The options that the sweeps of these tests share."""
    calibration = {"calibration": str(text), "samples": 4, "seqlen": 64, "device_map": "cpu"}
    return {
        "methods": "emp-wanda,magnitude",
        "betas": "0.5,1",
        "sparsities": "0.4",
        "suite": suite,
    } | calibration


def entries(record: Any) -> dict[str, Any]:
    """The points of a sweep as JSON, by name."""
    return {point["point"]["name"]: point for point in record.as_dict()["points"]}


def report_of(folder: Path, name: str) -> Record:
    report: Record = entries(read_sweep(folder / "sweep.jsonl"))[name]
    return report


def perplexities(record: Any) -> dict[str, float]:
    """Those of the points of a sweep, by name."""
    return {
        name: point["evaluation"]["pruned"]["perplexity"]["perplexity"]
        for name, point in entries(record).items()
    }


def perplexity_of(folder: Path, suite: str, dtype: str = "auto") -> float:
    """The perplexity of a checkpoint that is loaded alone."""
    found = measure(
        load_model(folder, "cpu", dtype),
        prepare_suite(find_suite(suite), folder, load_tokenizer(folder)),
    )
    assert found.perplexity is not None
    return found.perplexity.value


def test_names_of_points() -> None:
    asked = {
        "methods": "emp-magnitude,wanda",
        "betas": "1,0.75,1",
        "orders": "2,1",
        "sparsities": "0.3",
        "patterns": "2:4",
    }
    names = [
        point.name
        for point in plan_points(SweepOptions(**asked, matched_baselines=True), RecipeWords())
    ]
    assert len(names) == len(set(names)) == 2 * 2 * 3 + 2
    assert "emp-magnitude-order-1-beta-0.75" in names
    assert names[-2:] == ["wanda-0.3", "wanda-2of4"]
    close = SweepOptions(methods="emp-wanda", betas="1.00000001,1.00000002")
    assert len({point.name for point in plan_points(close, RecipeWords())}) == 2


@pytest.mark.parametrize("keep", [True, False])
def test_points_whose_weights_move(
    models: Models, options: Record, suite: str, tmp_path: Path, keep: bool
) -> None:
    source = models("llama")
    changes: Record = {"methods": "sparsegpt,emp-admm,wanda", "betas": "1", "sparsities": "0.5"}
    how = options | changes | {"refit": True, "targets": "all-linear"}
    found = perplexities(sweep(model=source, output=tmp_path / "sweep", keep=keep, **how))
    text = {name: how[name] for name in ("calibration", "samples", "seqlen", "device_map")}
    assert len(set(found.values())) == 3
    for name, method in (("sparsegpt-0.5", "sparsegpt"), ("emp-admm-beta-1", "emp-admm")):
        alone = tmp_path / name
        prune(model=source, output=alone, method=method, refit=True, targets="all-linear", **text)
        swept = report_of(tmp_path / "sweep", name)
        pruned = json.loads((alone / "emp_report.json").read_text())
        assert swept["fits"] == pruned["fits"]
        assert found[name] == perplexity_of(alone, suite)
        if keep:
            kept = tmp_path / "sweep" / "points" / name
            weights = weights_of(alone)
            assert all(equal(each, weights[key]) for key, each in weights_of(kept).items())

            assert not verify(kept, source=str(source)).differences
    assert not list((tmp_path / "sweep").glob(".*"))


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("gpt2", {"dtype": "float32"}),
        ("mixtral", {"matched_baselines": True, "group": "matrix"}),
        ("phi3", {"group": "all"}),
    ],
)
def test_a_point_measures_what_its_checkpoint_does(
    models: Models,
    options: Record,
    suite: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    changes: Record,
) -> None:
    """To the last bit, for experts, Conv1D and fused projections too; and the report is that of
    prune.

    Kept checkpoints are complete and pass verify, also for points that were measured before, which
    are not measured again.
    """
    source = models(family)
    out = tmp_path / "sweep"
    before = oracle.digest(source)
    options = (
        options
        | {"targets": "all-linear", "betas": "0.75"}
        | ({} if "group" in changes else {"patterns": "2:4"})
        | changes
    )
    record = sweep(source, output=out, **options)
    assert {path.name for path in out.iterdir()} == {"sweep.jsonl", "activations.safetensors"}
    with monkeypatch.context() as patch:
        patch.setattr(evaluate, "perplexity", lambda *_, **__: pytest.fail("measured again"))
        kept = sweep(source, output=out, keep=True, **options)
    for name, entry in entries(record).items():
        assert entry["evaluation"] == entries(kept)[name]["evaluation"]
    assert oracle.digest(source) == before
    norms = out / "activations.safetensors"
    dtype = changes.get("dtype", "auto")
    assert record["dense"]["perplexity"]["perplexity"] == perplexity_of(source, suite, dtype)
    assert len(record["points"]) == (
        4 if "matched_baselines" in changes else 3 if dtype != "auto" else 2
    )
    for name, entry in entries(record).items():
        of = entry["point"].get("baseline_of")
        match = None if of is None else out / "points" / of
        recipe = Recipe.of_dict(entry["recipe"])
        counts = recipe.counts
        own = {"method": recipe.method, "sparsity": counts.sparsity, "order": counts.order}
        own |= {"beta": counts.in_force if counts.sparsity is None else None}
        if isinstance(counts, Pattern):
            own["pattern"] = f"{counts.n}:{counts.m}"
        if isinstance(counts, Match):
            own |= {"match": match, "match_by": counts.by}
        common = {"targets": "all-linear", "activations": norms}
        group = {"group": changes["group"]} if "group" in changes else {}
        report = prune(source, output=tmp_path / name, **own, **common, **group).as_dict()  # type: ignore[arg-type, union-attr]
        assert perplexities(record)[name] == perplexity_of(tmp_path / name, suite, dtype), name
        file = out / "points" / name / "emp_report.json"
        written: Record = json.loads(file.read_text())
        assert written == report_of(out, name)
        for key in ("targets", "matrices", "warnings", "source", "recipe"):
            assert written[key] == report[key], (name, key)
        assert written["point"] == entry["point"]
        assert written["evaluation"]["dense"] == record.as_dict()["dense"]
        assert verify(out / "points" / name, source=source).differences == []
        assert oracle.shards(tmp_path / name) == oracle.shards(out / "points" / name)


def test_offloaded_models_go_through_checkpoints(
    models: Models, options: Record, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every point is loaded from a checkpoint; the model before it is freed first."""
    loaded: list[weakref.ref[Any]] = []

    def load(*given: Any) -> Any:
        assert [model() for model in loaded] == [None] * len(loaded)
        model = load_model(*given)
        loaded.append(weakref.ref(model))
        return model

    gc.disable()  # only the sweep frees models
    try:
        with monkeypatch.context() as patch:
            patch.setattr(loading, "load_model", load)
            sweep(models("llama"), output=tmp_path / "disk", **(options | {"device_map": "disk"}))
    finally:
        gc.enable()
    assert len(loaded) == 4
    sweep(models("llama"), output=tmp_path / "cpu", **options)
    found, expected = (read_sweep(tmp_path / name / "sweep.jsonl") for name in ("disk", "cpu"))
    assert perplexities(found) == pytest.approx(perplexities(expected), rel=1e-6)
    for name, entry in entries(expected).items():
        assert entries(found)[name]["targets"] == entry["targets"]
    names = {path.name for path in (tmp_path / "disk").iterdir()}
    assert names == {"sweep.jsonl", "activations.safetensors"}


def test_finished_parts_are_not_done_again(
    models: Models, options: Record, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the calibration, nor the dense model, nor points; more betas add points."""
    source = models("llama")
    out = tmp_path / "sweep"
    first = sweep(source, output=out, **options)
    with monkeypatch.context() as patch:
        patch.setattr(loading, "load_model", lambda *_: pytest.fail("the model was loaded"))
        assert entries(sweep(source, output=out, **options)) == entries(first)
    measured: list[int] = []
    whole = evaluate.perplexity
    monkeypatch.setattr(
        evaluate, "perplexity", lambda *given, **named: measured.append(1) or whole(*given, **named)
    )
    second = sweep(
        source,
        output=out,
        **(options | {"methods": "emp-wanda", "betas": "2,1", "sparsities": None}),
    )
    assert len(measured) == 1
    assert entries(second).items() > entries(first).items()
    assert entries(second).keys() - entries(first) == {"emp-wanda-beta-2"}
    assert second.stages.keys() == first.stages.keys() == {"load", "calibrate", "evaluate dense"}


def test_a_killed_sweep_resumes(
    models: Models, options: Record, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Finished points are kept, and the killed one is measured anew."""
    source = models("llama")
    out = tmp_path / "killed"
    expected = sweep(source, output=tmp_path / "whole", matched_baselines=True, **options)
    left = [3]
    whole = evaluate.perplexity

    def killed(*given: Any, **named: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        return whole(*given, **named)

    with monkeypatch.context() as patch:
        patch.setattr(evaluate, "perplexity", killed)
        with pytest.raises(KeyboardInterrupt):
            sweep(source, output=out, matched_baselines=True, **options)
    (kept,) = read_sweep(out / "sweep.jsonl").points
    found = sweep(source, output=out, matched_baselines=True, **options)
    assert found.points[0] == kept
    assert perplexities(found) == perplexities(expected)
    for name, entry in entries(expected).items():
        assert entries(found)[name]["masks"] == entry["masks"]
    assert not list(out.glob(".*"))


def test_damaged_parts_of_a_sweep_are_made_again(
    models: Models,
    options: Record,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """With a warning for each. A damaged first line is refused by name."""
    source = models("llama")
    out = tmp_path / "out"
    file = out / "sweep.jsonl"
    expected = sweep(source, output=out, **options)
    measured: list[int] = []
    whole = evaluate.perplexity
    monkeypatch.setattr(
        evaluate, "perplexity", lambda *given, **named: measured.append(1) or whole(*given, **named)
    )
    (out / "activations.safetensors").write_bytes(b"")
    first, *points = file.read_bytes().splitlines(keepends=True)
    half = points[-1][:-200]  # killed while it was written
    changed = points[-1].replace(b'"kept": ', b'"kept": 1', 1)
    for line in (half, changed, b"{}\n", b"[" * 100_000):
        file.write_bytes(first + b"".join(points[:-1]) + line)
        caplog.clear()
        found = sweep(source, output=out, **options)
        assert perplexities(found) == perplexities(expected)
        assert found.points[:-1] == expected.points[:-1]
        assert len(measured) == 1
        measured.clear()
        assert "sweep.jsonl: line 4 is damaged" in caplog.text
        assert len(file.read_bytes().splitlines()) == 4
        caplog.clear()
        sweep(source, output=out, **options)
        assert "damaged" not in caplog.text
    caplog.clear()
    (out / "activations.safetensors").write_bytes(b"")
    sweep(source, output=out, **options)
    assert "activations.safetensors is damaged" in caplog.text
    file.write_bytes(first + own_line({"format": "emp-llm run 9"}))
    with pytest.raises(UserError, match=r"line 2: it has format version 9 of a run file"):
        sweep(source, output=out, **options)
    for content in (b"", first[:-9], first.replace(b"sweep 4", b"sweep 3"), half, b"mine"):
        file.write_bytes(content)
        for overwrite in (False, True):
            with pytest.raises(UserError, match=r"out/sweep\.jsonl: its first line"):
                sweep(source, output=out, overwrite=overwrite, **options)
        assert file.read_bytes() == content


def test_another_sweep_is_refused(models: Models, options: Record, tmp_path: Path) -> None:
    source = models("llama")
    out = tmp_path / "sweep"
    first = sweep(source, output=out, **(options | {"methods": "magnitude", "betas": None}))
    # A sweep without a calibration can be extended by points that need one.
    sweep(source, output=out, **options)
    changes = (
        (source, {"targets": "attention"}, r"shared\.targets mlp, this one has attention"),
        (source, {"limit": 3}, r"limit not given, this one has 3"),
        (source, {"samples": 3}, r"activations\."),
        (source, {"dtype": "float32"}, r"dtype auto, this one has float32"),
        (models("gpt2"), {}, r"model\.identity"),
    )
    for model, change, named in changes:
        with pytest.raises(UserError, match=named):
            sweep(model, output=out, **(options | change))
    assert report_of(out, "magnitude-0.4") == entries(first)["magnitude-0.4"]
    anew = sweep(source, output=out, overwrite=True, **(options | {"samples": 3}))
    assert len(anew.points) == 3
    # Another measurement has other times.
    assert report_of(out, "magnitude-0.4")["stages"] != entries(first)["magnitude-0.4"]["stages"]


def test_foreign_folders_are_left_alone(models: Models, options: Record, tmp_path: Path) -> None:
    for name, path in (("file", tmp_path / "file"), ("folder", tmp_path / "folder" / "notes.txt")):
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
        with pytest.raises(UserError, match="it exists and is not the folder of a sweep"):
            sweep(models("llama"), output=tmp_path / name, overwrite=True, **options)
        assert path.read_text() == "mine"
    with pytest.raises(UserError, match="it is the input"):
        sweep(models("llama"), output=models("llama") / "sweep", **options)
    killed = tmp_path / "killed"  # while it wrote its first file
    killed.mkdir()
    (killed / ".sweep.jsonl.partial").write_text("{")
    (killed / ".sweep.jsonl.lock").touch()
    with SweepFolder(killed, models("llama")).locked():
        pass


def test_equal_masks_are_measured_once(
    models: Models, options: Record, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At order 0 all weights that are not zero are kept. With one matrix, both kinds of baseline
    are the same.
    """
    measured: list[int] = []
    whole = evaluate.perplexity
    monkeypatch.setattr(
        evaluate, "perplexity", lambda *given, **named: measured.append(1) or whole(*given, **named)
    )
    only = {
        "methods": "emp-wanda",
        "betas": "1",
        "sparsities": None,
        "orders": "0,2",
        "matched_baselines": True,
    }
    targets = {"targets": r"model\.layers\.1\.mlp\.down_proj"}
    record = sweep(models("llama"), output=tmp_path / "sweep", **(options | only | targets))
    found = {point.point.name: point.measures.same_masks_as for point in record.points}
    assert found == {
        "emp-wanda-order-0-beta-1": "dense",
        "wanda-total-as-emp-wanda-order-0-beta-1": "dense",
        "wanda-matrix-as-emp-wanda-order-0-beta-1": "dense",
        "emp-wanda-beta-1": None,
        "wanda-total-as-emp-wanda-beta-1": None,
        "wanda-matrix-as-emp-wanda-beta-1": "wanda-total-as-emp-wanda-beta-1",
    }
    assert len(measured) == 3


def test_matched_baselines_are_uniform(models: Models, options: Record, tmp_path: Path) -> None:
    """Each row of a matrix loses the same share, rounded down or up; the matrix, or the total,
    loses as much as by EMP.
    """
    source = models("mixtral")
    out = tmp_path / "sweep"
    sweep(
        source,
        output=out,
        keep=True,
        matched_baselines=True,
        **(options | {"methods": "emp-wanda", "sparsities": None}),
    )
    adaptive = report_of(out, "emp-wanda-beta-1")
    for by in ("total", "matrix"):
        baseline = report_of(out, f"wanda-{by}-as-emp-wanda-beta-1")
        assert baseline["targets"]["kept"] == adaptive["targets"]["kept"]
        for layer, entry in baseline["matrices"].items():
            kept = (
                oracle.weight(out / "points" / f"wanda-{by}-as-emp-wanda-beta-1", entry["tensor"])
                != 0
            )
            whole = baseline["targets"]["kept"] / baseline["targets"]["weights"]
            share = adaptive["matrices"][layer]["kept"] / kept.size if by == "matrix" else whole
            assert (np.abs(kept.sum(1) - share * kept.shape[1]) < 1).all(), layer
            assert by == "total" or entry["kept"] == adaptive["matrices"][layer]["kept"], layer


def test_infinite_perplexities_do_not_end_a_sweep(
    models: Models, options: Record, tmp_path: Path
) -> None:
    """The ruined model's perplexities are null in JSON and words in the table, and all points
    are measured.
    """
    folder = Path(shutil.copytree(models("llama"), tmp_path / "ruined"))
    for shard in folder.glob("*.safetensors"):
        tensors = {
            name: tensor * (3e4 if "lm_head" in name else 1)
            for name, tensor in load_file(shard).items()
        }
        save_file(tensors, shard, metadata={"format": "pt"})
    record = sweep(
        folder,
        output=tmp_path / "sweep",
        **(options | {"methods": "emp-magnitude", "sparsities": None}),
    )
    values = read_sweep(tmp_path / "sweep" / "sweep.jsonl")
    found = [each.perplexity for each in (values.dense, *(each.measures for each in values.points))]
    assert [each.perplexity for each in found] == [None] * 3
    assert all(each.loss > 709 for each in found)
    assert sweep_table(record).count("infinite") == 3  # type: ignore[arg-type]


def test_from_the_command_line(
    models: Models, text: Path, suite: str, command: Run, tmp_path: Path
) -> None:
    line = [
        "sweep",
        "--model",
        models("llama"),
        "--calibration",
        text,
        "--samples",
        4,
        "--seqlen",
        64,
        "--suite",
        suite,
    ]
    line += [
        "--methods",
        "emp-wanda,magnitude",
        "--betas",
        "0.5,1",
        "--limit",
        5,
        "--output",
        "out",
    ]
    planned = command(*line, "--dry-run", "--keep", "--matched-baselines").stdout.splitlines()
    assert planned[:3] == [
        "emp-wanda-beta-0.5",
        "wanda-total-as-emp-wanda-beta-0.5",
        "wanda-matrix-as-emp-wanda-beta-0.5",
    ]
    assert planned[7:9] == [
        "7 points to measure, and the dense model",
        "targets: 6 of 14 matrices in blocks",
    ]
    assert planned[9].startswith("disk: ")
    assert not list(tmp_path.iterdir())
    done = command(*line)
    lines = done.stdout.splitlines()
    assert lines[0].split()[:2] == ["point", "removed"]
    assert lines[2].startswith("dense")
    removed = [float(line.split()[1]) for line in lines[2:6]]
    assert removed == sorted(removed)
    assert {line.split()[0] for line in lines[3:6]} == {
        "emp-wanda-beta-1",
        "magnitude-0.5",
        "emp-wanda-beta-0.5",
    }
    assert any(line.startswith("* partial: ") for line in lines)
    assert lines[-1].startswith("no two methods have as many zeros, within 1 % of the targets, ")
    assert "3 of 3" in done.stderr
    again = command(*line, "--matched-baselines", "--against", "wanda").stdout.splitlines()
    column = again[0].index("against Wanda, uniform rows")
    found = {row.split()[0]: row[column:].split() for row in again[2:10]}
    points = ("emp-wanda-beta-0.5", "emp-wanda-beta-1")
    compared = {*points, *(f"wanda-matrix-as-{point}" for point in points)}
    assert {name for name, cells in found.items() if cells} == compared
    assert found["emp-wanda-beta-1"][1] == "±"


# Wrong options, and wrong runs to match: the error names the option, and nothing is written

GOOD: Record = {
    "methods": "emp-wanda,magnitude",
    "betas": "0.5,1",
    "sparsities": "0.4",
    "suite": "perplexity",
}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"methods": "emp-wanda,sparsegtp"}, "--methods: 'sparsegtp' is not one of emp-wanda, "),
        (
            {"methods": "emp-wanda,sparsegpt", "calibration": None, "activations": "norms"},
            "--method sparsegpt fits weights to the calibration text, and --activations holds only",
        ),
        ({"methods": "emp-wanda,"}, "--methods 'emp-wanda,': expected values"),
        ({"betas": "1,much"}, "--betas '1,much': expected numbers"),
        ({"betas": "0"}, "--beta must be a number above 0"),
        ({"methods": "emp-wanda", "betas": None}, "--sparsities is for methods without emp-"),
        ({"methods": "wanda"}, "--betas is for emp methods"),
        (
            {"methods": "wanda", "betas": None, "matched_baselines": True},
            "--matched-baselines is for emp",
        ),
        ({"patterns": "2-4"}, "--pattern must be N:M"),
        ({"group": "all", "matched_baselines": True}, "--matched-baselines .* not all"),
        (
            {"methods": "magnitude", "betas": None, "score": "relative"},
            "--score relative is for methods that need activations",
        ),
        (
            {"methods": "wanda", "betas": None, "count_by": "magnitude"},
            "--count-by magnitude is for emp methods",
        ),
        ({"suite": "perplexty"}, "Did you mean perplexity"),
        ({"against": "ria"}, "--against ria: no point is of this method; name one of them: emp-"),
    ],
)
def test_wrong_options(models: Models, tmp_path: Path, changes: Record, says: str) -> None:
    with pytest.raises(UserError, match=says):
        sweep(
            models("llama"),
            output=tmp_path / "out",
            **(GOOD | changes),
        )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"match_by": "matrix", "match": None}, "--match-by matrix needs an earlier run"),
        ({"match_by": "matrix", "group": "all"}, "--match-by matrix .* not all"),
        ({"match_by": "matrix", "targets": "attention"}, "that run had"),
        (
            {"method": "emp-magnitude", "match_by": "matrix"},
            "--match does not go with method emp-magnitude",
        ),
    ],
)
def test_wrong_matches(models: Models, tmp_path: Path, changes: Record, says: str) -> None:
    source = models("llama")
    prune(source, output=tmp_path / "emp", method="emp-magnitude")
    with pytest.raises(UserError, match=says):
        prune(
            source,
            output=tmp_path / "out",
            **({"method": "magnitude", "match": tmp_path / "emp"} | changes),
        )


@pytest.mark.parametrize("damage", [{}, {"kept": "many"}, {"rows": 7}])
def test_damaged_report_of_a_match(models: Models, tmp_path: Path, damage: Record) -> None:
    source = models("llama")
    report = prune(source, output=tmp_path / "emp", method="emp-magnitude").as_dict()  # type: ignore[union-attr]
    name = next(iter(report["matrices"]))
    report["matrices"][name] = damage and report["matrices"][name] | damage
    (tmp_path / "emp" / "emp_report.json").write_text(json.dumps(report))
    with pytest.raises(UserError, match=rf"{name}|matrices\[\.\.\.\]"):
        prune(
            source,
            output=tmp_path / "out",
            method="magnitude",
            match=tmp_path / "emp",
            match_by="matrix",
        )
