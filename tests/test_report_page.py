"""The page and figures of `report` as files, and its errors for wrong input: one sentence that
names file, field and rule.
"""

import base64
import csv
import json
import logging
import math
import os
import re
import shutil
import subprocess
import sys
import warnings
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from conftest import Run
from PIL import Image
from runs import NAMES, report_of, save_run

from emp_llm import report
from emp_llm.common.errors import UserError
from emp_llm.common.tables import csv_table
from emp_llm.evaluation.comparison import sign_change
from emp_llm.records.run_report import read_report

HOSTILE = "<script>alert('x')</script> $\\frac{$ & |a|_b_\x00\u202e\"quoted\""


def markdown(runs: list[Path], output: Path, **options: Any) -> str:
    report(runs, output=output, no_plots=True, **options)
    return (output / "report.md").read_text()


def csv_rows(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def page(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("page") / "report"
    report([runs / name for name in NAMES], output=output)
    return output


def test_files_are_valid(page: Path, runs: Path) -> None:
    figures = {path.stem for path in (page / "figures").iterdir()}
    assert figures == {"llama-perplexity-blocks-of-64"}
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
    text = (page / "report.md").read_text()
    assert [text.count(mark) for mark in ("\n# ", "\n![", "\n|---|")] == [0, 1, 1]
    assert text.startswith("# Effective Model Pruning\n")
    rows = csv_rows(page / "points.csv")
    assert len(rows) == 7
    for row in rows[1:]:
        values = report_of(runs / row["point"])
        assert float(row["value"]) == values["evaluation"]["pruned"]["perplexity"]["perplexity"]
        assert float(row["sparsity_of_targets"]) == values["targets"]["sparsity_of_targets"]
    values = {row["point"]: float(row["value"]) for row in rows}
    against = {row["point"]: row["against"] for row in rows if row["against"]}
    assert against == {"uniform-0.5": "emp-0.5", "uniform": "emp"}
    for row in rows[1:]:
        changes = [(row["change"], "dense")]
        changes += [(row["difference"], row["against"])] if row["against"] else []
        for change, base in changes:
            assert float(change) == pytest.approx(100 * (float(row["value"]) / values[base] - 1))


def test_the_page_begins_with_what_was_pruned_its_cost_and_the_baseline(
    page: Path, runs: Path, tmp_path: Path
) -> None:
    text = (page / "report.md").read_text()
    places = [text.index(part) for part in ("- model: ", "### Is EMP better", "\n![")]
    assert places == sorted(places)
    dense, pruned = (
        report_of(runs / "emp")["evaluation"][which]["perplexity"]["perplexity"]
        for which in ("dense", "pruned")
    )
    base = report_of(runs / "uniform")["evaluation"]["pruned"]["perplexity"]["perplexity"]
    targets = report_of(runs / "emp")["targets"]
    share, of_all = (
        f"{100 * targets[name]:.2f}"
        for name in ("sparsity_of_targets", "sparsity_of_all_parameters")
    )
    cost, gain = (sign_change(100 * (pruned / other - 1)) for other in (dense, base))
    row = f"| emp | EMP-magnitude | 1 | {share} | {of_all} | {pruned:.3f} | {cost} ± "
    assert row in text
    assert f"| uniform | magnitude, uniform rows |  | {share} | {of_all} | {base:.3f} | " in text
    assert "| against EMP-magnitude |" in text
    named = markdown([runs / "emp", runs / "uniform"], tmp_path / "named", against="magnitude")
    line = next(line for line in named.splitlines() if line.startswith("| emp |"))
    assert f"| {gain} ± " in line


def test_the_page_without_evaluation_says_so(runs: Path, tmp_path: Path) -> None:
    values = report_of(runs / "emp")
    del values["evaluation"]
    text = markdown([save_run(tmp_path / "run", values)], tmp_path / "out")
    assert "Not evaluated. The option --evaluate of prune" in text


@pytest.mark.parametrize(("names", "asks"), [(("emp", "uniform"), 1), (("half", "uniform"), 0)])
def test_a_heading_asks_about_emp_where_it_is_compared(
    runs: Path, tmp_path: Path, names: tuple[str, str], asks: int
) -> None:
    """Otherwise the page says EMP nowhere but in its title."""
    text = markdown([runs / name for name in names], tmp_path / "out")
    assert text.count("### Is EMP better at the same sparsity?") == asks
    assert text.count("### All points") == 1 - asks
    assert asks or "EMP" not in text


def test_a_single_sparsity_is_drawn_as_bars(runs: Path, tmp_path: Path) -> None:
    """A bar for each point, with its value; lines have markers."""
    drawn = {}
    for names in (("emp", "uniform"), ("emp", "uniform", "half")):
        report([runs / name for name in names], output=tmp_path / f"{len(names)}")
        (figure,) = (tmp_path / f"{len(names)}" / "figures").glob("*.svg")
        drawn[len(names)] = figure.read_text()
    values = [report_of(runs / name)["evaluation"]["pruned"] for name in ("emp", "uniform")]
    assert all(f">{value['perplexity']['perplexity']:.4g}<" in drawn[2] for value in values)
    assert ["weights removed, %" in drawn[count] for count in (2, 3)] == [False, True]
    text = (tmp_path / "2" / "report.md").read_text()
    assert re.search(r"\nPerplexity, blocks of 64 at \d+ % of weights removed; ±: two stand", text)


def with_accuracies(runs: Path, folder: Path, answers: bool) -> list[Path]:
    """An EMP run and its baseline with 10 answers to a task: 5 and 6 of them correct, on 3
    examples another one.
    """
    folders = []
    for name, correct in (("emp", "1111100000"), ("uniform", "1111011000")):
        values = report_of(runs / name)
        if name == "uniform":
            values["recipe"]["counts"] = {"share": {"sparsity": 0.5}}
        bits = base64.b64encode(int(correct.ljust(16, "0"), 2).to_bytes(2)).decode()
        for which in ("dense", "pruned"):
            task = {
                "results": {"t": {"acc,none": correct.count("1") / 10, "acc_stderr,none": 0.03}},
                "n-samples": {"t": {"original": 10, "effective": 10}},
            }
            held = {"t": {"examples": 10, "sha256": "ten", "correct": {"acc,none": bits}}}
            values["evaluation"][which]["tasks"] = {
                "t": task | ({"answers": held} if answers else {})
            }
        folders.append(save_run(folder / name, values))
    return folders


def test_errors_of_accuracies_are_named_unpaired(runs: Path, tmp_path: Path) -> None:
    """Below the table; answers to the same examples are paired."""
    folders = with_accuracies(runs, tmp_path, answers=False)
    summary = report(folders, output=tmp_path / "out", no_plots=True, against="magnitude")
    assert "\n‡ unpaired standard error" in summary.text
    row = next(line for line in summary.text.splitlines() if line.startswith("emp "))
    assert "‡" in row
    assert "unpaired" in (tmp_path / "out" / "report.md").read_text()
    folders = with_accuracies(runs, tmp_path, answers=True)
    text = markdown(folders, tmp_path / "paired", against="magnitude")
    # differences 1, -1, -1 and seven times 0: mean -0.1, squares 3
    error = 100 * math.sqrt((3 - 10 * 0.1**2) / 9 / 10)
    assert f"| -10.00 ± {error:.2f} |" in text
    assert "± paired standard error" in text
    assert "unpaired" not in text.lower()
    rows = csv_rows(tmp_path / "paired" / "points.csv")
    (row,) = (row for row in rows if (row["measure"], row["point"]) == ("t acc", "emp"))
    found = (row["against"], float(row["difference_stderr"]), row["difference_paired"])
    assert found == ("uniform", pytest.approx(error), "true")


def test_the_same_input_gives_the_same_bytes(runs: Path, tmp_path: Path) -> None:
    """In another process with another hash seed."""
    folders = [runs / name for name in NAMES]
    report(folders, output=tmp_path / "one", no_plots=True)
    line = [
        sys.executable,
        "-m",
        "emp_llm",
        "report",
        *map(str, folders),
        "--no-plots",
        "--output",
        "two",
    ]
    environment = os.environ | {"PYTHONHASHSEED": "1234"}
    done = subprocess.run(
        line, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "against EMP-magnitude" in done.stdout
    one, two = (
        {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()}
        for name in ("one", "two")
    )
    assert one == two


def test_hostile_names_are_escaped(runs: Path, tmp_path: Path) -> None:
    values = report_of(runs / "emp")
    values["source"]["model"] = values["evaluation"]["suite"] = HOSTILE
    values["recipe"]["targets"]["layers"] = [HOSTILE]
    other = json.loads(json.dumps(values))
    other["evaluation"]["pruned"]["perplexity"]["perplexity"] *= 2
    folders = [save_run(tmp_path / "run", values), save_run(tmp_path / "run $2$", other)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # matplotlib warns of missing room and unknown letters
        report(folders, output=tmp_path / "out", title=HOSTILE)
    figures = list((tmp_path / "out" / "figures").glob("*.svg"))
    assert len(figures) == 1
    for figure in figures:
        ElementTree.parse(figure)
    text = (tmp_path / "out" / "report.md").read_text()
    assert "<script" not in text.replace("\\<script", "")
    assert not any(letter in text for letter in ("\x00", "\u202e"))


def test_without_matplotlib_the_error_names_the_extra_and_tables_work(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UserError, match=r"pip install matplotlib"):
        report([runs / "emp", runs / "half"], output=tmp_path / "out")
    assert not (tmp_path / "out").exists()
    report([runs / "emp"], output=tmp_path / "out", no_plots=True)
    names = ["points.csv", "report.json", "report.md"]
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
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("years of work")
    with pytest.raises(UserError, match=r"it exists and holds no report\.json"):
        report([runs / "emp"], output=tmp_path / "mine", no_plots=True, overwrite=True)
    assert (tmp_path / "mine" / "thesis.tex").read_text() == "years of work"


def test_an_infinite_perplexity_is_shown(runs: Path, tmp_path: Path) -> None:
    """In tables as a word, in CSV as inf, and the figures leave it out."""
    values = report_of(runs / "emp-0.5")
    values["evaluation"]["pruned"]["perplexity"] |= {"perplexity": None, "loss": 800.0}
    folders = [
        runs / "emp",
        runs / "uniform",
        save_run(tmp_path / "ruined", values),
        runs / "uniform-0.5",
    ]
    summary = report(folders, output=tmp_path / "out")
    lines = (tmp_path / "out" / "report.md").read_text().splitlines()
    (row,) = (line for line in lines if line.startswith("| ruined |"))
    assert [cell.strip() for cell in row.split("|")[-4:-2]] == ["infinite", "+inf %"]
    assert "+inf %" in summary.text
    assert (
        sum(math.isinf(float(row["value"])) for row in csv_rows(tmp_path / "out" / "points.csv"))
        == 1
    )


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


@pytest.mark.parametrize(
    ("says", "spoil"),
    [
        (
            "holds neither sweep.jsonl nor emp_report.json",
            lambda folder: (folder / "emp_report.json").unlink(),
        ),
        ("cannot be read as JSON", lambda folder: (folder / "emp_report.json").write_text("{")),
        (
            "this is not the output of prune",
            lambda folder: (folder / "emp_report.json").write_text("{}"),
        ),
        (
            r"kept_fraction\.q1: expected float, got str",
            broken(lambda r: first(r)["kept_fraction"].update(q1="much")),
        ),
        (r"\.rows: expected int >= 0", broken(lambda r: first(r).update(rows=-1))),
        ("matrices: expected object, got array", broken(lambda r: r.update(matrices=[1]))),
        (
            "targets: missing field sparsity_of_targets",
            broken(lambda r: r["targets"].pop("sparsity_of_targets")),
        ),
        (
            "perplexity: missing field block_length",
            broken(lambda r: r["evaluation"]["dense"]["perplexity"].pop("block_length")),
        ),
    ],
)
def test_wrong_runs_are_refused_in_one_sentence(
    runs: Path, tmp_path: Path, says: str, spoil: Callable[[Path], None]
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    shutil.copy(runs / "emp" / "emp_report.json", folder)
    spoil(folder)
    with pytest.raises(UserError, match=says) as caught:
        report([folder], output=tmp_path / "out", no_plots=True)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_no_input_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"No run is given. Name outputs of prune, sweep, bench or"):
        report([], output=tmp_path / "out", no_plots=True)
    assert not (tmp_path / "out").exists()


def test_a_missing_input_is_named_before_the_output(
    runs: Path, command: Run, tmp_path: Path
) -> None:
    """Also if the default output, `report`, exists and is something else."""
    (tmp_path / "sweep.jsonl").write_text("{}")
    assert "sweep.jsonl: its first line does not" in command("report", tmp_path, code=2).stderr
    (tmp_path / "report").mkdir()
    (tmp_path / "report" / "thesis.tex").write_text("years of work")
    done = command("report", "nope", code=2)
    assert done.stderr.startswith(
        "error: nope: no such file or folder; give the output of prune, sweep or bench"
    )
    assert "--output" not in done.stderr
    done = command("report", "report", code=2)
    assert done.stderr.startswith("error: report: it holds neither sweep.jsonl nor emp_report.json")


def test_cells_are_no_formulas(runs: Path, tmp_path: Path) -> None:
    """Names come from users, and a spreadsheet computes cells that begin with these
    letters; numbers stay numbers.
    """
    name = '=HYPERLINK("http:..x")'
    folder = save_run(tmp_path / name, report_of(runs / "wanda"))
    report([folder], output=tmp_path / "out", no_plots=True)
    cells = {cell for row in csv_rows(tmp_path / "out" / "points.csv") for cell in row.values()}
    assert any(cell.startswith(f"'{name}") for cell in cells)
    assert not any(cell.startswith(tuple("=+-@")) for cell in cells)
    numbers = ["-1.5", "+2", "-inf", "-", "1e-3", ""]
    texts = ["=1", "+a", "-a", "@a", "\t=1", "a\x1b[31mb\rc"]
    assert list(csv.reader(StringIO(csv_table([numbers, texts, [-1.5]])))) == [
        numbers,
        ["'=1", "'+a", "'-a", "'@a", "'�=1", "a�[31mb�c"],
        ["-1.5"],
    ]


def test_a_page_names_no_folders_of_its_writer(
    runs: Path, text: Path, tmp_path: Path, command: Run
) -> None:
    """Not of the model, nor of the text that judged it. And matplotlib has nothing to say."""
    model = read_report(runs / NAMES[0]).source.model
    assert Path(model).is_absolute()
    suite = f"perplexity,file={text},seqlen=32,limit=2"
    judged = command("evaluate", runs / NAMES[0], "--baseline", model, "--suite", suite)
    made = sorted(path.name for path in tmp_path.iterdir())
    start = f"{NAMES[0]}-perplexity-file={text.name}-seqlen=32"
    assert made == [f"{start}-baseline.json", f"{start}.json"]
    command("report", runs / NAMES[0], runs / "half", *made, "--output", "page")
    assert not logging.getLogger("matplotlib.font_manager").isEnabledFor(logging.INFO)
    pages = [path.read_text() for path in (tmp_path / "page").rglob("*.[mcs]*") if path.is_file()]
    assert len(pages) >= 3
    folders = {str(text.parent), str(Path(model).parent), str(runs)}
    for page in [judged.stdout, *pages]:
        assert not [folder for folder in folders if folder in page]
