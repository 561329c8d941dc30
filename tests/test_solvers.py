"""Refit and SparseGPT on bare tensors, against float64 solutions row by row and an
implementation column by column.
"""

import math
from functools import partial

import pytest
import torch
from bench_refit import exact_rows
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from emp_llm.selection.rule import NonFiniteError
from emp_llm.update.least_squares import (
    add_moments,
    add_product,
    output_error,
    refit_rows,
    symmetric,
    workspace_bytes,
)
from emp_llm.update.update import admm, damping_for, sparsegpt

KINDS = ("plain", "massive", "correlated", "few tokens")


def inputs_of(kind: str, inputs: int = 96, seed: int = 0) -> Tensor:
    """Inputs like those of real layers: float64, shape (tokens, inputs)."""
    generator = torch.Generator().manual_seed(seed)
    tokens = inputs // 3 if kind == "few tokens" else 12 * inputs
    hidden = torch.randn(tokens, inputs, generator=generator, dtype=torch.float64)
    spectrum = torch.logspace(
        0, {"plain": -0.5, "correlated": -3}.get(kind, -1), inputs, dtype=torch.float64
    )
    mixed = (
        hidden * spectrum @ torch.randn(inputs, inputs, generator=generator, dtype=torch.float64)
    )
    if kind == "massive":
        mixed[:, torch.randperm(inputs, generator=generator)[:3]] *= 1000
    return mixed


