"""Writing a pruned checkpoint: pruned rows, an exact copy of all other bytes, and the manifest.

A shard is written in order, under its final name in the work folder. When it is on the disk, its
hash and the statistics of its rows are noted there, and an interrupted run resumes after it; a
shard that is not finished is written again.
"""

import logging
import shutil
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from emp_llm.checkpoint.checkpoint import (
    Checkpoint,
    config_digest,
    identity_from_files,
    identity_from_hashes,
    identity_of,
    known_hashes,
    remember_hashes,
)
from emp_llm.checkpoint.files import (
    INDEX_LIMIT,
    PIECE,
    FilePool,
    FileReader,
    FileWriter,
    RunningHash,
    file_hash,
    prefetch,
    sync_path,
    unfinished,
    write_bytes,
)
from emp_llm.checkpoint.output import OutputFolder
from emp_llm.common.errors import ReadError, UserError
from emp_llm.common.machine import versions
from emp_llm.common.paths import CRITERION_NAME, EXTRAS, MANIFEST_NAME, REPORT_NAME, is_hidden
from emp_llm.common.progress import Bar, progress_bar
from emp_llm.models.architecture import Target
from emp_llm.options.criterion import source_file
from emp_llm.options.recipe import Own, Recipe
from emp_llm.pruning.masks import (
    Chunk,
    Outcome,
    Outcomes,
    Pruner,
    no_figures,
    outcome_of,
    put_figures,
    whole_of,
)
from emp_llm.pruning.scores import sign
from emp_llm.records.base import read_record
from emp_llm.records.run_report import (
    FileEntry,
    Manifest,
    ManifestSource,
    NormsRecord,
    RunReport,
    read_report,
)
from emp_llm.selection.rule import RowFigures

if TYPE_CHECKING:
    from emp_llm.walk.updated import UpdatedWeights

logger = logging.getLogger(__name__)
EVALUATION_FOLDER = f"{EXTRAS}/evaluation"  # measurements of an unfinished evaluation
_BEHIND = 3  # chunks of rows that wait to be written; bounds their memory


@dataclass(frozen=True)
class Written:
    """A written checkpoint.

    Attributes:
        outcomes: of the targets.
        identity: of the source (`identity_of`).
        hashes: BLAKE3 of each shard, by name.
    """

    outcomes: Outcomes
    identity: str
    hashes: dict[str, str]


def write_checkpoint(
    pruner: Pruner,
    folder: Path,
    output: OutputFolder | None = None,
    updated: "UpdatedWeights | None" = None,
) -> Written:
    """Write the shards and side files of a pruned checkpoint. Everything is on disk on return.

    Args:
        pruner: decides the masks, and how many weights stay.
        folder: exists; empty, or with the files of an interrupted run.
        output: notes the finished shards; None: nothing is noted.
        updated: rows whose kept weights moved; None if none did.

    Raises:
        UserError: a target holds NaN or infinity; a file cannot be read, or changes during the
            reading.
    """
    checkpoint = pruner.checkpoint
    for relative in checkpoint.side_files():
        (folder / relative.parent).mkdir(parents=True, exist_ok=True)
        shutil.copyfile(checkpoint.folder / relative, folder / relative)
    known = known_hashes(checkpoint)
    sources = {} if known else {shard: RunningHash(shard) for shard in checkpoint.shards}
    total = sum(shard.stat().st_size for shard in checkpoint.shards)
    try:
        # A calibration has just read it.
        once = pruner.counts.group == "row" and not pruner.scores.recipe.needs_activations
        with FilePool(sources, once) as files, progress_bar(total, "prune", "B") as bar:
            write = _write_together if pruner.counts.group == "all" else _write_shards
            outcomes, whole, hashes = write(pruner, folder, files, bar, output, updated)
        read = known or {shard.name: digest.finish() for shard, digest in sources.items()}
        checkpoint.check_unchanged()
    except ReadError:
        raise
    except UserError:  # the source is damaged or has changed, so the work based on it is not valid
        if output is not None:
            output.forget()
        raise
    if known is None:
        remember_hashes(checkpoint, read)
    in_order = Outcomes([outcomes[target.name] for target in pruner.targets], whole)
    return Written(in_order, identity_from_hashes(checkpoint, read), hashes)


