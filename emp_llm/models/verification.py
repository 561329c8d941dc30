"""A pruned checkpoint looked at again: its files against its manifest, its bytes against the source, its masks decided anew.

Only reading. The masks are decided by the slow reference, plain torch on rows, not by the kernel that made them.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from emp_llm.models.activations import Activations
from emp_llm.models.checkpoint import OTHER_WEIGHTS, Checkpoint, Matrix
from emp_llm.models.digests import digest_of
from emp_llm.models.direct import Source, read_exactly
from emp_llm.models.errors import UserError
from emp_llm.models.manifest import MANIFEST_NAME, norms_digest, scheme_of
from emp_llm.models.pruning import Pruner, finite
from emp_llm.models.recipe import REPORT_NAME
from emp_llm.models.targets import Target
from emp_llm.selection.rows import select_rows
from emp_llm.selection.scheme import GroupSelector, Scheme

_BLOCK_WEIGHTS = 1 << 20
_CHUNK = 1 << 24


@dataclass
class Findings:
    """What a verification found.

    Attributes:
        differences: a sentence for each thing that is not as it should be.
        checked: how many things of each kind were looked at.
    """

    differences: list[str] = field(default_factory=list)
    checked: dict[str, int] = field(default_factory=dict)

    def count(self, kind: str, number: int = 1) -> None:
        self.checked[kind] = self.checked.get(kind, 0) + number


def check_files(folder: Path, manifest: dict[str, Any], findings: Findings) -> None:
    """Sizes and SHA-256 of all files that a manifest names; weights that it does not name."""
    total = sum(entry["bytes"] for entry in manifest["files"].values())
    with tqdm(total=total, desc="hash", unit="B", unit_scale=True, disable=None) as bar:
        for name, entry in manifest["files"].items():
            path = folder / name
            findings.count("files")
            if not path.is_file():
                findings.differences.append(f"{name}: it is missing.")
            elif (size := path.stat().st_size) != entry["bytes"]:
                findings.differences.append(f"{name}: it has {size:,} bytes, its manifest says {entry['bytes']:,}.")
            else:
                found = digest_of(path)
                if found != entry["sha256"]:
                    findings.differences.append(f"{name}: its SHA-256 is {found}, its manifest says {entry['sha256']}.")
            bar.update(entry["bytes"])
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.suffix in OTHER_WEIGHTS and path.is_file() and name not in manifest["files"]:
            findings.differences.append(f"{name}: weights that the manifest does not name.")


def check_source(source: Checkpoint, manifest: dict[str, Any]) -> None:
    """Raise UserError where a checkpoint is not the one that a manifest says was pruned."""
    if source.fingerprint["sha256_of_samples"] != manifest["source"]["sha256_of_samples"]:
        raise UserError(
            f"--source {source.folder}: its weights are not those that were pruned (another fingerprint). Give the model that "
            f"{REPORT_NAME} names."
        )


def check_norms(activations: Activations, manifest: dict[str, Any], name: str) -> None:
    """Raise UserError where norms are not those that a manifest says were used; `name` stands for them."""
    if norms_digest(activations) != (manifest["activations"] or {}).get("norms"):
        raise UserError(f"{name}: not the norms that decided these masks. Leave --activations out to take those in the folder.")


def check_other_bytes(source: Checkpoint, pruned: Checkpoint, targets: list[Target], findings: Findings) -> bool:
    """Every byte of every shard that no target holds: headers and all other tensors, as in the source.

    Returns:
        Whether the shards are of the same names and sizes, so that their targets lie in the same places.
    """
    names = [shard.name for shard in source.shards]
    if names != [shard.name for shard in pruned.shards]:
        findings.differences.append(f"{pruned.folder}: its shards are not those of the source, {', '.join(names)}.")
        return False
    alike = True
    total = sum(shard.stat().st_size for shard in source.shards)
    with tqdm(total=total, desc="compare", unit="B", unit_scale=True, disable=None) as bar:
        for ours, theirs in zip(pruned.shards, source.shards, strict=True):
            size = theirs.stat().st_size
            if ours.stat().st_size != size:
                findings.differences.append(f"{ours.name}: {ours.stat().st_size:,} bytes, {size:,} in the source.")
                alike = False
                continue
            for start, end in _gaps([target.matrix for target in targets if target.matrix.stored.shard == theirs], size):
                at = _first_difference(ours, theirs, start, end)
                findings.count("other bytes", end - start)
                bar.update(end - start)
                if at is not None:
                    where = next(
                        (t.name for t in source.tensors.values() if t.shard == theirs and t.start <= at < t.end), "header"
                    )
                    findings.differences.append(f"{ours.name}: byte {at:,} ({where}) is not the source's, and no target's.")
    for relative in source.side_files():
        ours, theirs = pruned.folder / relative, source.folder / relative
        findings.count("side files")
        if not ours.is_file() or ours.read_bytes() != theirs.read_bytes():
            findings.differences.append(f"{relative}: not the source's.")
    return alike


def check_masks(
    source: Checkpoint,
    pruned: Checkpoint,
    targets: list[Target],
    manifest: dict[str, Any],
    activations: Activations | None,
    findings: Findings,
) -> None:
    """Every weight of every target: the source's where the recipe keeps it, and zero elsewhere; decided anew.

    Raises:
        UserError: the manifest does not say how, or the norms lack a target.
    """
    try:
        scheme, least_tokens = scheme_of(manifest), int(manifest["recipe"].get("min_expert_tokens", 0))
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{pruned.folder / MANIFEST_NAME}: it does not tell how the masks were decided ({error}).") from error
    decided = Pruner(source, targets, scheme, least_tokens=least_tokens)
    norms: dict[str, Tensor | None] = {target.name: None for target in targets}
    if activations is not None:
        decided.use(activations)
        norms = {target.name: activations.norm(target.name) for target in targets}
    elif scheme.criterion.needs_norms:
        raise UserError(f"{pruned.folder / MANIFEST_NAME}: it names no activations, which its criterion needs.")
    with tqdm(total=sum(_bytes(t) for t in targets), desc="decide", unit="B", unit_scale=True, disable=None) as bar:
        everything = _selector(targets, scheme, norms, 0) if scheme.group == "all" else None
        offset = 0
        for target in targets:
            selector = everything
            if scheme.group == "matrix":
                selector = _selector([target], decided.scheme_of(target), norms, offset)
            wrong = _wrong_weights(pruned, target, decided.scheme_of(target), norms[target.name], selector, offset)
            findings.count("targets")
            if wrong:
                findings.differences.append(f"{target.name}: {wrong:,} weights are not what the recipe yields.")
            offset += target.matrix.numel
            bar.update(_bytes(target))


def _wrong_weights(
    pruned: Checkpoint,
    target: Target,
    scheme: Scheme,
    norm: Tensor | None,
    selector: GroupSelector | None,
    offset: int,
) -> int:
    """How many weights of a target differ in their bits from what the reference yields."""
    wrong = 0
    path = pruned.folder / target.matrix.stored.shard.name
    with Source(path) as file:
        for first, block in _blocks(target):
            scores = scheme.criterion.score(block, norm).contiguous()
            with finite(target, first, block):
                part = (
                    selector.select(scores)
                    if selector
                    else select_rows(scores, scheme.budget, offset + first * target.matrix.columns)
                )
            expected = block.masked_fill(~part.mask, 0).contiguous()
            found = target.matrix.read(file, first, first + block.shape[0])
            wrong += int((_bits(expected) != _bits(found)).sum())
    return wrong


def _selector(targets: list[Target], scheme: Scheme, norms: dict[str, Tensor | None], offset: int) -> GroupSelector:
    """The cut of one group of several matrices, or of one."""
    selector = GroupSelector(scheme.budget, offset)
    feed = selector.add
    while True:
        for target in targets:
            for first, block in _blocks(target):
                with finite(target, first, block):
                    feed(scheme.criterion.score(block, norms[target.name]).contiguous())
        if not selector.searching():
            return selector
        feed = selector.search


def _blocks(target: Target) -> Iterator[tuple[int, Tensor]]:
    """(first row, weights) of each block of a target's rows, from the source."""
    with Source(target.matrix.stored.shard) as file:
        for first, last in target.matrix.row_blocks(_BLOCK_WEIGHTS):
            yield first, target.matrix.read(file, first, last)


