"""Each command in a process that has used no GPU yet, on a machine with two.

tests/test_simulated_gpus.py runs these tests, with `pytest -p simulated_gpus`. The process of a
road is forked from this one, in which everything is imported and nothing has used CUDA.
"""

import gc
import json
import logging
import os
import re
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import oracle
import pytest
import simulated_gpus
import tiny
import torch
import transformers
from conftest import DEMO

import emp_llm.evaluation.evaluate  # these are imported once for all roads
import emp_llm.healing.training
import emp_llm.structure.prune_structure  # noqa: F401
from emp_llm import prune_model, reapply_mask, recipe_of
from emp_llm.cli import main
from emp_llm.records.run_report import read_report

TASKS = Path(__file__).parents[2] / "eval" / "demo"
TEXT = ("--calibration", "demo", "--samples", 4, "--seqlen", 64, "--batch-size", 2)


@dataclass(frozen=True)
class End:
    """How a process ended: its exit code, what it printed, and what it did with GPUs."""

    code: int
    out: str
    err: str
    initialized: bool
    peak: list[int]
    left: list[int]


def in_a_process(work: Callable[[], Any], folder: Path) -> End:
    """Run a function in a process of its own."""
    assert not torch.cuda.is_initialized()
    files = [folder / name for name in ("stdout", "stderr", "figures")]
    files[2].unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        _run(work, *files)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    out, err, figures = (path.read_text() if path.exists() else "" for path in files)
    return End(code, out, err, **json.loads(figures or '{"initialized": 0, "peak": 0, "left": 0}'))


def _run(work: Callable[[], Any], out: Path, err: Path, figures: Path) -> None:
    """Run a function, write what it printed and did, and end the process."""
    code = 1
    # Torch makes a new pool in a fork; if several threads ask for it at once, one finds none.
    torch.set_num_threads(1)
    sys.stdout = out.open("w")
    sys.stderr = err.open("w")
    os.dup2(sys.stdout.fileno(), 1)
    os.dup2(sys.stderr.fileno(), 2)
    logging.getLogger().handlers = []
    os.chdir(out.parent)
    try:
        work()
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
    gc.collect()
    devices = range(simulated_gpus.DEVICES)
    values = {
        "initialized": torch.cuda.is_initialized(),
        "peak": [torch.cuda.max_memory_allocated(device) for device in devices],
        "left": simulated_gpus.used(),
    }
    figures.write_text(json.dumps(values))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def command(folder: Path, *words: object, code: int = 0, **environment: str) -> End:
    """Run a command in a process of its own, in a folder."""

    def work() -> None:
        os.environ.update(environment)
        simulated_gpus.set_up()
        sys.argv = ["emp-llm", *map(str, words)]
        main()

    end = in_a_process(work, folder)
    assert end.code == code, end.err
    assert "Traceback" not in end.err
    return end


def uses_gpus(end: End, *numbers: int) -> None:
    """Assert that a process has had weights on these GPUs, and has given all memory back."""
    assert [number for number, peak in enumerate(end.peak) if peak] == list(numbers)
    assert end.left == [0, 0]


def uses_no_gpu(end: End) -> None:
    assert not end.initialized
    assert not any(end.peak + end.left)


def share_of_equal_masks(one: Path, other: Path) -> float:
    """The share of weights that are zero in both folders or in neither."""
    here, there = tiny.weights_of(one), tiny.weights_of(other)
    assert here.keys() == there.keys()
    equal = sum(int(((here[name] == 0) == (there[name] == 0)).sum()) for name in here)
    return equal / sum(weight.numel() for weight in here.values())


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("roads")


@pytest.fixture(scope="module")
def on_cpu(short_demo: Path, place: Path) -> Path:
    """The model after the main command with --device-map cpu."""
    out = place / "cpu"
    uses_no_gpu(command(place, "prune", short_demo, *TEXT, "--device-map", "cpu", "--output", out))
    return out


@pytest.fixture(scope="module")
def data_free(short_demo: Path, place: Path) -> Path:
    """The model after a data-free prune."""
    out = place / "data-free"
    uses_no_gpu(command(place, "prune", short_demo, "--method", "emp-magnitude", "--output", out))
    return out


# ---- prune


@pytest.mark.parametrize(
    ("device_map", "gpus"),
    [("auto", (0, 1)), ("cuda:1", (1,)), ("disk", (0,))],
)
def test_the_main_command(
    on_cpu: Path, short_demo: Path, tmp_path: Path, device_map: str, gpus: tuple[int, ...]
) -> None:
    out = tmp_path / "out"
    end = command(tmp_path, "prune", short_demo, *TEXT, "--device-map", device_map, "--output", out)
    uses_gpus(end, *gpus)
    assert share_of_equal_masks(out, on_cpu) > 0.999  # attention on the CPU rounds differently
    stages = read_report(out).stages
    assert bool(stages["calibrate"].peak_cuda_bytes) == bool(gpus)


