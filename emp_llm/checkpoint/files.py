"""Locks on files, for one run at a time. The system releases a lock when its process ends, even
if it is killed.
"""

import errno
import fcntl
import hashlib
import json
import logging
import math
import os
import shutil
import socket
import stat
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

import msgspec
from blake3 import blake3

from emp_llm.common.errors import FULL, ReadError, UserError, errno_of, is_of_disk, quotable, reason
from emp_llm.common.ranks import ranks

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

logger = logging.getLogger(__name__)


_TICK = 0.05  # seconds between two tries
_UNKNOWN = "an unknown process"
FOLDER = "a folder in place of a file"  # for `link_sentence`


@contextmanager
def lock(path: Path, subject: str | None = None, patience: float = 0.0) -> Iterator[None]:
    """Hold the lock of an output file, `.NAME.lock` beside it, in this context; only the first rank
    holds it. The folder is created if missing.

    Args:
        path: the output.
        subject: the output in errors; default: `--output PATH`.
        patience: seconds to wait for another process that holds it.

    Raises:
        UserError: another run holds the lock, or the folder cannot be written.
    """
    if not ranks().main:
        yield
        return
    subject = subject or f"--output {path}"
    path = Path(os.path.abspath(path))
    lock = FileLock(path.with_name(f".{path.name}.lock"), subject)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire(patience)
    except OSError as error:
        raise UserError(f"{subject}: cannot be written there ({reason(error)}).") from error
    try:
        yield
    finally:
        with suppress(OSError):
            lock.release()


class FileLock:
    """A lock file that names its holder.

    Args:
        path: the file; its folder must exist.
        subject: the locked output, for errors.
    """

    def __init__(self, path: Path, subject: str) -> None:
        self.path = path
        self._subject = subject
        self._file: int | None = None

    def acquire(self, patience: float = 0.0) -> None:
        """Take the lock.

        Args:
            patience: seconds to wait for another process that holds it.

        Raises:
            UserError: another process holds it.
        """
        began = time.monotonic()
        waits = False
        while self._file is None:
            file = open_own(self.path)
            if not _is_lock(file):
                os.close(file)
                raise UserError(
                    f"{self._subject}: {self.path} is no lock of emp-llm, so it is not "
                    "touched. Move it away."
                )
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                    holder = _read_holder(file)
                    os.close(file)
                    if time.monotonic() - began < patience:
                        if not waits:
                            logger.info("%s: waiting for another run (%s).", self._subject, holder)
                        waits = True
                        time.sleep(_TICK)
                        continue
                    raise UserError(
                        f"{self._subject}: another run is working on it ({holder}). Wait for that "
                        "run, or stop it."
                    ) from error
                logger.warning(
                    "warning: %s: this file system has no locks; make sure that no other run uses "
                    "this output.",
                    self.path,
                )
            if same_file(file, self.path):
                self._file = file
            else:  # the previous holder has just deleted the file
                os.close(file)
        with suppress(OSError):  # on a full disk, the lock works without naming its holder
            os.ftruncate(self._file, 0)
            since = datetime.now(UTC).isoformat(timespec="seconds")
            content = {"pid": os.getpid(), "host": socket.gethostname(), "since": since}
            os.pwrite(self._file, json.dumps(content).encode(), 0)

    def release(self) -> None:
        """Delete the file and release the lock."""
        if self._file is not None:
            if same_file(self._file, self.path):
                self.path.unlink()
            os.close(self._file)
            self._file = None


def open_own(path: Path) -> int:
    """Open a file of our work for reading and writing, created if missing.

    Raises:
        UserError: it is a symbolic or hard link, so somebody else chose what would be overwritten;
            or no file.
    """
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EMLINK):
            raise UserError(link_sentence(path)) from error
        if error.errno == errno.EISDIR:
            raise UserError(link_sentence(path, FOLDER)) from error
        raise
    about = os.fstat(file)
    if about.st_nlink > 1 or not stat.S_ISREG(about.st_mode):
        os.close(file)
        what = "a link" if about.st_nlink > 1 else "a pipe, socket or device"
        raise UserError(link_sentence(path, what))
    return file


def link_sentence(path: Path, what: str = "a link") -> str:
    """Why a path of our work is not used."""
    return f"{path} is {what}. emp-llm makes none for its work and follows none; delete it."


def same_file(file: int, path: Path) -> bool:
    """Whether an open file is still the one at a path."""
    try:
        return os.path.samestat(os.fstat(file), os.stat(path))
    except FileNotFoundError:
        return False


