"""`emp-llm push`: a pruned checkpoint is pushed to the Hub, with a model card."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from emp_llm.cli import command
from emp_llm.common.declared import Flag

if TYPE_CHECKING:
    from emp_llm.reporting.push import Pushed


@command
def push(
    folder: Annotated[
        Path,
        Flag("Output folder of a finished prune.", argument=True, metavar="MODEL", flag="--model"),
    ],
    repository: Annotated[str, Flag("USER/NAME on the Hub; created if missing.", argument=True)],
    *,
    private: Annotated[bool, Flag("Create the repository as private.")] = False,
    revision: Annotated[
        str | None, Flag("Branch to push to; created from main if missing.")
    ] = None,
    results: Annotated[
        list[Path] | None,
        Flag(
            "Results of evaluate or bench for the card: of this checkpoint, or "
            "its baseline; repeatable."
        ),
    ] = None,
    base_model: Annotated[
        str | None, Flag("Hub id of the dense model, if it was pruned from a folder.")
    ] = None,
    overwrite: Annotated[bool, Flag("Replace other weights on the branch.")] = False,
    dry_run: Annotated[bool, Flag("Print the card and the files, and push nothing.")] = False,
) -> "Pushed":
    """Push a pruned checkpoint to the Hub, with a model card that is also written to its folder as
    README.md.

    The push is a single commit, so nobody loads half a model. An interrupted push resumes after the
    last finished large file. The commit holds the files of the manifest, the manifest itself,
    report, card, results and the PNG files of the folder's emp_llm, and nothing else from it. They
    name models and files, not folders of this machine.

    Returns the files and the commit; for a dry run, the files that would be pushed.

    Raises:
        UserError: the folder is no finished checkpoint or differs from its manifest, the Hub
            refuses, or the branch holds other weights.
    """
    from emp_llm.reporting.push import Destination, push_checkpoint

    destination = Destination(repository, revision, private, overwrite)
    return push_checkpoint(folder, destination, results or (), base_model, dry_run)


def show(pushed: "Pushed") -> None:
    """Print the result of a push; of a dry run, the card and the files."""
    from emp_llm.reporting.push import pushed_words

    print(pushed_words(pushed))
