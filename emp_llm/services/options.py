"""Options that several commands have, each with its type and its help."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from emp_llm.models.hidden import Place
from emp_llm.models.propagation import Mode

Model = Annotated[str, Option(help="Model folder or Hub id.")]
PrunedFolder = Annotated[Path, Argument(help="Output folder of a finished prune.")]
Limit = Annotated[int | None, Option(help="Examples of every task and blocks of the text; the numbers are partial.")]
Targets = Annotated[str, Option(help="mlp, attention, all-linear, name suffixes a,b, or a regex.")]
Ignore = Annotated[str | None, Option(help="Layers to leave out: suffixes a,b, or a regex.")]
CalibrationText = Annotated[str, Option(help="Recipe, text file or Hub data set id; then ,field=value.")]
Samples = Annotated[int | None, Option(help="Calibration sequences; default: the recipe's.")]
Seqlen = Annotated[int | None, Option(help="Tokens to a sequence; default: the recipe's.")]
BatchSize = Annotated[int, Option(help="Sequences to a calibration pass.", min=1)]
DeviceMap = Annotated[str, Option(help="auto, balanced, cpu, cuda:N, disk, or a JSON map.")]
Dtype = Annotated[str, Option(help="Of forward passes: auto, bfloat16, float16 or float32.")]
ExecutionMode = Annotated[Mode, Option(help="The whole model at once or by blocks; auto: by blocks if offloaded.")]
HiddenStatesPlace = Annotated[Place, Option(help="Where they are kept between blocks.")]
Blocks = Annotated[str | None, Option(help="Name of the list of decoder blocks; default: found.")]
MinExpertTokens = Annotated[int, Option(help="Experts that are shown fewer tokens are scored by magnitude.")]
AllowPartial = Annotated[
    bool, Option("--allow-partial", help="Go on if more than half of the blocks' weights cannot be reached.")
]
Seed = Annotated[int, Option(help="For recipes that shuffle.")]
Revision = Annotated[str | None, Option(help="Branch, tag or commit of a Hub model.")]
TrustRemoteCode = Annotated[bool, Option("--trust-remote-code", help="Run code from the model repository.")]
