"""Outputs that appear complete or not at all, and the finished work of an interrupted run, from
which the next one resumes.

An output folder NAME is written in a hidden folder beside it:

    .NAME.partial/lock            held by the running process
    .NAME.partial/manifest.json   the signature of the run, and its finished work
    .NAME.partial/fitted/         weights of finished blocks of a refit
    .NAME.partial/SHARD.npy       statistics of the rows of a finished shard
    .NAME.partial/files/          renamed to NAME when everything is finished
    .NAME.partial/replaced/       an older NAME, between the two renames

The manifest is replaced atomically, and only after the work that it lists is on disk.
"""

import contextlib
import logging
import os
import shutil
import stat
from collections.abc import Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatch
from functools import partial, reduce
from operator import and_
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import msgspec

from emp_llm.checkpoint.files import (
    INDEX_LIMIT,
    FileLock,
    explain_disk_error,
    file_hash,
    how_to_resume,
    is_intact,
    is_plain,
    link_sentence,
    lock,
    read_json,
    read_own,
    remove,
    sync_path,
    sync_tree,
    warn_of_damage,
    write_own,
)
from emp_llm.common.errors import (
    ReadError,
    RefusedError,
    UserError,
    format_bytes,
    quotable,
    reason,
    shorten_list,
)
from emp_llm.common.machine import OutOfMemory, Stopwatch, Times
from emp_llm.common.paths import (
    CARD_MARK,
    CARD_NAME,
    EXTRAS,
    MANIFEST_NAME,
    PACK_NAME,
    PACKED_SUFFIX,
    REPORT_NAME,
    file_state,
)
from emp_llm.common.ranks import ranks

logger = logging.getLogger(__name__)
T = TypeVar("T")
_FORMAT = "emp-llm work 4"
_OLD = "replaced"
_ANYBODY = 0o044  # may read
# All names in a work folder; one of the first three is there unless it is empty.
_WORK_FILES = (
    "lock",
    "manifest.json",
    _OLD,
    ".manifest.json.partial",
    "files",
    "fitted",
    "healing",
    "curve",
    "*.safetensors.npy",
)
# Finished blocks and batches of a calibration, whole or half written.
CALIBRATION_FILES = ("*state.json*", "*sums-*.safetensors*", "*hidden-*.safetensors*")


class _Begun(msgspec.Struct):
    """What the manifest of a work folder says of its run."""

    signature: dict[str, Any] = {}


class _Finished(msgspec.Struct):
    """What the manifest says of a part with a file."""

    hash: str | None
    stages: dict[str, Times]


