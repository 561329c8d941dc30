"""The sums of squares of layers' inputs, collected by hooks while a model runs.

Each linear layer has a hook, and `models.hooks` observes the experts of a mixture. Squares are
summed in float32 within a batch and in float64 over batches, on the device of the input; nothing is
copied to the CPU before the end.

Two sums are collected: sum_t x_tj^2, one for each distinct input, and relative to the layer's
output y_t for each token, sum_t x_tj^2 / ||y_t||^2, one for each layer. A token whose output is
zero does not count in the second.
"""

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from emp_llm.calibration.activations import Activations, relative_name
from emp_llm.common.errors import UserError
from emp_llm.common.ranks import ranks
from emp_llm.models.hooks import layer_hooks
from emp_llm.models.layers import Layer
from emp_llm.models.modules import inputs_of

# Weighted at a time; the bits of a matrix product would depend on the number of threads.
_TOKENS = 1024


@dataclass(frozen=True)
class _Seen:
    """The input that was observed last.

    Attributes:
        inputs, version: the tensor, and the number of changes made to it in place.
        leader: the first layer that it feeds.
        squares: x_tj^2 of the tokens that count, float32, shape (tokens, inputs), in a list that is
            emptied with the input.
    """

    inputs: weakref.ref[Tensor]
    version: int
    leader: str
    squares: list[Tensor]


