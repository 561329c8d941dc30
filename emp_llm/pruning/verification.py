"""Verification of a pruned checkpoint: files against the manifest, bytes against the source, and masks decided again.

It only reads. The masks are decided by the slow reference in plain torch, not by the kernel that wrote them.
"""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from emp_llm.calibration.activations import Activations
from emp_llm.checkpoint.checkpoint import Checkpoint, identity_of
from emp_llm.checkpoint.files import PIECE, FileReader, file_hash
from emp_llm.checkpoint.matrices import Words, as_tensor
from emp_llm.common.errors import UserError, count_of
from emp_llm.common.paths import MANIFEST_NAME, OTHER_WEIGHTS, REPORT_NAME
from emp_llm.common.progress import progress_bar
from emp_llm.models.architecture import Target
from emp_llm.options.recipe import SEARCHES, Recipe, parse_pattern
from emp_llm.pruning.counts import counts_of
from emp_llm.pruning.masks import Pruner
from emp_llm.pruning.scores import Scores
from emp_llm.pruning.writing import gaps, targets_in
from emp_llm.records.manifest import FileEntry, Manifest

_CHUNK_WEIGHTS = 1 << 20


@dataclass
class Findings:
    """Result of a verification so far.

    Attributes:
        differences: one sentence each.
        checked: number of checked things, by kind.
    """

    differences: list[str] = field(default_factory=list)
    checked: Counter[str] = field(default_factory=Counter)


def check_files(folder: Path, manifest: Manifest, findings: Findings) -> None:
    """Check sizes and hashes of all files that a manifest names, and look for weights that it does not name."""
    total = sum(entry.bytes for entry in manifest.files.values())
    with progress_bar(total, "hash", "B") as bar:
        for name, entry in manifest.files.items():
            findings.checked["files"] += 1
            difference = _file_difference(folder / name, entry)
            if difference is not None:
                findings.differences.append(f"{name}: {difference}")
            bar.update(entry.bytes)
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.suffix in OTHER_WEIGHTS and path.is_file() and name not in manifest.files:
            findings.differences.append(f"{name}: weights that the manifest does not name; move the file away.")


def _file_difference(path: Path, entry: FileEntry) -> str | None:
    """The difference between a file and its entry in the manifest, as a sentence; None if there is none."""
    if not path.is_file():
        return "it is missing."
    if (size := path.stat().st_size) != entry.bytes:
        return f"it has {size:,} bytes; the manifest says {entry.bytes:,}."
    found = file_hash(path)
    return None if found == entry.blake3 else f"its BLAKE3 is {found}; the manifest says {entry.blake3}."


def check_source(source: Checkpoint, manifest: Manifest) -> None:
    """Raise UserError if a checkpoint is not the model that was pruned, or the manifest does not identify that model."""
    if manifest.source.identity is None:
        raise UserError(f"--source {source.folder}: {MANIFEST_NAME} does not identify the model that was pruned.")
    if identity_of(source) != manifest.source.identity:
        raise UserError(
            f"--source {source.folder}: its weights are not those that were pruned. Give the model that {REPORT_NAME} names."
        )


def check_activations(activations: Activations, manifest: Manifest, name: str) -> None:
    """Raise UserError if norms are not those that decided the masks; `name` names their file."""
    if manifest.activations is None or activations.digest != manifest.activations.norms:
        raise UserError(f"{name}: not the norms that decided these masks. Give their file, or leave --activations out.")


def check_other_bytes(source: Checkpoint, pruned: Checkpoint, targets: list[Target], findings: Findings) -> bool:
    """Compare every byte outside of the targets with the source: headers, all other tensors, and side files.

    Returns:
        Whether the shards have the same names and sizes, so that the targets have the same offsets in both.
    """
    names = [shard.name for shard in source.shards]
    if names != [shard.name for shard in pruned.shards]:
        findings.differences.append(f"{pruned.folder}: its shards are not those of the source, {', '.join(names)}.")
        return False
    alike = True
    total = sum(shard.stat().st_size for shard in source.shards)
    with progress_bar(total, "compare", "B") as bar:
        for ours, theirs in zip(pruned.shards, source.shards, strict=True):
            size = theirs.stat().st_size
            if ours.stat().st_size != size:
                findings.differences.append(f"{ours.name}: {ours.stat().st_size:,} bytes; {size:,} in the source.")
                alike = False
                continue
            for start, end in gaps(targets_in(targets, theirs), theirs):
                at = _first_difference(ours, theirs, start, end)
                findings.checked["other bytes"] += end - start
                bar.update(end - start)
                if at is not None:
                    where = next(
                        (t.name for t in source.tensors.values() if t.shard == theirs and t.start <= at < t.end), "header"
                    )
                    findings.differences.append(
                        f"{ours.name}: byte {at:,} ({where}) differs from the source, outside of the targets."
                    )
    for relative in source.side_files():
        ours, theirs = pruned.folder / relative, source.folder / relative
        findings.checked["side files"] += 1
        if not ours.is_file() or ours.read_bytes() != theirs.read_bytes():
            findings.differences.append(f"{relative}: differs from the source.")
    return alike


def _first_difference(ours: Path, theirs: Path, start: int, end: int) -> int | None:
    """Offset of the first byte of a range in which two files differ; None if they are equal."""
    with FileReader(ours) as one, FileReader(theirs) as other:
        for first in range(start, end, PIECE):
            a, b = (file.take(first, min(PIECE, end - first)) for file in (one, other))
            if not np.array_equal(a, b):
                return first + int(np.flatnonzero(a != b)[0])
    return None


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
                    is_finite = (values.float() if values.element_size() == 1 else values).isfinite().numpy()
                    finite = finite and bool(is_finite.all())
                    if recipe.updates:
                        wrong += int(np.count_nonzero(np.where(chunk.words == 0, written != 0, ~is_finite)))
                    else:
                        wrong += int(np.count_nonzero(chunk.words != written))
                    here, there = _kept(written, recipe), _kept(chunk.words, recipe)
                    over += int(np.count_nonzero(here > there))
                    left, most = left + int(here.sum()), most + int(there.sum())
                    bar.update(chunk.words.size)
            findings.checked["targets"] += 1
            findings.differences += _differences(recipe, target, wrong, left, most, over, finite, by_matrix)


def _kept(words: Words, recipe: Recipe) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
    """The number of weights that are not zero, in each row or in every M weights of it."""
    width = words.shape[1] if recipe.pattern is None else parse_pattern(recipe.pattern)[1]
    kept: np.ndarray[tuple[int], np.dtype[np.int64]] = np.count_nonzero(words.reshape(-1, width), axis=1)
    return kept


def _differences(
    recipe: Recipe, target: Target, wrong: int, left: int, most: int, over: int, finite: bool, by_matrix: object
) -> list[str]:
    """What is wrong with a target, one sentence each."""
    if recipe.name not in SEARCHES:
        return [f"{target.name}: {count_of(wrong, 'weight')} not as the recipe decides."] if wrong else []
    found = [] if finite else [f"{target.name}: it holds NaN or infinity."]
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
