"""Several ranks: the same numbers as with one rank, and the work is divided among them."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import oracle
import pytest
import tiny
import torch
import transformers
from launch import Launched, launch

from emp_llm import calibrate, evaluate, heal, prune
from emp_llm.calibration.activations import Activations
from emp_llm.common.errors import UserError

ROOT = Path(__file__).parents[1]
DEMO = ROOT / "scripts" / "demo" / "model"
Launch = Callable[..., Launched]


@pytest.fixture
def launched(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Launch:
    """Run a command by several ranks in the test's folder."""
    return lambda count, *line, folder=tmp_path, **more: launch(
        count, folder, tmp_path_factory.mktemp("logs"), *line, **more
    )


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text that the demo model knows."""
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text((ROOT / "calibration" / "demo.txt").read_text()[:60_000])
    return file


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture of experts: a rank may see experts that the others do not."""
    return tiny.make_model(
        tmp_path_factory.mktemp("mixture") / "model", "mixtral", max_shard_size="80KB"
    )


def count_sequences() -> Callable[[], None]:
    """Print at the end how many sequences this rank passed through the model."""
    sequences = [0]
    whole = transformers.LlamaForCausalLM.forward

    def counting(self: Any, *given: Any, **named: Any) -> Any:
        sequences[0] += (given[0] if given else named["input_ids"]).shape[0]
        return whole(self, *given, **named)

    transformers.LlamaForCausalLM.forward = counting
    return lambda: print(f"COUNTED {sequences[0]}.", file=sys.stderr)


def counts(done: Launched) -> list[int]:
    return sorted(map(int, re.findall(r"COUNTED (\d+)\.", done.error)))


def test_evaluation_with_ranks(short_demo: Path, tmp_path: Path, launched: Launch) -> None:
    (tmp_path / "heldout.txt").write_text(
        (ROOT / "eval" / "demo" / "heldout.txt").read_text()[:6000]
    )
    (tmp_path / "suite.toml").write_text(
        '[perplexity]\nfile = "heldout.txt"\nseqlen = 128\n\n'
        f'[[tasks]]\nnames = ["demo_facts", "demo_stories"]\nfolder = "{ROOT / "eval" / "demo"}"\n'
    )
    # Does not divide by 3.
    options = ["evaluate --suite suite.toml --limit 11 --model", short_demo]
    whole = launched(1, *options, "--output", "1.json", prepare=count_sequences)
    one = json.loads((tmp_path / "1.json").read_text())
    (total,) = counts(whole)
    shared = launched(3, *options, "--output", "3.json", prepare=count_sequences)
    assert shared.codes == [0] * 3, shared.error
    several = json.loads((tmp_path / "3.json").read_text())
    assert several["perplexity"]["perplexity"] == one["perplexity"]["perplexity"]
    for name, task in one["tasks"].items():
        found = several["tasks"][name]["results"][name]
        assert found.keys() == task["results"][name].keys()
        # The answers arrive in another order, in which floats are summed.
        for key, value in task["results"][name].items():
            assert found[key] == (pytest.approx(value, rel=1e-12) if "stderr" in key else value)
        assert several["tasks"][name]["n-samples"] == task["n-samples"]
        assert several["tasks"][name]["answers"] == task["answers"]
    assert several["made_by"]["ranks"] == 3
    shares = counts(shared)
    assert len(shares) == 3
    assert shares[-1] < total / 2
    assert shared.output == whole.output, "one rank prints"
    assert one["made_by"]["ranks"] == 1
    assert "demo_stories" in whole.output


