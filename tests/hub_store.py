"""What a loopback Hub holds: repositories with branches of commits, large files by their
SHA-256, and who may write.
"""

import hashlib
import threading
from dataclasses import dataclass, field
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"  # of repositories that are folders
# What a new repository's .gitattributes gives to LFS.
LARGE = (".safetensors", ".bin", ".png", ".gguf")
ATTRIBUTES = "".join(
    f"*{suffix} filter=lfs diff=lfs merge=lfs -text\n" for suffix in LARGE
).encode()


class Refused(Exception):
    """An answer other than 200: status, code and message as the Hub puts them into headers and
    body.
    """

    def __init__(self, status: int, message: str, code: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code


@dataclass(frozen=True)
class User:
    """Whom a token stands for."""

    name: str
    role: str = "write"
    organizations: tuple[str, ...] = ()


@dataclass(frozen=True)
class Commit:
    """A state of all files."""

    oid: str
    title: str
    files: dict[str, bytes]


@dataclass
class Repository:
    """Branches, newest commit last, and the large files that were uploaded, committed or not."""

    name: str
    private: bool = False
    branches: dict[str, list[Commit]] = field(default_factory=dict)
    large: dict[str, bytes] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def at(self, revision: str) -> Commit:
        """The commit that a branch or an id names."""
        if revision in self.branches:
            return self.branches[revision][-1]
        for commits in self.branches.values():
            for commit in commits:
                if commit.oid == revision:
                    return commit
        raise Refused(404, f"Invalid rev id: {revision}", "RevisionNotFound")

    def head(self, branch: str = "main") -> Commit:
        return self.branches[branch][-1]

    def commit(self, branch: str, header: dict[str, str], lines: list[dict[str, object]]) -> Commit:
        """Add a commit: files and deletions as the lines of the commit endpoint's body have
        them, decoded.
        """
        with self.lock:
            if branch not in self.branches:
                raise Refused(404, f"Invalid rev id: {branch}", "RevisionNotFound")
            last = self.head(branch)
            if header.get("parentCommit", last.oid) != last.oid:
                raise Refused(412, "A commit has happened since. Please refresh and try again.")
            files = dict(last.files)
            for line in lines:
                _apply(line["key"], line["value"], files, self.large)  # type: ignore[arg-type]
            oid = hashlib.sha1(
                f"{last.oid} {header['summary']} {len(self.branches[branch])}".encode()
            ).hexdigest()
            self.branches[branch].append(Commit(oid, header["summary"], files))
            return self.head(branch)


def _apply(
    key: str, value: dict[str, object], files: dict[str, bytes], large: dict[str, bytes]
) -> None:
    path = str(value["path"])
    if key == "file":
        files[path] = value["content"]  # type: ignore[assignment]
    elif key == "lfsFile":
        if value["oid"] not in large:
            raise Refused(400, f"LFS pointer of {path} points to an object that was never uploaded")
        files[path] = large[str(value["oid"])]
    elif key == "deletedFile":
        if path not in files:
            raise Refused(404, "A file with this name doesn't exist", "EntryNotFound")
        del files[path]
    else:
        raise Refused(400, f"unknown line {key!r}")


def repository_of(name: str, folder: Path) -> Repository:
    """A repository with the files of a folder, in one commit."""
    files = {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    return Repository(name, branches={"main": [Commit(COMMIT, "files", files)]})


def new_repository(name: str, private: bool) -> Repository:
    """As the Hub makes one: with a .gitattributes."""
    first = Commit(
        hashlib.sha1(name.encode()).hexdigest(), "initial commit", {".gitattributes": ATTRIBUTES}
    )
    return Repository(name, private, {"main": [first]})


def is_large(path: str, size: int) -> bool:
    """Whether the Hub wants a file by LFS."""
    return size > 0 and (path.endswith(LARGE) or size > 10_000_000)


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def blob_id(content: bytes) -> str:
    """Git's name of a file."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def entry(path: str, content: bytes) -> dict[str, object]:
    """A file as a tree lists it."""
    listed = {
        "type": "file",
        "path": path,
        "size": len(content),
        "oid": blob_id(content),
    }
    if is_large(path, len(content)):
        pointer = (
            f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256(content)}\nsize "
            f"{len(content)}\n"
        ).encode()
        listed |= {
            "oid": blob_id(pointer),
            "lfs": {"oid": sha256(content), "size": len(content), "pointerSize": len(pointer)},
        }
    return listed
