"""The refit of a tiny Llama once more: plainly, in float64, from whole forward passes and one
linear system for each row.

It imports nothing of the package. Each layer is solved behind the checkpoint's weights of the
layers before it, so that the differences of one layer do not add to those of the next.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

LEVELS = (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",))


@dataclass(frozen=True)
class Reference:
    """One layer.

    Attributes:
        exact: the optimum, float64, shape (outputs, inputs).
        least, written: the objective of each row at the optimum and at the weights of the
            checkpoint, shape (outputs,).
        before, after, held_out_before, held_out_after: relative output errors of the masked weights
            and of those of the checkpoint.
    """

    exact: Tensor
    least: Tensor
    written: Tensor
    before: float
    after: float
    held_out_before: float
    held_out_after: float


def references(
    source: Path,
    pruned: Path,
    tokens: Tensor,
    damping: float = 0.01,
    relative: bool = False,
    block: bool = False,
) -> dict[str, Reference]:
    """The references of all layers whose weights differ between two checkpoints, by name.

    Args:
        tokens: of the calibration, shape (samples, length).
        damping: as a share of the mean second moment.
        block: the last layer of a block restores the outputs of the block.
        relative: tokens have the weight 1 / (square of the layer's dense output), instead of 1.
    """
    dense = _load(source)
    after = _load(pruned)
    fitted = _load(source)
    held = max(1, len(tokens) // 16)
    found = {}
    for number in range(len(dense.model.layers)):
        for level in LEVELS:
            names = [
                name
                for name, _ in dense.named_modules()
                if name.startswith(f"model.layers.{number}.")
            ]
            names = [name for name in names if name.endswith(level)]
            names = [n for n in names if not torch.equal(_weight(dense, n), _weight(after, n))]
            inputs = _inputs(fitted, names, tokens)
            wanted = _inputs(dense, names, tokens)
            for name in names:
                missing = (
                    _missing(dense, fitted, number, tokens)
                    if block and name.endswith("down_proj")
                    else None
                )
                found[name] = _reference(
                    _weight(dense, name),
                    _weight(after, name),
                    inputs[name],
                    wanted[name],
                    missing,
                    held,
                    damping,
                    relative,
                )
                _weight(fitted, name).copy_(_weight(after, name))
    return found


def _load(folder: Path) -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    return model.requires_grad_(False).eval()


def _weight(model: PreTrainedModel, name: str) -> Tensor:
    return model.get_parameter(f"{name}.weight")


def _inputs(model: PreTrainedModel, names: list[str], tokens: Tensor) -> dict[str, Tensor]:
    """The inputs of some layers: shape (samples, length, inputs)."""
    seen = {}
    hooks = [
        model.get_submodule(name).register_forward_hook(
            lambda _, given, __, name=name: seen.update({name: given[0]})
        )
        for name in names
    ]
    model(tokens)
    for hook in hooks:
        hook.remove()
    return seen


def _missing(
    dense: PreTrainedModel, fitted: PreTrainedModel, number: int, tokens: Tensor
) -> Tensor:
    """What the attention of the fitted model's block does not add to its hidden states, and that
    of the dense model does.
    """
    before = [
        _inputs(model, [f"model.layers.{number}.post_attention_layernorm"], tokens)
        for model in (dense, fitted)
    ]
    one, other = (next(iter(each.values())) for each in before)
    return one - other


def _reference(
    dense: Tensor,
    written: Tensor,
    pruned_inputs: Tensor,
    dense_inputs: Tensor,
    missing: Tensor | None,
    held: int,
    damping: float,
    relative: bool,
) -> Reference:
    mask = written != 0
    parts = []
    for part in (slice(None, -held), slice(-held, None)):
        x = pruned_inputs[part].flatten(0, 1)
        y = dense_inputs[part].flatten(0, 1) @ dense.T
        shares = (
            1 / y.square().sum(1, keepdim=True)
            if relative
            else torch.ones(len(y), 1, dtype=torch.float64)
        )
        parts.append((x, y if missing is None else y + missing[part].flatten(0, 1), shares))
    x, y, shares = parts[0]
    gram = x.T @ (shares * x)
    cross = x.T @ (shares * y)
    pull = damping * gram.diagonal().mean()
    exact = torch.zeros_like(dense)
    for row, kept in enumerate(mask):
        places = kept.nonzero()[:, 0]
        matrix = gram[places][:, places] + pull * torch.eye(len(places), dtype=torch.float64)
        exact[row, places] = torch.linalg.solve(
            matrix, cross[places, row] + pull * dense[row, places]
        )

    def errors(weight: Tensor, part: int) -> Tensor:
        x, y, shares = parts[part]
        return (shares * (x @ weight.T - y).square()).sum(0)

    def objective(weight: Tensor) -> Tensor:
        return errors(weight, 0) + pull * ((weight - dense) * mask).square().sum(1)

    energies = [(shares * y.square()).sum() for _, y, shares in parts]
    shares_of = [
        float(errors(w, part).sum() / energies[part])
        for part in (0, 1)
        for w in (dense * mask, written)
    ]
    return Reference(exact, objective(exact), objective(written), *shares_of)
