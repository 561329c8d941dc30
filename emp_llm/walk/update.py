"""The update of a model: the calibration text passes through the dense and the pruned model side by
side, block by block.

Each target is updated on the inputs xhat that it gets from its pruned and moved predecessors. It
shall return there what the dense layer returns on its dense inputs x. With the weights w_t of the
tokens:

    min over What with the mask of sum_t w_t ||What xhat_t - W x_t||^2

The targets of a block come level by level, in the order of their calls, so that each sees what the
levels before it really return.

An update that reads no dense outputs needs one stream, as in the code of SparseGPT's paper: the
targets of a block shall return what their dense weights return on the inputs that they have in the
dense block, behind pruned blocks. They are one level.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from emp_llm.calibration.passes import own_batches
from emp_llm.common.errors import UserError
from emp_llm.common.machine import (
    exact_device,
    float32_products,
    in_float64,
    out_of_memory,
)
from emp_llm.common.ranks import ranks
from emp_llm.models.architecture import Target
from emp_llm.models.blockwise import BlockwiseModel, HiddenStates, Step, Walk
from emp_llm.models.hooks import layer_hooks
from emp_llm.models.layers import Layer
from emp_llm.models.loading import execution_device
from emp_llm.models.modules import as_created, bias_of, set_to_zero, weight_of
from emp_llm.options.shared import Place
from emp_llm.records.run_report import FitRecord
from emp_llm.selection.rule import NonFiniteError
from emp_llm.update.least_squares import (
    Solution,
    add_moments,
    add_product,
    output_error,
    symmetric,
)
from emp_llm.update.update import Allowed, Moments, Pattern, Update
from emp_llm.walk.checks import MOMENT_BYTES, held_out, updatable
from emp_llm.walk.updated import Updated, UpdatedWeights, round_to_stored

_SAME = 0.01  # rounding of bfloat16, relative
OfTarget = Callable[[Target], Tensor]
Key = TypeVar("Key")


def update_model(
    model: PreTrainedModel,
    targets: Sequence[Target],
    tokens: Tensor,
    update: Update,
    updated: UpdatedWeights,
    *,
    mask_of: OfTarget,
    counts_of: OfTarget | None = None,
    pattern: Pattern | None = None,
    min_expert_tokens: int = 1,
    blocks: str | None = None,
    batch_size: int = 8,
    hidden_states: Place = "auto",
) -> None:
    """Update all blocks that `updated` does not hold yet, and put them there. A collective call.

    Args:
        model: dense, on any devices, offloaded or not; unchanged afterwards.
        targets: those outside of the language model's decoder blocks are left out.
        tokens: the calibration text, int64, shape (samples, length). One sequence of sixteen is
            held out: no weight is fitted to it, and it measures the error.
        update: how the weights move.
        updated: of the first rank; the other ranks' stay empty.
        mask_of: returns the mask of a target, bool, shape (outputs, inputs), true where kept. After
            a search, only for targets that it leaves out: experts with few tokens, and layers that
            their block does not call.
        counts_of: returns how many weights of a target a search keeps, int64: of each row, shape
            (outputs,), or of the matrix, shape (1,). Not needed with a pattern.
        pattern: (N, M): a search keeps N of every M inputs.
        min_expert_tokens: experts that saw fewer tokens keep their weights.
        blocks: name of the list of decoder blocks; None: detected.
        batch_size: sequences per forward pass.
        hidden_states: where they are stored between blocks.

    Raises:
        UserError: the model cannot run block by block, memory runs out, or a moment is not finite.
    """
    targets = updatable(targets)
    runner = BlockwiseModel(model, blocks, hidden_states)
    batches, fitting, measuring = batches_of(tokens, batch_size)

    def allowed_of(target: Target) -> Allowed:
        if pattern is not None or counts_of is None:
            return Allowed(pattern=pattern)
        return Allowed(counts=counts_of(target))

    removed_of = None if update.searches else (lambda target: ~mask_of(target))
    remedy = (
        f"{update.name}: out of memory. Keep less on the device (--device-map disk, "
        "--hidden-states cpu), or use --device-map cpu."
    )
    with (
        out_of_memory(lambda: remedy),
        runner.walk(batches, update.name) as walk,
        ExitStack() as stack,
    ):
        pruned = walk.hidden
        if update.restores_dense:
            pruned = stack.enter_context(closing(walk.second()))
        for step in walk.steps():
            members = [target for target in targets if target.name.startswith(f"{step.name}.")]
            block = Block(model, step, members, walk, pruned)
            if step.index == 0 and execution_device(step.block).type == "cuda":
                # On a CPU, the memory of a second block is dearer than the time.
                stack.enter_context(updated.behind())
            resumed = partial(updated.resume, step.index, members, removed_of)
            outcomes = ranks().first(resumed) if members else {}
            if outcomes is None:
                outcomes = _update_block(
                    block, update, fitting, measuring, mask_of, allowed_of, min_expert_tokens
                )
                updated.put(step.index, outcomes)
            else:
                for target in members:
                    weight = outcomes[target.name].weight
                    block.change(target, mask_of(target) if weight is None else None, weight)
                if update.restores_dense:
                    step.run()
            for number, batch in enumerate(walk.batches):
                block.pass_pruned(number)
                if not update.restores_dense:
                    walk.advance(batch)
            block.close()


def batches_of(tokens: Tensor, batch_size: int) -> tuple[list[Tensor], range, range]:
    """The batches of this rank; and the numbers of those to which weights are fitted, and of those
    that only measure the error: one sequence of sixteen.

    Args:
        tokens: int64, shape (samples, length).
        batch_size: sequences per forward pass.
    """
    held = held_out(len(tokens))
    batches = own_batches(tokens[: len(tokens) - held], batch_size)
    rest = ranks().assigned(torch.split(tokens[-held:], batch_size)) if held else ()
    fitting = range(len(batches))
    return [*batches, *rest], fitting, range(len(batches), len(batches) + len(rest))


class Block:
    """A block whose weights are loaded, and the hidden states of all batches in both streams.

    Attributes:
        dense: the hidden states that enter the dense block, and after its pass those that leave it.
        pruned: those that enter the pruned block.
        masks: of the targets that were pruned by one, by name, on the model's device.
        values: the pruned and moved weights, by the name of the parameter.
        times: how often the block calls each layer, by name.
    """

    def __init__(
        self, model: nn.Module, step: Step, targets: list[Target], walk: Walk, pruned: HiddenStates
    ) -> None:
        self.model = model
        self.step = step
        self.targets = targets
        self.walk = walk
        self.dense = walk.hidden
        self.pruned = pruned
        self.masks = dict[str, Tensor]()
        self.times: Counter[str] = Counter()
        self._end: Any = None  # the last target's module, and its inputs in each batch
        self.end_inputs: HiddenStates | None = None
        self._parameters = {
            name: model.get_parameter(name)
            for name in dict.fromkeys(t.layer.parameter for t in targets)
        }
        self.values = dict[str, Tensor]()
        for name, parameter in self._parameters.items():
            with as_created(parameter):
                self.values[name] = parameter.data.clone()

    @contextmanager
    def pruned_weights(self) -> Iterator[None]:
        """Inside this context, the block has its pruned and moved weights; outside, the dense
        ones.
        """
        dense = {name: parameter.data for name, parameter in self._parameters.items()}
        try:
            for name, parameter in self._parameters.items():
                parameter.data = self.values[name]
            yield
        finally:
            for name, parameter in self._parameters.items():
                parameter.data = dense[name]

    def weight(self, target: Target) -> Tensor:
        """The dense weight of a target, float32, shape (outputs, inputs), where solvers run."""
        weight = weight_of(self.model, target.layer)
        return weight.to(exact_device(weight.device)).float()

    def change(self, target: Target, mask: Tensor | None, weight: Tensor | None) -> None:
        """Prune a target by a mask, and set its weight, both of shape (outputs, inputs)."""
        with self.pruned_weights():
            values = weight_of(self.model, target.layer)
            if mask is not None:
                self.masks[target.name] = mask.to(values.device)
                set_to_zero(values, ~self.masks[target.name])
            if weight is not None:
                with as_created(values):
                    values.copy_(weight)

    def pass_pruned(self, number: int) -> None:
        """Pass a batch of the pruned stream through the pruned block."""
        device = execution_device(self.step.block)
        with self.pruned_weights(), torch.no_grad():
            if self.end_inputs is None:
                output = self.step.output(number, self.pruned)
            else:
                rest = self.pruned.get(number, device)
                added = self._end(self.end_inputs.get(number, device))
                output = rest + added.view(rest.shape)  # some blocks flatten the sequences
        self.pruned.put(number, output)

    def pass_to_end(self, end: Target, number: int) -> tuple[Tensor, Tensor]:
        """Pass a batch of the pruned stream through the block up to its last target, whose outputs
        are added to the block's. `pass_pruned` then goes on from there.

        Returns:
            The target's inputs, shape (tokens, inputs), and the block's output without the
            target's, shape (sequences, length, hidden).
        """
        self._end = self.model.get_submodule(end.layer.name)
        if self.end_inputs is None:
            self.end_inputs = self.walk.store(end.matrix.columns)
        inputs = list[Tensor]()

        def add_nothing(module: nn.Module, args: Any, output: Tensor) -> Tensor:
            inputs.append(args[0].clone())  # the block may write into it
            return torch.zeros_like(output)

        handle = self._end.register_forward_hook(add_nothing)
        try:
            with self.pruned_weights():
                rest = self.step.output(number, self.pruned)
        finally:
            handle.remove()
        self.end_inputs.put(number, inputs[0])
        self.pruned.put(number, rest)
        return inputs[0].flatten(0, -2), rest

    def close(self) -> None:
        """Free the memory or the file."""
        if self.end_inputs is not None:
            self.end_inputs.close()

    def dense_calls(
        self, firsts: Collection[str], targets: list[Target], number: int
    ) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor]:
        """What the dense block does with a batch: by name, the inputs of some targets (`firsts`)
        and the outputs of `targets`; and its own output.
        """
        inputs: dict[str, list[Tensor]] = {}
        outputs: dict[str, list[Tensor]] = {}

        def observe(layers: list[Layer], given: Tensor, returned: Any) -> None:
            for layer in layers:
                if layer.name in firsts:
                    inputs.setdefault(layer.name, []).append(_tokens_of(given))
                outputs.setdefault(layer.name, []).append(_tokens_of(returned))

        with layer_hooks(self.model, [target.layer for target in targets], observe):
            output = self.step.output(number, self.dense)
        return _of_all_calls(inputs), _of_all_calls(outputs), output

    def pruned_inputs(self, targets: list[Target], number: int, whole: bool) -> dict[str, Tensor]:
        """The inputs of some targets in a batch of the pruned stream, by name.

        Args:
            whole: run the block to its end. Else it stops when all targets were called as often as
                in the dense block.
        """
        inputs: dict[str, list[Tensor]] = {}
        names = {target.name for target in targets}

        def observe(layers: list[Layer], given: Tensor, returned: Any) -> None:
            for layer in layers:
                inputs.setdefault(layer.name, []).append(_tokens_of(given))
            if not whole and all(
                len(inputs.get(name, ())) >= self.times.get(name, 1) for name in names
            ):
                raise _AllSeen

        with (
            layer_hooks(self.model, [target.layer for target in targets], observe),
            suppress(_AllSeen),
            self.pruned_weights(),
        ):
            self.step.output(number, self.pruned)
        return _of_all_calls(inputs)


def _tokens_of(features: Tensor) -> Tensor:
    """A copy, because the block may write into the features, of shape (tokens, features)."""
    return features.detach().flatten(0, -2).clone()


def _of_all_calls(calls: dict[str, list[Tensor]]) -> dict[str, Tensor]:
    """The tokens of all calls of each layer, shape (tokens, features)."""
    return {
        name: tokens[0] if len(tokens) == 1 else torch.cat(tokens) for name, tokens in calls.items()
    }


class _AllSeen(Exception):
    """All targets of a level were called; the rest of the block's pass is not needed."""


