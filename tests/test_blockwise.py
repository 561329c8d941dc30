"""A model run block by block has the outputs of the whole model, for every family and any place
of the weights.
"""

import json
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor, nn

from emp_llm.common.errors import UserError
from emp_llm.common.machine import torch_openmp
from emp_llm.models import loading
from emp_llm.models.blockwise import BlockwiseModel
from emp_llm.models.loading import load_model
from emp_llm.models.modules import find_blocks

Models = Callable[[str], Path]


def tokens(samples: int = 5, length: int = 40) -> Tensor:
    """Longer than the window of the sliding families, and not a multiple of the batch size."""
    return torch.randint(0, 256, (samples, length), generator=torch.Generator().manual_seed(1))


def block_map(source: Path) -> str:
    """A map with block 1 on disk and everything else on the CPU."""
    model = load_model(source, "cpu")
    path, blocks = find_blocks(model)
    names = [
        name
        for name, _ in [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    ]
    outside = {name.rpartition(".")[0]: "cpu" for name in names if not name.startswith(f"{path}.")}
    return json.dumps(
        outside | {f"{path}.{i}": "disk" if i % 2 else "cpu" for i in range(len(blocks))}
    )


@pytest.mark.parametrize(
    ("device_map", "place"), [("cpu", "disk"), ("disk", "cpu"), ("some on disk", "device")]
)
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_logits_are_the_models(models: Models, family: str, device_map: str, place: Any) -> None:
    batches = [*tokens().split(2), tokens(1, 17)]
    whole = load_model(models(family), "cpu")
    with torch.no_grad():
        expected = [whole(batch, use_cache=False).logits for batch in batches]
    model = load_model(
        models(family), block_map(models(family)) if device_map == "some on disk" else device_map
    )
    runner = BlockwiseModel(model, None, place)
    for run in range(2):  # the model is left as it was
        for ours, theirs in zip(runner.forward(batches), expected, strict=True):
            assert torch.equal(ours, theirs)
        if device_map == "some on disk":
            assert runner.bytes_read == (1 + run) * sum(
                p.nbytes for p in runner.blocks[1].parameters()
            )
            assert all(p.is_meta for p in runner.blocks[1].parameters()), (
                "its weights are gone again"
            )


@pytest.mark.skipif(torch_openmp() is None, reason="torch has no OpenMP of GCC here")
def test_the_thread_that_reads_blocks_has_no_team(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a team of its own, all threads of the process would be more than the processors, and
    libgomp would put them to sleep at every wait.
    """
    threads = torch.get_num_threads()
    seen = []
    load = loading._load_weights

    def noted(modules: Any) -> int:
        seen.append((threading.current_thread().name, torch.get_num_threads()))
        return load(modules)

    monkeypatch.setattr(loading, "_load_weights", noted)
    try:
        torch.set_num_threads(3)
        for _ in BlockwiseModel(load_model(tiny_llama, "disk"), None, "cpu").forward([tokens()]):
            seen.append((threading.current_thread().name, torch.get_num_threads()))
    finally:
        torch.set_num_threads(threads)
    of_threads = dict(seen)
    assert of_threads.pop("MainThread") == 3
    assert of_threads == {"emp-llm-weights_0": 1}


class _Toy(nn.Module):
    """A model whose forward pass is defined by the test."""

    def __init__(self, forward: Callable[[Any, Tensor], Tensor], block: type[nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(256, 8)
        self.layers = nn.ModuleList(block() for _ in range(3))
        self._forward = forward

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embedding

    def forward(self, input_ids: Tensor, use_cache: bool) -> SimpleNamespace:
        return SimpleNamespace(
            logits=self._forward(self, self.embedding(input_ids)) @ self.embedding.weight.T
        )


class _Tensor(nn.Module):
    """A block in the style of transformers 5. It writes into its input, and passes state in a
    dictionary.
    """

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, hidden_states: Tensor, shift: Tensor, state: dict[str, Tensor]) -> Tensor:
        state["sum"] = state.get("sum", torch.zeros(())) + hidden_states.sum()
        hidden_states += shift
        return self.linear(hidden_states) + state["sum"]


class _Tuple(_Tensor):
    """A block in the style of transformers 4."""

    def forward(self, hidden_states: Tensor, **others: Any) -> Any:
        return super().forward(hidden_states, **others), None


def plain(model: Any, hidden: Tensor) -> Tensor:
    state = {}
    for i, layer in enumerate(model.layers):
        hidden = layer(hidden, shift=torch.tensor(float(i)), state=state)
        hidden = hidden[0] if isinstance(hidden, tuple) else hidden
    return hidden


@pytest.mark.parametrize("block", [_Tensor, _Tuple])
def test_other_ways_to_call_a_block(block: type[nn.Module]) -> None:
    """A pass whose outputs are discarded changes nothing."""
    model = _Toy(plain, block)
    batches = [torch.arange(12).reshape(2, 6), torch.arange(6).reshape(1, 6)]
    with BlockwiseModel(model).walk(batches) as walk, torch.no_grad():
        for step in walk.steps():
            step.run(advance=False)
            step.run()
        for number, batch in enumerate(batches):
            assert torch.equal(walk.tail(number).logits, model(batch, False).logits)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("between", "changes the hidden states between blocks 0 and 1"),
        ("twice", "the model calls block 0 in place of block 3"),
        ("skipping", "only 2 of its 3 blocks"),
        ("depending", "the arguments of block 1 depend on the outputs"),
        ("two outputs", "cannot be run one at a time: not enough values to unpack"),
    ],
)
def test_models_with_inseparable_blocks_are_refused(kind: str, said: str) -> None:
    def forward(model: Any, hidden: Tensor) -> Tensor:
        for layer in {"twice": [*model.layers, *model.layers], "skipping": model.layers[:2]}.get(
            kind, model.layers
        ):
            hidden = layer(
                hidden, shift=hidden.mean() if kind == "depending" else torch.zeros(()), state={}
            )
            hidden = hidden * 2 if kind == "between" else hidden
            hidden, _ = hidden if kind == "two outputs" else (hidden, None)
        return hidden

    model = _Toy(forward, _Tensor)
    with pytest.raises(UserError, match=f"{said}.*leave out what runs block by block"):
        list(BlockwiseModel(model).forward([torch.arange(6).reshape(1, 6)]))
    assert not any("forward" in vars(layer) for layer in model.layers)


def test_blocks_by_name(tiny_llama: Path) -> None:
    model = load_model(tiny_llama, "cpu")
    assert find_blocks(model, "model.layers")[1] is model.model.layers
    for wrong in ("model.blocks", "model.norm"):
        with pytest.raises(
            UserError,
            match=rf"--blocks '{wrong}' is not a list of modules.*are: "
            r"model\.layers\.",
        ):
            BlockwiseModel(model, wrong)
    with pytest.raises(UserError, match=r"found no decoder blocks.*--blocks PATH"):
        find_blocks(nn.Linear(2, 2))


def test_a_block_that_runs_out_of_memory(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_model(tiny_llama, "cpu")

    def fail(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(model.model.layers[1].mlp, "forward", fail)
    with pytest.raises(
        UserError,
        match=r"model\.layers\.1: out of memory on cpu with 5 sequences of 40 .*--batch-size",
    ):
        list(BlockwiseModel(model).forward([tokens()]))
