"""The sums of squares of layers' inputs, collected by hooks while a model runs.

Each linear layer has a hook, and `execution.expert_hooks` observes the experts of a mixture. Squares are summed in float32
within a batch and in float64 over batches, on the device of the input; nothing is copied to the CPU before the end.
"""

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from emp_llm.architecture.layers import Layer
from emp_llm.architecture.model_layers import inputs_of
from emp_llm.calibration.activations import Activations
from emp_llm.common.errors import UserError, reason
from emp_llm.common.ranks import ranks
from emp_llm.execution.expert_hooks import expert_hooks


class InputSums:
    """The sums that hooks collect, and which layers share an input.

    Attributes:
        sums: sums of squares so far, float64, shape (inputs,), by the name of the first layer of each distinct input.
        input_of: layer -> key in `sums`.
        tokens: number of tokens of each sum.
        paused: while true, nothing is added.
        counted: the tokens that count, bool, shape (sequences, length), if some are padding; None: all.
    """

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.input_of: dict[str, str] = {}
        self.tokens: dict[str, int] = {}
        self.paused = False
        self.counted: Tensor | None = None
        self._finite: dict[str, Tensor] = {}
        self._last: tuple[weakref.ref[Tensor], int, str] | None = None

    def norms(self, layers: Iterable[str] | None = None) -> dict[str, Tensor]:
        """The norms so far by name, float32, shape (inputs,), on the CPU.

        Args:
            layers: keys of `sums`; None: all.

        Raises:
            UserError: a norm is not finite.
        """
        norms = {}
        for name in self.sums if layers is None else layers:
            norms[name] = self.sums[name].sqrt().float().cpu()
            if not bool(torch.isfinite(norms[name]).all()):
                raise UserError(
                    f"{name}: its input activations hold NaN or infinity, first in batch {int(self._finite[name]) + 1}. Try "
                    "--dtype float32; if it does not help, the weights are damaged."
                )
        return norms

    def norm(self, layer: str) -> Tensor | None:
        """The norms of a layer's inputs so far, float32, shape (inputs,); None for a layer that was not called."""
        leader = self.input_of.get(layer)
        return None if leader is None else self.norms([leader])[leader]

    def tokens_of(self, layer: str) -> int | None:
        """The number of tokens that a layer saw so far; None for a layer that was not called."""
        return self.tokens.get(self.input_of.get(layer, ""))

    def reduce(self, layers: Iterable[str] | None = None) -> None:
        """Add up the sums of all ranks, for these keys of `sums` or for all. A collective call, once for each key.

        A batch's squares are float32. float64 holds the sums of thousands of them without rounding, so the norms do not
        depend on the order of addition.

        Raises:
            UserError: another rank has ended.
        """
        count = ranks().count
        if count == 1:
            return
        own = [name for name in (self.sums if layers is None else layers) if name in self.sums]
        state = {name: (self.sums[name].cpu(), int(self._finite[name]), self.tokens[name]) for name in own}
        try:
            shares = ranks().gather((state, self.input_of))
        except RuntimeError as error:
            raise UserError(f"another process of this run has ended; its message gives the cause ({reason(error)}).") from error
        for _, input_of in shares:
            self.input_of |= {layer: leader for layer, leader in input_of.items() if layer not in self.input_of}
        for name in dict.fromkeys(name for share, _ in shares for name in share):  # a rank may not have seen all of them
            held = {rank: share[name] for rank, (share, _) in enumerate(shares) if name in share}
            broken = [good * count + rank for rank, (total, good, _) in held.items() if not bool(torch.isfinite(total).all())]
            self._finite[name] = torch.tensor(min(broken, default=0))
            self.tokens[name] = sum(tokens for _, _, tokens in held.values())
            total = torch.stack([total for total, _, _ in held.values()]).sum(0)
            self.sums[name] = total.to(self.sums[name].device) if name in self.sums else total

    def add(self, other: "InputSums") -> None:
        """Add the sums of other layers."""
        self.sums |= other.sums
        self.input_of |= other.input_of
        self.tokens |= other.tokens
        self._finite |= other._finite

    def state(self) -> tuple[dict[str, Tensor], dict[str, int]]:
        """The sums, float64, on the CPU, and for each the number of batches for which it stayed finite.

        With `input_of` and `tokens` this is all that `restore` needs.
        """
        return {name: total.cpu() for name, total in self.sums.items()}, {n: int(good) for n, good in self._finite.items()}

    def restore(
        self, sums: dict[str, Tensor], input_of: dict[str, str], finite: dict[str, int], tokens: dict[str, int]
    ) -> None:
        """Restore an earlier state."""
        # In the order of the layers, as in an uninterrupted run.
        self.sums = {name: sums[name] for name in dict.fromkeys(input_of.values())}
        self.input_of = dict(input_of)
        self.tokens = dict(tokens)
        self._finite = {name: torch.tensor(good, dtype=torch.int32) for name, good in finite.items()}

    def observe(self, layer: str, inputs: Tensor) -> None:
        """Add the inputs of one call of a layer: shape (..., inputs)."""
        if self.paused:
            return
        leader = self.input_of.get(layer)
        if leader is None:
            leader = self.input_of[layer] = self._same_as_last(inputs) or layer
        if leader != layer:
            return
        self._last = (weakref.ref(inputs), inputs._version, layer)
        if self.counted is not None and self.counted.shape == inputs.shape[:-1]:
            features = inputs.detach()[self.counted.to(inputs.device)]
        else:
            features = inputs.detach().reshape(-1, inputs.shape[-1])
        squares = features.float().square().sum(0).double()
        self.tokens[layer] = self.tokens.get(layer, 0) + features.shape[0]
        if layer in self.sums:
            self.sums[layer] += squares.to(self.sums[layer].device)
        else:
            self.sums[layer] = squares
        # The number of batches for which the sum stayed finite, counted on its device, so that no batch waits for a transfer.
        good = torch.isfinite(self.sums[layer]).all().int()
        self._finite[layer] = self._finite[layer] + good if layer in self._finite else good

    def observe_expert(self, layers: list[str], inputs: Tensor) -> None:
        """As `observe`, for layers whose weights are one matrix in the model: they share their inputs."""
        self.observe(layers[0], inputs)
        self.input_of |= dict.fromkeys(layers, self.input_of[layers[0]])

    def complete(self, model: nn.Module, layers: Iterable[Layer]) -> None:
        """Record sums of zero, over no tokens, for experts to which no token was routed.

        Raises:
            UserError: no expert of a parameter was observed, so its products are of an unknown kind.
        """
        layers = list(layers)
        observed = {layer.expert.parameter for layer in layers if layer.expert and layer.name in self.input_of}
        leaders: dict[Any, str] = {}
        for layer in layers:
            if layer.name in self.input_of or not layer.routed:
                continue
            if layer.expert is not None and layer.expert.parameter not in observed:
                raise UserError(
                    f"{layer.expert.parameter}: no product of its experts was recognised, so there are no norms of their "
                    "inputs. Leave them out with --ignore, or use a magnitude method."
                )
            place = layer.name if layer.expert is None else (layer.expert.parameter, layer.expert.expert)
            leader = self.input_of[layer.name] = leaders.setdefault(place, layer.name)
            if leader == layer.name:
                self.sums[leader] = torch.zeros(inputs_of(model, layer), dtype=torch.float64)
                self.tokens[leader], self._finite[leader] = 0, torch.tensor(0)

    def activations(self, layers: Iterable[Layer]) -> Activations:
        """The norms of these layers, in their order.

        Raises:
            UserError: a norm is not finite.
        """
        input_of = {layer.name: self.input_of[layer.name] for layer in layers if layer.name in self.input_of}
        leaders = list(dict.fromkeys(input_of.values()))
        return Activations(self.norms(leaders), input_of, tokens={name: self.tokens[name] for name in leaders})

    def _same_as_last(self, inputs: Tensor) -> str | None:
        if self._last is None:
            return None
        tensor, version, layer = self._last
        return layer if tensor() is inputs and inputs._version == version else None


@contextmanager
def input_hooks(model: nn.Module, layers: Iterable[Layer]) -> Iterator[InputSums]:
    """Hooks before the given layers, inside this context; yields the `InputSums` that they fill."""
    collected = InputSums()
    handles = []
    experts: dict[tuple[str, int], list[str]] = {}
    stacks: dict[str, bool] = {}
    for layer in layers:
        if layer.expert is not None:
            experts.setdefault((layer.expert.parameter, layer.expert.expert), []).append(layer.name)
            stacks[layer.expert.parameter] = layer.expert.transposed
            continue

        def hook(module: nn.Module, args: tuple[Any, ...], name: str = layer.name) -> None:
            collected.observe(name, args[0])

        handles.append(model.get_submodule(layer.name).register_forward_pre_hook(hook))

    def observe(parameter: str, expert: int, inputs: Tensor) -> None:
        if (parameter, expert) in experts:
            collected.observe_expert(experts[parameter, expert], inputs)

    try:
        with expert_hooks(model, stacks, observe, lambda: collected.paused):
            yield collected
    finally:
        for handle in handles:
            handle.remove()
