"""Errors that the user can fix, and the text of messages: counts with nouns, sizes with units,
untrusted text made safe.
"""

import errno
import re
import resource
from collections.abc import Iterable
from difflib import get_close_matches

_CONTROLS = {code: "�" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
_SURROGATES = re.compile("[\ud800-\udfff]")
_FLAG = re.compile(r"(?<![\w-])--([a-z][a-z0-9-]*)")
# In a message, to be run as it is; it ends with its sentence or a comma.
_COMMAND = re.compile(
    r"(emp-llm [a-z]+ .*?(?=[.,;:)]+\s|[.)]*$))",
    re.DOTALL,
)


# As safetensors and torch write it.
_ERRNO = re.compile(r"\(os error (\d+)\)|unable to [^<]*file <.*>.*: .* \((\d+)\)")
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_DISK = (*FULL, errno.EIO, errno.EROFS)


class UserError(ValueError):
    """Wrong input. The message names the field or file, the rule, and the remedy. Commands print it
    and exit with code 2.

    It is made with the flags of the shell. In Python it shows the arguments: `--batch-size` is
    `batch_size`.
    """

    in_shell = False  # a command line sets it

    def __str__(self) -> str:
        """The message, with arguments for flags unless a command prints it; commands to run stay
        as they are.
        """
        if UserError.in_shell:
            return super().__str__()
        parts = _COMMAND.split(super().__str__())
        parts[::2] = [_FLAG.sub(_argument, text) for text in parts[::2]]  # the others are commands
        return "".join(parts)


def _argument(flag: re.Match[str]) -> str:
    """The argument in Python of a flag."""
    return "score_map" if flag[1] == "map" else flag[1].replace("-", "_")


class RefusedError(UserError):
    """What was asked for cannot be done. Other settings need other work, so none is kept."""


class NothingRemovedError(RefusedError):
    """A recipe keeps every unit of a model."""


class ReadError(UserError):
    """A file cannot be read at the moment. It may be intact, so work based on it stays valid."""


def reason(error: BaseException, whole: bool = False) -> str:
    """Another library's error as part of a sentence: the system's words, or the first line of the
    message.

    Args:
        whole: the first paragraph of the message in one line, up to 400 characters.
    """
    if errno_of(error) == errno.EFBIG and _most_of_a_file() != resource.RLIM_INFINITY:
        return f"ulimit -f allows no file of more than {format_bytes(_most_of_a_file())}"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    text = str(error).strip()
    if whole:
        line = " ".join(re.split(r"\n\s*\n", text)[0].split()).rstrip(".")
        return (line if len(line) <= 400 else f"{line[:397]}...") or type(error).__name__
    return text.splitlines()[0].strip().rstrip(".") if text else type(error).__name__


def errno_of(error: BaseException | None) -> int | None:
    """The system's number of an error; None if it has none. Errors of safetensors, and those of
    torch on opening a file, have it in their text; those of torch and numpy on writing only say
    that less was written.
    """
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    if not isinstance(error, Exception):
        return None
    text = str(error)
    number = _ERRNO.search(text)
    if number is not None:
        return int(number[1] or number[2])
    if "inline_container" in text or re.search(r"\d+ requested and \d+ written", text):
        return errno.ENOSPC if _most_of_a_file() == resource.RLIM_INFINITY else errno.EFBIG
    return None


def _most_of_a_file() -> int:
    """Bytes of the largest file that this process may write (`ulimit -f`)."""
    return resource.getrlimit(resource.RLIMIT_FSIZE)[0]


def is_of_disk(error: BaseException | None) -> bool:
    """Whether a full or failing disk is what an error comes from."""
    while error is not None:
        if errno_of(error) in _DISK:
            return True
        error = error.__cause__
    return False


def disk_sentence(error: BaseException) -> str | None:
    """A sentence on an error of a full or failing disk, or of a system without a folder for
    temporary files; None for any other error.
    """
    if isinstance(error, FileNotFoundError) and "usable temporary directory" in str(error):
        return "no folder for temporary files can be written to. Set TMPDIR to one that can."
    number = errno_of(error)
    if number not in _DISK:
        return None
    name = getattr(error, "filename", None)
    file = f"{quotable(str(name))}: " if name else ""
    remedy = "Raise the limit" if number == errno.EFBIG else "Free some space, or use another disk"
    return f"{file}{reason(error)}. {remedy}; then run the same command again."


def count_of(number: int, noun: str, nouns: str | None = None) -> str:
    """A count with its noun: "1 difference", "2,500 differences". `nouns` is an irregular
    plural.
    """
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {nouns or noun + 's'}"


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """A question with the nearest of some names, to end a message; empty if none is near."""
    nearest = get_close_matches(name, list(names), 1)
    return f" Did you mean {nearest[0]}?" if nearest else ""


def format_bytes(count: float) -> str:
    """A number of bytes with a decimal unit: "221.2 kB"."""
    if count < 999.5:
        return f"{count:.0f} B"
    for unit in ("kB", "MB", "GB"):
        count /= 1000
        if count < 999.95:  # more is rounded to 1000.0
            return f"{count:.1f} {unit}"
    return f"{count / 1000:.2f} TB"


def shorten_list(names: list[str] | tuple[str, ...], number: int = 3) -> str:
    """The first few names and the number of the others: "a, b, c and 4 more"."""
    listed = ", ".join(names[:number])
    return listed if len(names) <= number else f"{listed} and {len(names) - number} more"


def quotable(text: str) -> str:
    """Text from a file, made safe to quote in a message: printable, at most 120 characters."""
    text = text if text.isprintable() and text else ascii(text)
    return text if len(text) <= 120 else f"{text[:117]}..."


def printable(text: str, limit: int = 200) -> str:
    """Text from a file, made safe for a page or figure: no control characters, at most `limit`
    characters.
    """
    text = "".join(letter if letter.isprintable() else "�" for letter in text)
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def repair_text(text: str) -> str:
    """Text that can be encoded: half a surrogate pair, as JSON can write it ("\\ud83d"), becomes
    the replacement character U+FFFD.
    """
    return _SURROGATES.sub("\ufffd", text)


def visible(text: str) -> str:
    """Text for a terminal, which obeys no control characters in it but line breaks and tabs."""
    return text.translate(_CONTROLS)