@pytest.mark.parametrize(
    ("count", "execution", "source"), [(3, "model", "short_demo"), (2, "blocks", "mixture")]
)
def test_calibrating_with_ranks(
    text: Path,
    tmp_path: Path,
    launched: Launch,
    request: pytest.FixtureRequest,
    count: int,
    execution: Any,
    source: str,
) -> None:
    """Seven samples, two at a time: shares of two batches and one, and a batch that is not full."""
    model = request.getfixturevalue(source)
    # A mix is divided like one text.
    texts = f"{text}:4,demo:3" if source == "short_demo" else f"{text}:7"
    one = calibrate(
        model,
        output=tmp_path / "one",
        calibration=texts,
        seqlen=128,
        batch_size=2,
        execution=execution,
    )
    options = [
        "calibrate --seqlen 128 --batch-size 2 --model",
        model,
        "--calibration",
        texts,
    ]
    done = launched(count, *options, "--execution", execution, "--output", "all.safetensors")
    assert done.codes == [0] * count, done.error
    assert done.error.count("all.safetensors: norms of") == 1
    several = Activations.load(tmp_path / "all.safetensors")
    assert isinstance(one, Activations)
    assert one.input_of == several.input_of
    assert one.tokens == several.tokens
    assert several.about.ranks == count
    for name, norm in one.statistics["norm"].items():
        assert torch.equal(norm, several.statistics["norm"][name])
    assert (
        one.statistics["relative"].keys()
        == several.statistics["relative"].keys()
        == one.input_of.keys()
    )
    assert all(
        torch.equal(norm, several.statistics["relative"][name])
        for name, norm in one.statistics["relative"].items()
    )


@pytest.mark.parametrize("propagate", ["dense", "pruned"])
def test_pruning_with_ranks(
    text: Path,
    short_demo: Path,
    mixture: Path,
    tmp_path: Path,
    launched: Launch,
    propagate: Any,
) -> None:
    model = short_demo if propagate == "dense" else mixture
    prune(
        model,
        output=tmp_path / "one",
        calibration=str(text),
        samples=5,
        seqlen=128,
        batch_size=2,
        propagate=propagate,
        device_map="cpu",
    )
    (tmp_path / "judge.txt").write_text(text.read_text()[:4000])
    (tmp_path / "suite.toml").write_text('[perplexity]\nfile = "judge.txt"\nseqlen = 256\n')
    options = [
        "prune --samples 5 --seqlen 128 --batch-size 2 --model",
        model,
        "--calibration",
        text,
    ]
    judged = ["--evaluate", "suite.toml"] if propagate == "dense" else []
    done = launched(2, *options, "--propagate", propagate, *judged, "--output", "all")
    assert done.codes == [0, 0], done.error
    shards = oracle.shards(tmp_path / "one")
    assert len(shards) >= 2
    assert shards == oracle.shards(tmp_path / "all")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "all",
        "judge.txt",
        "one",
        "suite.toml",
    ]
    assert done.output.count("of the targets") == 1
    assert ("evaluation" in json.loads((tmp_path / "all" / "emp_report.json").read_text())) == bool(
        judged
    )


def test_wrong_input(text: Path, tmp_path: Path, launched: Launch) -> None:
    done = launched(2, "evaluate", "--model", DEMO, "--suite", "demo", "--device-map", "balanced")
    assert done.codes == [2, 2]
    said = "--device-map balanced: each rank holds the whole model on a device of its own"
    assert f"error: {said}" in done.errors[0]
    assert f"rank 1: error: {said}" in done.errors[1]
    done = launched(
        2, "calibrate", "--model", DEMO, "--calibration", text, "--samples", 4, "--seqlen", 64
    )
    assert done.codes == [2, 2]
    assert (
        "--batch-size 4: 4 samples make 1 batch, fewer than the 2 ranks. Lower it, or use fewer "
        "ranks."
    ) in done.error
    assert list(tmp_path.iterdir()) == []


# As on GPUs; without any, the ranks meet on CPUs. (With --cpu, accelerate starts several processes
# by MPI only.)
ACCELERATE = (
    "--multi_gpu --num_processes 2 --num_machines 1 --mixed_precision no --dynamo_backend no"
)


