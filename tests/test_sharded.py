"""Models whose weights are sharded over processes keep their zeros in training; where weights must
be whole, a sentence says what to do.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from launch import launch
from torch import Tensor, nn
from torch.distributed import get_rank, init_process_group, is_initialized
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, PreTrainedModel

from emp_llm import (
    Masks,
    SparsityCallback,
    heal_model,
    masks_of,
    prune_model,
    reapply_mask,
)
from emp_llm.common.errors import UserError
from emp_llm.models.masks import masks_in

Models = Callable[[str], Path]
STEPS = 3


def load(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def whole(values: Tensor) -> Tensor:
    values = values.full_tensor() if isinstance(values, DTensor) else values
    return values.detach().clone()


def whole_weights(model: nn.Module) -> dict[str, Tensor]:
    """The weights of all processes."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    return {
        name.replace("_checkpoint_wrapped_module.", ""): whole(values)
        for name, values in model.named_parameters()
    }


def wrap_block(block: nn.Module) -> bool:
    return type(block).__name__ == "LlamaDecoderLayer"


def train(model: nn.Module, source: Path | Masks) -> None:
    """Some steps, the first of them by the callback, the last without it."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    inside = getattr(model, "module", model)
    callback = SparsityCallback(source)
    callback.on_train_begin(None, None, None, model=inside)
    for step in range(STEPS + 1):
        ids = torch.arange(24).view(2, 12) + step
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        if step < STEPS:
            callback.on_optimizer_step(None, None, None, model=inside)
        optimizer.zero_grad()
    with torch.no_grad():
        model(input_ids=ids)  # after it, fully_shard keeps weights whole
    broken = reapply_mask(model, source)
    # Of four experts, the last of three processes holds none.
    assert broken > 0 or (is_initialized() and get_rank() == 2)
    assert reapply_mask(model, source) == 0


def check_weights(found: dict[str, Tensor], expected: dict[str, Tensor], masks: Masks) -> None:
    """The zeros of a training in one process, and its other weights but for rounding."""
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        if name in masks:
            assert torch.equal(found[name] == 0, values == 0), name
            assert torch.equal(found[name] != 0, masks[name]), name
        torch.testing.assert_close(found[name], values, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_zeros_stay_in_sharded_training(
    pruned: Callable[[str], Path], tmp_path: Path, family: str
) -> None:
    folder = pruned(family)
    reference = load(folder)
    masks = masks_in(folder, reference)
    train(reference, folder)
    expected = whole_weights(reference)

    def work(rank: int) -> None:
        init_process_group("gloo")
        model = load(folder)
        apply_activation_checkpointing(model, check_fn=wrap_block)
        for block in model.model.layers if family == "llama" else ():
            fully_shard(block, mesh=init_device_mesh("cpu", (3,)))
        fully_shard(model, mesh=init_device_mesh("cpu", (3,)))
        train(model, folder if family == "llama" else masks)
        check_weights(whole_weights(model), expected, masks)
        if family != "llama":
            return
        replicated = DistributedDataParallel(load(folder))
        train(replicated, masks)
        check_weights(whole_weights(replicated.module), expected, masks)

        for refused in (
            lambda: prune_model(model, "emp-magnitude"),
            lambda: prune_model(model, data=[[1, 2, 3]]),
            lambda: masks_of(model, "emp-magnitude"),
            lambda: heal_model(model, load(folder), [[1, 2, 3]], masks=masks),
        ):
            with pytest.raises(UserError, match=r"sharded over processes.*before the model is"):
                refused()
        before = whole_weights(replicated.module)
        report = prune_model(replicated, "emp-magnitude")
        assert set(report.masks) == set(masks)
        assert any(not values.equal(before[n]) for n, values in report.model.named_parameters())
        flat = FullyShardedDataParallel(load(folder), device_id=torch.device("cpu"))
        for call in (
            lambda: prune_model(flat, "emp-magnitude"),
            lambda: reapply_mask(flat, folder),
            lambda: reapply_mask(flat, masks),
        ):
            with pytest.raises(UserError, match=r"FullyShardedDataParallel.*fully_shard"):
                call()

    # The 80 rows of an MLP do not divide by 3.
    (tmp_path / "logs").mkdir()
    done = launch(3, tmp_path, tmp_path / "logs", work=work)
    assert done.codes == [0] * 3, done.error


def test_every_process_masks_its_own_part(tmp_path: Path) -> None:
    """Also where nothing is left for the last process, and where two kinds of sharding meet."""

    def work(rank: int) -> None:
        init_process_group("gloo")
        flat = init_device_mesh("cpu", (4,))
        square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        torch.manual_seed(0)
        mask = torch.rand(5, 6) < 0.5
        masks = Masks({"weight": mask})
        for mesh, placements in (
            (flat, [Shard(0)]),
            (flat, [Shard(1)]),
            (flat, [Replicate()]),
            (square, [Shard(0), Shard(0)]),
            (square, [Replicate(), Shard(1)]),
            (square, [Shard(1), Shard(0)]),
            (square, [Shard(0), Partial()]),
        ):
            model = nn.Linear(6, 5, bias=False)
            model.weight = nn.Parameter(distribute_tensor(torch.ones(5, 6), mesh, placements))
            masks.apply(model)
            assert torch.equal(model.weight.full_tensor(), mask.float()), placements
        # fully_shard of what tensor parallelism has divided already.
        model = nn.Linear(6, 5, bias=False)
        model.weight = nn.Parameter(
            distribute_tensor(torch.ones(5, 6), square["tensor"], [Shard(0)])
        )
        fully_shard(model, mesh=square["data"])
        masks.apply(model)
        assert torch.equal(model.weight.full_tensor(), mask.float())
        twice = [_StridedShard(0, split_factor=2)] * 2
        odd = DTensor.from_local(
            torch.ones(2, 6), square, twice, shape=mask.shape, stride=mask.stride()
        )
        model.weight = nn.Parameter(odd)
        with pytest.raises(UserError, match=r"weight: .*before the model is sharded"):
            masks.apply(model)

    (tmp_path / "logs").mkdir()
    done = launch(4, tmp_path, tmp_path / "logs", work=work)
    assert done.codes == [0] * 4, done.error


def test_empty_weights_of_zero_3_are_named(tiny_llama: Path, pruned_llama: Path) -> None:
    """As DeepSpeed leaves them: empty, with their shape beside them."""
    model = load(tiny_llama)
    for number, parameter in enumerate(model.parameters()):
        parameter.ds_id, parameter.ds_shape = number, parameter.shape
    gathered = masks_of(model, "emp-magnitude")  # as within GatheredParameters
    for parameter in model.parameters():
        parameter.data = torch.empty(0)
    for call in (
        lambda: prune_model(model, "emp-magnitude"),
        lambda: prune_model(model, data=[[1, 2, 3]]),
        lambda: masks_of(model, "emp-magnitude"),
        lambda: reapply_mask(model, pruned_llama),
        lambda: reapply_mask(model, gathered),
        lambda: heal_model(model, load(tiny_llama), [[1, 2, 3]], masks=gathered),
    ):
        with pytest.raises(UserError, match=r"embed_tokens\.weight: .*ZeRO-3.*emp-llm prune"):
            call()
