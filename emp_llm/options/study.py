"""The options of `plan`."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from emp_llm.common.declared import Flag
from emp_llm.options.model import Dtype
from emp_llm.options.sweep import PointOptions

DEFAULT_SUITE = "paper"


@dataclass(frozen=True, kw_only=True)
class PlanOptions(PointOptions):
    """Options of `plan`. None: the default, which a table may replace."""

    table: Annotated[
        Path | None,
        Flag(
            "TOML table with these options; those of the command line replace them.", argument=True
        ),
    ] = field(default=None, kw_only=False)
    output: Annotated[Path, Flag("Folder of the study.")] = Path("study")
    overwrite: Annotated[
        bool, Flag("Replace another plan in the folder; finished outputs stay.")
    ] = False
    models: Annotated[
        str | list[str] | None, Flag("Model folders or Hub ids, separated by commas.")
    ] = None
    betas: Annotated[str | None, Flag("Betas of the emp methods; default: 1.")] = None
    suite: Annotated[str | None, Flag(f"Evaluation suite; default: {DEFAULT_SUITE}.")] = None
    limit: Annotated[
        int | None, Flag("Use at most this many examples per task and blocks of text.", minimum=1)
    ] = None
    calibration: Annotated[str | None, Flag("Calibration text, as for prune.")] = None
    samples: Annotated[int | None, Flag("Number of calibration sequences.", minimum=1)] = None
    seqlen: Annotated[int | None, Flag("Tokens per calibration sequence.", minimum=1)] = None
    targets: Annotated[str | None, Flag("Layers to prune, as for prune.")] = None
    dtype: Annotated[Dtype | None, Flag("Dtype of forward passes; default: auto.")] = None
    discard: Annotated[bool, Flag("Delete each pruned checkpoint as soon as it is evaluated.")] = (
        False
    )
    prune_options: Annotated[str | None, Flag("Further options of every prune, as one text.")] = (
        None
    )
    evaluate_options: Annotated[
        str | None, Flag("Further options of every evaluate, as one text.")
    ] = None
    trust_remote_code: Annotated[bool, Flag("Run code from the model repositories.")] = False
