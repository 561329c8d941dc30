"""The units of a model, of any structure."""

from collections.abc import Sequence
from pathlib import Path

from emp_llm.checkpoint.checkpoint import SAVE_AGAIN, Checkpoint
from emp_llm.common.errors import UserError, shortened_list
from emp_llm.models.architecture import Architecture
from emp_llm.models.loading import build_skeleton, has_own_widths
from emp_llm.options.recipe import StructureRecipe
from emp_llm.structure.experts import expert_changes, find_experts
from emp_llm.structure.layers import check_layers, find_layers, layer_changes
from emp_llm.structure.parts import find_parts, part_changes
from emp_llm.structure.units import Changes, Indices, UnitModel, Units


def unit_model(
    folder: Path,
    structure: StructureRecipe,
    blocks: str | None = None,
    trust_remote_code: bool = False,
) -> UnitModel:
    """The heads, neurons, experts or layers of a model. No weight is read.

    Args:
        folder: of the model.
        structure: which units.
        blocks: name of the list of decoder blocks; None: detected.
        trust_remote_code: run code from the model's folder.

    Raises:
        UserError: the model has no such units, or they are stored in a form that cannot be pruned.
    """
    checkpoint = Checkpoint(folder)
    if checkpoint.config.get("quantization_config") is not None:
        raise UserError(
            f"{folder}: it is quantised, and --structure needs plain weights. Prune "
            "the original model."
        )
    skeleton = build_skeleton(folder, trust_remote_code)
    if getattr(skeleton.config, "is_encoder_decoder", False):
        raise UserError(
            f"{folder}: --structure is for decoder-only models, and this one has an encoder."
        )
    architecture = Architecture.of_model(checkpoint, skeleton, blocks)
    if structure.structure == "experts":
        return UnitModel(skeleton, architecture, [*find_experts(skeleton, architecture)])
    if structure.structure == "layers":
        model = UnitModel(skeleton, architecture, [find_layers(skeleton, architecture, blocks)])
        check_layers(model)
        return model
    further = list(architecture.further_blocks)
    if further and not structure.keep_shapes:
        raise UserError(
            f"{folder}: transformers does not load {shortened_list(further)}, which have the "
            "shapes of a decoder block. They would not fit config.json after --structure "
            f"{structure.structure}. Add --keep-shapes, or remove them first: {SAVE_AGAIN}."
        )
    if has_own_widths(skeleton.config):
        raise UserError(
            f"{folder}: its layers differ in width already. --structure takes models whose layers "
            "are alike; prune the dense model again, or give --structure layers."
        )
    units: list[Units] = [*find_parts(skeleton, architecture, structure)]
    if structure.per_layer and architecture.experts:
        raise UserError(f"{folder}: --per-layer is not for mixtures of experts. Leave it out.")
    by_block = isinstance(getattr(skeleton.config.get_text_config(), "intermediate_size", 0), list)
    return UnitModel(
        skeleton, architecture, units, by_block or structure.per_layer, structure.per_layer
    )


def config_changes(model: UnitModel, kept: Sequence[Indices]) -> Changes:
    """The fields of config.json that change if only some units stay.

    Args:
        model: dense.
        kept: the numbers of the units that stay, of each of `model.units`.

    Raises:
        UserError: config.json has no number for such units, or the smaller model would need other
            shapes.
    """
    if model.units[0].kind == "experts":
        return expert_changes(model, kept)
    if model.units[0].kind == "layers":
        return layer_changes(model, kept[0])
    return part_changes(model, kept)
