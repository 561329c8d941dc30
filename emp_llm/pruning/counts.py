"""Counts: how many weights stay in each group of a model's targets. They are known before any mask
is decided.

A group is a row, a matrix, or all targets. Where each group's own scores set its count, the counts
are a rule; else they are a table with one number for each group.
"""

import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from emp_llm.checkpoint.checkpoint import Checkpoint
from emp_llm.checkpoint.matrices import packed_bytes, word_bytes
from emp_llm.common.errors import UserError, format_bytes, quotable
from emp_llm.common.paths import REPORT_NAME
from emp_llm.common.tables import percent_cell
from emp_llm.models.architecture import Architecture, Target, check_calibrated, check_coverage
from emp_llm.models.layers import Layer
from emp_llm.options.recipe import Effective, Magnitude, Match, Pattern, Recipe, Share
from emp_llm.pruning.masks import KeptCounts, Outcome, Outcomes, Pruner, measure_targets
from emp_llm.pruning.report import matrix_records, sizes_record, targets_record, warnings_of
from emp_llm.pruning.scores import Scores
from emp_llm.records.run_report import (
    CurvePoint,
    MeasureEntry,
    RunReport,
    TargetsRecord,
    read_report,
)
from emp_llm.selection.criteria import MAGNITUDE
from emp_llm.selection.rule import (
    Group,
    GroupNumbers,
    KeepRule,
    beta_keeping,
    counts_at,
    floor_count,
    kept_at,
    spread_counts,
    uniform_counts,
)
from emp_llm.walk.checks import check_blocks_separable, check_update

logger = logging.getLogger(__name__)


Numbers = dict[float, list[GroupNumbers]]


def counts_of(
    scores: Scores, known: Numbers | None = None, group: Group | None = None
) -> KeptCounts:
    """How many weights of each group a recipe keeps.

    Weights are read, once, for a requested sparsity of an emp method and for counts by magnitudes.
    Other counts are known from the sizes, or are set by each group itself.

    Args:
        scores: of the targets, with the norms, unless magnitudes set the counts.
        known: order -> effective numbers of the magnitudes of the same targets and groups; those
            found now are added.
        group: None: that of the recipe.

    Raises:
        UserError: every group keeps at least one weight, so that so many cannot be removed; M of an
            N:M pattern does not divide a target's inputs; one group has targets of several dtypes;
            a target holds NaN or infinity; a file cannot be read.
    """
    recipe = scores.recipe
    targets = scores.targets
    group = group or recipe.group
    check_groups(recipe, targets, group)
    if recipe.rule is not None:
        return KeptCounts(group, recipe.rule)
    asked = recipe.counts
    if isinstance(asked, Effective):
        return _effective_counts(scores, asked, {} if known is None else known)
    if isinstance(asked, Share):
        if asked.shares is not None:
            return _spread(targets, group, _removed_of(targets, asked.shares.removed))
        sizes = {target.name: _group_sizes(target, group) for target in targets}
        if group == "all":
            sizes = {"": np.array([sum(target.matrix.numel for target in targets)])}
        return KeptCounts(
            group,
            None,
            {name: uniform_counts(size, asked.sparsity) for name, size in sizes.items()},
        )
    removed = asked.removed if isinstance(asked, Match) else None
    assert removed is not None
    if isinstance(removed, int):
        return _spread(targets, group, [(removed, sum(target.matrix.numel for target in targets))])
    return _spread(targets, group, _removed_of(targets, removed))


def _removed_of(
    targets: Sequence[Target], removed: Mapping[str, int] | None
) -> list[tuple[int, int]]:
    """(removed, total) of each target."""
    if removed is None:
        raise UserError("--shares cost measures held-out text; it is for the command prune.")
    missing = next((target.name for target in targets if target.name not in removed), None)
    if missing is not None:
        raise UserError(f"removed does not say how many weights {missing} loses.")
    return [(removed[target.name], target.matrix.numel) for target in targets]


