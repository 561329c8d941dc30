"""Reports: their curves, maps and tables against numbers computed independently."""

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
from emp_llm.evaluation.comparison import Value
from emp_llm.options.flat import recipe_of
from emp_llm.reporting.page import difference_rows, role_rows
from emp_llm.reporting.run_tables import pruning_table
from emp_llm.reporting.studies import (
    MeasuredPoint,
    SuiteResult,
    curves,
    differences,
    label_of,
    studies,
)

PERPLEXITY = "perplexity, blocks of 64"


def test_effective_numbers_and_masses_are_those_of_the_weights(
    runs: Path, models: Callable[[str], Path]
) -> None:
    study = study_of(runs, "emp")
    dense = weights_of(models("llama"))
    pruned = weights_of(runs / "emp")
    (grid,) = study.measured
    assert grid.label == "Magnitude"
    assert grid.roles == ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    assert grid.blocks == [0, 1]
    for matrix in grid.matrices:
        name = matrix.tensor
        expected = float(effective_number(dense[name]).mean()) / dense[name].shape[1]
        assert grid.shares[matrix.role, matrix.block] == pytest.approx(expected, rel=1e-12)
        fractions = (pruned[name] != 0).double().mean(1)
        quarters = torch.quantile(fractions, torch.tensor([0, 0.25, 0.5, 0.75, 1]).double())
        assert matrix.kept_fraction.values == pytest.approx(quarters.tolist())
        assert matrix.s_eff_mean == pytest.approx(
            float(effective_mass(dense[name]).mean()), rel=1e-12
        )
        assert matrix.s_eff_bound_mean is not None
        assert matrix.s_eff_bound_mean < matrix.s_eff_mean


def test_differences_are_of_equal_totals_with_the_error_of_paired_blocks(runs: Path) -> None:
    study = study_of(runs)
    found = {each.point.name: each for each in differences(study, study.suites[0])}
    assert {name: each.baseline.name for name, each in found.items()} == {
        "emp": "uniform",
        "emp-0.5": "uniform-0.5",
    }
    for name, each in found.items():
        first, second = (
            report_of(runs / n)["evaluation"]["pruned"]["perplexity"]
            for n in (name, each.baseline.name)
        )
        ratio = first["perplexity"] / second["perplexity"]
        assert each.change.value == pytest.approx(100 * (ratio - 1))
        assert each.better == (ratio < 1)
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
        assert each.change.paired
        assert each.change.stderr == pytest.approx(
            100 * ratio * float(whole.std()) / math.sqrt(len(whole)), rel=0.1
        )


def test_experts_are_one_cell_a_block_and_role(
    models: Callable[[str], Path], tmp_path: Path
) -> None:
    prune(models("mixtral"), output=tmp_path / "run", method="emp-magnitude")
    entries = report_of(tmp_path / "run")["matrices"].values()
    (study,) = studies(read_points([tmp_path / "run"]))
    (grid,) = study.measured
    assert (len(entries), len(grid.matrices), len(grid.shares)) == (24, 24, 6)
    for (role, block), share in grid.shares.items():
        own = [e for e in entries if (e["role"], e["block"]) == (role, block)]
        assert share == pytest.approx(sum(e["n_eff_mean"] / e["group_size"] for e in own) / 4)


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


def test_a_sweep_a_measure_and_results_are_read(runs: Path, tmp_path: Path) -> None:
    whole = study_of(runs)
    sweep = make_sweep(runs, tmp_path / "sweep")
    (study,) = studies(read_points([sweep]))
    assert [point.name for point in study.points] == [
        "emp",
        "emp-0.5",
        "uniform",
        "uniform-0.5",
        "wanda",
    ]
    of = {point.id: point.name for point in study.points}
    assert {p.name: (of[p.baseline_of or ""], p.match) for p in study.points if p.baseline_of} == {
        "uniform": ("emp", "total"),
        "uniform-0.5": ("emp-0.5", "matrix"),
    }
    found = {
        curve.label: curve for curve in curves(study, study.suites[0], study.suites[0].measures[0])
    }
    assert found.keys() == {
        "EMP-magnitude",
        "magnitude, uniform rows",
        "magnitude, same total per matrix",
        "EMP-Wanda",
    }
    changes = [
        sorted(each.change.value for each in differences(s, s.suites[0])) for s in (study, whole)
    ]
    assert changes[0] == changes[1]
    report = report_of(runs / "emp")
    measures = {"format": "emp-llm measure 3", "source": report["source"], "measures": []}
    measures["measures"] = [
        {
            "criterion": "magnitude",
            "order": 1.0,
            "matrices": report["matrices"],
            "targets": report["targets"],
        }
    ]
    (tmp_path / "measure.json").write_text(json.dumps(measures))
    (study,) = studies(read_points([sweep, tmp_path / "measure.json"]))
    # Equal numbers are one map, with both labels.
    assert [grid.label for grid in study.measured] == ["Magnitude and Magnitude, order 1", "Wanda"]
    assert len(study.pruned) == 5


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
    assert [(point.name, point.sparsity, point.matrices) for point in alone.points] == [
        ("pruned", report["targets"]["sparsity_of_targets"], {})
    ]