def layer(outputs: int, inputs: int, kept: float = 0.5, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Random weights and a mask with a different count in every row."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(outputs, inputs, generator=generator)
    return weight, torch.rand(outputs, inputs, generator=generator) < kept


def objective(
    fitted: Tensor, weight: Tensor, mask: Tensor, xhat: Tensor, x: Tensor, damping: float
) -> Tensor:
    """F of each row, from the tokens themselves."""
    shift = damping * xhat.square().sum(0).mean()
    error = (xhat @ fitted.double().T - x @ weight.double().T).square().sum(0)
    return error + shift * ((fitted - weight).double() * mask).square().sum(1)


def moments(xhat: Tensor, x: Tensor | None = None) -> Tensor:
    return (xhat.T @ (xhat if x is None else x)).float()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("two_streams", [False, True])
def test_agrees_with_exact_rows(kind: str, two_streams: bool) -> None:
    inputs = 160
    x = inputs_of(kind, inputs)
    xhat = (
        x + 0.1 * x.std(0) * torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
        if two_streams
        else x
    )
    weight, mask = layer(40, inputs)
    # Else the damping of the large inputs holds all others in place.
    damping = 1e-8 if kind == "massive" else 0.01
    energy = (x @ weight.double().T).square().sum(0)
    right = moments(x @ weight.double().T, xhat) if two_streams else None
    solution = refit_rows(weight, mask, moments(xhat), right, damping=damping, energy=energy)
    exact = exact_rows(weight, mask, xhat.T @ xhat, xhat.T @ x if two_streams else None, damping)
    best, reached, unmoved = (
        objective(v, weight, mask, xhat, x, damping)
        for v in (exact, solution.weight, weight * mask)
    )
    assert float(((reached - best) / best).max()) < 1e-3
    assert float(unmoved.sum()) > 1.1 * float(best.sum())  # there was something to gain
    assert solution.damping == damping
    error = output_error(solution.weight, weight, moments(xhat), right, energy)
    expected = objective(solution.weight, weight, mask, xhat, x, 0)
    assert bool(((error - expected).abs() <= 1e-3 * expected + 1e-6 * energy).all())


@settings(max_examples=40, deadline=None)
@given(
    outputs=st.integers(1, 9),
    inputs=st.integers(1, 40),
    tokens=st.integers(1, 60),
    kept=st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]),
    damping=st.sampled_from([0.0, 1e-4, 0.01, 1.0]),
    scale=st.sampled_from([1e-6, 1.0, 1e6]),
    streams=st.integers(1, 2),
    seed=st.integers(0, 10**6),
)
def test_properties(
    outputs: int,
    inputs: int,
    tokens: int,
    kept: float,
    damping: float,
    scale: float,
    streams: int,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    xhat = scale * torch.randn(tokens, inputs, generator=generator, dtype=torch.float64)
    x = (
        xhat
        if streams == 1
        else xhat
        + 0.3 * scale * torch.randn(tokens, inputs, generator=generator, dtype=torch.float64)
    )
    weight, mask = layer(outputs, inputs, kept, seed)
    y = x @ weight.double().T
    right, energy = (None, None) if streams == 1 else (moments(y, xhat), y.square().sum(0))
    solution = refit_rows(weight, mask, moments(xhat), right, damping=damping, energy=energy)
    assert bool(solution.weight.isfinite().all())
    assert not bool(solution.weight[~mask].any())
    error = [objective(v, weight, mask, xhat, x, 0) for v in (weight * mask, solution.weight)]
    assert bool((error[1] <= error[0] * (1 + 1e-5) + 1e-6 * y.square().sum(0)).all())
    again = refit_rows(weight, mask, moments(xhat), right, damping=damping, energy=energy)
    assert torch.equal(solution.weight, again.weight)


def test_damping_for_a_number_of_tokens_helps_on_others() -> None:
    """With few tokens, a fit that is damped too little is worse than none."""
    generator = torch.Generator().manual_seed(0)
    shared, noise = (
        torch.randn(2000, width, generator=generator, dtype=torch.float64) for width in (20, 160)
    )
    x = noise + 0.2 * shared @ torch.randn(20, 160, generator=generator, dtype=torch.float64)
    seen = x[:240]
    unseen = x[240:]
    weight, mask = layer(30, 160)
    fits = [
        refit_rows(weight, mask, moments(seen), damping=damping).weight
        for damping in (0.001, damping_for(160, 240))
    ]
    unmoved, little, right = (
        objective(v, weight, mask, unseen, unseen, 0).sum() for v in (weight * mask, *fits)
    )
    assert right < 0.9 * little
    assert right < 0.9 * unmoved
    assert damping_for(160, 240) == pytest.approx(2 / 3)
    assert damping_for(160, 10**9) == 0.01
    assert damping_for(160, 0) == 160


def test_all_kept_gives_the_dense_weights() -> None:
    weight, mask = layer(8, 96, kept=1.0)
    solution = refit_rows(weight.bfloat16(), mask, moments(inputs_of("correlated")))
    assert torch.equal(solution.weight, weight.bfloat16().float())


def test_inputs_that_are_always_zero_keep_their_weights() -> None:
    x = inputs_of("plain", 24)
    x[:, 5] = 0
    weight, mask = layer(6, 24, kept=0.7)
    for damping in (0.0, 0.01):
        solution = refit_rows(weight, mask, moments(x), damping=damping)
        assert torch.equal(solution.weight[:, 5], (weight * mask)[:, 5])


def test_an_indefinite_or_singular_gram_raises_the_damping() -> None:
    weight, mask = layer(6, 24, kept=0.7)
    gram = moments(inputs_of("plain", 24))
    gram -= 0.2 * gram.diagonal().mean() * torch.eye(24)  # as rounding does, but more of it
    assert float(torch.linalg.eigvalsh(gram)[0]) < 0
    solution = refit_rows(weight, mask, gram, damping=0.01)
    assert solution.damping > 0.01
    assert bool(solution.weight.isfinite().all())
    for hopeless in (torch.zeros(24, 24), torch.full((24, 24), -1e30).fill_diagonal_(1.0)):
        assert torch.equal(refit_rows(weight, mask, hopeless).weight, weight * mask)
    searched = sparsegpt(layer(4, 16)[0], torch.ones(16, 16), count=32, damping=0.0)
    assert searched.damping > 0
    assert bool(searched.weight.isfinite().all())


def test_products_are_in_full_float32() -> None:
    """Also where the user allows less, and the user's setting stays."""
    weight, mask = layer(8, 96)
    gram = moments(inputs_of("plain"))
    expected = refit_rows(weight, mask, gram), sparsegpt(weight, gram, count=384)
    torch.set_float32_matmul_precision("medium")
    try:
        solutions = refit_rows(weight, mask, gram), sparsegpt(weight, gram, count=384)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")
    assert all(
        torch.equal(one.weight, other.weight)
        for one, other in zip(expected, solutions, strict=True)
    )


def test_rows_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, mask = layer(300, 24)
    gram = moments(inputs_of("plain", 24))
    whole = refit_rows(weight, mask, gram)
    more = workspace_bytes(300, 24)
    monkeypatch.setattr("emp_llm.update.least_squares._CHUNK", 1)  # 256 rows a chunk
    chunks = refit_rows(weight, mask, gram)
    assert workspace_bytes(300, 24) < more
    torch.testing.assert_close(whole.weight, chunks.weight, rtol=0, atol=1e-3)


def test_moments_of_any_size() -> None:
    """Also those that float32 holds as subnormal numbers, as behind a norm whose weights are
    tiny; and products beyond it.
    """
    weight, mask = layer(6, 24)
    for scale in (1e-21, 1e-19, 1e15):
        fitted = [
            refit_rows(weight, mask, moments(each * inputs_of("plain", 24))).weight
            for each in (1.0, scale)
        ]
        torch.testing.assert_close(fitted[0], fitted[1], rtol=0, atol=1e-2)
        assert not torch.equal(fitted[0], weight * mask)
    gram = moments(1e15 * inputs_of("plain", 24))
    with pytest.raises(NonFiniteError, match="their products go beyond float32"):
        admm(1e18 * weight, gram, counts=mask.sum(1))
    with pytest.raises(NonFiniteError, match="their products go beyond float32"):
        refit_rows(1e20 * weight, mask, gram / 1e30)


def test_bits_do_not_depend_on_the_number_of_threads() -> None:
    """Neither products with long sums nor factors. MKL shares both among threads."""
    weight, mask = layer(8, 544)
    x = inputs_of("correlated", 544).float()
    runs = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            gram = add_product(x.T, x)
            right = add_product(weight, gram)
            each = [
                refit_rows(weight, mask, gram),
                admm(weight, gram, counts=mask.sum(1), right=right),
            ]
            each.append(sparsegpt(weight, gram, count=int(mask.sum())))
            runs.append([gram, *(solution.weight for solution in each)])
    finally:
        torch.set_num_threads(1)
    for other in runs[1:]:
        assert all(map(torch.equal, runs[0], other))


@pytest.mark.parametrize("name", ["weight", "gram", "right"])
def test_values_that_are_not_finite(name: str) -> None:
    weight, mask = layer(6, 24)
    tensors = {"weight": weight, "gram": torch.eye(24), "right": torch.ones(6, 24)}
    tensors[name][3, 3] = math.nan
    solvers = [partial(refit_rows, mask=mask, energy=torch.ones(6))]
    solvers.append(partial(admm, pattern=(2, 4)))
    if name != "right":
        solvers.append(lambda weight, gram, right: sparsegpt(weight, gram, count=24))
    for solve in solvers:
        with pytest.raises(NonFiniteError, match=f"{name} holds NaN"):
            solve(**tensors)


def slow_sparsegpt(
    weight: Tensor,
    gram: Tensor,
    count: int | None,
    pattern: tuple[int, int] | None,
    block: int,
    damping: float,
) -> tuple[Tensor, Tensor]:
    """SparseGPT from the paper's section 3, row by row: after column j, H^-1 loses its row and
    column j by elimination.
    """
    weight = weight.double().clone()
    hessian = gram.double().clone()
    outputs, inputs = weight.shape
    dead = hessian.diagonal() == 0
    shift = damping * hessian.diagonal().mean()
    hessian[dead, dead] = 1
    weight[:, dead] = 0
    hessian += shift * torch.eye(inputs, dtype=torch.float64)
    inverse = torch.linalg.inv(hessian)
    mask = torch.ones(outputs, inputs, dtype=torch.bool)
    # The diagonal of the inverse when its column is reached.
    costs = torch.empty(inputs, dtype=torch.float64)
    left = inverse.clone()
    for column in range(inputs):
        costs[column] = left[column, column]
        left = left - torch.outer(left[:, column], left[column]) / left[column, column]
    removed = 0
    for column in range(inputs):
        width = pattern[1] if pattern else block
        if column % width == 0:
            end = min(column + width, inputs)
            scores = weight[:, column:end] ** 2 / costs[column:end]
            if pattern:
                for row in range(outputs):
                    order = sorted(
                        range(width), key=lambda place: (-float(scores[row, place]), place)
                    )
                    mask[row, [column + place for place in order[pattern[0] :]]] = False
            else:
                assert count is not None
                now = (weight.numel() - count) * end // inputs - removed
                removed += now
                flat = scores.reshape(-1).tolist()
                order = sorted(range(len(flat)), key=lambda place: (flat[place], -place))
                for place in order[:now]:
                    mask[place // (end - column), column + place % (end - column)] = False
        for row in range(outputs):
            if not mask[row, column]:
                weight[row] -= weight[row, column] / inverse[column, column] * inverse[column]
        weight[:, column] *= mask[:, column]
        inverse = (
            inverse - torch.outer(inverse[:, column], inverse[column]) / inverse[column, column]
        )
        inverse[column] = inverse[:, column] = 0
    return weight, mask


@pytest.mark.parametrize("kind", ["correlated", "few tokens"])
@pytest.mark.parametrize(
    ("count", "pattern", "block"),
    [
        (288, None, 16),
        (363, None, 128),
        (None, (2, 4), 16),
        (None, (5, 8), 128),
        (None, (3, 6), 16),  # a block holds whole groups
        (None, (8, 24), 16),
        (None, (1, 3), 128),
    ],
)
def test_sparsegpt_agrees_with_a_slow_one(
    kind: str, count: int | None, pattern: tuple[int, int] | None, block: int
) -> None:
    x = inputs_of(kind, 48)
    x[:, 11] = 0
    weight = layer(12, 48)[0]
    solution = sparsegpt(weight, moments(x), count=count, pattern=pattern, block=block)
    expected, mask = slow_sparsegpt(weight, moments(x), count, pattern, block, 0.01)
    assert torch.equal(solution.mask, mask)
    torch.testing.assert_close(solution.weight.double(), expected, rtol=1e-3, atol=1e-3)
    assert not bool(solution.weight[~solution.mask].any())
    assert solution.damping == 0.01


@settings(max_examples=25, deadline=None)
@given(
    outputs=st.integers(1, 9),
    inputs=st.integers(1, 40),
    tokens=st.integers(1, 60),
    share=st.floats(0, 1),
    block=st.sampled_from([1, 7, 16, 128]),
)
def test_sparsegpt_keeps_the_exact_number(
    outputs: int, inputs: int, tokens: int, share: float, block: int
) -> None:
    count = round(share * outputs * inputs)
    x = torch.randn(tokens, inputs, generator=torch.Generator().manual_seed(outputs))
    solution = sparsegpt(
        layer(outputs, inputs)[0],
        x.T @ x,
        count=count,
        block=block,
        damping=0.0 if tokens > 2 else 0.01,
    )
    assert int(solution.mask.sum()) == count
    assert bool(solution.weight.isfinite().all())
    assert not bool(solution.weight[~solution.mask].any())


def test_sparsegpt_with_a_gram_of_zeros_and_equal_scores() -> None:
    solution = sparsegpt(torch.ones(2, 8), torch.eye(8), count=8, block=4)
    # The lowest index of each block of columns.
    assert solution.mask.tolist() == [[True] * 4 + [True] * 4, [False] * 8]
    nothing = sparsegpt(torch.ones(2, 8), torch.zeros(8, 8), pattern=(2, 4))
    assert not nothing.weight.any()
    assert nothing.mask.sum(1).tolist() == [4, 4]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("tokens", "inputs"), [(1, 8), (700, 40), (2100, 300), (64, 576)])
def test_moments_of_tokens(tokens: int, inputs: int, dtype: torch.dtype) -> None:
    """Products of bfloat16 numbers are exact, and sums in float32, on any number of threads."""
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, inputs, generator=generator)
    x[:, 3] *= 300  # like a massive activation
    x = x.to(dtype)
    y = (x + torch.randn(tokens, inputs, generator=generator)).to(dtype)[:, : inputs // 2]
    gram = symmetric(add_moments(x, x, add_moments(x, x)))
    cross = add_moments(y, x)
    sizes = x.double().square().sum(0).sqrt()
    of_y = y.double().square().sum(0).sqrt()
    close = 2e-6
    error = gram.double() / 2 - x.double().T @ x.double()
    assert float((error / sizes / sizes[:, None]).abs().max()) < close
    error = cross.double() - y.double().T @ x.double()
    assert float((error / sizes / of_y[:, None]).abs().max()) < close
    assert torch.equal(gram, gram.T)
    threads = torch.get_num_threads()
    try:
        for number in (1, 2):
            torch.set_num_threads(number)
            assert torch.equal(add_moments(y, x), cross)
    finally:
        torch.set_num_threads(threads)