def _is_lock(file: int) -> bool:
    """Whether an open file is empty, or names a holder."""
    return os.fstat(file).st_size == 0 or _read_holder(file) != _UNKNOWN


def _read_holder(file: int) -> str:
    try:
        holder = json.loads(os.pread(file, 1000, 0))
        return f"process {holder['pid']} on {holder['host']}, since {holder['since']}"
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return _UNKNOWN


# Files: reads and writes at any position, atomic writes, hashes, JSON from untrusted files, and
# disk errors as sentences.


T = TypeVar("T")
PIECE = 1 << 22  # bytes copied at a time
JSON_LIMIT = 1 << 24
INDEX_LIMIT = 1 << 26  # the largest published index has 9 MB
_PAGE = 4096  # direct writes of all systems accept multiples of it
_AHEAD = 3  # results that wait for their use; bounds their memory
_OPEN = 64
_MOST = 1 << 30  # bytes of one call: macOS refuses 2 GB
# Errors of disks, networks and permissions. Other system errors are defects of the program.
_FAULTS = (
    *FULL,
    errno.EIO,
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
    errno.ENXIO,
    errno.ENODEV,
    errno.ESTALE,
    errno.ETIMEDOUT,
    errno.ENOTCONN,
    errno.EHOSTDOWN,
    errno.ECONNRESET,
    errno.ENOLCK,
)


