"""Whole decoder layers: found, scored by how much each changes its input, removed, and made up for
by a refit.

The refit makes the dense and the smaller model agree where a layer follows that stays. There, the
dense hidden states are d_t. In the smaller model, the last matrix W of the block before has the
inputs x_t, and its outputs are added to the hidden states r_t:

    min over V of sum_t ||r_t + V x_t - d_t||^2 + lambda ||V - W||^2

Layers that go are so made up for by the block before them; the first ones by the block after them.
ReplaceMe (arXiv 2505.02819) puts a linear map in the same place.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from emp_llm.calibration.passes import own_batches
from emp_llm.common.errors import UserError
from emp_llm.common.machine import in_float64
from emp_llm.common.ranks import ranks
from emp_llm.models.architecture import Target
from emp_llm.models.blockwise import BlockwiseModel, HiddenStates
from emp_llm.models.loading import execution_device
from emp_llm.models.modules import bias_of, find_blocks, mean_losses
from emp_llm.options.recipe import LAYER_TOKENS, Recipe, layers_at_once
from emp_llm.options.shared import Place
from emp_llm.structure.units import (
    Changes,
    Cuts,
    Indices,
    Scores,
    Squares,
    UnitModel,
    Units,
    finite_sums_of_ranks,
)
from emp_llm.update.least_squares import symmetric
from emp_llm.update.update import Moments, Update
from emp_llm.walk.checks import held_out
from emp_llm.walk.update import (
    Block,
    Sums,
    batches_of,
    is_added,
    missing_outputs,
    output_errors,
    refit_target,
    sums_of_ranks,
    token_weights,
)
from emp_llm.walk.updated import Updated, UpdatedWeights


@dataclass(frozen=True, eq=False)
class Layers(Units):
    """The decoder layers of a model, as the units of one group.

    Attributes:
        stored: a stored tensor of a layer -> its number, and the start and end of the number in the
            name. A layer that predicts several tokens follows the others, has a higher number, and
            stays.
        ends: number of a layer -> its last matrix that has the width of the hidden states, unless
            that is an expert's.
    """

    kind = "layers"
    remedy = (
        "Its layers depend on their number in a way that is not known here. Please report the "
        "class of the model."
    )
    refusal = (
        "--structure layers: no number in config.json gives {model} these {kept} of its {total} "
        "layers. Give another --sparsity, or use --structure neurons."
    )

    stored: dict[str, tuple[int, int, int]]
    ends: dict[int, Target]

    @classmethod
    def find(cls, model: UnitModel, blocks: str | None) -> list[Self]:
        architecture = model.architecture
        path, modules = find_blocks(model.skeleton, blocks)
        prefixes: dict[str, None] = {}
        names = dict(architecture.stored_names)
        names |= {
            layer.parameter: architecture.experts[layer.name].stored.name
            for layer in architecture.layers
            if layer.expert
        }
        for parameter, stored in names.items():
            if parameter.startswith(f"{path}."):
                number = parameter.removeprefix(f"{path}.").partition(".")[0]
                before = re.match(rf"((?:.*?\.)?){number}\.", stored)
                if before is None:
                    raise UserError(
                        f"--structure layers: {stored} does not name its layer, or layers share "
                        "it, so none can go by itself. Leave out --structure to prune weights."
                    )
                prefixes[before[1]] = None
        numbered = {}
        for prefix in prefixes:
            for tensor in architecture.checkpoint.tensors:
                match = re.match(rf"{re.escape(prefix)}(\d+)\.", tensor)
                if match is not None:
                    numbered[tensor] = (int(match[1]), match.start(1), match.end(1))
        name = type(model.skeleton).__name__
        count = len(modules)
        if count < 2:
            raise UserError(f"--structure layers: {name} has {count} decoder layer; none can go.")
        targets = [
            target for target in architecture.select("all-linear") if target.layer.block is not None
        ]
        layers = cls(
            name=path,
            role=path,
            block=0,
            places=np.zeros(count, dtype=np.int64),
            fewest=1,
            targets=targets,
            collected_shape=(2, count),
            stored=numbered,
            ends={
                target.layer.block: target
                for target in targets
                if target.layer.block is not None
                and target.matrix.rows == int(model.config.hidden_size)
                and not target.layer.routed
            },
        )
        # Before anything is calibrated.
        without = (np.delete(np.arange(count), number) for number in (0, count // 2))
        cuts = (cls.cut(model, {layers: kept}, True) for kept in without)
        if all(model.config_of(each) is None for each in cuts):
            raise UserError(
                f"--structure layers: the config of {name} gives the kinds of its layers by a "
                "pattern, so that no layer can go by itself. Use --structure neurons, or leave it "
                "out to prune weights."
            )
        return [layers]

    def score_of_weights(self, squares: Squares, norms: Scores | None) -> Scores:
        raise UserError("layers have no score by their weights. Choose another --method.")

    @classmethod
    def sums(
        cls,
        runner: BlockwiseModel,
        units: Sequence[Units],
        tokens: Tensor,
        batch_size: int,
        recipe: Recipe,
    ) -> dict[str, Tensor]:
        """How much each layer changes the hidden states: the sum over tokens of 1 - cos(input,
        output), and their number. Or what the model loses without it, of `losses_in_turns`.
        float64, shape (2, layers), by the name of the list.
        """
        (layers,) = cls.among(units)
        if recipe.name == "perplexity":
            return {layers.name: losses_in_turns(runner, layers, tokens, batch_size, recipe)}
        batches = own_batches(tokens, batch_size)
        sums = torch.zeros(layers.collected_shape, dtype=torch.float64)
        with runner.walk(batches, "layers") as walk:
            for step in walk.steps():
                for number, batch in enumerate(batches):
                    entered = walk.hidden.get(number, execution_device(step.block)).clone()
                    left = step.output(number, walk.hidden, isolated=False)
                    similarity = functional.cosine_similarity(entered.float(), left.float(), dim=-1)
                    change = (1 - similarity).clamp(min=0)
                    sums[0, step.index] += in_float64(change).sum().cpu()
                    sums[1, step.index] += change.numel()
                    walk.hidden.put(number, left)
                    walk.advance(batch)
        return finite_sums_of_ranks({layers.name: sums}, "its hidden states")

    def score_of_sums(self, criterion: str, sums: Scores) -> Scores:
        change, number = sums
        scores: Scores = change / np.maximum(number, 1)
        lowest: float = scores.min()
        return scores - min(0.0, lowest)  # a loss may fall; the order stays

    @classmethod
    def cut(cls, model: UnitModel, kept: Mapping[Units, Indices], remove: bool) -> Cuts:
        cuts = Cuts(remove)
        for layers in cls.among(kept):
            gone = layers.gone(kept[layers])
            for tensor, (number, start, end) in layers.stored.items():
                if number in gone:
                    cuts.names[tensor] = None
                else:
                    new = number - np.count_nonzero(gone < number)
                    if new != number:
                        cuts.names[tensor] = f"{tensor[:start]}{new}{tensor[end:]}"
            stays = kept[layers].tolist()
            for name, shape in model.shapes().items():
                inside = re.match(rf"{re.escape(layers.name)}\.(\d+)\.(.*)", name)
                if inside is None:
                    cuts.shapes[name] = shape
                elif int(inside[1]) in stays:
                    number = stays.index(int(inside[1]))
                    cuts.shapes[f"{layers.name}.{number}.{inside[2]}"] = shape
            cuts.configs = layers._configs(model, stays)
        return cuts

    def _configs(self, model: UnitModel, stays: Sequence[int]) -> list[Changes]:
        """The changes of config.json that may leave only some layers.

        The number of layers, lists with a value for each layer, lists of numbers of layers, and the
        number of dense layers at the start of a mixture.
        """
        counts = []
        changes = Changes()
        for name, value in model.config.to_dict().items():
            path = model.path(name)
            numbers = isinstance(value, list) and all(type(number) is int for number in value)
            if type(value) is int and value == len(self) and "layer" in name:
                counts.append(path)
            elif name == "first_k_dense_replace" and type(value) is int:
                changes[path] = sum(number < value for number in stays)
            elif numbers and value and "layer" in name:
                if len(value) != len(self) or max(value) > 1:  # numbers of layers
                    changes[path] = [stays.index(number) for number in value if number in stays]
                else:  # a choice for each
                    changes[path] = [value[number] for number in stays]
            elif isinstance(value, list) and len(value) == len(self) and "token" not in name:
                changes[path] = [value[number] for number in stays]
        # The length of a list may be the number.
        tried = [{path: len(stays)} | changes for path in counts] or [changes]
        return tried + [by_count | _dense_by_name(model, stays) for by_count in tried]

    def fitted(self, kept: Indices) -> dict[Target, Indices]:
        layers = self.fitted_layers(kept)
        return {self.ends[number]: kept[:0] for number in layers if number in self.ends}

    def fitted_layers(self, kept: Indices) -> list[int]:
        """The layers whose last matrix makes up for others: those before layers that go, and the
        first that stays if it is not the first.
        """
        followed = {*(kept - 1).tolist(), len(self) - 1}
        first = {int(kept[0])} - {0}
        return sorted({number for number in kept.tolist() if number not in followed} | first)

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
        (layers,) = cls.among(kept)
        refit_layers(model, layers, kept[layers], tokens, update, updated, **options)

    def without(self, model: PreTrainedModel, kept: Indices) -> AbstractContextManager[Any]:
        _, modules = find_blocks(model, self.name)
        return _pass_by([modules[number] for number in self.gone(kept)])


def _dense_by_name(model: UnitModel, stays: Sequence[int]) -> Changes:
    """A list of the dense layers of a mixture in place of a step between its sparse ones; empty
    if its config has none.
    """
    step = getattr(model.config, "decoder_sparse_step", None)
    listed = getattr(model.config, "mlp_only_layers", None)
    if not isinstance(step, int) or not isinstance(listed, list):
        return {}
    dense = [place for place, number in enumerate(stays) if number in listed or (number + 1) % step]
    return {model.path("decoder_sparse_step"): 1, model.path("mlp_only_layers"): dense}


@contextmanager
def _pass_by(blocks: Sequence[nn.Module]) -> Iterator[None]:
    """Inside this context, these decoder blocks return their hidden states unchanged."""

    def unchanged(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        hidden = args[0] if args else kwargs["hidden_states"]
        return hidden if isinstance(output, Tensor) else (hidden, *output[1:])

    with ExitStack() as hooks:
        for block in blocks:
            hooks.enter_context(block.register_forward_hook(unchanged, with_kwargs=True))
        yield


@torch.no_grad()
def losses_in_turns(
    runner: BlockwiseModel, layers: Layers, tokens: Tensor, batch_size: int, recipe: Recipe
) -> Tensor:
    """What a model loses without each of its layers and those that go before it. A collective call.

    Kim et al. 2024 (arXiv 2402.02834) score all layers once. But layers that are cheap alone may be
    dear together. So the cheapest eighth goes, and the others are scored again, until as many have
    gone as the recipe removes, or half of them.

    Args:
        runner: the dense model.
        tokens: int64, shape (samples, length); the first of them are read.
        batch_size: sequences per forward pass.
        recipe: its sparsity; and the refit, without which nothing makes up for a layer.

    Returns:
        The rise of the next-token loss in nats, summed over the sequences, and their number:
        float64, shape (2, layers). A layer of a later turn has a higher rise.

    Raises:
        UserError: memory runs out, a loss is not finite, or a last matrix cannot be fitted.
    """
    update = recipe.update
    tokens = tokens[: max(2, LAYER_TOKENS // tokens.shape[1])]
    own_batches(tokens, 1)  # raises if a rank has none
    size = max(1, min(batch_size, len(tokens) // (2 * ranks().count)))
    # The first half fits everything, also what makes up for layers that have gone: sequences that
    # measure must not be fitted.
    half = math.ceil(len(tokens) / 2)
    fitted = next(n for n in range(half, len(tokens) + 1) if n - held_out(n) == half)
    sums = torch.zeros(layers.collected_shape, dtype=torch.float64)
    stays = torch.arange(len(layers))
    least = -math.inf
    going = layers_at_once(len(layers))
    for turn in range(recipe.turns_of(len(layers))):
        updated = UpdatedWeights()
        kept = stays.numpy()
        if update is not None and turn:
            refit_layers(
                runner.model,
                layers,
                kept,
                tokens[:fitted],
                update,
                updated,
                blocks=runner.path,
                batch_size=size,
                hidden_states=runner.hidden_states,
            )
        weights = ranks().first(updated.weights)
        mine = losses_without(runner, layers, kept, weights, tokens, half, size, update)
        losses, numbers = finite_sums_of_ranks({layers.name: mine}, "its losses")[layers.name]
        if turn == 0:
            dense = losses[0]
        sums[0, stays] = (losses[1:] - dense).clamp(min=least)
        sums[1] = numbers[0]
        order = stays[sums[0, stays].argsort(stable=True)]
        least = float(sums[0, order[going - 1]] + 1e-6 * numbers[0])
        stays = order[going:].sort().values
    return sums


@torch.no_grad()
def losses_without(
    runner: BlockwiseModel,
    layers: Layers,
    kept: Indices,
    weights: Mapping[str, Tensor],
    tokens: Tensor,
    half: int,
    batch_size: int,
    update: Update | None,
) -> Tensor:
    """What a model that has some of its layers loses without each of these.

    All models without one more layer run side by side, block by block.

    Args:
        runner: the dense model.
        kept: the numbers of the layers that it has.
        weights: those of the last matrices that make up for the others, by name of the target.
        tokens: int64, shape (samples, length).
        half: number of the sequences that fit the last matrix of the block before; the others
            measure. If there are none, the same do.
        batch_size: sequences per forward pass.
        update: the refit that makes up for one more layer; None: nothing does.

    Returns:
        Of this rank: the next-token loss in nats with all layers that are kept, and without each of
        them in turn, summed over the sequences; and the number of these: float64, shape
        (2, 1 + kept).
    """
    to_fit = torch.split(tokens[:half], batch_size)
    rest = torch.split(tokens[half:], batch_size) if half < len(tokens) else ()
    pieces = [*to_fit, *rest]
    batches = list(ranks().assigned(pieces))
    of_pieces = list(enumerate(ranks().assigned(range(len(pieces)))))
    fitting = [number for number, piece in of_pieces if piece < len(to_fit)]
    measuring = [number for number, piece in of_pieces if piece >= len(to_fit)]
    if half == len(tokens):
        measuring = fitting
    streams: list[HiddenStates] = []  # of the models without one more layer; the last one waits
    with runner.walk(batches, "layers") as walk, ExitStack() as files:
        width = walk.hidden.get(0, walk.device).numel() // batches[0].numel()

        def second() -> HiddenStates:
            """A copy of the hidden states, where those of all models have room."""
            copy = files.enter_context(closing(walk.store(len(kept) * width)))
            for number in range(len(batches)):
                walk.hidden.copy(number, copy, number, walk.device)
            return copy

        end: _End | None = None
        streams.append(second())
        for step in walk.steps():
            if step.index not in kept:
                continue
            target = layers.ends.get(step.index)
            ends = [] if target is None else [target]
            smaller = Block(runner.model, step, ends, walk, walk.hidden)
            if target is not None and target.name in weights:
                smaller.change(target, None, weights[target.name])
            with smaller.pruned_weights():
                for stream in streams[:-1]:
                    block = Block(runner.model, step, [], walk, stream)
                    for number in measuring:
                        block.pass_pruned(number)
                before = end
                end = None
                waiting = streams[-1]
                if len(streams) < len(kept):
                    streams.append(second())
                    block = Block(runner.model, step, ends, walk, streams[-1])
                    if target is not None and update is not None:
                        end = _End(block, target)
                    else:
                        for number in measuring:
                            block.pass_pruned(number)
                step.run()
            if before is not None and update is not None:
                with closing(before):
                    before.try_out(update, fitting, measuring)
            for number in set(fitting).difference(measuring):
                waiting.put(number, torch.empty(0))  # frees what only fits
        device = execution_device(step.block)
        sums = torch.zeros(2, 1 + len(kept), dtype=torch.float64)
        for place, stream in enumerate([walk.hidden, *streams]):
            for number in measuring:
                walk.hidden.put(number, stream.get(number, device))
            found = [mean_losses(walk.tail(n).logits, batches[n]) for n in measuring]
            sums[0, place] = sum(losses.sum() for losses in found)
            sums[1, place] = sum(len(losses) for losses in found)
    return sums


@torch.no_grad()
def refit_layers(
    model: PreTrainedModel,
    layers: Layers,
    kept: Indices,
    tokens: Tensor,
    update: Update,
    updated: UpdatedWeights,
    *,
    blocks: str | None = None,
    batch_size: int = 8,
    hidden_states: Place = "auto",
    **_: Any,
) -> None:
    """Move the last matrices of some layers that stay, so that the smaller model has the dense
    hidden states where the next layer follows that stays. A collective call.

    Dense and smaller model run side by side, block by block. What a matrix sees is kept until the
    dense model has passed through the layers behind it that go.

    Args:
        model: dense, on any devices; unchanged afterwards.
        kept: the numbers of the layers that stay.
        tokens: the calibration text, int64, shape (samples, length).
        update: its damping, and the weights of the tokens.
        updated: receives the weights; those that it holds are not fitted again.
        blocks: name of the list of decoder blocks; None: detected.
        batch_size: sequences per forward pass.
        hidden_states: where they are stored between blocks.

    Raises:
        UserError: memory runs out, a moment is not finite, or the outputs of a matrix are not added
            to the hidden states as they are.
    """
    runner = BlockwiseModel(model, blocks, hidden_states)
    batches, fitting, measuring = batches_of(tokens, batch_size)
    fitted = layers.fitted_layers(kept)
    stays = {*kept.tolist(), len(layers)}
    end: _End | None = None
    with runner.walk(batches, "refit") as walk, closing(walk.second()) as pruned:
        for step in walk.steps():
            if step.index in stays:
                target = layers.ends.get(step.index) if step.index in fitted else None
                block = Block(model, step, [] if target is None else [target], walk, pruned)
                if target is not None:
                    end = _End(block, target)
                elif step.index in fitted:
                    raise _not_added(step.name)
                else:
                    for number in range(len(batches)):
                        block.pass_pruned(number)
            step.run()
            if end is not None and step.index + 1 in stays:
                with closing(end):
                    end.refit(update, updated, fitting, measuring)
                end = None


class _End:
    """The last matrix of a block, and what the batches of the smaller model bring to it.

    Args:
        block: with its weights.
        target: the matrix.

    Raises:
        UserError: its outputs are not added to the hidden states as they are.
    """

    def __init__(self, block: Block, target: Target) -> None:
        first = partial(block.step.output, 0, block.dense)
        if not all(ranks().gather(is_added(block.model, target, first))):
            raise _not_added(block.step.name)
        self.target = target
        self.block = block
        self._device = execution_device(block.step.block)
        self._weight = block.weight(target)
        bias = bias_of(block.model, target.layer)
        # The block's weights are not there any more when the fit begins.
        self._bias = None if bias is None else bias.clone()
        for number in range(len(block.walk.batches)):
            block.pass_to_end(target, number)

    def refit(
        self,
        update: Update,
        updated: UpdatedWeights,
        fitting: Sequence[int],
        measuring: Sequence[int],
    ) -> None:
        """Fit the matrix to the hidden states of the dense model, and pass the batches of the
        smaller model through it.
        """
        index = self.block.step.index
        name = self.target.name
        resumed = ranks().first(partial(updated.resume, index, [self.target]))
        if resumed is None:
            result = refit_target(self.target, self._sums(fitting, update), self._weight, update)
            self._measure(result, self._sums(measuring, update))
            updated.put(index, {name: result})
        else:
            result = resumed[name]
        self._pass_on(result, range(len(self.block.walk.batches)))

    def try_out(self, update: Update, fitting: Sequence[int], measuring: Sequence[int]) -> None:
        """Fit the matrix, pass some batches through it, and keep neither fit nor record."""
        result = refit_target(self.target, self._sums(fitting, update), self._weight, update)
        self._pass_on(result, measuring)

    def _pass_on(self, result: Updated, numbers: Sequence[int]) -> None:
        """Pass batches of the smaller model through the fitted matrix."""
        weight = self._weight if result.weight is None else result.weight
        pruned = self.block.pruned
        for number in numbers:
            rest = pruned.get(number, self._device)
            x = self._inputs(number)
            added = functional.linear(x, weight.to(x.device, x.dtype), self._bias)
            pruned.put(number, rest + added.view(rest.shape))

    def _inputs(self, number: int) -> Tensor:
        """The inputs in a batch, shape (tokens, inputs)."""
        assert self.block.end_inputs is not None
        return self.block.end_inputs.get(number, self._device).flatten(0, -2)

    def _sums(self, numbers: Sequence[int], update: Update) -> Sums | None:
        """The sums over some batches of all ranks; None without a token."""
        sums = Sums()
        for number in numbers:
            wanted = self.block.dense.get(number, self._device)
            rest = self.block.pruned.get(number, self._device)
            y = missing_outputs(wanted, rest, self._bias)
            weights = token_weights(y) if update.relative else None
            sums.add_tokens(self.target.name, self._inputs(number), y, weights)
        mine = {0: sums} if sums.tokens else {}
        total = sums_of_ranks(mine, self._device).get(0)
        if total is not None and total.gram is not None:
            total.gram = symmetric(total.gram)
        return total

    def _measure(self, result: Updated, sums: Sums | None) -> None:
        """Put the errors on other tokens into the record of the matrix."""
        if sums is None or sums.gram is None or result.weight is None:
            return
        moments = Moments(sums.gram, sums.right, sums.energy[self.target.name], sums.tokens)
        errors = output_errors(moments, self._weight, self._weight, result.weight)
        if errors is not None:
            result.record.held_out_before, result.record.held_out_after = errors

    def close(self) -> None:
        """Free the memory or the file."""
        self.block.close()


def _not_added(block: str) -> UserError:
    return UserError(
        f"--refit: {block} has no last matrix whose outputs are added to the hidden states as they "
        "are (experts, or a norm, come after it), so nothing makes up for the layers behind it. "
        "Leave out --refit, and use --heal."
    )
