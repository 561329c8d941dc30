"""`evaluate --activation-emp`: tokens keep the effective number of their hidden features; every family, results, reports."""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mixtures
import numpy as np
import oracle
import pytest
import tiny
import torch
import transformers
from conftest import Run
from suites import Models
from torch import Tensor, nn
from transformers import PreTrainedModel

from emp_llm.common.errors import UserError
from emp_llm.evaluate import evaluate
from emp_llm.gating.token_pruning import keep_effective_features, pruned_features
from emp_llm.prune import prune
from emp_llm.records.base import read_record
from emp_llm.records.results import Results
from emp_llm.report import report

# The layers that read hidden features, written down by hand.
READERS = dict.fromkeys(tiny.FAMILIES, "model.layers.{}.mlp.down_proj") | {
    "gpt2": "transformer.h.{}.mlp.c_proj",
    "opt": "model.decoder.layers.{}.fc2",
    "gpt_neox": "gpt_neox.layers.{}.mlp.dense_4h_to_h",
    "mixtral": "model.layers.{}.mlp.experts.down_proj",
    "qwen3_moe": "model.layers.{}.mlp.experts.down_proj",
}
DENSE = [family for family in READERS if family not in tiny.MIXTURES]


@pytest.fixture(scope="module")
def loaded(models: Models) -> Callable[[str], PreTrainedModel]:
    made: dict[str, PreTrainedModel] = {}

    def load(family: str) -> PreTrainedModel:
        if family not in made:
            made[family] = mixtures.load(models(family))
        return made[family]

    return load


def tokens() -> Tensor:
    return torch.randint(3, 256, (3, 20), generator=torch.Generator().manual_seed(0))


def kept_by_oracle(features: Tensor, beta: float) -> Tensor:
    """Features, shape (..., N), with those set to zero that Algorithm 1 does not keep: in float64, token by token."""
    rows = features.detach().double().abs().reshape(-1, features.shape[-1]).numpy()
    masks = np.stack([oracle.keep(row, oracle.count(row, beta)) for row in rows]) if len(rows) else rows.astype(bool)
    return torch.where(torch.from_numpy(masks).reshape(features.shape), features, 0)


