"""Masks decided again by the slow reference in plain torch, not by the kernel that wrote them."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from emp_llm.calibration.activations import Activations
from emp_llm.checkpoint.checkpoint import Checkpoint
from emp_llm.checkpoint.matrix import as_tensor, dequantised_rows
from emp_llm.checkpoint.words import Words
from emp_llm.common.errors import UserError
from emp_llm.common.file_names import MANIFEST_NAME
from emp_llm.common.progress_bars import progress_bar
from emp_llm.common.wording import count_of
from emp_llm.models.architecture import Target
from emp_llm.pruning.kept_masks import removed_of
from emp_llm.pruning.outlier_shares import outlier_parts
from emp_llm.pruning.output.manifest import scheme_of_manifest
from emp_llm.pruning.output.verification import Findings
from emp_llm.pruning.pruner import Pruner
from emp_llm.pruning.row_pruners import naming_block
from emp_llm.pruning.scoring.target_scores import naming_target
from emp_llm.records.manifest import Manifest
from emp_llm.selection.arithmetic.hill import CollectedMoments, Moments
from emp_llm.selection.block_shares import OwlBudget
from emp_llm.selection.budgets import EffectiveBudget, PatternBudget
from emp_llm.selection.given_counts import GivenCounts
from emp_llm.selection.group_selection import GroupSelector
from emp_llm.selection.row_selection import select_rows
from emp_llm.storage.direct_io import FileReader

_BLOCK_WEIGHTS = 1 << 20


def check_masks(
    source: Checkpoint,
    pruned: Checkpoint,
    targets: list[Target],
    manifest: Manifest,
    activations: Activations | None,
    findings: Findings,
    given: Path | None = None,
) -> None:
    """Decide all masks again and compare: a weight that the recipe keeps must be the source's, every other one zero.

    After a refit, a kept weight may have any finite value. The masks of SparseGPT and ADMM are not decided again; only their
    numbers of zeros are checked.

    Raises:
        UserError: the manifest does not record the scheme, or the norms lack a target.
    """
    try:
        scheme, least_tokens = scheme_of_manifest(manifest), manifest.recipe.min_expert_tokens or 0
    except UserError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{pruned.folder / MANIFEST_NAME}: it does not record how the masks were decided ({error}).") from error
    decided = Pruner(source, targets, scheme, least_tokens=least_tokens, given=given)
    if scheme.criterion.by_matrix:
        _check_zeros(pruned, decided, findings)
        return
    fitted = manifest.recipe.refit is not None
    if activations is not None:
        decided.scores.use(activations)
    elif scheme.criterion.needs_norms:
        raise UserError(f"{pruned.folder / MANIFEST_NAME}: its criterion needs activations, and it names none.")
    if scheme.count_by == "magnitude":
        decided.settled = _magnitude_counts(decided)
    elif isinstance(scheme.budget, OwlBudget):
        decided.settled = outlier_parts(decided, scheme.budget)
    with progress_bar(sum(_bytes(t) for t in targets), "decide", "B") as bar:
        everything = _selector(decided, targets, 0) if scheme.group == "all" else None
        offset = 0
        for target in targets:
            selector = everything
            if scheme.group == "matrix":
                selector = _selector(decided, [target], offset)
            findings.count("targets")
            if scheme.criterion.fits:
                findings.differences += _wrong_counts(pruned, decided, target, selector, offset)
            elif wrong := _wrong_weights(pruned, decided, target, selector, offset, fitted):
                findings.differences.append(f"{target.name}: {count_of(wrong, 'weight')} not as the recipe decides.")
            offset += target.matrix.numel
            bar.update(_bytes(target))


def _magnitude_counts(decided: Pruner) -> GivenCounts:
    """The counts by the effective numbers of the magnitudes, by the slow reference."""
    budget, group = decided.scheme.budget, decided.scheme.group
    assert isinstance(budget, EffectiveBudget)
    found: list[Moments] = []
    together = CollectedMoments()
    for target in decided.targets:
        with naming_target(target):
            for first, words in _blocks(target):
                weights = dequantised_rows(target.matrix, first, as_tensor(words, target.matrix.stored.dtype))
                with naming_block(first, words):
                    moments = Moments.of_rows(weights, budget.order)
                if group == "row":
                    found.append(moments)
                else:
                    together.add(moments)
        if group == "matrix":
            found.append(together.merged())
    found += [together.merged()] if group == "all" else []
    groups = [(each.number().numpy(), each.mass.numpy(), int(each.size[0])) for each in found]
    return GivenCounts(groups, budget.beta, budget.order)


def _wrong_weights(
    pruned: Checkpoint,
    decided: Pruner,
    target: Target,
    selector: GroupSelector | None,
    offset: int,
    fitted: bool,
) -> int:
    """The number of weights of a target whose bits differ from those of the reference.

    Args:
        fitted: kept weights were refitted, so that only their being finite is checked.
    """
    wrong = 0
    for words, kept, written in _rows_of(pruned, decided, target, selector, offset):
        if fitted:
            finite = as_tensor(written, target.matrix.stored.dtype).isfinite().numpy()
            wrong += int(np.count_nonzero(np.where(kept, ~finite, written != 0)))
        else:
            wrong += int(np.count_nonzero(np.where(kept, words, 0) != written))
    return wrong


def _wrong_counts(
    pruned: Checkpoint, decided: Pruner, target: Target, selector: GroupSelector | None, offset: int
) -> list[str]:
    """What is wrong with a target whose counts the recipe decides, and whose masks it does not."""
    budget, wrong, left, most, finite = decided.scheme.budget, 0, 0, 0, True
    width = budget.m if isinstance(budget, PatternBudget) else target.matrix.columns
    for _, kept, written in _rows_of(pruned, decided, target, selector, offset):
        here, there = ((each.reshape(-1, width) != 0).sum(1) for each in (written, kept))
        wrong += int(np.count_nonzero(here > there))
        left, most = left + int(here.sum()), most + int(there.sum())
        finite = finite and bool(as_tensor(written, target.matrix.stored.dtype).isfinite().all())
    found = [] if finite else [f"{target.name}: it holds NaN or infinity."]
    if left > most:
        found.append(f"{target.name}: {left:,} weights are left; its recipe keeps {most:,}.")
    elif wrong and decided.scheme.group == "row":
        groups = "group" if isinstance(budget, PatternBudget) else "row"
        found.append(f"{target.name}: more weights are left in {count_of(wrong, groups)} than the recipe keeps.")
    return found


def _rows_of(
    pruned: Checkpoint, decided: Pruner, target: Target, selector: GroupSelector | None, offset: int
) -> Iterator[tuple[Words, Words, Words]]:
    """(bits in the source, mask by the reference, bits as written) of each block of rows of a target."""
    path = pruned.folder / target.matrix.stored.shard.name
    with FileReader(path) as file, naming_target(target):
        for first, words in _blocks(target):
            scores = decided.scores.of(target, first, as_tensor(words, target.matrix.stored.dtype))
            with naming_block(first, words):
                part = (
                    selector.select(scores)
                    if selector
                    else select_rows(scores, decided.budget, offset + first * target.matrix.columns)
                )
            written = target.matrix.read(file, first, first + words.shape[0])
            yield words, part.mask.numpy(), written


def _check_zeros(pruned: Checkpoint, decided: Pruner, findings: Findings) -> None:
    """Check that each target has at least as many zeros as its budget removes, and that its other weights are finite.

    A target that was not fitted is pruned row by row, which may remove fewer weights; its mask is decided again.
    """
    for target in decided.targets:
        removed, zeros, finite = removed_of(decided, target), 0, True
        with FileReader(pruned.folder / target.matrix.stored.shard.name) as file:
            for first, last in target.matrix.row_blocks(_BLOCK_WEIGHTS):
                written = target.matrix.read(file, first, last)
                zeros += int(np.count_nonzero(written == 0))
                finite = finite and bool(as_tensor(written, target.matrix.stored.dtype).isfinite().all())
        findings.count("targets")
        if zeros < removed and _wrong_weights(pruned, decided, target, None, decided.offsets[target.name], False):
            findings.differences.append(f"{target.name}: {zeros:,} zeros; its recipe removes {removed:,} weights.")
        if not finite:
            findings.differences.append(f"{target.name}: it holds NaN or infinity.")


def _selector(decided: Pruner, targets: list[Target], offset: int) -> GroupSelector:
    """The selector of a group of one or several matrices, after all passes over their scores."""
    selector = GroupSelector(decided.budget, offset)
    feed = selector.add
    while True:
        for target in targets:
            with naming_target(target):
                for first, words in _blocks(target):
                    weights = as_tensor(words, target.matrix.stored.dtype)
                    with naming_block(first, words):
                        feed(decided.scores.of(target, first, weights))
        if not selector.searching():
            return selector
        feed = selector.search


def _blocks(target: Target) -> Iterator[tuple[int, Words]]:
    """(index of the first row, bits) of each block of rows of a target, from the source."""
    with FileReader(target.matrix.stored.shard) as file:
        for first, last in target.matrix.row_blocks(_BLOCK_WEIGHTS):
            yield first, target.matrix.read(file, first, last)


def _bytes(target: Target) -> int:
    return target.matrix.end - target.matrix.start
