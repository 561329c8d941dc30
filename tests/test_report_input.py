"""Wrong input of `report`: every error is one sentence that names the file, the field and the rule, and nothing is written."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Run
from runs import make_sweep, report_of

from emp_llm.common.errors import UserError
from emp_llm.report import report

Values = dict[str, Any]


def broken(change: Callable[[Values], object]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        values = report_of(folder)
        change(values)
        (folder / "emp_report.json").write_text(json.dumps(values))

    return apply


def first(values: Values) -> Values:
    entry: Values = next(iter(values["matrices"].values()))
    return entry


def measured(values: Values) -> Values:
    found: Values = values["evaluation"]["pruned"]["perplexity"]
    return found


@pytest.mark.parametrize(
    ("says", "spoil"),
    [
        ("holds neither sweep.json nor emp_report.json", lambda folder: (folder / "emp_report.json").unlink()),
        ("cannot be read as JSON", lambda folder: (folder / "emp_report.json").write_text("{")),
        ("this is not the output of prune", lambda folder: (folder / "emp_report.json").write_text("{}")),
        (
            r"matrices\[\.\.\.\]\.kept_fraction\.q1: expected float, got str",
            broken(lambda r: first(r)["kept_fraction"].update(q1="much")),
        ),
        ("gate_proj: kept_fraction must be a finite", broken(lambda r: first(r)["kept_fraction"].update(q1=math.nan))),
        ("gate_proj: n_eff_mean must be a finite", broken(lambda r: first(r).update(n_eff_mean=math.inf))),
        ("kept_fraction must be quartiles in ascending", broken(lambda r: first(r)["kept_fraction"].update(q1=1.0))),
        ("quartiles .* between 0 and 1", broken(lambda r: first(r)["kept_fraction"].update(max=7.0))),
        ("n_eff_mean must be between 0 and group_size", broken(lambda r: first(r).update(n_eff_mean=1e300))),
        (r"matrices\[\.\.\.\]\.rows: expected int >= 0", broken(lambda r: first(r).update(rows=-1))),
        (r"matrices\[\.\.\.\]\.group_size: expected int >= 1", broken(lambda r: first(r).update(group_size=0))),
        (r"matrices\[\.\.\.\]\.role: expected str, got null", broken(lambda r: first(r).update(role=None))),
        ("matrices: expected object, got array", broken(lambda r: r.update(matrices=[1]))),
        ("targets: missing field sparsity_of_targets", broken(lambda r: r["targets"].pop("sparsity_of_targets"))),
        ("perplexity: missing field block_length", broken(lambda r: measured(r).pop("block_length"))),
        (r"pruned\.perplexity\.perplexity: expected float", broken(lambda r: measured(r).update(perplexity="low"))),
        ("perplexity, blocks of 64 must be a number", broken(lambda r: measured(r).update(perplexity=math.nan))),
    ],
)
def test_wrong_runs_are_refused_in_one_sentence(runs: Path, tmp_path: Path, says: str, spoil: Callable[[Path], None]) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    shutil.copy(runs / "emp" / "emp_report.json", folder)
    spoil(folder)
    with pytest.raises(UserError, match=says) as caught:
        report([folder], output=tmp_path / "out", no_plots=True)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("says", "change"),
    [
        ("name must be the name of a folder", lambda sweep: sweep["points"][0].update(name="../../etc")),
        ("the report of this point of the sweep is missing", lambda sweep: sweep["points"][0].update(name="elsewhere")),
        ("baseline_of must be null or the name", lambda sweep: sweep["points"][2].update(baseline_of="nobody")),
        ("match must be null or one of total, matrix", lambda sweep: sweep["points"][2].update(match="row")),
        ("points: expected array, got object", lambda sweep: sweep.update(points={})),
    ],
)
def test_wrong_sweeps_are_refused_in_one_sentence(
    runs: Path, tmp_path: Path, says: str, change: Callable[[dict[str, Any]], None]
) -> None:
    folder = make_sweep(runs, tmp_path / "sweep")
    sweep = json.loads((folder / "sweep.json").read_text())
    change(sweep)
    (folder / "sweep.json").write_text(json.dumps(sweep))
    with pytest.raises(UserError, match=says):
        report([folder], output=tmp_path / "out", no_plots=True)


def test_a_missing_input_is_named_before_the_output(command: Run, tmp_path: Path) -> None:
    """Also if the default output, `report`, exists and is something else."""
    (tmp_path / "report").mkdir()
    (tmp_path / "report" / "thesis.tex").write_text("years of work")
    done = command("report", "nope")
    assert done.returncode == 2
    assert done.stderr.startswith("error: nope: no such file or folder; give the output of prune, sweep, measure or bench")
    assert "--output" not in done.stderr
    done = command("report", "report")
    assert done.stderr.startswith("error: report: it holds neither sweep.json nor emp_report.json")
