"""Activations: the 2-norm of every input feature of every linear layer over the calibration tokens, and their file.

One forward pass of the dense model per batch, with a hook before each linear layer. Layers that are given the same tensor
(q, k and v; gate and up) share one norm. Squares are summed in float32 within a batch and in float64 over batches, on the
device where the input lies; nothing is copied to the CPU before the end.
"""

import json
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn
from tqdm import tqdm
from transformers import PreTrainedModel

from emp_llm.models.blocks import body_of
from emp_llm.models.errors import UserError, reason
from emp_llm.models.loading import input_device
from emp_llm.models.ranks import ranks

FORMAT = "emp-llm activations 1"
METADATA_KEY = "emp_llm"


_HOW = "emp-llm calibrate --model MODEL --output FILE"


@dataclass(frozen=True)
class Activations:
    """Input norms of a model's linear layers.

    Attributes:
        norms: one float32 vector of shape (inputs,) for each distinct input, by the name of the first layer it feeds.
        input_of: layer name -> key in `norms`.
        about: what made them: model, text, tokens, dtype, versions.
    """

    norms: dict[str, Tensor]
    input_of: dict[str, str]
    about: dict[str, Any] = field(default_factory=dict)

    def norm(self, layer: str) -> Tensor | None:
        """||X_j||_2 of a layer's inputs, float32, shape (inputs,); None for a layer that was not calibrated."""
        key = self.input_of.get(layer)
        return None if key is None else self.norms[key]

    def save(self, path: Path) -> None:
        """Write the file under its name only when it is complete."""
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.partial")
        # One metadata key: safetensors writes several in no fixed order, and the same norms shall be the same file.
        metadata = {METADATA_KEY: json.dumps({"format": FORMAT, "inputs": self.input_of, "about": self.about})}
        try:
            partial.write_bytes(save({name: norm.contiguous() for name, norm in self.norms.items()}, metadata))
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: Path) -> "Activations":
        """Read the file; UserError where it is missing or not such a file."""
        path = Path(path)
        if not path.is_file():
            raise UserError(f"{path}: no such activations file. Make one with: {_HOW}")
        try:
            with safe_open(path, framework="pt") as file:
                metadata = json.loads((file.metadata() or {}).get(METADATA_KEY, "{}"))
                if metadata.get("format") != FORMAT:
                    raise UserError(f"{path}: not an activations file of emp-llm. Make one with: {_HOW}")
                norms = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                activations = cls(norms, metadata["inputs"], metadata["about"])
        except UserError:
            raise
        except (SafetensorError, OSError, KeyError, ValueError) as error:
            raise UserError(f"{path}: not a readable activations file ({reason(error)}). Make one with: {_HOW}") from error
        for name, norm in norms.items():
            if norm.dim() != 1 or not bool((torch.isfinite(norm) & (norm >= 0)).all()):
                raise UserError(f"{path}: the norms of {name} are negative, NaN or infinite. Make it anew with: {_HOW}")
        return activations


