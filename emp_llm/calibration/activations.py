"""Activations: the norms of every input feature of every linear layer over the calibration tokens, and their file.

The plain norm is sqrt(sum_t x_tj^2); layers with the same input (q, k and v; gate and up) share it. The relative norm is
sqrt(sum_t x_tj^2 / ||y_t||^2), with the layer's own output y_t for token t, so that every token counts by its share of that
output; each layer has its own.
"""

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from emp_llm.checkpoint.files import tensor_bytes, write_bytes
from emp_llm.checkpoint.output import OutputFolder
from emp_llm.common.errors import UserError, count_of, reason
from emp_llm.common.machine import Stopwatch
from emp_llm.common.paths import ACTIVATIONS_NAME
from emp_llm.common.tables import table
from emp_llm.records.base import record_of
from emp_llm.records.source import ActivationsInfo, CalibrationRecord

METADATA_KEY = "emp_llm"
_REMEDY = "Create one with: emp-llm calibrate --model MODEL --output FILE"


def relative_name(layer: str) -> str:
    """The name of a layer's relative norms among all norms."""
    return f"{layer}.relative"


@dataclass(frozen=True)
class Activations:
    """Input norms of a model's linear layers.

    Attributes:
        norms: one float32 vector of shape (inputs,) for each distinct input, by the name of the first layer it feeds.
        input_of: layer name -> key in `norms`.
        about: the origin of the norms: model, text, tokens, dtype, versions.
        tokens: name of a norm -> number of tokens in its sum; fewer than all for a mixture's experts. May be empty.
        relative: the relative norms, float32, shape (inputs,), by layer; may be empty.
    """

    norms: dict[str, Tensor]
    input_of: dict[str, str]
    about: CalibrationRecord = field(default_factory=CalibrationRecord)
    tokens: dict[str, int] = field(default_factory=dict)
    relative: dict[str, Tensor] = field(default_factory=dict)

    def norm(self, layer: str, relative: bool = False) -> Tensor | None:
        """||X_j||_2 of each input j of a layer, float32, shape (inputs,); None for a layer that was not calibrated.

        Args:
            relative: the norms relative to the layer's outputs.
        """
        if relative:
            return self.relative.get(layer)
        key = self.input_of.get(layer)
        return None if key is None else self.norms[key]

    def tokens_of(self, layer: str) -> int | None:
        """The number of tokens that a layer saw; None if unknown."""
        return self.tokens.get(self.input_of.get(layer, ""))

    @property
    def digest(self) -> str:
        """SHA-256 of the norms and tokens of all layers; the same for every file that holds them."""
        digest = hashlib.sha256()
        named = [(layer, self.norms[name], f" {self.tokens_of(layer)}") for layer, name in sorted(self.input_of.items())]
        named += [(relative_name(layer), norm, "") for layer, norm in sorted(self.relative.items())]
        for name, norm, tokens in named:
            digest.update(f"{name} {norm.dtype} {tuple(norm.shape)}{tokens}\n".encode())
            digest.update(tensor_bytes(norm.contiguous()))
        return digest.hexdigest()

    def save(self, path: Path) -> None:
        """Write the file atomically."""
        relative = {layer: relative_name(layer) for layer in self.relative}
        info = ActivationsInfo(inputs=self.input_of, about=self.about, tokens=self.tokens, relative=relative)
        norms = self.norms | {relative[layer]: norm for layer, norm in self.relative.items()}
        # One metadata key: safetensors writes several in no fixed order, and the same norms must give the same file.
        metadata = {METADATA_KEY: msgspec.json.encode(info).decode()}
        write_bytes(path, save({name: norm.contiguous() for name, norm in norms.items()}, metadata))

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
                metadata: Any = json.loads((file.metadata() or {}).get(METADATA_KEY, "{}"))
                norms = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError, ValueError) as error:
            raise UserError(f"{path}: not a readable activations file ({reason(error)}). {_REMEDY}") from error
        info = record_of(metadata if isinstance(metadata, dict) else {}, ActivationsInfo, str(path))
        for name, norm in norms.items():
            if norm.dim() != 1 or not bool((torch.isfinite(norm) & (norm >= 0)).all()):
                raise UserError(f"{path}: the norms of {name} are negative, NaN or infinite. {_REMEDY}")
        if not norms.keys() >= {*info.inputs.values(), *info.relative.values()}:
            raise UserError(f"{path}: it lacks norms of layers that it names. {_REMEDY}")
        relative = {layer: norms[name] for layer, name in info.relative.items()}
        plain = {name: norm for name, norm in norms.items() if name not in info.relative.values()}
        return cls(plain, info.inputs, info.about, info.tokens, relative)


