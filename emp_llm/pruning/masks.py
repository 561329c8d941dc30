"""The outcome of a run for its targets: counts and sums of every row, collected chunk by chunk."""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from emp_llm.checkpoint.files import FilePool
from emp_llm.checkpoint.matrices import Words, as_tensor
from emp_llm.common.errors import UserError
from emp_llm.models.architecture import Target
from emp_llm.options.recipe import Recipe
from emp_llm.pruning.scores import CHUNK_WEIGHTS, Scores, naming_rows, read_chunks
from emp_llm.selection.criteria import MAGNITUDE, WANDA
from emp_llm.selection.rows import prune_words, words_supported
from emp_llm.selection.rule import Group, GroupNumbers, KeepRule, RowFigures

if TYPE_CHECKING:
    from torch import Tensor

    from emp_llm.calibration.activations import Activations
    from emp_llm.selection.reference import GroupSelector
    from emp_llm.walk.updated import UpdatedWeights


ALL_KEPT = "all kept"


@dataclass(frozen=True)
class Outcome:
    """The outcome for one target.

    Attributes:
        target: the matrix.
        kept: numbers of kept weights, int64, shape (rows,).
        kept_mass, mass: float64, shape (rows,): sums of the kept scores and of all scores.
        n_eff, s_eff: float64, shape (rows,), or (1,) for a matrix as one group; None if the group
            is larger.
        zeros: number of weights that are zero after pruning.
    """

    target: Target
    kept: NDArray[Any]
    kept_mass: NDArray[Any]
    mass: NDArray[Any]
    n_eff: NDArray[Any] | None
    s_eff: NDArray[Any] | None
    zeros: int


class Outcomes(NamedTuple):
    """The outcomes for all targets, in their order; `whole`: N_eff and s_eff of all targets, if
    they are one group.
    """

    of_targets: list[Outcome]
    whole: tuple[float, float] | None


def no_figures(rows: int) -> RowFigures:
    """The figures of one target's rows, to be filled in chunk by chunk: float64, zeros so far."""
    # Allocated at once: small arrays allocated between large chunks would keep the heap from
    # shrinking.
    return RowFigures(*np.zeros((len(RowFigures._fields), rows)))


def put_figures(rows: RowFigures, first: int, chunk: RowFigures) -> None:
    """Store the figures of a chunk of rows, `first` being its first row; figures that are None
    stay zero.
    """
    for figures, values in zip(rows, chunk, strict=True):
        if values is not None:
            figures[first : first + len(values)] = values


def masks_digest(outcomes: Outcomes, recipe: Recipe, fallback: Mapping[str, int]) -> str:
    """A hash of the pruned values of some targets; for the same weights, norms and text, equal
    values have equal hashes.

    It covers the ranking of the scores and the number of kept weights in every row, which determine
    the masks; and the update of the weights that stay. ALL_KEPT if no weight is removed or moved.
    """
    if recipe.update is None and all(
        bool((outcome.kept == outcome.target.matrix.columns).all())
        for outcome in outcomes.of_targets
    ):
        return ALL_KEPT
    score = f"{recipe.score.criterion.name}{' relative' if recipe.score.relative else ''}"
    digest = hashlib.sha256(f"{score} {recipe.group} {recipe.n_of_m} {sorted(fallback)}\n".encode())
    if recipe.update is not None:
        digest.update(f"{recipe.update}\n".encode())
    for outcome in outcomes.of_targets:
        digest.update(f"{outcome.target.name}\n".encode() + outcome.kept.tobytes())
    return digest.hexdigest()


# Masks: which weights stay. One loop decides them, for files, for models in memory, for updates
# and for measures.
#
# The path of a weight: its bytes are read from the shard (`Matrix.read`), the criterion scores it,
# the counts say how many of its group stay, and it is set to zero or left. The writer puts the
# bytes at the same offset of the new shard.


# The reference prunes this many weights in the time that loading the compiled kernel takes.
_SMALL = 1 << 24


