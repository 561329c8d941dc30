"""Kills and faults at random moments of small runs. Each disturbed run is repeated, and must end
with the bytes of an undisturbed run.

    python scripts/torture.py [--kills 200] [--every 1] [--only CASE] [--kinds KIND] [--folder DIR]
    [--write]

A quick run: --kills 24 --every 12. Runs are forks of this process, which saves the time of their
imports, with one thread of torch. For each of some prunes and calibrations:

- SIGKILL, SIGTERM and SIGINT are sent after a random time, and SIGKILL at random calls of write,
  sync and rename functions;
- every such call, and every read, fails once with EIO and once with ENOSPC;
- the disk is too small, in several sizes, until the second run (a tmpfs of limited size; for root
  only).

Afterwards the output must be missing, unchanged or complete, and a fault must be reported in a
sentence. Then the same command runs undisturbed, and its files are compared byte by byte with
those of an undisturbed run, except for the times of the stages in the report.
"""

import argparse
import contextlib
import errno
import gc
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

import torch
from bench_helpers import processor

from emp_llm import calibrate, heal, pack, prune
from emp_llm.calibration import passes
from emp_llm.checkpoint.matrices import Matrix
from emp_llm.common.errors import UserError, disk_sentence

DEMO = Path(__file__).parent / "demo" / "model"
Bytes = dict[str, bytes]
# The calls that are counted, failed and killed at: (module, function). The copy of a small file
# counts as one call.
_WRITES = [(os, name) for name in ("pwrite", "fsync", "replace", "mkdir", "ftruncate")]
_WRITES += [(shutil, "copyfile"), (Path, "write_bytes"), (torch, "save")]  # type: ignore[list-item]
_READS = [(os, name) for name in ("preadv", "pread")]
_READS += [(Path, "open")]  # type: ignore[list-item]


OWN = f"{Path(__file__).parents[1] / 'docs' / 'own_criteria.py'}:column_share"


@dataclass(frozen=True)
class Case:
    """A run to torture: a command and its options. It writes `out` in the folder given to `run`.

    Attributes:
        room: the disk that it takes at most, in sizes of its output.
    """

    name: str
    command: Callable[..., object]
    options: dict[str, Any]
    room: float = 1.0

    def run(self, folder: Path) -> None:
        self.command(output=folder / "out", **self.options)


def cases(model: Path, text: str = "demo", samples: int = 8, seqlen: int = 64) -> list[Case]:
    """The runs to torture, on a model folder."""
    data_free: dict[str, Any] = {
        "model": str(model),
        "method": "emp-magnitude",
        "targets": "all-linear",
    }
    blocks: dict[str, Any] = {
        "model": str(model),
        "calibration": text,
        "samples": samples,
        "seqlen": seqlen,
    }
    blocks |= {"device_map": "cpu", "execution": "blocks", "hidden_states": "disk"}
    heals = {name: value for name, value in blocks.items() if name not in ("model", "execution")}
    pruned = model.with_name("pruned")
    heals |= {"folder": pruned, "dense": str(model), "heal_steps": 4}
    of_model = {name: value for name, value in blocks.items() if name != "execution"}
    return [
        Case("prune, rows", prune, data_free),
        Case("prune, a matrix at a time", prune, data_free | {"group": "matrix"}),
        Case("prune, all targets as one", prune, data_free | {"group": "all"}),
        Case("prune with calibration", prune, blocks | {"method": "emp-wanda"}),
        Case("prune with a refit", prune, blocks | {"method": "wanda", "refit": True}),
        Case(
            "prune with healing",
            prune,
            blocks | {"method": "wanda", "heal": True, "heal_steps": 4},
            room=10,
        ),
        Case("heal", heal, heals, room=10),
        Case("heal by blocks", heal, heals | {"device_map": "disk"}, room=10),
        Case("prune by scores of your own", prune, blocks | {"criterion": OWN}),
        Case("prune, best", prune, of_model | {"method": "best", "heal_steps": 4}, room=10),
        Case("prune, layers", prune, of_model | {"structure": "layers", "sparsity": 0.5}),
        Case(
            "prune to a loss",
            prune,
            of_model | {"method": "wanda", "refit": True, "loss": "9%"},
            room=3,
        ),
        Case("pack", pack, {"folder": pruned}),
        Case("calibrate", calibrate, blocks),
        Case(
            "calibrate, a model in memory",
            calibrate,
            blocks | {"execution": "model", "batch_size": 1},
        ),
    ]


