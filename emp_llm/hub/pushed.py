"""The result of a push, and its description."""

from dataclasses import dataclass, field

from emp_llm.common.errors import count_of, format_bytes
from emp_llm.common.tables import table


@dataclass(frozen=True)
class Pushed:
    """Result of a push, or of a dry run.

    Attributes:
        repository, branch: the destination; branch None: main.
        files: bytes of each file by its path in the repository.
        dry_run: nothing was changed; the fields below are empty.
        folder: the checkpoint.
        commit, url: the commit that holds the files, and the repository's address at the branch.
        uploaded, deleted: paths that the commit changed.
    """

    repository: str
    branch: str | None
    files: dict[str, int]
    dry_run: bool = False
    folder: str = ""
    commit: str | None = None
    url: str = ""
    uploaded: list[str] = field(default_factory=list)
    deleted: list[str] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        """The size of all files."""
        return sum(self.files.values())


def pushed_words(pushed: Pushed) -> str:
    """One line about a push; for a dry run, a table of the files."""
    if pushed.dry_run:
        rows = [["file", "size"], *([path, format_bytes(size)] for path, size in sorted(pushed.files.items()))]
        branch = f", branch {pushed.branch}" if pushed.branch else ""
        total = f"{count_of(len(pushed.files), 'file')}, {format_bytes(pushed.bytes)}"
        return f"{table(rows)}\n{total}, would be pushed to {pushed.repository}{branch}"
    unchanged = len(pushed.files) - len(pushed.uploaded)
    deleted = f", {count_of(len(pushed.deleted), 'file')} of other weights deleted" if pushed.deleted else ""
    return (
        f"{pushed.url} holds {pushed.folder}: {count_of(len(pushed.uploaded), 'file')} pushed, {unchanged} unchanged{deleted} "
        f"(commit {str(pushed.commit)[:10]})"
    )
