"""Machine code in numba's cache is that of the files as they are now."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("numba")
INNER = "from kernel_compiler import compiled\n@compiled\ndef inner(): return {}\n"
OUTER = "from kernel_compiler import compiled\nfrom inner import inner\n@compiled\ndef outer(): return 10 * inner()\n"
OURS = "import os\nfrom emp_llm.common.compiled import compiler_of\n" + (
    "compiled = compiler_of(*(os.path.join(os.path.dirname(__file__), name) for name in ('inner.py', 'outer.py')))\n"
)
NUMBA = "from numba import njit\ncompiled = njit(cache=True)\n"


def run(folder: Path, number: int, cache: Path) -> tuple[int, bool]:
    """The result of a compiled function whose inner function, in another file, gives a number; and whether it was kept code."""
    (folder / "inner.py").write_text(INNER.format(number))
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1", "NUMBA_CACHE_DIR": str(cache)}
    line = [sys.executable, "-c", "import outer; print(outer.outer(), sum(outer.outer.stats.cache_hits.values()))"]
    value, hits = subprocess.run(line, cwd=folder, env=environment, capture_output=True, text=True, check=True).stdout.split()
    return int(value), int(hits) > 0


@pytest.mark.parametrize(("compiler", "fresh"), [(OURS, True), (NUMBA, False)], ids=["ours", "numba's own"])
def test_an_edit_of_an_inner_file_reaches_the_outer_function(tmp_path: Path, compiler: str, fresh: bool) -> None:
    (tmp_path / "kernel_compiler.py").write_text(compiler)
    (tmp_path / "outer.py").write_text(OUTER)
    cache = tmp_path / "cache"
    assert run(tmp_path, 2, cache) == (20, False)
    assert run(tmp_path, 2, cache) == (20, True)
    assert run(tmp_path, 3, cache) == ((30, False) if fresh else (20, True))


def test_without_a_folder_nothing_is_kept(tmp_path: Path) -> None:
    (tmp_path / "kernel_compiler.py").write_text(OURS)
    (tmp_path / "outer.py").write_text(OUTER)
    (tmp_path / "file").touch()
    for number in (2, 3):
        assert run(tmp_path, number, tmp_path / "file" / "cache") == (10 * number, False)
