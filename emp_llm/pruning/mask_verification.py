"""Masks decided again by the reference in plain torch, not by the kernel that wrote them."""

import numpy as np

from emp_llm.checkpoint.checkpoint import Checkpoint
from emp_llm.checkpoint.files import FileReader
from emp_llm.checkpoint.matrices import Words, as_tensor
from emp_llm.common.errors import count_of
from emp_llm.common.progress import progress_bar
from emp_llm.models.architecture import Target
from emp_llm.options.recipe import SEARCHES, Recipe, parse_pattern
from emp_llm.pruning.counts import counts_of
from emp_llm.pruning.masks import Pruner
from emp_llm.pruning.scores import Scores
from emp_llm.pruning.verification import Findings

_CHUNK_WEIGHTS = 1 << 20


def check_masks(pruned: Checkpoint, scores: Scores, findings: Findings) -> None:
    """Decide all masks again and compare: a weight that the recipe keeps must be the source's, every other one zero.

    After a refit, a kept weight may have any finite value. The masks of SparseGPT and ADMM are not decided again; only the
    numbers of their kept weights are checked.

    Args:
        pruned: the checkpoint to check.
        scores: of the source, by the recipe and the norms of the run.
    """
    recipe, targets = scores.recipe, scores.targets
    pruner = Pruner(scores, counts_of(scores), chunk_weights=_CHUNK_WEIGHTS, reference=True)
    by_matrix = counts_of(scores, group="matrix") if recipe.name == "sparsegpt" and recipe.pattern is None else None
    total = sum(target.matrix.numel for target in targets)
    with scores.checkpoint.open_files() as files, progress_bar(total, "decide", "W") as bar:
        selector = pruner.search(targets, files) if recipe.group == "all" else None
        for target in targets:
            if recipe.group == "matrix":
                selector = pruner.search([target], files)
            wrong, left, most, over, finite = 0, 0, 0, 0, True
            with FileReader(pruned.folder / target.matrix.stored.shard.name) as file:
                for chunk in pruner.pruned(target, files, selector):
                    written = target.matrix.read(file, chunk.first, chunk.first + len(chunk.words))
                    values = as_tensor(written, target.matrix.stored.dtype)
                    finite = finite and bool((values.float() if values.element_size() == 1 else values).isfinite().all())
                    if recipe.updates:
                        wrong += int(np.count_nonzero((chunk.words == 0) & (written != 0)))
                    else:
                        wrong += int(np.count_nonzero(chunk.words != written))
                    here, there = _kept(written, recipe), _kept(chunk.words, recipe)
                    over += int(np.count_nonzero(here > there))
                    left, most = left + int(here.sum()), most + int(there.sum())
                    bar.update(chunk.words.size)
            findings.count("targets")
            findings.differences += _differences(recipe, target, wrong, left, most, over, finite, by_matrix)


def _kept(words: Words, recipe: Recipe) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
    """The number of weights that are not zero, in each row or in every M weights of it."""
    width = words.shape[1] if recipe.pattern is None else parse_pattern(recipe.pattern)[1]
    return np.count_nonzero(words.reshape(-1, width), axis=1)


def _differences(
    recipe: Recipe, target: Target, wrong: int, left: int, most: int, over: int, finite: bool, by_matrix: object
) -> list[str]:
    """What is wrong with a target, one sentence each."""
    found = [f"{target.name}: it holds NaN or infinity."] if recipe.updates and not finite else []
    if recipe.name not in SEARCHES:
        return [*found, f"{target.name}: {count_of(wrong, 'weight')} not as the recipe decides."] if wrong else found
    if by_matrix is not None:
        kept = int(by_matrix.kept[target.name][0])  # type: ignore[attr-defined]
        # A target that was not updated is pruned row by row, which may keep more weights.
        if left > kept and wrong:
            zeros, removed = target.matrix.numel - left, target.matrix.numel - kept
            found.append(f"{target.name}: {zeros:,} zeros; its recipe removes {removed:,} weights.")
    elif left > most:
        found.append(f"{target.name}: {left:,} weights are left; its recipe keeps {most:,}.")
    elif over and recipe.group == "row":
        groups = "group" if recipe.pattern is not None else "row"
        found.append(f"{target.name}: more weights are left in {count_of(over, groups)} than the recipe keeps.")
    return found
