"""The points of a sweep: every method at every beta, order or sparsity, and the uniform baselines of EMP points."""

import math
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

from emp_llm.common.errors import UserError
from emp_llm.options.commands import BETAS
from emp_llm.options.recipe import MatchBy, Recipe, check_method
from emp_llm.pruning.recipe import parse_pattern
from emp_llm.records.run_report import PointRecord


@dataclass(frozen=True)
class SweepPoint:
    """One recipe of a sweep.

    Attributes:
        name: of its folder.
        method: of `prune`.
        beta, order: of an EMP point; None for others. There is no beta for a requested sparsity.
        sparsity, pattern: of a point with a fixed or a requested sparsity.
        baseline_of: for a baseline, the name of the EMP point that keeps as many weights.
        match: for a baseline, whether the total or every matrix keeps as many; None for other points.
    """

    name: str
    method: str
    beta: float | None = None
    order: float | None = None
    sparsity: float | None = None
    pattern: str | None = None
    baseline_of: str | None = None
    match: MatchBy | None = None

    def recipe(self, common: Recipe, folder: Path) -> Recipe:
        """The recipe of the point.

        Args:
            common: the fields that the points share, such as the targets.
            folder: parent of the points' folders.
        """
        match = folder / self.baseline_of if self.baseline_of is not None else None
        own = {"beta": self.beta, "order": self.order, "sparsity": self.sparsity, "pattern": self.pattern}
        if self.pattern is not None or match is not None:  # their sparsities are fixed otherwise
            common = replace(common, shares=None, owl_lambda=None, owl_m=None)
        return replace(common.with_method(self.method), match=match, match_by=self.match, **own)  # type: ignore[arg-type]

    def record(self) -> PointRecord:
        """The point as a report records it."""
        return PointRecord(**{name: getattr(self, name) for name in PointRecord.__struct_fields__})


def plan_points(
    methods: str,
    betas: str | None = None,
    orders: str | None = None,
    sparsities: str | None = None,
    patterns: str | None = None,
    matched_baselines: bool = False,
    emp_sparsities: str | None = None,
) -> list[SweepPoint]:
    """The points that the options ask for; baselines follow their EMP point.

    Args:
        methods, betas, orders, sparsities, patterns: lists, separated by commas. Defaults (None): betas BETAS; orders 2;
            sparsities 0.5, or none if there are patterns; patterns none.
        matched_baselines: add two uniform baselines of the same criterion for each EMP point.
        emp_sparsities: a list of sparsities that the emp methods reach by their beta; then there are betas only if given.

    Raises:
        UserError: an option is not a list of its kind, or applies to none of the methods.
    """
    chosen = parse_words(methods, "--methods")
    for method in chosen:
        check_method(method, "--methods:")
    adaptive = [method for method in chosen if method.startswith("emp-")]
    fixed = [method for method in chosen if method not in adaptive]
    asked = {"--betas": betas, "--orders": orders, "--matched-baselines": matched_baselines or None}
    asked["--emp-sparsities"] = emp_sparsities
    if betas is None and emp_sparsities is None:
        betas = BETAS
    _check_use(asked, adaptive, "emp methods")
    _check_use({"--sparsities": sparsities, "--patterns": patterns}, fixed, "methods without emp-")
    points: list[SweepPoint] = []
    for method in chosen:
        if method in adaptive:
            for order in parse_numbers("2" if orders is None else orders, "--orders"):
                name = method if order == 2 else f"{method}-order-{_short(order)}"
                own = [
                    SweepPoint(f"{name}-beta-{_short(beta)}", method, beta, order)
                    for beta in (parse_numbers(betas, "--betas") if betas is not None else [])
                ]
                own += [
                    SweepPoint(f"{name}-{_short(sparsity)}", method, None, order, sparsity)
                    for sparsity in (parse_numbers(emp_sparsities, "--emp-sparsities") if emp_sparsities is not None else [])
                ]
                for point in own:
                    points += [point, *(_baselines(point) if matched_baselines else [])]
            continue
        if sparsities is not None or patterns is None:
            for sparsity in parse_numbers("0.5" if sparsities is None else sparsities, "--sparsities"):
                points.append(SweepPoint(f"{method}-{_short(sparsity)}", method, sparsity=sparsity))
        for pattern in parse_words(patterns, "--patterns") if patterns is not None else []:
            points.append(SweepPoint(f"{method}-{_pattern_name(pattern)}", method, pattern=pattern))
    return list(dict.fromkeys(points))


def _baselines(point: SweepPoint) -> list[SweepPoint]:
    """The same criterion with uniform rows, which keeps as many weights in total, or in every matrix."""
    criterion = point.method.removeprefix("emp-")
    return [
        SweepPoint(f"{criterion}-{by}-as-{point.name}", criterion, baseline_of=point.name, match=by) for by in get_args(MatchBy)
    ]


def _check_use(options: dict[str, Any], methods: list[str], names: str) -> None:
    """Raise UserError for an option that applies to none of the methods."""
    for flag, value in options.items():
        if value is not None and not methods:
            raise UserError(f"{flag} is for {names}, and --methods has none; leave {flag} out or add one.")


def parse_words(text: str, flag: str) -> list[str]:
    """The values in an option with commas; UserError if one is empty."""
    words = [word.strip() for word in text.split(",")]
    if not all(words):
        raise UserError(f"{flag} {text!r}: expected values separated by commas.")
    return words


def parse_numbers(text: str, flag: str) -> list[float]:
    """The numbers in an option with commas; UserError if one is no number."""
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
    """A number as part of a file name; distinct numbers have distinct names."""
    text = f"{number:g}" if float(f"{number:g}") == number else repr(number)
    return re.sub(r"[^\w.+-]", "", text)
