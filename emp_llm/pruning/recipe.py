"""From a recipe to a scheme: the budget that the options define, and their record for reports."""

import re
from collections.abc import Mapping
from pathlib import Path

from emp_llm.common.errors import UserError
from emp_llm.common.file_names import REPORT_NAME
from emp_llm.options.criterion import criterion_origin
from emp_llm.options.recipe import Recipe
from emp_llm.records.base import read_record
from emp_llm.records.run_report import RunReport
from emp_llm.records.source import CriterionRecord, RecipeRecord, RefitRecord
from emp_llm.selection.block_shares import OwlBudget
from emp_llm.selection.budgets import (
    Budget,
    EffectiveBudget,
    PartsBudget,
    PatternBudget,
    RatioBudget,
    RequestedBudget,
    TotalBudget,
)
from emp_llm.selection.criteria import CRITERIA
from emp_llm.selection.scheme import Scheme
from emp_llm.storage.json_files import INDEX_LIMIT

REPORT_LIMIT = 4 * INDEX_LIMIT  # mixtures have tens of thousands of matrices, each with an entry in the report


def check_ranges(recipe: Recipe) -> None:
    """Raise UserError for numbers out of range, or if --match names no finished run. Needs no model."""
    if recipe.match is None:
        scheme_of(recipe, {"": 1})
    else:
        read_report(recipe.match)


def scheme_of(recipe: Recipe, sizes: Mapping[str, int]) -> Scheme:
    """The scheme of a recipe.

    Args:
        sizes: name -> number of weights of each target, in their order.

    Raises:
        UserError: an option is out of range, or the run to match does not fit.
    """
    try:
        return Scheme(
            recipe.criterion_name,
            budget_of(recipe, sizes),
            recipe.group,
            recipe.score_map,
            recipe.relative,
            recipe.counts_by,
        )
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"--{error}.") from error


def recipe_record(recipe: Recipe, scheme: Scheme | None = None) -> RecipeRecord:
    """The options of a recipe with defaults filled in.

    Args:
        scheme: of the run; it has the beta of a requested sparsity, if that is known.
    """
    record = RecipeRecord(
        method=recipe.method,
        group=recipe.group,
        targets=recipe.targets,
        ignore=recipe.ignore,
        criterion=criterion_record(recipe),
        blocks=recipe.blocks,
    )
    if recipe.refit:
        record.refit = RefitRecord(weighting=recipe.weighting, target=recipe.restored, damping=recipe.refit_damping)
    record.tower = None if recipe.tower == "language" else recipe.tower
    record.score = "relative" if recipe.relative else None
    record.count_by = "magnitude" if recipe.counts_by == "magnitude" else None
    if recipe.needs_activations:
        record.min_expert_tokens = recipe.min_expert_tokens
    if recipe.adaptive:
        record.beta = 1.0 if recipe.beta is None else float(recipe.beta)
        if recipe.sparsity is not None:
            record.sparsity = float(recipe.sparsity)
            record.beta = scheme.budget.beta if scheme is not None and isinstance(scheme.budget, EffectiveBudget) else None
        record.order = 2.0 if recipe.order is None else float(recipe.order)
        record.neff_dtype = recipe.neff_dtype or "float64"
        return record
    if recipe.shares == "owl":
        record.shares = "owl"
        record.owl_lambda = 0.08 if recipe.owl_lambda is None else float(recipe.owl_lambda)
        record.owl_m = 5.0 if recipe.owl_m is None else float(recipe.owl_m)
    record.pattern = recipe.pattern
    record.match = None if recipe.match is None else str(recipe.match)
    record.match_by = None if recipe.match is None else recipe.match_by or "total"
    fixed = recipe.pattern is None and recipe.match is None
    record.sparsity = (0.5 if recipe.sparsity is None else float(recipe.sparsity)) if fixed else None
    return record


def criterion_record(recipe: Recipe) -> CriterionRecord | None:
    """The user's own score; None for a built-in criterion."""
    if recipe.scores is not None:
        from emp_llm.pruning.scoring.own_scores import GivenScores

        digest = GivenScores(recipe.scores, []).digest
        name = recipe.scores.name if isinstance(recipe.scores, Path) else None
        return CriterionRecord(scores=name, digest=digest, score_map=recipe.score_map)
    if not CRITERIA[recipe.criterion_name].own:
        return None
    function, source = criterion_origin(recipe.criterion_name)
    return CriterionRecord(function=function, source=source, score_map=recipe.score_map)


def parse_pattern(text: str) -> tuple[int, int]:
    """ "2:4" as (2, 4); ValueError if the text is not of this form."""
    numbers = re.fullmatch(r"([0-9]+):([0-9]+)", text)
    if numbers is None:
        raise ValueError(f"pattern must be N:M, such as 2:4, got {text!r}")
    return int(numbers[1]), int(numbers[2])


def read_report(run: Path) -> RunReport:
    """The report in a run's output folder; UserError if it is missing or invalid."""
    run = Path(run)
    if not (run / REPORT_NAME).is_file():
        raise UserError(f"{run}: no {REPORT_NAME} in it; give the --output folder of a finished prune.")
    return read_record(run / REPORT_NAME, RunReport, REPORT_LIMIT)


def budget_of(recipe: Recipe, sizes: Mapping[str, int]) -> Budget:
    """The budget of a recipe; ValueError if an option is out of range. `sizes` as for `scheme_of`."""
    if recipe.adaptive:
        order = 2.0 if recipe.order is None else recipe.order
        if recipe.sparsity is not None:
            return RequestedBudget(recipe.sparsity, order)
        return EffectiveBudget(1.0 if recipe.beta is None else recipe.beta, order, recipe.neff_dtype or "float64")
    if recipe.pattern is not None:
        return PatternBudget(*parse_pattern(recipe.pattern))
    if recipe.match is not None:
        return _matched(recipe, recipe.match, sizes)
    sparsity = 0.5 if recipe.sparsity is None else recipe.sparsity
    if recipe.shares == "owl":
        spread = 0.08 if recipe.owl_lambda is None else recipe.owl_lambda
        return OwlBudget(sparsity, spread, 5.0 if recipe.owl_m is None else recipe.owl_m)
    return RatioBudget(sparsity)


def _matched(recipe: Recipe, run: Path, sizes: Mapping[str, int]) -> Budget:
    """The budget that removes as many weights as an earlier run, by its report."""
    targets, total = read_report(run).targets, sum(sizes.values())
    if targets.weights is None or targets.kept is None:
        raise UserError(f"{run}: its {REPORT_NAME} does not say how many weights were kept.")
    if targets.weights != total:
        raise UserError(
            f"{run}: that run had {targets.weights} target weights, this one has {total}; match a run of the same model and "
            "the same --targets."
        )
    if recipe.match_by != "matrix":
        return TotalBudget(targets.weights - targets.kept, total)
    removed = _removed_by_matrix(run, sizes)
    return PartsBudget(tuple(removed), tuple(sizes.values()))


def _removed_by_matrix(run: Path, sizes: Mapping[str, int]) -> list[int]:
    """The number of weights of each matrix that an earlier run removed."""
    matrices, removed = read_report(run).matrices, []
    for name, size in sizes.items():
        entry = matrices.get(name)
        if entry is None:
            raise UserError(f"{run}: its {REPORT_NAME} does not say how many weights of {name} were kept.")
        weights = entry.rows * entry.columns
        if weights != size:
            raise UserError(
                f"{run}: {name} had {weights} weights in that run and has {size} here; match a run of the same model."
            )
        removed.append(size - entry.kept)
    return removed
