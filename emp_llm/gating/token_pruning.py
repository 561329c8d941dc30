"""Hidden features pruned for each token: the row of Algorithm 1 is the features of one token in one MLP."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from emp_llm.common.ranks import ranks
from emp_llm.gating.hidden_features import hidden_readers
from emp_llm.models.hooks import expert_hooks
from emp_llm.records.evaluation import KeptFeatures
from emp_llm.selection.arithmetic.definitions import NonFiniteError
from emp_llm.selection.effective import effective_mask

_AT_A_TIME = 1 << 24  # features


def keep_effective_features(features: Tensor, beta: float = 1.0) -> tuple[Tensor, Tensor]:
    """Set to zero all but the clip(floor(beta * N_eff), 1, N) largest |features| of each token.

    Args:
        features: floating, shape (..., N): the last dimension is a token's hidden features.
        beta: multiple of the effective number to keep.

    Returns:
        The pruned features, a new tensor of the same shape; and the number kept, int64, of that shape without the last
        dimension. It is -1 for a token whose features are NaN or infinite: they stay as they are.

    Raises:
        ValueError: beta is not a positive finite number.
    """
    rows = features.detach().reshape(-1, features.shape[-1])
    if rows.numel() == 0:
        return features.clone(), rows.new_zeros(features.shape[:-1], dtype=torch.int64)
    mask = torch.cat([_mask(part, beta) for part in torch.split(rows, max(1, _AT_A_TIME // rows.shape[1]))])
    finite = torch.isfinite(rows).all(1)
    kept = torch.where(finite, mask.sum(1), -1)
    return features.masked_fill(~mask.reshape(features.shape), 0), kept.reshape(features.shape[:-1])


def _mask(rows: Tensor, beta: float) -> Tensor:
    try:
        return effective_mask(rows, beta=beta)
    except NonFiniteError:
        mask = torch.ones(rows.shape, dtype=torch.bool, device=rows.device)
        finite = torch.isfinite(rows).all(1)
        if bool(finite.any()):
            mask[finite] = effective_mask(rows[finite], beta=beta)
        return mask


class FeatureCounts:
    """The numbers of features kept so far, by layer.

    Args:
        widths: the layers, in order, and the number of their hidden features.
    """

    def __init__(self, widths: dict[str, int]) -> None:
        self._widths = widths
        self.reset()

    def reset(self) -> None:
        """Forget all counts."""
        self._kept: dict[str, Tensor] = {}
        self._tokens: dict[str, Tensor] = {}

    def add(self, layer: str, kept: Tensor, counted: Tensor) -> None:
        """Add tokens; `kept` and `counted` (bool) have one number for each."""
        counted = counted & (kept >= 0)
        total, tokens = (kept * counted).sum(), counted.sum()
        if layer in self._kept:
            total, tokens = total + self._kept[layer].to(total.device), tokens + self._tokens[layer].to(tokens.device)
        self._kept[layer], self._tokens[layer] = total, tokens

    def gathered(self) -> dict[str, KeptFeatures]:
        """The counts of all ranks together, by layer. A collective call."""
        own = {layer: (int(self._tokens[layer]), int(self._kept[layer])) for layer in self._kept}
        shares = ranks().gather(own)
        found = {}
        for layer, width in self._widths.items():
            held = [share[layer] for share in shares if layer in share]
            tokens, kept = sum(each[0] for each in held), sum(each[1] for each in held)
            found[layer] = KeptFeatures(tokens=tokens, width=width, kept=kept)
        return found


@contextmanager
def pruned_features(model: PreTrainedModel, beta: float) -> Iterator[FeatureCounts]:
    """Inside this context, each token keeps the effective number of the hidden features of every MLP; yields their counts.

    Args:
        model: on any devices, offloaded or not. Experts run one by one.
        beta: multiple of the effective number to keep.

    Raises:
        UserError: the model has no MLP with hidden features.
    """
    readers = hidden_readers(model)
    counts = FeatureCounts({reader.name: reader.width for reader in readers})
    handles = []
    for reader in (each for each in readers if each.transposed is None):

        def prune(module: Any, args: tuple[Any, ...], name: str = reader.name) -> tuple[Any, ...]:
            features, kept = keep_effective_features(args[0], beta)
            counts.add(name, kept, torch.ones_like(kept, dtype=torch.bool))
            return features, *args[1:]

        handles.append(model.get_submodule(reader.name).register_forward_pre_hook(prune))

    def prune_expert(parameter: str, features: Tensor) -> Tensor:
        pruned, kept = keep_effective_features(features, beta)
        counts.add(parameter, kept, features.any(-1))  # rows of zeros stand in place of other experts' tokens
        return pruned

    stacks = {reader.name: reader.transposed for reader in readers if reader.transposed is not None}
    try:
        with expert_hooks(model, stacks, change=prune_expert):
            yield counts
    finally:
        for handle in handles:
            handle.remove()
