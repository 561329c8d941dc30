"""What a run says of the damage: the perplexity of held-out text, and rows that keep next to
nothing.
"""

import errno
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from emp_llm import measure, prune, prune_model, recipe_of
from emp_llm.common.errors import UserError
from emp_llm.evaluation import evaluate
from emp_llm.records.base import read_record
from emp_llm.records.evaluation import CheckRecord, PerplexityRecord
from emp_llm.records.run_report import MadeBy, ModelIdentity, PrunedBy, Results, RunReport
from emp_llm.reporting.run_tables import check_lines, pruning_lines
from emp_llm.reporting.studies import compare, read_inputs

Models = Callable[[str], Path]
SAMPLES = 6
LENGTH = 32


def perplexity_by_hand(folder: Path, ids: torch.Tensor) -> float:
    """By a float64 model."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    with torch.no_grad():
        logits = model(ids).logits[:, :-1]
    losses = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none"
    )
    return math.exp(float(losses.mean()))


@pytest.mark.parametrize(
    "how",
    [
        {"method": "wanda"},
        {"method": "emp-magnitude", "refit": True},
        {"method": "sparsegpt", "heal": True, "heal_steps": 2},
        {"method": "wanda", "structure": "neurons", "sparsity": 0.25, "width_multiple": 8},
        {"method": "cosine", "structure": "layers", "sparsity": 0.5},
    ],
)
def test_the_perplexity_of_the_sequences_behind_the_text(
    tiny_llama: Path, text: Path, tmp_path: Path, how: dict[str, Any]
) -> None:
    source = tiny_llama
    prune(
        source,
        output=tmp_path / "out",
        calibration=str(text),
        samples=SAMPLES,
        seqlen=LENGTH,
        device_map="cpu",
        **how,
    )
    report = read_record(tmp_path / "out" / "emp_report.json", RunReport)
    ids = AutoTokenizer.from_pretrained(source)(text.read_text(), return_tensors="pt")["input_ids"]
    behind = ids[0, SAMPLES * LENGTH : (SAMPLES + 8) * LENGTH].view(8, LENGTH)
    assert report.check.dense.value == pytest.approx(perplexity_by_hand(source, behind), rel=0.01)
    assert report.check.pruned.value == pytest.approx(
        perplexity_by_hand(tmp_path / "out", behind), rel=0.01
    )
    assert report.check.dense.blocks == report.check.pruned.blocks == 8
    assert "check" in report.stages
    # In the tables of `report`, it is the result of a run without an evaluation.
    (point,) = read_inputs([tmp_path / "out"])[0]
    (suite,) = point.results
    (name,) = suite.values
    assert suite.suite.startswith("held-out text, dense ")
    assert suite.values[name].value == report.check.pruned.value
    assert point.dense[0].values[name].value == report.check.dense.value


def test_the_last_line_of_the_command(tiny_llama: Path, text: Path, command: Any) -> None:
    line = [
        f"prune {tiny_llama} --calibration {text} --samples {SAMPLES} --seqlen {LENGTH}",
    ]
    done = command(*line, "--output", "out")
    assert done.stdout.splitlines()[-1].startswith("held-out text, 8 x 32 tokens: perplexity 2")
    assert done.stdout.splitlines()[-1].endswith(" %)")
    done = command(*line, "--no-check", "--output", "unchecked")
    assert "held-out" not in done.stdout
    done = command(*line, "--evaluate", "x", "--check", "--output", "both", code=2)
    assert done.stdout == ""


def checked_at(pruned: float, **options: Any) -> list[str]:
    """The advice of a run whose dense perplexity is 10: the same at its end and in a table."""
    record = partial(PerplexityRecord, tokens=64, blocks=2, block_length=32)
    check = CheckRecord(dense=record(perplexity=10.0), pruned=record(perplexity=pruned))
    recipe = recipe_of(**options)
    run = SimpleNamespace(check=check, loss=None, recipe=recipe)
    budget = SimpleNamespace(check=check, loss=True, recipe=recipe)
    assert len(check_lines(budget)) == 1
    about = MadeBy(model=ModelIdentity())
    dense = Results(model="dense", made_by=about, perplexity=check.dense)
    after = Results(
        model="a/out", made_by=about, perplexity=check.pruned, pruned=PrunedBy(recipe=recipe)
    )
    lines = check_lines(run)[1:]
    in_table = [line for line in compare([dense, after]).splitlines() if "cost less" in line]
    assert in_table == [f"out: {line}" for line in lines]
    return lines


@pytest.mark.parametrize(
    ("options", "cheaper"),
    [
        ({}, "--method emp-admm --refit, --order 1 or --loss 2%"),
        ({"method": "emp-wanda", "order": 1.0}, "--method emp-admm --refit or --loss 2%"),
        ({"method": "wanda"}, "--method emp-admm --refit, removing less or --loss 2%"),
        ({"method": "magnitude", "pattern": "2:4"}, "--method admm --refit or --loss 2%"),
        ({"method": "emp-admm", "refit": True}, "--heal, --order 1 or --loss 2%"),
        ({"method": "best", "pattern": "2:4"}, "cost less: --loss 2%"),
        ({"method": "wanda", "shares": "cost"}, "--method admm --refit or removing less"),
        ({"method": "best", "sparsity": 0.6}, "removing less or --loss 2%"),
        (
            {"method": "emp-cosine", "structure": "layers", "sparsity": 0.5},
            "--refit, removing less or --loss 2%",
        ),
        ({"method": "wanda", "structure": "neurons"}, "--refit, removing less or --loss 2%"),
        (
            {"structure": "neurons", "beta": 1},
            "--method emp-taylor --refit, --order 1 or --loss 2%",
        ),
        (
            {"structure": "heads", "beta": 1, "refit": True},
            "--method emp-taylor, --order 1 or --loss 2%",
        ),
        ({"structure": "both", "method": "emp-taylor"}, "--refit, --order 1 or --loss 2%"),
        ({"structure": "layers", "method": "cosine"}, "--refit, removing less or --loss 2%"),
    ],
)
def test_a_large_rise_names_what_costs_less(options: dict[str, Any], cheaper: str) -> None:
    (line,) = checked_at(15.1, **options)
    assert line.endswith(cheaper)
    assert checked_at(14.9, **options) == []
    assert checked_at(math.inf, **options)


def test_a_run_that_needs_no_text_is_checked_on_a_named_one(
    tiny_llama: Path, text: Path, llama_norms: Path, command: Any
) -> None:
    line = [f"prune --output out --overwrite {tiny_llama}"]
    named = ["--calibration", text, "--samples", SAMPLES, "--seqlen", LENGTH]
    for how in (["--method", "magnitude"], ["--activations", llama_norms]):
        done = command(*line, *how)
        assert done.stdout.splitlines()[-1] == "damage not measured: give --calibration"
        assert "damage" not in command(*line, *how, "--no-check").stdout
        done = command(*line, *how, *named)
        assert done.stdout.splitlines()[-1].startswith("held-out text, 8 x 32 tokens: perplexity ")
        assert "no effect" not in done.stderr


def test_a_model_in_memory_is_checked(tiny_llama: Path, text: Path, tmp_path: Path) -> None:
    """By the numbers of the command, on whatever of the data follows the calibration."""
    source = tiny_llama
    how = {"samples": SAMPLES, "seqlen": LENGTH}
    prune(source, output=tmp_path / "out", calibration=str(text), device_map="cpu", **how)
    wanted = read_record(tmp_path / "out" / "emp_report.json", RunReport).check
    tokenizer = AutoTokenizer.from_pretrained(source)
    ids = torch.tensor(tokenizer(text.read_text())["input_ids"])
    ids = ids[: len(ids) // LENGTH * LENGTH].view(-1, LENGTH)
    for method in ("emp-wanda", "magnitude"):
        for data in (str(text), [text.read_text()], ids):
            model = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
            report = prune_model(model, method, data, tokenizer, **how)
            found = report.record.check
            assert found.dense == wanted.dense
            assert found.text == (text.name if isinstance(data, str) else None)
            if method == "emp-wanda":
                assert found.pruned == wanted.pruned
            assert "held-out text: perplexity " in repr(report)
    model = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    report = prune_model(model, "magnitude")
    assert report.record.check is None
    assert repr(report).splitlines()[-1].startswith("damage not measured: give data")


def test_where_nothing_is_measured(
    tiny_llama: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    def checked(name: str, **how: Any) -> object:
        report = prune(tiny_llama, output=tmp_path / name, **how)
        return report.check

    how = {"calibration": str(text), "samples": SAMPLES, "seqlen": LENGTH}
    assert checked("without text", method="magnitude") is None
    short = tmp_path / "short.txt"
    short.write_text("".join(text.read_text().splitlines(keepends=True)[:20]))
    assert (
        checked("at the end of the text", calibration=str(short), samples=26, seqlen=LENGTH) is None
    )
    with pytest.raises(
        UserError,
        match=r"--check measures text after that of the calibration, and this run reads none",
    ):
        checked("asked for", method="magnitude", check=True)
    for dry_run in (False, True):
        with pytest.raises(UserError, match=r"--check: --evaluate measures both models"):
            checked("asked for", check=True, evaluate="demo", dry_run=dry_run, **how)

    def fail(*_: Any, **__: Any) -> None:
        raise UserError("the model's loss is not finite")

    monkeypatch.setattr(evaluate, "perplexity", fail)
    assert checked("without a number", **how) is None
    assert (
        "the perplexity of held-out text was not measured: the model's loss is not finite"
    ) in caplog.text

    def fault(*_: Any, **__: Any) -> None:
        try:
            raise OSError(errno.EIO, "Input/output error")
        except OSError as error:
            raise UserError("config.json cannot be read") from error

    # The same command, run again, has the number.
    monkeypatch.setattr(evaluate, "perplexity", fault)
    with pytest.raises(UserError, match=r"config\.json cannot be read"):
        checked("on a failing disk", **how)


def test_a_mix_of_texts_has_some_of_each(
    tiny_llama: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other.txt"
    other.write_text(text.read_text()[5000:])
    seen = []
    measure = evaluate.perplexity

    def perplexity_of(model: Any, tokens: torch.Tensor, *more: Any, **how: Any) -> Any:
        seen.append(tokens)
        return measure(model, tokens, *more, **how)

    monkeypatch.setattr(evaluate, "perplexity", perplexity_of)
    prune(tiny_llama, output=tmp_path / "out", calibration=f"{text}:4,{other}:3", seqlen=LENGTH)
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    first, second = (
        torch.tensor(tokenizer(each.read_text())["input_ids"]) for each in (text, other)
    )
    wanted = [first[4 * LENGTH : 8 * LENGTH], second[3 * LENGTH : 7 * LENGTH]]
    assert torch.equal(seen[0], torch.cat(wanted))


def dominated(folder: Path, models: Models) -> Path:
    """A model in which one input of a layer carries most scores."""
    model = AutoModelForCausalLM.from_pretrained(models("llama"))
    model.model.layers[1].mlp.down_proj.weight.data[:, 5] = 1000
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(models("llama")).save_pretrained(folder)
    return folder


def test_rows_that_starve_are_said(
    models: Models, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = dominated(tmp_path / "model", models)
    reports = {}
    for order in (2.0, 1.0):
        report = prune(source, method="emp-magnitude", order=order, output=tmp_path / f"{order}")
        assert isinstance(report, RunReport)
        reports[order] = report
    first = reports[2.0]
    rows = sum(entry.rows for entry in first.matrices.values())
    starved = first.matrices["model.layers.1.mlp.down_proj"]
    assert starved.kept_fraction.max < 0.05
    removed = [f"{100 * reports[order].targets.sparsity_of_targets:.2f} %" for order in (1.0, 2.0)]
    assert first.warnings[0].startswith(
        f"{starved.rows} of {rows} rows keep less than 5 % of their weights, in 1 of "
        f"{len(first.matrices)} matrices: a few inputs carry their scores (in "
        "model.layers.1.mlp.down_proj, input 5 has 9"
    )
    assert first.warnings[0].endswith(
        f"Instead of {removed[1]}, --order 1 would remove {removed[0]}."
    )
    assert first.warnings[0] in caplog.text
    scaled = prune(source, method="emp-magnitude", sparsity=0.4, output=tmp_path / "scaled")
    assert scaled.warnings[0].endswith("--order 1 removes as much, more evenly.")
    # Where order 1 would remove more, or is not known, it is not offered.
    for change in ({"order": 0.5}, {"neff_dtype": "bfloat16"}):
        report = prune(
            source, method="emp-magnitude", output=tmp_path / "small", overwrite=True, **change
        )
        assert report.warnings[0].endswith("removes the same share of every row.")
    assert caplog.text.count(first.warnings[0]) == 1
    # `measure` says it before anything is pruned.
    measured = measure(source, criteria="magnitude", output=tmp_path / "measure.json")
    assert measured.measures[0].warnings[0] == first.warnings[0]
    assert f"emp-magnitude: {first.warnings[0]}" in caplog.text
    # The same in memory; and where no row starves, or the user asks for so few, nothing is said.
    model = AutoModelForCausalLM.from_pretrained(source)
    assert (
        prune_model(model, recipe_of(method="emp-magnitude")).record.warnings[0]
        == first.warnings[0]
    )
    for how in (
        {"method": "magnitude", "sparsity": 0.97},
        {"method": "emp-magnitude", "ignore": "down_proj"},
    ):
        report = prune(source, output=tmp_path / "other", overwrite=True, **how)  # type: ignore[arg-type]
        assert not any("rows keep less" in warning for warning in report.warnings)


@pytest.mark.parametrize(("sparsity", "says"), [(0.05, True), (0.5, False)])
def test_zeros_that_save_little_are_compared_with_8_bits(
    tiny_llama: Path, tmp_path: Path, sparsity: float, says: bool
) -> None:
    """A bit for each weight costs 6 % of bfloat16, so a few zeros save nothing."""
    how = {"method": "magnitude", "targets": "all-linear", "sparsity": sparsity}
    prune(tiny_llama, output=tmp_path / "out", check=False, **how)
    report = read_record(tmp_path / "out" / "emp_report.json", RunReport)
    lines = [line for line in pruning_lines(report) if "in 8 bits" in line]
    assert len(lines) == says