def _write_shards(
    pruner: Pruner,
    folder: Path,
    files: FilePool,
    bar: Bar,
    output: OutputFolder | None,
    updated: "UpdatedWeights | None",
) -> tuple[dict[str, Outcome], tuple[float, float] | None, dict[str, str]]:
    """Write shard by shard, in the order of the bytes, after those that an earlier run finished."""
    outcomes: dict[str, Outcome] = {}
    hashes: dict[str, str] = {}
    of_rows: dict[str, str] = {}
    if output is not None:
        names = [shard.name for shard in pruner.checkpoint.shards]
        hashes = output.intact("shards", output.files, names)
        of_rows = output.intact("rows", output.work, [f"{name}.npy" for name in names])
    for shard in pruner.checkpoint.shards:
        targets = targets_in(pruner.targets, shard)
        size = shard.stat().st_size
        table = f"{shard.name}.npy"
        if output is not None and shard.name in hashes and table in of_rows:
            kept = unfinished(output.work / table, partial(_saved_statistics, targets=targets))
            if kept is not None:
                for done, rows in zip(targets, kept, strict=True):
                    outcomes[done.name] = outcome_of(done, rows, pruner.counts, None)
                bar.update(size)
                continue
        digest = RunningHash(folder / shard.name)
        statistics = []
        reader = files.reader(shard)
        with _ShardFile(folder / shard.name, digest, bar) as file:
            for (start, end), target in zip(gaps(targets, 0, size), [*targets, None], strict=True):
                file.copy(reader, start, end)
                if target is not None:
                    selector = pruner.cut([target], files)
                    statistics.append(
                        file.put_rows(target, pruner.prune_target(target, files, selector, updated))
                    )
                    outcomes[target.name] = outcome_of(
                        target, statistics[-1], pruner.counts, selector
                    )
        sync_path(folder / shard.name)
        hashes[shard.name] = digest.finish()
        pruner.checkpoint.check_unchanged()
        if output is not None:
            _save_statistics(output.work / table, statistics)
            of_rows[table] = file_hash(output.work / table)
            output.note(shards=dict(hashes), rows=dict(of_rows))
    return outcomes, None, hashes


def _write_together(
    pruner: Pruner,
    folder: Path,
    files: FilePool,
    bar: Bar,
    output: OutputFolder | None,
    updated: "UpdatedWeights | None",
) -> tuple[dict[str, Outcome], tuple[float, float] | None, dict[str, str]]:
    """Write the targets of all shards in their order, as one group: of equal scores, the first
    in this order are kept.
    """
    digests = {shard: RunningHash(folder / shard.name) for shard in pruner.checkpoint.shards}
    selector = pruner.cut(pruner.targets, files)
    for shard, digest in digests.items():
        with _ShardFile(folder / shard.name, digest, bar) as file:
            for start, end in gaps(targets_in(pruner.targets, shard), 0, shard.stat().st_size):
                file.copy(files.reader(shard), start, end)
    outcomes = {}
    for target in pruner.targets:
        shard = target.matrix.stored.shard
        with _ShardFile(folder / shard.name, digests[shard], bar) as file:
            statistics = file.put_rows(
                target, pruner.prune_target(target, files, selector, updated)
            )
        outcomes[target.name] = outcome_of(target, statistics, pruner.counts, selector)
    for shard in digests:
        sync_path(folder / shard.name)
    return (
        outcomes,
        whole_of(pruner.counts, selector),
        {shard.name: digest.finish() for shard, digest in digests.items()},
    )


class _ShardFile:
    """A shard that is being written, by a thread behind the caller; it is created if missing. Use
    it as a context.

    Args:
        path: the file.
        digest: its hash so far.
        bar: progress, in bytes.
    """

    def __init__(self, path: Path, digest: RunningHash, bar: Bar) -> None:
        self._digest = digest
        self._bar = bar
        self._file = FileWriter(path)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="emp-llm-write")
        self._waiting: deque[Future[None]] = deque()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._file:
            try:
                while self._waiting and kind is None:
                    self._waiting.popleft().result()
            finally:
                self._thread.shutdown(cancel_futures=True)

    def copy(self, source: FileReader, start: int, end: int) -> None:
        """Copy bytes start to end - 1 of the source."""

        def read(first: int) -> tuple[int, memoryview]:
            return first, source.take(first, min(PIECE, end - first)).data

        for piece in prefetch(partial(read, first) for first in range(start, end, PIECE)):
            self._put([piece])

    def put_rows(self, target: Target, chunks: Iterable[Chunk]) -> RowFigures:
        """Write the rows of a target; returns their figures."""
        rows = no_figures(target.matrix.rows)
        for chunk in chunks:
            put_figures(rows, chunk.first, chunk.figures)
            self._put(target.matrix.pieces(chunk.first, chunk.words))
        return rows

    def _put(self, pieces: Iterable[tuple[int, memoryview]]) -> None:
        """Queue pieces for writing; wait while too many are queued."""
        self._waiting.append(self._thread.submit(self._write, pieces))
        while len(self._waiting) > _BEHIND:
            self._waiting.popleft().result()

    def _write(self, pieces: Iterable[tuple[int, memoryview]]) -> None:
        for offset, raw in pieces:
            self._digest.add(offset, raw)
            self._file.write(raw, offset)
            self._bar.update(len(raw))


def targets_in(targets: Sequence[Target], shard: Path) -> list[Target]:
    """Those of some targets that are in a shard, in the order of their bytes."""
    return sorted(
        (t for t in targets if t.matrix.stored.shard == shard),
        key=lambda target: target.matrix.start,
    )


def gaps(targets: Sequence[Target], start: int, end: int) -> Iterator[tuple[int, int]]:
    """(start, end) of the bytes of a range before each target in it, given in order, and of
    those after the last.
    """
    for target in targets:
        yield start, target.matrix.start
        start = target.matrix.end
    yield start, end


