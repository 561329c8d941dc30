"""The tables of a report as rows of cells, and its head: what was pruned, what it cost, and the comparison with a baseline."""

from collections.abc import Iterable
from dataclasses import dataclass

from emp_llm.common.errors import count_of
from emp_llm.common.tables import Rows, number_cell, percent_cell
from emp_llm.evaluation.values import UNPAIRED, Change, Value, change_of, change_text, formatted, in_percent, signed, value_cell
from emp_llm.records.run_report import TargetsRecord
from emp_llm.reporting.points import MeasuredPoint, by_role_and_block
from emp_llm.reporting.run_tables import FIT_ERRORS, effective_share, mean_error, row_mean
from emp_llm.reporting.studies import Difference, Study, StudySuite, differences, label_of, main_measures

MATCHES = {"total": "as many weights in total", "matrix": "as many weights in every matrix"}
_SPREAD = ("min", "q1", "median", "q3", "max")


def point_rows(study: Study) -> Rows:
    """Every point: recipe, sparsity, and the main measures of every suite with their change from the dense model."""
    measured = [(suite, measure) for suite in study.suites for measure in main_measures(suite)]
    several = len(study.suites) > 1
    rows = [["point", "method", "β", "order", "removed of targets %", "of all parameters %"]]
    for suite, measure in measured:
        rows[0] += [f"{measure} ({suite.name})" if several else measure, "change"]
    if any(suite.dense for suite in study.suites):
        row = ["dense", "", "", "", "0.00", "0.00"]
        for suite, measure in measured:
            row += [value_cell(measure, suite.dense.values.get(measure) if suite.dense else None), ""]
        rows.append(row)
    for point in study.pruned:
        row = [point.name, label_of(point), *(_short(x) for x in (point.beta, point.order))]
        row += [percent_cell(point.sparsity), percent_cell(point.sparsity_of_all)]
        for suite, measure in measured:
            result = point.result_of(suite.key)
            value = result.values.get(measure) if result else None
            dense = suite.dense.values.get(measure) if suite.dense else None
            change = "-" if value is None or dense is None else change_text(measure, change_of(measure, value, dense))
            row += [value_cell(measure, value), change]
        rows.append(row)
    return rows


def difference_rows(study: Study, suite: StudySuite) -> Rows:
    """EMP points and their baselines with as many removed weights; the heading alone if there are none."""
    measures = main_measures(suite)
    rows = [
        ["EMP", "β", "baseline", "removed of targets %", "measure", "EMP value", "baseline value", "EMP − baseline", "better"]
    ]
    for each in differences(study, suite):
        if each.measure in measures:
            cells = [value_cell(each.measure, Value(value)) for value in (each.value, each.base)]
            baseline = f"{label_of(each.baseline)}, {MATCHES[each.match]}" if each.match == "total" else label_of(each.baseline)
            start = [label_of(each.point), _short(each.point.beta), baseline, percent_cell(each.point.sparsity), each.measure]
            rows.append([*start, *cells, change_text(each.measure, each.change), verdict_of(each)])
    return rows


def verdict_of(each: Difference) -> str:
    """The better of the two. A difference below two standard errors, if they are known, is not clear."""
    if each.better is None:
        return "-"
    if not each.change.value:
        return "equal"
    side = "EMP" if each.better else "baseline"
    return side if each.clear is not False else "no clear difference"


def verdicts(study: Study, suite: StudySuite) -> list[str]:
    """A sentence for each EMP method, kind of baseline and main measure: the number of points at which EMP is better."""
    sentences = []
    for each in tallies(study, suite):
        against = f"the same criterion with uniform rows and {MATCHES[each.match]}"
        ties = f", equal at {each.equal}" if each.equal else ""
        better, worse = (_count(chosen, each.members) for chosen in (each.better, each.worse))
        sentences.append(
            f"{each.method} against {against}, {each.measure}: better at {better}, worse at {worse}{ties}; the difference is "
            f"{each.reach}."
        )
    return sentences


