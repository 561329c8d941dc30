"""An interrupted calibration by blocks resumes after the last saved block, from a single state on
disk; that of a whole model starts over.
"""

import errno
import logging
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import tiny
from launch import launch
from stops import Killed, save_each_block, stopped

from emp_llm import calibrate, prune, sweep
from emp_llm.calibration import passes
from emp_llm.calibration.activations import Activations
from emp_llm.common.errors import format_bytes
from emp_llm.models.blockwise import Step

SAMPLES = 4
LENGTH = 64
WIDTH = 32
STATE = SAMPLES * LENGTH * WIDTH * 2  # bytes of the hidden states, bfloat16


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of four blocks."""
    name, values = tiny.FAMILIES["llama"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(tiny.FAMILIES, "deep", (name, values | {"num_hidden_layers": 4}))
        return tiny.make_model(tmp_path_factory.mktemp("deep") / "model", "deep")


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """The state is saved after every block, even if the block took little time."""
    save_each_block(monkeypatch)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The blocks that were run, in order."""
    found = []
    run = Step.run

    def note(step: Step, **options: Any) -> None:
        found.append(step.index)
        run(step, **options)

    monkeypatch.setattr(Step, "run", note)
    return found


@pytest.fixture
def saves(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The blocks after which the state was saved, in order."""
    found = []
    write = passes.CalibrationProgress._write_hidden

    def note(self: passes.CalibrationProgress, done: int, *others: Any) -> int:
        found.append(done)
        return write(self, done, *others)

    monkeypatch.setattr(passes.CalibrationProgress, "_write_hidden", note)
    return found


def calibrated(
    model: Path, text: Path, folder: Path, command: str = "calibrate", **more: Any
) -> bytes:
    """Calibrate, or prune with pruned propagation; returns the activations file."""
    options = {
        "model": model,
        "calibration": str(text),
        "samples": SAMPLES,
        "seqlen": LENGTH,
    }
    options |= {"device_map": "cpu", "execution": "blocks"} | more
    if command == "calibrate":
        calibrate(output=folder / "out", **options)
        return (folder / "out").read_bytes()
    prune(output=folder / "out", **{"propagate": "pruned"} | options)
    return (folder / "out" / "emp_llm" / "activations.safetensors").read_bytes()


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the batches that pass through a whole model, in order."""
    found = []
    call = passes._call

    def note(body: Any, inputs: Any, device: Any) -> None:
        found.append(len(inputs[""]))
        call(body, inputs, device)

    monkeypatch.setattr(passes, "_call", note)
    return found


def end_in_batch(monkeypatch: pytest.MonkeyPatch, number: int, end: Callable[[], None]) -> None:
    """End the run within a batch, when most layers have been observed."""
    call = passes._call
    begun = [0]

    def then_end(body: Any, inputs: Any, device: Any) -> None:
        begun[0] += 1
        call(body, inputs, device)
        if begun[0] == number:
            end()

    monkeypatch.setattr(passes, "_call", then_end)


def kill_in(monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    """End the run when a block has been run."""
    run = Step.run

    def then_end(step: Step, **options: Any) -> None:
        run(step, **options)
        if step.index == block:
            raise Killed

    monkeypatch.setattr(Step, "run", then_end)


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize(
    ("command", "during", "place", "device_map"),
    [
        ("calibrate", "block", "cpu", "disk"),
        ("calibrate", "state", "cpu", "cpu"),
        ("prune", "hidden states", "disk", "cpu"),
    ],
)
def test_an_interrupted_calibration_resumes_after_its_last_saved_block(
    deep: Path,
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    runs: list[int],
    command: str,
    during: str,
    place: str,
    device_map: str,
) -> None:
    def run(folder: str) -> bytes:
        return calibrated(
            deep, text, tmp_path / folder, command, hidden_states=place, device_map=device_map
        )

    expected = run("whole")
    times = 1 if command == "calibrate" else 2
    assert runs == [block for block in range(4) for _ in range(times)]
    assert [path.name for path in (tmp_path / "whole").iterdir()] == ["out"], "no state is left"
    with monkeypatch.context() as patch:
        end_while(patch, during)
        with pytest.raises(Killed):
            run("killed")
    assert not (tmp_path / "killed" / "out").exists()
    (hidden,) = (tmp_path / "killed").rglob("hidden-1-0.safetensors")
    assert hidden.stat().st_size > STATE
    runs.clear()
    assert run("killed") == expected
    assert runs == [block for block in (1, 2, 3) for _ in range(times)]
    assert [path.name for path in (tmp_path / "killed").iterdir()] == ["out"], "no state is left"


def end_while(patch: pytest.MonkeyPatch, during: str) -> None:
    """End the run in the second block, or before its hidden states or its state are written."""
    if during == "block":
        kill_in(patch, 1)
        return
    write = passes.write_bytes
    last = "hidden-2-0.safetensors" if during == "hidden states" else "sums-2.safetensors"

    def end_before(path: Path, content: bytes) -> None:
        if path.name == last:
            raise Killed
        write(path, content)

    patch.setattr(passes, "write_bytes", end_before)


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("again", ["the same", "another", "sweep"])
def test_no_state_is_left_by_a_run_killed_after_its_calibration(
    evaluable_llama: Path,
    text: Path,
    task_suite: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    again: str,
) -> None:
    """The norms are in the unfinished output, and the state between blocks is not deleted yet."""
    model = evaluable_llama

    def run() -> None:
        if again != "sweep":
            calibrated(model, text, tmp_path, "prune")
            return
        options = {
            "calibration": str(text),
            "samples": SAMPLES,
            "seqlen": LENGTH,
            "execution": "blocks",
        }
        options |= {
            "suite": str(task_suite.parent / "short.toml"),
            "methods": "emp-wanda",
            "device_map": "cpu",
        }
        sweep(model, output=tmp_path / "out", **options)

    with stopped(passes, "delete_progress"):
        run()
    assert list(tmp_path.rglob("hidden-1-*"))
    if again == "another":
        prune(model=model, output=tmp_path / "out", method="emp-magnitude", overwrite=True)
    else:
        run()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert not list(tmp_path.rglob("hidden-*"))
    assert not (tmp_path / "out" / ".calibration").exists()


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize(
    "change", [{}, {"batch_size": 1}, {"numbers": (2, 2)}], ids=["the same", "batch size", "mix"]
)
def test_another_calibration_starts_over(
    deep: Path,
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    runs: list[int],
    change: dict[str, Any],
) -> None:
    (tmp_path / "other.txt").write_text("Once more, with feeling. " * 200)

    def run(folder: str, numbers: tuple[int, int] = (3, 1), **more: Any) -> bytes:
        mix = f"{text}:{numbers[0]},{tmp_path / 'other.txt'}:{numbers[1]}"
        return calibrated(
            deep, text, tmp_path / folder, **{"calibration": mix, "samples": None} | more
        )

    expected = run("whole", **change)
    with monkeypatch.context() as patch:
        kill_in(patch, 2)
        with pytest.raises(Killed):
            run("killed")
    runs.clear()
    assert run("killed", **change) == expected
    assert runs[0] == (0 if change else 2)


@pytest.mark.usefixtures("eager")
def test_one_state_is_kept_and_announced_once(
    deep: Path,
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    saves: list[int],
) -> None:
    caplog.set_level(logging.INFO)
    seen = []
    save = passes.CalibrationProgress.save

    def look(self: passes.CalibrationProgress, *given: Any) -> None:
        save(self, *given)
        seen.append({path.name for path in self.folder.iterdir()})

    monkeypatch.setattr(passes.CalibrationProgress, "save", look)
    calibrated(deep, text, tmp_path)
    assert saves == [1, 2, 3], "after the last block nothing is left to resume"
    assert seen == [
        {"state.json", f"sums-{number}.safetensors", f"hidden-{number}-0.safetensors"}
        for number in saves
    ]
    (told,) = (message for message in caplog.messages if "--no-resumable-calibration" in message)
    assert format_bytes(STATE).split()[1] in told
    assert ".out.progress" in told
    saves.clear()
    calibrated(deep, text, tmp_path, resumable_calibration=False, overwrite=True)
    assert saves == []


@pytest.mark.parametrize(
    ("seconds", "expected"), [((10, 0), [3]), ((31, 1), [1, 2, 3]), ((31, 6), [1, 3]), ((5, 0), [])]
)
def test_the_time_between_saves(
    deep: Path,
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    saves: list[int],
    runs: list[int],
    seconds: tuple[int, int],
    expected: list[int],
) -> None:
    """Of a block and of a save. At least 30 since the last save, and ten times the duration of
    that save.
    """
    write = passes.write_bytes

    def slow_write(path: Path, content: bytes) -> None:
        write(path, content)
        written.append(path.name.startswith("hidden"))

    written = []
    monkeypatch.setattr(passes, "write_bytes", slow_write)
    monkeypatch.setattr(
        passes.time,
        "monotonic",
        lambda: 1000.0 + seconds[0] * len(runs) + seconds[1] * sum(written),
    )
    calibrated(deep, text, tmp_path)
    assert saves == expected


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("then", ["a file is missing", "a disk is full"])
def test_ranks_resume_together(
    deep: Path,
    text: Path,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    then: str,
) -> None:
    """The second rank dies in the third block. Both have saved their hidden states after the
    second.
    """
    expected = calibrated(deep, text, tmp_path / "whole", batch_size=1)
    options = [
        "calibrate --batch-size 1 --model",
        deep,
        "--calibration",
        text,
        "--samples",
        SAMPLES,
        "--seqlen",
        LENGTH,
    ]
    line = [*options, "--device-map", "cpu", "--execution", "blocks", "--output", "out"]
    write = passes.write_bytes

    def die() -> None:
        if os.environ["RANK"] == "1":
            kill_in(monkeypatch, 2)
            monkeypatch.setattr(Killed, "__init__", lambda *_: os._exit(7))

    def fill() -> None:
        def full(path: Path, content: bytes) -> None:
            if path.name.startswith("hidden-3"):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            write(path, content)

        if os.environ["RANK"] == "1":
            monkeypatch.setattr(passes, "write_bytes", full)

    done = launch(2, tmp_path, tmp_path_factory.mktemp("logs"), *line, prepare=die)
    assert done.codes == [75, 7], done.error
    progress = tmp_path / ".out.progress"
    assert sorted(path.name for path in progress.iterdir()) == [
        *(f"hidden-2-{number}.safetensors" for number in range(SAMPLES)),
        "state.json",
        "sums-2.safetensors",
    ]
    if then == "a file is missing":
        (progress / "hidden-2-1.safetensors").unlink()
    done = launch(
        2,
        tmp_path,
        tmp_path_factory.mktemp("logs"),
        *line,
        prepare=fill if then == "a disk is full" else None,
    )
    assert done.codes == [0, 0], done.error
    assert ("resumed after block 2 of 4" in done.error) == (then != "a file is missing")
    assert ("files are missing or damaged; the calibration starts over" in done.error) == (
        then == "a file is missing"
    )
    assert done.error.count("The calibration continues without saving") == 2 * (
        then == "a disk is full"
    )
    assert not progress.exists()
    several = Activations.load(tmp_path / "out")
    assert several.about.ranks == 2
    replace(several, about=msgspec.structs.replace(several.about, ranks=1)).save(tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == expected


def test_the_dry_run_counts_the_state(deep: Path, text: Path, command: Callable[..., Any]) -> None:
    line = [
        f"prune --dry-run --execution blocks --calibration {text} --samples {SAMPLES} "
        f"--seqlen {LENGTH} --model",
        deep,
    ]
    assert format_bytes(2 * STATE) in command(*line).stdout
    assert "--no-resumable-calibration" not in command(*line, "--no-resumable-calibration").stdout
    assert "--no-resumable-calibration" not in command(*line[:-2]).stdout, "it runs as a whole"


def test_a_signal_in_a_whole_model_says_that_it_starts_over(
    tiny_llama: Path,
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: Callable[..., Any],
    batches: list[int],
) -> None:
    line = [f"prune {tiny_llama} --calibration {text} --samples {SAMPLES}"]
    line += ["--seqlen", LENGTH, "--batch-size", 1, "--output", "out"]

    with monkeypatch.context() as patch:
        end_in_batch(patch, 3, lambda: os.kill(os.getpid(), signal.SIGTERM))
        told = command(*line, code=143).stderr
    assert "the norms are not finished; the same command starts them over." in told
    assert not (tmp_path / ".out.calibration").exists()
    batches.clear()
    command(*line)
    assert len(batches) == SAMPLES
