"""Memory: the amount left on a machine, and the messages when it runs out."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from accelerate.hooks import AlignDevicesHook

from emp_llm.common.machine import OutOfMemory, available_memory
from emp_llm.evaluation.evaluate import _logits
from emp_llm.models.blockwise import BlockwiseModel
from emp_llm.models.loading import load_model

MACHINE = 1 << 34


def group(folder: Path, limit: str, usage: int, prefix: str = "") -> None:
    """A control group of version 2, or, with the prefix of its totals, 1."""
    folder.mkdir(parents=True, exist_ok=True)
    names = (
        ("memory.limit_in_bytes", "memory.usage_in_bytes")
        if prefix
        else ("memory.max", "memory.current")
    )
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{usage}\n")
    (folder / "memory.stat").write_text(
        f"anon 5\n{prefix}inactive_file 300\n{prefix}active_file 20\n"
    )


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A root with a machine's memory and a process in no group."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=MACHINE))
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("3:cpu:/\n0::/\n")
    return tmp_path


def test_memory_left_on_the_machine(system: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    for root in (system, tmp_path_factory.mktemp("nothing")):
        assert available_memory(root) == MACHINE
    (system / "proc/self/cgroup").write_text("not a list of groups\n")
    assert available_memory(system) == MACHINE
    assert 0 <= available_memory() <= MACHINE


def test_memory_left_by_control_groups(system: Path) -> None:
    root = system / "sys/fs/cgroup"
    (system / "proc/self/cgroup").write_text("0::/slurm/job_7/step_0\n")
    group(root / "slurm/job_7/step_0", "max", 7000)
    assert available_memory(system) == MACHINE
    group(root / "slurm/job_7", "9000", 7000)
    assert available_memory(system) == 9000 - 7000 + 320, (
        "files in the cache are free; no limit is no limit"
    )
    group(root / "slurm", "5000", 9000)
    assert available_memory(system) == 0


def test_control_groups_of_version_1(system: Path) -> None:
    root = system / "sys/fs/cgroup/memory"
    (system / "proc/self/cgroup").write_text(
        "5:cpu,cpuacct:/x\n4:memory:/not/in/this/container\n0::/\n"
    )
    group(root, "8000", 1000, "total_")
    assert available_memory(system) == 8000 - 1000 + 320


def fail(*_: Any, **__: Any) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")


def test_no_room_while_a_model_runs(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the weights of a block, and after the last block. The whole model is not tried after
    its blocks.
    """
    ids = torch.arange(80).view(2, 40)
    model = load_model(tiny_llama, "disk")
    with BlockwiseModel(model).walk([ids]) as walk, monkeypatch.context() as patch:
        patch.setattr(AlignDevicesHook, "pre_forward", fail)
        with pytest.raises(
            OutOfMemory,
            match=r"^model\.layers\.0: out of memory on cpu.*weights.*--device-map disk",
        ):
            next(walk.steps())
    monkeypatch.setattr(model.model.layers[1], "forward", fail)
    with pytest.raises(OutOfMemory, match="--batch-size"):
        list(_logits(model, [ids]))
    model = load_model(tiny_llama, "cpu")
    runner = BlockwiseModel(model)
    runner.prepare(ids)
    monkeypatch.setattr(model.lm_head, "forward", fail)
    with pytest.raises(
        OutOfMemory,
        match=r"^LlamaForCausalLM after its last block: out of memory on cpu with 2 sequences",
    ):
        list(runner.forward([ids]))


GROUP = """
import torch
from emp_llm.selection.reference import GroupSelector
from emp_llm.selection.rule import KeepRule

def own_memory():
    lines = open("/proc/self/status")
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))

torch.set_num_threads(1)
noise = torch.randn(1 << 20).bfloat16()
selector = GroupSelector(KeepRule(beta=1.0))
selector.add(noise.reshape(1024, -1))
before = own_memory()
for number in range(100):
    selector.add(noise.roll(number).reshape(1024, -1))
print(own_memory() - before)
"""


@pytest.mark.skipif(
    not Path("/proc/self/status").is_file(), reason="only Linux tells a process its memory"
)
def test_a_group_of_all_targets_is_not_held_in_memory() -> None:
    """Small tensors kept between the large ones of each block once kept the C library from using
    their memory again.
    """
    done = subprocess.run(
        [sys.executable, "-c", GROUP], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 50e6, "100 blocks of 2 MB each"
