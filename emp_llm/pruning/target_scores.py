"""The scores of a run's targets: each target's criterion, and the norms of its inputs."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from emp_llm.architecture.targets import Target
from emp_llm.checkpoint.matrix import as_tensor, torch_dtype
from emp_llm.common.errors import UserError
from emp_llm.selection.arithmetic.definitions import NonFiniteError
from emp_llm.selection.scheme import Scheme
from emp_llm.storage.buffers import Block

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from emp_llm.calibration.activations import Activations


class TargetScores:
    """The scores of each target.

    Args:
        targets: of the run.
        scheme: its criterion applies to all targets except those in `by_magnitude`.
        least_tokens: experts that saw fewer tokens are scored by magnitude, because norms over few tokens are unreliable.

    Attributes:
        by_magnitude: name -> number of tokens, for the targets scored by magnitude for that reason.
    """

    def __init__(self, targets: list[Target], scheme: Scheme, least_tokens: int = 0) -> None:
        self.least_tokens = least_tokens
        self.by_magnitude: dict[str, int] = {}
        self._targets = targets
        self._scheme = scheme
        self._norms: dict[str, Block] = {}

    def use(self, activations: "Activations", name: str = "the activations") -> None:
        """Use these input norms; errors call them `name`.

        Raises:
            UserError: the norms of a target are missing, or their number is wrong.
        """
        for target in self._targets:
            norm, inputs = activations.norm(target.name), target.matrix.columns
            if norm is None or norm.numel() != inputs:
                wrong = "no norms" if norm is None else f"{norm.numel()} norms for {inputs} inputs"
                raise UserError(
                    f"{name}: {target.name} has {wrong}. Either the norms are of another model or of other layers (run "
                    "emp-llm calibrate for this model), or the forward pass does not call this layer (leave it out with "
                    "--ignore)."
                )
            self.take(target, norm, activations.tokens_of(target.name))
        if self.by_magnitude and self._scheme.group == "all":
            name, tokens = next(iter(self.by_magnitude.items()))
            raise UserError(
                f"--group all: {name} saw {tokens} calibration tokens, too few for norms, and magnitudes cannot compete with "
                "other scores. Use more --samples, or leave the layer out with --ignore."
            )

    def take(self, target: Target, norm: "Tensor", tokens: int | None) -> None:
        """Set the norms of one target's inputs, float32, shape (columns,), and the number of tokens that they cover."""
        self._norms[target.name] = np.ascontiguousarray(norm.detach().cpu().float().numpy())
        if target.layer.routed and tokens is not None and tokens < self.least_tokens:
            self.by_magnitude[target.name] = tokens

    def scheme_of(self, target: Target) -> Scheme:
        """The scheme of a target: that of the run, or the same with magnitude scores."""
        return replace(self._scheme, criterion_name="magnitude") if target.name in self.by_magnitude else self._scheme

    def norms_of(self, target: Target) -> Block | None:
        """The norms of a target's inputs, float32, shape (columns,)."""
        return self._norms.get(target.name)

    def of(self, target: Target, weights: "Tensor") -> "Tensor":
        """The scores of a block of a target's rows, on the device of the weights."""
        import torch

        norms = self._norms.get(target.name)
        norm = None if norms is None else torch.from_numpy(norms).to(weights.device)
        return self.scheme_of(target).criterion.score(weights, norm).contiguous()

    def dtype(self, target: Target) -> "torch.dtype":
        """The dtype of a target's scores."""
        import torch

        dtype = torch_dtype(target.matrix.stored.dtype)
        return torch.promote_types(dtype, torch.float32) if self.scheme_of(target).criterion.needs_norms else dtype


@contextmanager
def naming_target(target: Target) -> Iterator[None]:
    """Raise a UserError, which names the tensor and the rows, for a NonFiniteError."""
    try:
        yield
    except NonFiniteError as error:
        first, words = error.args
        stored, rows = target.matrix.stored, f"rows {first} to {first + words.shape[0] - 1}"
        if bool(as_tensor(words, stored.dtype).isfinite().all()):
            raise UserError(f"{target.name}: the scores overflow in {rows}; its activations are too large.") from error
        raise UserError(
            f"{stored.shard}: {stored.name} holds NaN or infinity ({rows}). The checkpoint is damaged; download it again."
        ) from error
