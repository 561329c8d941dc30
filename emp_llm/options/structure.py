"""Options of structured pruning: whole heads and neurons in place of weights."""

from dataclasses import dataclass, fields
from typing import Annotated, Literal

from emp_llm.common.errors import UserError
from emp_llm.options.base import Opt, Options
from emp_llm.options.calibration import NormOptions
from emp_llm.options.recipe import Recipe, check_choice

StructureKind = Literal["heads", "neurons", "both"]
StructureGroup = Literal["layer", "all"]
HeadUnit = Literal["group", "query"]
STRUCTURE_CRITERIA = ("magnitude", "wanda", "taylor")
WIDTH_MULTIPLE = 64


@dataclass(frozen=True, kw_only=True)
class StructureOptions(Options):
    """Whole heads and neurons, in place of weights.

    Attributes:
        structure: None: weights are pruned.
        structure_group: the heads or neurons that compete: those of a layer, or of all layers. None: layer.
        head_unit: "group": query heads together with the keys and values that they share; "query": single query heads. None:
            group.
        keep_shapes: set them to zero; else they are removed, and all layers get one width. None: remove.
        width_multiple: the number of neurons that stay is rounded up to a multiple of this. None: 64.
    """

    structure: Annotated[
        StructureKind | None, Opt("Remove whole attention heads, MLP neurons, or both, in place of weights.")
    ] = None
    structure_group: Annotated[
        StructureGroup | None, Opt("Heads or neurons that compete: of a layer, or of all layers; default: layer.")
    ] = None
    head_unit: Annotated[
        HeadUnit | None,
        Opt("With shared keys and values: whole groups of query heads, or query heads within groups; default: group."),
    ] = None
    keep_shapes: Annotated[bool, Opt("With --structure, set heads or neurons to zero and keep every shape and the config.")] = (
        False
    )
    width_multiple: Annotated[
        int | None, Opt(f"Round the width of the MLP up to a multiple of this; default: {WIDTH_MULTIPLE}.", minimum=1)
    ] = None

    @property
    def compared(self) -> StructureGroup:
        """The heads or neurons that compete."""
        return self.structure_group or "layer"

    @property
    def head_units(self) -> HeadUnit:
        return self.head_unit or "group"

    @property
    def multiple(self) -> int:
        return self.width_multiple or WIDTH_MULTIPLE

    def check_structure(self) -> None:
        """Raise UserError for an invalid value, or one without --structure."""
        for name, choices in (("structure", StructureKind), ("structure_group", StructureGroup), ("head_unit", HeadUnit)):
            check_choice(getattr(self, name), choices | None, name)
        for field in fields(StructureOptions):
            if self.structure is None and getattr(self, field.name) not in (None, False):
                raise UserError(
                    f"--{field.name.replace('_', '-')} has no effect without --structure. Add that, or leave it out."
                )
        if self.structure == "heads" and self.width_multiple is not None:
            raise UserError("--width-multiple is for neurons, and --structure heads removes none. Leave it out.")
        if self.structure == "neurons" and self.head_unit is not None:
            raise UserError("--head-unit is for heads, and --structure neurons removes none. Leave it out.")
        if self.width_multiple is not None and self.keep_shapes:
            raise UserError("--keep-shapes keeps the width of the MLP; leave out --width-multiple.")


# Options of weights, and why they are not for units.
_OF_WEIGHTS = {
    "pattern": "N:M is a pattern of single weights",
    "criterion": "a criterion of your own scores single weights",
    "scores": "scores of your own are of single weights",
    "score_map": "it is for scores of your own",
    "score": "it chooses norms for single weights",
    "count_by": "it is for single weights",
    "shares": "it is for single weights",
    "neff_dtype": "it is the paper's arithmetic for rows of weights",
    "match_by": "matrices lose no single weights",
    "ignore": "all layers lose heads or neurons together",
}


def check_structured(recipe: Recipe, structure: StructureOptions, text: NormOptions, propagate: str, quantised: bool) -> None:
    """Raise UserError for options of `prune` that do not go with --structure."""
    name = recipe.name
    filled = Recipe(method=f"{'emp-' if recipe.adaptive else ''}magnitude", match=recipe.match)  # what nobody asked for
    for field, why in _OF_WEIGHTS.items():
        if getattr(recipe, field) not in (None, getattr(filled, field)) and not (name == "relative" and field == "count_by"):
            flag = "map" if field == "score_map" else field.replace("_", "-")
            raise UserError(f"--{flag} does not go with --structure: {why}.")
    values = {"group": recipe.group, "targets": recipe.targets, "tower": recipe.tower, "propagate": propagate}
    instead = {"group": "Use --structure-group", "targets": "Use --structure heads, neurons or both"}
    for field, default in (("group", "row"), ("targets", "mlp"), ("tower", "language"), ("propagate", "dense")):
        if values[field] != default:
            raise UserError(f"--{field} does not go with --structure. {instead.get(field, 'Leave it out')}.")
    if quantised:
        raise UserError("--structure needs the original weights; leave out --load-in-8bit and --load-in-4bit.")
    if name not in STRUCTURE_CRITERIA:
        known = ", ".join(f"emp-{each}, {each}" for each in STRUCTURE_CRITERIA)
        raise UserError(f"--method {recipe.method} does not score heads or neurons. Use one of {known}.")
    if text.activations is not None and name == "taylor":
        raise UserError("--activations holds norms, and --method taylor needs gradients. Leave it out, or use --method wanda.")
    if text.activations is not None and recipe.refit:
        raise UserError("--activations holds norms, and --refit needs a text. Leave out one of them.")
    recipe.check_units()
