"""A statistic that the package does not know: one entry in a table, and it goes through the
commands.
"""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from runs import check_verified
from transformers import AutoModelForCausalLM, AutoTokenizer

from emp_llm import calibrate, measure, prune, prune_model, recipe_of, report, sweep, verify
from emp_llm.calibration import activations
from emp_llm.calibration.activations import Activations, InputSums
from emp_llm.common.errors import UserError
from emp_llm.options.recipe import Score
from emp_llm.selection.criteria import STATISTICS, Criterion, Statistic

Models = Callable[[str], Path]
CODE = """
def bulk(weight, *, cubes):
    return weight.float().abs() * cubes


def spread(weight, inputs, *, variance, mean):
    assert inputs.tokens == 256 and inputs.norms.shape == mean.shape
    return weight.float().square() * variance + mean.abs()


def peak(weight, *, maximum):
    return weight.float().abs() * maximum


def lost(weight, *, median):
    return weight
"""
# The scores of each criterion in float64: of the weights, and of the inputs of shape (tokens,
# inputs).
EXPECTED: dict[str, Callable[[oracle.Array, oracle.Array], oracle.Array]] = {
    "bulk": lambda weight, x: np.abs(weight) * np.cbrt((np.abs(x) ** 3).mean(0)),
    "spread": lambda weight, x: weight**2 * x.var(0) + np.abs(x.mean(0)),
    "peak": lambda weight, x: np.abs(weight) * np.abs(x).max(0),
}


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cubes = Statistic(
        "cubes",
        total=lambda batch: batch.inputs.double().abs().pow(3).sum(0),
        value=lambda total, tokens: (total / tokens).pow(1 / 3),
    )
    monkeypatch.setitem(STATISTICS, "cubes", cubes)
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(CODE)


@pytest.fixture
def common(tiny_llama: Path, text: Path) -> dict[str, Any]:
    return {
        "model": str(tiny_llama),
        "calibration": str(text),
        "samples": 4,
        "seqlen": 64,
        "batch_size": 2,
        "device_map": "cpu",
    }


def inputs_of(source: Path, text: Path, layers: list[str]) -> dict[str, oracle.Array]:
    """The inputs of layers over the calibration tokens, float64, shape (tokens, inputs)."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    ids = AutoTokenizer.from_pretrained(source)(text.read_text())["input_ids"]
    seen = {name: [] for name in layers}
    for name in layers:

        def hook(_: Any, args: Any, output: Any, name: str = name) -> None:
            seen[name].append(args[0].double().flatten(0, 1).numpy())

        model.get_submodule(name).register_forward_hook(hook)
    with torch.no_grad():
        for batch in torch.tensor(ids[:256]).reshape(4, 64).split(2):
            model(batch, use_cache=False)
    return {name: np.concatenate(batches) for name, batches in seen.items()}


@pytest.mark.parametrize("execution", ["model", "blocks"])
@pytest.mark.parametrize("name", EXPECTED)
def test_it_goes_through_the_commands(
    common: dict[str, Any], text: Path, tmp_path: Path, name: str, execution: Any
) -> None:
    source = Path(common["model"])
    criterion = f"mine.py:{name}"
    out = tmp_path / "out"
    written = prune(output=out, criterion=criterion, execution=execution, **common)
    assert written.recipe.method == f"emp-{name}"
    findings = verify(out, source=str(source), criterion=criterion)
    assert (findings.differences, findings.checked["targets"]) == ([], len(written.matrices))

    stored = {layer: entry.tensor for layer, entry in written.matrices.items()}
    for layer, inputs in inputs_of(source, text, list(stored)).items():
        scores = EXPECTED[name](oracle.weight(source, stored[layer]), inputs)
        kept = oracle.weight(out, stored[layer]) != 0
        np.testing.assert_array_equal(kept, oracle.row_masks(scores, True), err_msg=layer)

    in_memory = prune_model(
        AutoModelForCausalLM.from_pretrained(source, dtype="auto"),
        recipe_of(criterion=criterion),
        str(text),
        str(source),
        samples=4,
        seqlen=64,
        batch_size=2,
    )
    assert in_memory.record.targets.kept == written.targets.kept
    for layer, name_of_tensor in stored.items():
        mask = in_memory.masks[f"{layer}.weight"].numpy()
        np.testing.assert_array_equal(oracle.weight(out, name_of_tensor) != 0, mask, err_msg=layer)
    report(runs=[out], output=tmp_path / "page", no_plots=True)
    assert any(name in path.read_text() for path in (tmp_path / "page").glob("*.md"))


def test_a_built_in_criterion_reads_it(
    common: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A function, and a node of the recipe."""

    def bulk(weight: torch.Tensor, *, cubes: torch.Tensor) -> torch.Tensor:
        return weight.float().abs() * cubes

    prune(output=Path("own"), method="bulk", criterion="mine.py:bulk", **common)
    monkeypatch.setattr(Score, "kinds", {**Score.kinds})

    class Bulk(Score):
        name = "bulk"
        criterion = Criterion("bulk", bulk, statistics=("cubes",))

    of_node = prune(output=Path("node"), method="bulk", **common)
    check_verified(Path("node"), common["model"])
    assert type(of_node.recipe.score) is Bulk
    for stored in (entry.tensor for entry in of_node.matrices.values()):
        ours, theirs = (oracle.weight(Path(folder), stored) for folder in ("node", "own"))
        np.testing.assert_array_equal(ours, theirs)