@dataclass
class _Level:
    """Targets of a block whose inputs do not depend on each other's outputs: q, k and v; or the
    same matrix of all experts.

    Attributes:
        routed: the targets are experts, which see only the tokens routed to them.
        inputs: name of the first target of each distinct input -> the targets that share its
            moments.
        closing: its only target restores the outputs of the block, to which its own are added.
    """

    routed: bool
    inputs: dict[str, list[Target]] = field(default_factory=dict)
    closing: bool = False

    @property
    def targets(self) -> list[Target]:
        return [target for targets in self.inputs.values() for target in targets]

    def in_pieces(self) -> list["_Level"]:
        """The level in pieces whose moments take at most MOMENT_BYTES, or belong to one input."""
        pieces: list[_Level] = []
        held = 0
        for first, targets in self.inputs.items():
            size = 8 * targets[0].matrix.columns ** 2  # two float32 matrices
            held += size
            if not pieces or held > MOMENT_BYTES:
                pieces.append(_Level(self.routed, {}, self.closing))
                held = size
            pieces[-1].inputs[first] = targets
        return pieces


def _update_block(
    block: Block,
    update: Update,
    fitting: Sequence[int],
    measuring: Sequence[int],
    mask_of: OfTarget,
    allowed_of: Callable[[Target], Allowed],
    min_expert_tokens: int,
) -> dict[str, Updated]:
    """Update the targets of a block, and return what became of them, by name.

    Args:
        fitting, measuring: numbers of the batches that the weights are fitted to, and of those that
            only measure the error.
        allowed_of: what a search may keep of a target.
    """
    if not update.searches:  # a level sees the block with all its masks
        for target in block.targets:
            block.change(target, mask_of(target), None)
    levels = _levels(block, fitting[0], update)
    outcomes = {target.name: Updated(None, FitRecord(tokens=0)) for target in block.targets}
    called = {target.name for level in levels for target in level.targets}
    for target in block.targets:
        # The block uses the weight without calling the layer.
        if target.name not in called and target.name not in block.masks:
            block.change(target, mask_of(target), None)
    with ExitStack() as stack:
        dense = None
        if update.restores_dense:
            dense = stack.enter_context(closing(_DenseCalls(block, levels, update.relative)))
        for level in [piece for whole in levels for piece in whole.in_pieces()]:
            if level.closing and dense is not None:
                dense.close()  # it restores the outputs of the block alone
            sums = _sums_of_level(block, dense, level, fitting, update.relative)
            pairs = [
                (target, sums.get(first))
                for first, targets in level.inputs.items()
                for target in targets
            ]
            mine = {
                target.name: _update(
                    block, target, of_inputs, update, allowed_of, min_expert_tokens
                )
                for target, of_inputs in ranks().assigned(pairs)
            }
            results = {
                name: result for of_rank in ranks().gather(mine) for name, result in of_rank.items()
            }
            for target in level.targets:
                outcomes[target.name], mask = results[target.name]
                # It saw too few tokens for a search.
                if mask is None and target.name not in block.masks:
                    mask = mask_of(target)
                block.change(target, mask, outcomes[target.name].weight)
            del sums, pairs
            sums = _sums_of_level(block, dense, level, measuring, update.relative)
            for first, of_inputs in sums.items():
                for target in level.inputs[first]:
                    _measure(block, target, outcomes[target.name], of_inputs)
    for updated in outcomes.values():
        updated.weight = None if updated.weight is None else updated.weight.cpu()
    return outcomes


