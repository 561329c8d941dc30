"""Options of outputs and pushes."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from emp_llm.common.errors import UserError
from emp_llm.options.base import Opt, Options

MaskDevice = Literal["cpu", "cuda"]


@dataclass(frozen=True, kw_only=True)
class OutputOptions(Options):
    """An output folder or file."""

    output: Annotated[Path | None, Opt("Folder to write; default: named after the model.")] = None
    overwrite: Annotated[bool, Opt("Replace an existing output.")] = False


@dataclass(frozen=True, kw_only=True)
class PushOptions(Options):
    """A push to the Hub at the end of a run."""

    push_to_hub: Annotated[str | None, Opt("Push the result to USER/NAME on the Hub, with a model card.")] = None
    private: Annotated[bool, Opt("Create that repository as private.")] = False
    push_revision: Annotated[str | None, Opt("Branch to push to; created if missing. (--revision is the source's.)")] = None

    def check_push(self) -> None:
        """Raise UserError for push options without --push-to-hub."""
        if self.push_to_hub is None and (self.private or self.push_revision is not None):
            raise UserError("--private and --push-revision need a push; add --push-to-hub USER/NAME.")
