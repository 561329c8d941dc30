"""The estimate of a job's needs: sizes of models from their configs, memory, GPUs, disk and
hours.
"""

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
from emp_llm.cluster.planning import ModelSize, Work, assumptions, estimated_needs, model_size
from emp_llm.common.errors import UserError
from emp_llm.evaluation.suites import find_suite

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
}
LLAMA |= {
    "architectures": ["LlamaForCausalLM"],
    "num_attention_heads": 32,
    "vocab_size": 32000,
    "torch_dtype": "float16",
}
LLAMA |= {"num_key_value_heads": 32, "max_position_embeddings": 4096}
LARGE = LLAMA | {
    "hidden_size": 8192,
    "num_attention_heads": 64,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
}
LARGE |= {"num_key_value_heads": 8}


def size_of(folder: Path, config: dict[str, Any] | str) -> ModelSize:
    """The size of a model whose folder holds only a config.json."""
    folder.mkdir()
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return model_size(str(folder))


@pytest.fixture
def seven(tmp_path: Path) -> ModelSize:
    return size_of(tmp_path / "seven", LLAMA)


@pytest.fixture
def seventy(tmp_path: Path) -> ModelSize:
    return size_of(tmp_path / "seventy", LARGE)


@pytest.mark.parametrize("family", FAMILIES)
def test_counts_are_those_of_the_checkpoint(family: str, models: Callable[[str], Path]) -> None:
    folder = models(family)
    size = model_size(str(folder))
    checkpoint = Checkpoint(folder)
    assert size.parameters == checkpoint.parameters
    assert size.file_bytes == sum(
        tensor.end - tensor.start for tensor in checkpoint.tensors.values()
    )
    assert (size.hidden_size, size.vocabulary, size.dtype, size.itemsize("float32")) == (
        32,
        256,
        "bfloat16",
        4,
    )
    assert (size.active < size.parameters) == (family in MIXTURES)
    assert size.widest >= (size.hidden_size if family in MIXTURES else 80)
    assert size.largest_block * 2 == size.in_blocks


def test_missing_and_unreadable_configs_are_named(tmp_path: Path) -> None:
    for name, config, said in (
        ("broken", "{", r"broken/config.json: cannot be read"),
        ("unknown", '{"model_type": "nonesuch"}', "does not know the model type 'nonesuch'"),
        ("vision", '{"model_type": "vit"}', r"found no decoder blocks|no causal language model"),
    ):
        with pytest.raises(UserError, match=said):
            size_of(tmp_path / name, config)
    (tmp_path / "none").mkdir()
    with pytest.raises(
        UserError,
        match=r"none: no config.json, so its architecture is unknown. "
        r"Copy it from the original",
    ):
        model_size(str(tmp_path / "none"))
    with pytest.raises(UserError, match="no such model folder"):
        model_size(str(tmp_path / "nothing"))


def test_what_a_job_would_refuse_is_not_planned(tmp_path: Path) -> None:
    """Targets that no layer has; an update, where blocks read the keys and values of others."""
    config = {
        "model_type": "gemma3n_text",
        "num_kv_shared_layers": 15,
        "architectures": ["Gemma3nForCausalLM"],
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"--targets 'mlp.nonesuch' match none of its layers"):
        model_size(str(tmp_path), targets="mlp.nonesuch")
    with pytest.raises(
        UserError,
        match=r"--refit runs block by block, and the model's last blocks "
        r"read the keys and values",
    ):
        model_size(str(tmp_path), moves_by="--refit")
    assert model_size(str(tmp_path)).parameters > 1e9


def test_a_large_model_takes_several_gpus(seven: ModelSize, seventy: ModelSize) -> None:
    assert (seven.parameters, seventy.parameters) == (6738415616, 68976648192), "of Llama 2"
    work = Work(gpu_gb=80, suite=find_suite("paper"))
    needs = estimated_needs("evaluate", seventy, work)
    assert (needs.gpus, needs.gpu_gb, needs.processes) == (2, 80, 1)
    assert needs.memory_gb < 20, "the weights are on the GPUs"
    assert estimated_needs("evaluate", seventy, replace(work, gpu_gb=24)).gpus > 6
    assert estimated_needs("evaluate", seventy, replace(work, dtype="float32")).gpus in (4, 5)
    assert estimated_needs("evaluate", seven, work).gpus == 1
    assert estimated_needs("evaluate", seven, replace(work, processes=4)).gpus == 4
    with pytest.raises(
        UserError,
        match=r"138 GB, and each of 2 processes holds them on one GPU of "
        r"80 GB",
    ):
        estimated_needs("evaluate", seventy, replace(work, processes=2))
    with pytest.raises(
        UserError,
        match=r"with blocks of 1\.7 GB .* more than 64 GPUs of 2 GB "
        r"hold",
    ):
        estimated_needs("evaluate", seventy, replace(work, gpu_gb=2))


