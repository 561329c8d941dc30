"""Models in memory: the same bits as the command, any module, any data, and folders that the
other commands take.
"""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, get_origin

import accelerate
import numpy as np
import oracle
import pandas as pd
import pytest
import torch
from datasets import Dataset
from runs import check_verified
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import emp_llm
from emp_llm import (
    Masks,
    Recipe,
    masks_of,
    pack,
    prune,
    prune_model,
    push,
    reapply_mask,
    report,
    unpack,
)
from emp_llm.cli import COMMANDS
from emp_llm.common.errors import UserError
from emp_llm.options.words import recipe_of
from emp_llm.runtime import load as packed_model

Models = Callable[[str], Path]
GIVEN: dict[str, Any] = {"samples": 4, "seqlen": 64}


def load(folder: Path, **options: Any) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, **({"dtype": "auto"} | options))


def same(model: nn.Module, other: nn.Module) -> bool:
    pairs = zip(model.named_parameters(), other.named_parameters(), strict=True)
    return all(name == other_name and torch.equal(a, b) for (name, a), (other_name, b) in pairs)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {"method": "wanda"}),
        ("gpt2", {"method": "emp-wanda"}),
        ("mixtral", {"method": "emp-wanda"}),
        ("mixtral", {"method": "emp-magnitude", "group": "matrix", "targets": "all-linear"}),
        ("llama", {"method": "emp-magnitude", "group": "all", "targets": "all-linear"}),
        ("qwen3_moe", {"method": "wanda"}),
        ("gpt_neox", {"method": "emp-wanda"}),
    ],
)
def test_the_bits_of_the_command(
    models: Models, text: Path, tmp_path: Path, family: str, options: dict[str, Any]
) -> None:
    source = models(family)
    given = GIVEN if options["method"].endswith("wanda") else {}
    data = str(text) if given else None
    written = prune(
        model=source,
        output=tmp_path / "out",
        calibration=data,
        device_map="cpu",
        **options,
        **given,
    )
    model = load(source)
    found = prune_model(
        model, recipe_of(**options), data, AutoTokenizer.from_pretrained(source), **given
    )
    assert same(model, load(tmp_path / "out"))
    assert found.targets == written.targets
    assert found.matrices == written.matrices
    assert found.record.recipe.method == options["method"]


def test_pruned_propagation_and_other_dtypes(tiny_llama: Path, text: Path, tmp_path: Path) -> None:
    source = tiny_llama
    out = tmp_path / "out"
    prune(
        model=source,
        output=out,
        calibration=str(text),
        propagate="pruned",
        device_map="cpu",
        **GIVEN,
    )
    model = load(source)
    prune_model(model, None, text, source, propagate="pruned", **GIVEN)
    assert same(model, load(out))
    # Loads model and tokenizer.
    by_name = prune_model(source, None, text, propagate="pruned", **GIVEN)
    assert same(by_name.model, load(out))
    wide = load(source, dtype=torch.float32)
    prune_model(wide, recipe_of(method="emp-magnitude"))
    prune(model=source, method="emp-magnitude", output=tmp_path / "data-free")
    assert same(wide, load(tmp_path / "data-free", dtype=torch.float32))


def test_parts_on_the_cpu_of_an_accelerator(tiny_llama: Path, text: Path) -> None:
    """Weights that accelerate keeps in CPU memory are read and changed there."""
    source = tiny_llama
    plain = load(source)
    offloaded = load(source)
    prune_model(plain, None, text, source, **GIVEN)
    accelerate.cpu_offload(offloaded, execution_device=torch.device("cpu"))
    assert next(offloaded.parameters()).device.type == "meta"
    prune_model(offloaded, None, text, source, **GIVEN)
    ids = torch.arange(40).reshape(1, 40)
    with torch.no_grad():
        assert torch.equal(plain(ids).logits, offloaded(ids).logits)


