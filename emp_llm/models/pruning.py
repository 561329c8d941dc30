"""Pruning a checkpoint on disk: row blocks in, row blocks out, every other byte as it was.

Follow one weight: `Matrix.read` takes its bytes from the shard, the scheme's criterion scores it, its budget and mask decide,
`Matrix.write` puts it back at the same offset of the new shard.
"""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from emp_llm.models.activations import Activations
from emp_llm.models.checkpoint import Checkpoint
from emp_llm.models.direct import Buffers, Source
from emp_llm.models.errors import ReadError, UserError
from emp_llm.models.files import OpenFiles, ahead
from emp_llm.models.journal import Journal
from emp_llm.models.outcomes import Outcome, Rows
from emp_llm.models.targets import Target
from emp_llm.models.writing import Segment, Writer, segments_of
from emp_llm.selection.budgets import PatternBudget
from emp_llm.selection.hill import NonFiniteError
from emp_llm.selection.kernels.rows import Pruned
from emp_llm.selection.rows import select_rows
from emp_llm.selection.scheme import GroupSelector, Scheme

BLOCK_WEIGHTS = 1 << 21


class Pruner:
    """One pruning run over the targets of a checkpoint.

    Args:
        checkpoint: the source; only read.
        targets: what to prune, in order (the order in which ties of a group of all targets are kept).
        scheme: how.
        block_weights: weights in memory at a time; the masks do not depend on it. None: BLOCK_WEIGHTS.
        least_tokens: matrices of experts that were shown fewer are scored by magnitude: norms over a few tokens say little.

    Attributes:
        fallback: names of the targets that are scored by magnitude for that reason, and how many tokens they were shown.

    Raises:
        UserError: an N:M pattern does not divide a target's inputs; one group of targets of several dtypes.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        targets: list[Target],
        scheme: Scheme,
        block_weights: int | None = None,
        least_tokens: int = 0,
    ) -> None:
        self.checkpoint = checkpoint
        self.targets = targets
        self.scheme = scheme
        self.block_weights = block_weights or BLOCK_WEIGHTS
        self.whole: tuple[float, float] | None = None  # N_eff and s_eff of all targets as one group, once written
        self.fallback: dict[str, int] = {}
        self.least_tokens = least_tokens
        self._buffers = Buffers()
        self._norms: dict[str, Tensor] = {}
        self._offsets: dict[str, int] = {}
        for target in targets:
            if isinstance(scheme.budget, PatternBudget) and target.matrix.columns % scheme.budget.m:
                n, m = scheme.budget.n, scheme.budget.m
                raise UserError(
                    f"pattern {n}:{m}: the {target.matrix.columns} inputs of {target.name} are not a multiple of {m}. Leave it "
                    "out with --ignore, or take another pattern."
                )
        if scheme.group == "all" and len({self._score_dtype(target) for target in targets}) > 1:
            raise UserError("group all: the targets are stored in different dtypes, so their scores cannot compete.")
        self._first_rows: dict[str, int] = {}
        offset = rows = 0
        for target in targets:
            self._offsets[target.name], self._first_rows[target.name] = offset, rows
            offset, rows = offset + target.matrix.numel, rows + target.matrix.rows

    def use(self, activations: Activations, name: str = "the activations") -> None:
        """Take the input norms that the criterion needs; `name` stands for them in errors.

        Raises:
            UserError: a target has none, or they do not fit it.
        """
        for target in self.targets:
            norm, inputs = activations.norm(target.name), target.matrix.columns
            if norm is None or norm.numel() != inputs:
                held = "no norms" if norm is None else f"norms of {norm.numel()} inputs, its weight has {inputs}"
                raise UserError(
                    f"{name}: for {target.name} they hold {held}. They are of another model or of other layers (run calibrate "
                    "for this one), or its forward pass does not call this layer (leave it out with --ignore)."
                )
            self._take(target, norm, activations.tokens_of(target.name))
        if self.fallback and self.scheme.group == "all":
            name, tokens = next(iter(self.fallback.items()))
            raise UserError(
                f"group all: {name} was shown {tokens} calibration tokens, too few for norms, and magnitudes cannot compete "
                "with the scores of others. Take more --samples, or leave it out with --ignore."
            )

    def _take(self, target: Target, norm: Tensor, tokens: int | None) -> None:
        self._norms[target.name] = norm
        if target.layer.routed and tokens is not None and tokens < self.least_tokens:
            self.fallback[target.name] = tokens

    def scheme_of(self, target: Target) -> Scheme:
        """How a target is decided: as all are, or by magnitude."""
        return replace(self.scheme, criterion_name="magnitude") if target.name in self.fallback else self.scheme

    def mask(self, target: Target, norm: Tensor | None, tokens: int | None = None) -> Tensor:
        """The mask that `write` will put on a target, given these norms of its inputs.

        Args:
            target: one of the targets.
            norm: float32, shape (columns,); None for a criterion that needs none.
            tokens: how many tokens it is over, where that is known.

        Returns:
            bool, shape (rows, columns), one output to a row, true where kept.

        Raises:
            UserError: targets compete with each other, or one holds NaN or infinity.
        """
        if self.scheme.group == "all":
            raise UserError("--group all cannot decide on one matrix before the norms of all are known.")
        if norm is not None:
            self._take(target, norm, tokens)
        mask = torch.empty((target.matrix.rows, target.matrix.columns), dtype=torch.bool)
        with OpenFiles(again=True) as files:
            selector = self._search([target], files) if self.scheme.group == "matrix" else None
            for first, part in self._masks(target, files.reading(target.matrix.stored.shard), selector):
                mask[first : first + part.shape[0]] = part
        return mask

    def write(self, folder: Path, journal: Journal | None = None) -> list[Outcome]:
        """Write the pruned shards and the checkpoint's other files into a folder that exists; all is on the disk then.

        Args:
            folder: empty, or what a stopped run left there.
            journal: how far that run came, and where it is noted how far this one is.

        Returns:
            One outcome for each target, in their order.

        Raises:
            UserError: a target holds NaN or infinity; a file cannot be read, or changes meanwhile.
        """
        source, journal = self.checkpoint.folder, journal or Journal()
        for relative in self.checkpoint.side_files():
            (folder / relative.parent).mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / relative, folder / relative)
        try:
            with Writer(folder, journal, self._buffers, again=self.scheme.group != "row") as writer:
                outcomes = self._write(writer, journal)
            self.checkpoint.check_unchanged()
        except ReadError:
            raise
        except UserError:  # the source is not what it was taken for, so that nothing made of it counts
            journal.forget()
            raise
        return [outcomes[target.name] for target in self.targets]

    def decide(self, see: Callable[[Target, int, Tensor], None]) -> list[Outcome]:
        """Decide all targets as `write` does, and write nothing.

        Args:
            see: called with a target, the first row and the pruned rows (shape (rows, columns)) of each block, in order. Their
                memory is used again.

        Returns, raises: as `write`.
        """
        outcomes = []
        total = sum(target.matrix.numel for target in self.targets)
        with OpenFiles(again=True) as files, tqdm(total=total, desc="decide", unit="W", unit_scale=True, disable=None) as bar:
            everything = self._search(self.targets, files) if self.scheme.group == "all" else None
            for target in self.targets:
                selector = self._search([target], files) if self.scheme.group == "matrix" else everything
                rows = Rows(target.matrix.rows)
                for first, block, part in self._pruned(target, files.reading(target.matrix.stored.shard), selector):
                    rows.put(first, part)
                    see(target, first, block)
                    bar.update(block.numel())
                    self._buffers.give(block)
                outcomes.append(self._outcome(target, rows, selector))
            self._end(everything)
        self.checkpoint.check_unchanged()
        return outcomes

    def measured(self, target: Target, first: int, block: Tensor) -> Pruned:
        """What this would make of a block of a target's rows, each a group of its own; the block stays as it is."""
        return self._prune_rows(target, first, block.clone())

    def blocks(self, target: Target, files: OpenFiles) -> Iterator[tuple[int, Tensor]]:
        """(first row, weights) of each block of a target's rows; the memory of one is used again after the next."""
        for first, block in self._read(target, files.reading(target.matrix.stored.shard)):
            yield first, block
            self._buffers.give(block)

    def _write(self, writer: Writer, journal: Journal) -> dict[str, Outcome]:
        segments = segments_of(self.checkpoint, self.targets, in_order=self.scheme.group == "all")
        outcomes: dict[str, Outcome] = {}
        total, ends = sum(s.bytes for s in segments), {s.shard: s.end for s in segments if s.target is None}
        everything = self._search(self.targets, writer.files) if self.scheme.group == "all" else None
        with tqdm(total=total, desc="prune", unit="B", unit_scale=True, disable=None) as bar:
            for number, segment in enumerate(segments):
                if segment.target is None:
                    writer.copy(number, segment)
                else:
                    outcomes[segment.target.name] = self._prune(number, segment, segment.target, everything, writer, journal)
                last = segment.target is None and segment.end == ends[segment.shard] and everything is None
                writer.end(number, segment, last)
                if last:
                    self.checkpoint.check_unchanged()
                bar.update(segment.bytes)
        self._end(everything)
        return outcomes

    def _end(self, everything: GroupSelector | None) -> None:
        if everything is not None:
            mass = everything.effective_mass(self._score_dtype(self.targets[0]))
            self.whole = (float(everything.moments.number()), mass)

    def _prune(
        self,
        number: int,
        segment: Segment,
        target: Target,
        everything: GroupSelector | None,
        writer: Writer,
        journal: Journal,
    ) -> Outcome:
        rows, row = target.matrix.rows, self._first_rows[target.name]
        done = journal.done(number, rows)
        if (done < rows and self.scheme.group != "row") or everything is not None:
            done = 0  # a group larger than a row is decided from its first weight on
        selector = everything
        if self.scheme.group == "matrix" and done < rows:
            selector = self._search([target], writer.files)
        found = Rows(rows, journal.get(row, done))
        here = writer.files.reading(target.matrix.stored.shard)
        for first, block, part in self._pruned(target, here, selector, done):
            found.put(first, part)
            writer.rows(number, segment, first, block, row + first, found.columns)
        outcome = self._outcome(target, found, selector)
        if self.scheme.group == "matrix" and selector is not None:
            writer.note(row, {name: values[:1] for name, values in found.columns.items()})
        return outcome

    def _outcome(self, target: Target, rows: Rows, selector: GroupSelector | None) -> Outcome:
        """What became of a target; of one that is a group, N_eff and s_eff come into its first row."""
        columns = rows.columns
        n_eff: Tensor | None = columns["n_eff"]
        s_eff: Tensor | None = columns["s_eff"]
        if self.scheme.group == "matrix":
            if selector is not None:
                columns["n_eff"][0] = selector.moments.number()
                columns["s_eff"][0] = selector.effective_mass(self._score_dtype(target))
            n_eff, s_eff = columns["n_eff"][:1].clone(), columns["s_eff"][:1].clone()
        elif selector is not None:
            n_eff = s_eff = None
        return rows.outcome(target, n_eff, s_eff)

    def _pruned(
        self, target: Target, here: Source, selector: GroupSelector | None, done: int = 0
    ) -> Iterator[tuple[int, Tensor, Pruned]]:
        """(first row, weights, what became of them) of each block of a target's rows; `selector`: of a larger group."""
        scheme, norms = self.scheme_of(target), self._norms.get(target.name)
        for first, block in self._read(target, here, done):
            if selector is not None:
                yield first, block, selector.prune(block, scheme.criterion.score(block, norms).contiguous())
                continue
            yield first, block, self._prune_rows(target, first, block)

    def _prune_rows(self, target: Target, first: int, block: Tensor) -> Pruned:
        """Prune a block of a target's rows in place, each a group of its own."""
        offset = self._offsets[target.name] + first * target.matrix.columns
        with finite(target, first, block):
            return self.scheme_of(target).prune_rows(block, self._norms.get(target.name), offset)

    def _masks(self, target: Target, here: Source, selector: GroupSelector | None) -> Iterator[tuple[int, Tensor]]:
        """(first row, mask) of each block of a target's rows."""
        for first, block, scores in self._blocks(target, here):
            if selector is not None:
                yield first, selector.select(scores).mask
                continue
            offset = self._offsets[target.name] + first * target.matrix.columns
            with finite(target, first, block):
                part = select_rows(scores, self.scheme.budget, offset)
            yield first, part.mask

    def _search(self, targets: list[Target], files: OpenFiles) -> GroupSelector:
        """Decide the cut of one group of several matrices, or of one: a round of reading for the sums, then for the bits."""
        selector = GroupSelector(self.scheme.budget, self._offsets[targets[0].name])
        feed = selector.add
        while True:
            for target in targets:
                for first, block, scores in self._blocks(target, files.reading(target.matrix.stored.shard)):
                    with finite(target, first, block):
                        feed(scores)
            if not selector.searching():
                return selector
            feed = selector.search

    def _blocks(self, target: Target, here: Source) -> Iterator[tuple[int, Tensor, Tensor]]:
        """(first row, weights, scores) of each block of a target's rows."""
        for first, block in self._read(target, here):
            yield first, block, self.scheme_of(target).criterion.score(block, self._norms.get(target.name)).contiguous()
            self._buffers.give(block)

    def _read(self, target: Target, here: Source, done: int = 0) -> Iterator[tuple[int, Tensor]]:
        """(first row, weights) of each block of a target's rows; the next ones are read meanwhile. `done` rows are left out."""
        matrix = target.matrix

        def reading(first: int, last: int) -> tuple[int, Tensor]:
            return first, matrix.read(here, first, last, self._buffers)

        blocks = matrix.row_blocks(self.block_weights)
        return ahead(partial(reading, first, last) for first, last in blocks if last > done)

    def _score_dtype(self, target: Target) -> torch.dtype:
        dtype = target.matrix.dtype
        return torch.promote_types(dtype, torch.float32) if self.scheme_of(target).criterion.needs_norms else dtype


@contextmanager
def finite(target: Target, first: int, block: Tensor) -> Iterator[None]:
    """Name the tensor and the rows where scores turn out not to be finite."""
    try:
        yield
    except NonFiniteError as error:
        rows = f"rows {first} to {first + block.shape[0] - 1}"
        if bool(torch.isfinite(block).all()):
            raise UserError(f"{target.name}: scores overflow in {rows}; its activations are too large.") from error
        stored = target.matrix.stored
        raise UserError(
            f"{stored.shard}: {stored.name} holds NaN or infinity ({rows}). The checkpoint is damaged; download it again."
        ) from error
