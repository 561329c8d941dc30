"""Activations: statistics of every input feature of every linear layer over the calibration
tokens, and their file.

The norm is sqrt(sum_t x_tj^2); layers with the same input (q, k and v; gate and up) share it. The
relative norm is sqrt(sum_t x_tj^2 / ||y_t||^2), with the layer's own output y_t for token t, so
that every token counts by its share of that output; each layer has its own. `selection.statistics`
holds these and the others.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from emp_llm.checkpoint.files import STRICT, parse_json, tensor_bytes, unfinished, write_bytes
from emp_llm.common.errors import UserError, reason
from emp_llm.models.architecture import Target
from emp_llm.records.base import record_of
from emp_llm.records.source import ActivationsInfo, CalibrationRecord
from emp_llm.selection.statistics import NORM, RELATIVE, STATISTICS

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
