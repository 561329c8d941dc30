"""Updates of the kept weights, and the refit. torch is imported when one is solved.

A new update that searches for its own mask is one file with a class like `admm.Admm`. Its fields
are its parameters: in Python, on the command line once the class is defined, and in records.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from emp_llm.common.declared import Flag, Node
from emp_llm.selection.rule import NonFiniteError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from emp_llm.update.least_squares import Solution


Pattern = tuple[int, int]
LEAST_DAMPING = 0.01


@dataclass(frozen=True)
class Moments:
    """What a layer saw and what it shall return: sums over the calibration tokens t with weights
    w_t.

    Attributes:
        gram: sum_t w_t xhat_t xhat_t^T of its inputs xhat in the pruned model, float32, shape
            (inputs, inputs).
        right: sum_t w_t y_t xhat_t^T of the outputs y that it shall return, float32, shape
            (outputs, inputs). None: those of the dense weights on the same inputs.
        energy: sum_t w_t y_tr^2 of each output r, float64, shape (outputs,).
        tokens: their number.
    """

    gram: "Tensor"
    right: "Tensor | None"
    energy: "Tensor"
    tokens: int


@dataclass(frozen=True)
class Allowed:
    """What may stay of a layer: one of the three.

    Attributes:
        mask: the weights that stay, bool, shape (outputs, inputs).
        counts: how many stay, int64; of each row, shape (outputs,), or of the matrix, shape (1,).
        pattern: (N, M): N of every M consecutive inputs.
    """

    mask: "Tensor | None" = None
    counts: "Tensor | None" = None
    pattern: Pattern | None = None

    def to(self, device: "torch.device") -> "Allowed":
        """The same on a device."""
        mask = None if self.mask is None else self.mask.to(device)
        counts = None if self.counts is None else self.counts.to(device)
        return Allowed(mask, counts, self.pattern)


@dataclass(frozen=True, kw_only=True)
class Update(Node, ABC):
    """New values for the weights that stay, layer by layer, by the outputs on calibration tokens.

    Attributes:
        name: of the stage of a run; of a search, the method.
        title: for messages and the model card.
        searches: whether it decides which weights stay; else masks are given.
        keeps: the groups in which a search keeps the number of weights that the recipe says.
    """

    kinds: ClassVar[dict[str, Any]] = {}
    title: ClassVar[str] = ""
    searches: ClassVar[bool] = False
    keeps: ClassVar[Literal["row", "matrix"]] = "row"

    @property
    @abstractmethod
    def refit(self) -> "Refit | None":
        """The refit of the kept weights; None: the values of the search stay."""

    @property
    def restores_dense(self) -> bool:
        """Whether the target is the dense model's output; if not, the dense weights' output on the
        pruned inputs.
        """
        return True

    @property
    def relative(self) -> bool:
        """Whether the error of a token is measured relative to its output."""
        return self.refit is not None and self.refit.weighting == "relative"

    @property
    def restores_block(self) -> bool:
        """Whether the last layer of a block restores the outputs of the block."""
        return self.refit is None or self.refit.target == "block"

    def damping_of(self, inputs: int, tokens: int) -> float:
        """The damping that is tried first for a layer, as a share of the mean second moment."""
        given = None if self.refit is None else self.refit.damping
        return damping_for(inputs, tokens) if given is None else given

    @abstractmethod
    def solve(
        self, weight: "Tensor", moments: Moments, allowed: Allowed, damping: float
    ) -> "Solution":
        """The values, and the mask, of a layer.

        Args:
            weight: the dense weights, float32, shape (outputs, inputs).
            moments: of its inputs and outputs.
            allowed: a mask, or what a search may keep.
            damping: of `damping_of`.

        Raises:
            NonFiniteError: an argument holds NaN or infinity, or values too large for their
                products.
        """

    def workspace_bytes(self, outputs: int, inputs: int) -> int:
        """The memory that `solve` needs beside its arguments, with the weights that it returns."""
        from emp_llm.update.least_squares import workspace_bytes

        return workspace_bytes(outputs, inputs)

    def operations(self, outputs: int, inputs: int) -> float:
        """Multiplications and additions of `solve`, about: those of a refit."""
        return (40 * outputs + 3 * inputs) * float(inputs * inputs)


@dataclass(frozen=True, kw_only=True)
class Refit(Update):
    """The kept weights of a given mask at the least-squares optimum (`least_squares`).

    Attributes:
        weighting: of the tokens: "equal", or "relative": 1 / ||y_t||^2 for the dense outputs y_t.
        target: what the last layer of a block restores.
        damping: the pull towards the dense weights; None: inputs / tokens, at least 0.01.
    """

    name = "refit"
    title = "a refit of the kept weights"
    switch = Flag(
        "Move the kept weights so that each layer's outputs stay close to the dense model's.",
        name="refit",
    )
    weighting: Annotated[
        Literal["equal", "relative"],
        Flag("Weight of each token: equal, or relative to its output.", name="refit_weighting"),
    ] = "equal"
    target: Annotated[
        Literal["block", "layer"],
        Flag(
            "What the last layer of a block restores: the outputs of the block, or of the layer.",
            name="refit_target",
        ),
    ] = "block"
    damping: Annotated[
        float | None,
        Flag(
            "Pull towards the dense weights, as a share of the mean second moment; default: inputs "
            "/ tokens, at least 0.01.",
            name="refit_damping",
            above=0,
            maximum=1,
        ),
    ] = None

    @property
    def refit(self) -> "Refit":
        return self

    def solve(
        self,
        weight: "Tensor",
        moments: Moments,
        allowed: Allowed,
        damping: float,
        start: "Tensor | None" = None,
    ) -> "Solution":
        """The values of a mask.

        Args:
            weight, moments, allowed, damping: of `Update.solve`.
            start: values near the optimum, such as a search's, float32, shape (outputs, inputs).
        """
        from emp_llm.update.least_squares import refit_rows

        assert allowed.mask is not None
        return refit_rows(
            weight,
            allowed.mask,
            moments.gram,
            moments.right,
            damping=damping,
            energy=moments.energy,
            start=start if moments.right is not None else None,
        )


@dataclass(frozen=True, kw_only=True)
class Search(Update):
    """An update that decides which weights stay, within the counts of a recipe.

    Attributes:
        refit: of the weights that it keeps; None: the values that it found stay.
    """

    searches = True
    refit: Refit | None = None


def damping_for(inputs: int, tokens: int) -> float:
    """A damping for a number of calibration tokens: inputs / tokens, at least 0.01.

    With few tokens for each input, a refit follows chance. On tokens that a refit has not seen,
    this is the best damping or within 2 % of it, on three models, from 2 to 250 tokens for each
    input.
    """
    return max(LEAST_DAMPING, inputs / max(tokens, 1))


# SparseGPT (Frantar & Alistarh 2023, arXiv 2301.00774): the mask and the weights of a layer, in
# one pass over its columns.
#
# The problem, for the dense weights W and the second moments G of the inputs:
#
#     minimise tr((V - W) G (V - W)^T) / 2 over all V with a number of weights other than zero
#
# This is half the squared error of the outputs. For each row, its Hessian is H = G + lambda I, with
# the damping lambda. The pass goes through the columns from left to right. At column j, the weights
# to its left are fixed, and those to its right can still change. Let U be the upper triangular
# factor of the inverse, H^-1 = U^T U. If weight w_j of a row is removed, and the weights to its
# right make up for it as well as possible, the error grows by (w_j / U_jj)^2 / 2, and the weights
# become
#
#     w_i <- w_i - (w_j / U_jj) U_ji    for i >= j
#
# Columns are taken in blocks. The mask of a block is chosen by these errors. Then its columns
# change one by one, and the columns to its right once, by a matrix product.


_COLUMNS = 128


@dataclass(frozen=True, kw_only=True)
class SparseGPT(Search):
    """Mask and values by `sparsegpt`, which spreads the kept weights of a matrix over its rows.

    Attributes:
        damping: lambda as a share of the mean second moment. The paper's is 0.01.
        columns: how many columns get their mask at a time.
    """

    name = "sparsegpt"
    title = "SparseGPT"
    keeps = "matrix"
    damping: Annotated[
        float,
        Flag("Damping of SparseGPT, as a share of the mean second moment.", above=0, maximum=1),
    ] = LEAST_DAMPING
    columns: Annotated[
        int, Flag("Columns that SparseGPT gives their mask at a time.", minimum=1)
    ] = _COLUMNS

    @property
    def restores_dense(self) -> bool:
        return self.refit is not None

    def damping_of(self, inputs: int, tokens: int) -> float:
        return self.damping if self.refit is None else super().damping_of(inputs, tokens)

    def solve(
        self, weight: "Tensor", moments: Moments, allowed: Allowed, damping: float
    ) -> "Solution":
        counts = allowed.counts
        return sparsegpt(
            weight,
            moments.gram,
            count=None if counts is None else int(counts.sum()),
            pattern=allowed.pattern,
            block=self.columns,
            damping=self.damping,
        )


def sparsegpt(
    weight: "Tensor",
    gram: "Tensor",
    *,
    count: int | None = None,
    pattern: tuple[int, int] | None = None,
    block: int = _COLUMNS,
    damping: float = LEAST_DAMPING,
) -> "Solution":
    """Prune a layer by SparseGPT, to a number of weights of the matrix or to an N:M pattern.

    With a count, the mask of a block of columns keeps its largest (w_ij / U_jj)^2 over all rows: of
    the R weights to remove, floor(R columns / inputs) lie in the columns up to the end of each
    block. Among equal scores, those with the lowest index are kept. An input that is always zero
    loses its weights.

    Args:
        weight: shape (outputs, inputs), any floating dtype.
        gram: second moments of the inputs, sum_t x_t x_t^T, float32, shape (inputs, inputs). Its
            scale does not matter.
        count: how many weights of the matrix are kept.
        pattern: (N, M): N of every M consecutive inputs are kept. Instead of a count.
        block: columns of a block. With a pattern, the largest multiple of M up to it, and at least
            M.
        damping: lambda as a share of the mean diagonal of the gram. The paper's is 0.01.

    Raises:
        NonFiniteError: weight or gram holds NaN or infinity, or `gram` is no matrix of second
            moments.
    """
    import torch

    from emp_llm.common.machine import float32_products
    from emp_llm.selection.reference import largest_mask
    from emp_llm.update.least_squares import Solution, check_finite, check_products

    check_finite(weight=weight, gram=gram)
    outputs, inputs = weight.shape
    if pattern is not None:  # a block holds whole groups
        block = max(block // pattern[1], 1) * pattern[1]
    with float32_products("highest"), torch.no_grad():
        weight = weight.float().clone()
        dead = gram.diagonal() <= 0
        weight[:, dead] = 0
        factor, damping = _inverse_factor(gram, dead, damping)
        mask = torch.empty_like(weight, dtype=torch.bool)
        starts = range(0, inputs, block)
        kept = None
        if count is not None:
            ends = [*starts, inputs]
            removed = [(weight.numel() - count) * end // inputs for end in ends]
            kept = outputs * torch.tensor(ends).diff() - torch.tensor(removed).diff()
            kept = kept.to(weight.device)
        for number, start in enumerate(starts):
            end = min(start + block, inputs)
            here = slice(start, end)
            if kept is not None:
                scores = (weight[:, here] / factor.diagonal()[here]).square().reshape(1, -1)
                mask[:, here] = largest_mask(scores, kept[number : number + 1]).reshape(outputs, -1)
            errors = _prune_block(weight[:, here], mask[:, here], factor[here, here], pattern)
            weight[:, end:].addmm_(errors, factor[here, end:], alpha=-1)
    check_products(weight)
    return Solution(weight, mask, damping)


def _inverse_factor(gram: "Tensor", dead: "Tensor", damping: float) -> "tuple[Tensor, float]":
    """U with H^-1 = U^T U, and the damping with which H is positive definite.

    U is the inverse of the upper triangular T with H = T T^T, which is the Cholesky factor of H
    with rows and columns in reverse order. So H^-1 is never formed.
    """
    import torch

    from emp_llm.update.least_squares import cholesky, raised_dampings

    scale = float(gram.diagonal().double().mean()) or 1.0
    identity = torch.eye(len(gram), device=gram.device)
    for raised in raised_dampings(damping):
        hessian = gram / scale
        hessian.diagonal().add_(dead.float() + raised)
        lower = cholesky(hessian.flip(0, 1))
        if lower is not None:
            factor = torch.linalg.solve_triangular(lower.flip(0, 1), identity, upper=True)
            if bool(factor.isfinite().all()):
                return factor, raised
    raise NonFiniteError("gram is no matrix of second moments: it stays indefinite at any damping")


def _prune_block(
    weight: "Tensor", mask: "Tensor", factor: "Tensor", pattern: tuple[int, int] | None
) -> "Tensor":
    """Prune the columns of a block one after the other, in place; with a pattern, choose the mask
    on the way.

    Returns:
        w_j / U_jj of each removed weight when its column was reached, and 0 of a kept one; shape of
        the block.
    """
    import torch

    from emp_llm.common.machine import runs_triton
    from emp_llm.selection.reference import order_keys, pattern_mask

    if runs_triton(weight.device):
        from emp_llm.update.cuda_kernel import WIDEST, prune_columns

        if weight.shape[1] <= WIDEST:
            return prune_columns(weight, mask, factor, pattern)
    # a column of the block in one piece of memory
    columns = weight.t().contiguous()
    kept = mask.t().contiguous()
    errors = torch.empty_like(columns)
    diagonal = factor.diagonal()[:, None]
    # A weight that is kept is divided by infinity.
    divisor = torch.where(kept, torch.inf, diagonal)
    for column in range(len(columns)):
        if pattern is not None and column % pattern[1] == 0:
            group = slice(column, column + pattern[1])
            scores = (columns[group] / diagonal[group]).square().t().contiguous()
            kept[group] = pattern_mask(order_keys(scores), *pattern).t()
            divisor[group] = torch.where(kept[group], torch.inf, diagonal[group])
        torch.div(columns[column], divisor[column], out=errors[column])
        columns[column:].addr_(factor[column, column:], errors[column], alpha=-1)
    columns *= kept  # exactly zero where removed
    weight.copy_(columns.t())
    mask.copy_(kept.t())
    return errors.t()


# ADMM: the mask and the weights of a layer, found together by the alternating direction method
# of multipliers (Boza 2024, arXiv 2401.02938; Meng et al. 2024, arXiv 2406.07831).
#
# The problem, for the dense weights W and the second moments G of the inputs:
#
#     minimise tr((V - W) G (V - W)^T) over all V with at most k weights other than zero in each row
#
# The trace is the squared error of the outputs. ADMM keeps two copies of the weights: X has a low
# error, Z keeps to the limit, and the dual U draws them together. A step is
#
#     Z <- the k largest of X + U in each row, the others zero
#     U <- U + X - Z
#     X <- argmin of the error of X + rho ||X - Z + U||^2 = (W G + rho (Z - U)) (G + rho I)^-1
#
# The result is Z. Two things are added:
#
# - Inputs are scaled so that each has the second moment 1. Then the largest weights are those that
#   change the outputs most.
# - The penalty rho grows in stages, from 0.15 to 1. While it is small, the mask changes freely. At
#   rho = 1, it rests where no removed weight, restored alone, would lower the error by more than
#   the square of the row's smallest kept weight. A stage takes a factorisation, which costs as much
#   as eight steps; so stages are few, and those that find the values are longer.
#
# The damping adds lambda ||V - W||^2 to the error. Where the layer shall return other outputs than
# W does, their products with the inputs (`right` of `admm`) take the place of W G.


_PENALTY = 0.15
_STAGES = 6
_INDEFINITE = "gram is no matrix of second moments: it is indefinite"
_PANEL = 256  # columns of a symmetric product that are computed at a time


@dataclass(frozen=True, kw_only=True)
class Admm(Search):
    """Mask and values by `admm`.

    Attributes:
        penalty: rho of the first stage; that of the last is 1.
        stages: their number.
    """

    name = "admm"
    title = "masks and weights searched for together (ADMM)"
    penalty: Annotated[
        float,
        Flag("First penalty of ADMM, as a share of each second moment.", above=0, maximum=1),
    ] = _PENALTY
    stages: Annotated[
        int, Flag("Stages in which the penalty of ADMM grows to 1.", minimum=2, maximum=100)
    ] = _STAGES

    def solve(
        self, weight: "Tensor", moments: Moments, allowed: Allowed, damping: float
    ) -> "Solution":
        return admm(
            weight,
            moments.gram,
            counts=allowed.counts,
            pattern=allowed.pattern,
            right=moments.right,
            damping=damping,
            penalty=self.penalty,
            stages=self.stages,
        )

    def workspace_bytes(self, outputs: int, inputs: int) -> int:
        of_refit = super().workspace_bytes(outputs, inputs)
        return max(4 * (7 * inputs * inputs + 12 * outputs * inputs), of_refit)

    def operations(self, outputs: int, inputs: int) -> float:
        of_search = (70 * outputs + 14 * inputs) * float(inputs * inputs)
        return of_search + (0 if self.refit is None else super().operations(outputs, inputs))


def admm(
    weight: "Tensor",
    gram: "Tensor",
    *,
    counts: "Tensor | None" = None,
    pattern: tuple[int, int] | None = None,
    right: "Tensor | None" = None,
    damping: float = 0.01,
    penalty: float = _PENALTY,
    stages: int = _STAGES,
) -> "Solution":
    """Choose the kept weights of a layer, and their values, by ADMM.

    The values are close to the least-squares optimum of the mask; `refit_rows` reaches it.

    Args:
        weight: the dense weights, shape (outputs, inputs), any floating dtype.
        gram: second moments of the inputs, sum_t x_t x_t^T, float32, shape (inputs, inputs). Its
            scale does not matter.
        counts: int64; shape (outputs,): how many weights of each row are kept; shape (1,): of the
            matrix.
        pattern: (N, M): N of every M consecutive inputs are kept. Instead of counts.
        right: what the layer shall return, as in `refit_rows`; None: what the dense weights return
            on the same inputs.
        damping: pull towards the dense weights, as a share of the mean diagonal of `gram`; above 0.
        penalty: rho of the first stage, relative to an input's own second moment; above 0.
        stages: their number, at least 2.

    Raises:
        NonFiniteError: an argument holds NaN or infinity, or values too large for their products,
            or `gram` is no matrix of second moments.
    """
    import torch

    from emp_llm.common.machine import float32_products, has_bfloat16
    from emp_llm.update.least_squares import Solution, add_product, check_finite, check_products

    check_finite(weight=weight, gram=gram, right=right)
    penalties = [penalty ** (1 - stage / (stages - 1)) for stage in range(stages)]
    with float32_products("highest"), torch.no_grad():
        point = weight.float()
        scale = float(gram.diagonal().double().mean()) or 1.0
        aim = ((add_product(point, gram) if right is None else right) / scale).add_(
            point, alpha=damping
        )
        system = gram / scale
        system.diagonal().add_(damping)
        root = system.diagonal().sqrt()
        system.div_(root).div_(root[:, None])
        aim.div_(root)
        point = point * root
        dual = torch.zeros_like(point)
        before = penalty
        failed = []
        coarse = torch.bfloat16 if has_bfloat16(weight.device) else torch.float32
        for stage, rho in enumerate(penalties):
            factor = system.clone()
            factor.diagonal().add_(rho)
            inverse, indefinite = _inverse(factor)
            failed.append(indefinite)
            constant = add_product(aim, inverse)
            # Until the last stage, the digits of bfloat16 are enough for the search.
            last = stage == stages - 1
            steps = 5 if last else 4 + stage
            digits = torch.float32 if last else coarse
            pull = inverse.mul_(rho).to(digits)
            dual.mul_(before / rho)  # it is relative to the penalty
            for step in range(steps):
                point.add_(dual)
                mask = _mask_of_largest(point, counts, pattern)
                kept = point * mask
                torch.sub(point, kept, out=dual)
                if last and step == steps - 1:
                    break
                torch.sub(kept, dual, out=point)
                if digits == torch.float32:
                    point = add_product(point, pull, constant.clone())
                else:
                    point = constant + point.to(digits) @ pull
            before = rho
        if bool(torch.stack(failed).any()):
            raise NonFiniteError(_INDEFINITE)
        check_products(kept.div_(root))
        return Solution(kept, mask, damping)


def _inverse(matrix: "Tensor") -> "tuple[Tensor, Tensor]":
    """The inverse of a positive definite matrix, float32, shape (n, n), which is overwritten; and
    whether it is not positive definite, on a GPU. Else that is an error.
    """
    import torch

    from emp_llm.update.least_squares import cholesky

    if matrix.is_cuda:  # without waiting for it
        factor, failed = torch.linalg.cholesky_ex(matrix)
        identity = torch.eye(len(matrix), device=matrix.device)
        return torch.cholesky_solve(identity, factor), failed != 0
    if cholesky(matrix) is None:
        raise NonFiniteError(_INDEFINITE)
    factor = torch.linalg.solve_triangular(matrix, torch.eye(len(matrix)), upper=False)
    # Solves with the factor would depend on the number of threads.
    return _gram_of_lower(factor), torch.tensor(False)


def _gram_of_lower(factor: "Tensor") -> "Tensor":
    """factor^T @ factor of a lower triangular matrix, float32, shape (n, n). The bits are the same
    for any number of threads.
    """
    import torch

    from emp_llm.update.least_squares import add_product, symmetric

    gram = torch.empty_like(factor)
    for start in range(0, len(factor), _PANEL):
        panel = slice(start, start + _PANEL)
        rest = slice(start, None)
        gram[panel, rest] = add_product(factor[rest, panel].T, factor[rest, rest])
    return symmetric(gram)


def _mask_of_largest(
    values: "Tensor", counts: "Tensor | None", pattern: tuple[int, int] | None
) -> "Tensor":
    """The mask of the largest values of a matrix."""
    from emp_llm.selection.reference import largest_mask, order_keys, pattern_mask

    if pattern is not None:
        return pattern_mask(order_keys(values), *pattern)
    assert counts is not None
    if len(counts) == 1:
        return largest_mask(values.reshape(1, -1), counts).reshape(values.shape)
    return largest_mask(values, counts)
