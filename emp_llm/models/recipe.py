"""The recipe: everything that defines a pruning run, checked before anything is read."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from emp_llm.models.errors import UserError
from emp_llm.models.headers import read_json
from emp_llm.selection.budgets import Budget, EffectiveBudget, PartsBudget, PatternBudget, RatioBudget, TotalBudget
from emp_llm.selection.criteria import CRITERIA
from emp_llm.selection.scheme import Group, Scheme

Method = Literal["emp-wanda", "emp-magnitude", "wanda", "magnitude"]
MatchBy = Literal["total", "matrix"]
REPORT_NAME = "emp_report.json"


@dataclass(frozen=True)
class Recipe:
    """What a user asked of the selection.

    Attributes:
        method: a criterion; with "emp-" in front the effective number decides how many stay, without it a fixed sparsity.
        beta, order, neff_dtype: of the effective number; for emp methods only. None: 1, 2, float64.
        sparsity, pattern, match: for the other methods, at most one. None: sparsity 0.5.
        match_by: what of the run to be matched: how many weights it removed in all, or of every matrix. None: in all.
        group: what competes for places.
        targets, ignore: which layers.
        min_expert_tokens: experts that were shown fewer calibration tokens are scored by magnitude.
        allow_partial: go on where more than half of what `targets` means cannot be pruned.
    """

    method: Method = "emp-wanda"
    beta: float | None = None
    order: float | None = None
    neff_dtype: str | None = None
    sparsity: float | None = None
    pattern: str | None = None
    match: Path | None = None
    group: Group = "row"
    targets: str | list[str] = "mlp"
    ignore: str | list[str] | None = None
    min_expert_tokens: int = 32
    allow_partial: bool = False
    match_by: MatchBy | None = None

    @property
    def adaptive(self) -> bool:
        """Whether the scores themselves decide how many stay."""
        return self.method.startswith("emp-")

    @property
    def criterion_name(self) -> str:
        return self.method.removeprefix("emp-")

    @property
    def needs_activations(self) -> bool:
        return CRITERIA[self.criterion_name].needs_norms

    def scheme(self, sizes: Mapping[str, int]) -> Scheme:
        """The scheme this asks for, over targets of these numbers of weights, in their order.

        Raises:
            UserError: an option is out of range, or not of this method.
        """
        self.check()
        return self._scheme(sizes)

    def check(self) -> None:
        """Raise UserError for whatever can be seen to be wrong without the model."""
        if self.criterion_name not in CRITERIA:
            names = ", ".join(f"emp-{name}, {name}" for name in CRITERIA)
            raise UserError(f"--method {self.method!r} is none of {names}.")
        for_other = ("sparsity", "pattern", "match") if self.adaptive else ("beta", "order", "neff_dtype")
        for name in for_other:
            if getattr(self, name) is not None:
                other = self.criterion_name if self.adaptive else f"emp-{self.criterion_name}"
                flag = name.replace("_", "-")
                rule = "the effective number decides its sparsity" if self.adaptive else "its sparsity is fixed beforehand"
                raise UserError(f"--{flag} does not go with method {self.method}: {rule}. Use --method {other}.")
        given = [name for name in ("sparsity", "pattern", "match") if getattr(self, name) is not None]
        if len(given) > 1:
            raise UserError(f"--{given[0]} and --{given[1]} both set the sparsity; give one of them.")
        if self.group not in get_args(Group):
            raise UserError(f"--group {self.group!r} is none of {', '.join(get_args(Group))}.")
        if self.min_expert_tokens < 0:
            raise UserError(f"--min-expert-tokens must be 0 or more, got {self.min_expert_tokens}.")
        if self.match_by is not None and self.match is None:
            raise UserError(f"--match-by {self.match_by} says what of a run is matched; name the run with --match.")
        if self.match_by is not None and self.match_by not in get_args(MatchBy):
            raise UserError(f"--match-by {self.match_by!r} is none of {', '.join(get_args(MatchBy))}.")
        if self.match is None:
            self._scheme({"": 1})
        else:
            read_report(self.match)

    def _scheme(self, sizes: Mapping[str, int]) -> Scheme:
        try:
            return Scheme(self.criterion_name, self._budget(sizes), self.group)
        except UserError:
            raise
        except ValueError as error:
            raise UserError(f"--{error}.") from error

    def record(self) -> dict[str, Any]:
        """For a report: what was asked, defaults filled in."""
        fixed: dict[str, Any] = (
            {}
            if self.adaptive
            else {"sparsity": self.sparsity, "pattern": self.pattern, "match": self.match and str(self.match)}
        )
        if not self.adaptive and self.pattern is None and self.match is None and self.sparsity is None:
            fixed["sparsity"] = 0.5
        if self.match is not None:
            fixed["match_by"] = self.match_by or "total"
        adaptive = {
            "beta": 1.0 if self.beta is None else self.beta,
            "order": 2.0 if self.order is None else self.order,
            "neff_dtype": self.neff_dtype or "float64",
        }
        common: dict[str, Any] = {"method": self.method, "group": self.group, "targets": self.targets, "ignore": self.ignore}
        if self.needs_activations:
            common["min_expert_tokens"] = self.min_expert_tokens
        return common | (adaptive if self.adaptive else fixed)

    def _budget(self, sizes: Mapping[str, int]) -> Budget:
        if self.adaptive:
            order = 2.0 if self.order is None else self.order
            return EffectiveBudget(1.0 if self.beta is None else self.beta, order, self.neff_dtype or "float64")
        if self.pattern is not None:
            return PatternBudget(*parse_pattern(self.pattern))
        if self.match is not None:
            return self._matched(read_report(self.match), sizes)
        return RatioBudget(0.5 if self.sparsity is None else self.sparsity)

    def _matched(self, report: dict[str, Any], sizes: Mapping[str, int]) -> Budget:
        """What the run that is to be matched removed, by its report."""
        total = sum(sizes.values())
        try:
            weights = report["targets"]["weights"]
            removed = int(weights - report["targets"]["kept"])
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"{self.match}: its {REPORT_NAME} does not say how many weights were kept.") from error
        if weights != total:
            raise UserError(
                f"{self.match}: that run had {weights} target weights, this one has {total}; match a run of the same model "
                "with the same --targets."
            )
        if self.match_by != "matrix":
            return TotalBudget(removed, total)
        return PartsBudget(tuple(self._removed(report, name, size) for name, size in sizes.items()), tuple(sizes.values()))

    def _removed(self, report: dict[str, Any], name: str, size: int) -> int:
        """How many weights of a matrix the run that is to be matched removed."""
        try:
            entry = report["matrices"][name]
            weights, kept = entry["rows"] * entry["columns"], int(entry["kept"])
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"{self.match}: its {REPORT_NAME} does not say how many weights of {name} were kept.") from error
        if weights != size:
            raise UserError(f"{self.match}: in that run {name} had {weights} weights, here it has {size}; they do not match.")
        return size - kept


def parse_pattern(text: str) -> tuple[int, int]:
    """ "2:4" as (2, 4); ValueError where it is not two whole numbers."""
    numbers = re.fullmatch(r"([0-9]+):([0-9]+)", text)
    if numbers is None:
        raise ValueError(f"pattern must be N:M, such as 2:4, got {text!r}")
    return int(numbers[1]), int(numbers[2])


def read_report(run: Path) -> dict[str, Any]:
    """The report that a run left in its folder; UserError where there is none."""
    run = Path(run)
    if not (run / REPORT_NAME).is_file():
        raise UserError(f"{run}: no {REPORT_NAME} in it; give the --output folder of a finished prune.")
    return read_json(run / REPORT_NAME)
