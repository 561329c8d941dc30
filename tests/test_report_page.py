"""The page and figures of `report` as files, and its errors for wrong input."""

import base64
import csv
import json
import math
import os
import subprocess
import sys
import warnings
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from io import StringIO
from pathlib import Path

import pytest
from PIL import Image
from runs import NAMES, report_of, save_run

from emp_llm.common.errors import UserError
from emp_llm.common.tables import csv_table
from emp_llm.evaluation.values import signed
from emp_llm.report import report

HOSTILE = "<script>alert('x')</script> $\\frac{$ & |a|_b_\x00\u202e\"quoted\""


class Tags(HTMLParser):
    """Checks that tags are balanced, and notes everything that a page would fetch or run."""

    VOID = ("meta", "br", "img", "link", "hr")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.fetched: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        if tag not in self.VOID:
            self.open.append(tag)
        for name, value in attributes:
            if name in ("src", "href") and not (value or "").startswith("data:image/svg+xml;base64,"):
                self.fetched.append(value or "")
            assert not name.startswith("on")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def check_page(page: Path) -> Tags:
    tags = Tags()
    tags.feed(page.read_text(encoding="utf-8"))
    assert tags.open == []
    assert tags.fetched == []
    assert "script" not in tags.seen
    return tags


def markdown(runs: list[Path], output: Path) -> str:
    report(runs, output=output, no_plots=True)
    return (output / "report.md").read_text()