def check_groups(recipe: Recipe, targets: Sequence[Target], group: Group | None = None) -> None:
    """Raise UserError if M of an N:M pattern does not divide a target's inputs, or one group has
    targets of several dtypes.

    Args:
        group: None: that of the recipe.
    """
    dtypes = {target.matrix.stored.dtype for target in targets}
    if (group or recipe.group) == "all" and len(dtypes) > 1:
        raise UserError(
            "--group all: the targets are stored in different dtypes; use --group row or matrix."
        )
    if not isinstance(recipe.counts, Pattern):
        return
    n = recipe.counts.n
    m = recipe.counts.m
    for target in targets:
        if target.matrix.columns % m:
            raise UserError(
                f"--pattern {n}:{m}: the {target.matrix.columns} inputs of {target.name} are not a "
                f"multiple of {m}. Leave the layer out with --ignore, or choose another pattern."
            )


def match(recipe: Recipe, targets: Sequence[Target], report: RunReport | None = None) -> Recipe:
    """The recipe with the number of weights to remove, unless it has it.

    Args:
        report: of the run that it matches; None: it is read from the folder of that run.

    Raises:
        UserError: there is no report, or it is of another model or of other targets.
    """
    counts = recipe.counts
    if not isinstance(counts, Match) or counts.removed is not None:
        return recipe
    run = counts.run
    report = report or read_report(Path(run))
    total = sum(target.matrix.numel for target in targets)
    if report.targets.weights is None or report.targets.kept is None:
        raise UserError(f"{run}: its {REPORT_NAME} does not say how many weights were kept.")
    if report.targets.weights != total:
        raise UserError(
            f"{run}: that run had {report.targets.weights} target weights, this one has {total}; "
            "match a run of the same model and the same --targets."
        )
    if counts.by != "matrix":
        total = report.targets.weights - report.targets.kept
        return recipe.but(counts=replace(counts, removed=total))
    removed = {}
    for target in targets:
        entry = report.matrices.get(target.name)
        size = target.matrix.numel
        if entry is None:
            raise UserError(
                f"{run}: its {REPORT_NAME} does not say how many weights of "
                f"{target.name} were kept."
            )
        if entry.rows * entry.columns != size:
            raise UserError(
                f"{run}: {target.name} had {entry.rows * entry.columns} weights in that run and "
                f"has {size} here; match a run of the same model."
            )
        removed[target.name] = size - entry.kept
    return recipe.but(counts=replace(counts, removed=removed))


# Effective numbers.


def _effective_counts(scores: Scores, asked: Effective, known: Numbers) -> KeptCounts:
    """The counts of an emp method without a rule: by a sparsity's beta, or by the numbers of the
    magnitudes.
    """
    recipe = scores.recipe
    if not recipe.counts_by_magnitude:
        beta = _beta_of(asked, effective_numbers(scores))
        return KeptCounts(recipe.group, KeepRule(beta=beta, order=asked.order))
    if asked.order not in known:
        known[asked.order] = effective_numbers(magnitudes_of(scores))
    numbers = known[asked.order]
    beta = _beta_of(asked, numbers)
    return counts_by_numbers(scores.targets, recipe.group, numbers, beta)


def magnitudes_of(scores: Scores) -> Scores:
    """The magnitudes of the same targets, in the same groups."""
    counts = Effective(order=_order_of(scores.recipe))
    recipe = Recipe(score=Magnitude(), counts=counts, group=scores.recipe.group)
    return Scores(scores.checkpoint, scores.targets, recipe)


def counts_by_numbers(
    targets: Sequence[Target], group: Group, groups: Sequence[GroupNumbers], beta: float
) -> KeptCounts:
    """The counts by given effective numbers, such as those of the magnitudes.

    Args:
        groups: as `effective_numbers` returns them.
    """
    names = [""] if group == "all" else [target.name for target in targets]
    kept = {
        name: counts_at(n_eff, total, beta, size).astype(np.int64)
        for name, (n_eff, total, size) in zip(names, groups, strict=True)
    }
    return KeptCounts(
        group,
        None,
        kept,
        {name: n_eff for name, (n_eff, _, _) in zip(names, groups, strict=True)},
        beta,
        groups,
    )


