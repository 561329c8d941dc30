"""Activations: statistics of every input feature of every linear layer over the calibration
tokens, and their file.

The norm is sqrt(sum_t x_tj^2); layers with the same input (q, k and v; gate and up) share it. The
relative norm is sqrt(sum_t x_tj^2 / ||y_t||^2), with the layer's own output y_t for token t, so
that every token counts by its share of that output; each layer has its own. `selection.criteria`
holds these and the others.
"""

import hashlib
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from emp_llm.checkpoint.files import STRICT, parse_json, tensor_bytes, unfinished, write_bytes
from emp_llm.common.errors import UserError, reason
from emp_llm.common.ranks import ranks
from emp_llm.models.architecture import Target
from emp_llm.models.hooks import layer_hooks
from emp_llm.models.layers import Layer
from emp_llm.models.modules import inputs_of
from emp_llm.records.base import ActivationsInfo, CalibrationRecord, record_of
from emp_llm.selection.criteria import NORM, RELATIVE, STATISTICS, LayerCall, Statistic

METADATA_KEY = "emp_llm"
_REMEDY = "Create one with: emp-llm calibrate --model MODEL --output FILE"


@dataclass(frozen=True)
class Activations:
    """Statistics of the inputs of a model's linear layers.

    Attributes:
        statistics: name of a statistic -> layer -> float32, shape (inputs,). Layers with the same
            input share tensors.
        input_of: layer -> the first layer that its input feeds.
        about: the origin: model, text, tokens, dtype, versions.
        tokens: number of tokens, by the first layer of each distinct input; fewer than all for a
            mixture's experts. May be empty.
    """

    statistics: dict[str, dict[str, Tensor]]
    input_of: dict[str, str]
    about: CalibrationRecord = field(default_factory=CalibrationRecord)
    tokens: dict[str, int] = field(default_factory=dict)

    def of(self, layer: str, statistic: str = NORM.name) -> Tensor | None:
        """A statistic of each input of a layer, float32, shape (inputs,); None for a layer that was
        not calibrated, and for a statistic that was not collected.
        """
        return self.statistics.get(statistic, {}).get(layer)

    def tokens_of(self, layer: str) -> int | None:
        """The number of tokens that a layer saw; None if unknown."""
        return self.tokens.get(self.input_of.get(layer, ""))

    @property
    def digest(self) -> str:
        """SHA-256 of the statistics and tokens of all layers; the same for every file that holds
        them.
        """
        digest = hashlib.sha256()
        first = (NORM.name, RELATIVE.name)
        for statistic in (*first, *sorted(self.statistics.keys() - {*first})):
            for layer, value in sorted(self.statistics.get(statistic, {}).items()):
                if statistic == NORM.name:
                    name = f"{layer} {value.dtype} {tuple(value.shape)} {self.tokens_of(layer)}"
                else:
                    name = f"{layer}.{statistic} {value.dtype} {tuple(value.shape)}"
                digest.update(f"{name}\n".encode())
                digest.update(tensor_bytes(value.contiguous()))
        return digest.hexdigest()

    def save(self, path: Path) -> None:
        """Write the file atomically."""
        tensors: dict[str, Tensor] = {}
        names: dict[str, dict[str, str]] = {}
        for statistic, values in self.statistics.items():
            shared = statistic in STATISTICS and not STATISTICS[statistic].by_outputs
            suffix = "" if statistic == NORM.name else f".{statistic}"
            of_layers = names[statistic] = {
                layer: (self.input_of[layer] if shared else layer) + suffix for layer in values
            }
            tensors |= {of_layers[layer]: value.contiguous() for layer, value in values.items()}
        info = ActivationsInfo(
            inputs=self.input_of,
            about=self.about,
            tokens=self.tokens,
            relative=names.pop(RELATIVE.name, {}),
            statistics={name: layers for name, layers in names.items() if name != NORM.name},
        )
        # One metadata key: safetensors writes several in no fixed order, and the same norms must
        # give the same file.
        metadata = {METADATA_KEY: info.as_json().decode()}
        write_bytes(path, save(tensors, metadata))

    @classmethod
    def load(cls, path: Path) -> "Activations":
        """Read the file.

        Raises:
            UserError: the file is missing or damaged, or is not an activations file.
        """
        path = Path(path)
        if not path.is_file():
            raise UserError(f"{path}: no such activations file. {_REMEDY}")
        try:
            with safe_open(path, framework="pt") as file:
                text = (file.metadata() or {}).get(METADATA_KEY, "{}")
                metadata: Any = parse_json(text.encode(), **STRICT)
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError, ValueError) as error:
            raise UserError(
                f"{path}: not a readable activations file ({reason(error)}). {_REMEDY}"
            ) from error
        info = record_of(metadata if isinstance(metadata, dict) else {}, ActivationsInfo, str(path))
        names = {NORM.name: info.inputs, RELATIVE.name: info.relative} | info.statistics
        statistics: dict[str, dict[str, Tensor]] = {}
        for statistic, tensor_of in names.items():
            known = STATISTICS.get(statistic)
            signed = known is not None and known.signed
            for name in dict.fromkeys(tensor_of.values()):
                if name not in tensors:
                    raise UserError(f"{path}: it lacks norms of layers that it names. {_REMEDY}")
                value = tensors[name]
                if value.dtype != torch.float32:
                    raise UserError(
                        f"{path}: the norms of {name} are {value.dtype}, not float32. {_REMEDY}"
                    )
                valid = torch.isfinite(value) & (signed | (value >= 0))
                if value.dim() != 1 or not bool(valid.all()):
                    raise UserError(
                        f"{path}: the norms of {name} are negative, NaN or infinite. {_REMEDY}"
                    )
            statistics[statistic] = {layer: tensors[name] for layer, name in tensor_of.items()}
        return cls(statistics, info.inputs, info.about, info.tokens)


def own_norms(path: Path, targets: Sequence[Target]) -> Activations | None:
    """The norms in a file of our unfinished work; None if there is none, or, with a warning, if it
    is damaged or of other layers than some targets.
    """

    def read(path: Path) -> Activations:
        norms = Activations.load(path)
        for target in targets:
            for statistic in norms.statistics:
                value = norms.of(target.name, statistic)
                if value is not None and len(value) != target.matrix.columns:
                    raise ValueError(f"{target.name} has other inputs")
        return norms

    return unfinished(path, read)


# The totals of the statistics of layers' inputs, collected by hooks while a model runs.
#
# Each linear layer has a hook, and `models.hooks` observes the experts of a mixture. Totals stay on
# the device of the input; nothing is copied to the CPU before the end.


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