def _gaps(matrices: list[Matrix], size: int) -> Iterator[tuple[int, int]]:
    """The pieces of a file of some size that no matrix holds."""
    position = 0
    for start, end in sorted((matrix.start, matrix.end) for matrix in matrices):
        yield position, start
        position = end
    yield position, size


def _first_difference(ours: Path, theirs: Path, start: int, end: int) -> int | None:
    """The first byte of a range that two files do not share."""
    files = [os.open(path, os.O_RDONLY) for path in (ours, theirs)]
    buffers = [memoryview(bytearray(min(_CHUNK, end - start))) for _ in files]
    try:
        for first in range(start, end, _CHUNK):
            pieces = [buffer[: min(_CHUNK, end - first)] for buffer in buffers]
            for file, piece, path in zip(files, pieces, (ours, theirs), strict=True):
                read_exactly(file, piece, first, path)
            if pieces[0] != pieces[1]:
                a, b = (torch.frombuffer(piece, dtype=torch.uint8) for piece in pieces)
                return first + int((a != b).nonzero()[0])
    finally:
        for file in files:
            os.close(file)
    return None


def _bytes(target: Target) -> int:
    return target.matrix.end - target.matrix.start


def _bits(weights: Tensor) -> Tensor:
    return weights.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[weights.element_size()])
