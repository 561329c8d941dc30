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
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from emp_llm.calibration.passes import own_batches
from emp_llm.checkpoint.matrices import torch_dtype
from emp_llm.common.errors import UserError, shorten_list
from emp_llm.common.machine import in_float64
from emp_llm.common.paths import EXPERTS_NAME
from emp_llm.common.ranks import ranks
from emp_llm.models.architecture import Architecture, Target, within_block
from emp_llm.models.blockwise import BlockwiseModel
from emp_llm.models.hooks import layer_hooks
from emp_llm.models.layers import Layer, Shape
from emp_llm.models.loading import execution_device
from emp_llm.models.modules import ExpertStack, find_blocks, find_stacks, weight_of
from emp_llm.options.recipe import Recipe
from emp_llm.options.shared import Place
from emp_llm.records.run_report import FitRecord, UnitsRecord
from emp_llm.structure.units import (
    Cuts,
    Indices,
    Scores,
    Squares,
    UnitModel,
    Units,
    finite_sums_of_ranks,
)
from emp_llm.update.least_squares import add_product
from emp_llm.update.update import Update
from emp_llm.walk.checks import MOMENT_BYTES
from emp_llm.walk.update import (
    Block,
    Sums,
    is_added,
    refit_target,
    sums_of_ranks,
)
from emp_llm.walk.updated import Updated, UpdatedWeights

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
_CLOSED = -1e30  # added to what a router chooses by, or the lowest number of the dtype
_SWEEPS = 3
_SHARED = -1  # in place of the number of an expert: the one that all tokens reach
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
        parameters: parameter or buffer of the model -> its dimension of experts.
        single: stored tensor of one expert -> its number.
        together: stored tensor of all experts -> its dimension of experts.
        closes: stored tensors that are added to what the router chooses by; a low value there
            closes an expert.
        outputs: number of an expert -> its last matrix.
        shared: the last matrix of the expert that all tokens reach; None without one.
    """

    kind = "experts"
    comparable = False  # blocks differ in the size of their outputs
    listed = True
    required = True
    remedy = (
        "Its router chooses in a way that is not known here. Please report the class of the model."
    )
    refusal = (
        "config.json with {units.field} = {kept} gives a model of other shapes. Keep all shapes "
        "and close the removed experts in their routers: --keep-shapes."
    )

    module: str
    field: str
    top_k: int
    parameters: dict[str, int]
    single: dict[str, int]
    together: dict[str, int]
    closes: list[str]
    outputs: list[Target]
    shared: Target | None

    @classmethod
    def find(cls, model: UnitModel, blocks: str | None) -> list[Self]:
        architecture = model.architecture
        path, modules = find_blocks(model.skeleton, blocks)
        stacks = [
            stack
            for stack in find_stacks(model.skeleton).values()
            if stack.name.startswith(f"{path}.")
        ]
        field, number, parameters = _number_field(model, stacks)
        top_k, least, groups = _router(model, number)
        targets = architecture.select("all-linear")
        of_block: dict[int | None, list[Target]] = {}
        for target in targets:
            if target.layer.expert is not None and target.layer.parameter in parameters:
                of_block.setdefault(target.layer.block, []).append(target)
        mixtures: list[Self] = []
        for block in range(len(modules)):
            prefix = f"{path}.{block}."
            inside = {name: place for name, place in parameters.items() if name.startswith(prefix)}
            if not inside:
                continue
            holders = {stack.module for stack in stacks if stack.name in inside}
            if len(holders) != 1:
                raise UserError(
                    f"{path}.{block}: it has {len(holders)} modules of experts, and one "
                    "number for all. They stay."
                )
            matrices = of_block.get(block, [])
            module = _common(inside)
            shared = [
                target
                for target in targets
                if target.name.startswith(f"{module}.")
                and target.layer.purpose == "mlp"
                and not target.layer.routed
                and matrices
                and target.matrix.rows == matrices[-1].matrix.rows
            ]
            mixtures.append(
                cls(
                    name=holders.pop(),
                    role=matrices[0].layer.role.rpartition(".*.")[0] if matrices else module,
                    block=block,
                    places=np.arange(number) * groups // number,
                    fewest=least * groups,
                    targets=matrices,
                    collected_shape=(4, number),
                    module=module,
                    field=field,
                    top_k=top_k,
                    parameters=inside,
                    **_stored(architecture, matrices, inside, number),
                    shared=shared[-1] if shared else None,
                )
            )
        known = {name for experts in mixtures for name in experts.parameters}
        outside = [name for name in parameters if name not in known]
        if outside:
            raise UserError(
                f"--structure experts: {shorten_list(outside)} belong to no decoder block, and "
                "have a part for each expert."
            )
        _add_further(architecture, mixtures)
        return mixtures

    @classmethod
    def sums(
        cls,
        runner: BlockwiseModel,
        units: Sequence[Units],
        tokens: Tensor,
        batch_size: int,
        recipe: Recipe,
    ) -> dict[str, Tensor]:
        """What the experts did on a text: float64, shape (4, experts), by the name of their module.

        The rows are the number of tokens, sum g ||f||, sum ||f|| and sum g, with g the weight of
        the router and f the output.

        Raises:
            UserError: memory runs out, a sum is not finite, or the model combines the outputs in
                another way.
        """
        mixtures = cls.among(units)
        sums = {
            experts.name: torch.zeros(experts.collected_shape, dtype=torch.float64)
            for experts in mixtures
        }

        at_block = {experts.block: experts for experts in mixtures}

        def add(total: Tensor, seen: Seen) -> None:
            norms = in_float64(torch.linalg.vector_norm(seen.outputs, dim=1, dtype=torch.float32))
            gates = in_float64(seen.gates)
            rows = [torch.ones_like(norms), gates * norms, norms, gates]
            total[:, seen.number] += torch.stack([row.sum() for row in rows]).cpu()

        with runner.walk(own_batches(tokens, batch_size), "experts") as walk:
            for step in walk.steps():
                experts = at_block.get(step.index)
                with ExitStack() as hooks:
                    if experts is not None:
                        see = partial(add, sums[experts.name])
                        hooks.enter_context(_expert_hooks(runner.model, experts, see))
                    step.run()
        return finite_sums_of_ranks(sums, "the outputs of its experts")

    def score_of_sums(self, criterion: str, sums: Scores) -> Scores:
        tokens, weighted, plain, _ = sums
        scores: Scores = {
            "reap": weighted / np.maximum(tokens, 1),
            "man": plain / np.maximum(tokens, 1),
            "frequency": tokens,
            "mass": weighted,
        }[criterion]
        if not scores.any():
            raise UserError(
                f"{self.name}: no token of the calibration reached it. Use another text, "
                "or --method emp-magnitude."
            )
        return scores

    def score_of_weights(self, squares: Squares, norms: Scores | None) -> Scores:
        sums = np.zeros(len(self))
        for target in self.targets:
            assert target.layer.expert is not None
            sums[target.layer.expert.expert] += squares(target.matrix, 0).sum()
        return np.sqrt(sums)

    @classmethod
    def cut(cls, model: UnitModel, kept: Mapping[Units, Indices], remove: bool) -> Cuts:
        cuts = Cuts(remove, shapes=model.shapes())
        for experts in cls.among(kept):
            experts._leave_out(model, kept[experts], cuts)
            cuts.configs = [{model.path(experts.field): len(kept[experts])}]
        return cuts

    def _leave_out(self, model: UnitModel, kept: Indices, cuts: Cuts) -> None:
        if not cuts.remove and not self.closes:
            raise UserError(
                f"--keep-shapes: the router of {self.name} has no bias, so that no expert can be "
                "closed in it. Leave it out; every layer then keeps as many experts."
            )
        tensors = model.checkpoint.tensors
        for parameter, dimension in self.parameters.items():
            cuts.shorten(parameter, dimension, len(self) - len(kept))
        stays = kept.tolist()
        listed = {"num_experts": len(self), "kept_experts": {}}
        cuts.files.setdefault(EXPERTS_NAME, listed)["kept_experts"][self.name] = stays
        for name, dimension in self.together.items():
            cuts.leave_out(name, None, tensors[name].shape, dimension, self.gone(kept))
        for name, expert in self.single.items():
            # The last number in the name is the expert's.
            before, _, after = name.rpartition(f".{expert}.")
            if cuts.remove and expert in stays:
                cuts.names[name] = f"{before}.{stays.index(expert)}.{after}"
            elif cuts.remove:
                cuts.names[name] = None
            elif expert not in stays:
                cuts.leave_out(name, None, tensors[name].shape[:1], 0, slice(None))
        for name in self.closes:
            lowest = torch.finfo(torch_dtype(tensors[name].dtype)).min
            cuts.fills[name] = max(_CLOSED, lowest / 4)

    def unreached(self, number: int) -> int:
        """How many parameters of `number` experts a token does not reach."""
        weights = sum(target.matrix.numel for target in self.targets)
        return (number - self.top_k) * (weights // len(self))

    def fitted(self, kept: Indices) -> dict[Target, Indices]:
        shared = [] if self.shared is None else [self.shared]
        return dict.fromkeys([*(self.outputs[number] for number in kept), *shared], kept[:0])

    @classmethod
    def refit(
        cls,
        kept: Mapping[Units, Indices],
        model: PreTrainedModel,
        tokens: Tensor,
        update: Update,
        updated: UpdatedWeights,
        **options: Any,
    ) -> None:
        experts = {units: kept[units] for units in cls.among(kept)}
        refit_experts(model, experts, tokens, update, updated, **options)

    def without(self, model: PreTrainedModel, kept: Indices) -> AbstractContextManager[Any]:
        return closed_router(model, self, kept)


def note_lost_tokens(records: Mapping[Units, UnitsRecord], sums: Mapping[str, Tensor]) -> list[str]:
    """Put into the records of a model's experts what the tokens of the text lose; returns what to
    know about the scores.

    Args:
        sums: of `Experts.sums`.
    """
    unseen = {}
    mixtures = Experts.among(records)
    for experts in mixtures:
        record = records[experts]
        tokens, mass, *_ = sums[experts.name]
        gone = experts.gone(np.array(record.kept_units))
        record.tokens_lost = float(tokens[gone].sum() / tokens.sum())
        record.mass_lost = float(mass[gone].sum() / mass.sum())
        unseen[experts.name] = int((tokens == 0).sum())
    first = next((name for name, count in unseen.items() if count), None)
    if first is None:
        return []
    total = sum(map(len, mixtures))
    return [
        f"No token of the calibration reached {sum(unseen.values())} of {total:,} experts "
        f"({unseen[first]} of {first}). They score 0; use more text, or text of more kinds."
    ]


def _number_field(model: UnitModel, stacks: list[ExpertStack]) -> tuple[str, int, dict[str, int]]:
    """The field of config.json that holds the number of experts, that number, and the parameters
    and buffers that depend on it, with their dimension of experts.
    """
    dense = model.shapes()
    for field, number in model.config.to_dict().items():
        of_number = [stack.name for stack in stacks if stack.shape[0] == number]
        if "expert" not in field or type(number) is not int or not of_number:
            continue
        smaller = model.shapes_with({model.path(field): number - 1})
        parameters = None if smaller is None else _shrunk(dense, smaller, number)
        if parameters and parameters.keys() >= set(of_number):
            return field, number, parameters
    raise UserError(
        f"--structure experts: {type(model.skeleton).__name__} has no routed experts whose number "
        "a field of its config sets. Use --structure neurons, or leave it out."
    )


def _router(model: UnitModel, number: int) -> tuple[int, int, int]:
    """How many experts a token reaches, how many it needs in every group, and the number of
    groups; UserError if all are needed.
    """

    def first_number(names: Sequence[str], default: int | None) -> int | None:
        values = [getattr(model.config, name, None) for name in names]
        return next((value for value in values if type(value) is int), default)

    top_k = first_number(_TOP_K, None)
    if top_k is None:
        raise UserError(
            f"--structure experts: the config of {type(model.skeleton).__name__} does not say how "
            "many experts a token needs."
        )
    groups = first_number(_GROUPS, 1) or 1
    used = getattr(model.config, "topk_group", None) or 1
    least = top_k if groups == 1 else max(2, -(-top_k // used))  # a group is chosen by its two best
    if number <= least * groups:
        raise UserError(
            f"--structure experts: each token needs {top_k} of {number} experts, so none can go."
        )
    return top_k, least, groups


def _add_further(architecture: Architecture, mixtures: Sequence[Experts]) -> None:
    """Add the stored experts of a layer that predicts a second token, which transformers does not
    load: it loses those that the last layer loses. UserError for experts of no known use.
    """
    known = {name for experts in mixtures for name in (*experts.single, *experts.together)}
    others = [name for name in architecture.unused if name not in known and ".experts." in name]
    if not others:
        return
    last = mixtures[-1]
    ends = architecture.further_blocks
    alike = {within_block(name): name for name in (*last.single, *last.together)}
    for name in architecture.unused:
        other = alike.get(ends.get(name, ""))
        if other in last.single:
            last.single[name] = last.single[other]
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


def _shrunk(
    dense: Mapping[str, Shape], smaller: Mapping[str, Shape], number: int
) -> dict[str, int] | None:
    """The tensors that are one smaller in one dimension, which had `number`; None if others
    differ too.
    """
    dimensions = {}
    for name, shape in dense.items():
        other = smaller.get(name, ())
        if other == shape:
            continue
        pairs = zip(shape, other, strict=False)
        differ = [place for place, pair in enumerate(pairs) if pair[0] != pair[1]]
        if len(other) != len(shape) or len(differ) != 1:
            return None
        place = differ[0]
        if (shape[place], other[place]) != (number, number - 1):
            return None
        dimensions[name] = place
    return dimensions if smaller.keys() <= dense.keys() else None


def _stored(
    architecture: Architecture, matrices: list[Target], parameters: dict[str, int], number: int
) -> dict[str, Any]:
    """Where the tensors of a block's experts are stored: the fields `single`, `together`, `closes`
    and `outputs`.

    Raises:
        UserError: some are not stored as they are, or one by one.
    """
    tensors = architecture.checkpoint.tensors
    single: dict[str, int] = {}
    together: dict[str, int] = {}
    outputs: dict[int, Target] = {}
    for target in matrices:
        assert target.layer.expert is not None
        expert = target.layer.expert.expert
        if target.matrix.scales is not None:
            raise UserError(
                f"{target.name} is stored in FP8, and --structure needs plain weights. "
                "Use the unquantised model."
            )
        if target.matrix.expert is None:
            single[target.matrix.stored.name] = expert
        else:
            together[target.matrix.stored.name] = 0
        outputs[expert] = target  # the last one stays
    stacked = {target.layer.parameter for target in matrices}
    closes = []
    for parameter, dimension in parameters.items():
        if parameter in stacked:
            continue
        stored = architecture.stored_names.get(parameter)
        if stored is None or tensors[stored].shape[dimension] != number:
            raise UserError(
                f"{parameter}: it has a part for each expert, and is stored in an unknown "
                "form, so no expert can go."
            )
        together[stored] = dimension
        if parameter.endswith("bias") and tensors[stored].numel == number:
            closes.append(stored)
    ordered = [outputs[expert] for expert in sorted(outputs)]
    return {"single": single, "together": together, "closes": closes, "outputs": ordered}


def _common(parameters: Iterable[str]) -> str:
    """The smallest module that holds some parameters."""
    levels = zip(*(name.split(".")[:-1] for name in parameters), strict=False)
    return ".".join(level[0] for level in takewhile(lambda level: len(set(level)) == 1, levels))


class Seen(NamedTuple):
    """An expert and what it did with the tokens of a batch that reached it.

    Attributes:
        number: of the expert.
        tokens: numbers of its tokens in the batch, int64, shape (tokens,); None if the router
            scaled their inputs.
        gates: their weights, float32, shape (tokens,).
        inputs: of its last matrix, shape (tokens, features).
        outputs: with a bias, shape (tokens, hidden).
    """

    number: int
    tokens: Tensor | None
    gates: Tensor
    inputs: Tensor
    outputs: Tensor


@contextmanager
def _expert_hooks(
    model: nn.Module, experts: Experts, see: Callable[[Seen], None]
) -> Iterator[None]:
    """Call `see` for each expert of a block that a batch reaches, while the model runs.

    The gates are those that the router gives to the module of all experts, in the order in which
    transformers' loop over the experts takes the tokens. They are checked: the sum of the outputs,
    weighted by them, must be the module's output.

    Raises:
        UserError: in the forward pass, if it is not.
    """
    by_name = {target.name: number for number, target in enumerate(experts.outputs)}
    # The numbers of each token's experts, and their gates; None if the router scaled the inputs.
    routed: tuple[Tensor, Tensor] | None = None
    total = torch.empty(0)

    def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
        nonlocal routed, total
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        hidden = tensors[0]
        total = torch.zeros(hidden.flatten(0, -2).shape, device=hidden.device)
        numbers = [value for value in tensors if not value.is_floating_point() and value.dim() == 2]
        if not numbers:
            if len(tensors) != 1 or hidden.numel() % len(experts):
                raise _unknown(experts)
            routed = None
            return
        shape = numbers[0].shape
        gates = [value for value in tensors if value.is_floating_point() and value.shape == shape]
        if len(gates) != 1:
            raise _unknown(experts)
        routed = (numbers[0], gates[0])

    def observe(layers: list[Layer], inputs: Tensor, outputs: Any) -> None:
        expert = by_name[layers[0].name]
        if routed is None:
            ones = torch.ones(len(inputs), device=inputs.device)
            see(Seen(expert, None, ones, inputs, outputs))
            return
        numbers, weights = routed
        position, token = numbers.T.eq(expert).nonzero(as_tuple=True)
        if len(token) != len(inputs):
            raise _unknown(experts)
        gates = weights[token, position].float()
        total.index_add_(0, token, outputs.float() * gates[:, None])
        see(Seen(expert, token, gates, inputs, outputs))

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        if routed is None:
            return
        if not isinstance(output, Tensor) or output.numel() != total.numel():
            raise _unknown(experts)
        wanted = output.reshape(total.shape).float()
        if float((total - wanted).norm()) > _DIFFERENCE * float(wanted.norm()):
            raise _unknown(experts)

    module = model.get_submodule(experts.name)
    with (
        module.register_forward_pre_hook(enter, with_kwargs=True),
        module.register_forward_hook(leave),
        layer_hooks(model, [target.layer for target in experts.outputs], observe),
    ):
        yield


def _unknown(experts: Experts) -> UserError:
    return UserError(
        f"{experts.name}: the outputs of its experts are not weighted by the router in a known "
        "way, so they cannot be scored. Use --method magnitude or emp-magnitude."
    )


class _Closed(TorchFunctionMode):
    """While the module of a mixture runs, the logits of some experts are -inf, and so is what is
    added to choose them.
    """

    def __init__(self, module: nn.Module, experts: Experts, removed: Tensor) -> None:
        super().__init__()
        tensors = module.state_dict(keep_vars=True)
        of_experts = {
            name: tensors[name.removeprefix(f"{experts.module}.")] for name in experts.parameters
        }
        self._removed = removed
        self._routers = {
            tuple(value.shape)
            for name, value in of_experts.items()
            if value.dim() == 2 and not name.endswith("bias")
        }
        self._biases = {
            id(value): value.masked_fill(removed.to(value.device), -math.inf)
            for name, value in of_experts.items()
            if value.numel() == len(removed) and name.endswith("bias")
        }
        self._done = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        args = tuple(self._biases.get(id(value), value) for value in args)
        result = func(*args, **(kwargs or {}))
        if self._done or func not in _LINEAR:
            return result
        shapes = [tuple(value.shape) for value in args[1:2] if isinstance(value, Tensor)]
        if any(shape in self._routers or shape[::-1] in self._routers for shape in shapes):
            self._done = True
            result = result.masked_fill(self._removed.to(result.device), -math.inf)
        return result


@contextmanager
def closed_router(model: nn.Module, experts: Experts, kept: Indices) -> Iterator[None]:
    """Inside this context, no token is routed to the experts of a block that do not stay: the model
    computes what the smaller one will.

    Args:
        model: dense, on any devices.
        kept: the numbers of the experts that stay.
    """
    removed = torch.ones(len(experts), dtype=torch.bool)
    removed[torch.from_numpy(kept)] = False
    running: list[_Closed] = []

    def enter(module: nn.Module, args: Any) -> None:
        running.append(_Closed(module, experts, removed))
        running[-1].__enter__()  # type: ignore[no-untyped-call]

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        if running:
            running.pop().__exit__(None, None, None)  # type: ignore[no-untyped-call]

    module = model.get_submodule(experts.module)
    with (
        module.register_forward_pre_hook(enter),
        module.register_forward_hook(leave, always_call=True),
    ):
        yield


def refit_experts(
    model: PreTrainedModel,
    kept: Mapping[Experts, Indices],
    tokens: Tensor,
    update: Update,
    updated: UpdatedWeights,
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
        updated: receives the weights; the blocks that it holds are not fitted again.
        min_expert_tokens: an expert that saw fewer keeps its weights.
        blocks: name of the list of decoder blocks; None: detected.
        batch_size: sequences per forward pass.
        hidden_states: where they are stored between blocks.

    Raises:
        UserError: memory runs out, a moment is not finite, or the router scales the inputs of
            experts.
    """
    runner = BlockwiseModel(model, blocks, hidden_states)
    at_block = {experts.block: experts for experts in kept}
    batches = own_batches(tokens, batch_size)
    with runner.walk(batches, "refit") as walk, closing(walk.second()) as pruned:
        for step in walk.steps():
            step.run()
            experts = at_block.get(step.index)
            targets = []
            if experts is not None:
                targets = [experts.outputs[number] for number in kept[experts]]
                if experts.shared is not None:
                    added = is_added(model, experts.shared, partial(step.output, 0, walk.hidden))
                    targets += [experts.shared] if all(ranks().gather(added)) else []
            block = Block(model, step, targets, walk, pruned)
            with ExitStack() as hooks:
                if experts is not None:
                    hooks.enter_context(closed_router(model, experts, kept[experts]))
                results = ranks().first(partial(updated.resume, step.index, targets))
                if results is not None:
                    for target in targets:
                        block.change(target, None, results[target.name].weight)
                elif experts is not None:
                    updated.put(step.index, _refit_block(block, experts, update, min_expert_tokens))
                for number in range(len(batches)):
                    block.pass_pruned(number)