def verdict_rows(study: Study) -> Rows:
    """The numbers of the sentences of `verdicts` for all suites; the heading alone if there are none."""
    several = len(study.suites) > 1
    rows = [["EMP", "uniform baseline", "measure", "EMP better", "EMP worse", "equal", "difference"]]
    for suite in study.suites:
        for each in tallies(study, suite):
            measure = f"{each.measure} ({suite.name})" if several else each.measure
            counts = [_short_count(chosen, each.members) for chosen in (each.better, each.worse)]
            rows.append([each.method, MATCHES[each.match], measure, *counts, str(each.equal), each.reach])
    return rows


@dataclass(frozen=True)
class Tally:
    """The differences of an EMP method from one kind of baseline in a main measure.

    Attributes:
        method, match, measure: the method, the quantity that is equal in its baselines, and the measure.
        members: all differences; better, worse: those in favour of EMP and of the baseline.
    """

    method: str
    match: str
    measure: str
    members: list[Difference]

    @property
    def better(self) -> list[Difference]:
        return [each for each in self.members if each.better]

    @property
    def worse(self) -> list[Difference]:
        return [each for each in self.members if not each.better and each.change.value]

    @property
    def equal(self) -> int:
        """Number of points without a difference."""
        return len(self.members) - len(self.better) - len(self.worse)

    @property
    def reach(self) -> str:
        """The smallest and the largest difference with their unit."""
        changes = sorted(each.change.value for each in self.members)
        unit = "points" if in_percent(self.measure) else "%"
        return signed(changes[0]) + (f" to {signed(changes[-1])}" if len(changes) > 1 else "") + f" {unit}"


def tallies(study: Study, suite: StudySuite) -> list[Tally]:
    """The differences in the main measures of a suite, by EMP method, kind of baseline and measure."""
    groups: dict[tuple[str, str, str], list[Difference]] = {}
    for each in differences(study, suite):
        if each.measure in main_measures(suite) and each.better is not None:
            groups.setdefault((label_of(each.point), each.match, each.measure), []).append(each)
    return [Tally(*key, members) for key, members in groups.items()]


def role_rows(study: Study) -> Rows:
    """N_eff / N by role for every criterion and order, over the blocks; one row for all targets if they were one group."""
    rows = [["criterion", "layers", "N_eff/N % mean", "lowest block", "highest block", "s_eff", "bound", "least margin"]]
    for label, matrices in study.measured:
        cells = by_role_and_block(matrices)
        for role in dict.fromkeys(role for role, _ in cells):
            own = [cell for (r, _), cell in cells.items() if r == role and effective_share(cell) is not None]
            shares = [share for cell in own if (share := effective_share(cell)) is not None]
            if shares:
                margin = min((m for cell in own if (m := cell.least_margin_over_bound) is not None), default=None)
                shown = [percent_cell(share) for share in (row_mean(own, effective_share), min(shares), max(shares))]
                shown += [
                    number_cell(number)
                    for number in (row_mean(own, lambda c: c.s_eff_mean), row_mean(own, lambda c: c.s_eff_bound_mean), margin)
                ]
                rows.append([label, f"{role} x {len(own)}", *shown])
    for point in study.points:
        if point.targets is not None and point.targets.n_eff is not None and point.targets.weights:
            row = _whole_row(label_of(point), point.targets)
            rows += [row] if row not in rows else []
    return rows


def _whole_row(label: str, whole: TargetsRecord) -> list[str]:
    """All targets as one group: one effective number, and no spread over blocks."""
    margin = None if whole.s_eff_bound is None or whole.s_eff is None else whole.s_eff - whole.s_eff_bound
    masses = [number_cell(number) for number in (whole.s_eff, whole.s_eff_bound, margin)]
    return [label, "all targets as one group", percent_cell((whole.n_eff or 0.0) / (whole.weights or 1)), "-", "-", *masses]