class FileReader:
    """A file to read at any position. Use it as a context.

    Args:
        path: the file.
        digest: hashes the bytes that are read.
        once: the file is read once. Large pieces bypass the page cache, which may take longer to
            fill than the file to read.

    Raises:
        ReadError: the file cannot be opened.
    """

    _direct = -1

    def __init__(self, path: Path, digest: "RunningHash | None" = None, once: bool = False) -> None:
        self.path = path
        self._digest = digest
        with reading(path):
            self.file = os.open(path, os.O_RDONLY)
        if once:
            self._direct = _open_direct(path, os.O_RDONLY)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self.file, 0, 0, os.POSIX_FADV_SEQUENTIAL)

    def read(self, raw: memoryview, offset: int) -> None:
        """Fill `raw` from a position.

        Raises:
            UserError: the file is too short.
            ReadError: the file cannot be read.
        """
        read_exactly(self.file, raw, offset, self.path)
        if self._digest is not None:
            self._digest.add(offset, raw)

    def take(self, offset: int, size: int) -> "NDArray[np.uint8]":
        """`size` bytes from a position in new memory, uint8, shape (size,); the errors of `read`.

        Each byte has the same place in a page of memory as in a page of the file, so direct reads
        and writes need no copy.
        """
        import numpy as np

        before = offset % _PAGE
        whole = -(-(before + size) // _PAGE) * _PAGE
        memory = np.empty(whole + _PAGE, np.uint8)
        pages = memory[-memory.ctypes.data % _PAGE :][:whole].data
        raw = pages[before : before + size]
        end = 0
        if self._direct >= 0 and size >= PIECE // 4:
            with suppress(OSError):  # the ordinary read below succeeds, or raises the error
                while end < whole and (
                    got := os.preadv(self._direct, [pages[end:]], offset - before + end)
                ):
                    end += got
                    if got % _PAGE:  # the file's end
                        break
        done = min(max(end - before, 0), size)
        if done and self._digest is not None:
            self._digest.add(offset, raw[:done])
        self.read(raw[done:], offset + done)
        return np.frombuffer(raw, np.uint8)

    def close(self) -> None:
        for file in (self.file, self._direct):
            if file >= 0:
                os.close(file)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class FilePool:
    """Files to read by path. Each is opened at its first use; the context closes them.

    Args:
        digests: hashes of files by path, taken while they are read.
        once: of `FileReader`.
    """

    def __init__(
        self, digests: "dict[Path, RunningHash] | None" = None, once: bool = False
    ) -> None:
        self._digests = digests or {}
        self._once = once
        self._readers: dict[Path, FileReader] = {}  # most recently used last

    def reader(self, path: Path) -> FileReader:
        """The open file at a path, to be used at once: it may be closed when others are opened."""
        if path in self._readers:
            reader = self._readers.pop(path)
        else:
            reader = FileReader(path, self._digests.get(path), self._once)
        self._readers[path] = reader
        if len(self._readers) > _OPEN:
            self._readers.pop(next(iter(self._readers))).close()
        return reader

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for reader in self._readers.values():
            reader.close()


class RunningHash:
    """BLAKE3 of a file, from its bytes in memory as long as they come in order; the rest is read at
    the end.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._end = 0
        self._digest: Any = blake3()

    def add(self, offset: int, raw: memoryview) -> None:
        """Hash bytes of the file from `offset` on, if they follow those that were hashed before."""
        if offset == self._end:
            self._digest.update(raw)
            self._end += len(raw)

    def finish(self) -> str:
        """The hash of the file in hexadecimal; ReadError if the rest cannot be read."""
        with reading(self._path), self._path.open("rb") as file:
            file.seek(self._end)
            return str(hashlib.file_digest(file, lambda: self._digest).hexdigest())


def file_hash(path: Path) -> str:
    """BLAKE3 of a file in hexadecimal; ReadError if it cannot be read."""
    return RunningHash(path).finish()


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn a system error into a ReadError that names the file."""
    try:
        yield
    except OSError as error:
        raise ReadError(
            f"{path}: it cannot be read ({reason(error)}). Run the command again when "
            "it is readable."
        ) from error


def read_exactly(file: int, raw: memoryview, offset: int, path: Path) -> None:
    """Fill all of `raw` from a position; `path` names the file in the error."""
    while raw:
        with reading(path):
            got = os.preadv(file, [raw[:_MOST]], offset)
        if got == 0:
            end = offset + len(raw)
            raise UserError(
                f"{path}: it ends before byte {end}; it changed while it was read. Run "
                "the command again."
            )
        raw = raw[got:]
        offset = offset + got


def write_exactly(file: int, raw: memoryview, offset: int) -> None:
    """Write all of `raw` at a position."""
    while raw:
        written = os.pwrite(file, raw[:_MOST], offset)
        raw = raw[written:]
        offset = offset + written


class FileWriter:
    """Writes to a file, created if missing. Use it as a context.

    Filling the page cache with a checkpoint that is seldom reread takes longer than writing it. So
    the pages of memory from `FileReader.take` bypass it, if the file system can; other bytes are
    written as usual.
    """

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
        self._direct = _open_direct(path, os.O_WRONLY)

    def write(self, raw: memoryview, offset: int) -> None:
        """Write bytes at a position."""
        import numpy as np

        start = -offset % _PAGE  # of the whole pages in `raw`
        end = start + (len(raw) - start) // _PAGE * _PAGE
        done = start
        if (
            self._direct >= 0
            and end > start
            and (np.frombuffer(raw, np.uint8).ctypes.data + start) % _PAGE == 0
        ):
            try:
                done += os.pwrite(self._direct, raw[start:end], offset + start)
            except OSError as error:
                if error.errno != errno.EINVAL:  # the file system cannot after all
                    raise
        if done > start:
            write_exactly(self._file, raw[:start], offset)
            raw = raw[done:]
            offset = offset + done
        write_exactly(self._file, raw, offset)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for file in (self._file, self._direct):
            if file >= 0:
                os.close(file)


def _open_direct(path: Path, flags: int) -> int:
    """A descriptor for reads or writes of whole pages that bypass the page cache; -1 if the
    system has none.
    """
    with suppress(OSError, AttributeError):
        return os.open(path, flags | os.O_DIRECT)
    return -1


def prefetch(jobs: Iterable[Callable[[], T]], threads: int = 1) -> Iterator[T]:
    """The results of jobs, in order. Threads run the next few jobs while the caller uses a
    result.
    """
    waiting: deque[Future[T]] = deque()
    with ThreadPoolExecutor(threads, thread_name_prefix="emp-llm-read") as thread:
        try:
            for job in jobs:
                waiting.append(thread.submit(job))
                if len(waiting) >= _AHEAD + threads - 1:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            thread.shutdown(cancel_futures=True)


def bytes_of(array: "NDArray[Any]") -> memoryview:
    """The memory of a contiguous array."""
    return array.reshape(-1).view("u1").data


def tensor_bytes(tensor: "Tensor") -> memoryview:
    """The memory of a contiguous CPU tensor of any dtype."""
    import torch

    return bytes_of(tensor.reshape(-1).view(torch.uint8).numpy())


def write_bytes(path: Path, content: bytes) -> None:
    """Replace a file's content in one step, even if the machine crashes. It is on disk on return;
    its folder is created.

    The temporary file is named `.NAME.partial` and locked; another writer of the same file waits
    for it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    file = -1
    while file < 0 or not same_file(file, partial):  # the writer before has renamed it
        if file >= 0:
            os.close(file)
        file = open_own(partial)
        with suppress(OSError):  # the file system may have no locks
            fcntl.flock(file, fcntl.LOCK_EX)
    with open(file, "wb") as stream:
        try:
            os.ftruncate(file, 0)
            stream.write(content)
            stream.flush()
            _flush(file)
            os.replace(partial, path)
        except BaseException as error:
            partial.unlink(missing_ok=True)
            if isinstance(error, IsADirectoryError):
                raise UserError(link_sentence(path, FOLDER)) from error
            raise
    sync_path(path.parent)


def write_text(path: Path, text: str) -> None:
    """`write_bytes` of text in UTF-8."""
    write_bytes(path, text.encode("utf-8"))


def write_json(path: Path, value: Any) -> None:
    """`write_bytes` of JSON."""
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def sync_path(path: Path) -> None:
    """Flush a file's content, or a folder's list of names, to disk."""
    file = os.open(path, os.O_RDONLY)
    try:
        _flush(file)
    finally:
        os.close(file)


def _flush(file: int) -> None:
    """Flush an open file to disk."""
    # On macOS, fsync leaves the bytes in the cache of the drive, which loses them with the power.
    through_the_cache = getattr(fcntl, "F_FULLFSYNC", None)
    if through_the_cache is not None:
        with suppress(OSError):  # the file system has no such call
            fcntl.fcntl(file, through_the_cache)
            return
    os.fsync(file)


def sync_tree(folder: Path) -> None:
    """`sync_path` of a folder and everything in it."""
    for path in folder.rglob("*"):
        sync_path(path)
    sync_path(folder)


def read_json(
    path: Path,
    strict: bool = False,
    limit: int = JSON_LIMIT,
    remedy: str = "Download it again.",
) -> dict[str, Any]:
    """A JSON object from a file.

    Args:
        strict: as records are read: with the hooks `STRICT`.
        limit: largest size of the file in bytes.
        remedy: for a file that is none.

    Raises:
        UserError: the file is not a JSON object, is too large, or is nested too deeply.
        ReadError: the disk fails.
    """
    try:
        with open(path, "rb", opener=_open_now) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise ValueError("it is no plain file")
            size = status.st_size
            if size > limit:
                raise ValueError(f"it has {size:,} bytes, and {limit:,} are allowed")
            value = parse_json(file.read(size), **STRICT if strict else {})
    except (OSError, ValueError) as error:
        if is_of_disk(error):
            with reading(path):
                raise
        raise UserError(f"{path}: cannot be read as JSON ({reason(error)}). {remedy}") from error
    if not isinstance(value, dict):
        raise UserError(f"{path}: expected a JSON object.")
    return value


def _open_now(path: str, flags: int) -> int:
    """Open a file; a pipe without waiting for its writer."""
    return os.open(path, flags | os.O_NONBLOCK)


def write_own(path: Path, values: dict[str, Any]) -> None:
    """`write_json` of a record of our unfinished work, with its own hash."""
    write_json(path, values | {"blake3": _hash_of(values)})


def read_own(path: Path, kind: type[T]) -> T | None:
    """A record of `write_own`, converted to a type of msgspec; None if there is none. One that is
    damaged or of other types counts as none, with a warning, and is deleted.

    Raises:
        ReadError: the disk fails.
    """
    if not os.path.lexists(path):
        return None
    try:
        if not is_plain(path):
            raise ValueError("it is no plain file")
        with reading(path):
            if path.stat().st_size > INDEX_LIMIT:
                raise ValueError("it is too large")
            values = parse_own(path.read_bytes())
        return msgspec.convert(values, kind)
    except ReadError:
        raise
    except (ValueError, OverflowError, RecursionError, msgspec.MsgspecError) as error:
        warn_of_damage(path, quotable(reason(error)))
        remove(path)
        return None


def own_line(values: dict[str, Any]) -> bytes:
    """A line of a file of records, with its own hash."""
    return json.dumps(values | {"blake3": _hash_of(values)}).encode() + b"\n"


def parse_own(raw: bytes, **hooks: Any) -> dict[str, Any]:
    """A record of `own_line` or `write_own`, with hooks of `json.loads`; ValueError if it is
    damaged.
    """
    values = parse_json(raw, **hooks)
    if not isinstance(values, dict) or values.pop("blake3", None) != _hash_of(values):
        raise ValueError("its hash differs")
    return values


def unfinished(path: Path, read: Callable[[Path], T]) -> T | None:
    """What `read` makes of a file of our unfinished work; None if there is none. One that it cannot
    read counts as none, with a warning, and is deleted.

    Raises:
        OSError, ReadError: the disk fails.
    """
    if not os.path.lexists(path):
        return None
    try:
        if not is_plain(path):
            raise ValueError("it is no plain file")
        return read(path)
    except (OSError, ReadError):
        raise
    except Exception as error:  # whatever stands in the file
        warn_of_damage(path, quotable(reason(error)))
        remove(path)
        return None


def warn_of_damage(path: Path, why: str = "its hash differs") -> None:
    """Say that the work in a file is done again."""
    logger.warning("warning: %s is damaged (%s). This work is done again.", path, why)


def _hash_of(values: dict[str, Any]) -> str:
    return str(blake3(json.dumps(values).encode()).hexdigest())


def is_plain(path: Path) -> bool:
    """Whether a path is a file: no folder, link, pipe or device."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def is_intact(path: Path, digest: str | None) -> bool:
    """Whether a file of our unfinished work has this BLAKE3; ReadError if the disk fails."""
    return digest is not None and is_plain(path) and file_hash(path) == digest


def keep_only(folder: Path, names: Collection[str]) -> None:
    """Delete what a folder of our unfinished work holds beside these names, or a file in its
    place.
    """
    if not folder.is_dir() or folder.is_symlink():
        remove(folder)
        return
    for path in folder.iterdir():
        if path.name not in names:
            remove(path)


def remove(path: Path) -> None:
    """Delete a file or a folder of our unfinished work, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(NotADirectoryError):
            path.unlink(missing_ok=True)


def parse_json(raw: bytes, **hooks: Any) -> Any:
    """JSON from bytes, with hooks of `json.loads`; ValueError if it is nested too deeply or is
    not Unicode text.
    """
    try:
        value = json.loads(raw.decode("utf-8"), **hooks)
        if b"\\u" in raw:
            # Fails on half a surrogate pair, which is not text.
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    except UnicodeEncodeError as error:
        raise ValueError("it holds half a surrogate pair") from error
    return value


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A hook for `parse_json`: ValueError for an object that holds a key twice."""
    content = dict(pairs)
    if len(content) < len(pairs):
        twice, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"{quotable(twice)} occurs twice in it")
    return content


