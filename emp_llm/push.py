"""`emp-llm push`: a pruned checkpoint is pushed to the Hub, with a model card."""

from typing import TYPE_CHECKING

from emp_llm.cli import callable_module, run
from emp_llm.options.base import takes
from emp_llm.options.commands import PushCommandOptions

if TYPE_CHECKING:
    from emp_llm.reporting.push import Pushed


@takes(PushCommandOptions)
def push(options: PushCommandOptions) -> "Pushed":
    """Push a pruned checkpoint to the Hub, with a model card that is also written to its folder as README.md.

    The push is a single commit, so nobody loads half a model. An interrupted push resumes after the last finished large file.
    The commit holds the files of the manifest, the manifest itself, report, card, results and the PNG files of DIR/emp_llm, and
    nothing else from the folder. They name models and files, not folders of this machine.

    Returns the files and the commit; for a dry run, the files that would be pushed.

    Raises:
        UserError: the folder is no finished checkpoint or differs from its manifest, the Hub refuses, or the branch holds other
            weights.
    """
    from emp_llm.reporting.push import Destination, push_checkpoint

    destination = Destination(options.repository, options.revision, options.private, options.overwrite)
    return push_checkpoint(options.folder, destination, options.results or (), options.base_model, options.dry_run)


def show(pushed: "Pushed") -> None:
    """Print the result of a push, or of a dry run."""
    from emp_llm.reporting.push import pushed_words

    print(pushed_words(pushed))


callable_module(__name__)

if __name__ == "__main__":
    run(push, show)