def matrix_rows(study: Study) -> Rows:
    """All numbers of every role and block of every point with all digits, for the CSV file."""
    head = ["study", "point", "method", "beta", "order", "role", "block", "weights", "rows", "kept"]
    head += [*(f"kept_fraction_{part}" for part in _SPREAD), "n_eff_over_n", "group_size"]
    head += ["s_eff_mean", *(f"s_eff_{part}" for part in _SPREAD), "s_eff_bound_mean", "least_margin_over_bound"]
    rows = [head]
    for point in study.points:
        start = [study.title, point.name, point.method or "dense", _exact(point.beta), _exact(point.order)]
        for cell in by_role_and_block(point.matrices).values():
            numbers = [
                cell.block,
                cell.rows * cell.columns,
                cell.rows,
                cell.kept,
                *cell.kept_fraction.values,
                effective_share(cell),
            ]
            numbers += [cell.group_size, cell.s_eff_mean, *(cell.s_eff.values if cell.s_eff else [None] * 5)]
            rows.append(
                [
                    *start,
                    cell.role,
                    *(_exact(number) for number in [*numbers, cell.s_eff_bound_mean, cell.least_margin_over_bound]),
                ]
            )
    return rows


def value_rows(study: Study) -> Rows:
    """All measures of every point and of the dense model with all digits, for the CSV file."""
    head = ["study", "suite", "point", "method", "beta", "order", "match", "baseline_of", "sparsity_of_targets"]
    rows = [[*head, "sparsity_of_all_parameters", "measure", "value", "stderr", "partial"]]
    names = {point.id: point.name for point in study.points}
    for suite in study.suites:
        results = [(["dense", "dense", "", "", "", "", "0", "0"], suite.dense)]
        for point in study.pruned:
            start = [point.name, point.method or "", _exact(point.beta), _exact(point.order), point.match or ""]
            start += [names.get(point.baseline_of or "", ""), _exact(point.sparsity), _exact(point.sparsity_of_all)]
            results.append((start, point.result_of(suite.key)))
        for start, result in results:
            for measure, value in result.values.items() if result else ():
                numbers = [_exact(value.value), _exact(value.stderr), str(value.partial).lower()]
                rows.append([study.title, suite.name, *start, measure, *numbers])
    return rows


def change_rows(study: Study) -> Rows:
    """All differences between EMP and its baselines with all digits, for the CSV file."""
    head = ["study", "suite", "point", "baseline", "method", "beta", "order", "match", "sparsity_of_targets", "measure"]
    rows = [[*head, "value", "baseline_value", "change", "unit", "stderr", "paired", "better"]]
    for suite in study.suites:
        for each in differences(study, suite):
            point = each.point
            start = [study.title, suite.name, point.name, each.baseline.name, point.method or "", _exact(point.beta)]
            start += [_exact(point.order), each.match, _exact(point.sparsity), each.measure]
            unit = "points" if in_percent(each.measure) else "percent"
            numbers = [_exact(each.value), _exact(each.base), _exact(each.change.value), unit]
            numbers += [_exact(each.change.stderr), "" if each.change.stderr is None else str(each.change.paired).lower()]
            rows.append([*start, *numbers, verdict_of(each)])
    return rows


def _short_count(chosen: list[Difference], members: list[Difference]) -> str:
    known = all(each.clear is not None for each in members)
    clear = f", {sum(1 for each in chosen if each.clear)} clearly" if known and chosen else ""
    return f"{len(chosen)} of {len(members)}{clear}"


def _count(chosen: list[Difference], members: list[Difference]) -> str:
    clear = [each for each in chosen if each.clear]
    known = all(each.clear is not None for each in members)
    kind = "unpaired standard errors" if any(each.change.unpaired for each in members) else "standard errors"
    certain = f" ({len(clear)} by more than two {kind})" if known and chosen else ""
    return f"{len(chosen)} of {count_of(len(members), 'point')}{certain}"


def _short(value: float | None) -> str:
    return "" if value is None else f"{value:g}"


def _exact(value: float | None) -> str:
    return "" if value is None else repr(value)