def csv_rows(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def page(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("page") / "report"
    report([runs / name for name in NAMES], output=output)
    return output


def test_files_are_valid_and_the_page_is_self_contained(page: Path, runs: Path) -> None:
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
    assert [tags.seen.count(tag) for tag in ("h1", "figure", "img", "table")] == [1, 4, 4, 4]
    html = (page / "report.html").read_text()
    assert html.count('<div class="wide" role="region" tabindex="0" aria-label="') == 8  # tables and figures scroll in a box
    assert base64.b64encode((page / "figures" / "llama-kept.svg").read_bytes()).decode() in html
    assert (page / "report.html").stat().st_size < 1_000_000
    rows = csv_rows(page / "points.csv")
    assert len(rows) == 7
    for row in rows[1:]:
        values = report_of(runs / row["point"])
        assert float(row["value"]) == values["evaluation"]["pruned"]["perplexity"]["perplexity"]
        assert float(row["sparsity_of_targets"]) == values["targets"]["sparsity_of_targets"]
    assert len(csv_rows(page / "matrices.csv")) == 6 * 6
    gaps = csv_rows(page / "differences.csv")
    assert [(row["point"], row["baseline"]) for row in gaps] == [("emp-0.5", "uniform-0.5"), ("emp", "uniform")]
    for row in gaps:
        assert float(row["change"]) == pytest.approx(100 * (float(row["value"]) / float(row["baseline_value"]) - 1))


def test_the_page_begins_with_what_was_pruned_its_cost_and_the_baseline(page: Path, runs: Path) -> None:
    text = (page / "report.md").read_text()
    places = [text.index(part) for part in ("- model: ", "### All points", "### Is EMP better", "### Differences")]
    assert places == sorted(places)
    dense, pruned = (report_of(runs / "emp")["evaluation"][which]["perplexity"]["perplexity"] for which in ("dense", "pruned"))
    base = report_of(runs / "uniform")["evaluation"]["pruned"]["perplexity"]["perplexity"]
    targets = report_of(runs / "emp")["targets"]
    share, of_all = (f"{100 * targets[name]:.2f}" for name in ("sparsity_of_targets", "sparsity_of_all_parameters"))
    cost, gain = (signed(100 * (pruned / other - 1)) for other in (dense, base))
    assert f"| emp | EMP-magnitude | 1 | 2 | {share} | {of_all} | {pruned:.3f} | {cost} ± " in text
    against = f"| magnitude, uniform rows, as many weights in total | {share} | perplexity, blocks of 64 |"
    assert f"| EMP-magnitude | 1 {against} {pruned:.3f} | {base:.3f} | {gain} ± " in text
    assert "| EMP-magnitude | as many weights in total | perplexity, blocks of 64 |" in text
    assert "No baseline has as many zeros as the point wanda. To make one: prune --method wanda --match RUN." in text


def test_the_page_without_evaluation_or_pruned_model_says_so(runs: Path, tmp_path: Path) -> None:
    values = report_of(runs / "emp")
    del values["evaluation"]
    assert "Not evaluated. The option --evaluate of prune" in markdown([save_run(tmp_path / "run", values)], tmp_path / "out")
    entry = {"criterion": "magnitude", "order": 2.0, "matrices": values["matrices"], "targets": values["targets"]}
    measure = {"format": "emp-llm measure 2", "source": values["source"], "measures": [entry]}
    (tmp_path / "measure.json").write_text(json.dumps(measure))
    text = markdown([tmp_path / "measure.json"], tmp_path / "measured")
    removed = f"{100 * values['targets']['sparsity_of_targets']:.2f}"
    assert f"| EMP-magnitude: measured, not pruned | 1 | 2 | {removed} |" in text


def with_accuracies(runs: Path, folder: Path, answers: bool, names: tuple[str, ...] = ("emp", "uniform")) -> list[Path]:
    """An EMP run and its baseline with 10 answers to a task: 5 and 6 of them correct, on 3 examples another one."""
    folders = []
    for name, correct in zip(names, ("1111100000", "1111011000"), strict=False):
        values = report_of(runs / name)
        values["recipe"]["match"] = None
        bits = base64.b64encode(int(correct.ljust(16, "0"), 2).to_bytes(2)).decode()
        for which in ("dense", "pruned"):
            task = {
                "results": {"t": {"acc,none": correct.count("1") / 10, "acc_stderr,none": 0.03}},
                "n-samples": {"t": {"original": 10, "effective": 10}},
            }
            held = {"t": {"examples": 10, "sha256": "ten", "correct": {"acc,none": bits}}}
            values["evaluation"][which]["tasks"] = {"t": task | ({"answers": held} if answers else {})}
        folders.append(save_run(folder / name, values))
    return folders


def test_answers_to_the_same_examples_are_paired(runs: Path, tmp_path: Path) -> None:
    """In the table, in the CSV file and in the caption."""
    text = markdown(with_accuracies(runs, tmp_path, answers=True), tmp_path / "out")
    # differences 1, -1, -1 and seven times 0: mean -0.1, squares 3
    error = 100 * math.sqrt((3 - 10 * 0.1**2) / 9 / 10)
    assert f"| -10.00 ± {error:.2f} | no clear difference |" in text
    assert "its paired standard error" in text
    assert "unpaired" not in text.lower()
    (row,) = (row for row in csv_rows(tmp_path / "out" / "differences.csv") if row["measure"] == "t acc")
    assert (float(row["stderr"]), row["paired"]) == (pytest.approx(error), "true")


def test_errors_of_accuracies_are_named_unpaired(runs: Path, tmp_path: Path) -> None:
    """Wherever one is shown: with the counts, below both tables, and below the figure."""
    folders = with_accuracies(runs, tmp_path, answers=False)
    summary = report(folders, output=tmp_path / "out", no_plots=True)
    assert "\n‡ unpaired standard error" in summary.text
    text = (tmp_path / "out" / "report.md").read_text()
    (verdict,) = (each for study in summary.page.studies for each in study.verdicts if "t acc" in each)
    assert "EMP worse: 1 of 1, 1 clearly ‡" in verdict
    assert sum("‡" in each for study in summary.page.studies for each in study.verdicts) == 1
    points, differences = text.index("### All points"), text.index("### Differences")
    assert "unpaired" in text[points : text.index("### Is EMP better")]
    assert "unpaired" in text[differences : text.index("### Where")]
    (half,) = with_accuracies(runs, tmp_path, answers=False, names=("half",))  # with another sparsity, there is a curve to draw
    report([*folders, half], output=tmp_path / "three")
    text = (tmp_path / "three" / "report.md").read_text()
    caption = text[text.index("Perplexity, blocks of 64 against") :].splitlines()[0]
    assert "± two paired standard errors" in caption
    caption = text[text.index("T acc against") :].splitlines()[0]
    assert "± two unpaired standard errors" in caption
    assert "unpaired" in markdown([tmp_path / "emp"], tmp_path / "alone")
    assert "unpaired" not in markdown([runs / "emp"], tmp_path / "none")


def test_every_calibration_is_named(runs: Path, tmp_path: Path) -> None:
    values = report_of(runs / "wanda")
    values["calibration"]["text"]["samples"] = 5
    text = markdown([runs / "emp", runs / "wanda", save_run(tmp_path / "other", values)], tmp_path / "out")
    assert "- calibration: text.txt, 4 x 64 tokens; text.txt, 5 x 64 tokens\n" in text


def test_the_same_input_gives_the_same_bytes(page: Path, runs: Path, tmp_path: Path) -> None:
    """In another process with another hash seed."""
    environment = os.environ | {"PYTHONHASHSEED": "1234"}
    line = [sys.executable, "-m", "emp_llm.report", *(str(runs / name) for name in NAMES), "--output", "again"]
    done = subprocess.run(line, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "EMP better" in done.stdout
    files = sorted(path.relative_to(page) for path in page.rglob("*") if path.is_file())
    assert files == sorted(path.relative_to(tmp_path / "again") for path in (tmp_path / "again").rglob("*") if path.is_file())
    for file in files:
        assert (tmp_path / "again" / file).read_bytes() == (page / file).read_bytes(), file
    assert [path.name for path in tmp_path.iterdir()] == ["again"]


def test_hostile_names_are_escaped(runs: Path, tmp_path: Path) -> None:
    values = report_of(runs / "emp")
    values["source"]["model"] = values["evaluation"]["suite"] = HOSTILE
    values["recipe"]["targets"] = [HOSTILE]
    for entry in values["matrices"].values():
        entry["role"] = HOSTILE * 20 + entry["role"]
    folder = save_run(tmp_path / "run", values)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # matplotlib warns of missing room and unknown letters
        report([folder], output=tmp_path / "out", title=HOSTILE)
    check_page(tmp_path / "out" / "report.html")
    page = (tmp_path / "out" / "report.html").read_text()
    assert "&lt;script&gt;" in page
    assert not any(text in page for text in ("<script", "\x00", "\u202e"))
    figures = list((tmp_path / "out" / "figures").glob("*.svg"))
    assert len(figures) == 3  # none of the perplexity: there is no curve through one point
    for figure in figures:
        ElementTree.parse(figure)
    text = (tmp_path / "out" / "report.md").read_text()
    assert "<script" not in text.replace("\\<script", "")


def test_without_matplotlib_the_error_names_the_extra_and_tables_work(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UserError, match=r"pip install 'emp-llm\[plots\]'"):
        report([runs / "emp"], output=tmp_path / "out")
    assert not (tmp_path / "out").exists()
    report([runs / "emp"], output=tmp_path / "out", no_plots=True)
    names = ["matrices.csv", "points.csv", "report.html", "report.json", "report.md"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == names


def test_an_older_report_is_replaced_only_when_asked(runs: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    report([runs / "emp"], output=out, no_plots=True)
    (out / "points.csv").write_text("older")
    with pytest.raises(UserError, match="--overwrite"):
        report([runs / "emp"], output=out, no_plots=True)
    assert (out / "points.csv").read_text() == "older"
    report([runs / "emp"], output=out, no_plots=True, overwrite=True)
    assert (out / "points.csv").read_text() != "older"
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.tex").write_text("years of work")
    for overwrite in (False, True):
        with pytest.raises(UserError, match=r"it exists and holds no report\.json"):
            report([runs / "emp"], output=mine, no_plots=True, overwrite=overwrite)
    assert (mine / "thesis.tex").read_text() == "years of work"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "out"]


def test_an_infinite_perplexity_is_shown(runs: Path, tmp_path: Path) -> None:
    """In tables as a word, in CSV as inf, and the figures leave it out."""
    values = report_of(runs / "emp-0.5")
    values["evaluation"]["pruned"]["perplexity"] |= {"perplexity": None, "loss": 800.0}
    folders = [runs / "emp", runs / "uniform", save_run(tmp_path / "ruined", values), runs / "uniform-0.5"]
    summary = report(folders, output=tmp_path / "out")
    lines = (tmp_path / "out" / "report.md").read_text().splitlines()
    (row,) = (line for line in lines if line.startswith("| ruined |"))
    assert [cell.strip() for cell in row.split("|")[-3:-1]] == ["infinite", "+inf %"]
    (verdict,) = summary.page.studies[0].verdicts
    assert verdict.endswith("to +inf %")
    assert sum(math.isinf(float(row["value"])) for row in csv_rows(tmp_path / "out" / "points.csv")) == 1
    assert "inf" not in (tmp_path / "out" / "report.json").read_text().replace("+inf %", "")


def test_cells_are_no_formulas(runs: Path, tmp_path: Path) -> None:
    """Names come from checkpoints, and a spreadsheet computes cells that begin with these letters; numbers stay numbers."""
    name = '=HYPERLINK("http://x")'
    values = json.loads(json.dumps(report_of(runs / "wanda")).replace("model.layers.0.mlp.down_proj", json.dumps(name)[1:-1]))
    report([save_run(tmp_path / "run", values)], output=tmp_path / "out", no_plots=True)
    cells = {cell for row in csv_rows(tmp_path / "out" / "matrices.csv") for cell in row.values()}
    assert any(cell.startswith(f"'{name}") for cell in cells)
    assert not any(cell.startswith(tuple("=+-@")) for cell in cells)
    numbers = ["-1.5", "+2", "-inf", "-", "1e-3", ""]
    texts = ["=1", "+a", "-a", "@a", "\t=1"]
    assert list(csv.reader(StringIO(csv_table([numbers, texts, [-1.5]])))) == [
        numbers,
        [f"'{text}" for text in texts],
        ["-1.5"],
    ]
