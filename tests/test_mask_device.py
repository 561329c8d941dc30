"""Masks computed on a GPU by the commands. Without a GPU, Triton's interpreter runs the kernel on the CPU."""

from pathlib import Path
from typing import Any

import oracle
import pytest
import tiny
import torch
from conftest import Run
from runs import weights_of

from emp_llm.calibrate import calibrate
from emp_llm.common.errors import UserError
from emp_llm.prune import prune
from emp_llm.pruning import mask_device, pruner
from emp_llm.pruning.row_pruners import GpuRowPruner
from emp_llm.records.run_report import RunReport
from emp_llm.selection.kernels import cuda

pytest.importorskip("triton", reason="Triton is not installed")

DEVICE = "cuda:0" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """The shapes of the weights in each launch of the kernel."""
    shapes: list[torch.Size] = []
    enqueue = cuda.enqueue

    def counted(weight: torch.Tensor, *arguments: Any) -> Any:
        shapes.append(weight.shape)
        return enqueue(weight, *arguments)

    monkeypatch.setattr(cuda, "enqueue", counted)
    return shapes


SIZES = {"hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 4}


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model small enough for the interpreter, which takes 50 ms per row."""
    return small_model(tmp_path_factory.mktemp("interpreted") / "model")


def small_model(folder: Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(tiny.FAMILIES, "small", ("LlamaConfig", tiny.GLU | SIZES))
        return tiny.make_model(folder, "small", dtype)


@pytest.fixture(scope="session")
def small_norms(model: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("norms") / "norms.safetensors"
    calibrate(model=model, output=path, calibration=str(text), samples=2, seqlen=32, device_map="cpu")
    return path


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.safetensors"))}


@pytest.mark.parametrize(
    "options",
    [
        {"method": "emp-magnitude"},
        {"method": "magnitude", "sparsity": 0.3},
        {"method": "magnitude", "pattern": "2:4"},
        {"method": "emp-wanda"},
        {"method": "emp-relative"},
    ],
    ids=["emp-magnitude", "magnitude", "2:4", "emp-wanda", "emp-relative"],
)
def test_a_gpu_writes_the_same_checkpoint(
    model: Path, small_norms: Path, tmp_path: Path, launches: list[torch.Size], options: dict[str, Any]
) -> None:
    given: dict[str, Any] = {"model": model, "targets": "0.mlp.up_proj,1.self_attn.q_proj"} | options
    if "magnitude" not in options["method"]:
        given["activations"] = small_norms
    reports = {}
    for device in ("cpu", "cuda"):
        before = len(launches)
        report = prune(output=tmp_path / device, mask_device=device, **given)
        assert isinstance(report, RunReport)
        reports[device] = report.matrices
        blocks = 4 if options["method"] == "emp-relative" else 2  # the magnitudes and the scores
        assert len(launches) - before == (blocks if device == "cuda" else 0), "one block for each matrix"
    assert files_of(tmp_path / "cuda") == files_of(tmp_path / "cpu")
    assert reports["cuda"] == reports["cpu"]


def test_experts_with_few_tokens_are_scored_by_magnitude_on_a_gpu_too(tmp_path: Path, text: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(tiny.FAMILIES, "small", ("MixtralConfig", tiny.GLU | SIZES | {"num_local_experts": 4}))
        model = tiny.make_model(tmp_path / "model", "small")
    given: dict[str, Any] = {"targets": r"model\.layers\.0\.mlp\.experts\..\.w2", "min_expert_tokens": 1, "device_map": "cpu"}
    given |= {"calibration": str(text), "samples": 1, "seqlen": 1}  # so that two of four experts get no token
    for device in ("cpu", "cuda"):
        report = prune(model, output=tmp_path / device, mask_device=device, **given)
        assert len(report["targets"]["scored_by_magnitude"]) == 2
    assert files_of(tmp_path / "cuda") == files_of(tmp_path / "cpu")


def test_float64_masks_are_computed_on_the_cpu(tmp_path: Path, launches: list[torch.Size]) -> None:
    """The kernel supports only 16 and 32 bits; the command still works."""
    model = small_model(tmp_path / "model", torch.float64)
    for device in ("cpu", "cuda"):
        prune(model=model, output=tmp_path / device, method="emp-magnitude", targets="q_proj", mask_device=device)
    assert files_of(tmp_path / "cuda") == files_of(tmp_path / "cpu")
    assert not launches


def test_damaged_weights_are_named(model: Path, tmp_path: Path) -> None:
    name = "model.layers.1.mlp.down_proj"
    spoilt = oracle.edited_copy(model, tmp_path / "spoilt", f"{name}.weight", lambda bits: bits.fill(0x7FC0))
    with pytest.raises(UserError, match=rf"{name}\.weight holds NaN or infinity \(rows 0 to 7\)"):
        prune(model=spoilt, output=tmp_path / "out", method="magnitude", targets=name, mask_device="cuda")
    assert not (tmp_path / "out").exists()


def test_several_blocks_are_on_the_device_at_once(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launches: list[torch.Size]
) -> None:
    """Their order is kept, and their memory is not reused before their copies have finished."""
    monkeypatch.setattr(pruner, "BLOCK_WEIGHTS", 2 * 8)
    options: dict[str, Any] = {"model": model, "method": "emp-magnitude", "targets": "0.mlp.up_proj"}
    for device in ("cpu", "cuda"):
        prune(output=tmp_path / device, mask_device=device, **options)
    assert len(launches) == 12 // 2
    assert files_of(tmp_path / "cuda") == files_of(tmp_path / "cpu")


@pytest.mark.parametrize("failing", [1, 3])
def test_the_cpu_continues_after_a_failure_of_the_gpu(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, failing: int
) -> None:
    """With auto only. The blocks that are on the GPU come first, and the order is kept."""
    calls, enqueue = [0], cuda.enqueue

    def failing_enqueue(*arguments: Any) -> Any:
        calls[0] += 1
        if calls[0] == failing:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.\nAnd more.")
        return enqueue(*arguments)

    monkeypatch.setattr(cuda, "enqueue", failing_enqueue)
    monkeypatch.setattr(pruner, "BLOCK_WEIGHTS", 2 * 8)
    monkeypatch.setattr(mask_device, "_may_have_gpu", lambda: True)
    options: dict[str, Any] = {"model": model, "method": "emp-magnitude", "targets": "0.mlp.up_proj,0.mlp.gate_proj"}
    prune(output=tmp_path / "auto", **options)
    assert calls == [failing], "the GPU is not tried again"
    assert [record.message for record in caplog.records if "masks are decided" in record.message] == [
        f"warning: masks are decided on the CPU, because {DEVICE} fails (CUDA out of memory. Tried to allocate 2.00 MiB)."
    ]
    prune(output=tmp_path / "cpu", mask_device="cpu", **options)
    assert files_of(tmp_path / "auto") == files_of(tmp_path / "cpu")
    calls[0] = 0
    with pytest.raises(UserError, match=rf"--mask-device cuda: out of memory on {DEVICE}\. Free some"):
        prune(output=tmp_path / "cuda", mask_device="cuda", **options)


def test_a_gpu_that_cannot_be_used(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The driver refuses new processes, for instance because another one has reserved the GPU."""

    def refuse(*arguments: Any, **options: Any) -> None:
        raise RuntimeError("CUDA error: all CUDA-capable devices are busy or unavailable\nCompile with ...")

    monkeypatch.setattr(mask_device, "GpuRowPruner", refuse)
    monkeypatch.setattr(mask_device, "_may_have_gpu", lambda: True)
    options: dict[str, Any] = {"model": model, "method": "emp-magnitude", "targets": "q_proj"}
    with pytest.raises(UserError, match=r"the GPU cannot be used \(CUDA error: .* unavailable\)\. Leave the option out"):
        prune(output=tmp_path / "out", mask_device="cuda", **options)
    prune(output=tmp_path / "out", **options)
    assert "masks are decided on the CPU, because the GPU cannot be used (CUDA error" in caplog.text


def test_the_interpreter_is_not_chosen_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert not mask_device._may_have_gpu()


def test_a_sweep_masks_resident_weights_on_the_device(
    model: Path, text: Path, tmp_path: Path, command: Run, launches: list[torch.Size], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Resident weights are copied from rows on the same device; nothing is copied back to the CPU for them."""
    backs: list[bool] = []
    real = GpuRowPruner.prune

    def watched(self: GpuRowPruner, blocks: Any, rule: Any, back: bool = True) -> Any:
        backs.append(back)
        return real(self, blocks, rule, back)

    monkeypatch.setattr(GpuRowPruner, "prune", watched)
    (tmp_path / "judge.txt").write_text(text.read_text()[:2000])
    (tmp_path / "suite.toml").write_text('[perplexity]\nfile = "judge.txt"\nseqlen = 64\n')
    line = ("sweep", "--model", model, "--suite", "suite.toml", "--methods", "emp-magnitude", "--betas", "0.5,1")
    line += ("--targets", "0.self_attn.q_proj", "--device-map", "cpu")
    found = {}
    for device in ("cpu", "cuda"):
        done = command(*line, "--output", tmp_path / device, "--mask-device", device)
        assert done.returncode == 0, done.stderr
        found[device] = done.stdout
    assert launches
    assert backs
    assert not any(backs)
    assert found["cuda"] == found["cpu"], "the same masks give the same table"


def test_a_recipe_that_gpus_do_not_support(model: Path, tmp_path: Path) -> None:
    for options in ({"order": 1.0}, {"neff_dtype": "bfloat16"}):
        given: dict[str, Any] = {"model": model, "output": tmp_path / "out", "method": "emp-magnitude"} | options
        with pytest.raises(UserError, match=r"--mask-device cuda: .*order 2 in float64.*cpu"):
            prune(**given, mask_device="cuda")
        prune(**given, mask_device="auto", targets="q_proj", overwrite=True)


def test_a_machine_without_a_gpu(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(UserError, match="--mask-device cuda: there is no NVIDIA GPU"):
        prune(model=model, output=tmp_path / "out", method="magnitude", mask_device="cuda")
    with pytest.raises(UserError, match="--mask-device 'gpu' is not one of auto, cpu, cuda"):
        prune(model=model, output=tmp_path / "out", method="magnitude", mask_device="gpu")
    prune(model=model, output=tmp_path / "out", method="magnitude")
    assert any((weight == 0).any() for weight in weights_of(tmp_path / "out").values())
