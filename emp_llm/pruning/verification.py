"""Verification of a pruned checkpoint: files against the manifest, bytes against the source, and
masks decided again.

It only reads. Masks are decided by the slow reference in plain torch, not by the kernel that wrote
them: of one row in sixteen or of all, and the others by the kernel.
"""

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from blake3 import blake3
from numpy.typing import NDArray

from emp_llm.calibration.activations import Activations
from emp_llm.checkpoint.checkpoint import Checkpoint, StoredTensor, header_text, identity_of
from emp_llm.checkpoint.files import PIECE, FileReader, file_hash
from emp_llm.checkpoint.matrices import PRUNABLE_DTYPES, WORD, Words, as_tensor, word_bytes
from emp_llm.common.errors import UserError, count_of, shorten_list
from emp_llm.common.paths import OTHER_WEIGHTS, REPORT_NAME
from emp_llm.common.progress import progress_bar
from emp_llm.models.architecture import Architecture, Target
from emp_llm.models.masks import Masks
from emp_llm.models.modules import rows_in
from emp_llm.options.recipe import Recipe
from emp_llm.pruning.counts import counts_of
from emp_llm.pruning.masks import Chunk, Pruner
from emp_llm.pruning.scores import Scores
from emp_llm.pruning.writing import gaps
from emp_llm.records.run_report import FileEntry, Manifest

if TYPE_CHECKING:
    from torch import nn


_CHUNK_WEIGHTS = 1 << 20
_SHARE = 16  # of so many chunks of rows, the reference decides one
_WRITTEN = ("_name_or_path", "architectures", "dtype", "transformers_version")  # by save_pretrained


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
    """Check sizes and hashes of all files that a manifest names, and look for weights that it
    does not name.
    """
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
            findings.differences.append(
                f"{name}: weights that the manifest does not name; move the file away."
            )


def _file_difference(path: Path, entry: FileEntry) -> str | None:
    """The difference between a file and its entry in the manifest, as a sentence; None if there
    is none.
    """
    if not path.is_file():
        return "it is missing."
    if (size := path.stat().st_size) != entry.bytes:
        return f"it has {size:,} bytes; the manifest says {entry.bytes:,}."
    digest = file_hash(path)
    if digest != entry.blake3:
        return f"its BLAKE3 is {digest}; the manifest says {entry.blake3}."
    return None


def check_source(source: Checkpoint, manifest: Manifest) -> None:
    """Raise UserError if a checkpoint is not the model that was pruned."""
    if identity_of(source) != manifest.source.identity:
        raise UserError(
            f"--source {source.folder}: its weights are not those that were pruned. Give the model "
            f"that {REPORT_NAME} names."
        )


def check_activations(activations: Activations, manifest: Manifest, name: str) -> None:
    """Raise UserError if norms are not those that decided the masks; `name` names their file."""
    if manifest.activations is None or activations.digest != manifest.activations.norms:
        raise UserError(
            f"{name}: not the norms that decided these masks. Give their file, or "
            "leave --activations out."
        )


def check_headers(source: Checkpoint, pruned: Checkpoint, findings: Findings) -> None:
    """Compare the names and headers of the shards with the source, and the side files."""
    names = [shard.name for shard in source.shards]
    if names != [shard.name for shard in pruned.shards]:
        findings.differences.append(
            f"{pruned.folder}: its shards are not those of the source, {', '.join(names)}."
        )
    else:
        for ours, theirs in zip(pruned.shards, source.shards, strict=True):
            header = header_text(theirs)
            findings.checked["other bytes"] += 8 + len(header)
            if header_text(ours) != header:
                findings.differences.append(f"{ours.name}: its header differs from the source.")
    for relative in source.side_files():
        ours = pruned.folder / relative
        theirs = source.folder / relative
        findings.checked["side files"] += 1
        if not ours.is_file() or ours.read_bytes() != theirs.read_bytes():
            findings.differences.append(f"{relative}: differs from the source.")