@dataclass(frozen=True)
class KeptCounts:
    """How many weights stay in each group.

    Attributes:
        group: what competes for places: the weights of a row, of a matrix, or of all targets.
        rule: sets the count of each group; None: `kept` does.
        kept: name of a target -> int64, shape (rows,) or (1,); of all targets as one group, the
            name is "".
        n_eff: the effective numbers that set `kept`, in its shape; empty if no effective numbers
            did.
        beta: the multiple of the effective numbers that is kept.
        numbers: (N_eff, sum |s|, size) of the groups that set `kept`.
    """

    group: Group
    rule: KeepRule | None
    kept: Mapping[str, NDArray[np.int64]] = field(default_factory=dict)
    n_eff: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)
    beta: float | None = None
    numbers: Sequence[GroupNumbers] = ()

    def rule_of(self, target: Target, first: int = 0, last: int | None = None) -> KeepRule:
        """The rule of a target's rows first to last - 1, or of its only group."""
        if self.rule is not None:
            return self.rule
        counts = self.kept["" if self.group == "all" else target.name]
        return KeepRule(counts=counts[first:last] if self.group == "row" else counts)


def check_device(device: str) -> None:
    """Raise UserError if masks are to be decided on a GPU and there is none."""
    if device == "cpu":
        return
    import torch

    if not torch.cuda.is_available():
        raise UserError(
            "--mask-device cuda: there is no GPU that torch can use. Leave the option "
            "out, or give cpu."
        )


@dataclass(frozen=True)
class Chunk:
    """A chunk of a target's rows after pruning.

    Attributes:
        first: number of its first row.
        words: the bits of the rows, shape (rows, columns).
        figures: counts and sums of the rows, as arrays.
    """

    first: int
    words: Words
    figures: RowFigures


