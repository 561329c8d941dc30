"""The budget: the package's lines of code, and how much of it a run enters, only go down.

A commit that raises a number says what it pays for.
"""

import code_size
import pytest

LINES, FILES, FOLDERS = 21_400, 165, 17
ENTERED = {"prune": (65, 400), "data-free prune": (50, 300), "prune_model": (45, 250), "perplexity": (45, 220)}


def test_the_package() -> None:
    rooms = code_size.sizes()
    assert sum(lines for lines, _ in rooms.values()) <= LINES
    assert sum(files for _, files in rooms.values()) <= FILES
    assert code_size.folders() <= FOLDERS


@pytest.mark.parametrize("name", code_size.RUNS)
def test_what_a_run_enters(name: str) -> None:
    files, functions = code_size.entered(name)
    assert files <= ENTERED[name][0]
    assert functions <= ENTERED[name][1]
