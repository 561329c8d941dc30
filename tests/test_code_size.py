"""The budget: the package's lines of code, and how much of it a run enters, only go down.

A commit that raises a number says what it pays for.
"""

import code_size
import pytest

from emp_llm.prune import prune

LINES, FILES, FOLDERS = 20_811, 157, 17
ENTERED = {"prune": (48, 344), "data-free prune": (37, 240), "prune_model": (38, 225), "perplexity": (33, 143)}


def test_the_package() -> None:
    rooms = code_size.sizes()
    assert sum(lines for lines, _ in rooms.values()) <= LINES
    assert sum(files for _, files in rooms.values()) <= FILES
    assert code_size.folders() <= FOLDERS


@pytest.fixture(scope="module", autouse=True)
def _compiled(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The compiler would be slow while calls are counted."""
    output = tmp_path_factory.mktemp("compiled") / "out"
    prune(code_size.DEMO, output=output, calibration="demo", samples=1, seqlen=16, device_map="cpu")


@pytest.mark.parametrize("name", code_size.RUNS)
def test_what_a_run_enters(name: str) -> None:
    files, functions = code_size.entered(name)
    assert files <= ENTERED[name][0]
    assert functions <= ENTERED[name][1]
