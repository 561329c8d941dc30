"""Options of `image`."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from emp_llm.common.errors import UserError
from emp_llm.options.base import LoudnessOptions, Opt
from emp_llm.selection.rule import check_beta

PixelGroup = Literal["channel", "patch", "both"]
PixelMean = Literal["group", "channel"]


@dataclass(frozen=True, kw_only=True)
class ImageOptions(LoudnessOptions):
    """Options of `image`."""

    image: Annotated[Path, Opt("Image to prune.", argument=True, metavar="IN")] = field(kw_only=False)
    output: Annotated[
        Path | None, Opt("Folder to write; default: IN's name with -emp, here.", argument=True, metavar="OUT")
    ] = None
    beta: Annotated[float, Opt("Keep beta x N_eff pixels of a group.")] = 1.0
    group: Annotated[
        PixelGroup, Opt("Pixels that compete with each other: of a channel, of a patch of it; or both, in turn.")
    ] = "both"
    patch: Annotated[int, Opt("Side of a patch in pixels.", minimum=1)] = 4
    mean: Annotated[PixelMean, Opt("Centre patches on their own mean (group), or on their channel's.")] = "group"
    overwrite: Annotated[bool, Opt("Replace an existing output.")] = False

    @property
    def groups(self) -> tuple[str, ...]:
        """The groups to prune by."""
        return ("channel", "patch") if self.group == "both" else (self.group,)

    def check(self) -> None:
        """Raise UserError for invalid options."""
        self.check_choice("group", PixelGroup)
        self.check_choice("mean", PixelMean)
        if self.patch < 1:
            raise UserError(f"--patch must be at least 1 pixel, got {self.patch}.")
        try:
            check_beta(self.beta)
        except ValueError as error:
            raise UserError(f"--{error}.") from error
