"""Refits of models in memory, and refitted checkpoints in the other commands."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from hub_client import Client, card_of, contents
from hub_server import Hub
from runs import check_verified
from torch import nn
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
)

from emp_llm import (
    masks_of,
    pack,
    prune,
    prune_model,
    reapply_mask,
    recipe_of,
    report,
    unpack,
)
from emp_llm.common.errors import UserError
from emp_llm.models.blockwise import HiddenStates
from emp_llm.runs import prune_model as in_memory
from emp_llm.walk.update import Block

Models = Callable[[str], Path]
GIVEN: dict[str, Any] = {"samples": 4, "seqlen": 64}


def load(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto")


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(tensor, other[name]) for name, tensor in one.items()
    )


@pytest.fixture(scope="module")
def refitted(tiny_llama: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Llama, pruned by Wanda and refitted, by the command; and pruned without a refit
    in "plain" beside it.
    """
    folder = tmp_path_factory.mktemp("refitted")
    (folder / "suite.toml").write_text('[perplexity]\nfile = "heldout.txt"\nseqlen = 64\n')
    (folder / "heldout.txt").write_text(text.read_text()[-3000:])
    common = {
        "calibration": str(text),
        "device_map": "cpu",
        "method": "wanda",
        "targets": "all-linear",
    }
    common |= {"evaluate": str(folder / "suite.toml")} | GIVEN
    prune(tiny_llama, output=folder / "refitted", refit=True, **common)
    prune(tiny_llama, output=folder / "plain", baseline=folder / "refitted", **common)
    return folder / "refitted"


