"""Cuts, masks and budgets: exact counts, ties, and the same result for any blocks and threads."""

import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from emp_llm.models.architecture import Target
from emp_llm.options.words import recipe_of
from emp_llm.pruning.counts import counts_of, targets_of_folder
from emp_llm.pruning.masks import Chunk, Pruner
from emp_llm.pruning.scores import Scores
from emp_llm.selection.criteria import InputStatistics, magnitude, wanda
from emp_llm.selection.reference import (
    GroupSelector,
    Selection,
    largest_mask,
    select_rows,
    sum_rows,
    sum_vector,
)
from emp_llm.selection.rule import Group, KeepRule, spread_counts, uniform_counts

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def hostile_weights(rows: int, columns: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Random weights with ties, rows of zeros, rows of equal weights, subnormal numbers,
    outliers and negative zeros.
    """
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(rows, columns, generator=generator).mul_(0.02).to(dtype)
    weights[0::11] = 0
    weights[1::11] = 0.375
    weights[2::11, ::3] = -0.0
    weights[3::11] = torch.finfo(dtype).tiny
    weights[3::11, ::2] = torch.finfo(dtype).tiny / 4
    weights[4::11, columns // 2] = 900.0
    weights[5::11] = (weights[5::11] * 64).round() / 64
    return weights


def select(selector: GroupSelector, blocks: tuple[Tensor, ...]) -> list[Selection]:
    """Feed blocks of rows to a selector in all rounds."""
    for block in blocks:
        selector.add(block)
    while selector.searching():
        for block in blocks:
            selector.search(block)
    return [selector.select(block) for block in blocks]


def oracle(scores: np.ndarray, count: int) -> np.ndarray:
    """The mask from a stable sort in descending order, which keeps equal scores in the order of
    their index.
    """
    mask = np.zeros(scores.shape, dtype=bool)
    mask[np.argsort(-scores, kind="stable")[:count]] = True
    return mask


def oracle_counts(scores: np.ndarray) -> np.ndarray:
    """clip(floor(N_eff), 1, N) of each row, from float64 sums by numpy; N for a row of zeros."""
    total = scores.sum(1)
    squares = np.square(scores).sum(1)
    with np.errstate(invalid="ignore"):
        counts = np.clip(np.floor(total * total / squares), 1, scores.shape[1])
    return np.where(total == 0, scores.shape[1], counts).astype(int)


@given(st.integers(1, 200), st.sampled_from(DTYPES), st.integers(0, 1 << 30))
@settings(max_examples=60, deadline=None)
def test_exactly_the_largest_lowest_index_first(
    columns: int, dtype: torch.dtype, seed: int
) -> None:
    scores = hostile_weights(44, columns, dtype, seed)
    counts = torch.randint(0, columns + 1, (44,), generator=torch.Generator().manual_seed(seed))
    mask = largest_mask(scores, counts).numpy()
    values = scores.abs().double().numpy()
    for row in range(44):
        assert (mask[row] == oracle(values[row], int(counts[row]))).all()


@given(st.integers(1, 400), st.integers(1, 5), st.sampled_from(DTYPES), st.integers(0, 1 << 30))
@settings(max_examples=50, deadline=None)
def test_sums_add_to_64_lanes_in_order(
    columns: int, rows: int, dtype: torch.dtype, seed: int
) -> None:
    values = torch.randn(
        rows, columns, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    ).to(dtype)
    assert sum_rows(values, torch.abs)[0].tolist() == [
        sum_in_order(row) for row in values.abs().double().tolist()
    ]


def test_a_long_sum_has_the_same_order() -> None:
    values = torch.rand(100_003, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert float(sum_vector(values)) == sum_in_order(values.tolist())


def sum_in_order(values: list[float]) -> float:
    """The sum as defined: element i goes to lane i mod 64, then the lanes are folded in halves."""
    lanes = [0.0] * 64
    for i, value in enumerate(values):
        lanes[i % 64] += value
    while len(lanes) > 1:
        half = len(lanes) // 2
        lanes = [low + high for low, high in zip(lanes[:half], lanes[half:], strict=True)]
    return lanes[0]


@pytest.mark.parametrize("criterion", ["magnitude", "wanda"])
def test_ten_million_bf16_weights_against_a_float64_oracle(criterion: str) -> None:
    weights = hostile_weights(2443, 4096, torch.bfloat16)
    norms = torch.rand(4096, generator=torch.Generator().manual_seed(4)).mul(8)
    norms[7] = 3000.0
    scores = (
        magnitude(weights) if criterion == "magnitude" else wanda(weights, InputStatistics(norms))
    )
    by_hand = weights.float().abs().numpy() * (
        norms.numpy() if criterion == "wanda" else np.float32(1)
    )
    assert np.array_equal(scores.float().numpy(), by_hand)
    values = by_hand.astype(np.float64)
    counts = oracle_counts(values)
    order = np.argsort(-values, axis=1, kind="stable")
    expected = np.zeros(values.shape, dtype=bool)
    np.put_along_axis(expected, order, np.arange(4096)[None, :] < counts[:, None], axis=1)
    for block in (1, 97, 2443) if criterion == "magnitude" else (512,):
        mask = torch.cat(
            [
                select_rows(part, KeepRule(beta=1.0)).mask
                for part in scores[: 300 if block == 1 else None].split(block)
            ]
        )
        rows = mask.shape[0]
        assert int((mask.sum(1).numpy() != counts[:rows]).sum()) == 0
        assert int((mask.numpy() != expected[:rows]).sum()) == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "budget",
    [
        KeepRule(beta=1.0),
        KeepRule(beta=0.7),
        KeepRule(beta=1.0, order=1.0),
        KeepRule(counts=4200),
        KeepRule(counts=4766),
    ],
)
def test_a_group_in_blocks_equals_one_long_row(dtype: torch.dtype, budget: KeepRule) -> None:
    scores = hostile_weights(40, 150, dtype, seed=5).abs()
    one_row = select_rows(scores.reshape(1, -1), budget)
    for block in (1, 7, 40):
        selector = GroupSelector(budget)
        selections = select(selector, scores.split(block))
        mask = torch.cat([selection.mask for selection in selections])
        assert torch.equal(mask.reshape(1, -1), one_row.mask)
        assert selector.effective_mass() == pytest.approx(float(one_row.s_eff), rel=1e-12)
        kept_mass = sum(float(selection.kept_mass.sum()) for selection in selections)
        assert kept_mass == pytest.approx(float(one_row.kept_mass), rel=1e-12)


# Torch shares a sum of 70,000 numbers among threads.
@pytest.mark.parametrize("rows", [700, 70_000])
def test_blocks_and_threads_do_not_change_a_bit(rows: int) -> None:
    scores = torch.rand(rows, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(6))
    before = torch.get_num_threads()
    of_group = set()
    of_rows = set()
    try:
        for block, threads in ((rows, 1), (rows, 2), (rows, 5), (rows // 2, 1), (rows // 100, 1)):
            torch.set_num_threads(threads)
            selector = GroupSelector(KeepRule(beta=1.0))
            select(selector, scores.split(block))
            of_group.add((float(selector.sums.number()), selector.effective_mass()))
            chunks = scores.reshape(rows // 100, 300).split(max(block // 100, 1))
            parts = [select_rows(chunk, KeepRule(beta=1.0)) for chunk in chunks]
            fields = ("mask", "kept_mass", "mass", "n_eff", "s_eff")
            of_rows.add(
                b"".join(
                    getattr(part, field).numpy().tobytes() for field in fields for part in parts
                )
            )
    finally:
        torch.set_num_threads(before)
    assert len(of_group) == len(of_rows) == 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_group_may_lose_all(dtype: torch.dtype) -> None:
    """Two weights of a total that loses 18 of 20: floor(4 * 18 / 20) - floor(2 * 18 / 20) = 2 of
    them are removed.
    """
    rule = KeepRule(counts=spread_counts(np.array([2]), 18, 20, 2))
    scores = torch.tensor([[0.5, torch.finfo(dtype).max]], dtype=dtype)
    for part in (select_rows(scores, rule), select(GroupSelector(rule), (scores,))[0]):
        assert part.mask.tolist() == [[False, False]]
        assert (part.kept.tolist(), part.kept_mass.tolist()) == ([0], [0.0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_group_of_zeros_is_kept_whole(dtype: torch.dtype) -> None:
    selector = GroupSelector(KeepRule(beta=0.5))
    assert all(
        bool(part.mask.all()) for part in select(selector, torch.zeros(4, 3, dtype=dtype).split(3))
    )
    assert (float(selector.sums.number()), selector.effective_mass()) == (12.0, 1.0)


def test_ratio_removes_the_floor_of_every_row() -> None:
    scores = hostile_weights(22, 101, torch.float32).abs()
    for sparsity in (0.0, 0.1, 0.5, 0.999):
        counts = uniform_counts(np.full(22, 101), sparsity)
        assert set(select_rows(scores, KeepRule(counts=counts)).kept.tolist()) == {
            101 - math.floor(sparsity * 101)
        }
    # In binary, 0.3 is a little less than 3 / 10; still, 3 of 10 are removed.
    assert [int(uniform_counts(np.array([10]), sparsity)[0]) for sparsity in (0.3, 0.7, 0.29)] == [
        7,
        3,
        8,
    ]


@pytest.mark.parametrize(
    ("n", "m"), [(2, 4), (4, 8), (1, 4), (3, 5), (1, 2), (40, 63), (7, 64), (40, 90)]
)
def test_pattern_keeps_n_of_every_m(n: int, m: int) -> None:
    scores = hostile_weights(33, 4 * m, torch.bfloat16).abs()
    mask = select_rows(scores, KeepRule(pattern=(n, m))).mask
    groups = mask.reshape(-1, m).numpy()
    values = scores.double().reshape(-1, m).numpy()
    assert all((groups[i] == oracle(values[i], n)).all() for i in range(len(groups)))


@given(st.integers(1, 6), st.integers(1, 40), st.integers(0, 1 << 40), st.data())
@settings(max_examples=100, deadline=None)
def test_a_spread_total_is_exact_in_large_numbers_and_does_not_depend_on_chunks(
    rows: int, columns: int, offset: int, data: st.DataObject
) -> None:
    total = data.draw(st.integers(offset + rows * columns, 1 << 41))
    removed = data.draw(st.integers(0, total - 1))
    whole = spread_counts(np.full(rows, columns), removed, total, offset).tolist()
    for row in range(rows):
        start = offset + row * columns
        alone = spread_counts(np.array([columns]), removed, total, start).tolist()
        assert (
            alone
            == whole[row : row + 1]
            == [columns - ((start + columns) * removed // total - start * removed // total)]
        )
    with pytest.raises(ValueError, match="cannot remove 5 of 5"):
        spread_counts(np.array([5]), 5, 5)


@given(st.integers(1, 6), st.integers(1, 40), st.floats(0.1, 3), st.integers(0, 1 << 30))
@settings(max_examples=100, deadline=None)
def test_counts_by_beta(rows: int, columns: int, beta: float, seed: int) -> None:
    scores = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).abs()
    assert select_rows(scores, KeepRule(beta=beta)).kept.tolist() == [
        count_of(row, beta) for row in scores.double().tolist()
    ]


def count_of(row: list[float], beta: float) -> int:
    """clip(floor(beta * N_eff), 1, N) of a row that is not all zeros."""
    n_eff = math.fsum(row) ** 2 / math.fsum(value * value for value in row)
    return min(max(math.floor(beta * n_eff * (1 + 1e-12)), 1), len(row))


def test_counts_in_bfloat16() -> None:
    """omega, its squares and their sum in bfloat16, as torch computes them for a row: only a
    handful of counts remain.
    """
    weights = (
        torch.randn(400, 4096, generator=torch.Generator().manual_seed(6))
        .mul(0.02)
        .bfloat16()
        .abs()
    )
    counts = select_rows(weights, KeepRule(beta=1.0, dtype="bfloat16")).kept
    omega = weights / weights.float().sum(1, keepdim=True).bfloat16()
    n_eff = omega.square().float().sum(1).bfloat16().reciprocal()
    assert counts.tolist() == n_eff.double().floor().long().tolist()
    halved = select_rows(weights, KeepRule(beta=0.5, dtype="bfloat16")).kept
    assert halved.tolist() == (n_eff.double() / 2).floor().long().tolist()
    assert select_rows(torch.zeros(1, 9), KeepRule(beta=0.5, dtype="bfloat16")).kept.tolist() == [9]
    assert len(set(counts.tolist())) <= 20
    exact = select_rows(weights, KeepRule(beta=1.0)).kept
    assert len(set(exact.tolist())) > 80
    assert counts.double().mean() < exact.double().mean()


def test_wanda_rounds_the_product_once() -> None:
    weight = torch.tensor([[-3.0, 0.1]], dtype=torch.bfloat16)
    norms = torch.tensor([2.0, 1 / 3])
    scores = wanda(weight, InputStatistics(norms))
    assert scores.dtype == torch.float32
    assert scores.tolist() == [[6.0, float(np.float32(weight[0, 1].float()) * np.float32(1 / 3))]]
    with pytest.raises(ValueError, match="needs the norms"):
        wanda(weight, None)
    for wrong in (torch.ones(1), torch.ones(1, 2)):
        with pytest.raises(ValueError, match=r"norms have shape .* need \(2,\)"):
            wanda(weight, InputStatistics(wrong))


@pytest.mark.parametrize("group", ["row", "matrix", "all"])
def test_masks_in_any_order_are_the_same(tiny_llama: Path, tmp_path: Path, group: Group) -> None:
    """Of equal scores, which are most of a group of all here, those of the first targets stay,
    whoever is asked first.
    """
    source = Path(shutil.copytree(tiny_llama, tmp_path / "coarse"))
    for shard in source.glob("*.safetensors"):
        save_file(
            {name: (tensor * 8).round() / 8 for name, tensor in load_file(shard).items()},
            shard,
            {"format": "pt"},
        )
    recipe = recipe_of(method="magnitude", sparsity=0.001, group=group)
    chosen = targets_of_folder(source, "coarse", recipe)
    scores = Scores(chosen.checkpoint, chosen.targets, recipe)
    pruner = Pruner(scores, counts_of(scores))
    wanted = {
        target.name: torch.zeros(target.matrix.rows, target.matrix.columns)
        for target in pruner.targets
    }

    def put(target: Target, chunk: Chunk) -> None:
        wanted[target.name][chunk.first : chunk.first + len(chunk.words)] = torch.from_numpy(
            chunk.words != 0
        )

    pruner.decide(put)
    for order in (slice(None), slice(None, None, -1), slice(1, None, 2)):
        of_all = pruner.cut_all()
        for target in [*pruner.targets[order], *pruner.targets[:3]]:
            mask = pruner.mask_of(target, of_all)
            assert torch.equal(mask, wanted[target.name].bool()), target.name