def _order_of(recipe: Recipe) -> float:
    return recipe.counts.order if isinstance(recipe.counts, Effective) else 2.0


def _beta_of(asked: Effective, groups: list[GroupNumbers]) -> float:
    """The beta that is asked for, or that removes the sparsity that is asked for."""
    if asked.sparsity is None or asked.in_force is not None:
        return asked.in_force or 1.0
    weights = sum(n_eff.size * size for n_eff, _, size in groups)
    kept = weights - floor_count(asked.sparsity * weights)
    least = kept_at(groups, math.ulp(0.0))
    if kept < least:
        raise UserError(
            f"--sparsity {asked.sparsity:g}: every group keeps at least one weight, and a group "
            f"of zeros all, so that at most {1 - least / weights:.4f} can be removed. Lower it."
        )
    beta = beta_keeping(kept, groups)
    logger.info("sparsity %g is that of beta %.6g.", asked.sparsity, beta)
    return beta


def effective_numbers(scores: Scores) -> list[GroupNumbers]:
    """(N_eff, sum |s|, size) of all groups: arrays for the rows of each target; one value for a
    matrix, or for all targets.

    The weights are read once.

    Raises:
        UserError: a target holds NaN or infinity; a file cannot be read, or changes during the
            reading.
    """
    order = _order_of(scores.recipe)
    group = scores.recipe.group
    pruner = Pruner(scores, KeptCounts(group, KeepRule(beta=1.0, order=order)))
    groups = []
    with scores.reading("effective numbers") as (files, bar):
        if group == "row":  # the kernels compute N_eff
            for target in scores.targets:
                numbers = np.zeros((2, target.matrix.rows))
                for chunk in pruner.prune_target(target, files):
                    rows = slice(chunk.first, chunk.first + len(chunk.figures.mass))
                    numbers[0, rows], numbers[1, rows] = chunk.figures.n_eff, chunk.figures.mass
                    bar.update(chunk.words.size)
                groups.append((numbers[0], numbers[1], target.matrix.columns))
        else:
            from emp_llm.selection.reference import PowerSumsOfGroup

            for members in (
                [scores.targets] if group == "all" else [[target] for target in scores.targets]
            ):
                of_group = PowerSumsOfGroup(order)
                for rows_scores in scores.of_chunks(members, files):
                    of_group.add(rows_scores)
                    bar.update(rows_scores.numel())
                moments = of_group.merged()
                groups.append((moments.number().numpy(), moments.mass.numpy(), moments.size))
    return groups


def count_at_betas(scores: Scores, betas: Sequence[float]) -> list[int]:
    """How many weights of all targets a prune with each beta keeps. The weights are read once.

    Args:
        scores: of a recipe with an effective number; its own beta does not matter.
        betas: positive finite numbers.

    Raises:
        UserError: a target holds NaN or infinity; a file cannot be read, or changes during the
            reading.
    """
    counts = scores.recipe.counts
    if isinstance(counts, Effective) and counts.neff_dtype == "bfloat16":
        return _kept_in_bfloat16(scores, betas)
    groups = effective_numbers(
        magnitudes_of(scores) if scores.recipe.counts_by_magnitude else scores
    )
    return [kept_at(groups, beta) for beta in betas]


def entry_of(
    pruner: Pruner, outcomes: Outcomes, coverage: TargetsRecord, betas: Sequence[float]
) -> MeasureEntry:
    """What `measure` records of a criterion and an order.

    Args:
        outcomes: of the pruner, by rows.
        coverage: the share of the model that the targets cover.
        betas: of the curve. It follows the numbers that set the counts, or N_eff of every row.
    """
    recipe = pruner.scores.recipe
    checkpoint = pruner.checkpoint
    groups = pruner.counts.numbers or [
        (outcome.n_eff, outcome.mass, outcome.target.matrix.columns)
        for outcome in outcomes.of_targets
        if outcome.n_eff is not None
    ]
    kept = [kept_at(groups, beta) for beta in betas]
    weights = sum(target.matrix.numel for target in pruner.targets)
    matrices = matrix_records(outcomes, pruner)
    return MeasureEntry(
        criterion=recipe.name,
        order=_order_of(recipe),
        score="relative" if recipe.score.relative else None,
        count_by="magnitude" if recipe.counts_by_magnitude else None,
        targets=targets_record(outcomes, coverage, pruner),
        sizes=sizes_record(outcomes, checkpoint, updated=False),
        matrices=matrices,
        curve=curve_points(betas, kept, weights, coverage.parameters or 1),
        warnings=warnings_of(matrices, pruner),
    )


