"""The parts of a report from top to bottom: headlines, sentences, figures and tables. `page_markup` writes them."""

from collections.abc import Sequence
from dataclasses import dataclass

from emp_llm.common.errors import count_of
from emp_llm.common.tables import Rows
from emp_llm.evaluation.values import UNPAIRED
from emp_llm.records.bench import Bench
from emp_llm.reporting.figures.style import Drawing
from emp_llm.reporting.fit_tables import fit_rows
from emp_llm.reporting.headlines import Headline, headlines
from emp_llm.reporting.page_tables import difference_rows, point_rows, role_rows, verdict_rows
from emp_llm.reporting.speed_tables import SPEED_NOTE, speed_rows
from emp_llm.reporting.structure_tables import cost_rows, speed_notes, structure_rows
from emp_llm.reporting.studies.study import Study, label_of

_POINTS = "All points"
_REDUNDANT = "Where the model is redundant"
_FITS = "Output error of the fitted layers"
_ERROR = (
    "The squared error of the layers' outputs as a share of the dense outputs, with the masked weights (before) and with the "
    "fitted ones (after). Held out: on sequences of the calibration text to which no weight was fitted."
)
_SPEED = "Speed and memory"
_UNITS = "Heads and neurons"
_QUESTION = "Is EMP better at the same sparsity?"
_CLEARLY = "Number of points. Clearly: by more than two standard errors of the difference, where these are known."
_DIFFERENCES = (
    "EMP − baseline: the difference of perplexities in percent, and of accuracies in points. Both models have the same number "
    "of zeros, in total or in every matrix."
)
_PAIRED = (
    "± of a difference: its paired standard error. Both models were judged on the same examples and blocks of text, and only "
    "those count on which they differ."
)
_PARTIAL = "* partial: only some of the examples or of the text."
_UNPAIRED = (
    f"{UNPAIRED} An unpaired standard error: the root of the sum of both squares, as if the two models had answered different "
    "examples. The results of one of them do not hold its answers (an older emp-llm wrote them), or the examples differ. "
    "Paired errors are usually smaller, so a difference that is not clear here may still be real."
)


@dataclass(frozen=True)
class Heading:
    text: str
    level: int = 2


@dataclass(frozen=True)
class Paragraph:
    text: str


@dataclass(frozen=True)
class Facts:
    """Short facts, each with its name."""

    facts: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Table:
    rows: Rows
    title: str


PagePart = Heading | Paragraph | Facts | Headline | Table | Drawing


def page_parts(
    title: str,
    studies: Sequence[tuple[Study, list[Drawing]]],
    benches: Sequence[Bench] = (),
) -> list[PagePart]:
    """The parts of a report from top to bottom."""
    parts: list[PagePart] = [Heading(title, 1)]
    for study, drawings in studies:
        heads = headlines(study)
        parts += [Heading(study.title), *heads, _facts(study)]
        if len(study.pruned) > len(heads):
            parts.append(Paragraph(f"All {count_of(len(study.pruned), 'pruned model')} are listed under “{_POINTS}”."))
        left = {drawing.name: drawing for drawing in drawings}
        rows = verdict_rows(study)
        if len(rows) > 1:
            parts += [Heading(_QUESTION, 3), Table(rows, _QUESTION), Paragraph(_CLEARLY)]
        parts += [left.pop(drawing.name) for drawing in drawings if drawing.answers]
        for suite in study.suites:
            rows = difference_rows(study, suite)
            named = [Paragraph(f"Suite {suite.name}:")] if len(study.suites) > 1 else []
            parts += (
                [*named, Table(rows, f"differences, suite {suite.name}"), Paragraph(_DIFFERENCES), *_error_notes(rows)]
                if len(rows) > 1
                else []
            )
        if len(study.pruned):
            rows = point_rows(study)
            parts += [Heading(_POINTS, 3), Table(rows, _POINTS), *_error_notes(rows)]
        rows = fit_rows(study)
        if len(rows) > 1:
            parts += [Heading(_FITS, 3), Table(rows, _FITS), Paragraph(_ERROR)]
        parts += _structures(study)
        rows = role_rows(study)
        if len(rows) > 1:
            parts += [Heading(_REDUNDANT, 3), Table(rows, _REDUNDANT)]
        parts += left.values()
    if benches:
        parts += [Heading(_SPEED), Table(speed_rows(benches), _SPEED), Paragraph(SPEED_NOTE)]
    return parts


def _structures(study: Study) -> list[PagePart]:
    """For each structured point, the heads and neurons that stay, and size and speed."""
    parts: list[PagePart] = []
    for point in study.points:
        if point.structure is not None:
            title = f"{label_of(point)} ({point.name})"
            parts += [Heading(f"{_UNITS}: {title}", 3), Table(structure_rows(point.structure), f"{_UNITS}, {title}")]
            parts += [Table(cost_rows(point.structure), f"{_SPEED}, {title}"), *map(Paragraph, speed_notes(point.structure))]
    return parts


def _facts(study: Study) -> Facts:
    """Facts about the model and its calibration. A fact in which the points differ lists all its values."""
    facts: dict[str, list[str]] = {}
    for point in study.points:
        for name, fact in point.facts.items():
            facts.setdefault(name, []).append(fact)
    facts = facts or {"model": [study.model]}
    return Facts(tuple((name, "; ".join(dict.fromkeys(texts))) for name, texts in facts.items()))


def _error_notes(rows: Rows) -> list[PagePart]:
    """The explanation of a table's marks and of the standard errors of its differences: the kinds that it holds."""
    changes = [cell for row in rows[1:] for cell in row if "±" in cell and cell[0] in "+-0"]
    paired = [Paragraph(_PAIRED)] if any(UNPAIRED not in cell for cell in changes) else []
    unpaired = [Paragraph(_UNPAIRED)] if any(UNPAIRED in cell for cell in changes) else []
    partial = [Paragraph(_PARTIAL)] if any(cell.endswith(" *") for row in rows[1:] for cell in row) else []
    return [*paired, *unpaired, *partial]
