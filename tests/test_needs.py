"""The estimate of a job's needs: sizes of models from their configs, memory, GPUs, disk and hours."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from measure_calibration import SHAPES
from tiny import FAMILIES, MIXTURES

from emp_llm.checkpoint.checkpoint import Checkpoint
from emp_llm.cluster.needs import ModelSize, Work, assumptions, estimated_needs, model_size
from emp_llm.common.errors import UserError
from emp_llm.evaluation.suites import find_suite

Models = Callable[[str], Path]

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "torch_dtype": "float16",
}
GROUPED = LLAMA | {"num_key_value_heads": 8, "intermediate_size": 14336}
LARGE = GROUPED | {"hidden_size": 8192, "num_attention_heads": 64, "intermediate_size": 28672, "num_hidden_layers": 80}
# Parameters of published models.
KNOWN: dict[str, tuple[int, dict[str, Any]]] = {
    "llama-1-7b": (6738415616, {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}),
    "llama-2-70b": (68976648192, LARGE),
    "llama-3.2-1b": (
        1235814400,
        GROUPED
        | {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "head_dim": 64}
        | {"vocab_size": 128256, "tie_word_embeddings": True},
    ),
    "gemma-2-9b": (
        9241705984,
        LLAMA
        | {"model_type": "gemma2", "hidden_size": 3584, "intermediate_size": 14336, "num_hidden_layers": 42}
        | {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256, "vocab_size": 256000},
    ),
    "mixtral-8x7b": (
        46702792704,
        GROUPED | {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2},
    ),
}


def written(folder: Path, config: dict[str, Any]) -> str:
    """A model folder that holds only a config.json."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.fixture
def seven(tmp_path: Path) -> ModelSize:
    return model_size(written(tmp_path / "seven", LLAMA))


@pytest.fixture
def seventy(tmp_path: Path) -> ModelSize:
    return model_size(written(tmp_path / "seventy", LARGE))


@pytest.mark.parametrize("family", FAMILIES)
def test_counts_are_those_of_the_checkpoint(family: str, models: Models) -> None:
    folder = models(family)
    size, checkpoint = model_size(str(folder)), Checkpoint(folder)
    assert size.parameters == checkpoint.parameters
    assert size.file_bytes == sum(tensor.end - tensor.start for tensor in checkpoint.tensors.values())
    assert (size.hidden_size, size.vocabulary, size.dtype, size.itemsize("float32")) == (32, 256, "bfloat16", 4)
    assert (size.active < size.parameters) == (family in MIXTURES)
    assert size.widest >= (size.hidden_size if family in MIXTURES else 80)
    assert size.largest_block * 2 == size.in_blocks


@pytest.mark.parametrize("name", KNOWN)
def test_published_models_have_their_number_of_parameters(name: str, tmp_path: Path) -> None:
    parameters, config = KNOWN[name]
    size = model_size(written(tmp_path / name, config))
    assert size.parameters == parameters
    assert size.file_bytes == 2 * parameters
    idle = 32 * 6 * 3 * 4096 * 14336 if name == "mixtral-8x7b" else 0  # 2 of 8 experts
    assert size.parameters - size.active == idle


def test_missing_and_unreadable_configs_are_named(tmp_path: Path) -> None:
    cases = {"none": None, "broken": "{", "unknown": '{"model_type": "nonesuch"}'}
    said = {}
    for name, content in cases.items():
        (tmp_path / name).mkdir()
        if content is not None:
            (tmp_path / name / "config.json").write_text(content)
        with pytest.raises(UserError) as error:
            model_size(str(tmp_path / name))
        said[name] = str(error.value)
    assert said["none"] == f"{tmp_path}/none: no config.json, so its architecture is unknown. Copy it from the original model."
    assert said["broken"].startswith(f"{tmp_path}/broken/config.json: cannot be read")
    assert "does not know the model type 'nonesuch'" in said["unknown"]
    with pytest.raises(UserError, match="no such model folder"):
        model_size(str(tmp_path / "nothing"))
    with pytest.raises(UserError, match=r"found no decoder blocks|no causal language model"):
        model_size(written(tmp_path / "vision", {"model_type": "vit"}))


def test_a_large_model_takes_several_gpus(seven: ModelSize, seventy: ModelSize) -> None:
    work = Work(gpu_gb=80, suite=find_suite("paper"))
    needs = estimated_needs("evaluate", seventy, work)
    assert (needs.gpus, needs.gpu_gb, needs.processes) == (2, 80, 1)
    assert needs.memory_gb < 20, "the weights are on the GPUs"
    assert estimated_needs("evaluate", seventy, replace(work, gpu_gb=24)).gpus > 6
    assert estimated_needs("evaluate", seventy, replace(work, dtype="float32")).gpus in (4, 5)
    assert estimated_needs("evaluate", seven, work).gpus == 1
    assert estimated_needs("evaluate", seven, replace(work, processes=4)).gpus == 4
    with pytest.raises(UserError, match=r"138 GB, and each of 2 processes holds them on one GPU of 80 GB"):
        estimated_needs("evaluate", seventy, replace(work, processes=2))
    with pytest.raises(UserError, match=r"with blocks of 1\.7 GB .* more than 64 GPUs of 2 GB hold"):
        estimated_needs("evaluate", seventy, replace(work, gpu_gb=2))


