"""`emp-llm generate`: text from a pruned model that computes from its packed weights."""

import sys
from typing import TYPE_CHECKING

from emp_llm.cli import callable_module, run
from emp_llm.options.base import takes
from emp_llm.options.runtime import GenerateOptions

if TYPE_CHECKING:
    from emp_llm.runs.generate_run import Generation


@takes(GenerateOptions)
def generate(options: GenerateOptions) -> "Generation":
    """Continue a text with a pruned model, and tell how fast and in how much memory.

    The pruned layers compute from a bitmask and the weights that are not zero. The model is a pruned checkpoint, or a folder
    of emp-llm pack, whose files are mapped into memory.

    Returns the generation: iterate over its pieces, or take `text`; then `figures`.
    """
    from emp_llm.runs.generate_run import Generation

    return Generation(options)


def show(generation: "Generation") -> None:
    """Print the text while it is generated, then its figures to standard error, unless the run is quiet."""
    for piece in generation:
        print(piece, end="", flush=True)
    print()
    if generation.figures is not None and not generation.quiet:
        print(generation.figures.words(), file=sys.stderr)


callable_module(__name__)

if __name__ == "__main__":
    run(generate, show)
