"""The head of a report: for the main points of a study, what was pruned, what it cost, and how it compares with a baseline."""

from collections.abc import Iterable
from dataclasses import dataclass

from emp_llm.common.errors import count_of
from emp_llm.common.tables import percent_cell
from emp_llm.evaluation.values import UNPAIRED, Change, Value, change_of, change_text, formatted, in_percent
from emp_llm.reporting.page_tables import MATCHES, verdict_of
from emp_llm.reporting.studies.curves import Difference, differences, main_measures
from emp_llm.reporting.studies.measured_points import MeasuredPoint
from emp_llm.reporting.studies.study import Study, StudySuite, label_of

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
    weights, rows = sum(each.weights for each in point.matrices), sum(each.rows for each in point.matrices)
    kept = sum(each.kept for each in point.matrices)
    shares = [(each.effective_share, each.rows) for each in point.matrices if each.effective_share is not None]
    entries = [(f"{percent_cell(1 - kept / weights)} %", f"of {weights:,} weights would be removed by EMP at β 1")]
    if len(shares) == len(point.matrices):
        mean = sum(share * count for share, count in shares) / rows
        entries.append((f"{percent_cell(mean)} %", f"N_eff / N, mean over {count_of(rows, 'row')}"))
    label = label_of(point)
    return Headline(label, (Tile("What was measured", tuple(entries), "Nothing was pruned."), _extremes(point)))


def _extremes(point: MeasuredPoint) -> Tile:
    known = [each for each in point.matrices if each.effective_share is not None]
    ordered = sorted(known, key=lambda each: each.effective_share or 0.0)
    ends = [("most redundant", ordered[0]), ("least redundant", ordered[-1])] if known else []
    entries = [
        (
            f"{percent_cell(each.effective_share)} %",
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
