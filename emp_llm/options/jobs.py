"""Options of the commands for studies of many jobs."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from emp_llm.common.errors import UserError
from emp_llm.options.base import LoudnessOptions, Opt
from emp_llm.options.commands import METHODS

JobsPer = Literal["recipe", "model"]
DEFAULT_SUITE = "paper"
DEFAULT_GPU_GB = 80.0
StudyFolder = Annotated[Path, Opt("Folder with plan.jsonl.", argument=True, metavar="STUDY")]


@dataclass(frozen=True, kw_only=True)
class PlanOptions(LoudnessOptions):
    """Options of `plan`. None: the default, which a table may replace.

    Attributes:
        per: "recipe": each recipe is pruned and evaluated by jobs of its own; "model": one sweep for each model, which keeps no
            checkpoints.
    """

    table: Annotated[
        Path | None, Opt("TOML table with these options; those of the command line replace them.", argument=True)
    ] = field(default=None, kw_only=False)
    output: Annotated[Path, Opt("Folder of the study.")] = Path("study")
    overwrite: Annotated[bool, Opt("Replace another plan in the folder; finished outputs stay.")] = False
    models: Annotated[str | list[str] | None, Opt("Model folders or Hub ids, separated by commas.")] = None
    methods: Annotated[str | None, Opt(f"Methods, separated by commas; default: {METHODS}.")] = None
    betas: Annotated[str | None, Opt("Betas of the emp methods; default: 1.")] = None
    orders: Annotated[str | None, Opt("Hill orders of the emp methods; default: 2.")] = None
    sparsities: Annotated[str | None, Opt("Sparsities of the other methods; default: 0.5.")] = None
    emp_sparsities: Annotated[str | None, Opt("Sparsities of the emp methods, in place of betas; their beta is found.")] = None
    patterns: Annotated[str | None, Opt("N:M patterns of the other methods.")] = None
    suite: Annotated[str | None, Opt(f"Evaluation suite; default: {DEFAULT_SUITE}.")] = None
    limit: Annotated[int | None, Opt("Use at most this many examples per task and blocks of text.", minimum=1)] = None
    calibration: Annotated[str | None, Opt("Calibration text, as for prune.")] = None
    samples: Annotated[int | None, Opt("Number of calibration sequences.", minimum=1)] = None
    seqlen: Annotated[int | None, Opt("Tokens per calibration sequence.", minimum=1)] = None
    targets: Annotated[str | None, Opt("Layers to prune, as for prune.")] = None
    dtype: Annotated[str | None, Opt("Dtype of forward passes; default: auto.")] = None
    per: Annotated[
        JobsPer | None, Opt("Jobs for each recipe (prune, evaluate), or one for each model (sweep); default: recipe.")
    ] = None
    prune_options: Annotated[str | None, Opt("Further options of every prune (or sweep), as one text.")] = None
    evaluate_options: Annotated[str | None, Opt("Further options of every evaluate, as one text.")] = None
    gpu_gb: Annotated[float | None, Opt(f"Memory of a GPU in GB; 0: the jobs run on CPUs. Default: {DEFAULT_GPU_GB:g}.")] = None
    processes: Annotated[
        int | None, Opt("Processes of a job on each node, each with a whole model on a GPU of its own; default: 1.", minimum=1)
    ] = None
    nodes: Annotated[int | None, Opt("Nodes of a job; default: 1.", minimum=1)] = None
    trust_remote_code: Annotated[bool, Opt("Run code from the model repositories.")] = False

    def check(self) -> None:
        """Raise UserError for an invalid value."""
        self.check_choice("per", JobsPer)
        if self.gpu_gb is not None and not 0 <= self.gpu_gb < float("inf"):
            raise UserError(f"--gpu-gb must be 0 or more, got {self.gpu_gb:g}.")


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
