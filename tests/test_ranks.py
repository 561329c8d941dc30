"""Several processes: the same numbers as one, and the work really divided."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
import torch

from emp_llm.models.activations import Activations

DEMO = Path(__file__).parents[1] / "scripts" / "demo" / "model"

# The evaluate command, saying at the end how many sequences this process passed through the model.
COUNTING = """
import os, sys
import transformers
from emp_llm.cli import run
from emp_llm.evaluate import evaluate, show
sequences, whole = 0, transformers.LlamaForCausalLM.forward
def counting(self, *given, **named):
    global sequences
    sequences += (given[0] if given else named["input_ids"]).shape[0]
    return whole(self, *given, **named)
transformers.LlamaForCausalLM.forward = counting
try:
    run(evaluate, show, sys.argv[1:])
finally:
    print(f"COUNTED {sequences}.", file=sys.stderr)
"""


def launched(cwd: Path, *line: object) -> "subprocess.CompletedProcess[str]":
    done = subprocess.run(
        [sys.executable, "-m", *map(str, line)],
        cwd=cwd,
        env=os.environ,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.parametrize("count", [2, 3])
def test_ranks_give_the_numbers_of_one(tmp_path: Path, count: int) -> None:
    (tmp_path / "counting.py").write_text(COUNTING)
    arguments = ["counting.py", "--model", DEMO, "--suite", "demo", "--limit", 25]  # divides by neither 2 nor 3
    whole = launched(tmp_path, "torch.distributed.run", "--nproc-per-node", 1, *arguments, "--output", "one.json")
    shared = launched(tmp_path, "torch.distributed.run", "--nproc-per-node", count, *arguments, "--output", "all.json")
    one, several = (json.loads((tmp_path / name).read_text()) for name in ("one.json", "all.json"))
    assert several["perplexity"]["perplexity"] == one["perplexity"]["perplexity"]
    for name, task in one["tasks"].items():
        found = several["tasks"][name]["results"][name]
        assert found.keys() == task["results"][name].keys()
        for key, value in task["results"][name].items():  # the answers come in another order, and floats are summed in it
            assert found[key] == (pytest.approx(value, rel=1e-12) if "stderr" in key else value)
        assert several["tasks"][name]["n-samples"] == task["n-samples"]
    assert (one["made_by"]["ranks"], several["made_by"]["ranks"]) == (1, count)
    (total,), shares = (sorted(map(int, re.findall(r"COUNTED (\d+)\.", done.stderr))) for done in (whole, shared))
    assert len(shares) == count
    assert shares[-1] < 1.5 * total / count
    assert shared.stdout.count("mean acc of 3") == 1
    assert shared.stdout == whole.stdout


def test_accelerate_launch(tmp_path: Path) -> None:
    """As on GPUs; without any, the ranks meet on CPUs. (With --cpu, accelerate starts several processes by MPI only.)"""
    launch = ["accelerate.commands.launch", "--multi_gpu", "--num_processes", 2, "--num_machines", 1, "--mixed_precision", "no"]
    arguments = ["emp_llm.evaluate", "--model", DEMO, "--suite", "demo", "--limit", 3, "--output", "results.json"]
    launched(tmp_path, *launch, "--dynamo_backend", "no", "-m", *arguments)
    record = json.loads((tmp_path / "results.json").read_text())
    assert (record["made_by"]["ranks"], record["complete"]) == (2, True)


def test_every_rank_holds_the_whole_model(tmp_path: Path) -> None:
    line = [
        "torch.distributed.run",
        "--nproc-per-node",
        2,
        "-m",
        "emp_llm.evaluate",
        "--model",
        DEMO,
        "--device-map",
        "balanced",
    ]
    done = subprocess.run(
        [sys.executable, "-m", *map(str, line)], cwd=tmp_path, env=os.environ, capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert "--device-map balanced: each of the 2 ranks holds the whole model on a device of its own" in done.stderr


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text((Path(__file__).parents[1] / "calibration" / "demo.txt").read_text()[:60_000])
    return file


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of experts: a rank may see some that the others do not."""
    return tiny.make_model(tmp_path_factory.mktemp("mixture") / "model", "mixtral", max_shard_size="80KB")


