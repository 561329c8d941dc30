"""The totals of the statistics of layers' inputs, collected by hooks while a model runs.

Each linear layer has a hook, and `models.hooks` observes the experts of a mixture. Totals stay on
the device of the input; nothing is copied to the CPU before the end.
"""

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from emp_llm.calibration.activations import Activations
from emp_llm.common.errors import UserError
from emp_llm.common.ranks import ranks
from emp_llm.models.hooks import layer_hooks
from emp_llm.models.layers import Layer
from emp_llm.models.modules import inputs_of
from emp_llm.selection.statistics import NORM, STATISTICS, LayerCall, Statistic

Totals = dict[tuple[str, str], Tensor]
_ROOM = 1 << 17  # numbers that are allocated at a time for totals


@dataclass(frozen=True)
class _Seen:
    """The input that was observed last.

    Attributes:
        inputs, version: the tensor, and the number of changes made to it in place.
        leader: the first layer that it feeds.
        squares: x_tj^2, float32, shape (tokens, inputs), in a list that is
            emptied with the input.
    """

    inputs: weakref.ref[Tensor]
    version: int
    leader: str
    squares: list[Tensor]


class InputSums:
    """The totals that hooks collect, and which layers share an input.

    Args:
        statistics: names of those to collect beside the norms.

    Attributes:
        totals: so far, float64, by the name of the statistic and the layer: the first layer of each
            distinct input, or, for statistics by outputs, every layer.
        input_of: layer -> the first layer of its input.
        tokens: number of tokens, by the first layer of each distinct input.
        paused: while true, nothing is added.
    """

    def __init__(self, statistics: Iterable[str] = ()) -> None:
        names = {NORM.name, *statistics}
        self.statistics = [each for name, each in STATISTICS.items() if name in names]
        self.totals: Totals = {}
        self.input_of: dict[str, str] = {}
        self.tokens: dict[str, int] = {}
        self.paused = False
        self._last: _Seen | None = None
        self._room = torch.empty(0, dtype=torch.float64)

    def value(self, statistic: Statistic, layer: str) -> Tensor:
        """The value so far of a total, float32, shape (inputs,), on the CPU; UserError if it is
        not finite.
        """
        total = self.totals[statistic.name, layer]
        value = statistic.value(total, self.tokens[self.input_of[layer]]).float().cpu()
        if not bool(torch.isfinite(value).all()):
            raise UserError(
                f"{layer}: its input activations hold NaN or infinity. Try --dtype float32; if it "
                "does not help, the weights are damaged."
            )
        return value

    def reduce(self, prefix: str = "") -> None:
        """Combine the totals of all ranks, for the layers whose names begin with `prefix`. A
        collective call, once for each layer.

        Raises:
            RankLost: another rank has ended.
        """
        if ranks().count == 1:
            return
        totals = {
            key: total.cpu() for key, total in self.totals.items() if key[1].startswith(prefix)
        }
        tokens = {name: n for name, n in self.tokens.items() if name.startswith(prefix)}
        gathered = ranks().gather((totals, tokens, self.input_of))
        for _, _, input_of in gathered:
            for layer, leader in input_of.items():
                self.input_of.setdefault(layer, leader)
        # A rank may not have seen all of them.
        for name in {name for _, tokens, _ in gathered for name in tokens}:
            self.tokens[name] = sum(tokens.get(name, 0) for _, tokens, _ in gathered)
        for key in {key for totals, _, _ in gathered for key in totals}:
            held = [totals[key] for totals, _, _ in gathered if key in totals]
            total = reduce(STATISTICS[key[0]].combine, held)
            self.totals[key] = total.to(self.totals[key].device) if key in self.totals else total

    def add(self, other: "InputSums") -> None:
        """Add the totals of other layers."""
        self.totals |= other.totals
        self.input_of |= other.input_of
        self.tokens |= other.tokens

    def observe(self, layer: str, inputs: Tensor, outputs: Tensor) -> None:
        """Add one call of a layer: inputs of shape (..., inputs), outputs of shape (...,
        outputs).
        """
        last = self._last
        if last is not None and (last.inputs() is not inputs or last.version != inputs._version):
            last = None
        leader = self.input_of.setdefault(layer, layer if last is None else last.leader)
        if last is None:
            squares = [_squares(_by_token(inputs))]
            # The list is emptied when the input is no longer used, so that a model's memory does
            # not grow with it.
            gone = weakref.ref(inputs, lambda _, held=squares: held.clear())  # type: ignore[misc]
            last = self._last = _Seen(gone, inputs._version, leader, squares)
        with_outputs = isinstance(outputs, Tensor) and outputs.shape[:-1] == inputs.shape[:-1]
        batch = LayerCall(
            _by_token(inputs),
            last.squares[0],
            _by_token(outputs if with_outputs else inputs),
        )
        if leader == layer:
            self.tokens[layer] = self.tokens.get(layer, 0) + len(batch.squares)
        for statistic in self.statistics:
            if with_outputs if statistic.by_outputs else leader == layer:
                self._add(statistic, layer, batch)

    def _add(self, statistic: Statistic, layer: str, batch: LayerCall) -> None:
        total = statistic.total(batch)
        before = self.totals.get((statistic.name, layer))
        if before is None:
            self.totals[statistic.name, layer] = self._kept(total)
        elif before.device != total.device:  # restored from a file
            combined = statistic.combine(before.to(total.device), total)
            self.totals[statistic.name, layer] = self._kept(combined)
        else:
            before.copy_(statistic.combine(before, total))

    def _kept(self, total: Tensor) -> Tensor:
        """A copy of a total, side by side with the others. Small tensors that stay between the
        large ones of a pass keep the heap from using that space again: it grew by 0.7 GB.
        """
        size = total.numel()
        if self._room.numel() < size or self._room.device != total.device:
            self._room = total.new_empty(max(size, _ROOM))
        kept = self._room[:size].view_as(total)
        self._room = self._room[size:]
        return kept.copy_(total)

    def complete(self, model: nn.Module, layers: Iterable[Layer]) -> None:
        """Record totals over no tokens for experts to which no token was routed.

        Raises:
            UserError: no expert of a parameter was observed, so its products are of an unknown
                kind.
        """
        layers = list(layers)
        observed = {
            layer.expert.parameter
            for layer in layers
            if layer.expert and layer.name in self.input_of
        }
        leaders: dict[Any, str] = {}
        for layer in layers:
            if layer.name in self.input_of or not layer.routed:
                continue
            if layer.expert is not None and layer.expert.parameter not in observed:
                raise UserError(
                    f"{layer.expert.parameter}: no product of its experts was recognised, so there "
                    "are no norms of their inputs. Leave them out with --ignore, or use a "
                    "magnitude method."
                )
            place = (
                layer.name
                if layer.expert is None
                else (layer.expert.parameter, layer.expert.expert)
            )
            leader = self.input_of[layer.name] = leaders.setdefault(place, layer.name)
            nothing = torch.zeros(0, inputs_of(model, layer))
            if leader == layer.name:
                self.tokens[leader] = 0
            for statistic in self.statistics:
                if statistic.by_outputs or leader == layer.name:
                    self._add(statistic, layer.name, LayerCall(nothing, nothing, nothing))

    def activations(self, layers: Iterable[Layer]) -> Activations:
        """The statistics of these layers, in their order.

        Raises:
            UserError: a value is not finite.
        """
        input_of = {
            layer.name: self.input_of[layer.name] for layer in layers if layer.name in self.input_of
        }
        statistics = {}
        for statistic in self.statistics:
            key_of = {name: name for name in input_of} if statistic.by_outputs else input_of
            values = {
                key: self.value(statistic, key)
                for key in dict.fromkeys(key_of.values())
                if (statistic.name, key) in self.totals
            }
            statistics[statistic.name] = {
                layer: values[key] for layer, key in key_of.items() if key in values
            }
        tokens = {leader: self.tokens[leader] for leader in dict.fromkeys(input_of.values())}
        return Activations(statistics, input_of, tokens=tokens)


def _by_token(features: Tensor) -> Tensor:
    """Features of shape (tokens, features)."""
    return features.detach().reshape(-1, features.shape[-1])


def _squares(features: Tensor) -> Tensor:
    """x^2 in float32."""
    values = features.float()
    return values.square() if values is features else values.square_()


@contextmanager
def input_hooks(
    model: nn.Module, layers: Iterable[Layer], statistics: Iterable[str] = ()
) -> Iterator[InputSums]:
    """Hooks after the given layers, inside this context; yields the `InputSums` that they fill."""
    collected = InputSums(statistics)

    def observe(layers: list[Layer], inputs: Tensor, outputs: Any) -> None:
        if collected.paused:
            return
        for layer in layers:  # several whose weights are one matrix in the model share their inputs
            expert = layer.expert
            of_layer = outputs if expert is None else outputs[:, expert.first : expert.last]
            collected.observe(layer.name, inputs, of_layer)

    with layer_hooks(model, layers, observe):
        yield collected
