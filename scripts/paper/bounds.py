"""The two bounds of the paper as curves, with simulated points: the figure "Lower and upper bounds
associated with pruning".

    python scripts/paper/bounds.py [--draws N] [--output DIR] [--threads N]

Left: the tight lower bound of the effective mass s_eff over the effective number N_eff (theorem
4.2), N = 1000, with the points of random scores of several kinds and of the scores that attain the
bound. Right: the upper bound of the loss change over rho = N_eff / N, divided by |theta|_1^2 Tr(H),
with the loss changes of quadratic losses. A few seconds.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from paper_pages import Page, options_of, written_page
from torch import Tensor

from emp_llm.common.tables import markdown_table
from emp_llm.reporting.page import COLOURS, MARKERS, new_figure, render
from emp_llm.selection.effective import (
    effective_mask,
    effective_mass,
    effective_mass_bound,
    effective_number,
    loss_change_bound,
)

SIZE = 1000  # N of the paper's figure


@dataclass(frozen=True)
class Points:
    """Simulated scores of one kind, one value for each draw.

    Attributes:
        n_eff, s_eff: of the scores.
        uniform: loss change / (|theta|_1^2 Tr(H)) for a curvature that is the same in all
            directions.
        worst: the same for a curvature that is all in the direction of the removed weights.
    """

    n_eff: Tensor
    s_eff: Tensor
    uniform: Tensor
    worst: Tensor


def main(line: list[str] | None = None) -> None:
    """Simulate, and write the page and its figure."""
    parser = options_of(__doc__)
    parser.add_argument("--draws", type=int, default=300, help="scores of each kind")
    options = parser.parse_args(line)
    with written_page("bounds", "The two bounds", options, line) as page:
        points = {kind: simulate(draw, options.draws) for kind, draw in KINDS.items()}
        _add_figure(page, points)
        _add_tables(page, points)


def simulate(draw: Callable[[int, torch.Generator], Tensor], draws: int) -> Points:
    """The effective number and mass of random scores of one kind, and the loss change when the
    others are removed.
    """
    scores = draw(draws, torch.Generator().manual_seed(0)).double()
    omega = scores.abs() / scores.abs().sum(1, keepdim=True)
    # |theta* - theta_k|^2 / |theta|_1^2.
    removed = torch.where(effective_mask(scores), 0.0, omega).square().sum(1)
    return Points(effective_number(scores), effective_mass(scores), removed / 2 / SIZE, removed / 2)


def loss_bound(rho: float) -> float:
    """The bound of equation 5 for |theta|_1 = 1 and Tr(H) = 1."""
    return loss_change_bound(torch.full((SIZE,), 1 / SIZE, dtype=torch.float64), 1.0, rho * SIZE)


def _spread(count: int, low: float, high: float) -> Tensor:
    return torch.linspace(low, high, count, dtype=torch.float64)[:, None]


def _normals(count: int, generator: torch.Generator) -> Tensor:
    return torch.randn(count, SIZE, generator=generator, dtype=torch.float64)


def _uniforms(count: int, generator: torch.Generator) -> Tensor:
    return torch.rand(count, SIZE, generator=generator, dtype=torch.float64)


def _attaining(count: int, _: torch.Generator) -> Tensor:
    """Scores just inside the closure that p_nu lies in: one large score, the others equal, N_eff
    just below nu + 1.
    """
    n_eff = torch.linspace(3, SIZE - 1, count, dtype=torch.float64).round() - 1e-9
    step = ((1 / n_eff - 1 / SIZE) * SIZE / (SIZE - 1)).sqrt()
    scores = ((1 - step) / SIZE)[:, None].repeat(1, SIZE)
    scores[:, 0] += step
    return scores


KINDS: dict[str, Callable[[int, torch.Generator], Tensor]] = {
    "normal": _normals,
    "uniform, from a to 1": lambda n, g: (
        _spread(n, 0, 0.99) + (1 - _spread(n, 0, 0.99)) * _uniforms(n, g)
    ),
    "exponential": lambda n, g: -_uniforms(n, g).log(),
    "log-normal, sigma 0.1 to 3": lambda n, g: (_spread(n, 0.1, 3) * _normals(n, g)).exp(),
    "Pareto, exponent 0.3 to 4": lambda n, g: _uniforms(n, g) ** (-1 / _spread(n, 0.3, 4)),
    "p_nu, which attains the bound": _attaining,
}


def _add_figure(page: Page, points: dict[str, Points]) -> None:
    with new_figure(3.6) as figure:
        left, right = figure.subplots(1, 2)
        numbers = torch.tensor([*range(2, 50, 2), *range(50, SIZE, 25), SIZE], dtype=torch.float64)
        left.plot(numbers, effective_mass_bound(numbers, SIZE), color="black", label="the bound")
        ratios = [
            number / SIZE
            for number in (*range(2, 50, 2), *range(50, SIZE, 25), *range(980, SIZE, 3))
        ]
        right.plot(ratios, [loss_bound(rho) for rho in ratios], color="black")
        for place, (kind, found) in enumerate(points.items()):
            style: dict[str, Any] = {
                "color": COLOURS[place],
                "marker": MARKERS[place],
                "linestyle": "",
                "markersize": 2.5,
            }
            some = slice(None, None, max(1, len(found.n_eff) // 40))
            left.plot(found.n_eff[some], found.s_eff[some], label=kind, **style)
            right.plot(found.n_eff[some] / SIZE, found.uniform[some], **style)
        left.set_xlabel(r"$N_\mathrm{eff}$", parse_math=True)
        left.set_ylabel("s_eff")
        right.set_yscale("log")
        right.set_ylim(1e-11, 1e3)
        ticks = [10.0**power for power in range(-11, 4, 2)]
        right.set_yticks(ticks, [f"{tick:.0e}" for tick in ticks])
        right.minorticks_off()
        right.set_xlabel("rho = N_eff / N")
        right.set_ylabel("loss change / (|theta|₁² Tr H)")
        figure.legend(loc="outside lower center", ncols=3)
        caption = (
            "Left: the effective mass of simulated scores lies above the tight bound; p_nu lies on "
            "it. Right: the loss change of quadratic losses with the same curvature in all "
            "directions, and its bound. N = 1000."
        )
        page.figure(render(figure, "bounds", "Bounds and simulated scores", caption))


def _add_tables(page: Page, points: dict[str, Points]) -> None:
    rows = [
        [
            "scores",
            "N_eff",
            "least s_eff − bound",
            "below",
            "loss changes above their bound",
            "the same, worst curvature",
        ]
    ]
    for kind, found in points.items():
        margin = found.s_eff - effective_mass_bound(found.n_eff, SIZE)
        limit = torch.tensor(
            [loss_bound(math.floor(number) / SIZE) for number in found.n_eff.tolist()]
        )
        above = [
            f"{int((each > limit).sum())} of {len(limit)}" for each in (found.uniform, found.worst)
        ]
        span = f"{float(found.n_eff.min()):.0f} to {float(found.n_eff.max()):.0f}"
        least = f"{float(margin.min()):.1e}"
        rows.append([kind, span, least, f"{int((margin < -1e-9).sum())} of {len(margin)}", *above])
    page.add("## Simulated scores")
    page.add(
        "For magnitude scores of weights theta and a quadratic loss with Hessian H, the loss "
        "changes by half of d'Hd when the weights d are removed. It is compared with equation 5 "
        "for a Hessian that curves the same in all directions, and for one that curves only along "
        "d, the worst case for its trace."
    )
    page.add(markdown_table(rows, as_markdown=True))
    page.add("## Values of the curves")
    values = (0.01, 0.05, 0.1, 0.2, 0.3, 0.5, 2 / math.pi, 0.8, 0.9)
    rows = [["rho = N_eff / N", *(f"{rho:.2f}" for rho in values)]]
    rows.append(
        [
            "s_eff at least",
            *(f"{float(effective_mass_bound(rho * SIZE, SIZE)):.4f}" for rho in values),
        ]
    )
    rows.append(
        [
            "loss change at most, divided by the squared l1 norm and Tr(H)",
            *(f"{loss_bound(rho):.2g}" for rho in values),
        ]
    )
    page.add(markdown_table(rows, as_markdown=True))
    page.explain(
        {
            "the lower bound": "Nothing differs: no simulated score lies below it, and p_nu "
            "attains it.",
            "the upper bound": "The paper calls it almost 0 for rho above 0.2. At rho = 0.2 it is "
            f"{loss_bound(0.2):.2f}, small only beside its largest values on a linear axis "
            f"({loss_bound(0.01):.0f} at rho = 0.01); it falls below 0.01 at rho = "
            f"{_falls_below(0.01):.2f}.",
            "points above the upper bound": "Equation 5 holds for large N and for curvature that "
            "is not concentrated on the removed weights. With fewer than about the cube root of N "
            "removed weights (10 of 1000) it falls below the change for equal curvature; for the "
            "worst curvature it fails earlier, where scores are nearly equal.",
        }
    )


def _falls_below(limit: float) -> float:
    return next(number / SIZE for number in range(2, SIZE) if loss_bound(number / SIZE) < limit)


if __name__ == "__main__":
    main()
