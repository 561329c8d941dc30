"""Reports: their curves and tables against numbers computed independently."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import make_sweep, read_points, report_of, results_of, save_run, study_of
from tiny import weights_of

from emp_llm import Own, Recipe, effective_mass, effective_number, prune
from emp_llm.common.errors import UserError
from emp_llm.evaluation.comparison import Change, Value
from emp_llm.options.words import recipe_of
from emp_llm.records.run_report import read_report
from emp_llm.reporting.run_tables import pruning_table
from emp_llm.reporting.studies import (
    Point,
    Study,
    SuiteResult,
    all_columns,
    cells_of,
    curves,
    point_rows,
    studies,
)

PERPLEXITY = "perplexity, blocks of 64"


def test_effective_numbers_and_masses_are_those_of_the_weights(
    runs: Path, models: Callable[[str], Path]
) -> None:
    dense = weights_of(models("llama"))
    pruned = weights_of(runs / "emp")
    matrices = read_report(runs / "emp").matrices.values()
    assert {matrix.role for matrix in matrices} == {
        "mlp.gate_proj",
        "mlp.up_proj",
        "mlp.down_proj",
    }
    for matrix in matrices:
        name = matrix.tensor
        mean = float(effective_number(dense[name]).mean())
        assert matrix.n_eff_mean == pytest.approx(mean, rel=1e-12)
        fractions = (pruned[name] != 0).double().mean(1)
        quarters = torch.quantile(fractions, torch.tensor([0, 0.25, 0.5, 0.75, 1]).double())
        assert matrix.kept_fraction.values == pytest.approx(quarters.tolist())
        assert matrix.s_eff_mean == pytest.approx(
            float(effective_mass(dense[name]).mean()), rel=1e-12
        )
        assert matrix.s_eff_bound_mean is not None
        assert matrix.s_eff_bound_mean < matrix.s_eff_mean


def differences(study: Study) -> dict[str, Change]:
    """The differences of points from the baseline in the first measure."""
    columns = all_columns(study)[:1]
    found = {point.name: cells_of(study, point, columns)[0].difference for point in study.points}
    return {name: each for name, each in found.items() if each is not None}


def test_differences_are_of_equal_zeros_with_the_error_of_paired_blocks(runs: Path) -> None:
    study = study_of(runs, against="magnitude")
    assert study.against == "magnitude, uniform rows"
    found = differences(study)
    assert found.keys() == {"emp", "emp-0.5"}
    for name, change in found.items():
        first, second = (
            report_of(runs / n)["evaluation"]["pruned"]["perplexity"]
            for n in (name, name.replace("emp", "uniform"))
        )
        ratio = first["perplexity"] / second["perplexity"]
        assert change.value == pytest.approx(100 * (ratio - 1))
        losses = [
            torch.tensor(entry["block_losses"], dtype=torch.float64) for entry in (first, second)
        ]
        assert math.exp(
            float(
                losses[0][:-1].sum() * 64
                + losses[0][-1] * (first["tokens"] - 64 * (len(losses[0]) - 1))
            )
            / first["tokens"]
        ) == pytest.approx(first["perplexity"], rel=1e-6)
        whole = losses[0][:-1] - losses[1][:-1]  # the last block is a fragment: of little weight
        assert change.paired
        assert change.stderr == pytest.approx(
            100 * ratio * float(whole.std()) / math.sqrt(len(whole)), rel=0.1
        )


def test_the_baseline_is_the_first_method_or_the_one_that_is_named(runs: Path) -> None:
    """Of a method without another at its zeros, the next one is."""
    assert study_of(runs).against == "EMP-magnitude"
    assert differences(study_of(runs)).keys() == {"uniform", "uniform-0.5"}
    assert study_of(runs, "wanda", "uniform", "emp").against == "magnitude, uniform rows"
    assert differences(study_of(runs, against="uniform-0.5")).keys() == {"emp", "emp-0.5"}
    alone = study_of(runs, "wanda", "half")
    assert (alone.against, differences(alone)) == ("", {})
    (note,) = (note for note in point_rows(alone, all_columns(alone))[1] if "no two" in note)
    assert note.startswith("no two methods have as many zeros, within 1 % of the targets, so")
    named = study_of(runs, "wanda", "half", against="wanda")
    assert (named.against, differences(named)) == ("EMP-Wanda", {})
    notes = point_rows(named, all_columns(named))[1]
    assert any(
        note.startswith("no other method has as many zeros as EMP-Wanda, ") for note in notes
    )
    with pytest.raises(UserError, match=r"--against ria: no point is of this method or name; th"):
        study_of(runs, against="ria")


@pytest.mark.parametrize(
    ("zeros", "found"),
    [((0.4, 0.3922), ["b"]), ((0.4, 0.39), ["b"]), ((0.4, 0.4101), []), ((0.4, 0.3899), [])],
)
def test_zeros_agree_within_a_percentage_point(
    zeros: tuple[float, float], found: list[str]
) -> None:
    points = [
        with_perplexities(Point(name, name, "m", "m", recipe_of(method), sparsity=share), 3.0)
        for name, method, share in zip("ab", ("wanda", "emp-wanda"), zeros, strict=True)
    ]
    (study,) = studies(points, "wanda")
    assert list(differences(study)) == found


def test_the_nearest_zeros_are_compared() -> None:
    shares = {"a": 0.392, "b": 0.401, "c": 0.5}
    bases = [
        Point(name, name, "m", "m", recipe_of("wanda"), sparsity=shares[name]) for name in "abc"
    ]
    emp = Point("e", "e", "m", "m", recipe_of("emp-wanda"), sparsity=0.4)
    (study,) = studies([emp, *bases], "wanda")
    assert study.base_of(emp) == bases[1]
    assert [study.base_of(base) for base in bases] == [None] * 3


def test_models_and_targets_are_never_in_one_curve(
    runs: Path, models: Callable[[str], Path], tmp_path: Path
) -> None:
    prune(models("qwen2"), output=tmp_path / "other", method="emp-magnitude")
    prune(
        models("llama"), output=tmp_path / "attention", method="emp-magnitude", targets="attention"
    )
    found = studies(
        read_points([runs / "emp", tmp_path / "other", tmp_path / "attention", runs / "uniform"])
    )
    assert [(study.title, [point.name for point in study.points]) for study in found] == [
        ("llama, mlp", ["emp", "uniform"]),
        ("llama, attention", ["attention"]),
        ("qwen2", ["other"]),
    ]


def test_a_sweep_is_read(runs: Path, tmp_path: Path) -> None:
    whole = study_of(runs)
    sweep = make_sweep(runs, tmp_path / "sweep")
    (study,) = studies(read_points([sweep]))
    assert {point.name: point.match for point in study.points} == {
        "emp": None,
        "emp-0.5": None,
        "uniform": "total",
        "uniform-0.5": "matrix",
        "wanda": None,
    }
    suite = study.suites[0]
    found = {curve.point.label for curve in curves(study, suite, suite.measures[0])}
    assert found == {
        "EMP-magnitude",
        "magnitude, uniform rows",
        "magnitude, same total per matrix",
        "EMP-Wanda",
    }
    assert differences(study) == differences(whole)


def test_results_join_the_run_of_their_checkpoint(runs: Path, tmp_path: Path) -> None:
    report = report_of(runs / "emp")
    dense = results_of(report, 100.0) | {"model": report["source"]["model"], "pruned": None}
    dense["made_by"]["model"] = {
        "identity": report["source"]["identity"],
        "sha256_of_config": "0",
    }
    for name, record in (("pruned", results_of(report, 123.0)), ("dense", dense)):
        (tmp_path / f"{name}.json").write_text(json.dumps(record))
    (study,) = studies(
        read_points([tmp_path / "dense.json", runs / "emp", tmp_path / "pruned.json"])
    )
    assert [point.name for point in study.points] == ["emp"]
    (mine,) = (suite for suite in study.suites if suite.name == "mine")
    assert [
        next(iter(each.values())).value
        for each in (study.points[0].values_of(mine.key), mine.dense)
    ] == [123.0, 100.0]
    (alone,) = studies(read_points([tmp_path / "pruned.json"]))
    assert [(point.name, point.sparsity) for point in alone.points] == [
        ("pruned", report["targets"]["sparsity_of_targets"])
    ]


def test_results_that_could_be_of_two_runs_join_neither(runs: Path, tmp_path: Path) -> None:
    """A recipe does not name the calibration, so results fit all runs that differ in it alone."""
    report = report_of(runs / "wanda")
    for name in ("one", "other"):
        save_run(tmp_path / name, report)
    for name, value in (("one", 11.0), ("other", 12.0)):
        (tmp_path / f"{name}.json").write_text(json.dumps(results_of(report, value)))
    (study,) = studies(
        read_points([tmp_path / name for name in ("one", "other", "one.json", "other.json")])
    )
    (mine,) = (suite for suite in study.suites if suite.name == "mine")
    assert [
        [value.value for value in point.values_of(mine.key).values()] for point in study.points
    ] == [[], [], [11.0], [12.0]]


@pytest.mark.parametrize(
    ("recipe", "label"),
    [
        (
            recipe_of("emp-wanda", refit=True, refit_weighting="relative"),
            "EMP-Wanda, refit, refit weighting relative",
        ),
        (recipe_of("ria", shares="cost"), "RIA, uniform rows, shares cost"),
        (
            recipe_of("magnitude", pattern="2:4", targets="all-linear"),
            "magnitude, uniform rows, pattern 2:4",
        ),
        (
            Recipe(score=Own("m.py:f", named="mine", source="12345678")),
            "EMP-mine, version 123456",
        ),
    ],
)
def test_the_label_of_a_point_names_what_sets_its_recipe_apart(
    runs: Path, tmp_path: Path, recipe: Recipe, label: str
) -> None:
    (point,) = read_points(
        [save_run(tmp_path, report_of(runs / "emp") | {"recipe": recipe.as_dict()})]
    )
    assert point.label == label


def with_perplexities(point: Point, *values: float) -> Point:
    """A point with the results of as many suites."""
    results = [
        SuiteResult("s", str(number), {PERPLEXITY: Value(value)})
        for number, value in enumerate(values)
    ]
    return replace(point, results=tuple(results))


@pytest.mark.parametrize(
    ("value", "base", "change"),
    [
        (3.7, 3.7 * (1 - 2.8e-16), "0.00 %"),
        (3.7, 3.7 * (1 + 2.8e-16), "0.00 %"),
        (3.7, 3.6, "+2.78 %"),
        (3.6, math.inf, "-100.00 %"),
        (math.inf, 3.6, "+inf %"),
        (math.inf, math.inf, "-"),
    ],
)
def test_differences_of_rounding_and_of_ruined_models(
    value: float, base: float, change: str
) -> None:
    emp = Point("e", "e", "m", "m", recipe_of("emp-wanda"), sparsity=0.5)
    uniform = Point("u", "u", "m", "m", recipe_of("wanda"), sparsity=0.5)
    points = [with_perplexities(emp, value), with_perplexities(uniform, base)]
    (study,) = studies(points, "wanda")
    rows, _ = point_rows(study, all_columns(study))
    assert [row[-1] for row in rows] == ["against Wanda, uniform rows", change, ""]
    finite = [point for point in points if math.isfinite(point.values_of("0")[PERPLEXITY].value)]
    drawn = curves(study, study.suites[0], PERPLEXITY)
    assert [curve.point for curve in drawn] == finite  # figures leave out ruined models


def test_the_removed_share_stands_beside_the_one_asked_for(
    models: Callable[[str], Path], tmp_path: Path
) -> None:
    """A row of 64 weights cannot lose 60 % of them."""
    report = prune(models("llama"), output=tmp_path / "out", method="magnitude", sparsity=0.6)
    share = f"{100 * report.targets.sparsity_of_targets:.2f}"
    assert (
        f"sparsity {share} % of the targets (60 % asked; each row loses a whole number of "
        "weights, rounded down),"
    ) in (pruning_table(report))
    for name, sparsity in (("magnitude", 0.5), ("emp-magnitude", 0.6)):
        report = prune(
            models("llama"), output=tmp_path / "out", method=name, sparsity=sparsity, overwrite=True
        )
        assert "asked" not in pruning_table(report)


def test_zeros_of_a_pruned_model(
    models: Callable[[str], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An update may revive them, or keep some as they are: more than the asked share is then
    zero.
    """
    given: dict[str, Any] = {"calibration": "demo", "samples": 8, "seqlen": 32}
    prune(models("llama"), output=tmp_path / "once", method="sparsegpt", **given)
    report = prune(tmp_path / "once", output=tmp_path / "twice", method="admm", **given)
    assert (
        "count as weights of the rows, and those that are kept may get new values."
    ) in caplog.text
    assert (
        "(50 % asked; some of the weights that were kept and fitted are zero),"
    ) in pruning_table(report)
    prune(tmp_path / "once", output=tmp_path / "third", method="magnitude")
    assert "count as weights of the rows, with the lowest scores." in caplog.text


def test_group_all_has_one_effective_number(models: Callable[[str], Path], tmp_path: Path) -> None:
    report = prune(models("llama"), output=tmp_path / "run", method="emp-magnitude", group="all")
    dense = weights_of(models("llama"))
    scores = torch.cat(
        [dense[entry.tensor].flatten().double().abs() for entry in report.matrices.values()]
    )
    n_eff = float(scores.sum() ** 2 / (scores**2).sum())
    assert report.targets.n_eff == pytest.approx(n_eff)
    assert f"all targets as one group: N_eff {n_eff:,.0f}, s_eff " in pruning_table(report)
    top = torch.sort(scores, descending=True).values[: int(n_eff)]
    assert report.targets.s_eff == pytest.approx(float(top.sum() / scores.sum()))
    assert report.targets.s_eff > (report.targets.s_eff_bound or 0) > 0
