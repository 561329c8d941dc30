"""Verification of a structured checkpoint: the scores and the choice are computed again, and
every tensor is compared.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import msgspec
import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from emp_llm.checkpoint.checkpoint import Checkpoint
from emp_llm.checkpoint.files import read_json
from emp_llm.common.errors import UserError, reason
from emp_llm.common.paths import INDEX_NAME, STRUCTURE_NAME
from emp_llm.models.architecture import Architecture, healed_tensors, within_block
from emp_llm.options.recipe import Recipe
from emp_llm.pruning.verification import Findings
from emp_llm.records.run_report import StructureRecord
from emp_llm.structure.choice import Choice, choose_units, count_removed
from emp_llm.structure.scores import unit_scores
from emp_llm.structure.units import UnitModel, changed_config
from emp_llm.structure.writing import cuts_of, fitted_at


def check_units(
    model: UnitModel,
    pruned: Checkpoint,
    recipe: Recipe,
    record: StructureRecord,
    feature: Callable[[str], Tensor | None] | None,
    findings: Findings,
    trained: bool = False,
) -> None:
    """Compare a structured checkpoint with the dense model.

    Args:
        model: the dense one.
        pruned: the checkpoint.
        recipe, record: of its run.
        feature: of `unit_scores`.
        trained: whether it was trained after it was pruned. Then of its tensors, only the zeros of
            removed units are compared.

    Raises:
        UserError: the file of kept units is missing or unreadable.
    """
    say = findings.differences.append
    path = pruned.folder / STRUCTURE_NAME
    stored = read_tensors(path)
    for units in model.units:
        if (
            not {f"{units.name}.kept", f"{units.name}.scores"} <= stored.keys()
            or units.name not in record.layers
        ):
            raise UserError(f"{path}: it does not name {units.name}. Download it again.")
    stored_scores = [stored[f"{units.name}.scores"].numpy() for units in model.units]
    for units, scores, noted in zip(
        model.units, unit_scores(model.units, recipe.name, feature), stored_scores, strict=True
    ):
        if scores.shape != noted.shape or not np.allclose(scores, noted, rtol=1e-9, atol=0):
            say(f"{units.name}: its scores are not those of {recipe.method}.")
    findings.checked[" or ".join(dict.fromkeys(units.kind for units in model.units))] += sum(
        len(units) for units in model.units
    )

    by_rule = [msgspec.structs.replace(units, kept=units.rule) for units in record.layers.values()]
    chosen, _ = choose_units(
        model.units, stored_scores, recipe, model.width_by_block, count_removed(by_rule)
    )
    choices = [
        replace(choice, kept=stored[f"{choice.units.name}.kept"].numpy()) for choice in chosen
    ]
    for wanted, choice in zip(chosen, choices, strict=True):
        if not np.array_equal(wanted.kept, choice.kept):
            say(
                f"{choice.units.name}: the kept units are not those that the recipe chooses by the "
                "scores."
            )
    findings.checked["choices"] += len(choices)
    _check_tensors(model, pruned, recipe, choices, findings, trained)
    _check_side_files(model.checkpoint, pruned, record, findings, trained)


def _check_tensors(
    model: UnitModel,
    pruned: Checkpoint,
    recipe: Recipe,
    choices: list[Choice],
    findings: Findings,
    trained: bool,
) -> None:
    """Compare every tensor with the rows and columns of the dense model. Refitted and healed
    weights may differ.
    """
    say = findings.differences.append
    remove = recipe.structure is None or not recipe.structure.keep_shapes
    cuts = cuts_of(model, choices, remove)
    refitted = set(fitted_at(choices)) if recipe.update is not None else set()
    refitted |= healed_tensors(model.architecture, recipe)
    expected = {name: cuts.new_name(name) for name in model.checkpoint.tensors}
    for shard, tensors in groupby(model.checkpoint.tensors.values(), lambda tensor: tensor.shard):
        with safe_open(shard, framework="pt") as source:
            for tensor in tensors:
                name = expected[tensor.name]
                if name is None:
                    continue
                theirs = pruned.tensors.get(name)
                if trained and (remove or theirs is None):
                    continue
                findings.checked["tensors of the source"] += 1
                if theirs is None or (theirs.dtype != tensor.dtype and not trained):
                    say(f"{name}: it is missing, or has another dtype.")
                    continue
                stored = source.get_tensor(tensor.name)
                matrices = list(cuts.matrices(tensor.name, stored))
                whole = matrices[0].dim() == stored.dim()
                wanted = matrices[0] if whole else torch.stack(matrices)
                with safe_open(theirs.shard, framework="pt") as file:
                    written = file.get_tensor(name)
                if wanted.shape != written.shape:
                    say(
                        f"{name}: it has the shape {list(written.shape)}; {list(wanted.shape)} are "
                        "kept."
                    )
                elif trained or tensor.name in refitted:
                    if not remove and bool((written[wanted == 0] != 0).any()):
                        say(f"{name}: weights of removed units are not zero.")
                elif not torch.equal(
                    *(values.contiguous().view(torch.uint8) for values in (wanted, written))
                ):
                    say(f"{name}: its values are not those of the source.")
    for name in () if trained else pruned.tensors.keys() - set(expected.values()):
        say(f"{name}: the source has no such tensor.")


def check_shapes(architecture: Architecture, findings: Findings) -> None:
    """Compare the stored shapes with config.json, and those of layers that transformers does not
    load with the blocks'.

    Args:
        architecture: of the pruned checkpoint.
    """
    shapes = {name: tensor.shape for name, tensor in architecture.checkpoint.tensors.items()}
    for parameter, name in architecture.stored_names.items():
        by_config = architecture.shapes.get(parameter, shapes[name])
        if shapes[name] != by_config:
            findings.differences.append(
                f"{name}: its shape {list(shapes[name])} is {list(by_config)} by config.json."
            )
    of_blocks = {
        (within_block(name), shape)
        for name, shape in shapes.items()
        if name not in architecture.unused
    }
    for name, end in architecture.further_blocks.items():
        if (end, shapes[name]) not in of_blocks:
            findings.differences.append(
                f"{name}: its shape {list(shapes[name])} is that of no decoder block any more."
            )


def _check_side_files(
    dense: Checkpoint,
    pruned: Checkpoint,
    record: StructureRecord,
    findings: Findings,
    trained: bool,
) -> None:
    """Compare the other files with those of the dense model; of a model that was trained since, the
    changed fields of config.json alone.
    """
    changes = {tuple(name.split(".")): value for name, value in record.config.items()}
    if trained:
        findings.checked["config.json"] += 1
        if changed_config(pruned.config, changes) != pruned.config:
            findings.differences.append("config.json: it has not the sizes that the run records.")
        return
    for relative in dense.side_files():
        ours = pruned.folder / relative
        theirs = dense.folder / relative
        findings.checked["side files"] += 1
        if not ours.is_file():
            findings.differences.append(f"{relative}: it is missing.")
        elif str(relative) == "config.json" and changes:
            if read_json(ours) != changed_config(read_json(theirs), changes):
                findings.differences.append(
                    f"{relative}: it has other changes than those that the run records."
                )
        elif str(relative) != INDEX_NAME and ours.read_bytes() != theirs.read_bytes():
            findings.differences.append(f"{relative}: differs from the source.")


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a file that the run wrote beside the checkpoint; UserError if it is missing
    or damaged.
    """
    try:
        tensors: dict[str, Tensor] = load_file(path)
        return tensors
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"{path}: it decided which units stay, and cannot be read "
            f"({reason(error)}). Download it."
        ) from error
