"""`scripts/paper/token_gating.py`: tokens keep the effective number of their hidden features, in every family."""

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
from suites import Models
from token_gating import keep_effective_features, main, pruned_features
from torch import Tensor, nn
from transformers import PreTrainedModel

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
    with torch.no_grad(), pruned_features(model, beta) as found:
        model(tokens())
    for handle in handles:
        handle.remove()
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
        found = counts[f"{path}.down_proj"]
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
    assert {each.fraction for each in counts.values()} == {1.0}


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


def test_the_tables(models: Models, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The dense perplexity, one for each beta, and the features kept by layer; a large beta is the dense model."""
    (tmp_path / "text.txt").write_text("A head reads, another writes; most of them do both. " * 8)
    line = ["--model", str(models("llama")), "--text", str(tmp_path / "text.txt"), "--block", "32", "--limit", "4"]
    main([*line, "--betas", "1", "1e9", "--device-map", "cpu"])
    rows = [row.split() for row in capsys.readouterr().out.splitlines()]
    dense, one, all_ = (next(row for row in rows if row[:1] == [name]) for name in ("dense", "1", "1e+09"))
    assert all_[1:] == [dense[1], "+0.00", "100.00"]
    assert one[1] != dense[1]
    layers = {row[0]: row[1:] for row in rows if row and row[0].startswith("model.layers")}
    assert list(layers) == [READERS["llama"].format(number) for number in range(2)]
    assert all(20 < float(cells[0]) < 70 and cells[1] == "100.00" for cells in layers.values())
    assert float(one[3]) == pytest.approx(sum(float(cells[0]) for cells in layers.values()) / 2, abs=0.01)


def test_wrong_options_and_models(models: Models, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = transformers.MambaConfig(vocab_size=256, hidden_size=16, num_hidden_layers=1, state_size=4)
    transformers.MambaForCausalLM(config).save_pretrained(tmp_path / "mamba")
    tiny.make_tokenizer().save_pretrained(tmp_path / "mamba")
    (tmp_path / "text.txt").write_text("A head reads, another writes. " * 8)
    for model, betas, message in (
        (models("llama"), "0", "--betas: beta must be a number above 0"),
        (models("llama"), "nan", "--betas: beta must be a number above 0"),
        (tmp_path / "mamba", "1", "MambaForCausalLM has no MLP with hidden features"),
    ):
        with pytest.raises(SystemExit) as end:
            main(["--model", str(model), "--text", str(tmp_path / "text.txt"), "--betas", betas, "--device-map", "cpu"])
        assert end.value.code == 2
        assert message in capsys.readouterr().err
