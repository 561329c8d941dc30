"""Writing a pruned checkpoint: pruned blocks of rows, and an exact copy of all other bytes."""

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from emp_llm.checkpoint.identity import identity_from_hashes, known_hashes, remember_hashes
from emp_llm.checkpoint.words import Words
from emp_llm.common.errors import ReadError, UserError
from emp_llm.common.progress_bars import progress_bar
from emp_llm.pruning.outcome import Outcome, RowStatistics
from emp_llm.pruning.output.shard_writer import Segment, ShardWriter, segments_of
from emp_llm.pruning.pruner import Pruner
from emp_llm.storage.buffers import bytes_of
from emp_llm.storage.direct_io import FileReader
from emp_llm.storage.hashing import ReadHasher
from emp_llm.storage.output.journal import Journal

if TYPE_CHECKING:
    from emp_llm.selection.group_selection import GroupSelector
    from emp_llm.update.moved import MovedWeights


class CheckpointWriter:
    """Writes the checkpoint that a pruner decides.

    Args:
        pruner: of the source and its targets.
        journal: the progress of an earlier run and of this one.
        moved: the moved weights of updated targets; None without an update.

    Attributes:
        source_identity: identity of the source (`identity_of`), known after `write`.
    """

    def __init__(self, pruner: Pruner, journal: Journal | None = None, moved: "MovedWeights | None" = None) -> None:
        self._pruner = pruner
        self._moved = moved
        self._journal = journal or Journal()
        self.source_identity = ""

    def write(self, folder: Path) -> list[Outcome]:
        """Write the pruned shards and the checkpoint's side files. Everything is on disk on return.

        Args:
            folder: exists; empty, or with the files of an interrupted run.

        Returns:
            One outcome per target, in their order.

        Raises:
            UserError: a target holds NaN or infinity; a file cannot be read, or changes during the reading.
        """
        checkpoint = self._pruner.checkpoint
        for relative in checkpoint.side_files():
            (folder / relative.parent).mkdir(parents=True, exist_ok=True)
            shutil.copyfile(checkpoint.folder / relative, folder / relative)
        known = known_hashes(checkpoint)
        self._sources = ReadHasher(checkpoint.shards if known is None else [])
        try:
            again = self._pruner.scheme.group != "row"
            with ShardWriter(folder, self._journal, self._pruner.buffers, again, self._sources.add) as writer:
                outcomes = self._segments(writer)
            hashes = known or self._sources.finish()
            checkpoint.check_unchanged()
        except ReadError:
            raise
        except UserError:  # the source is damaged or has changed, so the work based on it is not valid
            self._journal.forget()
            raise
        if known is None:
            remember_hashes(checkpoint, hashes)
        self.source_identity = identity_from_hashes(checkpoint, hashes)
        return [outcomes[target.name] for target in self._pruner.targets]

    def _segments(self, writer: ShardWriter) -> dict[str, Outcome]:
        pruner = self._pruner
        segments = segments_of(pruner.checkpoint, pruner.targets, in_order=pruner.scheme.group == "all")
        outcomes: dict[str, Outcome] = {}
        total, ends = sum(s.bytes for s in segments), {s.shard: s.end for s in segments if s.target is None}
        global_selector = pruner.search(pruner.targets, writer.files) if pruner.scheme.group == "all" else None
        with progress_bar(total, "prune", "B") as bar:
            for number, segment in enumerate(segments):
                if segment.target is None:
                    writer.copy(number, segment)
                else:
                    outcomes[segment.target.name] = self._target(number, segment, global_selector, writer)
                last = segment.target is None and segment.end == ends[segment.shard] and global_selector is None
                writer.end(number, segment, last)
                if last:
                    pruner.checkpoint.check_unchanged()
                bar.update(segment.bytes)
        pruner.store_global_figures(global_selector)
        return outcomes

    def _target(self, number: int, segment: Segment, global_selector: "GroupSelector | None", writer: ShardWriter) -> Outcome:
        pruner, target = self._pruner, segment.target
        assert target is not None
        rows, row = target.matrix.rows, pruner.first_rows[target.name]
        done = self._journal.done(number, rows)
        if (done < rows and pruner.scheme.group != "row") or global_selector is not None:
            done = 0  # a group larger than a row is decided from its first weight again
        selector = global_selector
        if pruner.scheme.group == "matrix" and done < rows:
            selector = pruner.search([target], writer.files)
        statistics = RowStatistics(rows, self._journal.get(row, done))

        def hash_read(reader: FileReader, first: int, words: Words) -> None:
            if not target.matrix.transposed:
                at = target.matrix.start + first * target.matrix.columns * target.matrix.itemsize
                self._sources.add(reader.path, at, bytes_of(words))

        for block in pruner.pruned(target, writer.files, selector, done, hash_read):
            figures = block.figures
            if self._moved is not None:
                figures = self._moved.replace(target, block.first, block.words, figures)
            statistics.put(block.first, figures)
            writer.rows(number, segment, block.first, block.words, row + block.first, statistics.columns)
        outcome = pruner.outcome(target, statistics, selector)
        if pruner.scheme.group == "matrix" and selector is not None:
            writer.note(row, {name: values[:1] for name, values in statistics.columns.items()})
        return outcome