class Pruner:
    """Decides the masks of a model's targets.

    Args:
        scores: of the targets.
        counts: how many weights of each group stay.
        device: that decides: "cpu", or "cuda" for the reference on a GPU, with the same bits.
        chunk_weights: weights in memory at a time; the masks do not depend on it.
        reference: the reference decides the first of every so many chunks of a target, not the
            kernel, with the same bits. 1: it decides all; 0: none.
    """

    def __init__(
        self,
        scores: Scores,
        counts: KeptCounts,
        device: str = "cpu",
        chunk_weights: int = CHUNK_WEIGHTS,
        reference: int = 0,
    ) -> None:
        self.scores = scores
        self.counts = counts
        self.targets = scores.targets
        self.checkpoint = scores.checkpoint
        self._device = device
        few = sum(target.matrix.numel for target in scores.targets) <= _SMALL
        self._reference = 1 if few or device != "cpu" else reference
        self._chunk_weights = chunk_weights

    def cut(self, targets: Sequence[Target], files: FilePool) -> "GroupSelector | None":
        """The cut of one group of matrices; None if each row is a group."""
        if self.counts.group == "row":
            return None
        chunks = partial(self.scores.of_chunks, targets, files, self._device, self._chunk_weights)
        return cut_of(chunks, self.counts.rule_of(targets[0]))

    def prune_target(
        self,
        target: Target,
        files: FilePool,
        selector: "GroupSelector | None" = None,
        updated: "UpdatedWeights | None" = None,
    ) -> Iterator[Chunk]:
        """The chunks of a target after pruning, in order.

        Args:
            selector: of the target's group, if a group is larger than a row.
            updated: rows whose kept weights moved, in place of the pruned ones; None if none did.

        Raises:
            UserError: the target holds NaN or infinity.
        """
        for first, words in read_chunks(target, files, self._chunk_weights):
            with naming_rows(target, first, words):
                figures = self.prune(target, first, words, selector)
            if updated is not None:
                figures = updated.replace(target, first, words, figures)
            yield Chunk(first, words, figures)

    def decide(
        self, on_chunk: Callable[[Target, Chunk], None], updated: "UpdatedWeights | None" = None
    ) -> Outcomes:
        """Prune all targets in memory; nothing is written.

        Args:
            on_chunk: called with a target and each of its pruned chunks, in order.
            updated: of `pruned`.

        Raises:
            UserError: a target holds NaN or infinity; a file cannot be read, or changes during the
                reading.
        """
        outcomes = []
        with self.scores.reading("decide") as (files, bar):
            selector = self.cut(self.targets, files) if self.counts.group == "all" else None
            for target in self.targets:
                if self.counts.group == "matrix":
                    selector = self.cut([target], files)
                rows = no_figures(target.matrix.rows)
                for chunk in self.prune_target(target, files, selector, updated):
                    put_figures(rows, chunk.first, chunk.figures)
                    on_chunk(target, chunk)
                    bar.update(chunk.words.size)
                outcomes.append(outcome_of(target, rows, self.counts, selector))
        return Outcomes(outcomes, whole_of(self.counts, selector))

    def cut_all(self) -> "tuple[GroupSelector, dict[str, int]] | None":
        """The cut of all targets as one group, and how many of the scores at it are kept before
        each target, by name; None for smaller groups.
        """
        if self.counts.group != "all":
            return None
        before = {}
        with self.checkpoint.open_files() as files:
            selector = self.cut(self.targets, files)
            assert selector is not None
            for target in self.targets:
                before[target.name] = selector.kept_ties
                for _ in self.prune_target(target, files, selector):
                    pass
        return selector, before

    def mask_of(
        self, target: Target, of_all: "tuple[GroupSelector, dict[str, int]] | None" = None
    ) -> "Tensor":
        """The mask of a target: bool, shape (rows, columns), true for kept weights. A weight whose
        bits are zero counts as removed.

        Args:
            of_all: from `cut_all`.
        """
        import torch

        mask = torch.empty((target.matrix.rows, target.matrix.columns), dtype=torch.bool)
        with self.checkpoint.open_files() as files:
            if of_all is None:
                selector = self.cut([target], files)
            else:
                selector, before = of_all
                selector.kept_ties = before[target.name]
            for chunk in self.prune_target(target, files, selector):
                rows = torch.from_numpy(chunk.words != 0)
                mask[chunk.first : chunk.first + len(rows)] = rows
        return mask

    def mask(self, target: Target, activations: "Activations") -> "Tensor":
        """The mask of a target, before the inputs of other targets are known.

        Args:
            activations: with the statistics of the target's inputs.

        Returns:
            bool, shape (rows, columns), one output per row; true for kept weights.

        Raises:
            UserError: the statistics are missing: the forward pass does not call the layer.
        """
        scores = Scores(self.checkpoint, [target], self.scores.recipe)
        scores = scores.with_activations(activations)
        return Pruner(scores, self.counts, self._device).mask_of(target)

    def by_reference(self, target: Target, first: int) -> bool:
        """Whether the reference decides the chunk that begins with a row, for a group of rows."""
        plain = self.scores.criterion_of(target) in (MAGNITUDE, WANDA)
        if self._reference == 1 or self.counts.group != "row" or not plain:
            return True
        chunk = first // max(1, self._chunk_weights // max(1, target.matrix.columns))
        if self._reference and chunk % self._reference == 0:
            return True
        dtype = "F32" if target.matrix.scales is not None else target.matrix.stored.dtype
        return not words_supported(dtype, self.counts.rule_of(target))

    def prune(
        self, target: Target, first: int, words: Words, selector: "GroupSelector | None"
    ) -> RowFigures:
        """Prune a chunk in place.

        Args:
            first: number of its first row.
            words: the bits of the rows, shape (rows, columns).
            selector: of the target's group, if a group is larger than a row.

        Returns:
            Arrays.

        Raises:
            NonFiniteError: it holds NaN or infinity.
        """
        matrix = target.matrix
        dtype = target.matrix.stored.dtype
        if matrix.scales is None or selector is not None or self.scores.criterion_of(target).whole:
            return self._prune_values(target, first, words, dtype, selector)
        # FP8: the values are pruned as float32, then the bits. No bits but 0 have the value +0.0.
        values = matrix.scales.dequantise(first, as_tensor(words, dtype)).numpy().view(np.uint32)
        figures = self._prune_values(target, first, values, "F32", None)
        words[values == 0] = 0
        return figures

    def _prune_values(
        self, target: Target, first: int, words: Words, dtype: str, selector: "GroupSelector | None"
    ) -> RowFigures:
        rule = self.counts.rule_of(target, first, first + len(words))
        if words.size and selector is None and not self.by_reference(target, first):
            return prune_words(words, dtype, self.scores.factors_of(target), rule)
        from emp_llm.selection.reference import apply_selection, select_rows

        host = as_tensor(words, dtype)
        weights = host.to(self._device)
        scores = self.scores.of(target, first, weights)
        selection = select_rows(scores, rule) if selector is None else selector.select(scores)
        figures = apply_selection(weights, selection)
        if weights is not host:
            host.copy_(weights)
        return RowFigures(*(None if values is None else values.cpu().numpy() for values in figures))