def _kept_in_bfloat16(scores: Scores, betas: Sequence[float]) -> list[int]:
    """Each row is a group, in the paper's bfloat16."""
    from emp_llm.selection.reference import select_rows

    kept = [0] * len(betas)
    with scores.reading("effective numbers") as (files, bar):
        for rows_scores in scores.of_chunks(scores.targets, files):
            for place, beta in enumerate(betas):
                kept[place] += int(
                    select_rows(rows_scores, KeepRule(beta=beta, dtype="bfloat16")).kept.sum()
                )
            bar.update(rows_scores.numel())
    return kept


def curve_points(
    betas: Sequence[float], kept: Sequence[int], weights: int, parameters: int
) -> list[CurvePoint]:
    """The curve of the sparsity.

    Args:
        betas, kept: of `count_at_betas`.
        weights: number of weights of all targets.
        parameters: number of parameters of the model.
    """
    return [
        CurvePoint(
            beta=beta,
            kept=count,
            sparsity_of_targets=1 - count / weights,
            sparsity_of_all_parameters=(weights - count) / parameters,
        )
        for beta, count in zip(betas, kept, strict=True)
    ]


# Counts from sizes.


def _group_sizes(target: Target, group: Group) -> NDArray[np.int64]:
    """The number of weights in each group of a target."""
    matrix = target.matrix
    return (
        np.full(matrix.rows, matrix.columns, np.int64)
        if group == "row"
        else np.array([matrix.numel])
    )


def _spread(
    targets: Sequence[Target], group: Group, spans: Sequence[tuple[int, int]]
) -> KeptCounts:
    """Removed weights spread evenly over the groups of consecutive spans of all target weights.

    Args:
        spans: (removed, total) of each span; a span consists of whole targets.
    """
    kept: dict[str, NDArray[np.int64]] = {}
    rest = iter(spans)
    before = 0
    removed = 0
    total = 0
    try:
        if group == "all":
            ((removed, total),) = spans
            return KeptCounts(group, None, {"": spread_counts(np.array([total]), removed, total)})
        for target in targets:
            if before == total:
                removed, total = next(rest)
                before = 0
            kept[target.name] = spread_counts(_group_sizes(target, group), removed, total, before)
            before += target.matrix.numel
    except ValueError as error:
        raise UserError(f"--match: {error}.") from error
    return KeptCounts(group, None, kept)


# The weights to prune: the layers of a model that a recipe chooses, and the share of the model
# that they cover.


@dataclass(frozen=True)
class Chosen:
    """A model's targets.

    Attributes:
        architecture: of the model.
        targets: in the model's order.
        coverage: the share of the model that they cover.
    """

    architecture: Architecture
    targets: list[Target]
    coverage: TargetsRecord

    @property
    def checkpoint(self) -> Checkpoint:
        """The model's files, or its weights in memory."""
        return self.architecture.checkpoint

    def layers_to_calibrate(self) -> list[Layer]:
        """All linear layers, so that the activations can be reused for other targets, and all
        targets.
        """
        everything = self.architecture.select("all-linear") + self.targets
        return list(dict.fromkeys(target.layer for target in everything))


def stored_bytes(targets: Sequence[Target]) -> int:
    """Size of some targets, as they are stored."""
    return sum(target.matrix.numel * target.matrix.itemsize for target in targets)