def check_config(source: Path, saved: Path, trust_remote_code: bool, findings: Findings) -> None:
    """Compare the fields of config.json, read by transformers, that `save_pretrained` does not
    write anew.
    """
    from emp_llm.models.loading import read_config

    ours, theirs = (
        _fields(read_config(folder, trust_remote_code)[0].to_dict()) for folder in (saved, source)
    )
    findings.checked["config.json"] += 1
    changed = [
        name for name in sorted(ours.keys() | theirs.keys()) if ours.get(name) != theirs.get(name)
    ]
    if changed:
        findings.differences.append(
            f"config.json: its values are not the source's: {shorten_list(changed)}."
        )


def _fields(config: dict[str, Any]) -> dict[str, Any]:
    fields = {name: value for name, value in config.items() if name not in _WRITTEN}
    return {
        name: _fields(value) if isinstance(value, dict) else value for name, value in fields.items()
    }


def names_in_saved(model: "nn.Module", source: Architecture, saved: Architecture) -> dict[str, str]:
    """Name of a tensor in a checkpoint -> its name in a folder of `save_pretrained`, without
    tensors that no model loads.

    The folder has the names of the model's class, and one of two tied tensors.

    Args:
        model: of transformers, without weights.
        source, saved: the model's weights in the checkpoint and in the folder.
    """
    from emp_llm.models.modules import not_ignored

    names = {
        stored: saved.stored_names.get(parameter, stored)
        for parameter, stored in source.stored_names.items()
    }
    others = [name for name in source.checkpoint.tensors if name not in names]
    return names | {name: name for name in not_ignored(model, "unexpected", others)}


def check_tensors(
    source: Checkpoint,
    pruned: Checkpoint,
    names: dict[str, str],
    targets: list[Target],
    findings: Findings,
    healed: Collection[str] = (),
    trained: bool = False,
) -> dict[str, StoredTensor]:
    """Compare dtypes and shapes of all tensors with the source, and every byte outside of the
    targets.

    Of a model that was trained since, only the shapes of the targets are compared.

    Args:
        source, pruned: the checkpoints.
        names: name of a tensor in the source -> in the pruned checkpoint.
        targets: of the source.
        healed: names of tensors in the source that healing may have changed.
        trained: whether it was trained after it was pruned.

    Returns:
        Name of a tensor in the source -> the pruned one, if it has the same dtype and shape.
    """
    if trained:
        healed = {target.matrix.stored.name for target in targets}
        names = {name: names[name] for name in healed}
    matching: dict[str, StoredTensor] = {}
    inside: dict[str, list[Target]] = {}
    for target in sorted(targets, key=lambda target: target.matrix.start):
        inside.setdefault(target.matrix.stored.name, []).append(target)
    total = sum(tensor.end - tensor.start for tensor in source.tensors.values())
    with source.open_files() as files, progress_bar(total, "compare", "B") as bar:
        for name, saved_name in names.items():
            ours = pruned.tensors.get(saved_name)
            theirs = source.tensors[name]
            if ours is None:
                findings.differences.append(f"{saved_name}: it is missing.")
                continue
            if ours.shape != theirs.shape or (ours.dtype != theirs.dtype and not trained):
                findings.differences.append(
                    f"{saved_name}: {ours.dtype} {list(ours.shape)}; the source has "
                    f"{theirs.dtype} {list(theirs.shape)}."
                )
                continue
            matching[name] = ours
            if name in healed:
                continue
            different = 0
            one = files.reader(ours.shard)
            other = files.reader(theirs.shard)
            for start, end in gaps(inside.get(name, []), theirs.start, theirs.end):
                for first in range(start, end, PIECE):
                    size = min(PIECE, end - first)
                    piece = one.take(ours.start + first - theirs.start, size)
                    different += int(np.count_nonzero(piece != other.take(first, size)))
                    bar.update(size)
                findings.checked["other bytes"] += end - start
            if different:
                where = f"{count_of(different, 'byte')} outside of the targets"
                findings.differences.append(f"{saved_name}: differs from the source in {where}.")
    if trained:
        return matching
    known = set(names.values())
    findings.differences += [
        f"{name}: the source has no such tensor." for name in pruned.tensors if name not in known
    ]
    return matching