def make_runs_fine_grained() -> None:
    """Give small runs many moments: small chunks of rows, a slow disk, the state of a calibration
    after each block, and a note of an export after each piece.
    """
    write = os.pwrite

    def slow(*arguments: Any) -> int:
        time.sleep(0.003)
        return write(*arguments)

    os.pwrite = slow
    row_chunks = Matrix.row_chunks
    Matrix.row_chunks = lambda self, weights: row_chunks(self, min(weights, 20_000))  # type: ignore[method-assign]
    passes._SECONDS = 0.0
    passes._RATIO = 0


def snapshot(folder: Path) -> Bytes:
    """All files of a finished output (a folder or a file) by name; the report without the times
    of its stages.
    """
    out = folder / "out"
    if out.is_file():
        return {"out": out.read_bytes()}
    files = {
        str(path.relative_to(out)): path.read_bytes()
        for path in sorted(out.rglob("*"))
        if path.is_file()
    }
    if "emp_report.json" in files:
        report = json.loads(files["emp_report.json"])
        del report["stages"]
        files["emp_report.json"] = json.dumps(report).encode()
    return files


@contextmanager
def at_call(number: int, act: Callable[[], object], reads: bool = False) -> Iterator[Counter[str]]:
    """Call `act` before the n-th writing call; `reads`: reading calls count too. Yields the
    number of calls as "calls".
    """
    counts: Counter[str] = Counter()
    guard = threading.Lock()
    before = [
        (module, name, getattr(module, name))
        for module, name in _WRITES + (_READS if reads else [])
    ]

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
    """Raise the OSError of a fault."""
    raise OSError(code, os.strerror(code))


def in_fork(work: Callable[[], object], log: Path) -> int:
    """Start some work in a fork and return its process id. Its output goes to a file; it exits
    with 0, 2 (UserError) or 1.
    """
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        # A fork has none of this process's threads, and would wait for them.
        torch.set_num_threads(1)
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, 1)
        os.dup2(file, 2)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        # Background jobs of a shell ignore it.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        work()
        code = 0
    except UserError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        code = 2
    except SystemExit as end:
        code = int(end.code or 0)
    except KeyboardInterrupt:
        code = 130
    except BaseException as error:
        import traceback

        traceback.print_exc()
        sys.stderr.flush()
        if disk_sentence(error) is not None:  # which the command line prints
            code = 2
    finally:
        os._exit(code)


def exit_code(child: int) -> int:
    """Wait for a fork; returns its exit code, or minus the number of the signal that killed it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def check_output(folder: Path, old: Bytes | None, complete: Bytes) -> str | None:
    """The problem with the output of a disturbed run; None without a problem."""
    if not (folder / "out").exists():
        return None if old is None else "the older output is gone"
    return (
        None if snapshot(folder) in (complete, old) else "an incomplete output under its final name"
    )


def check_rerun(case: Case, folder: Path, complete: Bytes) -> str | None:
    """Run again undisturbed, which is refused if the output is complete; returns the problem with
    the result, or None.
    """
    finished = (folder / "out").exists()
    try:
        case.run(folder)
    except UserError as error:
        if not finished:
            return f"cannot resume: {error}"
    ours = ("out", "log", *((".out.lock", ".out.progress") if finished else ()))
    left = [path.name for path in folder.iterdir() if path.name not in ours]
    if left:
        return f"left behind: {left}"
    files = snapshot(folder)
    different = [
        name for name in complete.keys() | files.keys() if complete.get(name) != files.get(name)
    ]
    return f"other bytes: {sorted(different)}" if different else None


def disturb_and_rerun(
    case: Case, folder: Path, complete: Bytes, disturb: Callable[[Path], str | None]
) -> tuple[str | None, bool]:
    """A disturbed run in an empty folder, then another run: (the problem or None, whether there
    was work to resume).
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    problem = disturb(folder) or check_output(folder, None, complete)
    resumed = has_work(folder)
    return problem or check_rerun(case, folder, complete), resumed


def has_work(folder: Path) -> bool:
    """Whether a disturbed run left finished work."""
    notes = (
        ".out.partial/manifest.json",
        ".out.calibration/state.json",
        ".out.progress/state.json",
        ".out.loss/curve.json",
        ".out.*.size.partial",
    )
    return any(path.is_file() for note in notes for path in folder.glob(note))


