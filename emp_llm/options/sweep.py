"""The options of a sweep, and the points that they ask for."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, get_args

from emp_llm.common.declared import Flag, flag_of
from emp_llm.common.errors import UserError
from emp_llm.options.criterion import custom_name
from emp_llm.options.recipe import MatchBy, Recipe
from emp_llm.options.shared import Dtype, MaskDevice, parse_list, parse_numbers
from emp_llm.options.words import RecipeWords, check_used

BETAS = "0.5,0.75,1,1.25,1.5,2"
METHODS = "emp-wanda,wanda,emp-magnitude,magnitude"


@dataclass(frozen=True, kw_only=True)
class PointOptions:
    """The points of a sweep, or the recipes of a study."""

    methods: Annotated[str | None, Flag(f"Methods, separated by commas; default: {METHODS}.")] = (
        None
    )
    betas: Annotated[str | None, Flag(f"Betas of the emp methods; default: {BETAS}.")] = None
    orders: Annotated[str | None, Flag("Hill orders of the emp methods; default: 2.")] = None
    sparsities: Annotated[str | None, Flag("Sparsities of the other methods; default: 0.5.")] = None
    emp_sparsities: Annotated[
        str | None, Flag("Sparsities of the emp methods, in place of betas; their beta is found.")
    ] = None
    patterns: Annotated[str | None, Flag("N:M patterns of the other methods.")] = None


@dataclass(frozen=True, kw_only=True)
class SweepOptions(PointOptions):
    """The points of a sweep, and its folder."""

    methods: Annotated[
        str | None,
        Flag(f"Methods, separated by commas; default: {METHODS} and those of your criterion."),
    ] = None
    matched_baselines: Annotated[
        bool,
        Flag(
            "Add two uniform baselines to each emp point: the same total, and the same count "
            "in every matrix."
        ),
    ] = False
    against: Annotated[
        str | None,
        Flag("Method that the others are compared with in the table; default: the first."),
    ] = None
    mask_device: MaskDevice = "cpu"
    output: Annotated[
        Path | None, Flag("Folder of the sweep; default: MODEL-sweep in the current folder.")
    ] = None
    overwrite: Annotated[bool, Flag("Discard a sweep with other options at the output.")] = False
    keep: Annotated[bool, Flag("Also write the checkpoint of every point.")] = False
    dry_run: Annotated[bool, Flag("Print the plan of the sweep, and write nothing.")] = False


@dataclass(frozen=True, eq=False)
class SweepPoint:
    """A point of a sweep.

    Attributes:
        name: the name of its folder.
        words: the options that ask for its recipe.
        recipe: what is pruned.
        baseline_of: of a baseline: the name of the EMP point that keeps as many weights, which its
            counts match.
    """

    name: str
    words: RecipeWords
    recipe: Recipe
    baseline_of: str | None = None


def plan_points(options: SweepOptions, shared: RecipeWords) -> list[SweepPoint]:
    """The points that the options ask for; baselines follow their EMP point.

    Args:
        options: methods and numbers, separated by commas.
        shared: the options that the points share, such as the targets.

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
    if shared.get("group") == "all" and options.matched_baselines:
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
    unused: list[frozenset[str]] = []

    def add(name: str, baseline_of: str | None = None, **own: Any) -> None:
        words = shared.but(**own)
        recipe, left = words.read(unused=tuple(shared))
        points[name] = SweepPoint(name, words, recipe, baseline_of)
        unused.append(left)
        if recipe.adaptive and options.matched_baselines:  # the same criterion with uniform rows
            for by in get_args(MatchBy):
                baseline = f"{recipe.name}-{by}-as-{name}"
                add(baseline, name, method=recipe.name, match=name, match_by=by)

    for method in methods:
        if method in adaptive:
            for order in orders:
                name = method if order == 2 else f"{method}-order-{_number_in_name(order)}"
                own: dict[str, Any] = {"method": method, "order": order}
                for beta in betas:
                    add(f"{name}-beta-{_number_in_name(beta)}", beta=beta, **own)
                for sparsity in emp_sparsities:
                    add(f"{name}-{_number_in_name(sparsity)}", sparsity=sparsity, **own)
            continue
        for sparsity in sparsities:
            add(f"{method}-{_number_in_name(sparsity)}", method=method, sparsity=sparsity)
        for pattern in patterns:
            add(f"{method}-{pattern.replace(':', 'of')}", method=method, pattern=pattern)
    check_used(shared, unused, "--methods")
    named = dict.fromkeys(point.recipe.method for point in points.values())
    if options.against not in (None, *named):
        raise UserError(
            f"--against {options.against}: no point is of this method; name one of them: "
            f"{', '.join(named)}."
        )
    return list(points.values())


def _methods(options: SweepOptions, shared: RecipeWords) -> list[str]:
    """The methods of a sweep: the given ones, or all defaults and those of the user's criterion."""
    defaults = METHODS
    own = custom_name(shared.get("criterion"), shared.get("scores"))
    if own is not None:
        defaults += f",emp-{own},{own}"
    methods = parse_list(options.methods or defaults, "--methods")
    if "best" in methods:
        raise UserError(
            "--methods: best is for prune. It is emp-admm with a refit and healing: name emp-admm, "
            "and give --refit and --heal as options of every prune."
        )
    for method in methods:
        shared.but(method=method).read(unused=tuple(shared), flag="--methods:")
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


def _number_in_name(number: float) -> str:
    """A number as part of a file name; distinct numbers have distinct names."""
    text = f"{number:g}" if float(f"{number:g}") == number else repr(number)
    return re.sub(r"[^\w.+-]", "", text)


# The options of `plan`.


DEFAULT_SUITE = "paper"


@dataclass(frozen=True, kw_only=True)
class PlanOptions(PointOptions):
    """Options of `plan`. None: the default, which a table may replace."""

    table: Annotated[
        Path | None,
        Flag(
            "TOML table with these options; those of the command line replace them.", argument=True
        ),
    ] = field(default=None, kw_only=False)
    output: Annotated[Path, Flag("Folder of the study.")] = Path("study")
    overwrite: Annotated[
        bool, Flag("Replace another plan in the folder; finished outputs stay.")
    ] = False
    models: Annotated[
        str | list[str] | None, Flag("Model folders or Hub ids, separated by commas.")
    ] = None
    betas: Annotated[str | None, Flag("Betas of the emp methods; default: 1.")] = None
    suite: Annotated[str | None, Flag(f"Evaluation suite; default: {DEFAULT_SUITE}.")] = None
    limit: Annotated[
        int | None, Flag("Use at most this many examples per task and blocks of text.", minimum=1)
    ] = None
    calibration: Annotated[str | None, Flag("Calibration text, as for prune.")] = None
    samples: Annotated[int | None, Flag("Number of calibration sequences.", minimum=1)] = None
    seqlen: Annotated[int | None, Flag("Tokens per calibration sequence.", minimum=1)] = None
    targets: Annotated[str | None, Flag("Layers to prune, as for prune.")] = None
    dtype: Annotated[Dtype | None, Flag("Dtype of forward passes; default: auto.")] = None
    discard: Annotated[bool, Flag("Delete each pruned checkpoint as soon as it is evaluated.")] = (
        False
    )
    prune_options: Annotated[str | None, Flag("Further options of every prune, as one text.")] = (
        None
    )
    evaluate_options: Annotated[
        str | None, Flag("Further options of every evaluate, as one text.")
    ] = None
    trust_remote_code: Annotated[bool, Flag("Run code from the model repositories.")] = False