@pytest.mark.parametrize(
    ("family", "continued"),
    [
        ("llama", True),
        ("gpt2", True),
        ("opt", True),
        ("gpt_neox", True),
        ("gemma2", False),
        ("mixtral", False),
    ],
)
def test_the_last_pass_goes_on_from_the_end(
    family: str,
    continued: bool,
    models: Models,
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A block whose last layer adds to its output runs once less, with the bits of a whole pass;
    GPT-NeoX adds its parts in another order.
    """
    entered = {}
    compared = []
    to_end = Block.pass_to_end
    whole = Block.pass_pruned

    def noted(self: Block, end: Any, number: int) -> Any:
        entered[number] = self.pruned.get(number, torch.device("cpu")).clone()
        return to_end(self, end, number)

    def both(self: Block, number: int) -> None:
        whole(self, number)
        if number in entered:
            states = HiddenStates("cpu")
            states.put(number, entered.pop(number))
            with self.pruned_weights():
                wanted = self.step.output(number, states)
            output = self.pruned.get(number, torch.device("cpu"))
            if family == "gpt_neox":
                torch.testing.assert_close(output, wanted, rtol=0.02, atol=0.02)
            else:
                assert torch.equal(output, wanted)
            compared.append(number)

    monkeypatch.setattr(Block, "pass_to_end", noted)
    monkeypatch.setattr(Block, "pass_pruned", both)
    how = GIVEN | {"calibration": str(text), "device_map": "cpu"}
    prune(models(family), output=tmp_path / "out", method="wanda", refit=True, **how)
    batches = 2  # the fourth sequence is held out
    assert len(compared) == (2 * batches if continued else 0)


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "refit": ("llama", {"method": "wanda", "targets": "all-linear", "refit": True}),
    "Conv1D": (
        "gpt2",
        {
            "method": "emp-relative",
            "refit": True,
            "refit_weighting": "relative",
            "refit_damping": 0.02,
        },
    ),
    "experts": ("mixtral", {"method": "magnitude", "refit": True}),
    "sparsegpt": ("qwen3_moe", {"method": "sparsegpt", "targets": "all-linear"}),
    "admm": (
        "mixtral",
        {"method": "emp-admm", "sparsity": 0.4, "targets": "all-linear", "refit": True},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_bits_of_the_command(models: Models, text: Path, tmp_path: Path, case: str) -> None:
    family, options = CASES[case]
    recipe = recipe_of(**options)
    source = models(family)
    out = tmp_path / "out"
    written = prune(
        model=source, output=out, calibration=str(text), device_map="cpu", **options, **GIVEN
    )
    model = load(source)
    in_memory = prune_model(
        model, recipe, str(text), AutoTokenizer.from_pretrained(source), **GIVEN
    )
    assert same(state(model), state(load(out)))
    assert in_memory.record.fits == written.fits
    assert in_memory.matrices == written.matrices
    assert (in_memory.targets, in_memory.record.recipe, in_memory.warnings) == (
        written.targets,
        written.recipe,
        written.warnings,
    )
    folder = tmp_path / "saved"
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    in_memory.save(folder)
    check_verified(folder, source)
    assert reapply_mask(load(folder), folder) == 0
    masks = masks_of(
        load(source), recipe, str(text), AutoTokenizer.from_pretrained(source), **GIVEN
    )
    assert same(masks, in_memory.masks)


@pytest.mark.parametrize("method", ["wanda", "sparsegpt"])
def test_wrong_input_in_memory(
    tiny_llama: Path, text: Path, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model stays as it was."""
    recipe = recipe_of(method=method, refit=method != "sparsegpt")
    model = load(tiny_llama)
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    before = state(model)
    flag = "method sparsegpt" if method == "sparsegpt" else r"update=Refit\(\)"
    with pytest.raises(UserError, match=rf"^{flag} fits weights to calibration data; give data="):
        prune_model(model, recipe)
    with pytest.raises(
        UserError,
        match=r"^data: batches cannot run block by block.*give texts or token ids",
    ):
        prune_model(model, recipe, DataLoader(torch.arange(256).reshape(4, 64), batch_size=2))  # type: ignore[arg-type]
    with pytest.raises(
        UserError,
        match=rf"^{flag} runs a model of transformers block by block; "
        r"Sequential is not one",
    ):
        prune_model(
            nn.Sequential(nn.Linear(8, 8)),
            recipe_of(method=method, refit=method != "sparsegpt", targets=".*"),
            torch.randn(4, 8),
        )
    move_weights = in_memory.move_weights

    def fail(*arguments: Any, **options: Any) -> None:
        move_weights(*arguments, **options)
        raise RuntimeError("out of luck")

    monkeypatch.setattr(in_memory, "move_weights", fail)
    with pytest.raises(RuntimeError, match="out of luck"):
        prune_model(model, recipe, str(text), tokenizer, **GIVEN)
    assert same(state(model), before)


def test_a_model_that_is_offloaded(tiny_llama: Path, text: Path) -> None:
    source = tiny_llama
    recipe = recipe_of(method="wanda", refit=True)
    plain = load(source)
    offloaded = load(source)
    accelerate.cpu_offload(offloaded, execution_device=torch.device("cpu"))
    for model in (plain, offloaded):
        prune_model(model, recipe, str(text), source, **GIVEN)
    ids = torch.arange(32)[None]
    with torch.no_grad():
        assert torch.equal(plain(ids).logits, offloaded(ids).logits)


def test_pack_and_unpack(refitted: Path, tiny_llama: Path, tmp_path: Path) -> None:
    """A packed mask cannot bring fitted weights back: the dense model does not hold them."""
    pack(refitted, tmp_path / "packed")
    unpack(tmp_path / "packed", tmp_path / "again")
    assert contents(tmp_path / "again") == contents(refitted)
    check_verified(tmp_path / "again", tiny_llama)
    with pytest.raises(UserError, match=r"its kept weights were fitted.*Leave out --mask-only"):
        pack(refitted, tmp_path / "mask", mask_only=True)
    assert not (tmp_path / "mask").exists()


def test_pushed_with_a_card_that_says_so(hub: Hub, client: Client, refitted: Path) -> None:
    done = client.call("push", folder=refitted, repository="user/refitted")
    assert "result" in done, done
    _, body = card_of(hub, "user/refitted")
    assert (
        "The kept weights of 14 matrices were fitted to the calibration text. All other weights "
        "are those"
    ) in body
    assert '| update | `{"refit": {' in body
    assert "| allow_partial |" not in body, "only what the recipe uses"


def test_the_report_page(refitted: Path, tmp_path: Path) -> None:
    report([refitted, refitted.parent / "plain"], output=tmp_path / "report", no_plots=True)
    page = (tmp_path / "report" / "report.md").read_text()
    assert page.count("\n## ") == 1
    for name in (refitted.name, "plain"):
        assert f"\n| {name} | " in page


def test_a_card_for_scores_of_ones_own(
    hub: Hub, client: Client, tiny_llama: Path, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text("def size(weight):\n    return weight.abs()\n")
    prune(tiny_llama, output=tmp_path / "out", criterion=f"{tmp_path}/mine.py:size")
    done = client.call("push", folder=tmp_path / "out", repository="user/own-scores")
    assert "result" in done, done
    body = card_of(hub, "user/own-scores")[1]
    assert '| score | `{"own": {"function": "mine:size",' in body
    assert '"source": "' in body
    assert "emp-llm verify pruned --source BASE_MODEL --criterion FILE.py:size\n" in body
