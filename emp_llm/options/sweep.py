"""The options of a sweep, and the points that they ask for."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, get_args

from emp_llm.common.errors import UserError
from emp_llm.options.base import Opt, parse_list, parse_numbers
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
        name: of its folder.
        recipe: of the point.
        baseline_of: for a baseline, the name of the EMP point that keeps as many weights;
            `recipe.match` too.
    """

    name: str
    recipe: RecipeOptions
    baseline_of: str | None = None


def plan_points(how: SweepOptions, shared: RecipeOptions) -> list[SweepPoint]:
    """The points that the options ask for; baselines follow their EMP point.

    Args:
        shared: the fields that the points share, such as the targets.

    Raises:
        UserError: an option is not a list of its kind, or applies to none of the methods; or a
            recipe conflicts.
    """
    own = (
        f",emp-{shared.name},{shared.name}"
        if shared.criterion is not None or shared.scores is not None
        else ""
    )
    methods = parse_list(how.methods or f"{METHODS}{own}", "--methods")
    if "best" in methods:
        raise UserError(
            "--methods: best is for prune; plan --methods emp-admm --prune-options "
            "'--refit --heal'."
        )
    for method in methods:
        check_method(shared.with_method(method), "--methods:")
    adaptive = [method for method in methods if method.startswith("emp-")]
    for names, found, kind in (
        (("betas", "orders", "matched_baselines", "emp_sparsities"), adaptive, "emp methods"),
        (
            ("sparsities", "patterns"),
            [method for method in methods if method not in adaptive],
            "methods without emp-",
        ),
    ):
        for flag in [f"--{name.replace('_', '-')}" for name in names if getattr(how, name)]:
            if not found:
                raise UserError(
                    f"{flag} is for {kind}, and --methods has none; leave {flag} out or add one."
                )
    if shared.group == "all" and how.matched_baselines:
        raise UserError(
            "--matched-baselines fixes the count of every matrix; use --group row or "
            "matrix, not all."
        )
    betas = how.betas or (None if how.emp_sparsities else BETAS)
    sparsities = how.sparsities or (None if how.patterns else "0.5")
    points: dict[str, SweepPoint] = {}

    def add(name: str, recipe: RecipeOptions) -> None:
        recipe.check()
        points[name] = SweepPoint(name, recipe)
        if recipe.adaptive and how.matched_baselines:  # the same criterion with uniform rows
            for by in get_args(MatchBy):
                baseline = f"{recipe.name}-{by}-as-{name}"
                points[baseline] = SweepPoint(
                    baseline, recipe.with_method(recipe.name, match=name, match_by=by), name
                )

    for method in methods:
        if method in adaptive:
            for order in parse_numbers(how.orders or "2", "--orders"):
                name = method if order == 2 else f"{method}-order-{_short(order)}"
                for beta in parse_numbers(betas, "--betas") if betas else []:
                    add(
                        f"{name}-beta-{_short(beta)}",
                        shared.with_method(method, order=order, beta=beta),
                    )
                for sparsity in (
                    parse_numbers(how.emp_sparsities, "--emp-sparsities")
                    if how.emp_sparsities
                    else []
                ):
                    add(
                        f"{name}-{_short(sparsity)}",
                        shared.with_method(method, order=order, sparsity=sparsity),
                    )
            continue
        for sparsity in parse_numbers(sparsities, "--sparsities") if sparsities else []:
            add(f"{method}-{_short(sparsity)}", shared.with_method(method, sparsity=sparsity))
        for pattern in parse_list(how.patterns, "--patterns") if how.patterns else []:
            recipe = shared.with_method(
                method, pattern=pattern, shares=None, owl_lambda=None, owl_m=None
            )
            add(f"{method}-{pattern.replace(':', 'of')}", recipe)
    _check_shared(list(points.values()), shared)
    return list(points.values())


def _check_shared(points: list[SweepPoint], shared: RecipeOptions) -> None:
    """Raise UserError for options of the scores that no point uses."""
    fixed = "methods with a fixed sparsity and activations"
    for name, needed in (
        ("score", "methods that need activations"),
        ("count_by", "emp methods"),
        ("shares", fixed),
    ):
        asked = getattr(shared, name)
        if asked is not None and not any(getattr(point.recipe, name) == asked for point in points):
            raise UserError(
                f"--{name.replace('_', '-')} {asked} is for {needed}, and --methods "
                "has none that it changes."
            )


def _short(number: float) -> str:
    """A number as part of a file name; distinct numbers have distinct names."""
    text = f"{number:g}" if float(f"{number:g}") == number else repr(number)
    return re.sub(r"[^\w.+-]", "", text)