class OutputFolder:
    """A folder that is written under another name, and renamed when it is complete. Only the first
    of several ranks writes; all of them make the same calls.

        with OutputFolder(...) as out:
            out.begin(signature)
            ...             # write into out.files, and out.note(part=...) when a part is finished
            out.complete()

    Without `complete`, or after an error, the path is unchanged. Finished work stays in `work`, for
    the same run to resume; if no work is finished, nothing is left behind.

    Args:
        path: the output.
        sources: input folders; they are never changed.
        needed: bytes that will be written.
        overwrite: replace an older checkpoint at the path, and discard the work of an unfinished
            run with other options.
        expected: of `check_folder`, for a folder that is no model.
        known: files that the run will write, for outputs whose records do not name all of them.

    Raises:
        UserError: the path exists and may not be replaced; it is a source, inside one or around
            one; or the disk has too little space.
    """

    def __init__(
        self,
        path: Path,
        sources: Sequence[Path],
        needed: int,
        overwrite: bool = False,
        expected: str | None = None,
        known: Collection[str] = (),
    ) -> None:
        self.path = Path(os.path.abspath(path))
        self._subject = f"--output {path}"
        self._overwrite = overwrite
        self._expected = expected
        if os.path.ismount(self.path):
            raise UserError(
                f"{self._subject}: it is the root of a file system, which is never "
                "replaced; name a folder in it."
            )
        self.work = self.path.with_name(f".{self.path.name}.partial")
        self.files = self.work / "files"
        self.fitted = self.work / "fitted"
        # Finished blocks or batches of a calibration.
        self.calibration = self.path.with_name(f".{self.path.name}.calibration")
        self._readers = _readers_of(sources)
        self._known = known
        self._old = self.work / _OLD
        self._manifest = self.work / "manifest.json"
        self._lock = FileLock(self.work / "lock", self._subject)
        self._state: dict[str, Any] = {}
        self._created: list[Path] = []
        check_apart(path, sources)
        self._check_path()
        self.check_space(needed)

    def __enter__(self) -> Self:
        """A collective call: all ranks have checked the path before the first one creates it."""
        ranks().broadcast(None)
        if ranks().main:
            self._enter()
        return self

    def _enter(self) -> None:
        """Create the work folder and lock it."""
        try:
            for folder in reversed([folder for folder in self.path.parents if not folder.exists()]):
                folder.mkdir()
                self._created.append(folder)
            self._open()
            try:
                _restore(self._old, self.path)  # if an earlier run stopped between the two renames
                if self._old.is_dir():  # or after them
                    shutil.rmtree(self._old)
                self._check_path()  # another run may have written it in the meantime
            except BaseException:
                self._close()
                raise
        except OSError as error:
            self._lock.release()
            raise UserError(
                f"--output {self.path}: cannot be written there ({reason(error)})."
            ) from error

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if not ranks().main:
            return
        with contextlib.suppress(OSError):
            if isinstance(error, RefusedError):
                self.forget()
            self._close()
        if not self.path.exists():
            for folder in reversed(self._created):
                with contextlib.suppress(OSError):  # not empty: another process uses it by now
                    folder.rmdir()
        _explain(error, self.path, (self.work, self.calibration))

    def begin(self, signature: dict[str, Any], machine: str = "") -> None:
        """Resume the work of an earlier run with this signature, or start with no work. A
        collective call: all ranks know what is finished.

        Args:
            signature: everything that the result depends on, as JSON.
            machine: what only the last bits of the result depend on. A resume with another one
                warns.

        Raises:
            UserError: an unfinished run with another signature left work, and `overwrite` is false.
        """
        if ranks().main:
            signature = {"format": _FORMAT} | signature
            if self._holds_work and not self._discards(self._state.get("signature", {}), signature):
                logger.info("%s: resuming the work of an earlier run.", self.work)
                if (before := self._state.get("machine", machine)) != machine:
                    told = (
                        f"{before}; with {machine}, norms and fitted weights differ in their "
                        "last bits."
                    )
                    logger.warning("warning: %s was begun with %s", self.path, told)
            else:
                self._empty()
                self.files.mkdir()
                self._state = {"signature": signature, "machine": machine}
        self._state = ranks().broadcast(self._state)

    def check_leftover(self, known: dict[str, Any]) -> None:
        """Raise the error of `begin` for the part of a signature that is known before the text
        is read; None is unknown. Not in the context of the folder.
        """
        if not ranks().main or not self.work.is_dir():
            return
        with contextlib.ExitStack() as stack:
            self._enter()
            stack.push(self)
            known = {key: value for key, value in known.items() if value is not None}
            older = {key: self._state.get("signature", {}).get(key) for key in known}
            if self._holds_work and not self._overwrite:
                self._discards(older, known)

    @property
    def left(self) -> dict[str, Any]:
        """The signature of the work that an interrupted run has left; empty if there is none."""
        return (read_own(self._manifest, _Begun) or _Begun()).signature

    def _discards(self, older: dict[str, Any], signature: dict[str, Any]) -> bool:
        """Whether the unfinished work is of other options, and goes; UserError if it may not."""
        difference = describe_difference(older, signature)
        if difference is not None and not self._overwrite:
            raise UserError(
                f"{self._subject}: {self.work} holds the work of an unfinished run with "
                f"{difference}. Repeat its command to resume it; to start over, add --overwrite or "
                "delete that folder."
            )
        if difference is not None:
            logger.info(
                "%s: discarding the work of an unfinished run with %s.", self.work, difference
            )
        return difference is not None

    @property
    def started(self) -> bool:
        """Whether there is finished work."""
        return bool(self._state.keys() - {"signature", "machine"})

    @property
    def _holds_work(self) -> bool:
        return self.started and self.files.is_dir()

    def get(self, part: str, kind: type[T]) -> T | None:
        """What is noted of a part of the work, of a type of msgspec; None if it is not finished, or
        is noted otherwise.
        """
        with contextlib.suppress(msgspec.ValidationError, OverflowError):
            return msgspec.convert(self._state.get(part), kind)
        return None

    def note(self, **parts: Any) -> None:
        """Note finished parts of the work, as JSON. The work itself must already be on disk."""
        state = self._state | parts
        if ranks().main:
            write_own(self._manifest, state)
        self._state = state  # not before it is written: what is not noted is not kept

    def intact(self, part: str, folder: Path, names: Iterable[str]) -> dict[str, str]:
        """The hashes of the files of a part, by name, that are finished and as they were noted. The
        others of these names are deleted.
        """
        noted = self.get(part, dict[str, str]) or {}
        kept = {}
        for name in names:
            if is_intact(folder / name, noted.get(name)):
                kept[name] = noted[name]
                continue
            if name in noted:
                warn_of_damage(folder / name)
            remove(folder / name)
        return kept

    def keep(self, part: str, file: Path, stopwatch: Stopwatch) -> None:
        """Note a finished part of the work, whose file is on disk, with the times so far."""
        digest = file_hash(file) if ranks().main and is_plain(file) else None
        self.note(**{part: {"hash": digest, "stages": dict(stopwatch.record)}})

    def has(self, part: str, file: Path, stopwatch: Stopwatch) -> bool:
        """Whether a part of the work is finished, and then its times are put on the stopwatch. It
        is not, with a warning, if its file is not the one that was noted. A collective call.
        """
        noted = self.get(part, _Finished)
        if noted is None:
            return False
        if ranks().first(partial(is_intact, file, noted.hash)):
            stopwatch.record |= noted.stages
            return True
        if ranks().main:
            warn_of_damage(file)
            remove(file)
        return False

    def forget(self) -> None:
        """Discard the notes of finished work, because the work is not valid."""
        self._manifest.unlink(missing_ok=True)
        self._state = {}

    def complete(self) -> None:
        """Rename the folder to its final name, replacing an older output. A collective call: on
        return, all ranks find it there.
        """
        if ranks().main:
            if self._readers != _ANYBODY:
                for path in (self.files, *self.files.rglob("*")):
                    enter = self._readers >> 2 if path.is_dir() else 0
                    path.chmod(path.stat().st_mode & (0o700 | self._readers | enter))
            sync_tree(self.files)
            self._check_path()
            put_in_place(self.files, self.path, self._old)
            # Of an unfinished run with other options.
            shutil.rmtree(self.calibration, ignore_errors=True)
            with contextlib.suppress(OSError):  # the output is complete
                self._remove()
        ranks().broadcast(None)

    def _open(self) -> None:
        """Create the work folder if missing, lock it, and read its manifest."""
        while True:
            check_own(self.work, _WORK_FILES, _WORK_FILES[:3])
            check_own(self.calibration, CALIBRATION_FILES)
            self.work.mkdir(exist_ok=True)
            if self._readers != _ANYBODY:  # until the files have it too
                self.work.chmod(0o700)
            try:
                self._lock.acquire()
                break
            except FileNotFoundError:  # another run has just deleted the folder
                continue
        self._state = read_own(self._manifest, dict[str, Any]) or {}

    def _close(self) -> None:
        """Release the work folder. Delete it unless it holds finished work, or an older output
        that the next run restores.
        """
        if self.started or self._old.is_dir():
            self._lock.release()
        else:
            self._remove()

    def _remove(self) -> None:
        """Delete the work folder; the lock goes last, so that no other run starts in a folder
        that is being deleted.
        """
        if self.work.is_dir():
            self._empty()
            self._lock.release()
            with contextlib.suppress(OSError):  # not empty: another run already has it
                self.work.rmdir()

    def _empty(self) -> None:
        """Delete everything in the work folder but the lock; the manifest first."""
        self.forget()
        for entry in self.work.iterdir():
            if entry != self._lock.path:
                remove(entry)

    def _check_path(self) -> None:
        if self._expected is not None:
            check_folder(self.path, self._overwrite, self._expected)
            _check_foreign(
                self.path,
                self._subject,
                {*self._known, *_files_of_run(self.path, (self._expected,))},
            )
        elif os.path.lexists(self.path):
            if not self._overwrite:
                self._remove_leftover()
                raise UserError(
                    f"{self._subject}: it exists; name another folder, or add --overwrite."
                )
            _check_replaceable(self.path, self._subject, self._known)

    def _remove_leftover(self) -> None:
        """Delete the work folder of a run that was killed after it had put its output in place."""
        if self.work.is_dir() and not self.work.is_symlink() and not self.files.is_dir():
            with contextlib.suppress(OSError, UserError):  # another run holds it
                self._lock.acquire()
                self._remove()

    def check_space(self, needed: int) -> None:
        """Raise UserError if the disk has no room for `needed` bytes, counting what the
        unfinished run already holds.
        """
        with contextlib.suppress(OSError):  # an unfinished run may have written a part already
            needed -= bytes_on_disk(self.work)
        check_space(self.path, needed)


