"""The options of a sweep, and the points that they ask for."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, get_args

from emp_llm.common.errors import UserError
from emp_llm.options.base import Opt, flag_of, parse_list, parse_numbers
from emp_llm.options.model import MaskDevice
from emp_llm.options.recipe import MatchBy
from emp_llm.options.recipe_options import RecipeOptions, check_method

BETAS = "0.5,0.75,1,1.25,1.5,2"
METHODS = "emp-wanda,wanda,emp-magnitude,magnitude"


@dataclass(frozen=True, kw_only=True)
class PointOptions:
    """The points of a sweep, or the recipes of a study."""

    methods: Annotated[str | None, Opt(f"Methods, separated by commas; default: {METHODS}.")] = None
    betas: Annotated[str | None, Opt(f"Betas of the emp methods; default: {BETAS}.")] = None
    orders: Annotated[str | None, Opt("Hill orders of the emp methods; default: 2.")] = None
    sparsities: Annotated[str | None, Opt("Sparsities of the other methods; default: 0.5.")] = None
    emp_sparsities: Annotated[
        str | None, Opt("Sparsities of the emp methods, in place of betas; their beta is found.")
    ] = None
    patterns: Annotated[str | None, Opt("N:M patterns of the other methods.")] = None


@dataclass(frozen=True, kw_only=True)
class SweepOptions(PointOptions):
    """The points of a sweep, and its folder."""

    methods: Annotated[
        str | None,
        Opt(f"Methods, separated by commas; default: {METHODS} and those of your criterion."),
    ] = None
    matched_baselines: Annotated[
        bool,
        Opt(
            "Add two uniform baselines to each emp point: the same total, and the same count "
            "in every matrix."
        ),
    ] = False
    mask_device: MaskDevice = "cpu"
    output: Annotated[
        Path | None, Opt("Folder of the sweep; default: MODEL-sweep in the current folder.")
    ] = None
    overwrite: Annotated[bool, Opt("Discard a sweep with other options at the output.")] = False
    keep: Annotated[bool, Opt("Also write the checkpoint of every point.")] = False
    dry_run: Annotated[bool, Opt("Print the plan of the sweep, and write nothing.")] = False


@dataclass(frozen=True)
class SweepPoint:
    """A point of a sweep.

    Attributes:
        name: the name of its folder.
        recipe: what is pruned.
        baseline_of: of a baseline: the name of the EMP point that keeps as many weights;
            `recipe.match` too.
    """

    name: str
    recipe: RecipeOptions
    baseline_of: str | None = None


def plan_points(options: SweepOptions, shared: RecipeOptions) -> list[SweepPoint]:
    """The points that the options ask for; baselines follow their EMP point.

    Args:
        options: methods and numbers, separated by commas.
        shared: the fields that the points share, such as the targets.

    Raises:
        UserError: an option is not a list of numbers or names, or applies to none of the methods;
            or a recipe conflicts.
    """
    methods = _methods(options, shared)
    adaptive = [method for method in methods if method.startswith("emp-")]
    uniform = [method for method in methods if method not in adaptive]
    emp_options = ("betas", "orders", "matched_baselines", "emp_sparsities")
    _check_used(options, emp_options, adaptive, "emp methods")
    _check_used(options, ("sparsities", "patterns"), uniform, "methods without emp-")
    if shared.group == "all" and options.matched_baselines:
        raise UserError(
            "--matched-baselines fixes the count of every matrix; use --group row or "
            "matrix, not all."
        )
    orders = parse_numbers(options.orders or "2", "--orders")
    betas = _option_numbers(options.betas, "--betas", None if options.emp_sparsities else BETAS)
    emp_sparsities = _option_numbers(options.emp_sparsities, "--emp-sparsities")
    sparsities = _option_numbers(
        options.sparsities, "--sparsities", None if options.patterns else "0.5"
    )
    patterns = parse_list(options.patterns, "--patterns") if options.patterns else []
    points: dict[str, SweepPoint] = {}

    def add(name: str, recipe: RecipeOptions) -> None:
        recipe.check()
        points[name] = SweepPoint(name, recipe)
        if recipe.adaptive and options.matched_baselines:  # the same criterion with uniform rows
            for by in get_args(MatchBy):
                baseline = f"{recipe.name}-{by}-as-{name}"
                points[baseline] = SweepPoint(
                    baseline, recipe.with_method(recipe.name, match=name, match_by=by), name
                )

    for method in methods:
        if method in adaptive:
            for order in orders:
                name = method if order == 2 else f"{method}-order-{_number_in_name(order)}"
                for beta in betas:
                    recipe = shared.with_method(method, order=order, beta=beta)
                    add(f"{name}-beta-{_number_in_name(beta)}", recipe)
                for sparsity in emp_sparsities:
                    recipe = shared.with_method(method, order=order, sparsity=sparsity)
                    add(f"{name}-{_number_in_name(sparsity)}", recipe)
            continue
        for sparsity in sparsities:
            add(
                f"{method}-{_number_in_name(sparsity)}",
                shared.with_method(method, sparsity=sparsity),
            )
        for pattern in patterns:
            recipe = shared.with_method(method, pattern=pattern)
            add(f"{method}-{pattern.replace(':', 'of')}", recipe)
    _check_shared(list(points.values()), shared)
    return list(points.values())


def _methods(options: SweepOptions, shared: RecipeOptions) -> list[str]:
    """The methods of a sweep: the given ones, or all defaults and those of the user's criterion."""
    defaults = METHODS
    if shared.criterion is not None or shared.scores is not None:
        defaults += f",emp-{shared.name},{shared.name}"
    methods = parse_list(options.methods or defaults, "--methods")
    if "best" in methods:
        raise UserError(
            "--methods: best is for prune; plan --methods emp-admm --prune-options "
            "'--refit --heal'."
        )
    for method in methods:
        check_method(shared.with_method(method), "--methods:")
    return methods


def _option_numbers(text: str | None, flag: str, default: str | None = None) -> list[float]:
    """The numbers of an option, or of its default; empty without either."""
    text = text or default
    return parse_numbers(text, flag) if text else []


def _check_used(
    options: SweepOptions, names: tuple[str, ...], methods: list[str], described: str
) -> None:
    """Raise UserError for an option of methods that a sweep has none of."""
    for flag in [flag_of(name) for name in names if getattr(options, name)]:
        if not methods:
            raise UserError(
                f"{flag} is for {described}, and --methods has none; leave {flag} out or add one."
            )


def _check_shared(points: list[SweepPoint], shared: RecipeOptions) -> None:
    """Raise UserError for options of the scores that no point uses."""
    for name, needed in (
        ("score", "methods that need activations"),
        ("count_by", "emp methods"),
    ):
        asked = getattr(shared, name)
        if asked is not None and not any(getattr(point.recipe, name) == asked for point in points):
            raise UserError(
                f"{flag_of(name)} {asked} is for {needed}, and --methods has none that it changes."
            )


def _number_in_name(number: float) -> str:
    """A number as part of a file name; distinct numbers have distinct names."""
    text = f"{number:g}" if float(f"{number:g}") == number else repr(number)
    return re.sub(r"[^\w.+-]", "", text)