@pytest.fixture(scope="module")
def projecting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a linear layer before the first block, and one behind the last."""
    name, values = tiny.FAMILIES["opt"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(tiny.FAMILIES, "opt-350m", (name, values | {"word_embed_proj_dim": 16}))
        return tiny.make_model(tmp_path_factory.mktemp("projecting") / "model", "opt-350m")


@pytest.mark.parametrize(
    ("count", "execution", "source"), [(3, "model", None), (2, "blocks", "mixture"), (2, "blocks", "projecting")]
)
def test_calibrating_with_ranks(
    text: Path, tmp_path: Path, request: pytest.FixtureRequest, count: int, execution: str, source: str | None
) -> None:
    """Seven samples, two at a time: shares of two batches and one, and a batch that is not full."""
    model = DEMO if source is None else request.getfixturevalue(source)
    arguments = ["emp_llm.calibrate", "--model", model, "--calibration", text, "--samples", 7, "--seqlen", 128]
    arguments += ["--batch-size", 2, "--execution", execution]
    launched(tmp_path, *arguments, "--output", "one.safetensors")
    done = launched(
        tmp_path, "torch.distributed.run", "--nproc-per-node", count, "-m", *arguments, "--output", "all.safetensors"
    )
    assert done.stderr.count("all.safetensors: norms of") == 1
    one, several = (Activations.load(tmp_path / f"{name}.safetensors") for name in ("one", "all"))
    assert one.input_of == several.input_of
    assert one.tokens == several.tokens
    assert several.about["ranks"] == count
    for name, norm in one.norms.items():
        assert torch.equal(norm, several.norms[name])


@pytest.mark.parametrize("propagate", ["dense", "pruned"])
def test_pruning_with_ranks(text: Path, mixture: Path, tmp_path: Path, propagate: str) -> None:
    model = DEMO if propagate == "dense" else mixture
    arguments = ["emp_llm.prune", "--model", model, "--calibration", text, "--samples", 5, "--seqlen", 128]
    arguments += ["--batch-size", 2, "--propagate", propagate]
    launched(tmp_path, *arguments, "--output", "one")
    (tmp_path / "suite.toml").write_text(f'[perplexity]\nfile = "{text}"\nseqlen = 256\n')
    evaluate = ["--evaluate", "suite.toml"] if propagate == "dense" else []
    done = launched(tmp_path, "torch.distributed.run", "--nproc-per-node", 3, "-m", *arguments, *evaluate, "--output", "all")
    shards = sorted(path.name for path in (tmp_path / "one").glob("*.safetensors"))
    assert len(shards) >= 2
    for shard in shards:
        assert (tmp_path / "one" / shard).read_bytes() == (tmp_path / "all" / shard).read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["all", "one", "suite.toml"]
    assert done.stdout.count("of the targets") == 1
    assert ("evaluation" in json.loads((tmp_path / "all" / "emp_report.json").read_text())) == bool(evaluate)


def test_more_ranks_than_batches(text: Path, tmp_path: Path) -> None:
    line = ["torch.distributed.run", "--nproc-per-node", 2, "-m", "emp_llm.calibrate", "--model", DEMO, "--calibration", text]
    done = subprocess.run(
        [sys.executable, "-m", *map(str, line), "--samples", "4", "--seqlen", "64"],
        cwd=tmp_path,
        env=os.environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "--batch-size 4: 4 samples are 1 batches, fewer than the 2 ranks; lower it, or take fewer ranks." in done.stderr
    assert list(tmp_path.iterdir()) == []


# The second of two processes ends before its first block.
DIES = """
import os, sys
from emp_llm.calibrate import calibrate
from emp_llm.cli import run
from emp_llm.models.blockwise import Step
if os.environ["RANK"] == "1":
    Step.run = lambda *_, **__: os._exit(7)
run(calibrate, None, sys.argv[1:])
"""


def test_a_process_that_dies_stops_the_others(text: Path, tmp_path: Path) -> None:
    (tmp_path / "dies.py").write_text(DIES)
    line = ["torch.distributed.run", "--nproc-per-node", 2, "dies.py", "--model", DEMO, "--calibration", text]
    line += ["--samples", 4, "--seqlen", 64, "--batch-size", 1, "--execution", "blocks"]
    done = subprocess.run(
        [sys.executable, "-m", *map(str, line)], cwd=tmp_path, env=os.environ, capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert "exitcode  : 7" in done.stderr or "error: another process of this run has ended" in done.stderr, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["dies.py"]
