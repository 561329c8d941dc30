"""Data sets of the Hub where there is no network."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_SECONDS = 5.0  # for an answer
NO_NETWORK = (
    "it is not in the cache, and the Hub cannot be reached. Give a file (--calibration FILE.txt, "
    "or --suite perplexity,file=FILE.txt), or download it once where there is a network."
)


def hub_answers() -> bool:
    """Whether the Hub answers, whatever it says."""
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return False
    try:
        get_session().head(constants.ENDPOINT, timeout=_SECONDS)
    except Exception:  # of the HTTP library, whichever it is, and of the system
        return False
    return True


@contextmanager
def cache_alone(alone: bool) -> Iterator[None]:
    """Inside this context, `datasets` looks in the cache alone, if so said. It asks a Hub that does
    not answer for half a minute.
    """
    import datasets
    from huggingface_hub import constants

    # The library asks for them at each call.
    places: list[tuple[Any, str]] = [
        (constants, "HF_HUB_OFFLINE"),
        (datasets.config, "HF_HUB_OFFLINE"),
        (datasets.config, "HF_DATASETS_OFFLINE"),
    ]
    before = [getattr(place, name) for place, name in places]
    if alone:
        for place, name in places:
            setattr(place, name, True)
    try:
        yield
    finally:
        for (place, name), value in zip(places, before, strict=True):
            setattr(place, name, value)