def choose_targets(architecture: Architecture, recipe: Recipe) -> Chosen:
    """The layers of a model that a recipe chooses. Nothing is written, and the model is not run.

    Raises:
        UserError: no layer matches, or most of the model cannot be pruned.
    """
    targets = architecture.targets_of(recipe.targets)
    coverage = architecture.coverage(targets, recipe.targets.tower)
    check_coverage(coverage, recipe.targets.layers, recipe.targets.allow_partial)
    no_inputs = next((target for target in targets if target.layer.purpose == "embedding"), None)
    if recipe.needs_activations and no_inputs is not None:
        raise UserError(
            f"{no_inputs.name}: an embedding has no input activations; use a magnitude method."
        )
    return Chosen(architecture, targets, coverage)


def scores_of(chosen: Chosen, recipe: Recipe, config: Mapping[str, Any]) -> Scores:
    """The scores of the targets by a recipe, which gets the numbers of the run that it matches.

    Args:
        config: of the model.

    Raises:
        UserError: the recipe does not fit the targets.
    """
    targets = chosen.targets
    recipe = match(recipe, targets)
    check_groups(recipe, targets)
    if recipe.update is not None:
        check_update(targets, recipe.update_flag, recipe.without_update)
        check_blocks_separable(config, recipe.update_flag, recipe.without_update)
    return Scores(chosen.checkpoint, targets, recipe)


def targets_of_folder(
    folder: Path,
    name: str,
    recipe: Recipe,
    trust_remote_code: bool = False,
    calibrates: bool = True,
) -> Chosen:
    """The targets of a model in a folder, which a prune can read and a calibration can reach.

    Args:
        name: the user's name for the model.
        trust_remote_code: run code from the model's folder.
        calibrates: the norms that the recipe needs come from a text, not from a file.

    Raises:
        UserError: the folder is no checkpoint; the model is quantised (not to FP8, whose weights
            are removed as stored); no layer matches, or most of the model cannot be pruned.
    """
    checkpoint = Checkpoint(folder)
    settings = checkpoint.config.get("quantization_config")
    method = settings.get("quant_method") if isinstance(settings, dict) else None
    if settings is not None and method != "fp8":
        named = f" ({quotable(method)})" if isinstance(method, str) else ""
        raise UserError(
            f"{name}: it is already quantised{named}. Prune the original model and "
            "quantise the result."
        )
    names_suffice = not recipe.needs_activations  # no forward pass needs the model's class
    architecture = Architecture.of_checkpoint(
        checkpoint, recipe.targets.blocks, trust_remote_code, names_suffice
    )
    chosen = choose_targets(architecture, recipe)
    if recipe.needs_activations and calibrates:
        check_calibrated([target.layer for target in chosen.targets])
    return chosen


# A size in place of a sparsity: at most so many parameters, or so many bytes of weights.


_HEADER = 320  # bytes of a packed tensor's entries in headers, at most
_LEAST = 1000  # without a unit
_UNITS = {
    "": 1,
    "K": 1e3,
    "M": 1e6,
    "G": 1e9,
    "T": 1e12,
    "KI": 2.0**10,
    "MI": 2.0**20,
    "GI": 2.0**30,
    "TI": 2.0**40,
}


