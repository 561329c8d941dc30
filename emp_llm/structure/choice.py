"""Scores of units: by their weights, or by what a pass of the text has collected; and the pass
that collects gradients (taylor, fisher).

There, all batches pass through the blocks once, and the hidden states that enter each block are
kept. Then the blocks run again in reverse order, with the gradient of the hidden states that leave
them. No gradient of a weight is computed, so that a model that cannot be trained on a machine can
still be scored there.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from emp_llm.calibration.passes import own_batches
from emp_llm.checkpoint.files import FilePool
from emp_llm.checkpoint.matrices import Matrix, as_tensor
from emp_llm.common.errors import UserError
from emp_llm.common.machine import enough_memory, exact_device
from emp_llm.common.progress import progress_bar
from emp_llm.models.blockwise import BlockwiseModel, HiddenStates, Walk, choose_place
from emp_llm.models.loading import execution_device, load_blocks
from emp_llm.options.recipe import Counts, Effective, Match, Recipe, Share, Structure
from emp_llm.records.run_report import UnitsRecord
from emp_llm.selection.effective import effective_mass, effective_mass_bound
from emp_llm.selection.reference import PowerSums, largest_mask
from emp_llm.selection.rule import beta_keeping, floor_count, spread_counts, uniform_counts
from emp_llm.structure.units import Indices, Scores, Units, finite_sums_of_ranks

BY_WEIGHTS = ("magnitude", "wanda")  # scores that read weights; all others need `Units.sums`
_CHUNK = 1 << 22  # weights read at a time


def unit_scores(
    every: Sequence[Units], criterion: str, feature: Callable[[str], Tensor | None] | None = None
) -> list[Scores]:
    """The score of every unit: float64, shape (units,), for each element of `every`.

    Args:
        every: heads and neurons, experts, or layers.
        criterion: of the recipe. Weights are read for "magnitude" and "wanda".
        feature: name of the units -> what a calibration has collected: for "wanda" the norms of the
            inputs of their last layer, shape (inputs,); else the result of `Units.sums`. None if
            there is nothing for this name.

    Raises:
        UserError: features of a layer are missing, or weights are not finite.
    """
    if criterion not in BY_WEIGHTS:
        assert feature is not None
        return [units.score_of_sums(criterion, units.collected(feature)) for units in every]
    collected = [None if feature is None else units.collected(feature) for units in every]
    scores = []
    with FilePool() as files, progress_bar(len(every), "scores", " layers") as bar:

        def squares(matrix: Matrix, axis: int) -> Scores:
            sums = np.zeros(matrix.columns if axis == 0 else matrix.rows)
            for first, last in matrix.row_chunks(_CHUNK):
                words = matrix.read(files.reader(matrix.stored.shard), first, last)
                values = as_tensor(words, matrix.stored.dtype).to(torch.float64)
                sums_of_chunk = values.square_().sum(axis).numpy()
                if axis == 0:
                    sums += sums_of_chunk
                else:
                    sums[first:last] = sums_of_chunk
            return sums

        for units, norms in zip(every, collected, strict=True):
            score = units.score_of_weights(squares, norms)
            if not np.isfinite(score).all():
                raise UserError(
                    f"{units.name}: the weights of its {units.kind} hold NaN or infinity."
                )
            scores.append(score)
            bar.update(1)
    return scores


def gradient_sums(
    runner: BlockwiseModel,
    units: Sequence[Units],
    tokens: Tensor,
    batch_size: int,
    squared: bool = False,
) -> dict[str, Tensor]:
    """sum over tokens of |dL/dY * Y| for the inputs Y of each unit's last layer: float64, shape
    (inputs,), by its name.

    L is the sum of -log p(next token) over all tokens of a batch.

    Args:
        runner: the dense model.
        units: its heads and neurons.
        tokens: int64, shape (samples, length).
        batch_size: sequences per forward pass.
        squared: of (dL/dY * Y)^2.

    Raises:
        UserError: a sum is not finite, memory runs out, or a block passes no gradient to its
            inputs.
    """
    batches = own_batches(tokens, batch_size)
    sums = dict[str, Tensor]()
    numbers = range(len(batches))
    blocks = list(runner.blocks)
    read = [member.name for member in units]
    runner.model.requires_grad_(False)
    with runner.walk(batches, "forward") as walk:
        needed = sum(
            walk.hidden.get(number, torch.device("cpu")).nbytes for number in numbers
        ) * len(blocks)
        with closing(
            HiddenStates(choose_place(runner.hidden_states, needed, walk.device))
        ) as entered:
            for step in walk.steps():
                for number in numbers:
                    walk.hidden.copy(
                        number, entered, step.index * len(batches) + number, walk.device
                    )
                step.run()
            # From here on, the hidden states of the walk are their gradients.
            for number in numbers:
                walk.hidden.put(number, _gradient_of_loss(walk, number))
            with (
                progress_bar(len(blocks), "backward", " blocks") as bar,
                closing(load_blocks(blocks[::-1])) as loaded,
            ):
                for index, _ in zip(reversed(range(len(blocks))), loaded, strict=True):
                    names = [name for name in read if name.startswith(f"{runner.path}.{index}.")]
                    for number in numbers:
                        gradient = _backward(walk, index, number, entered, names, sums, squared)
                        walk.hidden.put(number, gradient)
                        bar.update(1 / len(batches))
    in_order = {name: sums[name] for name in read if name in sums}
    return finite_sums_of_ranks(in_order, "its gradients", "float32 or bfloat16")


def _gradient_of_loss(walk: Walk, number: int) -> Tensor:
    """dL/dh for the hidden states h that leave the last block."""
    final = (
        walk.hidden.get(number, execution_device(walk.runner.blocks[-1])).detach().requires_grad_()
    )
    logits = walk.tail(number, final=final).logits[:, :-1]
    labels = walk.batches[number][:, 1:].to(logits.device)
    with torch.enable_grad():
        loss = functional.cross_entropy(
            logits.reshape(-1, logits.shape[-1]).float(), labels.reshape(-1), reduction="sum"
        )
        (gradient,) = torch.autograd.grad(loss, final)
    return gradient


def _backward(
    walk: Walk,
    index: int,
    number: int,
    entered: HiddenStates,
    names: list[str],
    sums: dict[str, Tensor],
    squared: bool,
) -> Tensor:
    """dL/dh for the hidden states h that enter a block, from that for those that leave it; adds
    to the sums of its layers.
    """
    runner = walk.runner
    block = walk.runner.blocks[index]
    where = f"{runner.path}.{index} backwards"
    device = execution_device(block)
    seen = dict[str, Tensor]()
    hooks = ExitStack()
    for name in names:

        def note(module: nn.Module, args: tuple[Tensor, ...], name: str = name) -> None:
            seen[name] = args[0]

        hooks.enter_context(runner.model.get_submodule(name).register_forward_pre_hook(note))
    with hooks, torch.enable_grad(), enough_memory(lambda: (where, device), walk.batches[number]):
        key = index * len(walk.batches) + number
        state = entered.get(key, device).detach().requires_grad_()
        handed = entered.handed(key, device)
        if any(tensor.is_floating_point() for tensor in handed.values()):
            raise UserError(
                f"{runner.path}.{index}: a gradient passes through what the block before hands on "
                "beside its hidden states; use --method wanda."
            )
        output = walk.call(number, index, block, state, handed)
        upper = walk.hidden.get(number, device)
        entering, *gradients = torch.autograd.grad(
            output, [state, *seen.values()], upper, allow_unused=True
        )
    if entering is None:
        raise UserError(
            f"{runner.path}.{index}: no gradient passes through it; use --method wanda."
        )
    for (name, inputs), gradient in zip(seen.items(), gradients, strict=True):
        if gradient is not None:
            effects = (inputs.detach().float() * gradient.float()).flatten(0, -2)
            sizes = effects.square() if squared else effects.abs()
            products = sizes.to(exact_device(sizes.device)).sum(0, dtype=torch.float64).cpu()
            sums[name] = sums[name] + products if name in sums else products
    return entering


# The choice of units: Algorithm 1, or a fixed share, with the counts of the weights.
#
# The rule decides how many units stay. Where they are set to zero, this is exact. Where they are
# removed, all layers get one width, because config.json has one number for all: the mean of the
# rule's counts, rounded up to a multiple; each layer keeps its best.


# Kind and role of units -> (removed, total) in all blocks.
Removed = Mapping[tuple[str, str], tuple[int, int]]


@dataclass(frozen=True, eq=False)
class Choice:
    """The kept units of one attention, MLP, expert or mixture, or the kept layers.

    Attributes:
        units, scores: of the dense model.
        kept: numbers of the kept units, ascending.
        record: the same in numbers.
    """

    units: Units
    scores: Scores
    kept: Indices
    record: UnitsRecord


def choose_units(
    every: Sequence[Units],
    scores: Sequence[Scores],
    recipe: Recipe,
    matched: Removed | None = None,
) -> tuple[list[Choice], float | None]:
    """Decide which units stay.

    Args:
        every, scores: the units and their scores.
        recipe: beta, or sparsity; whether the units of a layer, or those of a role (`Units.role`)
            in all layers, compete; and whether they are removed, so that layers need one width.
        matched: of the run that `recipe.counts` names.

    Returns:
        The choices, in order; and the beta in force: None for a fixed share, or if a requested
        sparsity has several.

    Raises:
        UserError: a requested sparsity would leave a layer without units.
    """
    structure = recipe.structure
    assert structure is not None
    counts = recipe.counts
    order = counts.order if isinstance(counts, Effective) else 2.0
    together = structure.group == "all"
    choices: dict[int, Choice] = {}
    betas: set[float | None] = set()
    widths: dict[str, int] = {}
    by_role: dict[tuple[str, str], list[int]] = {}
    for number, units in enumerate(every):
        by_role.setdefault((units.kind, units.role), []).append(number)
    # Those whose number is a multiple of another role's come last.
    for role, members in sorted(
        by_role.items(), key=lambda item: every[item[1][0]].multiple_of != ""
    ):
        rows = [torch.from_numpy(scores[number])[None] for number in members]
        if together and not every[members[0]].comparable:
            rows = [row / row.sum() for row in rows]
        groups = [torch.cat(rows, 1)] if together else rows
        sums = [PowerSums.of_rows(group, order) for group in groups]
        beta = _beta_of_units(counts, sums)
        betas.add(beta)
        kept = _kept_by_rule(counts, beta, sums, role, matched)
        best = [
            largest_mask(group, torch.tensor([count]))[0]
            for group, count in zip(groups, kept, strict=True)
        ]
        masks = torch.split(torch.cat(best), [row.shape[1] for row in rows])
        mean = -(-sum(kept) // len(rows))
        for number, row, mask in zip(members, rows, masks, strict=True):
            units = every[number]
            rule = int(mask.sum())
            if not structure.keep_shapes:
                size = max(rule, units.fewest) if units.by_block else mean
                mask = _best(units, row, _width_of(units, size, structure, widths))
            if units.required:
                mask = mask | _best(units, row, units.fewest)
            stays = np.flatnonzero(mask.numpy())
            widths[units.role] = len(stays)
            record = _record_of(units, row, order, rule, stays)
            if together:
                record.n_eff_together = float(sums[0].number()[0])
            choices[number] = Choice(units, row[0].numpy(), stays, record)
    in_force = betas.pop() if len(betas) == 1 else None
    return [choices[number] for number in range(len(every))], in_force


def _kept_by_rule(
    counts: Counts,
    beta: float | None,
    sums: Sequence[PowerSums],
    role: tuple[str, str],
    matched: Removed | None,
) -> list[int]:
    """How many units of each group the rule keeps."""
    if beta is not None:
        return [int(group.counts(beta)[0]) for group in sums]
    sizes = np.array([group.size for group in sums])
    if isinstance(counts, Share):
        return uniform_counts(sizes, counts.sparsity).tolist()  # type: ignore[no-any-return]
    if matched is not None and role in matched:
        return spread_counts(sizes, *matched[role]).tolist()  # type: ignore[no-any-return]
    run = counts.run if isinstance(counts, Match) else ""
    raise UserError(f"--match {run}: that run has no {role[0]} of {role[1]}.")


def _width_of(units: Units, size: int, structure: Structure, widths: Mapping[str, int]) -> int:
    """How many units stay where shapes change, for `size` by the rule.

    Args:
        widths: role -> the number that stays, of the roles before.
    """
    if units.required and size < units.fewest:
        raise UserError(
            f"{units.name}: {size} of {len(units)} {units.kind} would stay, and its router "
            f"needs at least {units.fewest}. Raise --beta, or lower --sparsity."
        )
    if units.multiple_of:  # as many as that number allows
        width = widths[units.multiple_of]
        return len(units) // width * width
    multiple = structure.width_multiple if units.rounded else None
    return -(-size // (multiple or 1)) * (multiple or 1)


def _record_of(
    units: Units, row: torch.Tensor, order: float, rule: int, stays: Indices
) -> UnitsRecord:
    """The choice in numbers. `row` are the scores, shape (1, units)."""
    n_eff = float(PowerSums.of_rows(row, order).number()[0])
    record = UnitsRecord(
        kind=units.kind,
        role=units.role,
        block=units.block,
        units=len(units),
        kept=len(stays),
        rule=rule,
        n_eff=n_eff,
        s_eff=float(effective_mass(row, order=order)[0]),
    )
    if order == 2.0:
        record.s_eff_bound = float(effective_mass_bound(n_eff, row.shape[1]))
    if units.listed:
        record.scores = [float(f"{score:.6g}") for score in row[0].tolist()]
        record.kept_units = stays.tolist()
    return record


def count_removed(records: Iterable[UnitsRecord]) -> Removed:
    """How many units a run has removed, of how many."""
    removed: dict[tuple[str, str], tuple[int, int]] = {}
    for record in records:
        gone, total = removed.get((record.kind, record.role), (0, 0))
        removed[record.kind, record.role] = gone + record.units - record.kept, total + record.units
    return removed


def _beta_of_units(counts: Counts, sums: Sequence[PowerSums]) -> float | None:
    """The beta of an emp method, or the one that removes as many units as its sparsity asks for;
    None for a fixed share.
    """
    if not isinstance(counts, Effective):
        return None
    if counts.in_force is not None:
        return counts.in_force
    assert counts.sparsity is not None
    total = sum(group.size for group in sums)
    kept = max(total - floor_count(counts.sparsity * total), len(sums))  # one of each group
    return beta_keeping(
        kept, [(group.number().numpy(), group.total.numpy(), group.size) for group in sums]
    )


def _best(units: Units, row: torch.Tensor, number: int) -> torch.Tensor:
    """The mask of the best units, at least `number`, and as many in every place."""
    places = np.unique(units.places)
    count = -(-number // len(places))
    mask = torch.zeros(len(units), dtype=torch.bool)
    for place in places:
        members = torch.from_numpy(np.flatnonzero(units.places == place))
        mask[members] = largest_mask(row[:, members], torch.tensor([min(count, len(members))]))[0]
    return mask