def _levels(block: Block, number: int, update: Update) -> list[_Level]:
    """The levels of a block in the order of their calls, which a batch shows. An update that reads
    no dense outputs has one level.
    """
    by_name = {target.name: target for target in block.targets}
    # Targets share the moments of their inputs, unless their outputs weight the tokens.
    shared = not update.relative
    levels: dict[str, _Level] = {}
    called: set[str] = set()
    last: list[tuple[Tensor, _Level, str]] = []

    def observe(layers: list[Layer], inputs: Tensor, outputs: Any) -> None:
        first = by_name[layers[0].name]
        block.times.update(layer.name for layer in layers)
        if first.name in called:
            return
        called.update(layer.name for layer in layers)
        if first.layer.routed:
            levels.setdefault(_stack(first), _Level(True))
        elif last and last[0][0] is inputs:
            last[0][1].inputs.setdefault(last[0][2] if shared else first.name, []).append(first)
        else:
            level = levels[first.name] = _Level(False, {first.name: [first]})
            last[:] = [(inputs, level, first.name)]

    with layer_hooks(block.model, [target.layer for target in block.targets], observe):
        block.step.output(number, block.dense)
    # An expert's matrix in the model, which may hold gate and up -> its first target.
    first_of: dict[tuple[str, int], str] = {}
    # Experts in one order on all ranks, whichever of them this batch reached.
    for target in block.targets:
        if target.layer.routed:
            first_name = target.name
            expert = target.layer.expert
            if shared and expert is not None:
                first_name = first_of.setdefault((expert.parameter, expert.expert), target.name)
            levels.setdefault(_stack(target), _Level(True)).inputs.setdefault(
                first_name, []
            ).append(target)
    in_order = list(levels.values())
    if not update.restores_dense:
        together = _Level(False)
        for level in in_order:
            together.inputs |= level.inputs
        return [together]
    if in_order and update.restores_block:
        last_level = in_order[-1]
        end = last_level.targets[0]
        alone = not last_level.routed and len(last_level.targets) == 1
        added = alone and is_added(block.model, end, lambda: block.step.output(number, block.dense))
        last_level.closing = all(ranks().gather(added))
    return in_order


