"""Kills and faults at every moment of small runs; each is then run again, and must end with the bytes of an undisturbed one.

    python scripts/torture.py [--kills 200] [--every 1] [--folder DIR] [--write]

Runs are started in forks of this process, so that none pays for its imports. For each of some prunes and calibrations:

- SIGKILL, SIGTERM and SIGINT after a random time, and SIGKILL at random calls of the system's write, sync and rename functions;
- every such call, and every positioned read, fails once with EIO, and once with ENOSPC;
- the disk is too small, by more and less, until the second run (a tmpfs of limited size; for root only).

After each, the output must be absent, or as it was before, or complete; a fault must be answered by a UserError. Then the same
command runs undisturbed, and its files are compared byte for byte with those of a run that never was disturbed; of the
report, all but the times of its stages.
"""

import argparse
import contextlib
import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from emp_llm.calibrate import calibrate
from emp_llm.models import journal, pruning
from emp_llm.models.errors import UserError
from emp_llm.prune import prune

DEMO = Path(__file__).parent / "demo" / "model"
Bytes = dict[str, bytes]
# What is failed or killed at: (module, function). Whole copies of small files count as one call.
_WRITES = [(os, name) for name in ("pwrite", "fsync", "replace", "mkdir", "ftruncate")]
_WRITES += [(shutil, "copyfile"), (Path, "write_bytes")]  # type: ignore[list-item]
_READS = [(os, name) for name in ("preadv", "pread")]


@dataclass(frozen=True)
class Case:
    """A run that is tortured: a command and its options; it writes `out` in a folder of its own."""

    name: str
    command: Callable[..., object]
    options: dict[str, Any]

    def run(self, folder: Path) -> None:
        self.command(output=folder / "out", **self.options)


def cases(model: Path, text: str = "demo", samples: int = 8, seqlen: int = 64) -> list[Case]:
    """The runs to torture, on a model folder."""
    data_free: dict[str, Any] = {"model": str(model), "method": "emp-magnitude", "targets": "all-linear"}
    blocks: dict[str, Any] = {"model": str(model), "calibration": text, "samples": samples, "seqlen": seqlen}
    blocks |= {"device_map": "cpu", "execution": "blocks", "hidden_states": "disk"}
    return [
        Case("prune, rows", prune, data_free),
        Case("prune, a matrix at a time", prune, data_free | {"group": "matrix"}),
        Case("prune, all targets as one", prune, data_free | {"group": "all"}),
        Case("prune with calibration", prune, blocks | {"method": "emp-wanda"}),
        Case("calibrate", calibrate, blocks),
    ]


def make_hasty() -> None:
    """Let small runs have many moments: small row blocks, a slow disk, and entries in the journal every few milliseconds."""
    write = os.pwrite

    def slow(*arguments: Any) -> int:
        time.sleep(0.003)
        return write(*arguments)

    os.pwrite = slow
    pruning.BLOCK_WEIGHTS = 20_000
    journal._SECONDS, journal._RATIO = 0.005, 0


def snapshot(folder: Path) -> Bytes:
    """All files of a finished output (a folder or a file) by name; of the report, what does not depend on time."""
    out = folder / "out"
    if out.is_file():
        return {"out": out.read_bytes()}
    found = {str(path.relative_to(out)): path.read_bytes() for path in sorted(out.rglob("*")) if path.is_file()}
    if "emp_report.json" in found:
        report = json.loads(found["emp_report.json"])
        del report["stages"]
        found["emp_report.json"] = json.dumps(report).encode()
    return found


