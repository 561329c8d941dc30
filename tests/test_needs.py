"""The estimate of a job's needs: sizes of models from their configs, memory, GPUs, disk and hours."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from measure_needs import highest_memory
from tiny import FAMILIES, MIXTURES

from emp_llm.checkpoint.checkpoint import Checkpoint
from emp_llm.cluster.planning.model_size import ModelSize, conventional_size, model_size, size_of_skeleton
from emp_llm.cluster.planning.needs import assumptions, estimated_needs
from emp_llm.cluster.planning.workload import Work, bytes_per_token, hours_of, size_of_task
from emp_llm.common.errors import UserError
from emp_llm.evaluation.suites import Task, find_suite
from emp_llm.models.loading import build_skeleton

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
    "llama-2-7b": (6738415616, LLAMA),
    "llama-2-70b": (68976648192, LARGE),
    "llama-3-8b": (8030261248, GROUPED | {"vocab_size": 128256}),
    "llama-3.2-1b": (
        1235814400,
        GROUPED
        | {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "head_dim": 64}
        | {"vocab_size": 128256, "tie_word_embeddings": True},
    ),
    "mistral-7b": (7241732096, GROUPED | {"model_type": "mistral"}),
    "qwen2.5-7b": (
        7615616512,
        LLAMA
        | {"model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28}
        | {"num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064},
    ),
    "qwen3-8b": (
        8190735360,
        GROUPED
        | {"model_type": "qwen3", "intermediate_size": 12288, "num_hidden_layers": 36, "head_dim": 128}
        | {"vocab_size": 151936},
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
    assert size.weight_bytes() == sum(tensor.end - tensor.start for tensor in checkpoint.tensors.values())
    assert size.weight_bytes("float32") == 4 * size.parameters
    assert (size.layers, size.hidden_size, size.vocabulary, size.dtype) == (2, 32, 256, "bfloat16")
    assert (size.experts, size.active < size.in_blocks) == ((4, True) if family in MIXTURES else (0, False))
    assert size.widest_input >= (size.hidden_size if family in MIXTURES else 80)
    assert size.largest_block * size.layers == size.in_blocks
    matrices = sum(outputs * inputs * number for outputs, inputs, number in size.shapes)
    assert 0.9 * size.in_blocks < matrices <= size.in_blocks


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"attention_bias": True, "mlp_bias": True},
        {"head_dim": 16, "tie_word_embeddings": True},
        {"num_key_value_heads": 1, "dtype": "float32"},
    ],
)
@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text"])
def test_arithmetic_agrees_with_the_class(kind: str, changes: dict[str, Any], tmp_path: Path) -> None:
    config = LLAMA | {"hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4}
    config |= {"num_key_value_heads": 2, "vocab_size": 256, "head_dim": 8, "model_type": kind, "architectures": None} | changes
    folder = Path(written(tmp_path / kind, config))
    known = conventional_size(kind, config)
    assert known is not None
    found = size_of_skeleton(kind, build_skeleton(folder))
    assert replace(known, shapes=()) == replace(found, shapes=())
    assert sorted(known.shapes) == sorted(found.shapes)


def test_arithmetic_leaves_incomplete_and_other_configs_to_the_class(tmp_path: Path) -> None:
    assert conventional_size("mixtral", KNOWN["mixtral-8x7b"][1]) is None
    for key in ("hidden_size", "max_position_embeddings", "vocab_size"):
        assert conventional_size("a", {name: value for name, value in LLAMA.items() if name != key}) is None
    assert conventional_size("a", LLAMA | {"num_attention_heads": "32"}) is None
    assert conventional_size("a", LLAMA | {"auto_map": {}}) is None
    assert conventional_size("a", LLAMA | {"model_type": "gemma2"}) is None, "its heads have a width of their own"
    sparse = {key: value for key, value in LLAMA.items() if key != "vocab_size"}
    assert model_size(written(tmp_path / "sparse", sparse)).parameters == KNOWN["llama-2-7b"][0]


@pytest.mark.parametrize("name", KNOWN)
def test_published_models_have_their_number_of_parameters(name: str, tmp_path: Path) -> None:
    parameters, config = KNOWN[name]
    size = model_size(written(tmp_path / name, config))
    assert size.parameters == parameters
    assert size.weight_bytes() == size.file_bytes == 2 * parameters
    if name == "mixtral-8x7b":  # 2 of 8 experts
        assert (size.experts, size.active) == (8, size.in_blocks - 32 * 6 * 3 * 4096 * 14336)


def test_tied_embeddings_count_once(seven: ModelSize, tmp_path: Path) -> None:
    tied = model_size(written(tmp_path / "tied", LLAMA | {"tie_word_embeddings": True}))
    assert seven.parameters - tied.parameters == seven.head == tied.head == tied.embeddings == 32000 * 4096


def test_fp8_checkpoints_are_half_as_large(seven: ModelSize, tmp_path: Path) -> None:
    quantised = LLAMA | {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    size = model_size(written(tmp_path / "fp8", quantised))
    assert size.file_bytes == seven.file_bytes - seven.in_blocks


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
    assert said["broken"].startswith(f"{tmp_path}/broken: config.json cannot be read")
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
        "prune": Work(gpu_gb=gpu_gb, calibrates=True, refit=True),
        "evaluate": Work(gpu_gb=gpu_gb, suite=suite),
        "sweep": Work(gpu_gb=gpu_gb, calibrates=True, suite=suite, points=8, keep=True),
    }
    for kind, work in works.items():
        small, large = (estimated_needs(kind, size, work) for size in (seven, seventy))  # type: ignore[arg-type]
        assert small.hours < large.hours
        assert small.memory_gb <= large.memory_gb
        assert small.disk_gb < large.disk_gb or kind == "evaluate"
    more = replace(works["calibrate"], samples=100_000)
    assert hours_of("calibrate", seven, more) > 100 * hours_of("calibrate", seven, works["calibrate"])
    assert estimated_needs("calibrate", seven, replace(more, propagates=True)).memory_gb > 800
    limited = replace(works["evaluate"], limit=10)
    assert hours_of("evaluate", seven, limited) < 0.2 * hours_of("evaluate", seven, works["evaluate"])
    assert hours_of("sweep", seven, replace(works["sweep"], points=80)) > 7 * hours_of("sweep", seven, works["sweep"])
    wide = replace(works["calibrate"], batch_size=64, gpu_gb=0.0)
    assert (
        estimated_needs("calibrate", seven, wide).memory_gb
        > 2 + estimated_needs("calibrate", seven, replace(wide, batch_size=1)).memory_gb
    )
    full = estimated_needs("calibrate", seven, replace(wide, dtype="float32")).memory_gb
    assert full > 13 + estimated_needs("calibrate", seven, wide).memory_gb


def test_tokens_of_a_text_follow_its_size_and_the_vocabulary(tmp_path: Path, seven: ModelSize) -> None:
    assert [round(bytes_per_token(number), 1) for number in (1, 256, 32000, 128256)] == [1.0, 1.0, 3.8, 4.6]
    (tmp_path / "long.txt").write_text("word " * 1_000_000)
    (tmp_path / "own.toml").write_text('[perplexity]\nfile = "long.txt"\n')
    own = hours_of("evaluate", seven, Work(suite=find_suite(str(tmp_path / "own.toml"))))
    text = hours_of("evaluate", seven, Work(suite=find_suite("perplexity")))
    assert 3 < own / text < 5, "5 MB beside 1.3 MB"


def test_tasks_have_the_size_of_their_data() -> None:
    facts, *_, stories = (size_of_task(task) for task in find_suite("demo").tasks)
    assert facts.examples == stories.examples == 240
    assert facts.length < stories.length < stories.longest < 150
    assert size_of_task(Task("rte", num_fewshot=3, limit=100)) == (100, 1, 360, 1400)


def test_assumptions_are_said(seven: ModelSize) -> None:
    suite = replace(find_suite("demo"), tasks=(Task("boolq"), Task("mmlu"), *find_suite("demo").tasks))
    said = "\n".join(assumptions(seven, Work(gpu_gb=80, suite=suite)))
    assert "6,738,415,616 parameters" in said
    assert "Tasks of unknown size (mmlu): 1,000 examples" in said
    assert "80 GB" in said
    assert "GPU" not in "\n".join(assumptions(seven, Work()))


QUICK = """
import sys, time
from pathlib import Path
start = time.process_time()
from emp_llm.cluster.planning.model_size import model_size
from emp_llm.cluster.planning.needs import estimated_needs
from emp_llm.cluster.planning.workload import Work
from emp_llm.evaluation.suites import Task, find_suite
suite = find_suite("paper")
for number in range(2000):
    size = model_size(sys.argv[1 + number % 10])
    estimated_needs("evaluate", size, Work(gpu_gb=80, suite=suite, limit=number + 1))
