"""Experts of a mixture: found, scored by a calibration pass, removed or closed in their routers,
and what is left refitted.

They are found by structure. A field of config.json is their number if a model with one expert less
has exactly these smaller tensors: the stacks of all experts, the router, its biases. So no family
is named here.

Scores of expert e, over the tokens t routed to it, with g_te the weight that the router gives it
and f_e its output:

reap: mean_t g_te ||f_e(x_t)||     (REAP, arXiv 2510.13999)        mass: sum_t g_te ||f_e(x_t)||
man: mean_t ||f_e(x_t)||           frequency: number of tokens     magnitude: ||W_e||_F of all its
weights
"""

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from emp_llm.calibration.passes import own_batches
from emp_llm.common.errors import UserError, shortened_list
from emp_llm.common.ranks import ranks
from emp_llm.models.architecture import Architecture, Target, within_block
from emp_llm.models.blockwise import BlockwiseModel, HiddenStates, Step, Walk
from emp_llm.models.hooks import layer_hooks
from emp_llm.models.layers import Layer, Shape
from emp_llm.models.modules import find_blocks, find_stacks, weight_of
from emp_llm.options.calibration import Place
from emp_llm.records.run_report import FitRecord
from emp_llm.selection.rule import NonFiniteError
from emp_llm.structure.units import (
    Changes,
    Indices,
    UnitModel,
    Units,
    field_path,
    shapes_of,
    smaller_model,
    sums_of_ranks,
)
from emp_llm.update.least_squares import add_product, output_error, refit_rows
from emp_llm.update.update import Update
from emp_llm.walk.checks import MOMENT_BYTES
from emp_llm.walk.moved import Moved, MovedWeights, in_stored_dtype
from emp_llm.walk.update import is_added

logger = logging.getLogger(__name__)
_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "top_k_experts")
_GROUPS = ("n_group", "num_expert_group")
_LINEAR = (
    nn.functional.linear,
    torch.matmul,
    torch.mm,
    Tensor.matmul,
    Tensor.mm,
    Tensor.__matmul__,
)
_SWEEPS = 3
# Between the output of a module of experts and the weighted sum of theirs, relative; rounding of
# bfloat16.
_DIFFERENCE = 0.05


@dataclass(frozen=True, eq=False)
class Experts(Units):
    """The routed experts of a block.

    Attributes:
        module: name of the smallest module that holds experts and router.
        field: of config.json that holds their number; no config of transformers has a number for
            each block.
        top_k: how many of them a token reaches.
        parts: parameter or buffer of the model -> its dimension of experts.
        own: stored tensor of one expert -> its number.
        together: stored tensor of all experts -> its dimension of experts.
        closes: stored tensors that are added to what the router chooses by; a low value there
            closes an expert.
        outputs: number of an expert -> its last matrix.
        shared: the last matrix of the expert that all tokens reach; None without one.
    """

    module: str
    field: str
    top_k: int
    parts: dict[str, int]
    own: dict[str, int]
    together: dict[str, int]
    closes: tuple[str, ...]
    outputs: list[Target]
    shared: Target | None