def check_masks(
    pruned: dict[str, StoredTensor],
    scores: Scores,
    findings: Findings,
    all_rows: bool = True,
    trained: bool = False,
) -> None:
    """Decide all masks again and compare: a weight that the recipe keeps must be the source's,
    every other one zero.

    After a refit, healing or training, a kept weight may have any finite value. The masks of a
    search are not decided again; only the numbers of its kept weights are checked.

    Args:
        pruned: name of a tensor in the source -> the one to check, of the same dtype and shape.
        scores: of the source, by the recipe and the norms of the run.
        all_rows: the reference decides all rows. Else, of the first chunk of a target's rows and of
            one in sixteen; the compiled kernel decides the others, in a tenth of the time.
        trained: whether it was trained after it was pruned.
    """
    recipe = scores.recipe
    by_reference = rows = 0
    compared = {target.name: _Compared() for target in scores.targets}
    update = recipe.update
    searches = update is not None and update.searches
    shares_itself = update is not None and searches and update.keeps == "matrix"
    by_matrix = (
        counts_of(scores, group="matrix") if shares_itself and recipe.n_of_m is None else None
    )

    def compare(target: Target, chunk: Chunk) -> None:
        nonlocal by_reference, rows
        rows += len(chunk.words)
        by_reference += len(chunk.words) * pruner.by_reference(target, chunk.first)
        of_target = compared[target.name]
        matrix = replace(target.matrix, stored=pruned[target.matrix.stored.name])
        with FileReader(matrix.stored.shard) as file:
            written = matrix.read(file, chunk.first, chunk.first + len(chunk.words))
        values = as_tensor(written, matrix.stored.dtype)
        is_finite = (values.float() if values.element_size() == 1 else values).isfinite().numpy()
        of_target.finite = of_target.finite and bool(is_finite.all())
        wrong = (
            np.where(chunk.words == 0, written != 0, ~is_finite)
            if recipe.moves or trained
            else chunk.words != written
        )
        of_target.wrong += int(np.count_nonzero(wrong))
        here = _kept(written, recipe)
        there = _kept(chunk.words, recipe)
        of_target.over += int(np.count_nonzero(here > there))
        of_target.left += int(here.sum())
        of_target.most += int(there.sum())

    pruner = Pruner(
        scores,
        counts_of(scores),
        chunk_weights=_CHUNK_WEIGHTS,
        reference=1 if all_rows else _SHARE,
    )
    pruner.decide(compare)
    if by_reference < rows:
        findings.checked[f"of {rows:,} rows by the reference"] += by_reference
    for target in scores.targets:
        findings.checked["targets"] += 1
        in_matrix = None if by_matrix is None else int(by_matrix.kept[target.name][0])
        of_target = compared[target.name]
        if searches:
            findings.differences += _differences_of_search(recipe, target, of_target, in_matrix)
        elif of_target.wrong:
            findings.differences.append(
                f"{target.name}: {count_of(of_target.wrong, 'weight')} not as the recipe decides."
            )


@dataclass
class _Compared:
    """A target that was compared with its mask.

    Attributes:
        wrong: number of weights that the recipe forbids.
        left, most: numbers of weights that are left, and that the recipe keeps.
        over: number of rows, or groups of a pattern, in which more are left.
        finite: whether all weights are.
    """

    wrong: int = 0
    left: int = 0
    most: int = 0
    over: int = 0
    finite: bool = True


