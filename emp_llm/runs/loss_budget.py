"""`prune --loss`: the largest sparsity at which the perplexity of held-out text rises by at most a
budget.

The scores are made once. Each point of the curve masks the weights in memory, and runs the
held-out sequences through the model: the rise of the mean loss from the dense model's, in nats per
token, with its paired standard error. A point keeps to the budget if rise + error <= budget. Rises
grow about exponentially with the sparsity, so the next point is where the line through the
logarithms of its neighbours meets the budget.

Where weights move (SparseGPT, ADMM, a refit, healing), a point takes a whole run. The curve of the
masks alone predicts it: a run has a rise that is a share of theirs, and that share grows slowly
with the damage. So the curve is walked for a share that is guessed, then for the one that the first
run has. A third run lies between two, if the best of them uses little of the budget. For units,
each point is a whole run, and each size of the model is a point.
"""

import json
import logging
import math
import os
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from emp_llm.calibration.activations import Activations
from emp_llm.checkpoint.files import (
    explain_disk_error,
    how_to_resume,
    lock,
    read_own,
    remove,
    write_own,
)
from emp_llm.checkpoint.output import (
    CALIBRATION_FILES,
    bytes_on_disk,
    check_own,
    check_space,
)
from emp_llm.common.errors import NothingRemovedError, UserError
from emp_llm.common.machine import machine_name
from emp_llm.common.paths import REPORT_NAME
from emp_llm.common.progress import stage
from emp_llm.evaluation.comparison import cheaper
from emp_llm.models.loading import headless_class
from emp_llm.options.prune import PruneOptions
from emp_llm.options.recipe import Effective, Recipe, Share, Structure, Wanda
from emp_llm.options.shared import GivenOptions
from emp_llm.pruning.counts import scores_of, targets_of_folder
from emp_llm.pruning.masks import Outcomes
from emp_llm.pruning.report import sizes_record
from emp_llm.records.base import Part
from emp_llm.records.run_report import (
    LossEntry,
    LossMeasure,
    LossPoint,
    LossRecord,
    RunReport,
    read_report,
)
from emp_llm.runs.prune_run import (
    Inputs,
    LossSearch,
    PruneRun,
    find_inputs,
    make_run,
    open_output,
    plan_healing_of,
    work_bytes,
)
from emp_llm.runs.run import calibrate, read_given_norms
from emp_llm.runs.trials import LossCurve

if TYPE_CHECKING:
    pass

logger = logging.getLogger(__name__)
_POINTS = 8  # of the curve, for one share
_CHANCE = 0.02  # of the budget
_NEAR = 0.01  # the curve ends when the sparsity is known within this
_STEEP = 12.0  # log of the rise, for a sparsity from 0 to 1, until two points are known
_FIRST = 0.3  # sparsity
# Of the rise of the masks alone, until a run has shown it.
_SHARE_OF_UPDATE = 0.5
_SHARE_OF_HEALING = 0.35
_GROWTH = 1.2  # the rise of a run, as a power of that of the masks
_AIM = 0.95  # of the budget, for a run that cannot be repeated
_CAREFUL = 0.75  # for one after one that went beyond it
_ENOUGH = 0.7  # of the budget, for the best of two runs
_MOST_RUNS = 4
_MOST_NATS = 0.3  # as a budget without "%": a rise of 35 %
_OWN = ("*curve.json*", "*activations.safetensors*", "calibration", "checkpoint", "*removed-*")


@dataclass(frozen=True)
class LossBudget:
    """What --loss allows.

    Attributes:
        flag: as the user wrote it.
        nats: the rise of the mean loss per token.
    """

    flag: str
    nats: float

    @classmethod
    def of(cls, text: float | str) -> "LossBudget":
        """A budget such as "2%" of the perplexity, or "0.02" nats. UserError if it is none."""
        match = re.fullmatch(r"([0-9]+\.?[0-9]*|\.[0-9]+)(%?)", str(text).strip())
        if match is None:
            raise UserError(
                f"--loss {text!r} is not a rise such as 2% of the perplexity, or 0.02 nats per "
                "token."
            )
        number = float(match[1])
        nats = math.log1p(number / 100) if match[2] else number
        if not nats > 0:
            raise UserError(f"--loss {text}: nothing can be removed without a rise; give more.")
        if not match[2] and nats > _MOST_NATS:
            rise = f"{100 * math.expm1(nats):,.0f}%" if nats < 20 else "far more than 100%"
            raise UserError(
                f"--loss {text}: a number without % is in nats per token, so this is a rise of "
                f"{rise}. Did you mean {text}%? The largest without % is {_MOST_NATS:g}."
            )
        return cls(f"--loss {text}", nats)