def put_in_place(files: Path, path: Path, older: Path) -> None:
    """Rename a folder to a path, and what is there to `older`; or, after an error, leave both where
    they were.
    """
    try:
        if path.exists():
            os.replace(path, older)
        os.replace(files, path)
        sync_path(path.parent)
    # Then nothing stands under the name but the older output.
    except (OSError, KeyboardInterrupt, SystemExit):
        if path.exists() and not files.exists():
            os.replace(path, files)
        _restore(older, path)
        raise


def _restore(older: Path, path: Path) -> None:
    """Restore an older output, unless the new one is in its place."""
    if older.is_dir() and not path.exists():
        os.replace(older, path)


def bytes_on_disk(folder: Path) -> int:
    """The disk space that a folder takes; 0 if it is missing."""
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*"))


def check_space(path: Path, needed: int) -> None:
    """Raise UserError if the disk of an output has no room for `needed` bytes."""
    parent = next(folder for folder in path.absolute().parents if folder.exists())
    free = shutil.disk_usage(parent).free
    if free < needed:
        raise UserError(
            f"--output {path}: it needs {format_bytes(needed)}, and the disk has "
            f"{format_bytes(free)} free. Free some space, or choose another --output."
        )


class OutputFile(contextlib.ExitStack):
    """`with OutputFile(path) as out: ...; write it; out.complete()`. Only the first rank locks the
    output.

    Args:
        path: the file. Until `complete`, finished work is kept beside it, in the folder `progress`.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = Path(os.path.abspath(path))
        self.progress = self.path.with_name(f".{self.path.name}.progress")

    def __enter__(self) -> Self:
        check_own(self.progress, CALIBRATION_FILES)
        self.enter_context(lock(self.path))
        self._before = file_state(self.path)
        return self

    def __exit__(self, *exception: Any) -> None:
        if isinstance(exception[1], OSError) and file_state(self.path) != self._before:
            with contextlib.suppress(OSError):  # it may not be on disk
                self.path.unlink(missing_ok=True)
        super().__exit__(*exception)
        _explain(exception[1], self.path, (self.progress,))

    def complete(self) -> None:
        """Flush the file that the first rank has written to disk, and delete the work kept beside
        it.
        """
        if not ranks().main:
            return
        sync_path(self.path)
        sync_path(self.path.parent)
        shutil.rmtree(self.progress, ignore_errors=True)


def check_own(folder: Path, ours: Sequence[str], marks: Sequence[str] = ("*",)) -> None:
    """Check that a folder of work is one that emp-llm made, so that it may be written to and
    emptied.

    Args:
        folder: may be missing.
        ours: patterns of all names that emp-llm gives in a folder of this kind.
        marks: those of which one lies in every such folder unless it is empty.

    Raises:
        UserError: it is a link, pipe or device or holds one, holds another name, or none of the
            marks.
    """
    if not os.path.lexists(folder):
        return
    inside = [] if folder.is_symlink() else list(folder.rglob("*"))
    for path in (folder, *inside):
        if path.relative_to(folder).parts[:1] == (_OLD,) and path.parent != folder:
            continue  # an older output, as its user left it
        with contextlib.suppress(FileNotFoundError):  # another run has just deleted it
            about = path.lstat()
            if stat.S_ISLNK(about.st_mode) or (stat.S_ISREG(about.st_mode) and about.st_nlink > 1):
                raise UserError(link_sentence(path))
            if not stat.S_ISREG(about.st_mode) and not stat.S_ISDIR(about.st_mode):
                raise UserError(link_sentence(path, "a pipe, socket or device"))
    if not folder.is_dir():
        raise UserError(
            f"{folder} is in the way: emp-llm works in a folder of this name. Move it away."
        )
    # deleted, but still open somewhere.
    names = [path.name for path in folder.iterdir() if not path.name.startswith(".nfs")]
    foreign = [name for name in names if not any(fnmatch(name, pattern) for pattern in ours)]
    shown = shorten_list(sorted(map(quotable, foreign or names)))
    if foreign or (names and not any(fnmatch(name, mark) for name in names for mark in marks)):
        raise UserError(
            f"{folder} holds {shown}, which emp-llm did not put there, so the folder is "
            "neither used nor emptied. Move it away, or choose another output."
        )


def check_apart(path: Path, sources: Sequence[Path]) -> None:
    """Raise UserError if an output is an input folder, lies inside one or contains one."""
    real = path.resolve()
    for origin in (source.resolve() for source in sources):
        if real == origin or real in origin.parents or origin in real.parents:
            raise UserError(
                f"--output {path}: it is the input folder, lies inside it or contains it; name "
                "another folder."
            )


def check_output_file(path: Path, overwrite: bool) -> None:
    """Raise UserError if a file cannot be written, or exists and may not be replaced."""
    if (
        path.is_dir()
        or next(folder for folder in path.absolute().parents if folder.exists()).is_file()
    ):
        raise UserError(
            f"--output {path}: it is a folder, or lies in a file; name a file in a folder."
        )
    if path.exists() and not overwrite:
        raise UserError(f"--output {path}: it exists; name another file, or add --overwrite.")


def check_folder(path: Path, overwrite: bool, expected: str) -> None:
    """Check that a folder can be written.

    Args:
        path: the output.
        overwrite: replace an older output.
        expected: a file that every output of this kind holds; a folder without it is never
            replaced.

    Raises:
        UserError: the path exists and may not be replaced.
    """
    path = Path(os.path.abspath(path))
    if not os.path.lexists(path) or (
        path.is_dir() and not path.is_symlink() and not any(path.iterdir())
    ):
        return
    if path.is_symlink() or not path.is_dir() or not (path / expected).is_file():
        raise UserError(
            f"--output {path}: it exists and holds no {expected}, so it is never "
            "replaced; name another folder."
        )
    if not overwrite:
        raise UserError(f"--output {path}: it exists; name another folder, or add --overwrite.")


def write_folder(path: Path, files: Mapping[str, bytes], overwrite: bool, expected: str) -> None:
    """Write small files, given by relative name, into a folder that appears when all of them are on
    disk.

    Args:
        path, overwrite, expected: of `check_folder`.

    Raises:
        UserError: the path exists and may not be replaced; or the disk fails or is full.
    """
    size = sum(len(content) for content in files.values())
    with OutputFolder(path, (), size, overwrite, expected=expected, known=files) as out:
        out.begin({})
        for name, content in files.items():
            (out.files / name).parent.mkdir(parents=True, exist_ok=True)
            (out.files / name).write_bytes(content)
        out.complete()


def first_difference(old: Any, new: Any, name: str = "") -> tuple[str, Any, Any] | None:
    """The path and both values of the first field in which two nested records differ; None if
    they are equal.
    """
    if isinstance(old, dict) and isinstance(new, dict):
        if old and new and not old.keys() & new.keys():  # such as another node of a recipe
            return name, ", ".join(old), ", ".join(new)
        for key in dict.fromkeys([*new, *old]):
            difference = first_difference(
                old.get(key), new.get(key), f"{name}.{key}" if name else key
            )
            if difference is not None:
                return difference
        return None
    return None if old == new else (name, old, new)


def describe_difference(old: Any, new: Any) -> str | None:
    """`first_difference` in words, from the point of view of the new run; None if the records
    are equal.
    """
    difference = first_difference(old, new)
    if difference is None:
        return None
    name, *values = difference
    if name.startswith("source.files."):
        return (
            f"another source: {name.removeprefix('source.files.')} has another size, inode "
            "or change time"
        )
    texts = ["not given" if value is None else str(value) for value in values]
    before, now = (text if len(text) <= 40 else f"{text[:37]}..." for text in texts)
    return f"{name} {before}, this one has {now}"


def _explain(error: BaseException | None, path: Path, kept: Sequence[Path]) -> None:
    """After an error: raise the sentence for a failing disk, or say how to resume. After a refusal
    of what was asked for, the same command would end in the same way.
    """
    explanation = explain_disk_error(error, path, kept)
    if explanation is not None:
        raise explanation from error
    refused = isinstance(error, UserError) and not isinstance(error, ReadError | OutOfMemory)
    if error is not None and not refused and (sentence := how_to_resume(kept)):
        logger.warning("%s", sentence)


def _readers_of(sources: Sequence[Path]) -> int:
    """The read permissions that all source shards give to group and others, as bits of a mode."""
    modes = [
        shard.stat().st_mode
        for source in sources
        for shard in source.glob("*.safetensors")
        if shard.is_file()
    ]
    return reduce(and_, modes, _ANYBODY)


def _check_replaceable(path: Path, subject: str, known: Collection[str]) -> None:
    """Raise UserError unless a run of emp-llm wrote every file of an older model, or this run,
    which will write `known`.
    """
    if path.is_symlink() or not path.is_dir():
        raise UserError(
            f"{subject}: it is not a model folder, so --overwrite does not replace it; "
            "remove it yourself."
        )
    listed = _files_of_run(path, (MANIFEST_NAME, PACK_NAME, REPORT_NAME))
    if not listed and any(path.iterdir()):
        raise UserError(
            f"{subject}: it is not a model folder that emp-llm wrote, so --overwrite does not "
            "replace it; remove it yourself."
        )
    card = path / CARD_NAME
    if card.is_file() and CARD_MARK in card.read_text(encoding="utf-8", errors="replace"):
        listed.add(CARD_NAME)
    _check_foreign(path, subject, {*known, *listed})


def _check_foreign(path: Path, subject: str, listed: Collection[str]) -> None:
    """Raise UserError if an older output holds a file that is not listed."""
    files = sorted(
        str(file.relative_to(path))
        for file in path.rglob("*")
        if not file.is_dir() or file.is_symlink()
    )
    foreign = [
        name
        for name in files
        if name not in listed and not name.startswith(f"{EXTRAS}/evaluation/")
    ]
    if foreign:
        raise UserError(
            f"{subject}: it also holds {shorten_list([quotable(name) for name in foreign])}, "
            "which emp-llm did not write there, so --overwrite does not replace it. Move that "
            "away, or name another folder."
        )


def _files_of_run(folder: Path, records: Sequence[str]) -> set[str]:
    """Those of some records that a folder holds, and the files that they name."""
    names = {name for name in records if (folder / name).is_file()}
    listed: set[str] = set()
    for name in names:
        with contextlib.suppress(UserError):  # a damaged record names nothing
            record = read_json(folder / name, limit=INDEX_LIMIT)
            for entries in (record.get("files"), record.get("shards")):
                listed |= (
                    {str(entry) for entry in entries} if isinstance(entries, dict | list) else set()
                )
    packed = {
        name.removesuffix(".safetensors") + PACKED_SUFFIX for name in listed if PACK_NAME in names
    }
    return names | listed | packed