def _kept(words: Words, recipe: Recipe) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
    """The number of weights that are not zero, in each row or in every M weights of it."""
    width = words.shape[1] if recipe.n_of_m is None else recipe.n_of_m[1]
    kept: np.ndarray[tuple[int], np.dtype[np.int64]] = np.count_nonzero(
        words.reshape(-1, width), axis=1
    )
    return kept


def _differences_of_search(
    recipe: Recipe, target: Target, compared: _Compared, in_matrix: int | None
) -> list[str]:
    """What is wrong with a target whose mask was searched for, one sentence each; `in_matrix` is
    the number of its weights that stay, where the search shares them among the rows.
    """
    name = target.name
    wrong = compared.wrong
    left = compared.left
    differences = [] if compared.finite else [f"{name}: it holds NaN or infinity."]
    if in_matrix is not None:
        # A target that was not updated is pruned row by row, which may keep more weights.
        if left > in_matrix and wrong:
            zeros = target.matrix.numel - left
            removed = target.matrix.numel - in_matrix
            differences.append(f"{name}: {zeros:,} zeros; its recipe removes {removed:,} weights.")
    elif left > compared.most:
        differences.append(
            f"{name}: {left:,} weights are left; its recipe keeps {compared.most:,}."
        )
    elif compared.over and recipe.group == "row":
        groups = "group" if recipe.n_of_m is not None else "row"
        differences.append(
            f"{name}: more weights are left in {count_of(compared.over, groups)} than the "
            "recipe keeps."
        )
    return differences


# A model that may have been trained after it was pruned: whether its removed weights are zero, and
# whether others have changed.


def digests(architecture: Architecture) -> dict[str, str]:
    """Parameter, or stored tensor of experts -> BLAKE3 of its values, rounded to bfloat16: a
    conversion to another dtype does not count as a change.
    """
    stored = dict(architecture.stored_names)
    stored |= {name: name for name in {m.stored.name for m in architecture.experts.values()}}
    tensors = architecture.checkpoint.tensors
    found: dict[str, str] = {}
    with architecture.checkpoint.open_files() as files:
        for name in set(stored.values()):
            tensor = tensors[name]
            reader = files.reader(tensor.shard)
            digest = blake3()
            for first in range(tensor.start, tensor.end, PIECE):
                piece: Words = reader.take(first, min(PIECE, tensor.end - first))
                if tensor.dtype in PRUNABLE_DTYPES and tensor.dtype != "BF16":
                    values = as_tensor(piece.view(WORD[word_bytes(tensor)]), tensor.dtype)
                    piece = values.bfloat16().view(torch.uint8).numpy()
                digest.update(piece.data)
            found[name] = digest.hexdigest()
    return {name: found[place] for name, place in stored.items()}


def check_zeros(
    checkpoint: Checkpoint, targets: list[Target], masks: Masks, findings: Findings
) -> None:
    """Check that every weight that masks remove is zero in a checkpoint.

    Args:
        targets: of the checkpoint; masks: by parameter name.
    """
    kept_in: dict[str, NDArray[Any]] = {}
    with checkpoint.open_files() as files:
        for target in targets:
            findings.checked["targets"] += 1
            name = target.layer.parameter
            matrix = target.matrix
            if name not in masks:
                findings.differences.append(f"{target.name}: it was not pruned.")
                continue
            if name not in kept_in:
                kept_in = {name: masks[name].numpy()}  # one at a time
            kept = rows_in(kept_in[name], target.layer)
            if kept.shape != (matrix.rows, matrix.columns):
                findings.differences.append(f"{target.name}: it has another shape.")
                continue
            words = matrix.read(files.reader(matrix.stored.shard), 0, matrix.rows)
            wrong = words[~kept]
            number = int(np.count_nonzero(wrong))
            if number:
                value = "not zero" if np.any(wrong << 1) else "-0.0, whose bits are not zero"
                findings.differences.append(
                    f"{target.name}: {count_of(number, 'removed weight')} "
                    f"{'is' if number == 1 else 'are'} {value}."
                )