def cut_of(chunks: "Callable[[], Iterator[Tensor]]", rule: KeepRule) -> "GroupSelector":
    """The cut of a group that is larger than a row: one pass over its scores for the sums, then
    passes that narrow the cut.

    Args:
        chunks: returns the scores of the group, in pieces, at each call.
        rule: how many of them stay.
    """
    from emp_llm.selection.reference import GroupSelector

    selector = GroupSelector(rule)
    for scores in chunks():
        selector.add(scores)
    while selector.searching():
        for scores in chunks():
            selector.search(scores)
    return selector


def outcome_of(
    target: Target, rows: RowFigures, counts: KeptCounts, cut: "GroupSelector | None"
) -> Outcome:
    """A target's outcome. N_eff and s_eff of a matrix as one group are stored in its first row.

    Args:
        rows: the figures of all rows.
        counts, cut: that decided the masks.
    """
    n_eff = rows.n_eff
    s_eff = rows.s_eff
    if counts.group == "matrix":
        if cut is not None:
            n_eff[0], s_eff[0] = float(cut.sums.number()), cut.effective_mass()
        n_eff = n_eff[:1].copy()
        s_eff = s_eff[:1].copy()
    elif counts.group == "all":
        n_eff = s_eff = None
    if n_eff is not None and target.name in counts.n_eff:
        n_eff = counts.n_eff[target.name]
    return Outcome(
        target,
        rows.kept.astype(np.int64),
        rows.kept_mass,
        rows.mass,
        n_eff,
        s_eff,
        int(rows.zeros.sum()),
    )


def whole_of(counts: KeptCounts, cut: "GroupSelector | None") -> tuple[float, float] | None:
    """N_eff and s_eff of all targets as one group; None for other groups."""
    if counts.group != "all" or cut is None:
        return None
    n_eff = counts.n_eff[""][0] if "" in counts.n_eff else cut.sums.number()[0]
    return float(n_eff), cut.effective_mass()


def measure_targets(pruners: Sequence[Pruner]) -> list[Outcomes]:
    """The outcomes of several recipes for the same targets, each row being a group. Every matrix is
    read once for all of them.

    Raises:
        UserError: a target holds NaN or infinity; a file cannot be read, or changes during the
            reading.
    """
    reader = pruners[0]
    outcomes: list[list[Outcome]] = [[] for _ in pruners]
    with reader.scores.reading("measure") as (files, bar):
        for target in reader.targets:
            statistics = [no_figures(target.matrix.rows) for _ in pruners]
            for first, words in read_chunks(target, files):
                for rows, pruner in zip(statistics, pruners, strict=True):
                    with naming_rows(target, first, words):
                        put_figures(rows, first, pruner.prune(target, first, words.copy(), None))
                bar.update(words.size)
            for rows, pruner, of_targets in zip(statistics, pruners, outcomes, strict=True):
                of_targets.append(outcome_of(target, rows, pruner.counts, None))
    return [Outcomes(of_targets, None) for of_targets in outcomes]