def test_masks_are_tensors_that_can_be_saved(models: Models, tmp_path: Path) -> None:
    source = models("mixtral")
    model = load(source)
    recipe = recipe_of(method="emp-magnitude", group="matrix")
    masks = masks_of(model, recipe)
    assert same(model, load(source))  # nothing was changed
    parameters = dict(model.named_parameters())
    assert masks.keys() == {name for name in parameters if ".experts." in name}
    assert all(
        mask.shape == parameters[name].shape and mask.dtype == torch.bool
        for name, mask in masks.items()
    )
    masks.save(tmp_path / "masks.safetensors")
    size = sum(mask.numel() for mask in masks.values()) // 8
    assert size < (tmp_path / "masks.safetensors").stat().st_size < size + 2000
    loaded = Masks.load(tmp_path / "masks.safetensors")
    assert loaded.keys() == masks.keys()
    assert all(torch.equal(loaded[name], masks[name]) for name in masks)
    pruned = load(source)
    removed = prune_model(pruned, recipe).targets.zeros
    for given in (masks, dict(masks), tmp_path / "masks.safetensors"):
        again = load(source)
        assert reapply_mask(again, given) == removed
        assert same(again, pruned)
    with pytest.raises(UserError, match=r"no parameter .*experts.*of another model"):
        reapply_mask(load(models("llama")), masks)
    with pytest.raises(UserError, match=r"the mask of a is torch.float32"):
        reapply_mask(model, {"a": torch.ones(2)})
    (tmp_path / "masks.safetensors").write_bytes(b"nothing")
    with pytest.raises(UserError, match="not a readable file of masks"):
        Masks.load(tmp_path / "masks.safetensors")


@pytest.mark.parametrize("family", ["gpt2", "mixtral"])
def test_a_saved_folder_is_a_finished_checkpoint(
    models: Models, text: Path, tmp_path: Path, family: str
) -> None:
    source = models(family)
    folder = tmp_path / "saved"
    model = load(source)
    tokenizer = AutoTokenizer.from_pretrained(source)
    found = prune_model(model, recipe_of(), text, tokenizer, **GIVEN)
    load(source).save_pretrained(folder)
    with pytest.raises(
        UserError, match=r"[\d,]+ removed weights are not zero\. Save the pruned model there first"
    ):
        found.save(folder)
    assert not (folder / "emp_report.json").exists()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    found.save(folder)
    check_verified(folder, source)
    report(runs=[folder], output=tmp_path / "page", no_plots=True)
    dense = load(source)
    assert reapply_mask(dense, folder) == found.targets.zeros
    assert same(dense, model)
    pack(folder, tmp_path / "packed")
    unpack(tmp_path / "packed", tmp_path / "unpacked")
    assert same(load(tmp_path / "unpacked"), model)
    files = push(folder, "me/pruned", dry_run=True).files
    assert {
        "emp_report.json",
        "emp_manifest.json",
        "emp_llm/activations.safetensors",
    } <= files.keys()
    assert str(tmp_path) not in (
        folder / "emp_llm" / "activations.safetensors"
    ).read_bytes().decode("latin-1")
    norms = folder / "emp_llm/activations.safetensors"
    baseline = prune(
        model=source, method="wanda", match=folder, activations=norms, output=tmp_path / "wanda"
    )
    assert baseline.targets.kept == found.targets.kept


