"""The pages and figures of `report`, seen from outside, and what it says of wrong input."""

import csv
import json
import math
import os
import shutil
import subprocess
import sys
import warnings
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from conftest import Run
from PIL import Image
from runs import NAMES, make_runs, make_sweep, report_of

from emp_llm.models.errors import UserError
from emp_llm.report import report

HOSTILE = "<script>alert('x')</script> $\\frac{$ & |a|_b_\x00\u202e\"quoted\""


@pytest.fixture(scope="module")
def runs(models: Callable[[str], Path], text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_runs(models, text, tmp_path_factory.mktemp("runs"))


class Tags(HTMLParser):
    """Opens and closes what a page does, and notes what it would fetch or run."""

    VOID = ("meta", "br", "img", "use", "path", "link", "hr")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.seen: set[str] = set()
        self.fetched: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        if tag not in self.VOID:
            self.open.append(tag)
        for name, value in attributes:
            if name == "id":
                self.ids.append(value or "")
            if name in ("src", "href", "xlink:href") and not (value or "").startswith(("#", "data:image/png;base64,")):
                self.fetched.append(value or "")
            assert not name.startswith("on")

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attributes)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag


def check_page(page: Path) -> Tags:
    tags = Tags()
    tags.feed(page.read_text(encoding="utf-8"))
    assert tags.open == []
    assert tags.fetched == []
    assert "script" not in tags.seen
    assert len(tags.ids) == len(set(tags.ids))
    return tags