def _whole(text: str) -> int:
    if len(text) > 20 or int(text).bit_length() > 64:
        raise ValueError(f"{quotable(text)} has more than 64 bits")
    return int(text)


def _finite(text: str) -> float:
    if not math.isfinite(float(text)):
        raise ValueError(f"{quotable(text)} is not a finite number")
    return float(text)


# Hooks for `parse_json`: no key twice, and numbers that other programs can read.
STRICT: dict[str, Any] = {
    "object_pairs_hook": unique_keys,
    "parse_int": _whole,
    "parse_float": _finite,
    "parse_constant": _finite,
}


def how_to_resume(kept: Sequence[Path]) -> str:
    """A sentence on resuming from the work in these folders; empty if none of them exists."""
    folders = " and ".join(str(path) for path in kept if path.is_dir())
    if not folders:
        return ""
    return f"Finished work is kept in {folders}; the same command resumes from there."


def explain_disk_error(
    error: BaseException | None, output: Path, kept: Sequence[Path]
) -> UserError | None:
    """The UserError for an error of the disk or network; None for any other error.

    Args:
        output: the path that was being written.
        kept: folders that may hold finished work.
    """
    number = errno_of(error)
    if error is None or number not in _FAULTS:
        return None
    file = getattr(error, "filename", None) or "a file"
    problem = f"{file} cannot be read or written ({reason(error)})."
    if number == errno.EFBIG:
        problem = f"{reason(error)}. Raise the limit, or choose another --output."
    elif number in FULL:
        problem = "the disk is full. Free some space, or choose another --output."
    return UserError(f"--output {output}: {problem} {how_to_resume(kept)}".rstrip())


@contextmanager
def room_for(what: str, otherwise: str) -> Iterator[None]:
    """Inside this context, no room in the folder for temporary files is a UserError that names
    what takes it, and what to do otherwise.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise UserError(
            f"{tempfile.gettempdir()}: no space left for {what} ({reason(error)}). Set TMPDIR to a "
            f"folder on a larger disk, or {otherwise}."
        ) from error
