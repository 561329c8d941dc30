"""`scripts/paper/token_gating.py`: tokens keep the effective number of their hidden features, in
every family.
"""

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
from token_gating import main, pruned_features
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


def tokens() -> Tensor:
    return torch.randint(3, 256, (3, 20), generator=torch.Generator().manual_seed(0))


def kept_by_oracle(features: Tensor, beta: float) -> Tensor:
    """Features, shape (..., N), with those set to zero that Algorithm 1 does not keep: in
    float64, token by token.
    """
    rows = features.detach().double().abs().reshape(-1, features.shape[-1]).numpy()
    masks = (
        np.stack([oracle.keep(row, oracle.count(row, beta)) for row in rows])
        if len(rows)
        else rows.astype(bool)
    )
    return torch.where(torch.from_numpy(masks).reshape(features.shape), features, 0)


def noted(
    model: PreTrainedModel, names: list[str], beta: float
) -> tuple[dict[str, tuple[Any, ...]], Any]:
    """By name the first input of a module before the hooks of the script, all after them, and
    the output; and the counts.
    """
    seen = {}
    handles = []
    for name in names:
        module = model.get_submodule(name)
        handles += [
            module.register_forward_pre_hook(
                lambda _, args, name=name: seen.update({name: (args[0].clone(),)})
            ),
            module.register_forward_hook(
                lambda _, args, out, name=name: seen.update({name: (*seen[name], *args, out)})
            ),
        ]
    with torch.no_grad(), pruned_features(model, beta) as counts:
        model(tokens())
    for handle in handles:
        handle.remove()
    return seen, counts


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "phi3"])
def test_each_token_keeps_its_effective_number(models: Models, family: str) -> None:
    model = mixtures.load(models(family))
    names = [READERS[family].format(number) for number in range(2)]
    with torch.no_grad():
        dense = model(tokens()).logits
    for beta in (0.5, 1.0, 2.0, 1e9):
        seen, found = noted(model, names, beta)
        assert list(found) == names
        for name in names:
            before, after, _ = seen[name]
            assert torch.equal(after, kept_by_oracle(before, beta))
            rows = before.double().abs().reshape(60, -1).numpy()
            assert (found[name].tokens, found[name].width) == (60, rows.shape[1])
            assert found[name].kept == sum(oracle.count(row, beta) for row in rows)
    assert {each.fraction for each in found.values()} == {1.0}
    with torch.no_grad():
        assert torch.equal(model(tokens()).logits, dense), "the hooks are gone"
        with pruned_features(model, 1e9):
            assert torch.equal(model(tokens()).logits, dense)


@pytest.mark.parametrize("family", tiny.MIXTURES)
def test_each_token_keeps_its_effective_number_in_every_expert(models: Models, family: str) -> None:
    model = mixtures.load(models(family))
    kept = dict[str, int]()
    paths = [READERS[family].format(number).removesuffix(".down_proj") for number in range(2)]
    seen, counts = noted(model, paths, 1.0)
    for path in paths:
        experts = model.get_submodule(path)
        _, hidden, chosen, weights, output = seen[path]
        wanted = torch.zeros_like(output)
        for expert in range(len(experts.down_proj)):
            place, token = torch.where((chosen == expert).T)
            gate, up = nn.functional.linear(hidden[token], experts.gate_up_proj[expert]).chunk(
                2, -1
            )
            features = experts.act_fn(gate) * up
            kept[path] = kept.get(path, 0) + sum(
                oracle.count(row) for row in features.detach().double().abs().numpy()
            )
            product = nn.functional.linear(kept_by_oracle(features, 1.0), experts.down_proj[expert])
            wanted.index_add_(0, token, product * weights[token, place, None].to(product.dtype))
        torch.testing.assert_close(output, wanted)
        found = counts[f"{path}.down_proj"]
        assert (found.tokens, found.kept) == (60 * 2, kept[path])


def test_the_tables(tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The dense perplexity, one for each beta, and the features kept by layer; a large beta is
    the dense model.
    """
    (tmp_path / "text.txt").write_text("A head reads, another writes; most of them do both. " * 8)
    line = [
        "--model",
        str(tiny_llama),
        "--text",
        str(tmp_path / "text.txt"),
        "--block",
        "32",
        "--limit",
        "4",
    ]
    main([*line, "--betas", "1", "1e9", "--device-map", "cpu"])
    rows = [row.split() for row in capsys.readouterr().out.splitlines()]
    dense, one, all_ = (
        next(row for row in rows if row[:1] == [name]) for name in ("dense", "1", "1e+09")
    )
    assert all_[1:] == [dense[1], "+0.00", "100.00"]
    assert one[1] != dense[1]
    layers = {row[0]: row[1:] for row in rows if row and row[0].startswith("model.layers")}
    assert list(layers) == [READERS["llama"].format(number) for number in range(2)]
    assert all(20 < float(cells[0]) < 70 and cells[1] == "100.00" for cells in layers.values())
    assert float(one[3]) == pytest.approx(
        sum(float(cells[0]) for cells in layers.values()) / 2, abs=0.01
    )


def test_wrong_options_and_models(
    tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = transformers.MambaConfig(
        vocab_size=256, hidden_size=16, num_hidden_layers=1, state_size=4
    )
    transformers.MambaForCausalLM(config).save_pretrained(tmp_path / "mamba")
    tiny.make_tokenizer().save_pretrained(tmp_path / "mamba")
    (tmp_path / "text.txt").write_text("A head reads, another writes. " * 8)
    for model, betas, message in (
        (tiny_llama, "0", "--betas: beta must be a number above 0"),
        (tiny_llama, "nan", "--betas: beta must be a number above 0"),
        (tmp_path / "mamba", "1", "MambaForCausalLM has no MLP with hidden features"),
    ):
        with pytest.raises(SystemExit) as end:
            main(
                [
                    "--model",
                    str(model),
                    "--text",
                    str(tmp_path / "text.txt"),
                    "--betas",
                    betas,
                    "--device-map",
                    "cpu",
                ]
            )
        assert end.value.code == 2
        assert message in capsys.readouterr().err
