"""Activations: the 2-norm of every input feature of every linear layer over the calibration tokens, and their file.

Layers that are given the same tensor (q, k and v; gate and up) share one norm.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from emp_llm.models.errors import UserError, reason

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
        tokens: how many tokens each norm is over, by the same names as the norms; fewer than all for a mixture's experts.
            Empty in files that do not tell.
    """

    norms: dict[str, Tensor]
    input_of: dict[str, str]
    about: dict[str, Any] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)

    def norm(self, layer: str) -> Tensor | None:
        """||X_j||_2 of a layer's inputs, float32, shape (inputs,); None for a layer that was not calibrated."""
        key = self.input_of.get(layer)
        return None if key is None else self.norms[key]

    def tokens_of(self, layer: str) -> int | None:
        """How many tokens a layer was shown; None where that is not known."""
        return self.tokens.get(self.input_of.get(layer, ""))

    def save(self, path: Path) -> None:
        """Write the file under its name only when it is complete."""
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.partial")
        # One metadata key: safetensors writes several in no fixed order, and the same norms shall be the same file.
        told = {"format": FORMAT, "inputs": self.input_of, "about": self.about, "tokens": self.tokens}
        metadata = {METADATA_KEY: json.dumps(told)}
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
                activations = cls(norms, metadata["inputs"], metadata["about"], metadata.get("tokens", {}))
        except UserError:
            raise
        except (SafetensorError, OSError, KeyError, ValueError) as error:
            raise UserError(f"{path}: not a readable activations file ({reason(error)}). Make one with: {_HOW}") from error
        for name, norm in norms.items():
            if norm.dim() != 1 or not bool((torch.isfinite(norm) & (norm >= 0)).all()):
                raise UserError(f"{path}: the norms of {name} are negative, NaN or infinite. Make it anew with: {_HOW}")
        return activations