def fit_rows(study: Study) -> Rows:
    """The mean output error of each role's layers before and after the fit, and the largest one held out, for each point."""
    rows = [["method", "layers", "before %", "after %", "held out before %", "held out after %", "largest held out after %"]]
    for point in study.points:
        for role in dict.fromkeys(layer.role for layer in point.fits):
            own = [layer.fit for layer in point.fits if layer.role == role]
            largest = max((fit.held_out_after for fit in own if fit.held_out_after is not None), default=None)
            cells = [percent_cell(value) for value in (*(mean_error(own, name) for name in FIT_ERRORS), largest)]
            rows.append([label_of(point), f"{role} x {len(own)}", *cells])
    return rows


def layer_fit_rows(study: Study) -> Rows:
    """Every layer's output errors with all digits, for the CSV file."""
    rows = [["study", "point", "method", "layer", "tokens", "damping", *FIT_ERRORS]]
    for point in study.points:
        for layer in point.fits:
            values = [getattr(layer.fit, name) for name in ("tokens", "damping", *FIT_ERRORS)]
            cells = ["" if value is None else repr(value) for value in values]
            rows.append([study.title, point.name, point.method or "", layer.name, *cells])
    return rows


_MOST_HEADLINES = 3  # more would not fit on a screen
_MOST_ENTRIES = 4  # in a tile


@dataclass(frozen=True)
class Tile:
    """A box with a few numbers.

    Attributes:
        title: the question that it answers.
        entries: numbers, each with its meaning.
        note: the origin of the numbers, or the reason that there are none.
    """

    title: str
    entries: tuple[tuple[str, str], ...]
    note: str


@dataclass(frozen=True)
class Headline:
    """The tiles of one point."""

    title: str
    tiles: tuple[Tile, ...]


def headlines(study: Study) -> list[Headline]:
    """The tiles of every EMP method at the β nearest to 1; without EMP, of the first points; without those, of measures."""
    chosen: dict[str, MeasuredPoint] = {}
    for point in study.pruned:
        name = label_of(point) if point.adaptive else point.name
        held = chosen.get(name)
        if held is None or abs((point.beta or 1) - 1) < abs((held.beta or 1) - 1):
            chosen[name] = point
    adaptive = [point for point in chosen.values() if point.adaptive]
    pruned = (adaptive or list(chosen.values()))[:_MOST_HEADLINES]
    if pruned:
        return [_headline(study, point) for point in pruned]
    return [_measured(point) for point in study.points if point.matrices][:_MOST_HEADLINES]


def _headline(study: Study, point: MeasuredPoint) -> Headline:
    tiles = [_removed(point), _cost(study, point)]
    if point.adaptive:
        tiles.append(_against_baseline(study, point))
    beta = f", β = {point.beta:g}" if point.beta is not None else ""
    return Headline(f"{label_of(point)}{beta}", tuple(tiles))


def _removed(point: MeasuredPoint) -> Tile:
    entries = [(f"{percent_cell(point.sparsity)} %", "of the targets removed")]
    if point.sparsity_of_all is not None:
        entries.append((f"{percent_cell(point.sparsity_of_all)} %", "of all parameters"))
    return Tile("What was pruned", tuple(entries), f"run {point.name}")


def _cost(study: Study, point: MeasuredPoint) -> Tile:
    """The main measures with their change from the dense model."""
    entries, suites, compared = [], [], False
    for suite in study.suites:
        result = point.result_of(suite.key)
        for measure in main_measures(suite):
            value = result.values.get(measure) if result else None
            dense = suite.dense.values.get(measure) if suite.dense else None
            if value is not None:
                entries.append(_cost_entry(measure, value, dense))
                suites.append(suite.name)
                compared = compared or dense is not None
    if not entries:
        return Tile("What it cost", (), "Not evaluated. The option --evaluate of prune, or the command evaluate, measures it.")
    against = "against the dense model" if compared else "no results of the dense model to compare with"
    names = ", ".join(dict.fromkeys(suites[:_MOST_ENTRIES]))
    return Tile("What it cost", tuple(entries[:_MOST_ENTRIES]), _marked(f"{against}; suite {names}", entries))


