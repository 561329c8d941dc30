"""emp_manifest.json: every file that a run wrote with its hash, and everything that the masks
depend on.
"""

from pathlib import PurePath
from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

from emp_llm.records.base import FileRecord, Part, RecordedRecipe


class FileEntry(Part, kw_only=True):
    """A file: its size, and its BLAKE3 hash."""

    bytes: Annotated[int, Meta(ge=0)]
    blake3: str


class ManifestSource(Part, kw_only=True):
    """The checkpoint that was pruned.

    Attributes:
        identity: of its weights (`checkpoint.identity`).
        bytes: size of each shard.
    """

    identity: str | None = None
    bytes: dict[str, int] = {}


class NormsRecord(Part, kw_only=True):
    """The SHA-256 of the norms that the masks depend on."""

    norms: str


class Manifest(FileRecord, kw_only=True, omit_defaults=False):
    """The manifest of a finished checkpoint. It leaves out the report, whose times differ from
    run to run.
    """

    KIND: ClassVar[str] = "manifest"
    VERSION: ClassVar[int] = 3

    emp_llm: str = msgspec.field(default="unknown", name="emp-llm")
    source: ManifestSource
    recipe: RecordedRecipe
    activations: NormsRecord | None = None
    files: dict[str, FileEntry]

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.files:
            path = PurePath(name)
            if not name.isprintable() or path.is_absolute() or ".." in path.parts:
                raise ValueError(f"{name[:80]!r} is not a file in this folder")
