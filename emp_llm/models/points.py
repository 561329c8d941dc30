"""The points of a sweep: every method at every beta, order and sparsity, and the uniform baselines of its EMP points."""

import math
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

from emp_llm.models.errors import UserError
from emp_llm.models.recipe import MatchBy, Method, Recipe, parse_pattern

BETAS = "0.5,0.75,1,1.25,1.5,2"


@dataclass(frozen=True)
class Point:
    """One recipe of a sweep.

    Attributes:
        name: of its folder.
        method: its criterion and whether it is adaptive.
        beta, order: of an adaptive one; None for others.
        sparsity, pattern: of one whose sparsity is fixed beforehand.
        baseline_of: name of the EMP point with as many weights left, for a baseline.
        match: as many left in all, or of every matrix; None for other points.
    """

    name: str
    method: Method
    beta: float | None = None
    order: float | None = None
    sparsity: float | None = None
    pattern: str | None = None
    baseline_of: str | None = None
    match: MatchBy | None = None

    def recipe(self, common: Recipe, folder: Path) -> Recipe:
        """What to ask of the selection.

        Args:
            common: the targets and whatever else the points share.
            folder: holds the folders of finished points by their names.
        """
        match = folder / self.baseline_of if self.baseline_of is not None else None
        own = {"beta": self.beta, "order": self.order, "sparsity": self.sparsity, "pattern": self.pattern}
        return replace(common, method=self.method, match=match, match_by=self.match, **own)  # type: ignore[arg-type]

    def record(self) -> dict[str, Any]:
        """For reports; "pattern" only where there is one."""
        keys = ("name", "method", "beta", "order", "sparsity", "baseline_of", "match")
        record = {key: getattr(self, key) for key in keys}
        return record | ({"pattern": self.pattern} if self.pattern is not None else {})


def plan_points(
    methods: str,
    betas: str | None = None,
    orders: str | None = None,
    sparsities: str | None = None,
    patterns: str | None = None,
    matched_baselines: bool = False,
) -> list[Point]:
    """The points that options ask for, each baseline behind its EMP point.

    Args:
        methods, betas, orders, sparsities, patterns: separated by commas. None: BETAS; 2; 0.5, unless there are patterns; none.
        matched_baselines: two for each EMP point, of the same criterion with uniform rows.

    Raises:
        UserError: something of it is no list of its kind, or goes with none of the methods.
    """
    chosen = [_method(name) for name in parse_words(methods, "--methods")]
    adaptive = [method for method in chosen if method.startswith("emp-")]
    fixed = [method for method in chosen if method not in adaptive]
    asked = {"--betas": betas, "--orders": orders, "--matched-baselines": matched_baselines or None}
    _check_use(asked, adaptive, "emp-wanda or emp-magnitude")
    _check_use({"--sparsities": sparsities, "--patterns": patterns}, fixed, "wanda or magnitude")
    points: list[Point] = []
    for method in chosen:
        if method in adaptive:
            for order in parse_numbers("2" if orders is None else orders, "--orders"):
                for beta in parse_numbers(BETAS if betas is None else betas, "--betas"):
                    between = "" if order == 2 else f"-order-{_short(order)}"
                    point = Point(f"{method}{between}-beta-{_short(beta)}", method, beta, order)
                    points += [point, *(_baselines(point) if matched_baselines else [])]
            continue
        if sparsities is not None or patterns is None:
            for sparsity in parse_numbers("0.5" if sparsities is None else sparsities, "--sparsities"):
                points.append(Point(f"{method}-{_short(sparsity)}", method, sparsity=sparsity))
        for pattern in parse_words(patterns, "--patterns") if patterns is not None else []:
            points.append(Point(f"{method}-{_pattern_name(pattern)}", method, pattern=pattern))
    return list(dict.fromkeys(points))


def _baselines(point: Point) -> list[Point]:
    """The same criterion with uniform rows: as many left in all, and as many of every matrix."""
    (criterion,) = (name for name in get_args(Method) if f"emp-{name}" == point.method)
    return [Point(f"{criterion}-{by}-as-{point.name}", criterion, baseline_of=point.name, match=by) for by in get_args(MatchBy)]


def _method(name: str) -> Method:
    if name not in get_args(Method):
        raise UserError(f"--methods: {name!r} is none of {', '.join(get_args(Method))}.")
    method: Method = name  # type: ignore[assignment]
    return method


def _check_use(options: dict[str, Any], methods: list[Method], such: str) -> None:
    for flag, value in options.items():
        if value is not None and not methods:
            raise UserError(f"{flag} is for {such}, and --methods names neither.")


def parse_words(text: str, flag: str) -> list[str]:
    """What commas separate in the value of an option; UserError where there is nothing between two of them."""
    words = [word.strip() for word in text.split(",")]
    if not all(words):
        raise UserError(f"{flag} {text!r}: expected values separated by commas.")
    return words


def parse_numbers(text: str, flag: str) -> list[float]:
    """The numbers that commas separate in the value of an option; UserError where something else is between them."""
    try:
        numbers = [float(word) for word in parse_words(text, flag)]
    except ValueError as error:
        raise UserError(f"{flag} {text!r}: expected numbers separated by commas.") from error
    if any(math.isnan(number) for number in numbers):
        raise UserError(f"{flag} {text!r}: expected numbers separated by commas.")
    return numbers


def _pattern_name(pattern: str) -> str:
    try:
        return "{}of{}".format(*parse_pattern(pattern))
    except ValueError as error:
        raise UserError(f"--patterns: {error}.") from error


def _short(number: float) -> str:
    """A number as part of a file's name; different numbers have different ones."""
    text = f"{number:g}" if float(f"{number:g}") == number else repr(number)
    return re.sub(r"[^\w.+-]", "", text)