def killed_after(
    case: Case, at_work: bool, seconds: float, number: int, code: int
) -> Callable[[Path], str | None]:
    """A run that gets a signal after a time, counted from its start or (`at_work`) from its
    first folder.
    """

    def disturb(folder: Path) -> str | None:
        child = in_fork(lambda: case.run(folder), folder / "log")
        until = time.monotonic() + 60
        while (
            at_work
            and not any(path.is_dir() for path in folder.iterdir())
            and time.monotonic() < until
        ):
            time.sleep(0.001)
        time.sleep(seconds)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, number)
        sent = time.monotonic()
        ending = exit_code(child)
        if time.monotonic() - sent > 3:
            return f"took {time.monotonic() - sent:.1f} s to stop"
        return (
            None
            if ending in (0, code, -number)
            else f"exit code {ending}: {(folder / 'log').read_text()[-300:]}"
        )

    return disturb


def killed_at(case: Case, call: int) -> Callable[[Path], str | None]:
    """A run that is killed at a call."""

    def work(folder: Path) -> None:
        with at_call(call, lambda: os.kill(os.getpid(), signal.SIGKILL)):
            case.run(folder)

    def disturb(folder: Path) -> str | None:
        code = exit_code(in_fork(lambda: work(folder), folder / "log"))
        return (
            None
            if code in (0, -signal.SIGKILL)
            else f"exit code {code}: {(folder / 'log').read_text()[-300:]}"
        )

    return disturb


def faulty_at(case: Case, call: int, code: int) -> Callable[[Path], str | None]:
    """A run in which one call fails."""

    def work(folder: Path) -> None:
        with at_call(call, lambda: fail(code), reads=True):
            case.run(folder)

    def disturb(folder: Path) -> str | None:
        ending = exit_code(in_fork(lambda: work(folder), folder / "log"))
        return (
            None
            if ending in (0, 2)
            else f"exit code {ending}: {(folder / 'log').read_text()[-300:]}"
        )

    return disturb


def run_on_small_disk(
    case: Case, folder: Path, complete: Bytes, share: float
) -> tuple[str | None, bool]:
    """As `disturb_and_rerun`: first on a file system with room for a share of the output, then
    on a larger one.
    """
    folder.mkdir(exist_ok=True)
    size = int(share * sum(len(content) for content in complete.values()))
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], check=True)

    def work() -> None:
        shutil.disk_usage = lambda path: SimpleNamespace(free=1 << 40)  # type: ignore[assignment, return-value]
        case.run(folder)

    try:
        ending = exit_code(in_fork(work, folder.with_name("log")))
        messages = folder.with_name("log").read_text()
        problem = check_output(folder, None, complete)
        if (
            ending == 2 and "disk is full" not in messages and "no space left" not in messages
        ) or ending not in (0, 2):
            problem = f"exit code {ending}: {messages[-300:]}"
        resumed = has_work(folder)
        subprocess.run(["mount", "-o", "remount,size=1g", str(folder)], check=True)
        return problem or check_rerun(case, folder, complete), resumed
    finally:
        gc.collect()  # tensors that map a file of the run keep the file system busy
        subprocess.run(["umount", str(folder)], check=True)


def undisturbed(case: Case, folder: Path) -> tuple[Bytes, int, int, float]:
    """An undisturbed run: its files, the number of writing calls, that of writing and reading
    calls, and its seconds.
    """
    case.run(folder)
    complete = snapshot(folder)
    counts = []
    for reads in (False, True):
        with at_call(0, lambda: None, reads) as counted:
            start = time.monotonic()
            shutil.rmtree(folder)
            folder.mkdir()
            case.run(folder)
            seconds = time.monotonic() - start
        assert snapshot(folder) == complete, "two undisturbed runs differ"
        counts.append(counted["calls"])
    return complete, counts[0], counts[1], seconds


def sharded_demo(folder: Path) -> Path:
    """Two blocks of the bundled model, in several shards as in large models."""
    import transformers
    from transformers.utils import logging

    logging.set_verbosity_error()  # four of six blocks are left out, which it reports
    logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        DEMO, dtype="auto", num_hidden_layers=2
    )
    model.save_pretrained(folder, max_shard_size="1MB")
    transformers.AutoTokenizer.from_pretrained(DEMO).save_pretrained(folder)
    return folder


