"""Wrong options of `sweep`, and wrong runs to match: the error names the option, and nothing is written."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from emp_llm.common.errors import UserError
from emp_llm.prune import prune
from emp_llm.sweep import sweep

Models = Callable[[str], Path]
Record = dict[str, Any]
OPTIONS: Record = {"methods": "emp-wanda,magnitude", "betas": "0.5,1", "sparsities": "0.4", "suite": "perplexity"}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"methods": "emp-wanda,sparsegtp"}, "--methods: 'sparsegtp' is not one of emp-wanda, "),
        ({"methods": "emp-wanda,sparsegpt"}, "a sweep only sets weights to zero; run prune --method sparsegpt instead."),
        ({"methods": "emp-admm,wanda"}, "a sweep only sets weights to zero; run prune --method emp-admm instead."),
        ({"methods": "emp-wanda,"}, "--methods 'emp-wanda,': expected values"),
        ({"betas": "1,much"}, "--betas '1,much': expected numbers"),
        ({"betas": "1,nan"}, "--betas '1,nan': expected numbers"),
        ({"betas": "0"}, "--beta must be a number above 0"),
        ({"orders": "-1"}, "--order must be"),
        ({"sparsities": "1.5"}, "--sparsity must be"),
        ({"methods": "emp-wanda", "betas": None}, "--sparsities is for methods without emp-"),
        ({"methods": "wanda"}, "--betas is for emp methods"),
        ({"methods": "wanda", "betas": None, "matched_baselines": True}, "--matched-baselines is for emp"),
        ({"patterns": "2-4"}, "--pattern must be N:M"),
        ({"group": "all", "matched_baselines": True}, "--matched-baselines .* not all"),
        ({"group": "column"}, "--group 'column' is not one of"),
        ({"suite": "perplexty"}, "Did you mean perplexity"),
        ({"limit": 0}, "--limit must be at least 1"),
    ],
)
def test_wrong_options(models: Models, tmp_path: Path, changes: Record, says: str) -> None:
    with pytest.raises(UserError, match=says):
        sweep(models("llama"), output=tmp_path / "out", **(OPTIONS | changes))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"match_by": "matrix", "match": None}, "--match-by matrix needs an earlier run"),
        ({"match_by": "rows"}, "--match-by 'rows' is not one of total, matrix"),
        ({"match_by": "matrix", "group": "all"}, "--match-by matrix .* not all"),
        ({"match_by": "matrix", "targets": "attention"}, "that run had"),
        ({"method": "emp-magnitude", "match_by": "matrix"}, "--match does not go with method emp-magnitude"),
    ],
)
def test_wrong_matches(models: Models, tmp_path: Path, changes: Record, says: str) -> None:
    source = models("llama")
    prune(source, output=tmp_path / "emp", method="emp-magnitude")
    with pytest.raises(UserError, match=says):
        prune(source, output=tmp_path / "out", **({"method": "magnitude", "match": tmp_path / "emp"} | changes))


@pytest.mark.parametrize("damage", [{}, {"kept": "many"}, {"rows": 7}])
def test_damaged_report_of_a_match(models: Models, tmp_path: Path, damage: Record) -> None:
    source = models("llama")
    report = prune(source, output=tmp_path / "emp", method="emp-magnitude").as_dict()  # type: ignore[union-attr]
    name = next(iter(report["matrices"]))
    report["matrices"][name] = damage and report["matrices"][name] | damage
    (tmp_path / "emp" / "emp_report.json").write_text(json.dumps(report))
    with pytest.raises(UserError, match=rf"{name}|matrices\[\.\.\.\]"):
        prune(source, output=tmp_path / "out", method="magnitude", match=tmp_path / "emp", match_by="matrix")