def test_a_prune_from_activations_needs_no_gpu_and_little_memory(seventy: ModelSize) -> None:
    needs = estimated_needs("prune", seventy, Work(gpu_gb=80))
    assert (needs.gpus, needs.gpu_gb) == (0, 0)
    assert needs.memory_gb < 1
    assert 138 < needs.disk_gb < 140
    assert estimated_needs("prune", seventy, Work(gpu_gb=80, calibrates=True)).gpus == 2


@pytest.mark.parametrize("gpu_gb", [0.0, 80.0])
def test_needs_grow_with_the_model_and_the_text(
    gpu_gb: float, seven: ModelSize, seventy: ModelSize, tmp_path: Path
) -> None:
    calibrates = Work(gpu_gb=gpu_gb, calibrates=True)
    evaluates = Work(gpu_gb=gpu_gb, suite=find_suite("paper"))
    sweeps = replace(evaluates, calibrates=True, points=8)
    works: dict[Any, Work] = {"calibrate": calibrates, "prune": replace(calibrates, updates=True)}
    for kind, work in (works | {"evaluate": evaluates, "sweep": sweeps}).items():
        small, large = (estimated_needs(kind, size, work) for size in (seven, seventy))
        assert small.hours < large.hours
        assert small.memory_gb <= large.memory_gb
        assert small.disk_gb < large.disk_gb or kind == "evaluate"

    def hours(kind: Any, work: Work) -> float:
        return estimated_needs(kind, seven, work).hours

    def memory(work: Work) -> float:
        return estimated_needs("calibrate", seven, work).memory_gb

    more = replace(calibrates, samples=100_000)
    assert hours("calibrate", more) > 50 * hours("calibrate", calibrates)
    assert memory(replace(more, propagates=True)) > 800
    assert hours("evaluate", replace(evaluates, limit=10)) < 0.3 * hours("evaluate", evaluates)
    assert hours("sweep", replace(sweeps, points=80)) > 7 * hours("sweep", sweeps)
    wide = replace(calibrates, batch_size=64, gpu_gb=0.0)
    assert memory(wide) > 2 + memory(replace(wide, batch_size=1))
    assert memory(replace(wide, dtype="float32")) > 13 + memory(wide)
    (tmp_path / "long.txt").touch()
    os.truncate(tmp_path / "long.txt", 100_000_000)
    (tmp_path / "own.toml").write_text('[perplexity]\nfile = "long.txt"\n')
    short = replace(evaluates, gpu_gb=0.0, suite=find_suite("perplexity"))
    own = find_suite(str(tmp_path / "own.toml"))
    assert hours("evaluate", replace(short, suite=own)) > 50 * hours("evaluate", short)


def test_healing_needs_room_for_the_optimiser(seven: ModelSize) -> None:
    heals = Work(gpu_gb=80, calibrates=True, heals=300)
    needs, without = (
        estimated_needs("prune", seven, work) for work in (heals, replace(heals, heals=0))
    )
    assert (needs.gpus, without.gpus) == (2, 1)
    assert needs.hours > 2 * without.hours
    assert needs.disk_gb - without.disk_gb == pytest.approx(28 * seven.in_blocks / 1e9, rel=0.05), (
        "checkpoints of the training"
    )


def test_assumptions_are_said(seven: ModelSize) -> None:
    said = "\n".join(assumptions(seven, Work(gpu_gb=80, suite=find_suite("demo"))))
    assert "6,738,415,616 parameters" in said
    assert "A task: 2,500 examples of 4 answers, 100 tokens each" in said
    assert "80 GB" in said
    assert "GPU" not in "\n".join(assumptions(seven, Work()))


SAMPLES = Work(calibrates=True, samples=4, seqlen=128)
# What scripts/measure_needs.py measured in GB: model, job, memory. The estimates are within 15 %.
MEASURED = [
    ("1B", "calibrate", SAMPLES, 2.43),
    ("1B", "calibrate", replace(SAMPLES, seqlen=512, dtype="float32"), 5.19),
    ("1B", "prune", Work(), 0.43),
    ("1B", "prune", replace(SAMPLES, propagates=True), 2.61),
    ("3B", "calibrate", SAMPLES, 6.36),
    ("3B", "prune", SAMPLES, 6.31),
]


@pytest.mark.parametrize(("model", "kind", "work", "measured"), MEASURED)
def test_estimates_are_near_what_was_measured(
    model: str, kind: Any, work: Work, measured: float, tmp_path: Path
) -> None:
    size = size_of(tmp_path / model, LLAMA | SHAPES[model] | {"torch_dtype": "bfloat16"})
    assert estimated_needs(kind, size, work).memory_gb == pytest.approx(measured, rel=0.15)