def _marked(note: str, entries: Iterable[tuple[str, str]]) -> str:
    """A tile's note, with the meaning of the mark if one of its numbers has it."""
    return f"{note}; {UNPAIRED} unpaired standard error" if any(UNPAIRED in number for number, _ in entries) else note


def _cost_entry(measure: str, value: Value, dense: Value | None) -> tuple[str, str]:
    if dense is None:
        return _number(measure, value.value), measure
    change = change_of(measure, value, dense)
    return _amount(measure, change), f"{measure}: {_number(measure, dense.value)} → {_number(measure, value.value)}"


def _against_baseline(study: Study, point: MeasuredPoint) -> Tile:
    """The differences from the first baseline: one with as many weights in total, if there is one."""
    found = [(suite, each) for suite in study.suites for each in _differences_of(study, suite, point)]
    title = "Against the baseline"
    if not found:
        method = point.criterion
        return Tile(title, (), f"There is no baseline with as many zeros. To make one: prune --method {method} --match RUN.")
    first = found[0][1]
    own = [each for _, each in found if each.baseline.id == first.baseline.id][:_MOST_ENTRIES]
    entries = tuple((_amount(each.measure, each.change), f"{each.measure}: {_verdict(each)}") for each in own)
    amount = f", {MATCHES[first.match]}" if first.match == "total" else ""
    return Tile(title, entries, _marked(f"compared with: {label_of(first.baseline)}{amount}", entries))


def _differences_of(study: Study, suite: StudySuite, point: MeasuredPoint) -> list[Difference]:
    found = [each for each in differences(study, suite) if each.point.id == point.id and each.measure in main_measures(suite)]
    return sorted(found, key=lambda each: each.match != "total")


def _verdict(each: Difference) -> str:
    verdict = verdict_of(each)
    return {"EMP": "EMP is better", "baseline": "the baseline is better", "-": "no verdict"}.get(verdict, verdict)


def _measured(point: MeasuredPoint) -> Headline:
    """The effective numbers of a measure, for a study without a pruned model."""
    weights, rows = sum(each.rows * each.columns for each in point.matrices), sum(each.rows for each in point.matrices)
    kept = sum(each.kept for each in point.matrices)
    shares = [(share, each.rows) for each in point.matrices if (share := effective_share(each)) is not None]
    entries = [(f"{percent_cell(1 - kept / weights)} %", f"of {weights:,} weights would be removed by EMP at β 1")]
    if len(shares) == len(point.matrices):
        mean = sum(share * count for share, count in shares) / rows
        entries.append((f"{percent_cell(mean)} %", f"N_eff / N, mean over {count_of(rows, 'row')}"))
    label = label_of(point)
    return Headline(label, (Tile("What was measured", tuple(entries), "Nothing was pruned."), _extremes(point)))


def _extremes(point: MeasuredPoint) -> Tile:
    known = [each for each in point.matrices if effective_share(each) is not None]
    ordered = sorted(known, key=lambda each: effective_share(each) or 0.0)
    ends = [("most redundant", ordered[0]), ("least redundant", ordered[-1])] if known else []
    entries = [
        (
            f"{percent_cell(effective_share(each))} %",
            f"{words}: {each.role}" + ("" if each.block is None else f", block {each.block}"),
        )
        for words, each in ends
    ]
    return Tile("Where", tuple(entries), "N_eff / N, mean over the rows of a matrix")


def _amount(measure: str, change: Change) -> str:
    text = change_text(measure, change)
    if not in_percent(measure) or text == "-":
        return text
    number, mark, _ = text.partition(f" {UNPAIRED}")
    return f"{number} points{mark}"


def _number(measure: str, value: float) -> str:
    return f"{formatted(value, 2)} %" if in_percent(measure) else formatted(value)
