"""Text for messages and tables: counts with nouns, sizes with units, and untrusted text made safe to print."""


def count_of(number: int, noun: str, nouns: str | None = None) -> str:
    """A count with its noun: "1 difference", "2,500 differences". `nouns` is an irregular plural."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {nouns or noun + 's'}"


def format_bytes(count: float) -> str:
    """A number of bytes with a decimal unit: "221.2 kB"."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.1f} {unit}" if unit != "B" else f"{count:.0f} B"
        count /= 1000
    return f"{count:.2f} TB"


def shortened_list(names: list[str] | tuple[str, ...], number: int = 3) -> str:
    """The first few names and the number of the others: "a, b, c and 4 more"."""
    listed = ", ".join(names[:number])
    return listed if len(names) <= number else f"{listed} and {len(names) - number} more"


def quotable(text: str) -> str:
    """Text from a file, made safe to quote in a message: printable, at most 120 characters."""
    text = text if text.isprintable() and text else ascii(text)
    return text if len(text) <= 120 else f"{text[:117]}..."


def printable(text: str, limit: int = 200) -> str:
    """Text from a file, made safe for a page or figure: no control characters, at most `limit` characters."""
    text = "".join(letter if letter.isprintable() else "�" for letter in text)
    return text if len(text) <= limit else f"{text[: limit - 1]}…"