# The difference of two files: the effect of another device, dtype, batch size or text on the norms.


@dataclass(frozen=True)
class NormsDifference:
    """The differences between the norms of two activations files, layer by layer.

    Attributes:
        layers: name -> the largest and the mean relative difference |a - b| / max(a, b) over its inputs (0 where both are 0),
            for each layer in both files, the worst layer first.
        relative: the same for the norms relative to the outputs, for each layer that has them in both files.
        only: layers in only one of the two, or with different numbers of inputs.
        about: differences in their origin: field, value in the first file, value in the second.
    """

    layers: dict[str, tuple[float, float]]
    relative: dict[str, tuple[float, float]]
    only: list[str]
    about: list[tuple[str, str, str]]


def compare_norms(first: Path, second: Path) -> NormsDifference:
    """Compare two activations files.

    Raises:
        UserError: one is missing, or is not an activations file.
    """
    a, b = Activations.load(first), Activations.load(second)
    plain_a, plain_b = ({layer: each.norms[name] for layer, name in each.input_of.items()} for each in (a, b))
    layers = _differences(plain_a, plain_b)
    one, other = a.about.as_dict(), b.about.as_dict()
    fields = [field for field in dict.fromkeys([*one, *other]) if str(one.get(field)) != str(other.get(field))]
    about = [(field, str(one.get(field)), str(other.get(field))) for field in fields]
    only = sorted((plain_a.keys() | plain_b.keys()) - layers.keys())
    return NormsDifference(layers, _differences(a.relative, b.relative), only, about)


def _differences(first: dict[str, Tensor], second: dict[str, Tensor]) -> dict[str, tuple[float, float]]:
    """The differences of the layers that have as many inputs in both files, the worst first."""
    layers: dict[str, tuple[float, float]] = {}
    for layer in sorted(first.keys() & second.keys()):
        a, b = first[layer].double(), second[layer].double()
        if a.shape == b.shape:
            larger = torch.maximum(a, b)
            differences = torch.where(larger > 0, (a - b).abs() / larger, 0.0)
            layers[layer] = (float(differences.max()), float(differences.mean()))
    return dict(sorted(layers.items(), key=lambda item: -item[1][0]))


def difference_table(difference: NormsDifference) -> str:
    """A table of the ten layers that differ most, and a line for all layers."""
    rows = [["layer", "largest", "mean"]]
    rows += [[name, f"{largest:.3g}", f"{mean:.3g}"] for name, (largest, mean) in list(difference.layers.items())[:10]]
    lines = [table(rows)] if difference.layers else []
    for what, layers in (
        ("of the norms of", difference.layers),
        ("of the norms relative to the outputs of", difference.relative),
    ):
        if layers:
            largest = max(largest for largest, _ in layers.values())
            mean = sum(mean for _, mean in layers.values()) / len(layers)
            count = count_of(len(layers), "layer")
            lines.append(f"relative differences {what} {count}: {largest:.3g} at most, {mean:.3g} on average")
    if difference.only:
        names = ", ".join(difference.only[:3])
        lines.append(f"only in one file, or with another number of inputs: {count_of(len(difference.only), 'layer')} ({names})")
    lines += [f"{field}: {first[:60]} | {second[:60]}" for field, first, second in difference.about]
    return "\n".join(lines)


def keep_norms(out: OutputFolder, norms: Activations, stopwatch: Stopwatch) -> None:
    """Save norms in an unfinished output, as a part of it and for resuming an interrupted run."""
    norms.save(out.files / ACTIVATIONS_NAME)
    out.note(calibrated={"norms": norms.digest, "stages": dict(stopwatch.record)})


def kept_norms(out: OutputFolder, stopwatch: Stopwatch) -> Activations | None:
    """The norms that an interrupted run of the same command collected; None if it did not finish its calibration."""
    noted = out.get("calibrated")
    if noted is None:
        return None
    norms = Activations.load(out.files / ACTIVATIONS_NAME)
    if norms.digest != noted["norms"]:
        raise UserError(f"{out.files / ACTIVATIONS_NAME}: it has changed since it was written. Delete {out.work}.")
    stopwatch.record |= noted["stages"]
    return norms
