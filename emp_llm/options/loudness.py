"""Options of what a command tells while it works."""

from dataclasses import dataclass
from typing import Annotated

from emp_llm.common.errors import UserError
from emp_llm.options.base import Opt, Options


@dataclass(frozen=True, kw_only=True)
class LoudnessOptions(Options):
    """What a command tells while it works. Warnings and errors are always shown."""

    verbose: Annotated[bool, Opt("Also log each step with its size, time and memory.", flag="--verbose", short="-v")] = False
    quiet: Annotated[bool, Opt("No progress and no log: only the result, warnings and errors.", flag="--quiet", short="-q")] = (
        False
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.verbose and self.quiet:
            raise UserError("--verbose and --quiet exclude each other; give one of them.")