def _stack(target: Target) -> str:
    """The matrix of all experts to which one belongs."""
    layer = target.layer
    return layer.expert.parameter if layer.expert is not None else layer.role


def is_added(model: nn.Module, target: Target, run: Callable[[], Tensor]) -> bool:
    """Whether a layer is called once in its block, and its output is added to the block's as it is:
    a change of the layer's output must change the block's by as much.

    Args:
        model: with the weights of the block.
        target: the layer.
        run: returns the block's output for a batch, shape (sequences, length, hidden).
    """
    calls = list[Tensor]()
    before = run()
    if target.matrix.rows != before.shape[-1]:
        return False
    change = float(before.float().std()) * torch.randn(
        before.shape, generator=torch.Generator().manual_seed(0)
    )
    change = change.to(before.device, before.dtype)

    def add(module: Any, inputs: Any, output: Tensor) -> Tensor:
        calls.append(output)
        return output + change.view(output.shape)

    handle = model.get_submodule(target.layer.name).register_forward_hook(add)
    try:
        after = run()
    except RuntimeError:  # another shape
        return False
    finally:
        handle.remove()
    difference = after.float() - before.float() - change.float()
    return len(calls) == 1 and float(difference.norm()) <= _SAME * float(change.float().norm())


@dataclass
class Sums:
    """Sums over the tokens t of a level, for the targets that share its inputs. w_t are the weights
    of the tokens, xhat the inputs in the pruned model and x those in the dense one.

    Attributes:
        tokens: their number.
        gram: sum_t w_t xhat_t xhat_t^T, float32, shape (inputs, inputs).
        right: sum_t w_t y_t xhat_t^T with the wanted outputs y, float32, shape (outputs, inputs);
            None: `cross` says what is wanted.
        cross: sum_t w_t xhat_t x_t^T, float32, shape (inputs, inputs). Without both, the targets
            shall return W xhat_t.
        energy: by the name of a target, sum_t w_t y_tr^2 of each wanted output r, float64, shape
            (outputs,).
    """

    tokens: int = 0
    gram: Tensor | None = None
    right: Tensor | None = None
    cross: Tensor | None = None
    energy: dict[str, Tensor] = field(default_factory=dict)

    @property
    def moments(self) -> list[Tensor]:
        """Those that it has."""
        return [each for each in (self.gram, self.right, self.cross) if each is not None]

    def add(self, other: "Sums") -> None:
        """Add the sums over other tokens."""
        self.tokens += other.tokens
        self.gram = _total(self.gram, other.gram)
        self.right = _total(self.right, other.right)
        self.cross = _total(self.cross, other.cross)
        for name, energy in other.energy.items():
            self.add_energy(name, energy)

    def add_tokens(self, name: str, x: Tensor, y: Tensor, weights: Tensor | None) -> None:
        """Add some tokens of a target.

        Args:
            name: of the target.
            x: its inputs, shape (tokens, inputs).
            y: what it shall return, without its bias, float32, shape (tokens, outputs).
            weights: of the tokens; None: all 1.
        """
        self.tokens += len(x)
        left = x if weights is None else x.float() * weights[:, None]
        self.gram = add_moments(left, x, self.gram)
        wanted = y if weights is None else y * weights[:, None]
        self.right = add_moments(wanted, x, self.right)
        self.add_energy(name, _energy(y, weights))

    def add_energy(self, name: str, energy: Tensor) -> None:
        """Add the energy of other tokens to that of a target."""
        self.energy[name] = self.energy[name] + energy if name in self.energy else energy

    def to(self, device: torch.device) -> "Sums":
        """The same on a device."""
        gram, right, cross = (
            None if each is None else each.to(device)
            for each in (self.gram, self.right, self.cross)
        )
        energy = {name: each.to(device) for name, each in self.energy.items()}
        return Sums(self.tokens, gram, right, cross, energy)


