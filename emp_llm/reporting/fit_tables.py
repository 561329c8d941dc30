"""Tables of a fit to the calibration text: the relative output error of the layers before and after it.

The error is sum_t ||What xhat_t - W x_t||^2 / sum_t ||W x_t||^2, with the inputs xhat in the pruned and x in the dense model.
The sequences held out guard against fitting the calibration text: weights are not fitted to them.
"""

from collections.abc import Iterable, Sequence

from emp_llm.common.errors import count_of
from emp_llm.common.tables import Rows, percent_cell
from emp_llm.records.run_report import FitRecord, RunReport
from emp_llm.reporting.studies.study import Study, label_of

_ERRORS = ("error_before", "error_after", "held_out_before", "held_out_after")


def fit_lines(report: RunReport) -> list[str]:
    """One line: the mean output error over the fitted layers, before and after; none without a fit."""
    before, after, held_before, held_after = (_mean(report.fits.values(), name) for name in _ERRORS)
    if before is None or after is None:
        return []
    held = ""
    if held_before is not None and held_after is not None:
        held = f", held out {percent_cell(held_before)} % to {percent_cell(held_after)} %"
    fitted = sum(each.error_after is not None for each in report.fits.values())
    return [
        f"output error, mean of {count_of(fitted, 'layer')}: calibration text {percent_cell(before)} % to "
        f"{percent_cell(after)} %{held}"
    ]


def fit_rows(study: Study) -> Rows:
    """The mean output error of each role's layers before and after the fit, and the largest one held out, for each point."""
    rows = [["method", "layers", "before %", "after %", "held out before %", "held out after %", "largest held out after %"]]
    for point in study.points:
        for role in dict.fromkeys(layer.role for layer in point.fits):
            own = [layer.fit for layer in point.fits if layer.role == role]
            largest = max((fit.held_out_after for fit in own if fit.held_out_after is not None), default=None)
            cells = [percent_cell(value) for value in (*(_mean(own, name) for name in _ERRORS), largest)]
            rows.append([label_of(point), f"{role} x {len(own)}", *cells])
    return rows


def layer_fit_rows(study: Study) -> Rows:
    """Every layer's output errors with all digits, for the CSV file."""
    rows = [["study", "point", "method", "layer", "tokens", "damping", *_ERRORS]]
    for point in study.points:
        for layer in point.fits:
            values = [getattr(layer.fit, name) for name in ("tokens", "damping", *_ERRORS)]
            cells = ["" if value is None else repr(value) for value in values]
            rows.append([study.title, point.name, point.method or "", layer.name, *cells])
    return rows


def _mean(fits: Iterable[FitRecord] | Sequence[FitRecord], name: str) -> float | None:
    """The mean of an error over the layers for which it is known."""
    known = [value for fit in fits if (value := getattr(fit, name)) is not None]
    return sum(known) / len(known) if known else None
