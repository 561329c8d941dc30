"""Activations: the norms of every input feature of every linear layer over the calibration tokens,
and their file.

The plain norm is sqrt(sum_t x_tj^2); layers with the same input (q, k and v; gate and up) share it.
The relative norm is sqrt(sum_t x_tj^2 / ||y_t||^2), with the layer's own output y_t for token t, so
that every token counts by its share of that output; each layer has its own.
"""

import hashlib
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from emp_llm.checkpoint.files import parse_json, tensor_bytes, write_bytes
from emp_llm.checkpoint.output import OutputFolder
from emp_llm.common.errors import UserError, reason
from emp_llm.common.machine import Stopwatch
from emp_llm.common.paths import ACTIVATIONS_NAME
from emp_llm.common.ranks import ranks
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
        norms: one float32 vector of shape (inputs,) for each distinct input, by the name of the
            first layer it feeds.
        input_of: layer name -> key in `norms`.
        about: the origin of the norms: model, text, tokens, dtype, versions.
        tokens: name of a norm -> number of tokens in its sum; fewer than all for a mixture's
            experts. May be empty.
        relative: the relative norms, float32, shape (inputs,), by layer; may be empty.
    """

    norms: dict[str, Tensor]
    input_of: dict[str, str]
    about: CalibrationRecord = field(default_factory=CalibrationRecord)
    tokens: dict[str, int] = field(default_factory=dict)
    relative: dict[str, Tensor] = field(default_factory=dict)

    def norm(self, layer: str, relative: bool = False) -> Tensor | None:
        """||X_j||_2 of each input j of a layer, float32, shape (inputs,); None for a layer that was
        not calibrated.

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
        """SHA-256 of the norms and tokens of all layers; the same for every file that holds
        them.
        """
        digest = hashlib.sha256()
        named = [
            (layer, self.norms[name], f" {self.tokens_of(layer)}")
            for layer, name in sorted(self.input_of.items())
        ]
        named += [(relative_name(layer), norm, "") for layer, norm in sorted(self.relative.items())]
        for name, norm, tokens in named:
            digest.update(f"{name} {norm.dtype} {tuple(norm.shape)}{tokens}\n".encode())
            digest.update(tensor_bytes(norm.contiguous()))
        return digest.hexdigest()

    def save(self, path: Path) -> None:
        """Write the file atomically."""
        relative = {layer: relative_name(layer) for layer in self.relative}
        info = ActivationsInfo(
            inputs=self.input_of, about=self.about, tokens=self.tokens, relative=relative
        )
        norms = self.norms | {relative[layer]: norm for layer, norm in self.relative.items()}
        # One metadata key: safetensors writes several in no fixed order, and the same norms must
        # give the same file.
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
                metadata: Any = parse_json((file.metadata() or {}).get(METADATA_KEY, "{}").encode())
                norms = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError, ValueError) as error:
            raise UserError(
                f"{path}: not a readable activations file ({reason(error)}). {_REMEDY}"
            ) from error
        info = record_of(metadata if isinstance(metadata, dict) else {}, ActivationsInfo, str(path))
        for name, norm in norms.items():
            if norm.dim() != 1 or not bool((torch.isfinite(norm) & (norm >= 0)).all()):
                raise UserError(
                    f"{path}: the norms of {name} are negative, NaN or infinite. {_REMEDY}"
                )
        if not norms.keys() >= {*info.inputs.values(), *info.relative.values()}:
            raise UserError(f"{path}: it lacks norms of layers that it names. {_REMEDY}")
        relative = {layer: norms[name] for layer, name in info.relative.items()}
        plain = {name: norm for name, norm in norms.items() if name not in info.relative.values()}
        return cls(plain, info.inputs, info.about, info.tokens, relative)


def keep_norms(out: OutputFolder, norms: Activations, stopwatch: Stopwatch) -> None:
    """Save norms in an unfinished output, as a part of it and for resuming an interrupted run."""
    if ranks().main:
        norms.save(out.files / ACTIVATIONS_NAME)
    out.note(calibrated={"norms": norms.digest, "stages": dict(stopwatch.record)})


def kept_norms(out: OutputFolder, stopwatch: Stopwatch) -> Activations | None:
    """The norms that an interrupted run of the same command collected; None if it did not finish
    its calibration. A collective call.
    """
    noted = out.get("calibrated")
    if noted is None:
        return None
    norms = ranks().first(partial(Activations.load, out.files / ACTIVATIONS_NAME))
    if norms.digest != noted["norms"]:
        raise UserError(
            f"{out.files / ACTIVATIONS_NAME}: it has changed since it was written. "
            f"Delete {out.work}."
        )
    stopwatch.record |= noted["stages"]
    return norms