@dataclass(frozen=True)
class Budget:
    """What a pruned model may have.

    Attributes:
        flag: the option and its value, as the user wrote it.
        parameters: number of parameters; of weights, those that are not zero.
        bytes: of the tensors that the model uses, in the dtypes of the checkpoint; of weights, of
            all tensors in the packed format. One of both is None.
    """

    flag: str
    parameters: float | None
    bytes: float | None

    @classmethod
    def of(cls, parameters: float | str | None, memory: float | str | None) -> "Budget | None":
        """The budget of --parameters and --memory; None if neither is given. UserError if it is
        not a size.
        """
        if parameters is not None and memory is not None:
            raise UserError("--parameters and --memory both set the size; give only one.")
        if parameters is not None:
            return cls(
                f"--parameters {parameters}",
                _number(str(parameters), r"[BM]?", "--parameters", "6e9 or 6B"),
                None,
            )
        if memory is not None:
            return cls(
                f"--memory {memory}",
                None,
                _number(str(memory), r"[KMGT]I?B|B|", "--memory", "24GB or 20GiB"),
            )
        return None

    def fits(self, parameters: int, size: int) -> bool:
        """Whether a model of so many parameters and bytes keeps to the budget."""
        return (
            parameters <= self.parameters
            if self.parameters is not None
            else size <= (self.bytes or 0)
        )

    def least(self, steps: int, size_at: Callable[[int], tuple[int, int]]) -> int:
        """The fewest of `steps` steps of removal after which the model keeps to the budget.

        Args:
            steps: the most that can go.
            size_at: parameters and bytes after so many steps.

        Raises:
            UserError: the dense model keeps to it, or no smaller one does.
        """
        if self.fits(*size_at(0)):
            raise UserError(
                f"{self.flag}: the dense model has {self._words(size_at(0))}, which is "
                "no more. Leave it out."
            )
        if not self.fits(*size_at(steps)):
            raise UserError(
                f"{self.flag}: what cannot be removed has {self._words(size_at(steps))}. Give "
                "more, or prune other parts too."
            )
        # the first is too large, the last fits
        low = 0
        high = steps
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self.fits(*size_at(middle)) else (middle, high)
        return high

    def _words(self, size: tuple[int, int]) -> str:
        if self.parameters is not None:
            return f"{size[0]:,} parameters"
        return f"{format_bytes(size[1])} ({size[1]:,} bytes)"


def _number(text: str, unit: str, flag: str, example: str) -> float:
    size = re.fullmatch(rf"([0-9.]+(?:e[0-9]+)?) ?({unit})", text.strip(), re.IGNORECASE)
    try:
        value = float(size[1])  # type: ignore[index]
        units = size[2].upper()  # type: ignore[index]
    except (TypeError, ValueError):
        hint = f" A share is --sparsity {text.strip()}." if text.strip().endswith("%") else ""
        raise UserError(f"{flag} {text!r} is not a size such as {example}.{hint}") from None
    if value == 0:
        raise UserError(f"{flag} {text}: give more than 0, such as {example}.")
    if not units and value < _LEAST:
        unit = "B" if flag == "--parameters" else "GB"
        raise UserError(f"{flag} {text} has no unit. Did you mean {text.strip()}{unit}?")
    return value * (
        1e9 if units == "B" and flag == "--parameters" else _UNITS[units.removesuffix("B")]
    )


def with_budget(
    recipe: Recipe, budget: Budget, architecture: Architecture, targets: list[Target]
) -> Recipe:
    """The recipe with the lowest sparsity whose weights keep to a budget: parameters that are not
    zero, or packed bytes.

    Raises:
        UserError: the dense model keeps to it, or no sparsity does.
    """
    rest = architecture.parameters - sum(target.matrix.numel for target in targets)
    stored = architecture.checkpoint.tensors.values()
    others = sum(tensor.end - tensor.start + _HEADER for tensor in stored)
    others -= sum(target.matrix.numel * word_bytes(target.matrix.stored) for target in targets)
    adaptive = recipe.adaptive
    steps = 1_000_000

    def size_at(step: int) -> tuple[int, int]:
        kept = 0
        size = 0
        for target in targets:
            matrix = target.matrix
            sparsity = step / steps
            if adaptive:
                zeros = floor_count(sparsity * matrix.numel)
            else:
                zeros = matrix.rows * floor_count(sparsity * matrix.columns)
            kept += matrix.numel - zeros
            size += packed_bytes(matrix.numel, word_bytes(matrix.stored), zeros)
        return rest + kept, others + size

    return recipe.at(budget.least(steps - 1, size_at) / steps)


# Rows that keep next to nothing, because their effective number is that of a few inputs that
# dominate all others.


LEAST = 0.05  # of a row's weights; below, it starves
_LAYERS = 3  # that are named


class _Starved(NamedTuple):
    """The starving rows of a target, and the input that carries most of their scores, with its
    mean share of these.
    """

    name: str
    rows: int
    input: int
    share: float


