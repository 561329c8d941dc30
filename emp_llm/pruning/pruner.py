"""Prunes the targets of a checkpoint, block by block of rows.

The path of a weight: `Matrix.read` reads its bytes from the shard, the scheme's criterion scores it, the budget sets the count
to keep, the mask is applied, and `Matrix.write` (called in `shard_writer`) writes it to the same offset of the new shard.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from emp_llm.architecture.targets import Target
from emp_llm.checkpoint.checkpoint import Checkpoint
from emp_llm.checkpoint.matrix import as_tensor
from emp_llm.checkpoint.words import Words
from emp_llm.common.errors import UserError
from emp_llm.common.progress_bars import progress_bar
from emp_llm.pruning.outcome import Outcome, RowStatistics
from emp_llm.pruning.row_pruners import CpuRowPruner, PrunedBlock, RowPruner, RowRule, naming_block, prune_block
from emp_llm.pruning.scoring.target_scores import TargetScores, naming_target
from emp_llm.selection.budgets import Budget, PatternBudget
from emp_llm.selection.given_counts import GivenCounts
from emp_llm.selection.kernels.interface import RowFigures
from emp_llm.selection.scheme import Scheme
from emp_llm.storage.background_work import prefetch
from emp_llm.storage.buffers import Block
from emp_llm.storage.direct_io import FileReader
from emp_llm.storage.file_pool import FilePool

if TYPE_CHECKING:
    from torch import Tensor

    from emp_llm.selection.group_selection import GroupSelector
    from emp_llm.update.moved import MovedWeights

BLOCK_WEIGHTS = 1 << 21
_SMALL = 1 << 24  # numpy prunes this many weights in the time that loading the compiled kernel takes
BlockReadCallback = Callable[[FileReader, int, Words], None]


class Pruner:
    """Decides the masks of a checkpoint's targets.

    Args:
        checkpoint: the source; it is only read.
        targets: in order. In a group of all targets, ties are kept in this order.
        scheme: criterion, budget and group.
        block_weights: weights in memory at a time; the masks do not depend on it. None: BLOCK_WEIGHTS.
        least_tokens: as for `TargetScores`.
        rows: prunes blocks of rows; None: on the CPU.
        given: as for `TargetScores`.

    Attributes:
        scores: the scores of the targets.
        offsets: name of a target -> number of target weights before it.
        first_rows: name of a target -> index of its first row among the rows of all targets.
        whole: N_eff and s_eff of all targets as one group, known after pruning; None for other groups.
        settled: the budget that decides, if it is settled before the masks (`curve.settle_budget`); None: the scheme's.

    Raises:
        UserError: M of an N:M pattern does not divide a target's inputs; one group has targets of several dtypes.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        targets: list[Target],
        scheme: Scheme,
        block_weights: int | None = None,
        least_tokens: int = 0,
        rows: RowPruner | None = None,
        given: Path | Mapping[str, Any] | None = None,
    ) -> None:
        self.checkpoint = checkpoint
        self.targets = targets
        self.scheme = scheme
        self.block_weights = block_weights or BLOCK_WEIGHTS
        self.scores = TargetScores(targets, scheme, least_tokens, checkpoint, given)
        self.rows = rows or CpuRowPruner()
        self.buffers = self.rows.buffers
        self._device = str(getattr(self.rows, "device", "cpu"))
        self.whole: tuple[float, float] | None = None
        self.settled: Budget | None = None
        self.offsets: dict[str, int] = {}
        self.first_rows: dict[str, int] = {}
        offset = rows_before = 0
        for target in targets:
            self._check_pattern(target)
            self.offsets[target.name], self.first_rows[target.name] = offset, rows_before
            offset, rows_before = offset + target.matrix.numel, rows_before + target.matrix.rows
        self._weights = offset
        if scheme.group == "all" and len({target.matrix.stored.dtype for target in targets}) > 1:
            raise UserError("--group all: the targets are stored in different dtypes; use --group row or matrix.")

    @property
    def relative(self) -> bool:
        """Whether the norms are those relative to the outputs."""
        return self.scheme.relative

    @property
    def budget(self) -> Budget:
        """The budget that decides the masks: the settled one, or the scheme's."""
        if self.settled is None and self.scheme.count_by == "magnitude":
            raise ValueError("the counts are not settled yet")
        return self.scheme.budget if self.settled is None else self.settled

    def rule_of(self, target: Target) -> RowRule:
        """The rule for the rows of a target, each row being one group."""
        scheme = self.scores.scheme_of(target)
        criterion, norms = scheme.criterion_name, self.scores.norms_of(target) if scheme.criterion.needs_norms else None
        offset, compiled = self.offsets[target.name], self._weights > _SMALL
        own, dtype = self.scores.whole_of(target), target.matrix.stored.dtype
        return RowRule(dtype, criterion, norms, self.budget, offset, compiled, own, target.matrix.scales)

    def mask(self, target: Target, norm: "Tensor | None", tokens: int | None = None) -> "Tensor":
        """The mask of a target, given the norms of its inputs; the same as in a run.

        Args:
            target: one of the targets.
            norm: float32, shape (columns,), relative to the outputs if the scheme says so; None for a criterion without norms.
            tokens: number of tokens that the norms cover, if known.

        Returns:
            bool, shape (rows, columns), one output per row; true for kept weights.

        Raises:
            UserError: the group is all targets, or the target holds NaN or infinity.
        """
        import torch

        from emp_llm.selection.row_selection import select_rows

        if self.scheme.group == "all":
            raise UserError("--group all cannot prune one matrix before the norms of all targets are known.")
        if norm is not None:
            self.scores.take(target, norm, tokens)
        mask = torch.empty((target.matrix.rows, target.matrix.columns), dtype=torch.bool)
        with self.checkpoint.open_files(again=True) as files, naming_target(target):
            selector = self.search([target], files) if self.scheme.group == "matrix" else None
            for first, words in self.blocks(target, files):
                scores = self._scored(target, first, words)
                offset = self.offsets[target.name] + first * target.matrix.columns
                with naming_block(first, words):
                    part = select_rows(scores, self.budget, offset) if selector is None else selector.select(scores)
                mask[first : first + part.mask.shape[0]] = part.mask
        return mask

    def decide(
        self, on_block: Callable[[Target, PrunedBlock], None], back: bool = True, moved: "MovedWeights | None" = None
    ) -> list[Outcome]:
        """Prune all targets in memory; nothing is written.

        Args:
            on_block: called with a target and each of its pruned blocks, in order. The memory of a block is reused afterwards.
            back: copy rows that a GPU pruned back to the blocks' `words`; if false, only `weights` holds them.
            moved: weights that take the place of the pruned ones in `words`.

        Returns:
            One outcome per target, in their order.

        Raises:
            UserError: a target holds NaN or infinity; a file cannot be read, or changes during the reading.
        """
        outcomes = []
        total = sum(target.matrix.numel for target in self.targets)
        with self.checkpoint.open_files(again=True) as files, progress_bar(total, "decide", "W") as bar:
            global_selector = self.search(self.targets, files) if self.scheme.group == "all" else None
            for target in self.targets:
                selector = self.search([target], files) if self.scheme.group == "matrix" else global_selector
                rows = RowStatistics(target.matrix.rows)
                for block in self.pruned(target, files, selector, back=back):
                    figures = block.figures
                    if moved is not None:
                        figures = moved.replace(target, block.first, block.words, figures)
                    rows.put(block.first, figures)
                    on_block(target, block)
                    bar.update(block.words.size)
                    self.buffers.give(block.words)
                outcomes.append(self.outcome(target, rows, selector))
            self.store_global_figures(global_selector)
        self.checkpoint.check_unchanged()
        return outcomes

    def measured(self, target: Target, first: int, words: Words) -> RowFigures:
        """The figures of a block of a target's rows, each row being one group; the block is not changed."""
        rule = self.rule_of(target)
        with naming_target(target), naming_block(first, words):
            return prune_block(first, words.copy(), rule)

    def blocks(self, target: Target, files: FilePool) -> Iterator[tuple[int, Words]]:
        """(first row, bits) of each block of a target's rows; the next iteration reuses a block's memory."""
        for first, words in self.read(target, files):
            yield first, words
            self.buffers.give(words)

    def read(
        self, target: Target, files: FilePool, done: int = 0, on_read: BlockReadCallback | None = None
    ) -> Iterator[tuple[int, Words]]:
        """(first row, bits) of each block of a target's rows, with the next blocks read ahead.

        Args:
            done: blocks within the first `done` rows are skipped.
            on_read: called with the file, the first row and the bits of each block, in the reading thread.
        """
        matrix, reader = target.matrix, files.reader(target.matrix.stored.shard)

        def job(first: int, last: int) -> tuple[int, Words]:
            words = matrix.read(reader, first, last, self.buffers)
            if on_read is not None:
                on_read(reader, first, words)
            return first, words

        blocks = matrix.row_blocks(self.block_weights)
        return prefetch(partial(job, first, last) for first, last in blocks if last > done)

    def pruned(
        self,
        target: Target,
        files: FilePool,
        selector: "GroupSelector | None",
        done: int = 0,
        on_read: BlockReadCallback | None = None,
        back: bool = True,
    ) -> Iterator[PrunedBlock]:
        """The blocks of a target after pruning. The caller returns their memory to `buffers`.

        Args:
            selector: decides a group larger than a row; None if each row is one group.
            done, on_read: as for `read`; back: as for `decide`.
        """
        blocks = self.read(target, files, done, on_read)
        with naming_target(target):
            if selector is None:
                yield from self.rows.prune(blocks, self.rule_of(target), back)
                return
            from emp_llm.selection.row_pruning import apply_selection

            for first, words in blocks:
                host = as_tensor(words, target.matrix.stored.dtype)
                weights = host.to(self._device)
                figures = apply_selection(weights, selector.select(self.scores.of(target, first, weights)))
                if back and weights is not host:
                    host.copy_(weights)
                arrays = RowFigures(*(None if values is None else values.cpu().numpy() for values in figures))
                yield PrunedBlock(first, words, arrays, weights)

    def search(self, targets: list[Target], files: FilePool) -> "GroupSelector":
        """Find the cut of one group of matrices: one pass over the weights for the sums, then passes that narrow the cut."""
        from emp_llm.selection.group_selection import GroupSelector

        selector = GroupSelector(self.budget, self.offsets[targets[0].name])
        self.feed(selector.add, targets, files)
        while selector.searching():
            self.feed(selector.search, targets, files)
        return selector

    def feed(self, take: "Callable[[Tensor], None]", targets: list[Target], files: FilePool) -> None:
        """Give the scores of each block of some targets to a function, in order."""
        for target in targets:
            with naming_target(target):
                for first, words in self.blocks(target, files):
                    with naming_block(first, words):
                        take(self._scored(target, first, words))

    def outcome(self, target: Target, rows: RowStatistics, selector: "GroupSelector | None") -> Outcome:
        """A target's outcome. N_eff and s_eff of a matrix as one group are stored in its first row."""
        columns = rows.columns
        n_eff: Block | None = columns["n_eff"]
        s_eff: Block | None = columns["s_eff"]
        if self.scheme.group == "matrix":
            if selector is not None:
                columns["n_eff"][0] = float(selector.moments.number())
                columns["s_eff"][0] = selector.effective_mass(self.scores.dtype(target))
            n_eff, s_eff = columns["n_eff"][:1].copy(), columns["s_eff"][:1].copy()
        elif selector is not None:
            n_eff = s_eff = None
        if isinstance(self.settled, GivenCounts) and n_eff is not None:
            n_eff = self.settled.numbers(n_eff.size, self.offsets[target.name])
        return rows.outcome(target, n_eff, s_eff)

    def store_global_figures(self, global_selector: "GroupSelector | None") -> None:
        """Store N_eff and s_eff of all targets as one group."""
        if global_selector is not None:
            mass = global_selector.effective_mass(self.scores.dtype(self.targets[0]))
            own, settled = global_selector.moments.number(), self.settled
            self.whole = (float(settled.numbers(1)[0] if isinstance(settled, GivenCounts) else own[0]), mass)

    def _scored(self, target: Target, first: int, words: Words) -> "Tensor":
        """The scores of a block of a target's rows, on the device that decides the masks."""
        return self.scores.of(target, first, as_tensor(words, target.matrix.stored.dtype).to(self._device))

    def _check_pattern(self, target: Target) -> None:
        budget = self.scheme.budget
        if isinstance(budget, PatternBudget) and target.matrix.columns % budget.m:
            raise UserError(
                f"--pattern {budget.n}:{budget.m}: the {target.matrix.columns} inputs of {target.name} are not a multiple of "
                f"{budget.m}. Leave the layer out with --ignore, or choose another pattern."
            )