def test_a_file_of_all_of_them(common: dict[str, Any], tmp_path: Path) -> None:
    """It serves every criterion, and the norms in it are those of a file without them."""
    every = calibrate(output=Path("every"), statistics=",".join(STATISTICS), **common)
    plain = calibrate(output=Path("plain"), **common)
    assert Activations.load(Path("every")).digest == every.digest != plain.digest
    norms = {name: every.statistics[name] for name in ("norm", "relative")}
    replace(every, statistics=norms).save(Path("norms"))
    assert Path("norms").read_bytes() == Path("plain").read_bytes()
    model = common["model"]
    for name in EXPECTED:
        criterion = f"mine.py:{name}"
        of_text = prune(output=Path(name), criterion=criterion, **common)
        of_file = prune(model, output=Path("file"), criterion=criterion, activations=Path("every"))
        assert {layer: entry.kept for layer, entry in of_text.matrices.items()} == {
            layer: entry.kept for layer, entry in of_file.matrices.items()
        }
        shutil.rmtree("file")
        with pytest.raises(UserError, match=r"plain: it has no \w+ of the inputs.*--statistics"):
            prune(model, output=Path("no"), criterion=criterion, activations=Path("plain"))


def test_sweep_and_measure_collect_it(common: dict[str, Any], task_suite: Path) -> None:
    given = common | {"criterion": "mine.py:bulk"}
    suite = str(task_suite.with_name("short.toml"))
    options = {"methods": "emp-bulk,wanda", "betas": "1", "suite": suite}
    swept = sweep(**given, **options, output=Path("sweep"))
    of_text = measure(**given, output=Path("measure.json"))
    bulk = next(point for point in swept.points if point.point.name == "emp-bulk-beta-1")
    assert of_text.measures[-1].criterion == "bulk"
    assert of_text.measures[-1].targets.sparsity_of_targets == bulk.targets.sparsity_of_targets
    # with pruned propagation too
    assert prune(output=Path("pruned"), propagate="pruned", **given).targets.kept


def test_an_expert_without_tokens(models: Models, text: Path) -> None:
    """Statistics over no tokens are zero, and its weights are scored by magnitude."""
    model = str(models("mixtral"))
    of_few = calibrate(
        model,
        calibration=str(text),
        samples=1,
        seqlen=2,
        output=Path("few"),
        device_map="cpu",
        statistics="mean,variance,maximum",
    )
    unseen = [layer for layer in of_few.input_of if of_few.tokens_of(layer) == 0]
    assert unseen
    for statistic in ("norm", "relative", "mean", "variance", "maximum"):
        values = [of_few.of(layer, statistic) for layer in unseen]
        assert all(value is not None and not value.any() for value in values), statistic


def test_ranks_combine_it(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = torch.randn(8, 6, 5, generator=torch.Generator().manual_seed(0)) + 1
    whole, *of_ranks = (InputSums(STATISTICS) for _ in range(3))
    for number, batch in enumerate(inputs):
        for sums in (whole, of_ranks[number % 2]):
            sums.observe("layer", batch, batch[..., :3])
    shown = []

    def gather(value: Any) -> list[Any]:
        shown.append(value)
        return shown

    monkeypatch.setattr(activations, "ranks", lambda: SimpleNamespace(count=2, gather=gather))
    for sums in of_ranks:
        sums.reduce()
    combined = of_ranks[1].activations([SimpleNamespace(name="layer")])
    wanted = whole.activations([SimpleNamespace(name="layer")])
    assert combined.tokens == wanted.tokens == {"layer": 48}
    assert combined.statistics.keys() == wanted.statistics.keys() == STATISTICS.keys()
    for statistic, values in wanted.statistics.items():
        torch.testing.assert_close(combined.of("layer", statistic), values["layer"])
    flat = inputs.double().flatten(0, 1)
    torch.testing.assert_close(combined.of("layer", "variance"), flat.var(0, correction=0).float())


def test_an_unknown_one_is_named(common: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"lost asks for median, which is no statistic .* maximum"):
        prune(output=Path("out"), criterion="mine.py:lost", **common)
    with pytest.raises(UserError, match="--statistics: 'median' is not one of norm, relative"):
        calibrate(output=Path("out"), statistics="mean, median", **common)