def test_results_that_could_be_of_two_runs_join_neither(runs: Path, tmp_path: Path) -> None:
    """A recipe does not name the calibration, so results fit all runs that differ in it alone."""
    report = report_of(runs / "wanda")
    for name in ("one", "same", "other"):
        next(iter(report["matrices"].values()))["n_eff_mean"] *= 0.9 if name == "other" else 1
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
    (study,) = studies(read_points([tmp_path / name for name in ("one", "same", "one.json")]))
    assert len(study.points) == 2


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
    assert label_of(point) == label


def test_a_baseline_belongs_to_the_run_that_it_names(tmp_path: Path) -> None:
    """Also if several runs remove as many weights."""
    emp = [
        MeasuredPoint(str(tmp_path / name), name, "m", "m", recipe_of("emp-wanda"), sparsity=0.5)
        for name in ("a", "b", "c")
    ]
    baseline = MeasuredPoint(
        "u", "u", "m", "m", recipe_of("wanda", match=str(tmp_path / "b")), sparsity=0.5
    )
    (study,) = studies([*emp, baseline])
    assert study.points[-1].baseline_of == emp[1].id


def with_perplexities(point: MeasuredPoint, *values: float) -> MeasuredPoint:
    """A point with the results of as many suites."""
    results = [
        SuiteResult("s", str(number), {PERPLEXITY: Value(value)})
        for number, value in enumerate(values)
    ]
    return replace(point, results=tuple(results))


@pytest.mark.parametrize(
    ("masks", "value", "base", "change", "better"),
    [
        (("a", "a"), 3.7, 3.7 * (1 - 2.8e-16), 0.0, False),
        # Equal masks are equal models: the rest is noise of the measurement.
        (("a", "a"), 3.7, 3.6, 0.0, False),
        (("a", "b"), 3.7, 3.7 * (1 - 2.8e-16), 0.0, False),
        (("", ""), 3.7, 3.7 * (1 + 2.8e-16), 0.0, False),
        (("", ""), 3.7, 3.6, 100 * (3.7 / 3.6 - 1), False),
        (("", ""), 3.6, math.inf, -100.0, True),
        (("", ""), math.inf, 3.6, math.inf, False),
    ],
)
def test_equal_masks_and_rounding_are_no_difference(
    masks: tuple[str, str], value: float, base: float, change: float, better: bool
) -> None:
    emp = MeasuredPoint("e", "e", "m", "m", recipe_of("emp-wanda"), sparsity=0.5, masks=masks[0])
    uniform = MeasuredPoint(
        "u",
        "u",
        "m",
        "m",
        recipe_of("wanda"),
        sparsity=0.5,
        masks=masks[1],
        baseline_of="e",
        match="total",
    )
    (study,) = studies([with_perplexities(emp, value), with_perplexities(uniform, base)])
    (found,) = differences(study, study.suites[0])
    assert found.change.value == pytest.approx(change)
    assert found.better == better
    (row,) = difference_rows(study, study.suites[0])[1:]
    verdicts = {-1: "EMP", 0: "equal", 1: "baseline"}
    assert row[-1] == verdicts[(change > 0) - (change < 0)]
    assert "-0.00" not in str(row)


def test_two_infinite_perplexities_are_not_compared() -> None:
    emp = MeasuredPoint("e", "e", "m", "m", recipe_of("emp-wanda"), sparsity=0.5)
    uniform = replace(emp, id="u", name="u", recipe=recipe_of("wanda"))
    (study,) = studies([with_perplexities(each, math.inf) for each in (emp, uniform)])
    assert study.points[1].baseline_of == "e"
    assert differences(study, study.suites[0]) == curves(study, study.suites[0], PERPLEXITY) == []


def test_masks_of_different_sweeps_are_not_equal(runs: Path, tmp_path: Path) -> None:
    """The hash of masks does not cover the norms, so it is compared within a sweep only."""
    for name, masks in (
        ("one/points/a", "x"),
        ("one/points/b", "x"),
        ("two/points/a", "x"),
        ("two/points/b", "all kept"),
    ):
        save_run(tmp_path / name, report_of(runs / "emp") | {"masks": masks})
    found = [
        point.masks
        for point in read_points(
            [tmp_path / f"{sweep}/points/{name}" for sweep in ("one", "two") for name in "ab"]
        )
    ]
    assert found[0] == found[1] != found[2]
    assert found[3] == "all kept"


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
    """In the table of the run, and in the table of the report."""
    report = prune(models("llama"), output=tmp_path / "run", method="emp-magnitude", group="all")
    dense = weights_of(models("llama"))
    scores = torch.cat(
        [dense[entry.tensor].flatten().double().abs() for entry in report.matrices.values()]
    )
    n_eff = float(scores.sum() ** 2 / (scores**2).sum())
    assert report.targets.n_eff == pytest.approx(n_eff)
    assert f"all targets as one group: N_eff {n_eff:,.0f}, s_eff " in pruning_table(report)
    (study,) = studies(read_points([tmp_path / "run"]))
    (row,) = role_rows(study)[1:]
    top = torch.sort(scores, descending=True).values[: int(n_eff)]
    assert row[1:3] == ["all targets as one group", f"{100 * n_eff / len(scores):.2f}"]
    assert row[5] == f"{float(top.sum() / scores.sum()):.3f}"
    assert float(row[5]) > float(row[6]) > 0
