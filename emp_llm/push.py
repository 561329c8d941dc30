"""`python -m emp_llm.push`: pruned checkpoint -> the Hub, with a model card."""

from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from emp_llm.cli import run
from emp_llm.services.options import PrunedFolder
from emp_llm.services.publishing import Evidence, publish
from emp_llm.services.terminal import show_push as show
from emp_llm.services.upload import Destination


def push(
    folder: PrunedFolder,
    repository: Annotated[str, Argument(help="USER/NAME on the Hub; made where it is not there.")],
    private: Annotated[bool, Option("--private", help="Make the repository a private one.")] = False,
    revision: Annotated[str | None, Option(help="Branch to push to; made from main where it is not there.")] = None,
    results: Annotated[
        list[Path] | None, Option(help="Results file of evaluate for the card: this checkpoint's, its baseline's; repeatable.")
    ] = None,
    plot: Annotated[list[Path] | None, Option(help="PNG for the card, beside those in DIR/emp_llm; repeatable.")] = None,
    base_model: Annotated[str | None, Option(help="Hub id of the dense model, where it was pruned from a folder.")] = None,
    overwrite: Annotated[bool, Option("--overwrite", help="Replace other weights that the branch holds.")] = False,
    dry_run: Annotated[bool, Option("--dry-run", help="Say what would be pushed, and touch nothing.")] = False,
) -> dict[str, Any]:
    """Push a pruned checkpoint to the Hub, with a model card that is also kept in its folder as README.md.

    One commit makes the branch hold it, so nobody loads half of it; a push that was cut off goes on behind the last large file
    that was finished. Only the checkpoint goes there: what its manifest names, manifest, report, card, results and plots.

    Returns what was pushed: "repository", "branch", "files" (bytes by path), "bytes", "folder", "commit", "url", "uploaded"
    and "deleted" (what the commit changed); for a dry run "dry_run" and the first four.

    Raises:
        UserError: the folder is no finished checkpoint, the Hub refuses, or the branch holds other weights.
    """
    to = Destination(repository, revision, private, overwrite)
    return publish(folder, to, Evidence(tuple(results or ()), tuple(plot or ()), base_model), dry_run)


if __name__ == "__main__":
    run(push, show)