Prune = Callable[[Recipe, PruneOptions, GivenOptions, LossSearch], RunReport]


def prune_to_loss(
    recipe: Recipe,
    budget: LossBudget,
    options: PruneOptions,
    given: GivenOptions,
    prune: Prune,
    sparsities_of_units: Callable[[Inputs, Structure], list[float]],
) -> RunReport:
    """Find the sparsity, and prune to it. An interrupted call resumes.

    Args:
        prune: for a recipe with a sparsity.
        sparsities_of_units: a sparsity for each size without some units.

    Raises:
        UserError: the text is too short, or even the least sparsity goes beyond the budget.
    """
    inputs = find_inputs(recipe, options, given)
    path = inputs.path
    work = path.with_name(f".{path.name}.loss")
    with lock(work, f"--output {path}"):
        try:
            search = _Search(_find(inputs, work), given, budget, work, prune)
            if recipe.structure is not None:
                report = search.by_units(sparsities_of_units(inputs, recipe.structure))
            elif not recipe.moves and options.propagate == "dense":
                report = search.by_masks()
            else:
                report = search.by_runs()
        except BaseException as error:
            explanation = explain_disk_error(error, path, [work])
            if explanation is not None:
                raise explanation from error
            if not isinstance(error, UserError) and (sentence := how_to_resume([work])):
                logger.warning("%s", sentence)
            raise
        shutil.rmtree(work)
    return report


def _find(inputs: Inputs, work: Path) -> PruneRun:
    """The run of a search, with its text.

    Args:
        work: folder of unfinished work.
    """
    recipe = inputs.recipe
    source = inputs.source
    trust = inputs.options.trust_remote_code
    chosen = targets_of_folder(source.folder, source.name, recipe, trust)
    checkpoint = chosen.checkpoint
    if checkpoint.config.get("is_encoder_decoder") or headless_class(checkpoint.config):
        raise UserError("--loss measures the loss of a decoder with a head. Give --sparsity.")
    if recipe.structure is None:
        scores_of(chosen, recipe, checkpoint.config)
    run = make_run(inputs, recipe, chosen)
    plan = plan_healing_of(run)
    if recipe.structure is not None or recipe.moves:
        # The best run so far, and the one that is made with its work.
        most = 2 * checkpoint.output_bytes + work_bytes(run, plan)
        check_space(inputs.path, most - bytes_on_disk(work))
    return run


def sparsities_of(recipe: Recipe) -> list[float]:
    """The sparsities to choose from, from the lowest: those of the N:M patterns of a recipe's M,
    or every tenth of a percent.
    """
    if recipe.n_of_m is not None:
        group = recipe.n_of_m[1]
        return [removed / group for removed in range(1, group)]
    return [number / 1000 for number in range(10, 991)]


