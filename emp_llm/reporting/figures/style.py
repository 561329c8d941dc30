"""The style of all figures, and their files: the same figure always gives the same bytes."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from typing import Any

from emp_llm.common.errors import UserError, printable, reason

WIDTH = 8.0  # inches
_DPI = 150
# Okabe and Ito, "Color universal design" (2008): distinct for all kinds of colour vision.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
GREY = "#666666"
ON_DARK, ON_BRIGHT = "#fefefe", "#111111"  # on a map's colours, which are the same on a dark page: unlike white and black
LABEL = 36  # characters of a name that fit beside a panel
N_EFF = r"$N_\mathrm{eff}$"  # for labels with parse_math=True
_STYLE: dict[str, Any] = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Helvetica", "Arial", "sans-serif"],
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.labelsize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.8,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "lines.linewidth": 1.6,
    "lines.markersize": 5,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "text.parse_math": False,  # a dollar in a name is no mathematics
    "svg.fonttype": "none",
    "path.simplify": False,
}


@dataclass(frozen=True)
class Drawing:
    """A figure as files.

    Attributes:
        name: of its files, without extension; unique in a report.
        title, caption: title in a few words; explanation in sentences.
        svg, png: the content of the files.
        answers: whether it compares EMP with its baselines.
    """

    name: str
    title: str
    caption: str
    svg: bytes
    png: bytes
    answers: bool = False


def check_matplotlib() -> None:
    """Raise UserError, which names the extra, if matplotlib is not installed."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise UserError(
            f"Plots need matplotlib ({reason(error)}). Install it: pip install 'emp-llm[plots]', or add --no-plots."
        ) from error


@contextmanager
def styled() -> Iterator[None]:
    """Apply the style of figures while one is drawn; the user's matplotlib settings have no effect."""
    check_matplotlib()
    import matplotlib

    with matplotlib.rc_context(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # names in other scripts: boxes, in the PNG only
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_STYLE)
        yield


def new_figure(height: float) -> Any:
    """An empty figure of the common width for Agg, with no window and no global state; height in inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def drawn(figure: Any, name: str, title: str, caption: str, answers: bool = False) -> Drawing:
    """Render a finished figure as SVG and PNG, without dates or versions; call it within `styled`."""
    import matplotlib

    matplotlib.rcParams["svg.hashsalt"] = name  # distinct ids for the figures of one page
    figure.suptitle(printable(title, 76), x=0.01, ha="left", fontsize=11, weight="bold")
    svg, png = BytesIO(), BytesIO()
    figure.savefig(svg, format="svg", metadata={"Date": None, "Creator": None})
    figure.savefig(png, format="png", dpi=_DPI, metadata={"Software": None}, pil_kwargs={"optimize": True})
    return Drawing(name, title, caption, svg.getvalue(), png.getvalue(), answers)


def slug(text: str) -> str:
    """Text as part of a file name: its ASCII letters and digits in lower case, joined by hyphens."""
    words = "".join(letter if letter.isascii() and letter.isalnum() else " " for letter in text.lower()).split()
    return "-".join(words)[:60]
