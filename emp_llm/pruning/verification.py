"""Verification of a pruned checkpoint: files against the manifest, bytes against the source, and masks decided again.

It only reads. The masks are decided by the slow reference in plain torch, not by the kernel that wrote them.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from emp_llm.calibration.activations import Activations
from emp_llm.checkpoint.checkpoint import Checkpoint, identity_of
from emp_llm.checkpoint.files import file_hash, read_exactly
from emp_llm.checkpoint.matrices import Matrix
from emp_llm.common.errors import UserError
from emp_llm.common.paths import MANIFEST_NAME, OTHER_WEIGHTS, REPORT_NAME
from emp_llm.common.progress import progress_bar
from emp_llm.models.architecture import Target
from emp_llm.records.manifest import FileEntry, Manifest

_CHUNK = 1 << 24


@dataclass
class Findings:
    """Result of a verification so far.

    Attributes:
        differences: one sentence each.
        checked: number of checked things, by kind.
    """

    differences: list[str] = field(default_factory=list)
    checked: dict[str, int] = field(default_factory=dict)

    def count(self, kind: str, number: int = 1) -> None:
        """Add to the number of checked things of a kind."""
        self.checked[kind] = self.checked.get(kind, 0) + number


def check_files(folder: Path, manifest: Manifest, findings: Findings) -> None:
    """Check sizes and hashes of all files that a manifest names, and look for weights that it does not name."""
    total = sum(entry.bytes for entry in manifest.files.values())
    with progress_bar(total, "hash", "B") as bar:
        for name, entry in manifest.files.items():
            findings.count("files")
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
            for start, end in _gaps([target.matrix for target in targets if target.matrix.stored.shard == theirs], size):
                at = _first_difference(ours, theirs, start, end)
                findings.count("other bytes", end - start)
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
        findings.count("side files")
        if not ours.is_file() or ours.read_bytes() != theirs.read_bytes():
            findings.differences.append(f"{relative}: differs from the source.")
    return alike


def _gaps(matrices: list[Matrix], size: int) -> Iterator[tuple[int, int]]:
    """(start, end) of each part of a file of `size` bytes that belongs to no matrix."""
    position = 0
    for start, end in sorted((matrix.start, matrix.end) for matrix in matrices):
        yield position, start
        position = end
    yield position, size


def _first_difference(ours: Path, theirs: Path, start: int, end: int) -> int | None:
    """Offset of the first byte of a range in which two files differ; None if they are equal."""
    files = [os.open(path, os.O_RDONLY) for path in (ours, theirs)]
    buffers = [memoryview(bytearray(min(_CHUNK, end - start))) for _ in files]
    try:
        for first in range(start, end, _CHUNK):
            pieces = [buffer[: min(_CHUNK, end - first)] for buffer in buffers]
            for file, piece, path in zip(files, pieces, (ours, theirs), strict=True):
                read_exactly(file, piece, first, path)
            if pieces[0] != pieces[1]:
                a, b = (np.frombuffer(piece, dtype=np.uint8) for piece in pieces)
                return first + int(np.flatnonzero(a != b)[0])
    finally:
        for file in files:
            os.close(file)
    return None