@pytest.mark.parametrize(
    ("launcher", "start"),
    [
        ("torch.distributed.run --nproc-per-node 2", ""),
        (
            f"accelerate.commands.launch {ACCELERATE}",
            "import torch\ntorch.distributed.init_process_group('gloo')\n",
        ),
    ],
    ids=["torchrun", "accelerate, with a group"],
)
def test_launchers(tmp_path: Path, launcher: str, start: str) -> None:
    """All processes end in good order, also where a script leaves its group to its end."""
    (tmp_path / "meet.py").write_text(
        f"{start}from emp_llm.common.ranks import ranks\nr = ranks()\nfound = r.gather((r.index, "
        "r.count))\nprint(found)\n"
    )
    line = [sys.executable, "-m", *launcher.split(), "meet.py"]
    done = subprocess.run(
        line, cwd=tmp_path, env=os.environ, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "[(0, 2), (1, 2)]" in done.stdout


@pytest.fixture(scope="module")
def disks(text: Path, tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for each of two ranks. Files of one name hold other things, but for `same`, which
    is a copy.
    """
    folder = tmp_path_factory.mktemp("disks")
    for rank in range(2):
        disk = folder / str(rank)
        disk.mkdir()
        (disk / "text.txt").write_text(text.read_text()[100 * rank :])
        (disk / "same.txt").write_text(text.read_text())
        (disk / "suite.toml").write_text('[perplexity]\nfile = "text.txt"\nseqlen = 64\n')
        (disk / "even.toml").write_text('[perplexity]\nfile = "same.txt"\nseqlen = 64\n')
        for name in ("same", "other", "config"):
            shutil.copytree(tiny_llama, disk / name)
            prune(model=disk / name, output=disk / f"{name}-pruned", method="emp-magnitude")
        os.utime(disk / "same" / "model-00001-of-00002.safetensors", (rank, rank))
    tiny.make_model(folder / "new", seed=1)
    for shard in (folder / "new").glob("*.safetensors"):
        shutil.copy(shard, folder / "1" / "other" / shard.name)
    config = folder / "1" / "config" / "config.json"
    config.write_text(config.read_text().replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05'))
    return folder


def own_disk() -> None:
    os.chdir(os.environ["RANK"])


def test_ranks_that_read_other_files_are_told(
    disks: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """On all of them, before a model runs; in every command that several ranks run."""
    short = {"samples": 4, "seqlen": 32, "batch_size": 1, "device_map": "cpu"}

    def work(rank: int) -> None:
        own_disk()
        for call, field in (
            (lambda: prune(model="other", method="emp-magnitude", output="o"), "weights.model"),
            (
                lambda: prune(model="same", calibration="text.txt", output="o", **short),
                "text (its token ids)",
            ),
            (lambda: prune(model="config", method="emp-magnitude", output="o"), "rms_norm_eps"),
            (
                lambda: prune(
                    model="same", method="emp-magnitude", evaluate="suite.toml", output="o"
                ),
                "suite.text.sha256",
            ),
            (
                lambda: prune(
                    model="same",
                    structure="heads",
                    sparsity=0.5,
                    calibration="text.txt",
                    output="o",
                    **short,
                ),
                "text (its token ids)",
            ),
            (
                lambda: calibrate("same", calibration="text.txt", output="n", **short),
                "text (its token ids)",
            ),
            (lambda: calibrate("other", calibration="same.txt", output="n", **short), "weights.mo"),
            (lambda: evaluate(model="other", suite="even.toml", output="r"), "weights.model"),
            (lambda: evaluate(model="same", suite="suite.toml", output="r"), "suite.text.sha256"),
            (
                lambda: heal("same-pruned", dense="same", calibration="text.txt", samples=20),
                "text (its token ids)",
            ),
        ):
            with pytest.raises(UserError, match=rf"{re.escape(field)}.*: rank 1 on .*folder"):
                call()
        assert not Path("o").exists()
        # Copies of one file agree, also where their times differ.
        assert calibrate("same", calibration="same.txt", output=f"{disks}/norms", **short).tokens

    done = launch(2, disks, tmp_path_factory.mktemp("logs"), work=work)
    assert done.codes == [0, 0], done.error


def test_ranks_that_disagree_end_with_code_2(disks: Path, launched: Launch) -> None:
    """Each of them says why."""
    line = "prune --model other --method emp-magnitude"
    done = launched(2, line, prepare=own_disk, folder=disks)
    assert done.codes == [2, 2]
    host = re.escape(socket.gethostname())
    for rank, error in enumerate(done.errors):
        assert re.search(
            rf"error: weights\.model: rank 1 on {host} has \w+\.\.\., and rank 0 on {host} has",
            error,
        ), rank