class InputSums:
    """The hooks' memory: which layers share an input, and the sums so far; nothing is added while it is `asleep`."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.input_of: dict[str, str] = {}
        self.asleep = False
        self._finite: dict[str, Tensor] = {}
        self._last: tuple[weakref.ref[Tensor], int, str] | None = None

    def norms(self, layers: Iterable[str] | None = None) -> dict[str, Tensor]:
        """The norms so far, float32, on the CPU, of some layers' inputs or of all.

        Raises:
            UserError: one is not finite.
        """
        found = {}
        for name in self.sums if layers is None else layers:
            found[name] = self.sums[name].sqrt().float().cpu()
            if not bool(torch.isfinite(found[name]).all()):
                raise UserError(
                    f"{name}: its input activations hold NaN or infinity, first in batch {int(self._finite[name]) + 1}: try "
                    "--dtype float32, or the weights are damaged."
                )
        return found

    def norm(self, layer: str) -> Tensor | None:
        """The norms of a layer's inputs so far; None for one that was not called."""
        leader = self.input_of.get(layer)
        return None if leader is None else self.norms([leader])[leader]

    def reduce(self, layers: Iterable[str] | None = None) -> None:
        """Add up what all ranks have seen of some layers' inputs, or of all; a collective call, once for each layer.

        A batch's squares are float32, and float64 holds the sums of thousands of them without rounding, so that in whatever
        order they are added the norms are the same.

        Raises:
            UserError: another rank has ended.
        """
        count = ranks().count
        if count == 1:
            return
        own = [name for name in (self.sums if layers is None else layers) if name in self.sums]
        state = {name: (self.sums[name].cpu(), int(self._finite[name])) for name in own}
        try:
            shares = ranks().gather((state, self.input_of))
        except RuntimeError as error:
            raise UserError(f"another process of this run has ended; what it said tells why ({reason(error)}).") from error
        for _, input_of in shares:
            self.input_of |= {layer: leader for layer, leader in input_of.items() if layer not in self.input_of}
        for name in dict.fromkeys(name for share, _ in shares for name in share):  # a rank may not have seen all of them
            held = {rank: share[name] for rank, (share, _) in enumerate(shares) if name in share}
            broken = [good * count + rank for rank, (total, good) in held.items() if not bool(torch.isfinite(total).all())]
            self._finite[name] = torch.tensor(min(broken, default=0))
            total = torch.stack([total for total, _ in held.values()]).sum(0)
            self.sums[name] = total.to(self.sums[name].device) if name in self.sums else total

    def add(self, other: "InputSums") -> None:
        """Take over what another memory holds, of other layers."""
        self.sums |= other.sums
        self.input_of |= other.input_of
        self._finite |= other._finite

    def state(self) -> tuple[dict[str, Tensor], dict[str, int]]:
        """The sums (float64, on the CPU), and for how many batches each was finite: with `input_of` all there is to keep."""
        return {name: total.cpu() for name, total in self.sums.items()}, {n: int(good) for n, good in self._finite.items()}

    def restore(self, sums: dict[str, Tensor], input_of: dict[str, str], finite: dict[str, int]) -> None:
        """Take the place of what there was."""
        # In the order of the layers, as an uninterrupted run would have them.
        self.sums = {name: sums[name] for name in dict.fromkeys(input_of.values())}
        self.input_of = dict(input_of)
        self._finite = {name: torch.tensor(good, dtype=torch.int32) for name, good in finite.items()}

    def see(self, layer: str, inputs: Tensor) -> None:
        if self.asleep:
            return
        leader = self.input_of.get(layer)
        if leader is None:
            leader = self.input_of[layer] = self._same_as_last(inputs) or layer
        if leader != layer:
            return
        self._last = (weakref.ref(inputs), inputs._version, layer)
        features = inputs.detach().reshape(-1, inputs.shape[-1])
        squares = features.float().square().sum(0).double()
        if layer in self.sums:
            self.sums[layer] += squares.to(self.sums[layer].device)
        else:
            self.sums[layer] = squares
        # How many batches the sum stayed finite for; counted where it lies, so that no batch waits for the answer.
        good = torch.isfinite(self.sums[layer]).all().int()
        self._finite[layer] = self._finite[layer] + good if layer in self._finite else good

    def _same_as_last(self, inputs: Tensor) -> str | None:
        if self._last is None:
            return None
        tensor, version, layer = self._last
        return layer if tensor() is inputs and inputs._version == version else None


@contextmanager
def input_hooks(model: nn.Module, layers: Iterable[str]) -> Iterator[InputSums]:
    """Hooks before the named layers; yields the `InputSums` they fill."""
    memory = InputSums()
    handles = []
    for name in layers:

        def hook(module: nn.Module, args: tuple[Any, ...], name: str = name) -> None:
            memory.see(name, args[0])

        handles.append(model.get_submodule(name).register_forward_pre_hook(hook))
    try:
        yield memory
    finally:
        for handle in handles:
            handle.remove()


def own_batches(tokens: Tensor, batch_size: int) -> list[Tensor]:
    """This rank's share of the batches, the same batches that one rank would make.

    Raises:
        UserError: there are fewer batches than ranks.
    """
    batches = torch.split(tokens, batch_size)
    if len(batches) < ranks().count:
        raise UserError(
            f"--batch-size {batch_size}: {tokens.shape[0]} samples are {len(batches)} batches, fewer than the "
            f"{ranks().count} ranks; lower it, or take fewer ranks."
        )
    return list(ranks().part(batches))


def calibrate_model(model: PreTrainedModel, layers: list[str], tokens: Tensor, batch_size: int = 4) -> Activations:
    """Run the calibration tokens through a model and collect the norms of its layers' inputs.

    Args:
        model: a causal language model, on any devices.
        layers: names of linear layers.
        tokens: int64, shape (samples, length).
        batch_size: sequences to a forward pass.

    Returns:
        Norms over all tokens of all samples; `about` holds nothing yet.

    Raises:
        UserError: a norm is not finite.
    """
    head = model.get_output_embeddings()
    wants_head = any(model.get_submodule(name) is head for name in layers)
    body = model if wants_head else body_of(model)
    device = input_device(model)
    with input_hooks(model, layers) as memory, torch.no_grad():
        batches = own_batches(tokens, batch_size)
        total, quiet = sum(batch.numel() for batch in batches), None if ranks().main else True
        bar = tqdm(total=total, desc="calibrate", unit="tok", unit_scale=True, disable=quiet)
        for batch in batches:
            body(input_ids=batch.to(device), use_cache=False)
            bar.update(batch.numel())
        bar.close()
    memory.reduce()
    return Activations(memory.norms(), memory.input_of)