def next_point(
    sparsities: Sequence[float], rises: dict[float, float], budget: float, most: int = _POINTS
) -> float | None:
    """The sparsity to measure next; None if the answer is known.

    Args:
        sparsities: from the lowest.
        rises: sparsity -> upper bound of the rise, of the points so far.
        budget: the most that a point may have.
        most: how many points may be measured.
    """
    good = [known for known in sparsities if rises.get(known, math.inf) <= budget]
    bad = [known for known in sparsities if rises.get(known, -math.inf) > budget]
    low = max((known for known in good if not bad or known < bad[0]), default=None)
    high = min(bad, default=None)
    between = [
        untried
        for untried in sparsities
        if (low is None or untried > low) and (high is None or untried < high)
    ]
    known = low is not None and high is not None and high - low <= _NEAR
    if not between or known or len(rises) >= most:
        return None
    if len(sparsities) < 1 / _NEAR:  # patterns
        return between[len(between) // 2]

    def logarithm(sparsity: float) -> float:
        # Below a part of the budget, a rise is chance.
        return math.log(max(rises[sparsity] / budget, _CHANCE))

    if not rises:
        wanted = _FIRST
    elif low is None or high is None:
        steep = _STEEP
        nearest = sorted(rises, reverse=high is None)[:2]
        if len(nearest) == 2:
            steep = (logarithm(nearest[1]) - logarithm(nearest[0])) / (nearest[1] - nearest[0])
        # A little further than the line says, so that the answer lies between two points.
        step = logarithm(nearest[0]) / max(3.0, min(steep, 40.0))
        step += math.copysign(_NEAR / 2, step)
        wanted = nearest[0] - max(-0.25, min(0.25, step))
    else:
        ends = [logarithm(low), logarithm(high)]
        # Of an end that has stayed for two points, half counts, as in the Illinois algorithm.
        last = list(rises)[-2:]
        if len(last) == 2 and min(last) >= high:
            ends[0] /= 2
        elif len(last) == 2 and max(last) <= low:
            ends[1] /= 2
        wanted = low + ends[0] / (ends[0] - ends[1]) * (high - low)
    if low is not None and high is not None:
        # A point near one end is put on its other side, so that the interval closes.
        if wanted - low < _NEAR / 2:
            wanted = low + 0.9 * _NEAR
        elif high - wanted < _NEAR / 2:
            wanted = high - 0.9 * _NEAR
    return min(between, key=lambda untried: abs(untried - wanted))


def walk_curve(
    sparsities: Sequence[float],
    budget: float,
    rise_at: Callable[[float], float],
    known: dict[float, float] | None = None,
) -> dict[float, float]:
    """Upper bounds of the rise at the sparsities that were measured to find the largest within a
    budget.

    Args:
        known: bounds of points that are measured already.
    """
    rises = dict(known or {})
    most = len(rises) + _POINTS
    while (wanted := next_point(sparsities, rises, budget, most)) is not None:
        rises[wanted] = rise_at(wanted)
    return rises


def within_budgets(
    curve: LossCurve,
    recipes: Sequence[Recipe],
    budgets: Sequence[LossBudget],
    norms: Activations | None,
) -> list[LossMeasure]:
    """How much can be removed within each of some budgets: by the criteria of recipes with uniform
    groups, and by the recipes.
    """
    uniform = {recipe.name: recipe.but(counts=Share()) for recipe in recipes}
    losses = []
    for recipe in [*uniform.values(), *recipes]:
        with stage(f"loss, {recipe.method}"):
            losses.append(_within_budgets(curve, recipe, budgets, norms))
    return losses


def _within_budgets(
    curve: LossCurve,
    recipe: Recipe,
    budgets: Sequence[LossBudget],
    norms: Activations | None,
) -> LossMeasure:
    """How much a recipe's masks can remove within each of some budgets."""
    checkpoint = curve.run.checkpoint
    points: dict[float, LossPoint] = {}
    outcomes: dict[float, Outcomes] = {}

    def rise_at(sparsity: float) -> float:
        record, outcomes[sparsity] = curve.of_masks(recipe.at(sparsity), norms)
        points[sparsity] = curve.point(record, sparsity, whole=False)
        return points[sparsity].most

    entries = []
    for budget in sorted(budgets, key=lambda budget: budget.nats):
        known = {sparsity: point.most for sparsity, point in points.items()}
        rises = walk_curve(sparsities_of(recipe), budget.nats, rise_at, known)
        good = [sparsity for sparsity, rise in rises.items() if rise <= budget.nats]
        entry = LossEntry(flag=budget.flag, budget=budget.nats)
        if good:
            taken = max(good)
            sizes = sizes_record(outcomes[taken], checkpoint, updated=False)
            entry.point = points[taken]
            entry.parameters = (curve.run.chosen.coverage.parameters or 0) - sum(
                outcome.zeros for outcome in outcomes[taken].of_targets
            )
            entry.packed_bytes = sizes.packed
        entries.append(entry)
    order = recipe.counts.order if isinstance(recipe.counts, Effective) else None
    return LossMeasure(
        method=recipe.method,
        order=order,
        dense=curve.dense.value,
        sequences=len(curve.tokens),
        length=curve.tokens.shape[1],
        budgets=entries,
        points=sorted(points.values(), key=_by_sparsity),
    )


class _State(Part, kw_only=True):
    """What an interrupted search has found."""

    signature: dict[str, Any]
    points: list[LossPoint]


@dataclass(frozen=True)
class _Search:
    """The search for the sparsity.

    Attributes:
        run: with --loss.
        given: the names of the options that the user gave.
        work: folder of unfinished work, beside the output.
        prune: for a recipe with a sparsity.
    """

    run: PruneRun
    given: GivenOptions
    budget: LossBudget
    work: Path
    prune: Prune

    @cached_property
    def _masks(self) -> Recipe:
        """The recipe of the masks alone."""
        recipe = self.run.recipe
        masks = recipe.but(update=None, heal=None)
        if recipe.update is None or not recipe.update.searches:
            return masks
        # Those of a search are like Wanda's. Its counts stay those of the magnitudes.
        counts = recipe.counts
        if isinstance(counts, Effective):
            counts = replace(counts, count_by="magnitude")
        return masks.but(score=Wanda(), counts=counts)

    @cached_property
    def _curve(self) -> LossCurve:
        assert self.run.deciding is not None
        return LossCurve(self.run, self.run.deciding, self.run.options.mask_device, self.work)

    @cached_property
    def _state(self) -> "_State":
        """The work of an interrupted run with the same options; without one, new work."""
        run = self.run
        signature = run.signature | {"loss": self.budget.flag, "machine": machine_name()}
        if run.options.activations is not None and self._norms is not None:
            signature["norms"] = self._norms.digest
        signature = json.loads(json.dumps(signature))
        check_own(self.work, _OWN, ("curve.json",))
        check_own(self.work / "calibration", CALIBRATION_FILES)
        file = self.work / "curve.json"
        held = read_own(file, _State)
        if held is not None and held.signature == signature:
            return held
        remove(self.work)
        self.work.mkdir(parents=True)
        state = _State(signature=signature, points=[])
        write_own(file, state.as_dict())
        return state

    @cached_property
    def _norms(self) -> Activations | None:
        """The norms of the masks, calibrated once; None if their scores need none."""
        if not self._masks.needs_activations:
            return None
        run = self.run
        options = run.options
        if options.activations is not None:
            return read_given_norms(options, self._masks, self.given)
        if run.recipe.structure is not None:  # each run collects its own
            return None
        file = self.work / "activations.safetensors"
        layers = run.chosen.layers_to_calibrate()
        resume = self.work / "calibration"
        with stage("calibrate"):
            return calibrate(run, layers, self._masks.statistics, resume, file=file)

    def _points(self, whole: bool = False) -> dict[float, LossPoint]:
        points = self._state.points
        return {point.sparsity: point for point in points if point.whole_run == whole}

    def _keep(self, point: LossPoint) -> LossPoint:
        self._state.points.append(point)
        write_own(self.work / "curve.json", self._state.as_dict())
        return point

    def _measure_masks(self, sparsity: float) -> LossPoint:
        """The point of the masks at a sparsity."""
        known = self._points().get(sparsity)
        if known is not None:
            return known
        record, _ = self._curve.of_masks(self._masks.at(sparsity), self._norms)
        return self._keep(self._curve.point(record, sparsity, whole=False))

    def _largest(self, nats: float) -> float | None:
        """The largest sparsity whose masks keep to a rise; None if even the least goes beyond."""
        with stage("loss"):
            sparsities = sparsities_of(self.run.recipe)
            rises = walk_curve(
                sparsities, nats, lambda sparsity: self._measure_masks(sparsity).most
            )
        return max((sparsity for sparsity, rise in rises.items() if rise <= nats), default=None)

    def _nothing(self) -> UserError:
        """That even the least goes beyond the budget, with the curve."""
        points = sorted([*self._points().values(), *self._points(True).values()], key=_by_sparsity)
        curve = "; ".join(point.words for point in points if not point.removes_nothing)
        shutil.rmtree(self.work)
        instead = cheaper(self.run.recipe.at(points[-1].sparsity))
        structure = self.run.recipe.structure
        if structure is not None and (structure.width_multiple or 1) > 1:
            instead.append("a lower --width-multiple")
        return UserError(
            f"{self.budget.flag} removes nothing: the least that was tried goes beyond it "
            f"({curve}). Allow more{', or use ' * bool(instead)}{' or '.join(instead)}."
        )

    def by_masks(self) -> RunReport:
        """Prune by masks that keep to the budget."""
        taken = self._largest(self.budget.nats)
        if taken is None:
            raise self._nothing()
        return self._run_whole(taken, self.run.path, self.run.options.overwrite)

    def by_runs(self) -> RunReport:
        """Prune by whole runs, and put the best one that keeps to the budget at the path. A third
        is made if the best of two uses little of it. If none keeps to it, one more is made where
        the masks alone do.
        """
        nats = self.budget.nats
        share = _SHARE_OF_UPDATE if self.run.recipe.heal is None else _SHARE_OF_HEALING
        of_masks = _AIM * nats / share
        for number in range(1, _MOST_RUNS + 1):
            points = self._points(whole=True)
            if len(points) < number:
                # The masks only predict: of the least, a run may keep to the budget.
                wanted = self._largest(of_masks) or min(self._points())
                if wanted in points:
                    break
                self._try(wanted)
            whole = list(self._points(whole=True).values())
            point = whole[-1]
            best = self._best()
            enough = best is not None and (number > 2 or best.most >= _ENOUGH * nats)
            if 0.85 * nats <= point.most <= nats or (number > 1 and enough):
                break
            high = min((each for each in whole if each.most > nats), key=_by_sparsity, default=None)
            if best is not None and high is not None:
                # Between the two, on the line through the logarithms.
                ends = [
                    (each.most, self._measure_masks(each.sparsity).most) for each in (best, high)
                ]
                rises, masked = np.log(np.maximum(ends, nats / 100)).T
                of_masks = math.exp(np.interp(math.log(_AIM * nats), rises, masked))
                continue
            aim = _AIM if point.most <= nats else _CAREFUL
            left = aim * nats / max(point.most, nats / 100)
            of_masks = self._measure_masks(point.sparsity).most * left ** (
                1 / _GROWTH if left > 1 else 1
            )
        if self._best() is None:
            # The last resort is where masks alone keep to the budget: moving weights seldom harms.
            safe = self._largest(nats)
            if safe is not None:
                self._try(safe)
        return self._put()

    def by_units(self, sparsities: Sequence[float]) -> RunReport:
        """Prune by a whole run for each point, and put the best one that keeps to the budget at
        the path.
        """
        walk_curve(sparsities, self.budget.nats, lambda sparsity: self._try(sparsity).most)
        return self._put()

    def _try(self, sparsity: float) -> LossPoint:
        """The point of a whole run. Of the checkpoints, the best one stays."""
        known = self._points(whole=True).get(sparsity)
        point = known or self._keep(self._measure_whole(sparsity))
        best = self._best()
        for folder in self.work.glob("removed-*"):
            if best is None or folder != self._folder(best.sparsity):
                shutil.rmtree(folder)
        return point

    def _best(self) -> LossPoint | None:
        """The whole run that removes most within the budget."""
        good = (
            point for point in self._points(whole=True).values() if point.most <= self.budget.nats
        )
        return max(good, key=_by_sparsity, default=None)

    def _put(self) -> RunReport:
        """Put the best run at the path, with the whole curve in its report."""
        best = self._best()
        if best is None:
            raise self._nothing()
        folder = self._folder(best.sparsity)
        if not folder.is_dir():  # killed below, or nothing was removed
            try:
                self._run_whole(best.sparsity, folder, overwrite=True)
            except NothingRemovedError as error:
                raise self._nothing() from error
        report = read_report(folder)
        report.loss = self._search_at(best.sparsity).record
        report.save(folder / REPORT_NAME)
        checkpoint = self.run.checkpoint
        with open_output(self.run.inputs, checkpoint, -checkpoint.output_bytes) as out:
            out.begin(self._state.signature)
            out.files.rmdir()
            os.replace(folder, out.files)  # the disk need not hold it twice
            out.complete()
        return report

    def _folder(self, sparsity: float) -> Path:
        return self.work / f"removed-{sparsity:g}"

    def _run_whole(self, sparsity: float, path: Path, overwrite: bool) -> RunReport:
        """A whole run at a sparsity."""
        run = self.run
        search = self._search_at(sparsity)
        run.models.free()
        options = replace(run.options, loss=None, output=path, overwrite=overwrite)
        return self.prune(run.recipe.at(sparsity), options, self.given, search)

    def _measure_whole(self, sparsity: float) -> LossPoint:
        """The point of a whole run."""
        folder = self._folder(sparsity)
        try:
            self._run_whole(sparsity, folder, overwrite=True)
        except NothingRemovedError:  # less than one unit
            return LossPoint(sparsity=sparsity, rise=0.0, error=0.0, whole_run=True)
        _ = self._curve.dense
        models = self.run.models
        models.free()
        record = self._curve.measure(models.get(folder))
        models.free()
        return self._curve.point(record, sparsity, whole=True)

    def _search_at(self, sparsity: float) -> LossSearch:
        """What the run at a sparsity needs."""
        record = LossRecord(
            flag=self.budget.flag,
            budget=self.budget.nats,
            sparsity=sparsity,
            sequences=len(self._curve.tokens),
            length=self._curve.tokens.shape[1],
            dense=self._curve.dense.value,
            points=sorted(
                [*self._points().values(), *self._points(whole=True).values()], key=_by_sparsity
            ),
        )
        norms = self._norms if self.run.recipe.needs_activations else None
        assert self.run.held_out is not None
        return LossSearch(self.run.held_out, norms, record)


def _by_sparsity(point: LossPoint) -> tuple[float, bool]:
    return point.sparsity, point.whole_run
