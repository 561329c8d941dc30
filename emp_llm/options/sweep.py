"""The options of a sweep, and the points that they ask for."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_args

from emp_llm.common.errors import UserError
from emp_llm.options.base import Opt, Options
from emp_llm.options.lists import parse_numbers, parse_words
from emp_llm.options.output import MaskDevice
from emp_llm.options.recipe import MatchBy, Recipe, check_method, parse_pattern

BETAS = "0.5,0.75,1,1.25,1.5,2"
METHODS = "emp-wanda,wanda,emp-magnitude,magnitude"


@dataclass(frozen=True, kw_only=True)
class SweepOptions(Options):
    """The points of a sweep, and its folder."""

    output: Annotated[Path | None, Opt("Folder of the sweep; default: MODEL-sweep in the current folder.")] = None
    overwrite: Annotated[bool, Opt("Discard a sweep with other options at the output.")] = False
    methods: Annotated[str | None, Opt(f"Methods, separated by commas; default: {METHODS} and those of your criterion.")] = None
    betas: Annotated[str | None, Opt(f"Betas of the emp methods; default: {BETAS}.")] = None
    orders: Annotated[str | None, Opt("Hill orders of the emp methods; default: 2.")] = None
    sparsities: Annotated[str | None, Opt("Sparsities of the other methods; default: 0.5.")] = None
    emp_sparsities: Annotated[str | None, Opt("Sparsities of the emp methods, in place of betas; their beta is found.")] = None
    patterns: Annotated[str | None, Opt("N:M patterns of the other methods.")] = None
    matched_baselines: Annotated[
        bool, Opt("Add two uniform baselines to each emp point: the same total, and the same count in every matrix.")
    ] = False
    mask_device: Annotated[MaskDevice, Opt("Device that computes the masks: cpu or cuda. They are the same on both.")] = "cpu"
    keep: Annotated[bool, Opt("Also write the checkpoint of every point.")] = False
    dry_run: Annotated[bool, Opt("Print the plan of the sweep, and write nothing.")] = False


@dataclass(frozen=True)
class SweepPoint:
    """A point of a sweep.

    Attributes:
        name: of its folder.
        recipe: of the point.
        baseline_of: for a baseline, the name of the EMP point that keeps as many weights; `recipe.match` too.
    """

    name: str
    recipe: Recipe
    baseline_of: str | None = None


def plan_points(how: SweepOptions, shared: Recipe) -> list[SweepPoint]:
    """The points that the options ask for; baselines follow their EMP point.

    Args:
        shared: the fields that the points share, such as the targets.

    Raises:
        UserError: an option is not a list of its kind, or applies to none of the methods; or a recipe conflicts.
    """
    own = f",emp-{shared.name},{shared.name}" if shared.criterion is not None or shared.scores is not None else ""
    methods = parse_words(f"{METHODS}{own}" if how.methods is None else how.methods, "--methods")
    for method in methods:
        check_method(shared.with_method(method), "--methods:")
    adaptive = [method for method in methods if method.startswith("emp-")]
    for_emp = {"--betas": how.betas, "--orders": how.orders, "--matched-baselines": how.matched_baselines or None}
    _check_use(for_emp | {"--emp-sparsities": how.emp_sparsities}, adaptive, "emp methods")
    fixed = [method for method in methods if method not in adaptive]
    _check_use({"--sparsities": how.sparsities, "--patterns": how.patterns}, fixed, "methods without emp-")
    if shared.group == "all" and how.matched_baselines:
        raise UserError("--matched-baselines fixes the count of every matrix; use --group row or matrix, not all.")
    points: list[SweepPoint] = []
    for method in methods:
        if method in adaptive:
            for order in parse_numbers("2" if how.orders is None else how.orders, "--orders"):
                name = method if order == 2 else f"{method}-order-{_short(order)}"
                betas = BETAS if how.betas is None and how.emp_sparsities is None else how.betas
                asked: list[tuple[str, dict[str, float]]] = [
                    (f"{name}-beta-{_short(beta)}", {"beta": beta})
                    for beta in (parse_numbers(betas, "--betas") if betas is not None else [])
                ]
                asked += [
                    (f"{name}-{_short(sparsity)}", {"sparsity": sparsity})
                    for sparsity in (
                        parse_numbers(how.emp_sparsities, "--emp-sparsities") if how.emp_sparsities is not None else []
                    )
                ]
                for point_name, value in asked:
                    points.append(SweepPoint(point_name, shared.with_method(method, order=order, **value)))
                    points += _baselines(points[-1]) if how.matched_baselines else []
            continue
        if how.sparsities is not None or how.patterns is None:
            for sparsity in parse_numbers("0.5" if how.sparsities is None else how.sparsities, "--sparsities"):
                points.append(SweepPoint(f"{method}-{_short(sparsity)}", shared.with_method(method, sparsity=sparsity)))
        for pattern in parse_words(how.patterns, "--patterns") if how.patterns is not None else []:
            recipe = shared.with_method(method, pattern=pattern, shares=None, owl_lambda=None, owl_m=None)
            points.append(SweepPoint(f"{method}-{_pattern_name(pattern)}", recipe))
    for point in points:
        if point.baseline_of is None:
            point.recipe.check()
    _check_shared(points, shared)
    return list({point.name: point for point in points}.values())


def _baselines(point: SweepPoint) -> list[SweepPoint]:
    """The same criterion with uniform rows, which keeps as many weights in total, or in every matrix."""
    found = []
    for by in get_args(MatchBy):
        name = f"{point.recipe.name}-{by}-as-{point.name}"
        recipe = point.recipe.with_method(point.recipe.name, match=point.name, match_by=by)
        found.append(SweepPoint(name, recipe, point.name))
    return found


def _check_shared(points: list[SweepPoint], shared: Recipe) -> None:
    """Raise UserError for a method that moves kept weights, or for options of the scores that no point uses."""
    moving = next((point.recipe.method for point in points if point.recipe.updates), None)
    if moving is not None:
        raise UserError(f"--methods: a sweep only sets weights to zero; run prune --method {moving} instead.")
    fixed = "methods with a fixed sparsity and activations"
    for name, needed in (("score", "methods that need activations"), ("count_by", "emp methods"), ("shares", fixed)):
        asked = getattr(shared, name)
        if asked is not None and not any(getattr(point.recipe, name) == asked for point in points):
            raise UserError(f"--{name.replace('_', '-')} {asked} is for {needed}, and --methods has none that it changes.")


def _check_use(options: dict[str, Any], methods: list[str], names: str) -> None:
    """Raise UserError for an option that applies to none of the methods."""
    for flag, value in options.items():
        if value is not None and not methods:
            raise UserError(f"{flag} is for {names}, and --methods has none; leave {flag} out or add one.")


def _pattern_name(pattern: str) -> str:
    try:
        return "{}of{}".format(*parse_pattern(pattern))
    except ValueError as error:
        raise UserError(f"--patterns: {error}.") from error


def _short(number: float) -> str:
    """A number as part of a file name; distinct numbers have distinct names."""
    text = f"{number:g}" if float(f"{number:g}") == number else repr(number)
    return re.sub(r"[^\w.+-]", "", text)