class Net(nn.Module):
    """Three linear layers and an attention projection."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.first = nn.Linear(12, 20)
        self.second = nn.Linear(20, 16, bias=False)
        self.attn_out = nn.Linear(16, 4)
        for parameter in self.parameters():
            parameter.data.normal_(generator=generator)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attn_out(self.dropout(torch.relu(self.second(torch.relu(self.first(x))))))


def test_any_module_and_a_data_loader() -> None:
    net = Net().train()
    x = torch.randn(50, 12, generator=torch.Generator().manual_seed(1))
    weights = {
        name: parameter.detach().double().numpy() for name, parameter in net.named_parameters()
    }
    hidden = torch.relu(net.first(x)).detach()
    loader = DataLoader(TensorDataset(x, torch.zeros(50)), batch_size=8)
    found = prune_model(net, data=loader)
    assert net.training
    assert net.dropout.training
    assert found.matrices.keys() == {"first", "second"}  # mlp; attn_out is attention
    for name, inputs in (("first", x), ("second", hidden)):
        norms = inputs.double().square().sum(0).sqrt().float().numpy()
        mask = oracle.row_masks(oracle.scores(weights[f"{name}.weight"], norms), adaptive=True)
        np.testing.assert_array_equal(found.masks[f"{name}.weight"].numpy(), mask)
        np.testing.assert_array_equal(
            getattr(net, name).weight.detach().double().numpy(), weights[f"{name}.weight"] * mask
        )
    np.testing.assert_array_equal(
        net.attn_out.weight.detach().double().numpy(), weights["attn_out.weight"]
    )


class Streamed(IterableDataset[str]):
    """A data set without a length, which can be read again."""

    def __init__(self, rows: list[str]) -> None:
        self._rows = rows

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)


def test_every_kind_of_data_gives_the_same_norms(tiny_llama: Path, text: Path) -> None:
    source = tiny_llama
    model = load(source, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(source)
    ids = torch.tensor(tokenizer(text.read_text())["input_ids"][: 4 * 64]).reshape(4, 64)
    padded = torch.cat([ids, torch.zeros(4, 9, dtype=torch.int64)], 1)
    mask = torch.cat([torch.ones_like(ids), torch.zeros(4, 9, dtype=torch.int64)], 1)
    rows = [
        {"input_ids": i, "attention_mask": m, "labels": i}
        for i, m in zip(padded, mask, strict=True)
    ]
    tokenised = Dataset.from_dict({n: [r[n].tolist() for r in rows] for n in rows[0]})
    whole = text.read_text()
    ways = [
        (text, GIVEN),
        (ids, {}),
        (DataLoader(ids, batch_size=2), {}),  # type: ignore[arg-type]
        (DataLoader(rows, batch_size=2), {}),  # type: ignore[arg-type]
        ([{"input_ids": part} for part in ids.split(1)], {}),
        ([whole], GIVEN),
        ([{"text": whole}], GIVEN),
        (Dataset.from_dict({"text": [whole]}).to_iterable_dataset(), GIVEN),
        (pd.DataFrame({"text": [whole]}, index=[3]), GIVEN),
        (pd.Series([whole], index=[3]), GIVEN),
        (Streamed([whole]), GIVEN),
        (ids.numpy(), {}),
        (ids.tolist(), {"seqlen": 64}),
        (list(ids), {"seqlen": 64}),
        (rows, {"seqlen": 64}),
        (tokenised, {"seqlen": 64}),
        (tokenised.with_format("torch"), {"seqlen": 64}),
        (tokenised.with_format("numpy"), {"seqlen": 64}),
        (tokenised.to_iterable_dataset(), {"seqlen": 64}),
        (tokenised.to_pandas(), {"seqlen": 64}),
        (DataLoader(tokenised.with_format("torch"), batch_size=4), {}),  # type: ignore[arg-type]
    ]
    norms = []
    for data, options in ways:
        found = prune_model(
            load(source, dtype=torch.float32), recipe_of("emp-relative"), data, tokenizer, **options
        )
        assert found.activations is not None
        assert found.record.calibration.tokens == 256
        norms.append(found.activations)
    for other in norms[1:]:
        for name in norms[0].statistics["norm"]:
            torch.testing.assert_close(
                other.statistics["norm"][name], norms[0].statistics["norm"][name], rtol=1e-5, atol=0
            )
        for name, norm in norms[0].statistics["relative"].items():
            torch.testing.assert_close(other.statistics["relative"][name], norm, rtol=1e-5, atol=0)
        assert (
            norms[0].statistics["relative"].keys()
            == other.statistics["relative"].keys()
            == norms[0].input_of.keys()
        )
    masks = masks_of(model, recipe_of("emp-relative"), activations=norms[0])
    assert torch.equal(
        masks["model.layers.0.mlp.up_proj.weight"], found.masks["model.layers.0.mlp.up_proj.weight"]
    )


def test_data_without_effect_is_named(tiny_llama: Path, caplog: pytest.LogCaptureFixture) -> None:
    masks_of(load(tiny_llama), recipe_of(method="emp-magnitude"), ["a text"])
    assert "data has no effect: method emp-magnitude needs none" in caplog.text
    masks_of(load(tiny_llama), recipe_of(method="emp-magnitude"), samples=3)
    assert "samples and seqlen have no effect: method emp-magnitude needs none" in caplog.text
    with pytest.raises(UserError, match=r"propagate.*'prune'.*pruned"):
        prune_model(tiny_llama, recipe_of(), ["Once upon a time. " * 40], propagate="prune")  # type: ignore[arg-type]
    with pytest.raises(
        UserError,
        match="--propagate pruned is for methods that need activations; magnitude needs none",
    ):
        prune_model(tiny_llama, "magnitude", propagate="pruned")
    norms = prune_model(
        tiny_llama, None, ["Once upon a time. " * 40], samples=2, seqlen=64
    ).activations
    with pytest.raises(UserError, match="activations and data both give the norms; give only one"):
        prune_model(tiny_llama, None, ["Once upon a time. " * 40], activations=norms)
    with pytest.raises(
        UserError, match="--propagate pruned collects its norms itself; leave out --activations"
    ):
        prune_model(tiny_llama, None, activations=norms, propagate="pruned")


def test_own_criterion_and_scores_in_memory(models: Models) -> None:
    source = models("gpt2")
    wanted = masks_of(load(source), recipe_of(method="emp-magnitude"))
    model = load(source)
    scores = {name: parameter.detach().abs() for name, parameter in model.named_parameters()}
    assert all(
        torch.equal(mask, wanted[name])
        for name, mask in masks_of(model, recipe_of(scores=scores)).items()
    )

    def mine(weight: torch.Tensor) -> torch.Tensor:
        return weight.abs()

    found = prune_model(model, recipe_of(criterion=mine))
    assert all(torch.equal(found.masks[name], wanted[name]) for name in wanted)
    assert found.record.recipe.method == "emp-mine"


class Exploding(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("out of luck")


def spoil(module: nn.Module) -> None:
    module.weight.data[0, 0] = torch.nan  # type: ignore[union-attr, operator]


def on_meta(_: Path) -> object:
    with torch.device("meta"):
        return prune_model(nn.Sequential(nn.Linear(3, 4)), MAGNITUDE)


def on_llama(
    data: Any, recipe: Recipe | None = None, tokenized: bool = False, **how: Any
) -> Callable[[Path], object]:
    return lambda source: prune_model(
        load(source),
        recipe,
        data,
        AutoTokenizer.from_pretrained(source) if tokenized else None,
        **how,
    )


MAGNITUDE = recipe_of(method="magnitude")
CONVERSATION = [[{"role": "user", "content": "hello"}]]
WRONG: dict[str, tuple[Callable[[Path], object], str]] = {
    "meta": (on_meta, r"0\.weight: its values are not in memory \(device meta\)"),
    "path": (lambda source: prune_model(str(source / "nowhere")), "no such model folder"),
    "a number": (lambda _: prune_model(3), "model is a int; give a model in memory"),  # type: ignore[arg-type]
    "a command": (
        lambda source: prune(model=load(source)),
        "LlamaForCausalLM. For a model in memory there is prune_model",
    ),
    "no data": (on_llama(None), "emp-wanda needs calibration data"),
    "empty": (on_llama(DataLoader([])), "data: it gives no batches"),  # type: ignore[arg-type]
    "keys": (
        on_llama(DataLoader([{"text": "a", "n": 1}])),
        "a batch has no input_ids; its keys are text, n",
    ),  # type: ignore[arg-type]
    "strings": (on_llama(iter(["a"])), "a batch is str.* Texts are given as a list or a data set"),
    "table": (
        on_llama(pd.DataFrame({"a": [1], "b": ["x"]}), tokenized=True),
        "data, row 1 holds neither text, nor a conversation, nor token ids; its fields are a, b",
    ),
    "data set": (
        on_llama(Dataset.from_dict({"label": [1]}), tokenized=True),
        "data, row 1 holds neither .* its fields are label",
    ),
    "second row": (
        on_llama(["a", {"label": 1}], tokenized=True),
        "data, row 2 holds neither .* its fields are label",
    ),
    "splits": (
        on_llama({"train": Dataset.from_dict({"text": ["a"]}), "test": []}, tokenized=True),
        "data: a mapping of train, test; give one of its values",
    ),
    "lists in batches": (
        on_llama(DataLoader(Dataset.from_dict({"input_ids": [[1, 2], [3, 4]]}))),  # type: ignore[arg-type]
        r"input_ids of a batch is of type list, not a tensor.*with_format",
    ),
    "no tokenizer": (on_llama(["a text"]), "a? ?texts? needs? a tokenizer"),
    "short": (on_llama(["a"], tokenized=True, **GIVEN), "too few for 4 samples x"),
    "few": (
        on_llama(["a b c"], tokenized=True),
        r"tokens, too few for 1 sample x 128 tokens\. Give more text, or a smaller .*seqlen",
    ),
    "long": (
        on_llama(["a " * 999], tokenized=True, seqlen=200),
        "seqlen 200 is longer than the model's context of 128 tokens",
    ),
    "few ids": (
        on_llama(torch.ones(3, 8, dtype=torch.int64), samples=4),
        r"of shape \[3, 8\], too few for 4 samples x 8 tokens\. Give more",
    ),
    "short ids": (
        on_llama(torch.ones(3, 8, dtype=torch.int64), seqlen=9),
        "too few for 3 samples x 9 tokens",
    ),
    "long ids": (
        on_llama(torch.ones(1, 200, dtype=torch.int64)),
        "seqlen 200 is longer than the model's context of 128 tokens",
    ),
    "template": (on_llama(CONVERSATION, tokenized=True), "no chat template"),
    "floats": (on_llama(torch.rand(3, 4)), "token ids are integers"),
    "nothing matches": (
        lambda _: prune_model(Net(), recipe_of(method="magnitude", targets="q_proj")),
        "matches no layer",
    ),
    "beta": (lambda _: recipe_of(method="magnitude", beta=0.5), "beta does not go with"),
    "nan": (
        lambda _: prune_model(nn.Sequential(nn.Linear(3, 4).apply(spoil)), MAGNITUDE),
        "holds NaN or infinity",
    ),
}


def test_a_wrapped_model_is_pruned_inside(tiny_llama: Path, tmp_path: Path) -> None:
    """Masks and report are those of the model itself, and the wrapped one is as sparse; a
    wrapped part is refused.
    """
    source = tiny_llama
    plain = masks_of(load(source), "magnitude")
    ids = torch.arange(256).reshape(4, 64) % 200
    for wrap in (
        torch.compile,
        nn.DataParallel,
        lambda model: torch.compile(nn.DataParallel(model)),
    ):
        model = load(source)
        wrapped = wrap(model)
        assert list(masks_of(wrapped, "wanda", ids)) == list(plain)
        assert reapply_mask(wrapped, plain) > 0
        model = load(source)
        found = prune_model(wrap(model), "magnitude")
        assert all(torch.equal(mask, plain[name]) for name, mask in found.masks.items())
        assert found.masks.broken(model) == 0
        model.save_pretrained(tmp_path / "out")
        found.save(tmp_path / "out")
        assert reapply_mask(wrap(load(source)), tmp_path / "out") > 0
    model.model.layers[1] = torch.compile(model.model.layers[1])
    with pytest.raises(
        UserError,
        match=r"^model\.layers\.1\._orig_mod: this part of the model is "
        r"compiled or wrapped\. Give",
    ):
        prune_model(model, "magnitude")
    assert reapply_mask(model, plain) == 0


FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"refit": "no"}, "^--refit must be True or False, got 'no'"),
    ({"refit": 1}, "^--refit must be True or False, got 1"),
    ({"heal": torch.ones(2)}, r"^--heal must be True or False, got tensor"),
    ({"heal": True, "heal_steps": 2.5}, "^--heal-steps must be a whole number, got 2.5"),
    ({"targets": 5}, "^--targets must be text or a list of names, got 5"),
    ({"targets": ["up_proj", 5]}, "^--targets must be text or a list of names"),
    ({"blocks": 3}, "^--blocks must be text, got 3"),
    ({"sparsity": True}, "^--sparsity must be a number, got True"),
    ({"group": 5}, "^--group 5 is not one of row, matrix, all"),
    ({"removed": "a"}, "^removed is not an option of a recipe"),
    ({"structure": "heads"}, "^structure is for checkpoints"),
    ({"structure": "herds"}, "^--structure 'herds' is not one of heads, .* Did you mean heads"),
    ({"method": "emp-wnada"}, "'emp-wnada' is not one of .* Did you mean emp-wanda"),
]
SOME: Any = 5
ARGUMENTS: list[tuple[Callable[[Any], object], str]] = [
    (
        lambda model: masks_of(model, activations=SOME),
        "^activations must be of type Activations or text or a path, got 5",
    ),
    (
        lambda model: masks_of(model, data=["a"], samples=SOME / 2),
        "^--samples must be a whole number, got 2.5",
    ),
    (
        lambda model: masks_of(model, data=["a"], batch_size=[SOME]),
        r"^--batch-size must be a whole number, got \[5\]",
    ),
    (
        lambda model: prune_model(model, "magnitude", sparsity=SOME),  # type: ignore[call-arg]
        r"^sparsity belongs to the recipe. Give recipe_of\('magnitude', sparsity=...\) as the "
        r"second argument",
    ),
    (
        lambda model: masks_of(model, "magnitude", sed=SOME),  # type: ignore[call-arg]
        "^sed is no argument. There are activations, samples, seqlen, batch_size, seed, propagate",
    ),
    (lambda model: masks_of(model, data=SOME), "^data must be of type Iterable, got 5"),
    (
        lambda model: reapply_mask(model, [SOME]),
        r"^masks must be a path or text or of type Mapping, got \[5\]",
    ),
    (
        lambda model: reapply_mask(model, "x", targets=SOME),
        "^--targets must be text or a list of names, got 5",
    ),
    (lambda _: reapply_mask(SOME, {}), "^model must be of type Module, got 5"),
    (lambda _: Masks(SOME), "^masks must be of type Mapping, got 5"),
    (lambda _: Masks.load(SOME), "^path must be text or a path, got 5"),
    (lambda _: packed_model("x", device="gpu"), "^--device 'gpu' is not auto, cpu"),
    (lambda _: packed_model("x", dtype=SOME), "^--dtype 5 is not one of auto, bfloat16"),
]


@pytest.mark.parametrize(("fields", "match"), FIELDS)
def test_fields_of_other_types_are_named(
    tiny_llama: Path, fields: dict[str, Any], match: str
) -> None:
    for function in (masks_of, prune_model):
        with pytest.raises(UserError, match=match):
            function(tiny_llama, recipe_of(**{"method": "magnitude"} | fields))


@pytest.mark.parametrize(("call", "match"), ARGUMENTS)
def test_arguments_of_other_types_are_named(
    tiny_llama: Path, call: Callable[[Any], object], match: str
) -> None:
    with pytest.raises(UserError, match=match):
        call(load(tiny_llama))


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_of_every_command_has_a_type(name: str) -> None:
    """What an option takes is of its type."""
    options = getattr(emp_llm, name).options()
    for option in options.values():
        for value in (5, 2.5, True, "no", b"no", [5], {"a": 1}, object(), torch.ones(2), None):
            try:
                taken = option.checked(value)
            except UserError:
                continue
            types = [
                str if get_origin(allowed) is Literal else get_origin(allowed) or allowed
                for allowed in option.types
            ]
            types += [int] if float in types else []
            types += [type(None)] if option.parameter.default is None else []
            assert Any in types or any(isinstance(taken, each) for each in types), (
                option,
                value,
            )
            assert Any in types or bool in types or not isinstance(taken, bool), (option, value)


@pytest.mark.parametrize("case", WRONG)
def test_wrong_input_is_named(tiny_llama: Path, case: str) -> None:
    call, match = WRONG[case]
    with pytest.raises(UserError, match=match):
        call(tiny_llama)


def test_a_model_that_fails_is_unchanged() -> None:
    """The error of its own hooks keeps its traceback."""
    net = nn.Sequential(nn.Linear(3, 4), Exploding())
    before = net[0].weight.detach().clone()
    with pytest.raises(RuntimeError, match="out of luck"):
        prune_model(net, data=[torch.rand(2, 3)])
    assert torch.equal(net[0].weight, before)
    assert not net[0]._forward_pre_hooks
    last = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2).apply(spoil))
    with pytest.raises(UserError, match="NaN"):
        prune_model(last, recipe_of(method="magnitude"))
    # The masks of all layers are decided before one is applied.
    assert bool((last[0].weight != 0).all())


class Filters(nn.Module):
    """Convolutions of one, two and several groups, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Conv2d(3, 8, 3)
        self.second = nn.Conv2d(8, 6, (1, 3), groups=2, bias=False)
        self.line = nn.Conv1d(6, 5, 2)
        self.head = nn.Linear(5, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.second(torch.relu(self.first(x))).flatten(2)
        return self.head(self.line(torch.relu(hidden)).mean(2))


@pytest.mark.parametrize("group", ["row", "matrix", "all"])
@pytest.mark.parametrize("make", [Filters, Net])
def test_convolutions_are_pruned_like_matrices(make: Callable[[], nn.Module], group: Any) -> None:
    """The masks of the rule on flat filters, in each group: a row, a parameter, all parameters."""
    net = make()
    weights = {
        name: value.detach().clone()
        for name, value in net.named_parameters()
        if name.endswith("weight")
    }
    found = prune_model(net, recipe_of(method="emp-magnitude", group=group, targets="all-linear"))
    assert found.masks.keys() == weights.keys()
    rows = {name: weight.double().abs().flatten(1) for name, weight in weights.items()}
    if group == "all":
        together = torch.cat([row.reshape(1, -1) for row in rows.values()], 1).numpy()
        flat = torch.from_numpy(oracle.row_masks(together, adaptive=True))
        wanted = dict(zip(rows, flat[0].split([row.numel() for row in rows.values()]), strict=True))
    else:
        groups = {name: row if group == "row" else row.reshape(1, -1) for name, row in rows.items()}
        wanted = {
            name: torch.from_numpy(oracle.row_masks(each.numpy(), adaptive=True))
            for name, each in groups.items()
        }
    for name, weight in weights.items():
        mask = wanted[name].reshape(weight.shape)
        assert torch.equal(found.masks[name], mask)
        assert torch.equal(net.get_parameter(name).detach(), weight * mask)
    assert found.targets.weights == sum(weight.numel() for weight in weights.values())
    again = make()
    assert reapply_mask(again, found.masks) == found.targets.zeros
    assert same(again, net)


def test_convolutions_have_no_norms() -> None:
    x = torch.rand(2, 3, 8, 8)
    with pytest.raises(
        UserError, match="first is a convolution, which has no norms of input features"
    ):
        prune_model(Filters(), recipe_of(method="emp-wanda", targets="all-linear"), data=[x])
    net = Filters()
    dense = net.first.weight.detach().clone()
    # The other layers are not calibrated.
    found = prune_model(net, recipe_of(method="emp-wanda", targets="head"), data=[x])
    assert found.matrices.keys() == {"head"}
    assert torch.equal(net.first.weight, dense)


def test_a_wrong_propagate_is_refused(tiny_llama: Path) -> None:
    with pytest.raises(UserError, match=r"propagate.*'prune'.*pruned"):
        prune_model(tiny_llama, recipe_of(), ["Once upon a time. " * 40], propagate="prune")  # type: ignore[arg-type]


def test_the_name_of_a_method_is_a_recipe(tiny_llama: Path) -> None:
    named = prune_model(tiny_llama, "magnitude")
    whole = prune_model(tiny_llama, recipe_of(method="magnitude"))
    assert same(named.model, whole.model)
    assert masks_of(tiny_llama, "emp-magnitude").keys() == named.masks.keys()
    for wrong, message in (
        ("magnitud", "Did you mean magnitude?"),
        ({"method": "magnitude"}, "must be a name such as emp-wanda, got {'method'"),
    ):
        with pytest.raises(UserError, match=re.escape(message)):
            prune_model(tiny_llama, wrong)  # type: ignore[arg-type]


def test_a_model_that_is_already_pruned_is_named(
    tiny_llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    report = prune_model(tiny_llama, "emp-magnitude")
    assert "already pruned" not in caplog.text
    masks_of(report.model, "magnitude")
    assert "llama is already pruned. Its zeros count as weights" in caplog.text
    caplog.clear()
    report.model.save_pretrained(tmp_path / "out")  # type: ignore[operator]
    report.save(tmp_path / "out")
    prune_model(tmp_path / "out", "magnitude")
    assert "out is already pruned" in caplog.text
    caplog.clear()
    report.model.load_state_dict(load(tiny_llama).state_dict())
    prune_model(report.model, "magnitude")
    assert "already pruned" not in caplog.text


def test_a_report_in_memory_prints_as_a_short_table(tiny_llama: Path) -> None:
    report = prune_model(tiny_llama, "emp-magnitude")
    assert str(report) == repr(report) == repr(report.record)
    assert len(str(report).splitlines()) <= 8
