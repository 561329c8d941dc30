"""A preconditioner for the masked systems of many rows: the largest eigenvectors of their common matrix, and a diagonal.

With s = diag(A)^-1/2, the scaled matrix s A s is approximated by M = D + U diag(e) U^T: U holds its largest eigenvectors, e
their eigenvalues, and the diagonal D makes the diagonals equal. A few inputs of real layers are a thousand times larger than
the others; s takes care of them. The inputs also share a few directions; U takes care of those. Within the mask of a row,

    M_SS^-1 = D_SS^-1 - D_SS^-1 U_S K^-1 U_S^T D_SS^-1,    K = diag(1/e) + U_S^T D_SS^-1 U_S

with a small matrix K for each row. Conjugate gradients then take half as many iterations as with s alone, or fewer.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

_RANKS = ((4096, 64), (512, 32), (128, 16))  # (inputs, eigenvectors): with more inputs, an iteration outweighs a larger K
_SPARE = 8  # further vectors of the search; they make it converge
_ROUNDS = 3
_LEAST_DIAGONAL = 1e-2  # of D: keeps K^-1 well within float32
_LEAST_EIGENVALUE = 1e-6
_PAIRS = 512  # columns of a product that builds K
_ROWS = 2048  # rows whose K are built and inverted at a time


def rank_for(inputs: int) -> int:
    """The number of eigenvectors for a number of inputs."""
    return next((rank for least, rank in _RANKS if inputs >= least), 0)


@dataclass(frozen=True)
class Preconditioner:
    """What the rows share.

    Attributes:
        diagonal: s^2 / D, shape (inputs,); 0 where A has a zero.
        basis: s U / D, shape (inputs, rank).
        vectors: U, shape (inputs, rank).
        weights: 1 / D, shape (inputs,).
        eigenvalues: e, shape (rank,).
    """

    diagonal: Tensor
    basis: Tensor
    vectors: Tensor
    weights: Tensor
    eigenvalues: Tensor

    @classmethod
    def of(cls, gram: Tensor, scale: float, damping: float) -> "Preconditioner":
        """For A = gram / scale + damping I."""
        diagonal = gram.diagonal() / scale + damping
        root = torch.where(diagonal > 0, diagonal.rsqrt(), 0)
        vectors, eigenvalues = _largest(gram, scale, damping, root)
        rest = (1 - vectors.square() @ eigenvalues).clamp_min(_LEAST_DIAGONAL)
        return cls(root.square() / rest, vectors * (root / rest)[:, None], vectors, 1 / rest, eigenvalues)

    def cores(self, mask: Tensor) -> Tensor:
        """K^-1 of each row: shape (rows, rank, rank), for a float mask of shape (rows, inputs)."""
        rank = len(self.eigenvalues)
        cores = mask.new_empty(len(mask), rank, rank)
        first, second = torch.triu_indices(rank, rank, device=mask.device)
        for start in range(0, len(mask), _ROWS) if rank else ():
            rows = mask[start : start + _ROWS]
            part = mask.new_empty(len(rows), rank, rank)
            for one, two in zip(first.split(_PAIRS), second.split(_PAIRS), strict=True):
                sums = rows @ (self.vectors[:, one] * self.vectors[:, two] * self.weights[:, None])
                part[:, one, two] = sums
                part[:, two, one] = sums
            part.diagonal(dim1=1, dim2=2).add_(1 / self.eigenvalues)
            cores[start : start + _ROWS] = torch.linalg.inv_ex(part).inverse
        return cores

    def apply(self, residual: Tensor, mask: Tensor, cores: Tensor, out: Tensor) -> Tensor:
        """s M_SS^-1 s of a residual that is zero outside of the mask."""
        if cores.shape[1]:
            inner = torch.bmm(cores, (residual @ self.basis)[:, :, None])[:, :, 0]
            torch.mm(inner, self.basis.T, out=out)
            return out.mul_(mask).neg_().addcmul_(residual, self.diagonal)
        return torch.mul(residual, self.diagonal, out=out)


def _largest(gram: Tensor, scale: float, damping: float, root: Tensor) -> tuple[Tensor, Tensor]:
    """Approximately the largest eigenvectors of s A s, and their eigenvalues, by subspace iteration from a fixed start."""
    inputs, rank = len(gram), rank_for(len(gram))

    def times(vectors: Tensor) -> Tensor:
        inner = vectors * root[:, None]
        return torch.addmm(inner, gram, inner, beta=damping, alpha=1 / scale).mul_(root[:, None])

    start = torch.randn(inputs, rank + _SPARE if rank else 0, generator=torch.Generator().manual_seed(0))
    vectors = start.to(gram.device)
    for _ in range(_ROUNDS if rank else 0):
        vectors = times(torch.linalg.qr(vectors).Q)
    vectors = torch.linalg.qr(vectors).Q
    inner = vectors.T @ times(vectors)
    if not rank or not bool(inner.isfinite().all()):  # infinite: no matrix of second moments
        return gram.new_empty(inputs, 0), gram.new_empty(0)
    eigenvalues, rotation = torch.linalg.eigh(inner)
    return (vectors @ rotation)[:, -rank:], eigenvalues[-rank:].clamp_min(_LEAST_EIGENVALUE)
