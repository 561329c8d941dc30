"""The stages of a structured run: scores of heads and neurons, their choice, and the checkpoint without the others."""

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from emp_llm.common.errors import UserError
from emp_llm.common.file_names import TAYLOR_NAME
from emp_llm.common.ranks import ranks
from emp_llm.common.wording import count_of
from emp_llm.options.commands import PruneOptions
from emp_llm.pruning.recipe import budget_of, read_report
from emp_llm.runs.stages.run_models import RunModels
from emp_llm.selection.budgets import Budget, TotalBudget
from emp_llm.storage.output.output_folder import OutputFolder

if TYPE_CHECKING:
    import torch

    from emp_llm.calibration.calibration import Calibration
    from emp_llm.structured.language.smaller_config import Changes
    from emp_llm.structured.language.unit_choice import Budgets, Choice
    from emp_llm.structured.language.unit_plan import UnitPlan
    from emp_llm.structured.language.units import Units
    from emp_llm.update.moved import MovedWeights

logger = logging.getLogger(__name__)
Features = Callable[[], "dict[str, torch.Tensor] | None"]


class TaylorStage:
    """Collects sum |dL/dY * Y| of the inputs Y of each unit's last layer, block by block.

    Args:
        models: loads the dense model.
        plan: of the run.
        calibration: the text.
        options: of the run.
        output: keeps the sums, open on the first rank.

    Attributes:
        sums: name of a layer -> float64, shape (inputs,); available when the stage is finished.
    """

    name = "taylor"

    def __init__(
        self, models: RunModels, plan: "UnitPlan", calibration: "Calibration", options: PruneOptions, output: OutputFolder
    ) -> None:
        self.sums: dict[str, torch.Tensor] | None = None
        self._models = models
        self._plan = plan
        self._calibration = calibration
        self._options = options
        self._output = output
        routed = next((units for units in plan.units if units.output.routed), None)
        if routed is not None:
            raise UserError(f"{routed.name}: --method taylor does not reach experts. Use --method wanda or magnitude.")

    def finished(self) -> bool:
        from safetensors.torch import load_file

        noted = ranks().share(self._output.work.get("taylor") if ranks().main else None)
        if noted is not None:
            self._models.stopwatch.record |= noted
            self.sums = ranks().share(load_file(self._output.files / TAYLOR_NAME) if ranks().main else None)
        return self.sums is not None

    def run(self) -> None:
        from safetensors.torch import save

        from emp_llm.storage.atomic import write_bytes

        model = self._models.dense()
        with self._models.stopwatch(self.name):
            self.sums = taylor_sums(model, self._plan, self._calibration.text.tokens, self._options)
        if ranks().main:
            path = self._output.files / TAYLOR_NAME
            path.parent.mkdir(parents=True, exist_ok=True)
            write_bytes(path, save(self.sums))
            self._output.work.note(taylor=dict(self._models.stopwatch.record))


def taylor_sums(model: Any, plan: "UnitPlan", tokens: "torch.Tensor", options: PruneOptions) -> "dict[str, torch.Tensor]":
    """sum over tokens of |dL/dY * Y| for the inputs Y of each unit's last layer: float64, shape (inputs,), by its name.

    Args:
        model: dense, on any devices.
        plan: of the model.
        tokens: int64, shape (samples, length).
        options: of the forward passes.

    Raises:
        UserError: a sum is not finite, memory runs out, or the model cannot run block by block.
    """
    import torch

    from emp_llm.calibration.whole_pass import own_batches
    from emp_llm.execution.blockwise import BlockwiseModel
    from emp_llm.structured.language.gradients import input_gradients

    sums: dict[str, torch.Tensor] = {}

    def take(name: str, inputs: torch.Tensor, gradient: torch.Tensor) -> None:
        products = (inputs.float() * gradient.float()).abs().reshape(-1, inputs.shape[-1]).sum(0, dtype=torch.float64).cpu()
        sums[name] = sums[name] + products if name in sums else products

    runner = BlockwiseModel(model, options.blocks, options.hidden_states)
    names = [units.name for units in plan.units]
    input_gradients(runner, own_batches(tokens, options.batch_size), names, take)
    shares = ranks().gather(sums)
    total = {name: sum(share[name] for share in shares) for name in names if name in shares[0]}
    for name, each in total.items():
        if not bool(torch.isfinite(each).all()):
            raise UserError(f"{name}: its gradients are not finite. Load the model with --dtype float32 or bfloat16.")
    return total


class ChooseStage:
    """Scores the units, and chooses those that stay.

    Args:
        plan: of the run.
        options: of the run.
        features: returns the features of `unit_scores`.

    Attributes:
        choices, changes, budgets: available when the stage is finished; `changes` is None if all shapes stay.
    """

    name = "choose"

    def __init__(self, plan: "UnitPlan", options: PruneOptions, features: Features) -> None:
        self.choices: list[Choice] = []
        self.changes: Changes | None = None
        self.budgets: list[Budget] = []
        self._plan = plan
        self._options = options
        self._features = features

    def finished(self) -> bool:
        return bool(self.choices)

    def run(self) -> None:
        from emp_llm.structured.language.unit_choice import choose_units
        from emp_llm.structured.language.unit_scores import unit_scores

        plan, options = self._plan, self._options
        scores = unit_scores(plan.units, options.criterion_name, plan.matrices, self._features())
        widths = None if options.keep_shapes else plan.widths(options.multiple)
        budgets, together = unit_budgets(options), options.compared == "all"
        self.choices, self.budgets = choose_units(plan.units, scores, budgets, together, widths)
        _check_removes(self.choices, options)
        self.changes = None if options.keep_shapes else plan.changes(self.choices)

    def fitted_targets(self) -> list[Any]:
        """The matrices that a refit moves: the last layer of each unit whose columns are removed."""
        from emp_llm.architecture.targets import Target

        return [Target(c.units.output, self._plan.matrices[c.units.output]) for c in self.choices if c.removes]


