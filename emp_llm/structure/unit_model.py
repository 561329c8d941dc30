"""The units of a model, of any kind."""

from pathlib import Path

from emp_llm.checkpoint.checkpoint import Checkpoint
from emp_llm.common.errors import UserError
from emp_llm.models.architecture import Architecture
from emp_llm.models.loading import build_skeleton
from emp_llm.options.recipe import Structure
from emp_llm.structure.experts import Experts
from emp_llm.structure.heads import Heads
from emp_llm.structure.layers import Layers
from emp_llm.structure.neurons import Neurons
from emp_llm.structure.units import UnitModel, Units

# Their names are those of `options.recipe.UNIT_KINDS`.
KINDS: dict[str, type[Units]] = {kind.kind: kind for kind in (Heads, Neurons, Experts, Layers)}


def unit_model(
    folder: Path,
    structure: Structure,
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
    model = UnitModel(skeleton, architecture, structure)
    for name in structure.removed:
        model.units.extend(KINDS[name].find(model, blocks))
    model.units.sort(key=lambda units: units.block)  # of a block, heads come first
    return model
