"""Options of structured pruning: whole heads and neurons in place of weights."""

from dataclasses import dataclass, fields
from typing import Annotated, Literal, get_args

from emp_llm.common.errors import UserError
from emp_llm.options.base import Opt, Options

Structure = Literal["heads", "neurons", "both"]
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

    structure: Annotated[Structure | None, Opt("Remove whole attention heads, MLP neurons, or both, in place of weights.")] = (
        None
    )
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
        for name, choices in (("structure", Structure), ("structure_group", StructureGroup), ("head_unit", HeadUnit)):
            value = getattr(self, name)
            if value is not None and value not in get_args(choices):
                raise UserError(f"--{name.replace('_', '-')} {value!r} is not one of {', '.join(get_args(choices))}.")
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
