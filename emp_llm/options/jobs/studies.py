"""Options of the commands that work on a planned study."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from emp_llm.options.base import LoudnessOptions, Opt

StudyFolder = Annotated[Path, Opt("Folder with plan.jsonl.", argument=True, metavar="STUDY")]


@dataclass(frozen=True, kw_only=True)
class RunOptions(LoudnessOptions):
    """Options of `run`."""

    study: StudyFolder = field(kw_only=False)
    workers: Annotated[
        int | None,
        Opt("Jobs at the same time, each with its share of the GPUs or cores; default: one for each GPU.", minimum=1),
    ] = None
    only: Annotated[str | None, Opt("Ids of the jobs to run, separated by commas; default: all.")] = None


@dataclass(frozen=True, kw_only=True)
class StatusOptions(LoudnessOptions):
    """Options of `status`."""

    study: StudyFolder = field(kw_only=False)
    lines: Annotated[int, Opt("Lines of the log to show of each failed job.", minimum=0)] = 5


@dataclass(frozen=True, kw_only=True)
class CollectOptions(LoudnessOptions):
    """Options of `collect`."""

    study: StudyFolder = field(kw_only=False)
    output: Annotated[Path | None, Opt("Folder to write; default: tables in the study.")] = None
    no_plots: Annotated[bool, Opt("Write tables only, without matplotlib.")] = False