def _total(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    """The sum of both; of one alone, where the other is missing."""
    if one is None or other is None:
        return other if one is None else one
    return one + other


class _DenseCalls:
    """What a block's targets see in the dense model: a pass that advances its hidden states.

    Experts are left out, because other tokens may be routed to them there. So are the inputs of the
    closing level, because its target restores the outputs of the block.

    Attributes:
        weights: by batch and target, those of the tokens; None if all are equal.
        energy: by batch and target, sum_t w_t (W x_t)_r^2 of each output r, float64, shape
            (outputs,).
    """

    def __init__(self, block: Block, levels: list[_Level], relative: bool) -> None:
        self.weights: dict[tuple[int, str], Tensor | None] = {}
        self.energy: dict[tuple[int, str], Tensor] = {}
        inner = [level for level in levels if not level.routed and not level.closing]
        self._firsts = [first for level in inner for first in level.inputs]
        walk = block.walk
        self._inputs = walk.store(
            sum(targets[0].matrix.columns for level in inner for targets in level.inputs.values())
        )
        targets = [target for level in levels if not level.routed for target in level.targets]
        for number, batch in enumerate(walk.batches):
            inputs, outputs, output = block.dense_calls(self._firsts, targets, number)
            for place, first in enumerate(self._firsts):
                self._inputs.put(number * len(self._firsts) + place, inputs[first])
            for target in targets:
                returned = outputs[target.name]
                bias = bias_of(block.model, target.layer)
                weights = token_weights(returned) if relative else None
                self.weights[number, target.name] = weights
                self.energy[number, target.name] = _energy(
                    returned if bias is None else returned - bias, weights
                )
            walk.hidden.put(number, output)
            walk.advance(batch)

    def inputs(self, number: int, first: str, device: torch.device) -> Tensor:
        """The inputs of a target in a batch, shape (tokens, inputs)."""
        return self._inputs.get(number * len(self._firsts) + self._firsts.index(first), device)

    def close(self) -> None:
        """Free the memory or the file."""
        self._inputs.close()


def token_weights(outputs: Tensor) -> Tensor:
    """1 / ||y_t||^2 for the dense outputs y_t of each token, with their bias; 0 for outputs of
    zero.
    """
    squares = outputs.float().square().sum(1)
    return torch.where(squares > 0, squares.reciprocal(), torch.zeros_like(squares))


def _energy(outputs: Tensor, weights: Tensor | None) -> Tensor:
    """sum_t w_t y_tr^2 of each output r, float64, shape (outputs,), for the weights w_t of the
    tokens; None: all 1.
    """
    squares = outputs.float().square()
    return in_float64((squares if weights is None else squares * weights[:, None]).sum(0))


def _sums_of_level(
    block: Block,
    dense: _DenseCalls | None,
    level: _Level,
    numbers: Sequence[int],
    relative: bool,
) -> dict[str, Sums]:
    """The sums of a level over some batches of all ranks, by the first target of each input that
    saw a token.

    Args:
        dense: None for an update that reads no dense outputs.

    Raises:
        UserError: a moment is not finite.
    """
    if dense is None:
        mine = _sums_of_one_stream(block, level, numbers)
    else:
        mine = _sums_of_two_streams(block, dense, level, numbers, relative)
    sums = sums_of_ranks(mine, execution_device(block.step.block))
    for first, of_inputs in sums.items():
        finite = [moment.isfinite().all() for moment in of_inputs.moments]
        if not bool(torch.stack(finite).all()):
            raise UserError(
                f"{first}: the second moments of its inputs hold NaN or infinity, so it cannot be "
                "fitted. Try --dtype float32, or prune without a fit."
            )
        assert of_inputs.gram is not None
        of_inputs.gram = symmetric(of_inputs.gram)
        for target in level.inputs[first] if dense is None else ():
            weight = block.weight(target)
            with float32_products("highest"):
                returned = add_product(weight, of_inputs.gram)
            of_inputs.energy[target.name] = in_float64(torch.linalg.vecdot(weight, returned))
    return sums


def sums_of_ranks(mine: dict[Key, Sums], device: torch.device) -> dict[Key, Sums]:
    """The sums of all ranks, added up where solvers run for a device: on the CPU, if it has no
    float64. A collective call.
    """
    device, of_model = exact_device(device), device
    if ranks().count == 1 and device == of_model:
        return mine
    total: dict[Key, Sums] = {}
    on_cpu = {key: sums.to(torch.device("cpu")) for key, sums in mine.items()}
    for of_rank in ranks().gather(on_cpu):
        for key, sums in of_rank.items():
            total.setdefault(key, Sums()).add(sums.to(device))
    return total


def _sums_of_one_stream(block: Block, level: _Level, numbers: Sequence[int]) -> dict[str, Sums]:
    """The sums over some batches of this rank, with the inputs that the dense block gives in the
    pruned stream.
    """
    by_first: dict[str, Sums] = {}

    def observe(layers: list[Layer], given: Tensor, returned: Any) -> None:
        for name in (layer.name for layer in layers if layer.name in level.inputs):
            x = given.detach().flatten(0, -2)
            sums = by_first.setdefault(name, Sums())
            sums.tokens += len(x)
            sums.gram = add_moments(x, x, sums.gram)

    firsts = [targets[0].layer for targets in level.inputs.values()]
    with layer_hooks(block.model, firsts, observe):
        for number in numbers:
            block.step.output(number, block.pruned)
    return by_first


def _sums_of_two_streams(
    block: Block,
    dense: _DenseCalls,
    level: _Level,
    numbers: Sequence[int],
    relative: bool,
) -> dict[str, Sums]:
    """The sums over some batches of this rank, with the inputs in the pruned stream, and with what
    the targets shall return.
    """
    by_first: dict[str, Sums] = {}
    for number in numbers:
        firsts = [targets[0] for targets in level.inputs.values()]
        if level.closing:
            (end,) = firsts
            x, rest = block.pass_to_end(end, number)
            wanted = block.dense.get(number, rest.device)
            missing = missing_outputs(wanted, rest, bias_of(block.model, end.layer))
            sums = by_first.setdefault(end.name, Sums())
            sums.add_tokens(end.name, x, missing, dense.weights[number, end.name])
            continue
        inputs = block.pruned_inputs(firsts, number, whole=level.routed)
        for first, x in inputs.items():
            sums = by_first.setdefault(first, Sums())
            for target in level.inputs[first]:
                name = target.name
                y = None
                if level.routed:  # other tokens may be routed to it in the dense model
                    y = add_product(x.float(), block.weight(target).to(x.device).T)
                    weights = token_weights(y) if relative else None
                else:
                    weights = dense.weights[number, name]
                if name == first:
                    sums.tokens += len(x)
                    left = x if weights is None else x.float() * weights[:, None]
                    sums.gram = add_moments(left, x, sums.gram)
                    if not level.routed:
                        dense_x = dense.inputs(number, first, x.device)
                        sums.cross = add_moments(left, dense_x, sums.cross)
                energy = dense.energy[number, name] if y is None else _energy(y, weights)
                sums.add_energy(name, energy)
    return by_first


def missing_outputs(wanted: Tensor, rest: Tensor, bias: Tensor | None) -> Tensor:
    """What the last layer of a block shall return, without its bias: float32, shape (tokens,
    outputs).

    Args:
        wanted: the hidden states behind the layer, shape (sequences, length, hidden).
        rest: those without the layer's outputs, which are added to them.
    """
    missing = (wanted.float() - rest.float()).flatten(0, -2)
    return missing if bias is None else missing - bias.float()


def _moments_of(block: Block, target: Target, sums: Sums) -> Moments:
    """What a target saw and shall return."""
    right = sums.right
    if sums.cross is not None:
        with float32_products("highest"):
            right = add_product(block.weight(target), sums.cross.T)
    assert sums.gram is not None
    return Moments(sums.gram, right, sums.energy[target.name], sums.tokens)


def _update(
    block: Block,
    target: Target,
    sums: Sums | None,
    update: Update,
    allowed_of: Callable[[Target], Allowed],
    min_expert_tokens: int,
) -> tuple[Updated, Tensor | None]:
    """Update a target. Returns what became of it, and the mask of a search, None if there was none;
    on the CPU where other ranks get them.

    Args:
        sums: of its inputs; None if it saw no token.
    """
    tokens = 0 if sums is None else sums.tokens
    if sums is None or tokens < (max(1, min_expert_tokens) if target.layer.routed else 1):
        return Updated(None, FitRecord(tokens=tokens)), None
    weight = block.weight(target)
    if not bool(weight.isfinite().all()):
        raise UserError(
            f"{target.matrix.stored.name} holds NaN or infinity. The checkpoint is "
            "damaged; download it again."
        )
    moments = _moments_of(block, target, sums)
    allowed = allowed_of(target) if update.searches else Allowed(mask=block.masks[target.name])
    solution = solve_target(target, update, weight, moments, allowed)
    mask = solution.mask
    stored = round_to_stored(solution.weight, target)
    set_to_zero(stored, ~mask)  # not -0.0
    errors = output_errors(moments, weight, weight * mask, stored) or (0.0, 0.0)
    kept_mass = _kept_mass(weight, mask) if update.searches else None
    if ranks().count > 1:
        stored, mask = stored.cpu(), mask.cpu()
    record = FitRecord(
        tokens=tokens, damping=solution.damping, error_before=errors[0], error_after=errors[1]
    )
    return Updated(stored, record, kept_mass), mask if update.searches else None


def solve_target(
    target: Target, update: Update, weight: Tensor, moments: Moments, allowed: Allowed
) -> Solution:
    """The new values of a target, after a search with those of its refit.

    Args:
        weight: the dense one, float32, shape (outputs, inputs).
        allowed: a mask, or what a search may keep; on any device.

    Raises:
        UserError: a product is not finite.
    """
    damping = update.damping_of(target.matrix.columns, moments.tokens)
    try:
        solution = update.solve(weight, moments, allowed.to(weight.device), damping)
        if update.searches and update.refit is not None:
            of_search = Allowed(mask=solution.mask)
            solution = update.refit.solve(weight, moments, of_search, damping, solution.weight)
    except NonFiniteError as error:
        raise UserError(
            f"{target.name}: it cannot be fitted: {error}. Try --dtype float32, or "
            "prune without a fit."
        ) from error
    return solution


def refit_target(
    target: Target, sums: Sums | None, weight: Tensor, update: Update, least: int = 1
) -> Updated:
    """All weights of a target at the optimum; they stay if it saw fewer tokens than `least`.

    Args:
        sums: over the calibration tokens, with `right`; None if it saw none.
        weight: the dense one, float32, shape (outputs, inputs).

    Raises:
        UserError: a product is not finite.
    """
    tokens = 0 if sums is None else sums.tokens
    if sums is None or sums.gram is None or tokens < max(1, least):
        return Updated(None, FitRecord(tokens=tokens))
    moments = Moments(sums.gram, sums.right, sums.energy[target.name], tokens)
    everything = Allowed(mask=torch.ones_like(weight, dtype=torch.bool))
    solution = solve_target(target, update, weight, moments, everything)
    before, after = output_errors(moments, weight, weight, solution.weight) or (0.0, 0.0)
    record = FitRecord(
        tokens=tokens, damping=solution.damping, error_before=before, error_after=after
    )
    return Updated(round_to_stored(solution.weight, target).cpu(), record)


def _kept_mass(weight: Tensor, mask: Tensor) -> float:
    """The share of sum |W| in the kept weights; 1 for a matrix of zeros. Summed by rows: a sum of
    all depends on the threads.
    """
    magnitudes = weight.abs()
    masses = (each.sum(1, dtype=torch.float64).sum() for each in (magnitudes * mask, magnitudes))
    kept, total = torch.stack(list(masses)).tolist()
    return kept / total if total else 1.0


def _measure(block: Block, target: Target, updated: Updated, sums: Sums) -> None:
    """Put the errors of the masked and of the moved weights into the record of a target."""
    weight = block.weight(target)
    masked = weight * block.masks[target.name].to(weight.device)
    new = masked if updated.weight is None else updated.weight
    errors = output_errors(_moments_of(block, target, sums), weight, masked, new)
    if errors is not None:
        updated.record.held_out_before, updated.record.held_out_after = errors


def output_errors(
    moments: Moments, dense: Tensor, before: Tensor, after: Tensor
) -> tuple[float, float] | None:
    """sum_t w_t ||V xhat_t - y_t||^2 / sum_t w_t ||y_t||^2 for the weights V before and after an
    update; None where all y are 0.

    Args:
        dense: weights, as the others of shape (outputs, inputs).
    """

    def error(weight: Tensor) -> Tensor:
        by_row = output_error(
            weight.to(dense.device).float(), dense, moments.gram, moments.right, moments.energy
        )
        return by_row.sum()

    # The CPU waits for a GPU once.
    total, *errors = torch.stack([moments.energy.sum(), error(before), error(after)]).tolist()
    if total <= 0:
        return None
    first, second = (max(0.0, value / total) for value in errors)
    return first, second
