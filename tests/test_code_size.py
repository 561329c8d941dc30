"""The budget: the package's tokens, and how much of it a run enters.

Tokens, not lines: nothing is gained by packing two things on one line. The numbers leave room for a
patch of usual size; a commit that raises one says what it pays for.
"""

import code_size
import pytest

from emp_llm.prune import prune

TOKENS = 240_000
FILES = 160
FOLDERS = 17
ENTERED = {
    "prune": (56, 412),
    "data-free prune": (38, 255),
    "prune_model": (43, 275),
    "perplexity": (34, 162),
}


def test_the_package() -> None:
    rooms = code_size.sizes()
    assert sum(tokens for tokens, _, _ in rooms.values()) <= TOKENS
    assert sum(files for _, _, files in rooms.values()) <= FILES
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
