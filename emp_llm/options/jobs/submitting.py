"""Options of `submit`."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from emp_llm.options.base import LoudnessOptions, Opt
from emp_llm.options.jobs.studies import StudyFolder


@dataclass(frozen=True, kw_only=True)
class SubmitOptions(LoudnessOptions):
    """Options of `submit`."""

    study: StudyFolder = field(kw_only=False)
    site: Annotated[Path, Opt("Settings of the cluster: a .toml file; examples lie in scripts/slurm.")] = Path("site.toml")
    prepare: Annotated[
        bool,
        Opt("With an offline site, first download models and data into the cache.", flag="--prepare/--no-prepare"),
    ] = True
    dry_run: Annotated[bool, Opt("Print what would be submitted, and write nothing.")] = False
