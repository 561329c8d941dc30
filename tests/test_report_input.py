"""Wrong input of `report`: every error is one sentence that names the file, the field and the rule, and nothing is written."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Run
from runs import make_sweep, report_of, save_run

from emp_llm.common.errors import UserError
from emp_llm.report import report

Values = dict[str, Any]


def broken(change: Callable[[Values], object]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        values = report_of(folder)
        change(values)
        save_run(folder, values)

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
            r"kept_fraction\.q1: expected float, got str",
            broken(lambda r: first(r)["kept_fraction"].update(q1="much")),
        ),
        (r"\.rows: expected int >= 0", broken(lambda r: first(r).update(rows=-1))),
        (r"\.group_size: expected int >= 1", broken(lambda r: first(r).update(group_size=0))),
        (r"\.role: expected str, got null", broken(lambda r: first(r).update(role=None))),
        ("matrices: expected object, got array", broken(lambda r: r.update(matrices=[1]))),
        ("targets: missing field sparsity_of_targets", broken(lambda r: r["targets"].pop("sparsity_of_targets"))),
        ("perplexity: missing field block_length", broken(lambda r: measured(r).pop("block_length"))),
        (r"pruned\.perplexity\.perplexity: expected float", broken(lambda r: measured(r).update(perplexity="low"))),
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


def test_a_sweep_without_its_points_is_refused(runs: Path, tmp_path: Path) -> None:
    folder = make_sweep(runs, tmp_path / "sweep")
    (folder / "points" / "emp" / "emp_report.json").unlink()
    with pytest.raises(UserError, match=r"points/emp/emp_report\.json: cannot be read"):
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
