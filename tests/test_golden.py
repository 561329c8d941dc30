"""The bytes of pruned checkpoints are those of version 0.1.0. `scripts/check_golden.py` compares
every case on every model.
"""

import json
from pathlib import Path

import check_golden
import pytest

DEMO = check_golden.ROOT / "scripts" / "demo" / "model"
RECORDED = json.loads(check_golden.DIGESTS.read_text())
CASES = dict(check_golden.cases())
SOME = [name for name in CASES if "all-linear" not in name]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("golden")


def test_every_case_is_recorded() -> None:
    assert {f"demo {name}" for name in CASES} <= RECORDED.keys()


@pytest.mark.parametrize("method", check_golden.METHODS)
def test_bytes_of_the_demo_model(folder: Path, method: str) -> None:
    """All cases of a method, in one test: a matched baseline needs its EMP run."""
    chosen = {name: CASES[name] for name in SOME if CASES[name]["method"] == method}
    for name in [CASES[name]["match"] for name in chosen if "match" in CASES[name]]:
        if not (folder / name).exists():
            check_golden.digest_of(DEMO, CASES[name], folder / name)
    for name, options in chosen.items():
        if (folder / name).exists():
            continue
        assert check_golden.digest_of(DEMO, options, folder / name) == RECORDED[f"demo {name}"], (
            name
        )