@pytest.mark.parametrize("beta", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("family", DENSE)
def test_each_token_keeps_its_effective_number(loaded: Callable[[str], PreTrainedModel], family: str, beta: float) -> None:
    model, before, after = loaded(family), dict[str, Tensor](), dict[str, Tensor]()
    names = [READERS[family].format(number) for number in range(2)]

    def note(into: dict[str, Tensor], name: str) -> Callable[..., None]:
        return lambda module, args, *_: into.__setitem__(name, args[0].clone())

    handles = [model.get_submodule(name).register_forward_pre_hook(note(before, name)) for name in names]
    handles += [model.get_submodule(name).register_forward_hook(note(after, name)) for name in names]
    try:
        with torch.no_grad(), pruned_features(model, beta) as counts:
            model(tokens())
    finally:
        for handle in handles:
            handle.remove()
    found = counts.gathered()
    assert list(found) == names
    for name in names:
        wanted = kept_by_oracle(before[name], beta)
        assert torch.equal(after[name], wanted)
        zeros_before = (before[name] == 0).sum()  # of a ReLU: kept or not, they stay zero
        assert (found[name].tokens, found[name].width) == (60, before[name].shape[-1])
        rows = before[name].double().abs().reshape(60, -1).numpy()
        assert found[name].kept == sum(oracle.count(row, beta) for row in rows)
        assert int((after[name] != 0).sum()) <= found[name].kept
        assert zeros_before > 0 or int((after[name] != 0).sum()) == found[name].kept


@pytest.mark.parametrize("family", tiny.MIXTURES)
def test_each_token_keeps_its_effective_number_in_every_expert(loaded: Callable[[str], PreTrainedModel], family: str) -> None:
    model, seen, kept = loaded(family), dict[str, tuple[Tensor, ...]](), dict[str, int]()

    def note(name: str) -> Callable[..., None]:
        return lambda module, args, output: seen.__setitem__(name, (*args, output))

    paths = [READERS[family].format(number).removesuffix(".down_proj") for number in range(2)]
    handles = [model.get_submodule(path).register_forward_hook(note(path)) for path in paths]
    with torch.no_grad(), pruned_features(model, 1.0) as counts:
        model(tokens())
    for handle in handles:
        handle.remove()
    for path in paths:
        experts: Any = model.get_submodule(path)
        hidden, chosen, weights, output = seen[path]
        wanted = torch.zeros_like(output)
        for expert in range(len(experts.down_proj)):
            place, token = torch.where((chosen == expert).T)
            gate, up = nn.functional.linear(hidden[token], experts.gate_up_proj[expert]).chunk(2, -1)
            features = experts.act_fn(gate) * up
            kept[path] = kept.get(path, 0) + sum(oracle.count(row) for row in features.detach().double().abs().numpy())
            product = nn.functional.linear(kept_by_oracle(features, 1.0), experts.down_proj[expert])
            wanted.index_add_(0, token, product * weights[token, place, None].to(product.dtype))
        torch.testing.assert_close(output, wanted)
        found = counts.gathered()[f"{path}.down_proj"]
        assert (found.tokens, found.kept) == (60 * 2, kept[path])


@pytest.mark.parametrize("family", READERS)
def test_a_large_beta_is_the_dense_model_bit_for_bit(loaded: Callable[[str], PreTrainedModel], family: str) -> None:
    model = loaded(family)
    with torch.no_grad():
        dense = model(tokens()).logits
        with pruned_features(model, 1e9) as counts:
            assert torch.equal(model(tokens()).logits, dense)
        with pruned_features(model, 0.1):
            assert not torch.equal(model(tokens()).logits, dense)
        assert torch.equal(model(tokens()).logits, dense), "the hooks are gone"
    assert {each.fraction for each in counts.gathered().values()} == {1.0}


def test_tokens_that_are_not_finite_and_none_at_all() -> None:
    """A padding token may be NaN without harm: it stays, is not counted, and the others are pruned as without it."""
    features = torch.tensor([[1.0, 8.0, 1.0, -7.0], [float("nan")] * 4, [0.0] * 4, [float("inf"), 1.0, 1.0, 1.0]])
    pruned, kept = keep_effective_features(features)
    assert kept.tolist() == [2, -1, 4, -1]
    assert pruned[0].tolist() == [0, 8, 0, -7]
    assert pruned[1].isnan().all()
    assert torch.equal(pruned[2:], features[2:])
    empty, none = keep_effective_features(torch.zeros(0, 4))
    assert (empty.shape, none.shape) == ((0, 4), (0,))


def results(path: Path) -> Results:
    return read_record(path, Results)


@pytest.fixture(scope="module")
def measured(evaluable: Models, task_suite: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of results: emp.json of the text and the tasks at beta 1; emp-baseline.json of the dense model."""
    folder, model = tmp_path_factory.mktemp("activations"), evaluable("llama")
    evaluate(model, suite=task_suite, baseline=str(model), output=folder / "emp.json", activation_emp=1.0, device_map="cpu")
    return folder


def test_the_record_and_the_table(command: Run, measured: Path, evaluable: Models, task_suite: Path, tmp_path: Path) -> None:
    emp, dense = results(measured / "emp.json"), results(measured / "emp-baseline.json")
    assert (emp.made_by.activation_emp, dense.made_by.activation_emp, dense.kept_features) == (1.0, None, {})
    assert emp.perplexity is not None
    assert dense.perplexity is not None
    assert emp.perplexity.perplexity != dense.perplexity.perplexity
    # The text alone counts, and all of it; the tasks do not.
    kept = emp.kept_features
    assert list(kept) == [READERS["llama"].format(number) for number in range(2)]
    assert {each.tokens for each in kept.values()} == {emp.perplexity.tokens}
    assert {each.width for each in kept.values()} == {80}
    assert all(0.2 < (each.fraction or 0) < 0.7 for each in kept.values())
    line = ("evaluate", "--model", evaluable("llama"), "--suite", task_suite, "--output", measured / "emp.json")
    line += ("--activation-emp", "1", "--device-map", "cpu", "--baseline", measured / "emp-baseline.json")
    done = command(*line)
    assert done.returncode == 0, done.stderr
    assert "already finished" in done.stderr
    assert "activations β=1" in done.stdout
    for layer, each in kept.items():
        assert f"{layer}" in done.stdout
        assert f"{100 * (each.fraction or 0):.2f}" in done.stdout
    assert "all layers" in done.stdout
    other = command(*line, "--activation-emp", "0.5")
    assert other.returncode == 2
    assert "it holds other results (activation_emp: 1.0 there, 0.5 now)" in other.stderr
    markdown = command(*line, "--format", "markdown").stdout
    assert f"| {next(iter(kept))} |" in markdown
    assert "all layers" not in command(*line, "--format", "csv").stdout


def test_offloaded_models_and_tasks_alone(measured: Path, evaluable: Models, task_suite: Path, tmp_path: Path) -> None:
    short, model = task_suite.with_name("short.toml"), evaluable("llama")
    evaluate(model, suite=short, output=tmp_path / "disk.json", activation_emp=1.0, device_map="disk")
    disk, emp = results(tmp_path / "disk.json"), results(measured / "emp.json")
    assert disk.kept_features == emp.kept_features
    assert disk.perplexity is not None
    assert emp.perplexity is not None
    assert disk.perplexity.perplexity == emp.perplexity.perplexity
    tasks = task_suite.with_name("tasks-alone.toml")
    tasks.write_text("\n\n".join(part for part in task_suite.read_text().split("\n\n") if "[perplexity]" not in part))
    evaluate(model, suite=tasks, output=tmp_path / "tasks.json", activation_emp=1.0, device_map="cpu")
    alone = results(tmp_path / "tasks.json")
    assert alone.perplexity is None
    assert len(alone.tasks) == 3
    assert {each.tokens for each in alone.kept_features.values()} != {0}
    assert {name: task.results for name, task in alone.tasks.items()} == {
        name: task.results for name, task in emp.tasks.items()
    }


def test_wrong_options_and_models(command: Run, evaluable: Models, task_suite: Path, tmp_path: Path) -> None:
    model, suite = evaluable("llama"), task_suite.with_name("short.toml")
    for options, message in (
        (("--activation-emp", "0"), "--activation-emp: beta must be a number above 0"),
        (("--activation-emp", "-1"), "--activation-emp: beta must be a number above 0"),
        (("--activation-emp", "nan"), "--activation-emp: beta must be a number above 0"),
        (("--activation-emp", "much"), "--activation-emp"),
        (("--activation-emp", "1", "--runtime", "sparse"), "--activation-emp needs the dense runtime"),
    ):
        done = command("evaluate", "--model", model, "--suite", suite, *options)
        assert done.returncode == 2, options
        assert message in done.stderr
    config = transformers.MambaConfig(vocab_size=256, hidden_size=16, num_hidden_layers=1, state_size=4)
    transformers.MambaForCausalLM(config).save_pretrained(tmp_path / "mamba")
    tiny.make_tokenizer().save_pretrained(tmp_path / "mamba")
    done = command("evaluate", "--model", "mamba", "--suite", suite, "--activation-emp", "1", "--device-map", "cpu")
    assert done.returncode == 2
    assert "MambaForCausalLM has no MLP with hidden features" in done.stderr


def test_results_are_no_dense_baseline(measured: Path, evaluable: Models, task_suite: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"of pruned activations \(activation_emp: 1.0 there, null now\)"):
        prune(
            evaluable("llama"),
            output=tmp_path / "out",
            method="emp-magnitude",
            evaluate=str(task_suite),
            baseline=measured / "emp.json",
            device_map="cpu",
        )


def test_the_report_lists_them_apart(measured: Path, tmp_path: Path) -> None:
    summary = report([measured / "emp.json", measured / "emp-baseline.json"], output=tmp_path / "out", no_plots=True)
    (study,) = summary.page.studies
    assert study.points == []
    emp = results(measured / "emp.json")
    page = (tmp_path / "out" / "report.md").read_text()
    assert "## Activations pruned at inference" in page
    assert emp.perplexity is not None
    assert f"{emp.perplexity.value:.3f}" in page
    with (tmp_path / "out" / "activations.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["layer"]: (int(row["tokens"]), int(row["width"]), int(row["kept"])) for row in rows} == {
        layer: (each.tokens, each.width, each.kept) for layer, each in emp.kept_features.items()
    }
    for row in rows:
        layer = row["layer"].replace("_", "\\_")
        assert f"| {layer} |" in page
    assert json.loads((measured / "emp.json").read_text())["format"] == "emp-llm results 3"