def unit_budgets(options: PruneOptions) -> "Budgets":
    """How many heads or neurons stay, by kind and role. Raises UserError for a number out of range, or a run to match."""
    if options.match is None:
        budget = budget_of(options, {})
        return lambda kind, role: budget
    matched = read_report(options.match).structure
    if matched is None:
        raise UserError(f"--match {options.match}: that run removed weights, not heads or neurons. Give one with --structure.")
    layers = matched.layers.values()

    def of(kind: str, role: str) -> Budget:
        own = [each for each in layers if (each.kind, each.role) == (kind, role)]
        total = sum(each.units for each in own)
        if not own:
            raise UserError(f"--match {options.match}: that run has no {kind} of {role}.")
        return TotalBudget(total - sum(each.kept for each in own), total)

    return of


def units_line(every: "Sequence[Units]") -> str:
    """The numbers of heads and neurons of a model."""
    roles: dict[tuple[str, str], list[Units]] = {}
    for units in every:
        roles.setdefault((units.kind, units.role), []).append(units)
    parts = []
    for (kind, role), members in roles.items():
        words = f"groups of {members[0].heads} heads" if members[0].heads > 1 else kind
        parts.append(f"{count_of(len(members), 'layer')} with {len(members[0])} {words} ({role})")
    return f"found: {'; '.join(parts)}"


def choice_lines(choices: "Sequence[Choice]", changes: "Changes | None") -> list[str]:
    """How many heads and neurons stay, and what changes in config.json."""
    lines = []
    for kind in ("heads", "neurons"):
        own = [choice for choice in choices if choice.units.kind == kind]
        if own:
            total, rule = sum(len(choice.units) for choice in own), sum(choice.count for choice in own)
            units = f"groups of {own[0].units.heads} heads" if own[0].units.heads > 1 else kind
            lines.append(f"{units}: {sum(len(c.kept) for c in own):,} of {total:,} stay (the rule keeps {rule:,})")
    if changes:
        lines.append(f"config.json: {', '.join(f'{path[-1]} {value}' for path, value in changes.items())}")
    return lines


def _check_removes(choices: "Sequence[Choice]", options: PruneOptions) -> None:
    """Raise UserError if every unit stays."""
    if any(choice.removes for choice in choices):
        return
    rule, total = sum(choice.count for choice in choices), sum(len(choice.units) for choice in choices)
    if options.keep_shapes or rule == total:
        raise UserError(f"the rule keeps all {total} {options.structure}. Give a lower --beta, or --sparsity.")
    raise UserError(
        f"the rule keeps {rule} of {total}, and rounded up to one width for all layers nothing is removed. Use --keep-shapes, "
        "which sets them to zero where they are, a lower --beta, --sparsity, or a smaller --width-multiple."
    )


class UnitRefitStage:
    """Fits the last layer of each unit to the calibration text, so that it makes up for the removed units.

    Args:
        models: loads the dense model.
        choose: the finished choice.
        calibration: the text.
        options: of the run.
        files: keep the fitted weights.
        output: of the run.
    """

    name = "refit"

    def __init__(
        self,
        models: RunModels,
        choose: ChooseStage,
        calibration: "Calibration",
        options: PruneOptions,
        files: "MovedWeights",
        output: OutputFolder,
    ) -> None:
        self.files = files
        self._models = models
        self._choose = choose
        self._calibration = calibration
        self._options = options
        self._output = output

    def finished(self) -> bool:
        done = ranks().share(self._output.work.get("refitted") if ranks().main else None)
        if done is not None:
            self._models.stopwatch.record |= done
        return done is not None

    def run(self) -> None:
        import torch

        from emp_llm.update.update import Update
        from emp_llm.update.walk import update_model

        options = self._options
        choices = {choice.units.name: choice for choice in self._choose.choices}

        def mask(target: Any) -> torch.Tensor:
            choice = choices[target.name]
            kept = torch.ones(target.matrix.columns, dtype=torch.bool)
            kept[choice.units.columns.ravel()] = False
            kept[choice.units.columns_of(choice.kept)] = True
            return kept.expand(target.matrix.rows, -1)

        update = Update(
            damping=options.refit_damping,
            weighting=options.weighting,
            target=options.restored,
            min_expert_tokens=options.min_expert_tokens,
        )
        model = self._models.dense()
        with self._models.stopwatch(self.name):
            update_model(
                model,
                self._choose.fitted_targets(),
                self._calibration.text.tokens,
                update,
                self.files,
                mask_of=mask,
                batch_size=options.batch_size,
                hidden_states=options.hidden_states,
                blocks=options.blocks,
            )
        if ranks().main:
            self._output.work.note(refitted=dict(self._models.stopwatch.record))
