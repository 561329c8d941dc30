"""Library calls in a script that has a process group, and commands beside variables that another
job has left over.
"""

import json
import os
import subprocess
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from launch import launch
from torch import Tensor, distributed
from transformers import AutoModelForCausalLM, PreTrainedModel

from emp_llm import calibrate, evaluate, heal_model, masks_of, prune_model, recipe_of
from emp_llm.common.errors import UserError
from emp_llm.common.ranks import ranks
from emp_llm.healing import training
from emp_llm.runs.prune_model import ModelReport

Command = Callable[..., "subprocess.CompletedProcess[str]"]
TEXT = {"samples": 4, "seqlen": 32, "batch_size": 1, "device_map": "cpu"}


def load(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def tokens() -> Tensor:
    return torch.randint(0, 250, (20, 32), generator=torch.Generator().manual_seed(0))


def weights(report: ModelReport) -> dict[str, Tensor]:
    return {name: values.detach() for name, values in report.model.named_parameters()}


def answers(evaluated: Any) -> dict[str, Any]:
    """To all questions of a suite's tasks."""
    return {name: task.answers for name, task in evaluated.results.tasks.items()}


def start_torch() -> None:
    distributed.init_process_group("gloo")


def start_accelerator() -> None:
    from accelerate import Accelerator

    Accelerator(cpu=True)


def start_state() -> None:
    from accelerate import PartialState

    PartialState(cpu=True)


def start_by_arguments() -> None:
    """As multiprocessing.spawn does, without variables."""
    given = {name: os.environ.pop(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    distributed.init_process_group(
        "gloo", rank=int(given["RANK"]), world_size=int(given["WORLD_SIZE"])
    )


def start_without_cpu() -> None:
    """A group that carries nothing of CPUs, as one of NCCL alone."""
    distributed.init_process_group("cuda:gloo")
    with pytest.raises(RuntimeError, match="cpu"):
        distributed.all_reduce(torch.ones(1))


def start_nothing() -> None:
    """The library must not start a group either."""


@pytest.mark.parametrize(
    "start",
    [
        start_torch,
        start_accelerator,
        start_state,
        start_by_arguments,
        start_without_cpu,
        start_nothing,
    ],
)
def test_library_calls_in_a_script_of_two_processes(
    tiny_llama: Path,
    evaluable_llama: Path,
    text: Path,
    task_suite: Path,
    tmp_path: Path,
    start: Callable[[], None],
) -> None:
    folder = tiny_llama
    judged = evaluable_llama
    ids = tokens()
    refitted = recipe_of("emp-wanda", refit=True)
    alone = weights(prune_model(load(folder), refitted, ids))
    norms = calibrate(folder, calibration=str(text), output=tmp_path / "one", **TEXT)
    expected = {}
    if start is start_by_arguments:
        expected = answers(evaluate(judged, suite=task_suite, output=tmp_path / "one.json"))

    def work(rank: int) -> None:
        start()
        model = load(folder)
        for name, values in weights(prune_model(model, refitted, ids)).items():
            assert torch.equal(values, alone[name]), name
        # One of them alone, or each by a recipe of its own.
        if rank == 0:
            masks_of(folder, "emp-wanda", ids)
        own = masks_of(load(folder), recipe_of("magnitude", sparsity=0.25 + 0.25 * rank))
        assert own["model.layers.0.mlp.up_proj.weight"].float().mean() == 0.75 - 0.25 * rank
        assert distributed.is_initialized() == (start is not start_nothing)
        if start is start_nothing:
            return

        # A command shares its work in the group, which stays as it is.
        world = distributed.group.WORLD
        shared = calibrate(folder, calibration=str(text), output=tmp_path / "two", **TEXT)
        assert shared.about.ranks == 2
        assert shared.tokens == norms.tokens
        for name, norm in norms.statistics["norm"].items():
            assert torch.equal(norm, shared.statistics["norm"][name]), name
        assert distributed.group.WORLD is world
        if start is start_by_arguments:
            results = evaluate(judged, suite=task_suite, output=tmp_path / "two.json")
            assert answers(results) == expected
        if start not in (start_torch, start_without_cpu):
            return
        dense = load(folder)
        healed = heal_model(model, dense, ids, masks=masks_of(model, "emp-magnitude"), steps=1)
        assert healed.steps == 1
        one, other = ranks().gather([float(values.sum()) for values in model.parameters()])
        assert one == other
        with pytest.raises(UserError, match=r"token ids.*rank 1"):
            heal_model(model, dense, ids + rank, masks=masks_of(model, "emp-magnitude"), steps=1)
        if start is start_without_cpu:
            return
        total = torch.ones(1)
        distributed.all_reduce(total)
        assert total == 2
        distributed.destroy_process_group()
        distributed.init_process_group(
            "gloo", store=distributed.FileStore(f"{tmp_path}/store", 2), rank=rank, world_size=2
        )
        assert ranks().gather(rank) == [0, 1]

    (tmp_path / "logs").mkdir()
    done = launch(2, tmp_path, tmp_path / "logs", work=work)
    assert done.codes == [0, 0], done.error


def test_ranks_go_back_to_the_same_weights(tiny_llama: Path, tmp_path: Path) -> None:
    """A training that takes its best weights again takes them on all ranks."""

    def work(rank: int) -> None:
        start_torch()
        training.rate_of = lambda config: 0.3  # too high
        model = load(tiny_llama)
        masks = masks_of(model, "emp-magnitude")
        healed = heal_model(model, load(tiny_llama), tokens(), masks=masks, steps=10)
        losses = [loss for _, loss in healed.curve]
        assert losses[1] > 1.02 * losses[0]
        one, other = ranks().gather([values.detach() for values in model.parameters()])
        assert all(map(torch.equal, one, other))

    (tmp_path / "logs").mkdir()
    done = launch(2, tmp_path, tmp_path / "logs", work=work)
    assert done.codes == [0, 0], done.error


def test_errors_in_the_group_of_a_script_are_torchs(tmp_path: Path) -> None:
    """They reach the script, which may have its own way to go on."""

    def work(rank: int) -> None:
        distributed.init_process_group("gloo")
        ranks().gather(rank)
        if rank == 1:
            os._exit(7)
        with pytest.raises(RuntimeError):
            ranks().gather(rank)
        os._exit(5)

    (tmp_path / "logs").mkdir()
    done = launch(2, tmp_path, tmp_path / "logs", work=work)
    assert done.codes == [5, 7], done.error


def test_a_command_that_one_process_of_a_script_calls(
    tiny_llama: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not wait for the others without end."""
    monkeypatch.setattr("emp_llm.common.ranks._MEETING", timedelta(seconds=1))

    def work(rank: int) -> None:
        distributed.init_process_group("gloo")
        if rank == 0:
            with pytest.raises(UserError, match=r"2 processes.*call it in each"):
                calibrate(tiny_llama, calibration=str(text), output=tmp_path / "norms", **TEXT)
        else:
            time.sleep(2)
        os._exit(0)

    (tmp_path / "logs").mkdir()
    done = launch(2, tmp_path, tmp_path / "logs", work=work)
    assert done.codes == [0, 0], done.error


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"WORLD_SIZE": "2", "RANK": "0"}, "RANK=0 and WORLD_SIZE=2 without MASTER_ADDR and"),
        ({"WORLD_SIZE": "4"}, "WORLD_SIZE=4 without RANK and MASTER_ADDR and MASTER_PORT"),
        ({"RANK": "1", "LOCAL_RANK": "1"}, "RANK=1 without WORLD_SIZE and MASTER_ADDR and"),
        (
            {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "localhost", "LOCAL_RANK": "1"},
            "RANK=1 and WORLD_SIZE=2 without MASTER_PORT",
        ),
        ({"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}, None),
        ({"LOCAL_RANK": "0"}, None),
        ({"LOCAL_RANK": "-1"}, None),
    ],
)
def test_left_over_variables(
    tiny_llama: Path,
    text: Path,
    task_suite: Path,
    tmp_path: Path,
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str],
    said: str | None,
) -> None:
    """One process does the whole work, also in the packages that it uses, and says so."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    line = ["--model", tiny_llama, "--calibration", text, "--samples", 20, "--seqlen", 32]
    done = command("prune", *line, "--heal", "--heal-steps", 1, "--output", tmp_path / "out")
    assert "of the targets" in done.stdout
    assert json.loads((tmp_path / "out" / "emp_report.json").read_text())
    assert not distributed.is_initialized()
    if said is None:
        assert "runs alone" not in done.stderr
    else:
        assert f"warning: {said}" in done.stderr
        assert done.stderr.count("torchrun") == 1
        assert "RANK" not in os.environ


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"WORLD_SIZE": "two", "RANK": "0"}, "WORLD_SIZE is 'two'"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE is '0'; it must be a whole number of at least 1"),
        ({"RANK": "-1"}, "RANK is '-1'; it must be a whole number of at least 0"),
        ({"LOCAL_RANK": "first"}, "LOCAL_RANK is 'first'"),
        ({"RANK": "5", "WORLD_SIZE": "2"}, "ranks count from 0 to 1. Start"),
    ],
)
def test_wrong_variables(
    tiny_llama: Path,
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str],
    said: str,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    done = command(f"prune --method emp-magnitude --model {tiny_llama}", code=2)
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_wrong_patience_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMP_LLM_SILENT_SECONDS", "soon")
    (tmp_path / "logs").mkdir()
    done = launch(2, tmp_path, tmp_path / "logs", work=lambda rank: ranks().gather(rank) and None)
    assert done.codes == [2, 2], done.error
    assert all("EMP_LLM_SILENT_SECONDS is 'soon'" in error for error in done.errors)
