"""The options of `plan`, and what the commands for studies share."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from emp_llm.common.declared import Opt
from emp_llm.options.model import Dtype
from emp_llm.options.sweep import PointOptions

StudyFolder = Annotated[Path, Opt("Folder with plan.jsonl.", argument=True, metavar="STUDY")]
DEFAULT_SUITE = "paper"


@dataclass(frozen=True, kw_only=True)
class PlanOptions(PointOptions):
    """Options of `plan`. None: the default, which a table may replace.

    Attributes:
        per: "recipe": each recipe is pruned and evaluated by jobs of its own; "model": one sweep
            for each model, which keeps no checkpoints.
    """

    table: Annotated[
        Path | None,
        Opt(
            "TOML table with these options; those of the command line replace them.", argument=True
        ),
    ] = field(default=None, kw_only=False)
    output: Annotated[Path, Opt("Folder of the study.")] = Path("study")
    overwrite: Annotated[
        bool, Opt("Replace another plan in the folder; finished outputs stay.")
    ] = False
    models: Annotated[
        str | list[str] | None, Opt("Model folders or Hub ids, separated by commas.")
    ] = None
    betas: Annotated[str | None, Opt("Betas of the emp methods; default: 1.")] = None
    suite: Annotated[str | None, Opt(f"Evaluation suite; default: {DEFAULT_SUITE}.")] = None
    limit: Annotated[
        int | None, Opt("Use at most this many examples per task and blocks of text.", minimum=1)
    ] = None
    calibration: Annotated[str | None, Opt("Calibration text, as for prune.")] = None
    samples: Annotated[int | None, Opt("Number of calibration sequences.", minimum=1)] = None
    seqlen: Annotated[int | None, Opt("Tokens per calibration sequence.", minimum=1)] = None
    targets: Annotated[str | None, Opt("Layers to prune, as for prune.")] = None
    dtype: Annotated[Dtype | None, Opt("Dtype of forward passes; default: auto.")] = None
    per: Annotated[
        Literal["recipe", "model"] | None,
        Opt(
            "Jobs for each recipe (prune, evaluate), or one for each model (sweep); default: "
            "recipe."
        ),
    ] = None
    prune_options: Annotated[
        str | None, Opt("Further options of every prune (or sweep), as one text.")
    ] = None
    evaluate_options: Annotated[
        str | None, Opt("Further options of every evaluate, as one text.")
    ] = None
    trust_remote_code: Annotated[bool, Opt("Run code from the model repositories.")] = False