class InputSums:
    """The sums that hooks collect, and which layers share an input.

    Attributes:
        sums: sums of squares so far, float64, shape (inputs,), by the name of the first layer of
            each distinct input; those relative to the outputs by the `relative_name` of each layer.
        input_of: layer -> key in `sums`.
        tokens: number of tokens of each sum.
        paused: while true, nothing is added.
        counted: the tokens that count, bool, shape (sequences, length), if some are padding; None:
            all.
    """

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.input_of: dict[str, str] = {}
        self.tokens: dict[str, int] = {}
        self.paused = False
        self.counted: Tensor | None = None
        self._last: _Seen | None = None

    def norm(self, name: str) -> Tensor:
        """The norm so far of a key of `sums`, float32, shape (inputs,), on the CPU; UserError if
        it is not finite.
        """
        norm = self.sums[name].sqrt().float().cpu()
        if not bool(torch.isfinite(norm).all()):
            layer = name.removesuffix(relative_name(""))
            raise UserError(
                f"{layer}: its input activations hold NaN or infinity. Try --dtype float32; if it "
                "does not help, the weights are damaged."
            )
        return norm

    def reduce(self, layers: Iterable[str] | None = None) -> None:
        """Add up the sums of all ranks, for these keys of `sums` or for all. A collective call,
        once for each key.

        A batch's squares are float32. float64 holds the sums of thousands of them without rounding,
        so the norms do not depend on the order of addition.

        Raises:
            RankLost: another rank has ended.
        """
        if ranks().count == 1:
            return
        own = [name for name in (self.sums if layers is None else layers) if name in self.sums]
        shares = ranks().gather(
            ({name: (self.sums[name].cpu(), self.tokens[name]) for name in own}, self.input_of)
        )
        for _, input_of in shares:
            for layer, leader in input_of.items():
                self.input_of.setdefault(layer, leader)
        # A rank may not have seen all of them.
        for name in dict.fromkeys(name for share, _ in shares for name in share):
            held = [share[name] for share, _ in shares if name in share]
            self.tokens[name] = sum(tokens for _, tokens in held)
            total = torch.stack([total for total, _ in held]).sum(0)
            self.sums[name] = total.to(self.sums[name].device) if name in self.sums else total

    def add(self, other: "InputSums") -> None:
        """Add the sums of other layers."""
        self.sums |= other.sums
        self.input_of |= other.input_of
        self.tokens |= other.tokens

    def restore(
        self, sums: dict[str, Tensor], input_of: dict[str, str], tokens: dict[str, int]
    ) -> None:
        """Restore the `sums`, `input_of` and `tokens` of an earlier run."""
        # In the order of the layers, as in an uninterrupted run.
        names = [
            name
            for layer, leader in input_of.items()
            for name in (leader, relative_name(layer))
            if name in sums
        ]
        self.sums = {name: sums[name] for name in dict.fromkeys(names)}
        self.input_of = input_of
        self.tokens = tokens

    def observe(self, layer: str, inputs: Tensor, outputs: Tensor) -> None:
        """Add one call of a layer: inputs of shape (..., inputs), outputs of shape (...,
        outputs).
        """
        last = self._last
        if last is not None and (last.inputs() is not inputs or last.version != inputs._version):
            last = None
        leader = self.input_of.setdefault(layer, layer if last is None else last.leader)
        if last is None:
            squares = [_squares(self._that_count(inputs))]
            # The list is emptied when the input is no longer used, so that a model's memory does
            # not grow with it.
            gone = weakref.ref(inputs, lambda _, held=squares: held.clear())  # type: ignore[misc]
            last = self._last = _Seen(gone, inputs._version, leader, squares)
        if leader == layer:
            self._add(layer, last.squares[0].sum(0).double(), last.squares[0].shape[0])
        if isinstance(outputs, Tensor) and outputs.shape[:-1] == inputs.shape[:-1]:
            relative = _relative_sum(last.squares[0], self._that_count(outputs))
            self._add(relative_name(layer), relative, last.squares[0].shape[0])

    def _that_count(self, features: Tensor) -> Tensor:
        """The features of the tokens that count, shape (tokens, features)."""
        if self.counted is not None and self.counted.shape == features.shape[:-1]:
            return features.detach()[self.counted.to(features.device)]
        return features.detach().reshape(-1, features.shape[-1])

    def _add(self, name: str, squares: Tensor, tokens: int) -> None:
        """Add the float64 sums of one batch."""
        self.tokens[name] = self.tokens.get(name, 0) + tokens
        if name in self.sums:
            self.sums[name] += squares.to(self.sums[name].device)
        else:
            self.sums[name] = squares

    def complete(self, model: nn.Module, layers: Iterable[Layer]) -> None:
        """Record sums of zero, over no tokens, for experts to which no token was routed.

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
            for name in [relative_name(layer.name)] + ([leader] if leader == layer.name else []):
                self.sums[name] = torch.zeros(inputs_of(model, layer), dtype=torch.float64)
                self.tokens[name] = 0

    def activations(self, layers: Iterable[Layer]) -> Activations:
        """The norms of these layers, in their order.

        Raises:
            UserError: a norm is not finite.
        """
        input_of = {
            layer.name: self.input_of[layer.name] for layer in layers if layer.name in self.input_of
        }
        norms = {leader: self.norm(leader) for leader in dict.fromkeys(input_of.values())}
        names = {layer: relative_name(layer) for layer in input_of}
        relative = {layer: self.norm(name) for layer, name in names.items() if name in self.sums}
        return Activations(
            norms, input_of, tokens={name: self.tokens[name] for name in norms}, relative=relative
        )


def _squares(features: Tensor) -> Tensor:
    """x^2 in float32."""
    values = features.float()
    return values.square() if values is features else values.square_()


def _relative_sum(squares: Tensor, outputs: Tensor) -> Tensor:
    """sum_t x_tj^2 / ||y_t||^2 over the tokens whose output is finite and not zero: float64, shape
    (inputs,).

    Args:
        squares: x_tj^2, float32, shape (tokens, inputs).
        outputs: y_t, shape (tokens, outputs).
    """
    norms = torch.linalg.vector_norm(
        outputs, dim=-1, dtype=torch.promote_types(outputs.dtype, torch.float32)
    ).double()
    # An output that is not finite is noticed as the input of the next layer, or as a damaged
    # weight.
    counts = (norms > 0) & torch.isfinite(norms)
    weights = torch.where(counts, norms.square().reciprocal(), 0.0).to(squares.device)
    # Scaled so that no weight overflows float32; by a power of two, so that the sum is a float32
    # but for its exponent, and sums of batches are exact, as the plain ones are.
    scale = torch.exp2(torch.frexp(weights.sum()).exponent.double())
    parts = zip(
        torch.split((weights / scale).float(), _TOKENS), torch.split(squares, _TOKENS), strict=True
    )
    return (
        torch.stack([(share[:, None] * part).sum(0).double() for share, part in parts]).sum(0)
        * scale
    )


@contextmanager
def input_hooks(model: nn.Module, layers: Iterable[Layer]) -> Iterator[InputSums]:
    """Hooks after the given layers, inside this context; yields the `InputSums` that they fill."""
    collected = InputSums()

    def observe(layers: list[Layer], inputs: Tensor, outputs: Any) -> None:
        if collected.paused:
            return
        for layer in layers:  # several whose weights are one matrix in the model share their inputs
            own = (
                outputs
                if layer.expert is None
                else outputs[:, layer.expert.first : layer.expert.last]
            )
            collected.observe(layer.name, inputs, own)

    with layer_hooks(model, layers, observe):
        yield collected