@pytest.fixture(scope="module")
def page(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("page") / "report"
    report([runs / name for name in NAMES], output)
    return output


def test_files_open_and_the_page_needs_nothing_else(page: Path, runs: Path) -> None:
    figures = {path.stem for path in (page / "figures").iterdir()}
    assert figures == {"llama-perplexity-blocks-of-64", "llama-n-eff", "llama-kept", "llama-s-eff"}
    for name in figures:
        root = ElementTree.parse(page / "figures" / f"{name}.svg").getroot()
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        with Image.open(page / "figures" / f"{name}.png") as image:
            image.load()
            assert image.width == 1200
            assert len(image.getcolors(1 << 24) or []) > 10
        for file in (page / "figures").glob(f"{name}.*"):
            assert file.stat().st_size < 150_000
        assert f"(figures/{name}.svg)" in (page / "report.md").read_text()
    tags = check_page(page / "report.html")
    assert {"svg", "table", "h1", "figure"} <= tags.seen
    assert (page / "report.html").stat().st_size < 1_000_000
    with (page / "points.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 7
    for row in rows[1:]:
        told = report_of(runs / row["point"])
        assert float(row["value"]) == told["evaluation"]["pruned"]["perplexity"]["perplexity"]
        assert float(row["sparsity_of_targets"]) == told["targets"]["sparsity_of_targets"]
    with (page / "matrices.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 6 * 6
    with (page / "differences.csv").open() as file:
        gaps = list(csv.DictReader(file))
    assert [(row["point"], row["baseline"]) for row in gaps] == [("emp-0.5", "uniform-0.5"), ("emp", "uniform")]
    for row in gaps:
        assert float(row["change"]) == pytest.approx(100 * (float(row["value"]) / float(row["baseline_value"]) - 1))


def test_errors_of_accuracies_are_said_to_be_unpaired(runs: Path, tmp_path: Path) -> None:
    """Wherever one is shown: in the sentences that count, below both tables, and below the figure."""
    for name, accuracy in (("emp", 0.5), ("uniform", 0.6)):
        told = report_of(runs / name)
        told["recipe"]["match"] = None
        for which in ("dense", "pruned"):
            metrics = {"acc,none": accuracy, "acc_stderr,none": 0.03}
            counts = {"t": {"original": 10, "effective": 10}}
            told["evaluation"][which]["tasks"] = {"t": {"results": {"t": metrics}, "n-samples": counts}}
        (tmp_path / name).mkdir()
        (tmp_path / name / "emp_report.json").write_text(json.dumps(told))
    summary = report([tmp_path / "emp", tmp_path / "uniform"], tmp_path / "out")
    text = (tmp_path / "out" / "report.md").read_text()
    (sentence,) = (each for study in summary["studies"] for each in study["verdicts"] if "t acc" in each)
    assert "worse at 1 of 1 points (1 by more than two unpaired standard errors)" in sentence
    assert not any("unpaired" in each for study in summary["studies"] for each in study["verdicts"] if "t acc" not in each)
    differences, points = text.index("| EMP |"), text.index("### All points")
    assert "unpaired" in text[differences:points]
    assert "unpaired" in text[points : text.index("### Where")]
    caption = text[text.index("T acc against") :].splitlines()[0]
    assert "± one standard error" in caption
    assert "± two unpaired standard errors" in caption
    caption = text[text.index("Perplexity, blocks of 64 against") :].splitlines()[0]
    assert "± one" not in caption
    assert "± two standard errors of the paired losses" in caption
    report([tmp_path / "emp"], tmp_path / "alone", no_plots=True)
    assert "unpaired" in (tmp_path / "alone" / "report.md").read_text()
    report([runs / "emp"], tmp_path / "none", no_plots=True)
    assert "unpaired" not in (tmp_path / "none" / "report.md").read_text()


def test_every_calibration_is_named(runs: Path, tmp_path: Path) -> None:
    told = report_of(runs / "wanda")
    told["calibration"]["text"]["samples"] = 5
    (tmp_path / "emp_report.json").write_text(json.dumps(told))
    report([runs / "emp", runs / "wanda", tmp_path], tmp_path / "out", no_plots=True)
    assert "- calibration: text.txt, 4 x 64 tokens; text.txt, 5 x 64 tokens\n" in (tmp_path / "out" / "report.md").read_text()


def test_the_same_input_is_the_same_bytes(page: Path, runs: Path, run: Run, tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONHASHSEED": "1234"}
    line = [sys.executable, "-m", "emp_llm.report", *(str(runs / name) for name in NAMES), "--output", "again"]
    done = subprocess.run(line, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "better at" in done.stdout
    files = sorted(path.relative_to(page) for path in page.rglob("*") if path.is_file())
    assert files == sorted(path.relative_to(tmp_path / "again") for path in (tmp_path / "again").rglob("*") if path.is_file())
    for file in files:
        assert (tmp_path / "again" / file).read_bytes() == (page / file).read_bytes(), file
    assert [path.name for path in tmp_path.iterdir()] == ["again"]


def test_hostile_names_are_shown_and_do_nothing(runs: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    told = report_of(runs / "emp")
    told["source"]["model"] = told["evaluation"]["suite"] = HOSTILE
    told["recipe"]["targets"] = [HOSTILE]
    for entry in told["matrices"].values():
        entry["role"] = HOSTILE * 20 + entry["role"]
    (folder / "emp_report.json").write_text(json.dumps(told))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of matplotlib: no room, unknown letters
        report([folder], tmp_path / "out", title=HOSTILE)
    check_page(tmp_path / "out" / "report.html")
    page = (tmp_path / "out" / "report.html").read_text()
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert "\x00" not in page
    assert "\u202e" not in page
    for figure in (tmp_path / "out" / "figures").glob("*.svg"):
        ElementTree.parse(figure)
    text = (tmp_path / "out" / "report.md").read_text()
    assert "<script" not in text.replace("\\<script", "")


def test_without_matplotlib_the_extra_is_named_and_tables_work(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UserError, match=r"pip install 'emp-llm\[plots\]'"):
        report([runs / "emp"], tmp_path / "out")
    assert not (tmp_path / "out").exists()
    report([runs / "emp"], tmp_path / "out", no_plots=True)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "differences.csv",
        "matrices.csv",
        "points.csv",
        "report.html",
        "report.json",
        "report.md",
    ]


def test_an_older_report_is_replaced_only_when_asked(runs: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    report([runs / "emp"], out, no_plots=True)
    (out / "points.csv").write_text("older")
    with pytest.raises(UserError, match="--overwrite"):
        report([runs / "emp"], out, no_plots=True)
    assert (out / "points.csv").read_text() == "older"
    report([runs / "emp"], out, no_plots=True, overwrite=True)
    assert (out / "points.csv").read_text() != "older"
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.tex").write_text("years of work")
    for overwrite in (False, True):
        with pytest.raises(UserError, match="something else is there"):
            report([runs / "emp"], mine, no_plots=True, overwrite=overwrite)
    assert (mine / "thesis.tex").read_text() == "years of work"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "out"]


def broken(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        told = report_of(folder)
        change(told)
        (folder / "emp_report.json").write_text(json.dumps(told))

    return apply


def first(told: dict[str, Any]) -> dict[str, Any]:
    entry: dict[str, Any] = next(iter(told["matrices"].values()))
    return entry


@pytest.mark.parametrize(
    ("says", "spoil"),
    [
        ("neither sweep.json nor emp_report.json", lambda folder: (folder / "emp_report.json").unlink()),
        ("cannot be read as JSON", lambda folder: (folder / "emp_report.json").write_text("{")),
        ("it is not the output of prune", lambda folder: (folder / "emp_report.json").write_text("{}")),
        ("kept_fraction: q1 must be a finite number", broken(lambda r: first(r)["kept_fraction"].update(q1="much"))),
        ("q1 must be a finite number, got NaN", broken(lambda r: first(r)["kept_fraction"].update(q1=math.nan))),
        ("kept_fraction must be quartiles in ascending", broken(lambda r: first(r)["kept_fraction"].update(q1=1.0))),
        ("max must be between 0 and 1", broken(lambda r: first(r)["kept_fraction"].update(max=7.0))),
        ("n_eff_mean must be between 0 and group_size", broken(lambda r: first(r).update(n_eff_mean=1e300))),
        ("rows must be a whole number", broken(lambda r: first(r).update(rows=-1))),
        ("group_size must be at least 1", broken(lambda r: first(r).update(group_size=0))),
        ("role must be text", broken(lambda r: first(r).update(role=None))),
        ("matrices: it must be a JSON object", broken(lambda r: r.update(matrices=[1]))),
        ("method must be text", broken(lambda r: r["recipe"].pop("method"))),
        ("sparsity_of_targets", broken(lambda r: r["targets"].pop("sparsity_of_targets"))),
        ("not what a suite measures", broken(lambda r: r["evaluation"]["pruned"]["perplexity"].pop("block_length"))),
        ("must be a number", broken(lambda r: r["evaluation"]["pruned"]["perplexity"].update(perplexity="low"))),
    ],
)
def test_bad_runs_are_a_sentence(runs: Path, tmp_path: Path, says: str, spoil: Callable[[Path], None]) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    shutil.copy(runs / "emp" / "emp_report.json", folder)
    spoil(folder)
    with pytest.raises(UserError, match=says) as caught:
        report([folder], tmp_path / "out", no_plots=True)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("says", "change"),
    [
        ("name must be the name of a folder", lambda sweep: sweep["points"][0].update(name="../../etc")),
        ("its report is missing", lambda sweep: sweep["points"][0].update(name="elsewhere")),
        ("baseline_of must be null or the name", lambda sweep: sweep["points"][2].update(baseline_of="nobody")),
        ("match must be null or one of total, matrix", lambda sweep: sweep["points"][2].update(match="row")),
        ("points must be a list", lambda sweep: sweep.update(points={})),
    ],
)
def test_bad_sweeps_are_a_sentence(runs: Path, tmp_path: Path, says: str, change: Callable[[dict[str, Any]], None]) -> None:
    folder = make_sweep(runs, tmp_path / "sweep")
    sweep = json.loads((folder / "sweep.json").read_text())
    change(sweep)
    (folder / "sweep.json").write_text(json.dumps(sweep))
    with pytest.raises(UserError, match=says):
        report([folder], tmp_path / "out", no_plots=True)


def test_wrong_arguments_from_the_shell(run: Run) -> None:
    missing = run("report", "nowhere")
    assert missing.returncode == 2
    assert "nowhere: there is no such file or folder" in missing.stderr
    assert "Traceback" not in missing.stderr
