"""`emp-llm calibrate`: text -> activations.safetensors."""

import logging
from typing import TYPE_CHECKING

from emp_llm.cli import callable_module, run
from emp_llm.common.wording import count_of
from emp_llm.options.base import takes
from emp_llm.options.commands import CalibrateOptions

if TYPE_CHECKING:
    from emp_llm.calibration.activations import Activations
    from emp_llm.calibration.compare import NormsDifference

logger = logging.getLogger(__name__)


@takes(CalibrateOptions)
def calibrate(options: CalibrateOptions) -> "Activations | NormsDifference":
    """Run a text through a model and write the 2-norm of every input feature of its linear layers.

    The text passes through the model once; the file serves any number of prune runs (--activations). Under torchrun or
    accelerate launch, every process runs its share of the text, and the first writes the file.

    Returns the norms; with `compare`, the differences of two files, and no model is run.
    """
    from emp_llm.runs.calibrate_run import CalibrateRun
    from emp_llm.runs.stages.stage import run_stages

    options.check()
    if options.compare is not None:
        from emp_llm.calibration.compare import compare_norms

        return compare_norms(*options.compare)
    with CalibrateRun(options) as job:
        run_stages([job.calibrate])
    norms = job.norms
    logger.info("%s: norms of %s of %s.", options.output, count_of(len(norms.norms), "input"), _layers(norms))
    return norms


def show(result: "Activations | NormsDifference") -> None:
    """Print the differences of two files. A calibration prints nothing."""
    from emp_llm.calibration.compare import NormsDifference, difference_table

    if isinstance(result, NormsDifference):
        print(difference_table(result))


def _layers(norms: "Activations") -> str:
    texts = [f"{text.file or text.dataset}" for text in norms.about.all_texts]
    source = f" over {norms.about.tokens or 0:,} tokens of {' and '.join(texts)}" if texts else ""
    return f"{count_of(len(norms.input_of), 'layer')}{source}"


callable_module(__name__)

if __name__ == "__main__":
    run(calibrate, show)