def test_a_prune_from_activations_needs_no_gpu_and_little_memory(seventy: ModelSize) -> None:
    needs = estimated_needs("prune", seventy, Work(gpu_gb=80))
    assert (needs.gpus, needs.gpu_gb) == (0, 0)
    assert needs.memory_gb < 1
    assert 138 < needs.disk_gb < 140
    calibrating = estimated_needs("prune", seventy, Work(gpu_gb=80, calibrates=True))
    assert calibrating.gpus == 2


@pytest.mark.parametrize("gpu_gb", [0.0, 80.0])
def test_needs_grow_with_the_model_and_the_text(gpu_gb: float, seven: ModelSize, seventy: ModelSize) -> None:
    suite = find_suite("paper")
    works = {
        "calibrate": Work(gpu_gb=gpu_gb, calibrates=True),
        "prune": Work(gpu_gb=gpu_gb, calibrates=True, updates=True),
        "evaluate": Work(gpu_gb=gpu_gb, suite=suite),
        "sweep": Work(gpu_gb=gpu_gb, calibrates=True, suite=suite, points=8),
    }
    for kind, work in works.items():
        small, large = (estimated_needs(kind, size, work) for size in (seven, seventy))  # type: ignore[arg-type]
        assert small.hours < large.hours
        assert small.memory_gb <= large.memory_gb
        assert small.disk_gb < large.disk_gb or kind == "evaluate"

    def hours(kind: Any, work: Work) -> float:
        return estimated_needs(kind, seven, work).hours

    more = replace(works["calibrate"], samples=100_000)
    assert hours("calibrate", more) > 50 * hours("calibrate", works["calibrate"])
    assert estimated_needs("calibrate", seven, replace(more, propagates=True)).memory_gb > 800
    assert hours("evaluate", replace(works["evaluate"], limit=10)) < 0.3 * hours("evaluate", works["evaluate"])
    assert hours("sweep", replace(works["sweep"], points=80)) > 7 * hours("sweep", works["sweep"])
    wide = replace(works["calibrate"], batch_size=64, gpu_gb=0.0)
    narrow = replace(wide, batch_size=1)
    assert estimated_needs("calibrate", seven, wide).memory_gb > 2 + estimated_needs("calibrate", seven, narrow).memory_gb
    full = estimated_needs("calibrate", seven, replace(wide, dtype="float32")).memory_gb
    assert full > 13 + estimated_needs("calibrate", seven, wide).memory_gb


def test_a_longer_text_takes_longer(tmp_path: Path, seven: ModelSize) -> None:
    (tmp_path / "long.txt").touch()
    os.truncate(tmp_path / "long.txt", 100_000_000)
    (tmp_path / "own.toml").write_text('[perplexity]\nfile = "long.txt"\n')
    own = estimated_needs("evaluate", seven, Work(suite=find_suite(str(tmp_path / "own.toml")))).hours
    assert own > 50 * estimated_needs("evaluate", seven, Work(suite=find_suite("perplexity"))).hours


def test_assumptions_are_said(seven: ModelSize) -> None:
    said = "\n".join(assumptions(seven, Work(gpu_gb=80, suite=find_suite("demo"))))
    assert "6,738,415,616 parameters" in said
    assert "A task: 2,500 examples of 4 answers, 100 tokens each" in said
    assert "80 GB" in said
    assert "GPU" not in "\n".join(assumptions(seven, Work()))


# What scripts/measure_needs.py measured in GB: model, job, memory. The estimates are within 15 %.
MEASURED = [
    ("1B", "calibrate", Work(calibrates=True, samples=4, seqlen=128), 2.43),
    ("1B", "calibrate", Work(calibrates=True, samples=4, seqlen=512, dtype="float32"), 5.19),
    ("1B", "prune", Work(), 0.43),
    ("1B", "prune", Work(calibrates=True, samples=4, seqlen=128, propagates=True), 2.61),
    ("3B", "calibrate", Work(calibrates=True, samples=4, seqlen=128), 6.36),
    ("3B", "prune", Work(calibrates=True, samples=4, seqlen=128), 6.31),
]


@pytest.mark.parametrize(("model", "kind", "work", "measured"), MEASURED)
def test_estimates_are_near_what_was_measured(model: str, kind: Any, work: Work, measured: float, tmp_path: Path) -> None:
    config = LLAMA | SHAPES[model] | {"torch_dtype": "bfloat16"}
    size = model_size(written(tmp_path / model, config))
    assert estimated_needs(kind, size, work).memory_gb == pytest.approx(measured, rel=0.15)