def find_experts(skeleton: PreTrainedModel, architecture: Architecture) -> list[Experts]:
    """The experts of every block that has some.

    Raises:
        UserError: the model has no routed experts, or they are stored in an unknown form.
    """
    config: Any = skeleton.config.get_text_config()
    path, blocks = find_blocks(skeleton)
    stacks = [
        stack for stack in find_stacks(skeleton).values() if stack.name.startswith(f"{path}.")
    ]
    dense = shapes_of(skeleton)
    kind = type(skeleton).__name__
    found: tuple[str, dict[str, int], int] | None = None
    for field, number in config.to_dict().items():
        if (
            "expert" not in field
            or type(number) is not int
            or number not in {stack.shape[0] for stack in stacks}
        ):
            continue
        changes = {field_path(skeleton, architecture.checkpoint.config, field): number - 1}
        smaller = smaller_model(skeleton, architecture.checkpoint.config, changes)
        parts = None if smaller is None else _shrunk(dense, smaller, number)
        if parts and all(stack.name in parts for stack in stacks if stack.shape[0] == number):
            found = field, parts, number
            break
    if found is None:
        raise UserError(
            f"--structure experts: {kind} has no routed experts whose number a field of its config "
            "sets. Use --structure neurons, or leave it out."
        )
    field, parts, number = found
    values = [getattr(config, name, None) for name in _TOP_K]
    top_k = next((value for value in values if type(value) is int), None)
    if top_k is None:
        raise UserError(
            f"--structure experts: the config of {kind} does not say how many experts "
            "a token needs."
        )
    values = [getattr(config, name, None) for name in _GROUPS]
    groups = next((value for value in values if type(value) is int), 1)
    used = getattr(config, "topk_group", None) or 1
    least = top_k if groups == 1 else max(2, -(-top_k // used))  # a group is chosen by its two best
    if number <= least * groups:
        raise UserError(
            f"--structure experts: each token needs {top_k} of {number} experts, so none can go."
        )
    every: list[Experts] = []
    of_block = dict[int, list[Target]]()
    targets = architecture.select("all-linear")
    for target in targets:
        if (
            target.layer.expert is not None
            and target.layer.expert.parameter in parts
            and target.layer.block is not None
        ):
            of_block.setdefault(target.layer.block, []).append(target)
    for block in range(len(blocks)):
        inside = {
            name: dimension
            for name, dimension in parts.items()
            if name.startswith(f"{path}.{block}.")
        }
        if not inside:
            continue
        modules = {stack.module for stack in stacks if stack.name in inside}
        if len(modules) != 1:
            raise UserError(
                f"{path}.{block}: it has {len(modules)} modules of experts, and one "
                "number for all. They stay."
            )
        places = np.arange(number) * groups // number
        matrices = of_block.get(block, [])
        module = _common(inside)
        beside = [
            t
            for t in targets
            if t.name.startswith(f"{module}.") and t.layer.kind == "mlp" and not t.layer.routed
        ]
        shared = [
            target
            for target in beside
            if matrices and target.matrix.rows == matrices[-1].matrix.rows
        ]
        experts = Experts(
            kind="experts",
            name=modules.pop(),
            role=matrices[0].layer.role.rpartition(".*.")[0] if matrices else module,
            block=block,
            places=places,
            least=least,
            targets=matrices,
            module=module,
            field=field,
            top_k=top_k,
            parts=inside,
            **_stored(architecture, matrices, inside, number),
            shared=shared[-1] if shared else None,
        )
        every.append(experts)
    outside = [name for name in parts if not any(name in each.parts for each in every)]
    if outside:
        raise UserError(
            f"--structure experts: {shortened_list(outside)} belong to no decoder block, and have "
            "a part for each expert."
        )
    named = {name for each in every for name in (*each.own, *each.together)}
    others = [name for name in architecture.unused if name not in named and ".experts." in name]
    if others:
        # A layer that predicts a second token.
        last = every[-1]
        ends = architecture.further_blocks
        alike = {within_block(name): name for name in (*last.own, *last.together)}
        for name in architecture.unused:
            other = alike.get(ends.get(name, ""))
            if other in last.own:
                last.own[name] = last.own[other]
            elif other in last.together:
                last.together[name] = last.together[other]
            elif ".experts." in name:
                raise UserError(
                    f"--structure experts: {name} is of no expert that the model "
                    "loads. Remove it there first."
                )
        logger.warning(
            "warning: %s, which transformers does not load, was not scored; it loses the experts "
            "that the last layer loses.",
            others[0].partition(".mlp.")[0].partition(".experts.")[0],
        )
    return every


def _shrunk(
    dense: Mapping[str, Shape], smaller: Mapping[str, Shape], number: int
) -> dict[str, int] | None:
    """The tensors that are one smaller in one dimension, which had `number`; None if others
    differ too.
    """
    parts = {}
    for name, shape in dense.items():
        other = smaller.get(name, ())
        if other == shape:
            continue
        differ = [each for each, (a, b) in enumerate(zip(shape, other, strict=False)) if a != b]
        if (
            len(other) != len(shape)
            or len(differ) != 1
            or (shape[differ[0]], other[differ[0]]) != (number, number - 1)
        ):
            return None
        parts[name] = differ[0]
    return parts if smaller.keys() <= dense.keys() else None


def _stored(
    architecture: Architecture, matrices: list[Target], parts: dict[str, int], number: int
) -> dict[str, Any]:
    """Where the tensors of a block's experts are stored: the fields `own`, `together`, `closes` and
    `outputs`.

    Raises:
        UserError: some are not stored as they are, or one by one.
    """
    own = dict[str, int]()
    together = dict[str, int]()
    outputs = dict[int, Target]()
    for target in matrices:
        assert target.layer.expert is not None
        if target.matrix.scales is not None:
            raise UserError(
                f"{target.name} is stored in FP8, and --structure needs plain weights. "
                "Use the unquantised model."
            )
        if target.matrix.expert is None:
            own[target.matrix.stored.name] = target.layer.expert.expert
        else:
            together[target.matrix.stored.name] = 0
        outputs[target.layer.expert.expert] = target  # the last one stays
    stacked = {target.layer.parameter for target in matrices}
    closes = []
    for part, dimension in parts.items():
        stored = architecture.stored_names.get(part)
        if part in stacked:
            continue
        if stored is None or architecture.checkpoint.tensors[stored].shape[dimension] != number:
            raise UserError(
                f"{part}: it has a part for each expert, and is stored in an unknown "
                "form, so no expert can go."
            )
        together[stored] = dimension
        if part.endswith("bias") and architecture.checkpoint.tensors[stored].numel == number:
            closes.append(stored)
    ordered = [outputs[expert] for expert in sorted(outputs)]
    return {"own": own, "together": together, "closes": tuple(closes), "outputs": ordered}


def _common(parts: Iterable[str]) -> str:
    """The smallest module that holds some parameters."""
    levels = zip(*(part.split(".")[:-1] for part in parts), strict=False)
    return ".".join(level[0] for level in takewhile(lambda level: len(set(level)) == 1, levels))


def expert_changes(model: UnitModel, kept: Sequence[Indices]) -> Changes:
    """The field of config.json that changes, with its new value; arguments and errors are those
    of `config_changes`.
    """
    every = [units for units in model.units if isinstance(units, Experts)]
    count = len(kept[0])
    changes: Changes = {field_path(model.skeleton, model.checkpoint.config, every[0].field): count}
    wanted = shapes_of(model.skeleton)
    for units in every:
        for name, dimension in units.parts.items():
            wanted[name] = (*wanted[name][:dimension], count, *wanted[name][dimension + 1 :])
    if smaller_model(model.skeleton, model.checkpoint.config, changes) != wanted:
        raise UserError(
            f"config.json with {every[0].field} = {count} gives a model of other shapes. Keep all "
            "shapes and close the removed experts in their routers: --keep-shapes."
        )
    return changes


def expert_sums(
    runner: BlockwiseModel, every: Sequence[Experts], tokens: Tensor, batch_size: int
) -> dict[str, Tensor]:
    """What the experts did on a text: float64, shape (4, experts), by the name of their module.

    The rows are the number of tokens, sum g ||f||, sum ||f|| and sum g, with g the weight of the
    router and f the output.

    Args:
        runner: the dense model.
        every: its experts.
        tokens: int64, shape (samples, length).
        batch_size: sequences per forward pass.

    Raises:
        UserError: memory runs out, a sum is not finite, or the model combines the outputs in
            another way.
    """
    sums = {units.name: torch.zeros(4, len(units), dtype=torch.float64) for units in every}

    def see(seen: Seen) -> None:
        norms = torch.linalg.vector_norm(seen.outputs, dim=1, dtype=torch.float32).double()
        found = [torch.ones_like(norms), seen.gates * norms, norms, seen.gates.double()]
        sums[seen.units.name][:, seen.number] += torch.stack([each.sum() for each in found]).cpu()

    batches = own_batches(tokens, batch_size)
    with runner.walk(batches, "experts") as walk:
        for step in walk.steps():
            own = [units for units in every if units.name.startswith(f"{step.name}.")]
            with _expert_hooks(runner.model, own, see):
                step.run()
    return sums_of_ranks(sums, "the outputs of its experts")


class Seen(NamedTuple):
    """An expert and what it did with the tokens of a batch that reached it.

    Attributes:
        units, number: the expert.
        tokens: numbers of its tokens in the batch, int64, shape (tokens,); None if the router
            scaled their inputs.
        gates: their weights, float32, shape (tokens,).
        inputs: of its last matrix, shape (tokens, features).
        outputs: with a bias, shape (tokens, hidden).
    """

    units: Experts
    number: int
    tokens: Tensor | None
    gates: Tensor
    inputs: Tensor
    outputs: Tensor


@contextmanager
def _expert_hooks(
    model: nn.Module, every: Sequence[Experts], see: Callable[[Seen], None]
) -> Iterator[None]:
    """Call `see` for each expert that a batch reaches, while the model runs.

    The gates are those that the router gives to the module of all experts, in the order in which
    transformers' loop over the experts takes the tokens. That they belong to these outputs is
    checked: their weighted sum must be the module's output.

    Raises:
        UserError: in the forward pass, if it is not.
    """
    hooks = ExitStack()
    by_name: dict[str, tuple[Experts, int]] = {
        target.name: (units, number)
        for units in every
        for number, target in enumerate(units.outputs)
    }
    routing: dict[str, tuple[Tensor, Tensor] | None] = {}
    totals: dict[str, Tensor] = {}

    def observe(layers: list[Layer], inputs: Tensor, outputs: Any) -> None:
        units, expert = by_name[layers[0].name]
        given = routing[units.name]
        if given is None:  # the router scaled the inputs
            see(
                Seen(
                    units,
                    expert,
                    None,
                    torch.ones(len(inputs), device=inputs.device),
                    inputs,
                    outputs,
                )
            )
            return
        position, token = given[0].T.eq(expert).nonzero(as_tuple=True)
        if len(token) != len(inputs):
            raise _unknown(units)
        gates = given[1][token, position].float()
        totals[units.name].index_add_(0, token, outputs.float() * gates[:, None])
        see(Seen(units, expert, token, gates, inputs, outputs))

    for units in every:

        def enter(module: nn.Module, args: Any, kwargs: Any, units: Experts = units) -> None:
            tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
            chosen = next(
                (each for each in tensors if not each.is_floating_point() and each.dim() == 2), None
            )
            gates = [
                each
                for each in tensors
                if chosen is not None and each.is_floating_point() and each.shape == chosen.shape
            ]
            if chosen is None and (len(tensors) != 1 or tensors[0].numel() % len(units)):
                raise _unknown(units)
            if chosen is not None and len(gates) != 1:
                raise _unknown(units)
            routing[units.name] = None if chosen is None else (chosen, gates[0])
            totals[units.name] = torch.zeros(
                tensors[0].flatten(0, -2).shape, device=tensors[0].device
            )

        def leave(module: nn.Module, args: Any, output: Any, units: Experts = units) -> None:
            total = totals.pop(units.name)
            if routing.pop(units.name) is None:
                return
            if not isinstance(output, Tensor) or output.numel() != total.numel():
                raise _unknown(units)
            wanted = output.reshape(total.shape).float()
            if float((total - wanted).norm()) > _DIFFERENCE * float(wanted.norm()):
                raise _unknown(units)

        module = model.get_submodule(units.name)
        hooks.enter_context(module.register_forward_pre_hook(enter, with_kwargs=True))
        hooks.enter_context(module.register_forward_hook(leave))
    with (
        hooks,
        layer_hooks(model, [target.layer for units in every for target in units.outputs], observe),
    ):
        yield


def _unknown(units: Experts) -> UserError:
    return UserError(
        f"{units.name}: the outputs of its experts are not weighted by the router in a known way, "
        "so they cannot be scored. Use --method magnitude or emp-magnitude."
    )


def expert_scores(units: Experts, criterion: str, sums: NDArray[np.float64]) -> NDArray[np.float64]:
    """The score of each expert, float64, shape (experts,); `sums` is an element of
    `expert_sums`.
    """
    tokens, weighted, plain, _ = sums
    scores: Any = {
        "reap": weighted / np.maximum(tokens, 1),
        "man": plain / np.maximum(tokens, 1),
        "frequency": tokens,
        "mass": weighted,
    }[criterion]
    if not scores.any():
        raise UserError(
            f"{units.name}: no token of the calibration reached it. Use another text, "
            "or --method emp-magnitude."
        )
    return scores  # type: ignore[no-any-return]


class _Closed(TorchFunctionMode):
    """While the module of a mixture runs, the logits of some experts are -inf, and so is what is
    added to choose them.
    """

    def __init__(self, module: nn.Module, units: Experts, removed: Tensor) -> None:
        super().__init__()
        tensors = module.state_dict(keep_vars=True)
        own = {part: tensors[part.removeprefix(f"{units.module}.")] for part in units.parts}
        self._removed = removed
        self._routers = {
            tuple(value.shape)
            for part, value in own.items()
            if value.dim() == 2 and not part.endswith("bias")
        }
        self._biases = {
            id(value): value.masked_fill(removed.to(value.device), -math.inf)
            for part, value in own.items()
            if value.numel() == len(removed) and part.endswith("bias")
        }
        self._done = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        args = tuple(self._biases.get(id(each), each) for each in args)
        result = func(*args, **(kwargs or {}))
        if (
            not self._done
            and func in _LINEAR
            and any(
                isinstance(each, Tensor)
                and (tuple(each.shape) in self._routers or tuple(each.shape[::-1]) in self._routers)
                for each in args[1:2]
            )
        ):
            self._done = True
            result = result.masked_fill(self._removed.to(result.device), -math.inf)
        return result


@contextmanager
def closed_routers(model: nn.Module, kept: Mapping[Experts, Indices]) -> Iterator[None]:
    """Inside this context, no token is routed to removed experts: the model computes what the
    smaller one will.

    Args:
        model: dense, on any devices.
        kept: the numbers of the experts that stay.
    """
    hooks = ExitStack()
    for units, stays in kept.items():
        removed = torch.ones(len(units), dtype=torch.bool)
        removed[torch.from_numpy(stays)] = False
        running: list[_Closed] = []

        def enter(
            module: nn.Module,
            args: Any,
            units: Experts = units,
            removed: Tensor = removed,
            running: Any = running,
        ) -> None:
            running.append(_Closed(module, units, removed))
            running[-1].__enter__()

        def leave(module: nn.Module, args: Any, output: Any, running: Any = running) -> None:
            if running:
                running.pop().__exit__(None, None, None)

        module = model.get_submodule(units.module)
        hooks.enter_context(module.register_forward_pre_hook(enter))
        hooks.enter_context(module.register_forward_hook(leave, always_call=True))
    with hooks:
        yield


def refit_experts(
    model: PreTrainedModel,
    kept: Mapping[Experts, Indices],
    tokens: Tensor,
    update: Update,
    moved: MovedWeights,
    *,
    min_expert_tokens: int = 1,
    blocks: str | None = None,
    batch_size: int = 8,
    hidden_states: Place = "auto",
) -> None:
    """Move the last matrices of the kept experts, so that each block returns what the dense one
    does. A collective call.

    Dense and smaller model run side by side, block by block. With r_t what is missing in the output
    of the smaller block for token t, and h_te the inputs of the last matrix of expert e, each of
    the experts that t reaches takes its share of r_t (an expert that all tokens reach is one with g
    = 1, if its output is added as it is):

        min over V of sum_t ||g_te V h_te - g_te W h_te - g_te^2 / (sum_e' g_te'^2) r_t||^2 + lambda
        ||V - W||^2

    These shares make the smallest changes that add up to r_t. It is done several times, each with
    what is still missing.

    Args:
        model: dense, on any devices; unchanged afterwards.
        kept: the numbers of the experts that stay.
        tokens: the calibration text, int64, shape (samples, length).
        update: its damping.
        moved: receives the weights; the blocks that it holds are not fitted again.
        min_expert_tokens: an expert that saw fewer keeps its weights.
        blocks: name of the list of decoder blocks; None: detected.
        batch_size: sequences per forward pass.
        hidden_states: where they are stored between blocks.

    Raises:
        UserError: memory runs out, a moment is not finite, or the router scales the inputs of
            experts.
    """
    runner = BlockwiseModel(model, blocks, hidden_states)
    at_block = {units.block: units for units in kept}
    batches = own_batches(tokens, batch_size)
    with runner.walk(batches, "refit") as walk, closing(walk.second()) as pruned:
        for step in walk.steps():
            step.run()
            units = at_block.get(step.index)
            targets = [] if units is None else [units.outputs[number] for number in kept[units]]
            if units is not None and units.shared is not None:
                added = is_added(model, units.shared, lambda step=step: step.output(0, walk.hidden))  # type: ignore[misc]
                targets += [units.shared] if all(ranks().gather(added)) else []
            before = {target.name: weight_of(model, target.layer).clone() for target in targets}
            with closed_routers(model, {} if units is None else {units: kept[units]}):
                if ranks().share(moved.has(step.index)):
                    found = ranks().first(partial(moved.block, step.index))
                    for target in targets:
                        weight = found[target.name].weight
                        if weight is not None:
                            weight_of(model, target.layer).copy_(weight)
                elif units is not None:
                    found = _refit_block(
                        model, units, targets, step, walk, pruned, update, min_expert_tokens
                    )
                    moved.put(step.index, found)
                for number in range(len(batches)):
                    pruned.put(number, step.output(number, pruned))
            for target in targets:
                weight_of(model, target.layer).copy_(before[target.name])


def _refit_block(
    model: PreTrainedModel,
    units: Experts,
    targets: Sequence[Target],
    step: Step,
    walk: Walk,
    pruned: HiddenStates,
    update: Update,
    min_expert_tokens: int,
) -> dict[str, Moved]:
    """Move the last matrices of a block's kept experts, in the model too; returns what became of
    them, by name.
    """
    dense = {
        target.name: weight_of(model, target.layer).to(torch.float32, copy=True)
        for target in targets
    }
    found = {target.name: Moved(None, FitRecord(tokens=0)) for target in targets}
    numbers = {
        -1 if target is units.shared else units.outputs.index(target): target for target in targets
    }
    together = max(1, MOMENT_BYTES // (8 * targets[0].matrix.columns ** 2))
    parts = [list(numbers)[first : first + together] for first in range(0, len(numbers), together)]
    for part in parts * _SWEEPS:
        sums: dict[int, list[Tensor]] = {}
        for number in range(len(walk.batches)):
            seen: list[Seen] = []

            def see_shared(
                layers: list[Layer], inputs: Tensor, outputs: Any, seen: list[Seen] = seen
            ) -> None:
                given = inputs.flatten(0, -2)
                returned = outputs.flatten(0, -2)
                all_tokens = torch.arange(len(given), device=given.device)
                seen.append(
                    Seen(
                        units,
                        -1,
                        all_tokens,
                        torch.ones(len(given), device=given.device),
                        given,
                        returned,
                    )
                )

            shared = [numbers[-1].layer] if -1 in numbers else []
            with layer_hooks(model, shared, see_shared), _expert_hooks(model, [units], seen.append):
                output = step.output(number, pruned)
            missing = (walk.hidden.get(number, output.device).float() - output.float()).flatten(
                0, -2
            )
            squares = torch.zeros(len(missing), device=missing.device)
            for each in seen:
                if each.tokens is None:
                    raise UserError(
                        f"{units.name}: its router scales the inputs of experts, so "
                        "they cannot be refitted."
                    )
                squares.index_add_(0, each.tokens, each.gates.square())
            for each in seen:
                if each.number in part and each.tokens is not None:
                    x = each.inputs.float() * each.gates[:, None]
                    share = each.gates.square() / squares[each.tokens].clamp(
                        min=torch.finfo(torch.float32).tiny
                    )
                    weight = weight_of(model, numbers[each.number].layer).float()
                    y = add_product(x, weight.T) + share[:, None] * missing[each.tokens]
                    gram, right = (add_product(each.T, x) for each in (x, y))
                    own = [
                        torch.tensor(float(len(x)), device=x.device),
                        gram,
                        right,
                        y.square().sum(0).double(),
                    ]
                    sums[each.number] = (
                        [a + b for a, b in zip(sums[each.number], own, strict=True)]
                        if each.number in sums
                        else own
                    )
        shares = ranks().gather(
            {number: [each.cpu() for each in own] for number, own in sums.items()}
        )
        for number in part:
            held = [share[number] for share in shares if number in share]
            target = numbers[number]
            count = int(sum(each[0] for each in held))
            if count < max(1, min_expert_tokens):
                found[target.name] = Moved(None, FitRecord(tokens=count))
                continue
            weight = dense[target.name]
            gram, right, energy = (
                torch.stack([each[place] for each in held]).sum(0).to(weight.device)
                for place in (1, 2, 3)
            )
            damping = update.damping_of(target.matrix.columns, count)
            try:
                new = refit_rows(
                    weight,
                    torch.ones_like(weight, dtype=torch.bool),
                    gram,
                    right,
                    damping=damping,
                    energy=energy,
                )
            except NonFiniteError as error:
                raise UserError(
                    f"{target.name}: it cannot be fitted: {error}. Try --dtype float32."
                ) from error
            errors = [
                float(
                    output_error(each, weight, gram, right, energy).sum()
                    / energy.sum().clamp(min=1e-300)
                )
                for each in (weight, new.weight)
            ]
            stored = in_stored_dtype(new.weight, target)
            weight_of(model, target.layer).copy_(stored)
            record = FitRecord(
                tokens=count,
                damping=new.damping,
                error_before=max(0.0, errors[0]),
                error_after=max(0.0, errors[1]),
            )
            found[target.name] = Moved(stored.cpu(), record)
    return found
