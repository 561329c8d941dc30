"""The one error that means: the user can mend this."""


class UserError(ValueError):
    """Wrong input. The message names the field or file, the rule and what to do; commands print it and exit with 2."""


class ReadError(UserError):
    """A file cannot be read at the moment; it may be as good as ever, and so is what was made of it."""


def reason(error: BaseException) -> str:
    """The first line of another library's error, or what the system calls it, to be quoted in a sentence."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    lines = str(error).strip().splitlines()
    return lines[0].strip().rstrip(".") if lines else type(error).__name__