def _refit_block(
    block: Block, experts: Experts, update: Update, min_expert_tokens: int
) -> dict[str, Updated]:
    """Move the last matrices of a block's kept experts; returns what became of them, by name."""
    updated = {target.name: Updated(None, FitRecord(tokens=0)) for target in block.targets}
    by_number = {
        _SHARED if target is experts.shared else experts.outputs.index(target): target
        for target in block.targets
    }
    numbers = list(by_number)
    together = max(1, MOMENT_BYTES // (8 * block.targets[0].matrix.columns ** 2))
    chunks = [numbers[first : first + together] for first in range(0, len(numbers), together)]
    for chunk in chunks * _SWEEPS:
        sums: dict[int, Sums] = {}
        with block.pruned_weights():
            for batch in range(len(block.walk.batches)):
                _add_batch(sums, chunk, block, experts, by_number, batch)
        sums = sums_of_ranks(sums, execution_device(block.step.block))
        for number in chunk:
            target = by_number[number]
            weight = block.weight(target)
            result = refit_target(target, sums.get(number), weight, update, min_expert_tokens)
            block.change(target, None, result.weight)
            updated[target.name] = result
    return updated


def _add_batch(
    sums: dict[int, Sums],
    chunk: Sequence[int],
    block: Block,
    experts: Experts,
    by_number: Mapping[int, Target],
    batch: int,
) -> None:
    """Add what some experts of a block did with a batch to their sums."""
    seen, output = _see(block, experts, by_number.get(_SHARED), batch)
    wanted = block.dense.get(batch, output.device)
    missing = (wanted.float() - output.float()).flatten(0, -2)
    squares = torch.zeros(len(missing), device=missing.device)
    for of_expert in seen:
        if of_expert.tokens is None:
            raise UserError(
                f"{experts.name}: its router scales the inputs of experts, so "
                "they cannot be refitted."
            )
        squares.index_add_(0, of_expert.tokens, of_expert.gates.square())
    for of_expert in seen:
        if of_expert.number in chunk:
            target = by_number[of_expert.number]
            weight = weight_of(block.model, target.layer).float()
            summands = _summands(of_expert, target.name, weight, missing, squares)
            sums.setdefault(of_expert.number, Sums()).add(summands)


def _see(
    block: Block, experts: Experts, shared: Target | None, batch: int
) -> tuple[list[Seen], Tensor]:
    """What the experts of a block did with a batch, with the one that all tokens reach if it is
    fitted; and the output of the block.
    """
    seen: list[Seen] = []

    def see_shared(layers: list[Layer], inputs: Tensor, outputs: Any) -> None:
        rows = inputs.flatten(0, -2)
        tokens = torch.arange(len(rows), device=rows.device)
        gates = torch.ones(len(rows), device=rows.device)
        seen.append(Seen(_SHARED, tokens, gates, rows, outputs.flatten(0, -2)))

    of_shared = [] if shared is None else [shared.layer]
    with (
        layer_hooks(block.model, of_shared, see_shared),
        _expert_hooks(block.model, experts, seen.append),
    ):
        output = block.step.output(batch, block.pruned)
    return seen, output


def _summands(seen: Seen, name: str, weight: Tensor, missing: Tensor, squares: Tensor) -> Sums:
    """The number of tokens that an expert saw, and its summands of `Moments`.

    Args:
        name, weight: of its last matrix, float32.
        missing: r_t of each token of the batch, float32, shape (tokens, hidden).
        squares: the sum of the squared gates of each of these tokens.
    """
    assert seen.tokens is not None
    x = seen.inputs.float() * seen.gates[:, None]
    of_token = squares[seen.tokens].clamp(min=torch.finfo(torch.float32).tiny)
    shares = seen.gates.square() / of_token
    y = add_product(x, weight.T) + shares[:, None] * missing[seen.tokens]
    energy = {name: in_float64(y.square().sum(0))}
    return Sums(len(x), gram=add_product(x.T, x), right=add_product(y.T, x), energy=energy)
