"""The scores of a run's targets: each target's criterion, and the norms of its inputs."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from emp_llm.checkpoint.checkpoint import Checkpoint
from emp_llm.checkpoint.matrix import as_tensor, dequantised_rows, torch_dtype
from emp_llm.common.errors import UserError
from emp_llm.models.architecture import Target
from emp_llm.options.criterion import GIVEN
from emp_llm.selection.arithmetic.definitions import NonFiniteError
from emp_llm.selection.criteria import InputStatistics
from emp_llm.selection.scheme import Scheme
from emp_llm.storage.buffers import Block

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from emp_llm.calibration.activations import Activations
    from emp_llm.pruning.scoring.own_scores import OwnScores


class TargetScores:
    """The scores of each target.

    Args:
        targets: of the run.
        scheme: its criterion applies to all targets except those in `by_magnitude`.
        least_tokens: experts that saw fewer tokens are scored by magnitude, because norms over few tokens are unreliable.
        checkpoint: of the targets.
        given: the scores of the criterion "scores", a path or tensors by name.

    Attributes:
        by_magnitude: name -> number of tokens, for the targets scored by magnitude for that reason.

    Raises:
        UserError: given scores are missing for a target, or have another shape.
    """

    def __init__(
        self,
        targets: list[Target],
        scheme: Scheme,
        least_tokens: int,
        checkpoint: Checkpoint,
        given: Path | Mapping[str, Any] | None = None,
    ) -> None:
        self.least_tokens = least_tokens
        self.by_magnitude: dict[str, int] = {}
        self._targets = targets
        self._scheme = scheme
        self._norms: dict[str, Block] = {}
        self._tokens: dict[str, int | None] = {}
        self._whole: OwnScores | None = None
        if scheme.criterion.whole:
            self._whole = self._whole_scores(checkpoint, given)

    def use(self, activations: "Activations", name: str = "the activations") -> None:
        """Use these input norms; errors call them `name`.

        Raises:
            UserError: the norms of a target are missing, or their number is wrong.
        """
        if self._scheme.relative and not activations.relative:
            raise UserError(
                f"{name}: it has no norms relative to the outputs, which relative scores need; an older emp-llm made it. Run "
                "emp-llm calibrate again, or use a wanda method without --score relative."
            )
        for target in self._targets:
            norm, inputs = activations.norm(target.name, self._scheme.relative), target.matrix.columns
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
        self._tokens[target.name] = tokens
        if target.layer.routed and tokens is not None and tokens < self.least_tokens:
            self.by_magnitude[target.name] = tokens

    def scheme_of(self, target: Target) -> Scheme:
        """The scheme of a target: that of the run, or the same with magnitude scores."""
        return replace(self._scheme, criterion_name="magnitude") if target.name in self.by_magnitude else self._scheme

    def norms_of(self, target: Target) -> Block | None:
        """The norms of a target's inputs, float32, shape (columns,)."""
        return self._norms.get(target.name)

    def of(self, target: Target, first: int, weights: "Tensor") -> "Tensor":
        """The scores of a block of a target's rows, on the device of the weights.

        Args:
            first: number of the block's first row.
        """
        criterion = self.scheme_of(target).criterion
        if criterion.whole and self._whole is not None:
            return self._whole.rows(target, first, first + weights.shape[0]).to(weights.device)
        values = dequantised_rows(target.matrix, first, weights)
        scores = criterion.score(values, self._inputs(target)) if criterion.needs_norms else criterion.score(values)
        return scores.contiguous()

    def whole_of(self, target: Target) -> "Callable[[int, Tensor], Tensor] | None":
        """Computes the scores of a target's blocks, if its criterion takes whole matrices; else None."""
        return partial(self.of, target) if self.scheme_of(target).criterion.whole else None

    def dtype(self, target: Target) -> "torch.dtype":
        """The dtype of a target's scores."""
        import torch

        criterion = self.scheme_of(target).criterion
        if criterion.whole and self._whole is not None:
            return self._whole.rows(target, 0, 1).dtype
        dtype = torch_dtype(target.matrix.stored.dtype) if target.matrix.scales is None else torch.float32
        return torch.promote_types(dtype, torch.float32) if criterion.needs_norms else dtype

    def _inputs(self, target: Target) -> InputStatistics | None:
        import torch

        norms = self._norms.get(target.name)
        return None if norms is None else InputStatistics(torch.from_numpy(norms), self._tokens.get(target.name))

    def _whole_scores(self, checkpoint: Checkpoint, given: Path | Mapping[str, Any] | None) -> "OwnScores":
        from emp_llm.pruning.scoring.own_scores import CriterionScores, GivenScores, OwnScores, ScoreSource

        scheme = self._scheme
        source: ScoreSource
        if scheme.criterion_name != GIVEN:
            source = CriterionScores(scheme.criterion_name, scheme.criterion, checkpoint, self._inputs)
        elif given is not None:
            source = GivenScores(given, self._targets)
        else:
            raise UserError("the scores that decided the masks are not at hand; give their file with --scores.")
        return OwnScores(source, self._targets, scheme.score_map, scheme.group)


@contextmanager
def naming_target(target: Target) -> Iterator[None]:
    """Raise a UserError, which names the tensor and the rows, for a NonFiniteError."""
    try:
        yield
    except NonFiniteError as error:
        first, words = error.args
        stored, rows = target.matrix.stored, f"rows {first} to {first + words.shape[0] - 1}"
        if bool(as_tensor(words, stored.dtype).double().isfinite().all()):
            raise UserError(f"{target.name}: the scores overflow in {rows}; its activations are too large.") from error
        where = "" if str(stored.shard) == stored.name else f"{stored.shard}: "  # a model in memory has no file
        remedy = "The checkpoint is damaged; download it again." if where else "Load the model again."
        raise UserError(f"{where}{stored.name} holds NaN or infinity ({rows}). {remedy}") from error
