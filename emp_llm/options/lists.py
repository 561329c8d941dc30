"""Options with several values, separated by commas."""

import math

from emp_llm.common.errors import UserError


def parse_words(text: str, flag: str) -> list[str]:
    """The values in an option with commas; UserError if one is empty."""
    words = [word.strip() for word in text.split(",")]
    if not all(words):
        raise UserError(f"{flag} {text!r}: expected values separated by commas.")
    return words


def parse_numbers(text: str, flag: str) -> list[float]:
    """The numbers in an option with commas; UserError if one is no number."""
    try:
        numbers = [float(word) for word in parse_words(text, flag)]
    except ValueError as error:
        raise UserError(f"{flag} {text!r}: expected numbers separated by commas.") from error
    if any(math.isnan(number) for number in numbers):
        raise UserError(f"{flag} {text!r}: expected numbers separated by commas.")
    return numbers