@contextmanager
def at_call(number: int, act: Callable[[], object], reads: bool = False) -> Iterator[Counter[str]]:
    """Do something in place of the n-th call that writes, or reads too; yields how many calls there were, as "calls"."""
    counts: Counter[str] = Counter()
    guard = threading.Lock()
    before = [(module, name, getattr(module, name)) for module, name in _WRITES + (_READS if reads else [])]

    def watched(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            with guard:
                counts["calls"] += 1
                now = counts["calls"] == number
            if now:
                act()
            return original(*arguments, **options)

        return call

    for module, name, original in before:
        setattr(module, name, watched(original))
    try:
        yield counts
    finally:
        for module, name, original in before:
            setattr(module, name, original)


def fail(code: int) -> None:
    """The system's answer to a fault."""
    raise OSError(code, os.strerror(code))


def in_fork(work: Callable[[], object], log: Path) -> int:
    """Start some work in a fork, its output in a file; returns its process id. It exits with 0, 2 (UserError) or 1."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, 1)
        os.dup2(file, 2)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs inherit that it is ignored
        work()
        code = 0
    except UserError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        code = 2
    except SystemExit as end:
        code = int(end.code or 0)
    except KeyboardInterrupt:
        code = 130
    except BaseException:
        import traceback

        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)


def ended(child: int) -> int:
    """Wait for a fork; its exit code, or minus the signal that killed it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def check_state(folder: Path, old: Bytes | None, whole: Bytes) -> str | None:
    """What is wrong with what a disturbed run left at the output's name; None where nothing is."""
    if not (folder / "out").exists():
        return None if old is None else "the older output is gone"
    found = snapshot(folder)
    return None if found in (whole, old) else "a half output under its final name"


def check_again(case: Case, folder: Path, whole: Bytes) -> str | None:
    """Run again, undisturbed; what is wrong then. A complete output that is there already is compared as it is."""
    if not (folder / "out").exists():
        try:
            case.run(folder)
        except UserError as error:
            return f"cannot go on: {error}"
        left = [path.name for path in folder.iterdir() if path.name not in ("out", "log")]
        if left:
            return f"left behind: {left}"
    found = snapshot(folder)
    different = [name for name in whole.keys() | found.keys() if whole.get(name) != found.get(name)]
    return f"other bytes: {sorted(different)}" if different else None


def tried(case: Case, folder: Path, whole: Bytes, disturb: Callable[[Path], str | None]) -> tuple[str | None, bool]:
    """One disturbed run in an empty folder, and the run after it: (what went wrong, whether there was work to go on with)."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    wrong = disturb(folder) or check_state(folder, None, whole)
    resumed = any(
        (folder / place / "manifest.json").is_file() for place in (".out.partial", ".out.calibration", ".out.progress")
    )
    return wrong or check_again(case, folder, whole), resumed


def killed_after(case: Case, at_work: bool, seconds: float, number: int, code: int) -> Callable[[Path], str | None]:
    """Disturb by a signal after a time, counted from the start or from when something is written."""

    def disturb(folder: Path) -> str | None:
        child = in_fork(lambda: case.run(folder), folder / "log")
        until = time.monotonic() + 60
        while at_work and not any(path.is_dir() for path in folder.iterdir()) and time.monotonic() < until:
            time.sleep(0.001)
        time.sleep(seconds)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, number)
        sent = time.monotonic()
        ending = ended(child)
        if time.monotonic() - sent > 3:
            return f"took {time.monotonic() - sent:.1f} s to stop"
        return None if ending in (0, code, -number) else f"exit code {ending}: {(folder / 'log').read_text()[-300:]}"

    return disturb


def killed_at(case: Case, call: int) -> Callable[[Path], str | None]:
    """Disturb by SIGKILL at a call."""

    def work(folder: Path) -> None:
        with at_call(call, lambda: os.kill(os.getpid(), signal.SIGKILL)):
            case.run(folder)

    def disturb(folder: Path) -> str | None:
        code = ended(in_fork(lambda: work(folder), folder / "log"))
        return None if code in (0, -signal.SIGKILL) else f"exit code {code}: {(folder / 'log').read_text()[-300:]}"

    return disturb


def faulty_at(case: Case, call: int, code: int) -> Callable[[Path], str | None]:
    """Disturb by an error of a call."""

    def work(folder: Path) -> None:
        with at_call(call, lambda: fail(code), reads=True):
            case.run(folder)

    def disturb(folder: Path) -> str | None:
        ending = ended(in_fork(lambda: work(folder), folder / "log"))
        return None if ending in (0, 2) else f"exit code {ending}: {(folder / 'log').read_text()[-300:]}"

    return disturb


def tried_on_a_small_disk(case: Case, folder: Path, whole: Bytes, share: float) -> tuple[str | None, bool]:
    """As `tried`, on a file system that has room for a share of the output until it is made larger."""
    folder.mkdir(exist_ok=True)
    size = int(share * sum(len(content) for content in whole.values()))
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], check=True)

    def work() -> None:
        shutil.disk_usage = lambda path: SimpleNamespace(free=1 << 40)  # type: ignore[assignment, return-value]
        case.run(folder)

    try:
        ending = ended(in_fork(work, folder.with_name("log")))
        said = folder.with_name("log").read_text()
        wrong = check_state(folder, None, whole)
        if (ending == 2 and "disk is full" not in said and "no space left" not in said) or ending not in (0, 2):
            wrong = f"exit code {ending}: {said[-300:]}"
        resumed = any((folder / place / "manifest.json").is_file() for place in (".out.partial", ".out.progress"))
        subprocess.run(["mount", "-o", "remount,size=1g", str(folder)], check=True)
        return wrong or check_again(case, folder, whole), resumed
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def undisturbed(case: Case, folder: Path) -> tuple[Bytes, int, int, float]:
    """Run in peace: its files, how many calls write, how many write or read, and seconds."""
    case.run(folder)
    whole = snapshot(folder)
    counts = []
    for reads in (False, True):
        with at_call(0, lambda: None, reads) as seen:
            start = time.monotonic()
            shutil.rmtree(folder)
            folder.mkdir()
            case.run(folder)
            seconds = time.monotonic() - start
        assert snapshot(folder) == whole, "two undisturbed runs differ"
        counts.append(seen["calls"])
    return whole, counts[0], counts[1], seconds


def sharded_demo(folder: Path) -> Path:
    """Two blocks of the bundled model, in several shards as large models are."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(DEMO, dtype="auto", num_hidden_layers=2)
    model.save_pretrained(folder, max_shard_size="1MB")
    transformers.AutoTokenizer.from_pretrained(DEMO).save_pretrained(folder)
    return folder


def main() -> None:
    """Torture, print, and write if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200, help="SIGKILL, for each run; of the other kinds a quarter")
    parser.add_argument("--every", type=int, default=1, help="fail every so many-th call")
    parser.add_argument("--folder", help="where to work; default: a temporary folder")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="runs whose name holds this")
    parser.add_argument("--kinds", default="", help="disturbances whose name holds this")
    parser.add_argument("--write", action="store_true", help="put the table in scripts/results/torture.md")
    arguments = parser.parse_args()
    make_hasty()
    rng = random.Random(arguments.seed)
    lines = ["| run | disturbed by | times | had work to go on with | same bytes in the end |", "|---|---|---:|---:|---:|"]
    bad: list[str] = []
    start = time.monotonic()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as scratch:
        model = sharded_demo(Path(scratch) / "model")
        for case in cases(model):
            if arguments.only not in case.name:
                continue
            folder = Path(scratch) / "whole"
            folder.mkdir()
            whole, writes, calls, seconds = undisturbed(case, folder)
            shutil.rmtree(folder)
            kinds: dict[str, Sequence[Callable[[Path], str | None] | float]] = {}
            for name, number, code, share in (("SIGKILL", 9, -9, 1), ("SIGTERM", 15, 143, 4), ("SIGINT", 2, 130, 4)):
                kinds[f"{name}, at random times"] = [
                    killed_after(case, i % 4 > 0, rng.uniform(0, seconds * (0.4 if i % 4 else 1)), number, code)
                    for i in range(arguments.kills // share)
                ]
            picked = [rng.randint(1, writes) for _ in range(arguments.kills // 4)]
            kinds[f"SIGKILL, at random ones of {writes} calls"] = [killed_at(case, call) for call in picked]
            for first, code in enumerate((errno.EIO, errno.ENOSPC)):
                every = range(1 + first, calls + 1, arguments.every)
                kinds[f"{errno.errorcode[code]}, at calls of {calls}"] = [faulty_at(case, call, code) for call in every]
            if os.geteuid() == 0:
                kinds["a disk that is too small, by tmpfs"] = [(i + 1) / 22 for i in range(21)]
            for kind, disturbances in kinds.items():
                if arguments.kinds not in kind:
                    continue
                counts: Counter[str] = Counter()
                for number, disturb in enumerate(disturbances):
                    if isinstance(disturb, float):
                        wrong, resumed = tried_on_a_small_disk(case, Path(scratch) / "small", whole, disturb)
                    else:
                        wrong, resumed = tried(case, Path(scratch) / "run", whole, disturb)
                    counts["good"] += wrong is None
                    counts["resumed"] += resumed
                    if wrong is not None and len(bad) < 50:
                        bad.append(f"{case.name}, {kind}, number {number}: {wrong}")
                        print(bad[-1], flush=True)
                done = f"{len(disturbances)} | {counts['resumed']} | {counts['good']}"
                lines.append(f"| {case.name} | {kind} | {done} |")
                print(lines[-1], flush=True)
    table = "\n".join(lines)
    about = f"seed {arguments.seed}, {(time.monotonic() - start) / 60:.0f} minutes"
    print(f"\n{about}\n\n{table}")
    if arguments.write:
        text = f"# Kills and faults\n\n`python scripts/torture.py`, {about}:\n\n{table}\n"
        (Path(__file__).parent / "results" / "torture.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