def disturbances(
    case: Case,
    arguments: argparse.Namespace,
    rng: random.Random,
    writes: int,
    calls: int,
    seconds: float,
) -> Iterator[tuple[str, Sequence[Callable[[Path], str | None] | float]]]:
    """(kind, disturbances) of a case; a number is the share of the output for which the disk has
    room.
    """
    for name, number, code, share in (
        ("SIGKILL", 9, -9, 1),
        ("SIGTERM", 15, 143, 4),
        ("SIGINT", 2, 130, 4),
    ):
        yield (
            f"{name}, at random times",
            [
                killed_after(
                    case, i % 4 > 0, rng.uniform(0, seconds * (0.4 if i % 4 else 1)), number, code
                )
                for i in range(arguments.kills // share)
            ],
        )
    picked = [rng.randint(1, writes) for _ in range(arguments.kills // 4)]
    yield f"SIGKILL, at random calls of {writes}", [killed_at(case, call) for call in picked]
    for first, code in enumerate((errno.EIO, errno.ENOSPC)):
        every = range(1 + first, calls + 1, arguments.every)
        yield (
            f"{errno.errorcode[code]}, at calls of {calls}",
            [faulty_at(case, call, code) for call in every],
        )
    if os.geteuid() == 0:
        sizes = range(0, 21, max(1, 21 // max(1, arguments.kills)))  # all 21, unless few kills do
        yield "small disk (tmpfs)", [case.room * (i + 1) / 22 for i in sizes]


def torture(
    case: Case, arguments: argparse.Namespace, rng: random.Random, scratch: Path
) -> Iterator[tuple[str, list[str]]]:
    """Disturb a case in all ways; yields (row of the table, problems) of each kind."""
    folder = scratch / "complete"
    folder.mkdir()
    complete, writes, calls, seconds = undisturbed(case, folder)
    shutil.rmtree(folder)
    for kind, chosen in disturbances(case, arguments, rng, writes, calls, seconds):
        if arguments.kinds not in kind:
            continue
        problems: list[str] = []
        work = 0
        for number, disturb in enumerate(chosen):
            if isinstance(disturb, float):
                problem, resumed = run_on_small_disk(case, scratch / "small", complete, disturb)
            else:
                problem, resumed = disturb_and_rerun(case, scratch / "run", complete, disturb)
            work += resumed
            if problem is not None:
                problems.append(f"{case.name}, {kind}, number {number}: {problem}")
        yield (
            f"| {case.name} | {kind} | {len(chosen)} | {work} | {len(chosen) - len(problems)} |",
            problems,
        )


def main(line: list[str] | None = None) -> None:
    """Torture, print the table, and write it if asked; the exit code is 1 if there are problems."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--kills", type=int, default=200, help="SIGKILLs per run; other signals a quarter of them"
    )
    parser.add_argument("--every", type=int, default=1, help="fail every N-th call")
    parser.add_argument("--folder", help="working folder; default: a temporary folder")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="only runs with this text in their name")
    parser.add_argument(
        "--kinds", default="", help="only disturbances with this text in their name"
    )
    parser.add_argument(
        "--write", action="store_true", help="write the table to scripts/results/torture.md"
    )
    arguments = parser.parse_args(line)
    torch.set_num_threads(1)
    make_runs_fine_grained()
    rng = random.Random(arguments.seed)
    lines = [
        "| run | disturbance | times | had work to resume | same bytes in the end |",
        "|---|---|---:|---:|---:|",
    ]
    problems: list[str] = []
    start = time.monotonic()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as scratch:
        model = sharded_demo(Path(scratch) / "model")
        prune(str(model), method="magnitude", output=model.with_name("pruned"))  # for heal
        for case in cases(model):
            if arguments.only in case.name:
                for row, found in torture(case, arguments, rng, Path(scratch)):
                    problems += found
                    lines.append(row)
                    print(row, *found[:20], sep="\n", flush=True)
    table = "\n".join(lines)
    options = f"--kills {arguments.kills} --every {arguments.every} --seed {arguments.seed}"
    about = f"{(time.monotonic() - start) / 60:.0f} minutes on {processor()}"
    print(f"\n{about}; {len(problems)} problems\n\n{table}")
    if arguments.write:
        text = (
            f"# Kills and faults\n\n`python scripts/torture.py {options} --write`: "
            f"{about}.\n\n{table}\n"
        )
        (Path(__file__).parent / "results" / "torture.md").write_text(text, encoding="utf-8")
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