def _save_statistics(path: Path, statistics: list[RowFigures]) -> None:
    np.save(path, np.concatenate(statistics, axis=1) if statistics else np.empty(0))
    sync_path(path)


def _saved_statistics(path: Path, targets: list[Target]) -> list[RowFigures]:
    table = np.load(path)
    ends = list(accumulate((target.matrix.rows for target in targets), initial=0))
    if targets and table.shape != (len(RowFigures._fields), ends[-1]):
        raise ValueError("it is of other rows")
    return [RowFigures(*table[:, first:end]) for first, end in pairwise(ends)]


def run_signature(
    checkpoint: Checkpoint, recipe: Recipe, activations: dict[str, Any] | None
) -> dict[str, Any]:
    """Everything that the bytes of a pruned checkpoint depend on, as JSON. Known before any weight
    is read.

    Args:
        activations: identifies the norms; None if none are needed.
    """
    return {
        "emp-llm": versions().get("emp-llm", "unknown"),
        "source": {"files": checkpoint.states, "config": config_digest(checkpoint.folder)},
        "recipe": sign(recipe),
        "activations": activations,
    }


def write_manifest(
    folder: Path,
    checkpoint: Checkpoint,
    identity: str | None,
    recipe: Recipe,
    norms: str | None,
    hashes: dict[str, str],
) -> None:
    """Write the manifest of a finished checkpoint.

    Args:
        folder: of the checkpoint.
        checkpoint, identity: the source; no identity for a model that was pruned in memory.
        recipe: of the run, as records hold it.
        norms: digest of the norms; None if none were needed.
        hashes: BLAKE3 of files by name, as far as known; the other files are hashed now.
    """
    files = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = str(path.relative_to(folder))
        if (
            not is_hidden(Path(name))
            and name not in (MANIFEST_NAME, REPORT_NAME)
            and not name.startswith(EVALUATION_FOLDER)
        ):
            files[name] = FileEntry(
                bytes=path.stat().st_size, blake3=hashes.get(name) or file_hash(path)
            )
    Manifest(
        emp_llm=versions().get("emp-llm", "unknown"),
        source=ManifestSource(identity=identity, bytes=checkpoint.sizes),
        recipe=recipe,
        activations=None if norms is None else NormsRecord(norms=norms),
        files=files,
    ).save(folder / MANIFEST_NAME)


def criterion_source(recipe: Recipe) -> bytes | None:
    """The source file of a recipe's criterion, if it is the user's own and has one."""
    score = recipe.score
    if not isinstance(score, Own) or score.source is not None:
        return None
    file = source_file(score.criterion.score)
    return None if file is None else file.read_bytes()


def keep_criterion(folder: Path, source: bytes | None) -> None:
    """Put the source file of a criterion into a checkpoint, for `verify`."""
    if source is not None:
        write_bytes(folder / CRITERION_NAME, source)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a finished checkpoint; UserError if it is missing or invalid."""
    path = folder / MANIFEST_NAME
    if not path.is_file():
        raise UserError(
            f"{folder}: no {MANIFEST_NAME} in it; give the --output folder of a finished prune. A "
            "folder that was trained from one gets it by ModelReport.load(PRUNED).save(FOLDER) in "
            "Python."
        )
    return read_record(path, Manifest, INDEX_LIMIT)


def files_beside(folder: Path, manifest: Manifest) -> list[Path]:
    """What a run wrote beside the model: statistics and kept units, no code and no pickle."""
    paths = [Path(name) for name in manifest.files if not is_hidden(Path(name))]
    return [
        path
        for path in paths
        if path.parts[0] == EXTRAS
        and path.suffix in (".safetensors", ".json", ".jsonl")
        and (folder / path).is_file()
    ]


def check_as_written(checkpoint: Checkpoint) -> None:
    """Raise UserError if the weights of a folder are not those of its manifest."""
    folder = checkpoint.folder
    if not are_as_written(folder, identity_of(checkpoint)):
        raise UserError(
            f"{folder}: its weights are not those of its {MANIFEST_NAME}, which says how they were "
            f"pruned. To see what differs: emp-llm verify {folder}"
        )


def are_as_written(folder: Path, identity: str | None) -> bool:
    """Whether weights of an identity are those of the folder's manifest. True without a manifest
    of ours.
    """
    if not (folder / MANIFEST_NAME).is_file():
        return True
    try:
        files = read_manifest(folder).files
    except ReadError:
        raise
    except UserError:
        return True
    shards = {
        name: (entry.bytes, entry.blake3)
        for name, entry in files.items()
        if name.endswith(".safetensors") and "/" not in name
    }
    return identity_from_files(shards) == identity


def report_of_weights(folder: Path, identity: str | None) -> RunReport | None:
    """The report of a folder, if it is that of weights with this identity; else None, with a
    warning. UserError if it is missing or invalid.
    """
    report = read_report(folder)
    if are_as_written(folder, identity):
        return report
    logger.warning(
        "warning: %s: its weights are not those that emp-llm wrote, so its %s is left out.",
        folder,
        REPORT_NAME,
    )
    return None