assert "torch" not in sys.modules, "torch was imported"
print(time.process_time() - start)
"""


def test_two_thousand_estimates_take_little_time(tmp_path: Path) -> None:
    names = [written(tmp_path / str(number), LLAMA | {"num_hidden_layers": 20 + number}) for number in range(10)]
    done = subprocess.run([sys.executable, "-c", QUICK, *names], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 3  # 0.4 s on an idle machine


HOLDS = """
import mmap, subprocess, sys, time
held = b"x" * (50 << 20)
if len(sys.argv) == 1:
    time.sleep(1)
else:
    file = open(sys.argv[1], "rb")
    weights = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    touched = sum(weights[place] for place in range(0, len(weights), 4096))
    subprocess.run([sys.executable, sys.argv[0]], check=True)
"""


@pytest.mark.skipif(not Path("/proc/self/smaps").is_file(), reason="only Linux tells the pages of a process")
def test_measured_memory_is_that_of_processes_and_their_mapped_weights(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(bytes(40 << 20))
    (tmp_path / "hold.py").write_text(HOLDS)
    found = highest_memory([sys.executable, str(tmp_path / "hold.py"), str(tmp_path / "a.safetensors")], tmp_path / "log")
    assert found["weights"] == 40 << 20
    assert 100 << 20 < found["own"] < 140 << 20, "the process and its child"
    assert found["sum"] == found["own"] + found["weights"]
    with pytest.raises(SystemExit, match="failed"):
        highest_memory([sys.executable, "-c", "raise SystemExit(3)"], tmp_path / "log")