def test_a_data_free_prune_with_masks_by_a_gpu(
    data_free: Path, short_demo: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    how = ("--method", "emp-magnitude", "--mask-device", "cuda")
    uses_gpus(command(tmp_path, "prune", short_demo, *how, "--output", out), 0)
    assert oracle.shards(out) == oracle.shards(data_free)


@pytest.mark.parametrize(
    "how",
    [
        ("--method", "wanda", "--refit"),
        ("--method", "emp-admm", "--sparsity", 0.5),
        ("--method", "sparsegpt"),
        ("--method", "emp-relative", "--propagate", "pruned"),
        ("--structure", "both", "--method", "emp-taylor", "--sparsity", 0.3, "--width-multiple", 8),
        ("--loss", "5%"),
    ],
    ids=lambda how: " ".join(map(str, how)),
)
def test_a_refit_a_search_and_a_budget(
    models: Callable[[str], Path], short_demo: Path, tmp_path: Path, how: tuple[object, ...]
) -> None:
    """Of a tiny model; a budget needs one whose loss rises."""
    model = short_demo if how[0] == "--loss" else models("llama")
    out = tmp_path / "out"
    end = command(tmp_path, "prune", model, *how, *TEXT, "--output", out)
    uses_gpus(end, 0, 1)
    uses_no_gpu(command(tmp_path, "verify", out, "--source", model))
    fits = read_report(out).fits.values()
    assert all(fit.error_after <= fit.error_before for fit in fits)
    assert bool(fits) == ("--refit" in how or how[1] in ("emp-admm", "sparsegpt"))


# ---- heal


HEALS = [
    ("auto", (0, 1), "model"),  # it heals on one, and the held-out text judges on both
    ("cuda:1", (1,), "model"),
    ("cpu", (), "model"),
    ("disk", (0,), "blocks"),
    ("blocks.json", (0, 1), "blocks"),
]


def check_healed(out: Path, by: str) -> None:
    healing = read_report(out).healing
    assert healing is not None
    assert healing.by == by
    assert healing.steps == 2
    assert healing.tokens == 2 * 4 * 64
    losses = dict(healing.curve)
    assert min(losses.values()) < losses[0]


@pytest.mark.parametrize(("device_map", "gpus", "by"), HEALS)
def test_heal(
    on_cpu: Path, short_demo: Path, tmp_path: Path, device_map: str, gpus: tuple[int, ...], by: str
) -> None:
    """On one device, and by blocks: read from disk, or on two GPUs and on disk."""
    blocks = {f"model.layers.{number}": (0, 1, "disk")[number % 3] for number in range(3)}
    others = {"model.embed_tokens": 0, "model.norm": 1, "model.rotary_emb": 0, "lm_head": 0}
    (tmp_path / "blocks.json").write_text(json.dumps(blocks | others))
    out = tmp_path / "out"
    how = ("--dense", short_demo, "--heal-steps", 2, "--device-map", device_map, "--output", out)
    text = ("--calibration", "demo", "--samples", 12, "--seqlen", 64)
    end = command(tmp_path, "heal", on_cpu, *how, *text)
    (uses_gpus if gpus else uses_no_gpu)(end, *gpus)
    check_healed(out, by)


def test_prune_and_heal(short_demo: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    text = ("--calibration", "demo", "--samples", 12, "--seqlen", 64)
    how = ("--heal", "--heal-steps", 2, "--heal-labels", 0.2, "--output", out)
    uses_gpus(command(tmp_path, "prune", short_demo, *how, *text), 0, 1)
    check_healed(out, "model")


# ---- the other commands that run a model


def make_short_suite(folder: Path) -> None:
    (folder / "text.txt").write_text("The lamp on the quiet street is lit. " * 40)
    (folder / "suite.toml").write_text('[perplexity]\nfile = "text.txt"\njoin = ""\nseqlen = 64\n')


@pytest.mark.parametrize(("device_map", "gpus"), [("auto", (0, 1)), ("cpu", ())])
def test_calibrate_measure_and_sweep(
    short_demo: Path, tmp_path: Path, device_map: str, gpus: tuple[int, ...]
) -> None:
    check = uses_gpus if gpus else uses_no_gpu
    where = ("--device-map", device_map, *TEXT)
    norms = tmp_path / "norms.safetensors"
    check(command(tmp_path, "calibrate", short_demo, *where, "--output", norms), *gpus)
    assert len(oracle.load_norms(norms)) == 21
    measures = tmp_path / "measures.json"
    check(command(tmp_path, "measure", short_demo, *where, "--output", measures), *gpus)
    sweep = tmp_path / "sweep"
    how = ("--methods", "emp-wanda", "--betas", 1, "--suite", tmp_path / "suite.toml")
    make_short_suite(tmp_path)
    check(command(tmp_path, "sweep", short_demo, *where, *how, "--output", sweep), *gpus)


@pytest.mark.parametrize(
    ("device_map", "gpus", "name"),
    [
        ("auto", (0, 1), "Simulated GPU"),
        ("cuda:1", (1,), "Simulated GPU"),
        ("disk", (0,), "Simulated GPU"),
        ("cpu", (), "cpu"),
    ],
)
def test_evaluate(
    short_demo: Path, tmp_path: Path, device_map: str, gpus: tuple[int, ...], name: str
) -> None:
    """The results name the device on which the model ran."""
    out = tmp_path / "results.json"
    make_short_suite(tmp_path)
    with (tmp_path / "suite.toml").open("a") as suite:
        suite.write(f'[[tasks]]\nnames = ["demo_facts"]\nfolder = "{TASKS}"\n')
    how = ("--suite", tmp_path / "suite.toml", "--limit", 2, "--device-map", device_map)
    how += ("--output", out)
    end = command(tmp_path, "evaluate", short_demo, *how)
    (uses_gpus if gpus else uses_no_gpu)(end, *gpus)
    results = json.loads(out.read_text())
    assert results["made_by"]["device"] == name


@pytest.mark.parametrize(("device", "gpus"), [("auto", (0,)), ("cuda:1", (1,)), ("cpu", ())])
def test_generate(on_cpu: Path, tmp_path: Path, device: str, gpus: tuple[int, ...]) -> None:
    how = ("--device", device, "--prompt", "One day", "--max-new-tokens", 8, "--runtime", "dense")
    end = command(tmp_path, "generate", on_cpu, *how)
    (uses_gpus if gpus else uses_no_gpu)(end, *gpus)
    assert len(end.out.split()) > 3


# ---- commands that compute on the CPU


def test_commands_that_run_no_model(data_free: Path, short_demo: Path, tmp_path: Path) -> None:
    run = partial(command, tmp_path)
    for words in (
        ("verify", data_free, "--source", short_demo),
        ("pack", data_free, "packed"),
        ("unpack", "packed", "unpacked"),
        ("pack", data_free, "mask", "--mask-only"),
        ("unpack", "mask", "unmasked", "--base", short_demo),
        ("measure", short_demo, "--criteria", "magnitude", "--output", "measure.json"),
        ("generate", "packed", "--device", "cpu", "--prompt", "One day", "--max-new-tokens", 2),
        ("report", data_free, "--output", "page", "--no-plots"),
        ("plan", "--models", short_demo, "--methods", "emp-magnitude", "--output", "study"),
    ):
        uses_no_gpu(run(*words))
    assert oracle.shards(tmp_path / "unpacked") == oracle.shards(data_free)
    assert oracle.shards(tmp_path / "unmasked") == oracle.shards(data_free)


def test_env_names_the_gpus(tmp_path: Path) -> None:
    end = command(tmp_path, "env")
    assert "Simulated GPU (17.2 GB), Simulated GPU (17.2 GB)" in end.out
    assert re.search(r"GPUs +none", command(tmp_path, "env", CUDA_VISIBLE_DEVICES="").out)


# ---- Python


@pytest.mark.parametrize("device", ["cpu", "cuda:1"])
@pytest.mark.parametrize("method", ["emp-magnitude", "emp-wanda", "sparsegpt"])
def test_prune_model(short_demo: Path, tmp_path: Path, device: str, method: str) -> None:
    """On the device of the model; a program that measures its own peaks still finds them."""
    ids = torch.randint(3, 250, (4, 32), generator=torch.Generator().manual_seed(0))
    data = None if method == "emp-magnitude" else ids
    earlier = 64 << 20

    def work() -> None:
        model = transformers.AutoModelForCausalLM.from_pretrained(short_demo).to(device)
        torch.empty(earlier, dtype=torch.uint8, device=device)
        masks = prune_model(model, recipe_of(method), data).masks
        assert all(weight.device == torch.device(device) for weight in model.parameters())
        reapply_mask(model, masks)
        for name, mask in masks.items():
            weight = model.get_parameter(name)
            assert not bool(weight[~mask.to(device)].any())

    end = in_a_process(work, tmp_path)
    assert end.code == 0, end.err
    if device == "cpu":
        uses_no_gpu(end)
    else:
        uses_gpus(end, 1)
        assert end.peak[1] >= earlier


# ---- bad input


@pytest.mark.parametrize(
    ("name", "device_map", "message"),
    [
        *(
            (name, "cuda:7", "--device-map cuda:7: torch sees 2 GPUs here.")
            for name in ("prune", "calibrate", "evaluate", "sweep", "measure")
        ),
        ("prune", '{"": 7}', "--device-map cuda:7: torch sees 2 GPUs here."),
        (
            "calibrate",
            '{"model": 0, "lm_head": "cuda:2"}',
            "--device-map cuda:2: torch sees 2 GPUs here.",
        ),
    ],
)
def test_a_gpu_that_is_not_there(
    short_demo: Path, tmp_path: Path, name: str, device_map: str, message: str
) -> None:
    """It is refused before a text is looked for."""
    how = ("--device-map", device_map, "--output", tmp_path / "out")
    end = command(tmp_path, name, short_demo, *how, code=2)
    assert message in end.err
    uses_no_gpu(end)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("device_map", "message"),
    [
        ({"model": 0, "lm_head": 1}, "lm_head.weight and model.embed_tokens.weight are one"),
        ({"model.embed_tokens": 0, "model.layers": 1}, "it has no place for model.norm.weight"),
        ({"": 0, "model.layer.0": 1}, "there is no module model.layer.0."),
        ({"modle": 0}, "it has no place for model.embed_tokens.weight"),
    ],
)
def test_a_map_that_does_not_fit_the_model(
    short_demo: Path, tmp_path: Path, device_map: dict[str, int], message: str
) -> None:
    how = ("--device-map", json.dumps(device_map), "--output", tmp_path / "out")
    end = command(tmp_path, "prune", short_demo, *TEXT, *how, code=2)
    assert f"--device-map: {message}" in end.err
    uses_no_gpu(end)


def test_generate_on_a_gpu_that_is_not_there(short_demo: Path, tmp_path: Path) -> None:
    end = command(
        tmp_path, "generate", short_demo, "--prompt", "One day", "--device", "cuda:7", code=2
    )
    assert "cuda:7: torch sees 2 GPUs" in end.err
    uses_no_gpu(end)


@pytest.mark.parametrize(("shown", "device_map"), [("", "auto"), ("-1", "disk")])
def test_no_gpu_is_visible(
    on_cpu: Path, short_demo: Path, tmp_path: Path, shown: str, device_map: str
) -> None:
    """The main command runs on the CPU, and one that names a GPU says that there is none."""
    out = tmp_path / "out"
    words = ("prune", short_demo, *TEXT, "--output", out)
    hide = {"CUDA_VISIBLE_DEVICES": shown}
    for option in ("--device-map", "--mask-device"):
        given = "cuda:0" if option == "--device-map" else "cuda"
        end = command(tmp_path, *words, option, given, code=2, **hide)
        assert f"{option} {given}: " in end.err
        assert option == "--mask-device" or f"CUDA_VISIBLE_DEVICES='{shown}'" in end.err
    uses_no_gpu(command(tmp_path, *words, "--device-map", device_map, **hide))
    assert share_of_equal_masks(out, on_cpu) > 0.999


def test_a_gpu_with_too_little_memory_for_the_weights(tmp_path: Path) -> None:
    """The message names what to change; "auto" uses the CPU beside the GPU."""
    out = tmp_path / "out"
    text = ("--calibration", "demo", "--samples", 4, "--seqlen", 32, "--batch-size", 1)
    words = ("prune", DEMO, *text, "--output", out)
    small = {"SIMULATED_GPU_BYTES": str(5 << 20)}
    end = command(tmp_path, *words, "--device-map", "cuda:0", code=2, **small)
    assert "out of memory while loading it with --device-map cuda:0" in end.err
    assert "--device-map auto" in end.err
    assert max(command(tmp_path, *words, **small).peak) < 5 << 20


def test_a_gpu_with_too_little_memory_for_the_text(short_demo: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = ("prune", short_demo, "--calibration", "demo", "--samples", 64, "--seqlen", 512)
    how = ("--batch-size", 64, "--device-map", "cuda:0", "--output", out)
    end = command(tmp_path, *words, *how, code=2, SIMULATED_GPU_BYTES=str(24 << 20))
    assert "out of memory on cuda:0 with 64 sequences of 512 tokens at a time" in end.err
    assert "Lower --batch-size" in end.err