def starving_rows(pruner: Pruner, outcomes: Outcomes) -> str | None:
    """A sentence on rows that keep less than 5 % of their weights by an effective number, or None.

    It says which inputs carry their scores, and what other counts would remove. Order 1, exp of the
    entropy of the shares of the scores, is a larger effective number than one over the sum of their
    squares, the more so the more a few dominate. The magnitudes know no inputs.

    Args:
        pruner: reads the weights of layers with such rows again, and those of all layers for each
            other count.
        outcomes: of the pruner.
    """
    counts = pruner.scores.recipe.counts
    if not isinstance(counts, Effective) or pruner.scores.recipe.group != "row":
        return None
    starved = [outcome for outcome in outcomes.of_targets if bool(_starves(outcome).any())]
    if not starved:
        return None
    starved.sort(key=lambda outcome: -int(_starves(outcome).sum()))
    number = sum(int(_starves(outcome).sum()) for outcome in starved)
    total = sum(outcome.kept.size for outcome in outcomes.of_targets)
    places = [_place(pruner, outcome) for outcome in starved[:_LAYERS]]
    examples = "; ".join(
        f"in {layer.name}, input {layer.input} has {percent_cell(layer.share)} % of the scores"
        for layer in places
    )
    return (
        f"{number:,} of {total:,} rows keep less than {100 * LEAST:g} % of their weights, in "
        f"{len(starved)} of {len(outcomes.of_targets)} matrices: a few inputs carry their scores "
        f"({examples}). {_remedy(pruner, outcomes, counts)}"
    )


def _remedy(pruner: Pruner, outcomes: Outcomes, counts: Effective) -> str:
    """What other counts would do."""
    recipe = pruner.scores.recipe
    others: dict[str, Effective] = {}
    # Of an order above 1, the effective number is below that of order 1. The arithmetic of bfloat16
    # is for order 2.
    if counts.order > 1 and counts.neff_dtype != "bfloat16":
        others["--order 1"] = replace(counts, order=1.0)
    if recipe.score.criterion is not MAGNITUDE and not recipe.counts_by_magnitude:
        others["--count-by magnitude"] = replace(counts, count_by="magnitude", neff_dtype="float64")
    if counts.sparsity is not None:
        flags = list(others) or ["--method wanda"]
        return f"{flags[0]} removes as much, more evenly."
    remedies = []
    for flag, other_counts in others.items():
        changed = recipe.but(counts=other_counts)
        scores = Scores(pruner.checkpoint, pruner.targets, changed, pruner.scores.inputs)
        (other,) = measure_targets([Pruner(scores, counts_of(scores))])
        remedies.append(f"{flag} would remove {percent_cell(_removed(other))} %")
    if not remedies:
        return "--method wanda --sparsity 0.5 removes the same share of every row."
    return f"Instead of {percent_cell(_removed(outcomes))} %, {', and '.join(remedies)}."


def _removed(outcomes: Outcomes) -> float:
    """The share of the weights that are removed."""
    weights = sum(outcome.target.matrix.numel for outcome in outcomes.of_targets)
    return 1 - sum(int(outcome.kept.sum()) for outcome in outcomes.of_targets) / weights


def _starves(outcome: Outcome) -> NDArray[np.bool_]:
    """Which rows of a target starve: bool, shape (rows,). A row of at most 20 weights does not, for
    one of them always stays, nor does one without scores.
    """
    columns = outcome.target.matrix.columns
    return (outcome.kept < LEAST * columns) & (outcome.mass > 0)


def _place(pruner: Pruner, outcome: Outcome) -> _Starved:
    """Where the scores of a target's starving rows are."""
    import torch

    target = outcome.target
    rows = torch.from_numpy(_starves(outcome))
    shares = torch.zeros(target.matrix.columns, dtype=torch.float64)
    first = 0
    with pruner.checkpoint.open_files() as files:
        for chunk in pruner.scores.of_chunks([target], files):
            scores = chunk[rows[first : first + len(chunk)].to(chunk.device)].abs().double()
            shares += (scores / scores.sum(1, keepdim=True)).sum(0).cpu()
            first += len(chunk)
    place = int(shares.argmax())
    number = int(rows.sum())
    return _Starved(target.name, number, place, float(shares[place]) / number)
