"""`export`: a checkpoint as a GGUF file, read back by two other programs, transformers and
llama.cpp (if it is installed); and its errors.
"""

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from conftest import Run
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from emp_llm import export, heal, prune, runtime
from emp_llm.common.errors import UserError
from emp_llm.records.base import read_record
from emp_llm.records.run_report import RunReport
from emp_llm.reporting.card import card_text, find_origin

gguf = pytest.importorskip("gguf")
gguf_file = pytest.importorskip("emp_llm.runtime.gguf_file")
TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1")
DEMO = Path(__file__).parents[1] / "scripts" / "demo" / "model"
BASE = {
    "vocab_size": 1536,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 64,
    "short_factor": [1.0 + place / 10 for place in range(8)],
    "long_factor": [2.0 + place / 5 for place in range(8)],
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama, tied": ("LlamaConfig", {"tie_word_embeddings": True}),
    "llama, long": ("LlamaConfig", {"rope_parameters": LLAMA3}),
    "llama, linear": (
        "LlamaConfig",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    ),
    "llama, yarn": ("LlamaConfig", {"rope_parameters": YARN}),
    "llama, biases": ("LlamaConfig", {"attention_bias": True}),
    "mistral": ("MistralConfig", {"sliding_window": None, "head_dim": 32}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 12, "sliding_window": None}),
    "qwen2": ("Qwen2Config", {}),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        EXPERTS | {"num_experts": 4, "shared_expert_intermediate_size": 64},
    ),
    "qwen3": ("Qwen3Config", {"head_dim": 32}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        EXPERTS | {"num_experts": 12, "head_dim": 16, "norm_topk_prob": True},
    ),
    "gemma": ("GemmaConfig", {"head_dim": 16, "tie_word_embeddings": True}),
    "gemma2": (
        "Gemma2Config",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "sliding_window": 32,
            "tie_word_embeddings": True,
        },
    ),
    "phi3": ("Phi3Config", {"sliding_window": None}),
    "phi3, long": (
        "Phi3Config",
        {
            "sliding_window": None,
            "rope_parameters": LONG,
            "original_max_position_embeddings": 64,
        },
    ),
}
# transformers reads others too, without their sizes.
READ_BY_TRANSFORMERS = ("llama", "llama, tied", "qwen2", "phi3")
Make = Callable[[str], Path]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """The folder of a random model with the demo model's tokenizer; made once."""
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            config_class, values = MODELS[name]
            config = getattr(transformers, config_class)(**(BASE | values))
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    torch.nn.init.normal_(parameter, std=0.08)
                else:
                    mean = 0.0 if "gemma" in name else 1.0
                    torch.nn.init.normal_(parameter, mean, 0.2)
            path = tmp_path_factory.mktemp("models") / "random"  # llama.cpp reads names
            model.save_pretrained(path, max_shard_size="200KB")
            for file in ("tokenizer.json", "tokenizer_config.json"):
                shutil.copy(DEMO / file, path / file)
            made[name] = path
        return made[name]

    return folder


def load(folder: Path, **more: Any) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, **more
    )
    return model.eval()


def logits_of(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        return model(tokens, use_cache=False).logits[0]  # type: ignore[no-any-return]


def logits_in_llama_cpp(path: Path) -> Tensor:
    """The logits of `TOKENS`; skips where llama-cpp-python is not installed."""
    engine = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    model = engine.Llama(str(path), n_ctx=256, logits_all=True, verbose=False, n_threads=1)
    model.eval(TOKENS[0].tolist())
    return torch.from_numpy(model.scores[: TOKENS.shape[1]])


TOKENS = torch.randint(2, 1536, (1, 100), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", READ_BY_TRANSFORMERS)
def test_transformers_reads_the_same_model(name: str, make: Make, tmp_path: Path) -> None:
    folder = make(name)
    found = export(str(folder), type="f32", output=tmp_path / "model.gguf")
    assert found.bytes == (tmp_path / "model.gguf").stat().st_size
    read = load(tmp_path, gguf_file="model.gguf")
    assert torch.equal(logits_of(read, TOKENS), logits_of(load(folder), TOKENS))


@pytest.mark.parametrize("name", MODELS)
def test_llama_cpp_computes_the_same(name: str, make: Make, tmp_path: Path) -> None:
    folder = make(name)
    export(str(folder), type="f32", output=tmp_path / "model.gguf")
    wanted = logits_of(load(folder), TOKENS)
    found = logits_in_llama_cpp(tmp_path / "model.gguf")
    torch.testing.assert_close(found, wanted, atol=2e-3, rtol=2e-3)


def test_llama_cpp_reads_the_tokenizer_and_writes_the_same_text(tmp_path: Path) -> None:
    engine = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    export(str(DEMO), type="f32", output=tmp_path / "demo.gguf")
    read = engine.Llama(str(tmp_path / "demo.gguf"), n_ctx=128, verbose=False, n_threads=1)
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    text = "The market of Hazelbridge opens at 7:45 – naïve, isn't it?"
    tokens = tokenizer(text).input_ids
    assert read.tokenize(text.encode(), add_bos=False) == tokens
    model = load(DEMO)
    prompt = tokenizer("The market of", return_tensors="pt")
    wanted = model.generate(**prompt, max_new_tokens=24, do_sample=False)[0]
    found = read.create_completion("The market of", max_tokens=24, temperature=0.0)
    assert found["choices"][0]["text"] == tokenizer.decode(
        wanted[prompt.input_ids.shape[1] :], skip_special_tokens=True
    )


@pytest.mark.parametrize("type_name", TYPES)
def test_every_type(type_name: str, make: Make, tmp_path: Path) -> None:
    """Matrices have the type; norms are exact; in four bits, embeddings have eight."""
    folder = make("llama")
    path = tmp_path / "model.gguf"
    export(str(folder), type=type_name, output=path)  # type: ignore[arg-type]
    weights = load(folder).state_dict()
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    assert tensors["blk.0.ffn_down.weight"].tensor_type.name == type_name.upper()
    embeddings = "Q8_0" if type_name.startswith("q4") else type_name.upper()
    assert tensors["token_embd.weight"].tensor_type.name == embeddings
    norm = tensors["blk.1.attn_norm.weight"]
    assert norm.tensor_type.name == "F32"
    assert torch.equal(torch.tensor(norm.data), weights["model.layers.1.input_layernorm.weight"])
    down = tensors["blk.2.ffn_down.weight"]
    read = torch.tensor(gguf.quants.dequantize(down.data, down.tensor_type))
    stored = weights["model.layers.2.mlp.down_proj.weight"]
    error = {"f32": 0.0, "f16": 1e-3, "bf16": 1e-2, "q8_0": 1e-2, "q4_0": 0.15, "q4_1": 0.15}
    assert (read - stored).norm() <= error[type_name] * stored.norm()


def test_a_window_bounds_the_context(tmp_path: Path, make: Make) -> None:
    """llama.cpp's Llama attends to all tokens, which is Mistral within its window."""
    folder = tmp_path / "window"
    shutil.copytree(make("mistral"), folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"sliding_window": 64}))
    export(str(folder), output=tmp_path / "window.gguf")
    fields = gguf.GGUFReader(tmp_path / "window.gguf").fields
    assert fields["llama.context_length"].contents() == 64


def test_a_pruned_model_says_where_it_comes_from(tmp_path: Path) -> None:
    parameters = 2_400_000
    narrow = tmp_path / "narrow"
    prune(
        model=DEMO,
        output=narrow,
        structure="neurons",
        method="magnitude",
        parameters=str(parameters),
    )
    export(str(narrow), output=tmp_path / "narrow.gguf")
    reader = gguf.GGUFReader(tmp_path / "narrow.gguf")
    fields = {name: field.contents() for name, field in reader.fields.items()}
    assert fields["general.architecture"] == "llama"
    assert fields["general.base_model.0.name"] == DEMO.name
    assert fields["general.file_type"] == gguf.LlamaFileType.MOSTLY_BF16
    report = json.loads(fields["emp_llm.report"])
    assert "structure" in report
    config = json.loads((narrow / "config.json").read_text())
    assert fields["llama.feed_forward_length"] == config["intermediate_size"]
    assert fields["tokenizer.ggml.model"] == "gpt2"
    assert fields["tokenizer.ggml.pre"] == "gpt-2"
    assert not fields["tokenizer.ggml.add_bos_token"]


@pytest.fixture(scope="module", params=["heads", "neurons", "both"])
def per_layer(
    short_demo: Path, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A model whose layers have their own numbers of heads or neurons."""
    options = {"heads": {"sparsity": 0.3}, "both": {"sparsity": 0.4}}.get(request.param, {})
    folder = tmp_path_factory.mktemp("own") / request.param
    prune(
        model=short_demo,
        output=folder,
        structure=request.param,
        per_layer=True,
        structure_group="all",
        method="magnitude" if options else "emp-magnitude",
        **({} if request.param == "heads" else {"width_multiple": 8}),
        **options,
    )
    return folder


def test_own_widths_of_each_layer(per_layer: Path, command: Run, tmp_path: Path) -> None:
    """emp-llm loads, verifies, evaluates, prunes and exports such a model."""
    config = json.loads((per_layer / "config.json").read_text())
    widths = config["per_layer_config"]
    assert len({json.dumps(each) for each in widths.values()}) > 1
    report = json.loads((per_layer / "emp_report.json").read_text())
    assert any("transformers' own classes do not load that yet" in w for w in report["warnings"])
    command("verify", per_layer)
    suite = f"perplexity,file={DEMO.parents[2] / 'eval' / 'demo' / 'heldout.txt'},seqlen=128"
    command("evaluate", "--model", per_layer, "--suite", suite, "--limit", 2, "--output", "e.json")
    zeros = tmp_path / "zeros"
    prune(model=per_layer, output=zeros, method="magnitude", targets="all-linear")
    assert json.loads((zeros / "config.json").read_text()) == config
    again = command(
        "prune", "--model", per_layer, "--structure", "neurons", "--output", "x", code=2
    )
    assert "its layers differ in width already" in again.stderr
    command("export", per_layer, "--output", "own.gguf")
    fields = gguf.GGUFReader(tmp_path / "own.gguf").fields
    assert fields["general.architecture"].contents() == "deci"
    name, field = next(
        (name, field)
        for name, field in (
            ("feed_forward_length", "intermediate_size"),
            ("attention.head_count_kv", "num_key_value_heads"),
        )
        if field in widths["0"]
    )
    wanted = [widths[str(layer)][field] for layer in range(3)]
    assert fields[f"deci.{name}"].contents() == wanted


def test_the_card_says_what_loads_own_widths(per_layer: Path) -> None:
    report = read_record(per_layer / "emp_report.json", RunReport)
    origin = find_origin(report.source)
    card = card_text("me/own", None, report, origin, [], None, [], [])
    assert "Its layers differ in width (`per_layer_config`)" in card
    assert 'model = load("me/own")' in card
    assert "AutoModelForCausalLM" not in card


def test_llama_cpp_computes_layers_of_their_own_widths(per_layer: Path, tmp_path: Path) -> None:
    export(str(per_layer), type="f32", output=tmp_path / "own.gguf")
    wanted = logits_of(runtime.load(per_layer, dtype="float32"), TOKENS)
    found = logits_in_llama_cpp(tmp_path / "own.gguf")
    torch.testing.assert_close(found, wanted, atol=1e-2, rtol=1e-2)


def test_layers_of_their_own_widths_heal(short_demo: Path, tmp_path: Path) -> None:
    pruned = tmp_path / "pruned"
    text = {"calibration": "demo", "samples": 16, "seqlen": 32}
    options = {"structure": "neurons", "method": "emp-wanda", "width_multiple": 8, "refit": True}
    prune(model=short_demo, output=pruned, per_layer=True, **options, **text)
    report = heal(pruned, dense=short_demo, output=tmp_path / "healed", heal_steps=2, **text)
    assert report.healing is not None
    assert report.healing.steps == 2


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("--structure layers --per-layer", "--per-layer is for heads and neurons"),
        ("--structure neurons --keep-shapes --per-layer", "Leave out --per-layer"),
        ("--per-layer", "--per-layer has no effect without --structure"),
    ],
)
def test_per_layer_where_it_means_nothing(line: str, sentence: str, command: Run) -> None:
    result = command("prune", "--model", DEMO, *line.split(), "--output", "out", code=2)
    assert sentence in result.stderr


def test_zeros_are_stored_and_said_so(command: Run, tmp_path: Path) -> None:
    folder = tmp_path / "zeros"
    prune(model=DEMO, output=folder, method="magnitude", sparsity=0.5)
    result = command("export", folder, "--type", "f16")
    assert "50 % of the pruned layers are zeros, and GGUF stores them" in result.stderr
    assert (tmp_path / "zeros-f16.gguf").is_file()
    assert "zeros-f16.gguf: " in result.stdout
    again = command("export", folder, "--type", "f16", code=2)
    assert "it exists; name another file, or add --overwrite" in again.stderr


def changed(make: Make, tmp_path: Path, file: str, **values: Any) -> Path:
    """A copy of a model with other values in a JSON file; None deletes the file."""
    folder = tmp_path / "changed"
    shutil.copytree(make("llama"), folder)
    path = folder / file
    if not values:
        path.unlink()
    else:
        path.write_text(json.dumps(json.loads(path.read_text()) | values))
    return folder


@pytest.mark.parametrize(
    ("file", "values", "sentence"),
    [
        (
            "config.json",
            {"model_type": "gpt2"},
            "its model_type is gpt2, and --to gguf knows llama, ",
        ),
        ("config.json", {"model_type": 7}, "its model_type is 7"),
        (
            "config.json",
            {"quantization_config": {"quant_method": "fp8"}},
            "its weights are quantised already",
        ),
        (
            "config.json",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "llama.cpp has no name for the rope_type dynamic of config.json",
        ),
        ("config.json", {"hidden_act": "relu"}, "hidden_act is 'relu' in config.json"),
        ("tokenizer.json", {}, "it has no tokenizer.json"),
        ("tokenizer.json", {"model": {"type": "Unigram"}}, "a tokenizer of the type Unigram"),
        (
            "tokenizer.json",
            {"pre_tokenizer": {"type": "Whitespace"}},
            "it splits a text in a way that --to gguf has no name for",
        ),
    ],
)
def test_what_cannot_be_exported(
    file: str, values: dict[str, Any], sentence: str, make: Make, tmp_path: Path
) -> None:
    folder = changed(make, tmp_path, file, **values)
    with pytest.raises(UserError) as caught:
        export(str(folder), output=tmp_path / "x.gguf")
    assert sentence in str(caught.value)
    assert not list(tmp_path.glob("*.gguf"))
    assert not list(tmp_path.glob(".*"))


def test_other_errors(
    make: Make, tmp_path: Path, command: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make("llama")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "gguf", None)
        patch.delitem(sys.modules, "emp_llm.runtime.gguf_file")
        missing = command("export", folder, code=2)
        assert "pip install gguf" in missing.stderr
    command("pack", folder, "packed")
    result = command("export", "packed", code=2)
    assert "Unpack it first" in result.stderr
    result = command("export", folder, "--to", "onnx", code=2)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 10, 0))
        with pytest.raises(UserError, match="the disk has 0 B free"):
            export(str(folder), output=tmp_path / "x.gguf")


def test_an_export_is_on_disk_before_it_has_its_name(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []
    sync = gguf_file.sync_path
    rename = os.replace

    def synced(path: Path) -> None:
        steps.append(f"sync {path.name.rpartition('.')[2]}")
        sync(path)

    def renamed(source: Any, target: Any) -> None:
        steps.append(f"name {Path(target).name.rpartition('.')[2]}")
        rename(source, target)

    monkeypatch.setattr(gguf_file, "sync_path", synced)
    monkeypatch.setattr(os, "replace", renamed)
    monkeypatch.setattr(gguf_file, "_NOTED", 1)
    export(str(make("llama")), output=tmp_path / "x.gguf")
    assert steps[-2:] == ["sync partial", "name gguf"]
    assert not gguf_file.partials(tmp_path / "x.gguf")
    # Each note follows a flush of what it notes.
    assert steps[:-2] == ["sync partial", "name partial"] * (len(steps) // 2 - 1)
    assert len(steps) > 4


def _killed(*_: Any) -> None:
    raise KeyboardInterrupt


def test_an_interrupted_export_resumes(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After its last whole tensor, with the same bytes; another type or a changed shard starts
    again.
    """
    folder = make("llama")
    wanted = tmp_path / "wanted.gguf"
    output = tmp_path / "x.gguf"
    export(str(folder), output=wanted)
    read = gguf_file.GGUFTensor.read
    names: list[str] = []

    def full_at_the_fifth(tensor: Any, files: Any) -> Any:
        names.append(tensor.name)
        if len(names) == 5:
            raise OSError(28, "No space left on device")
        return read(tensor, files)

    def interrupted(**options: Any) -> None:
        names.clear()
        with monkeypatch.context() as patch:
            patch.setattr(gguf_file.GGUFTensor, "read", full_at_the_fifth)
            with pytest.raises(UserError, match=r"x\.gguf"):
                export(str(folder), output=output, **options)
        assert not output.exists()
        names.clear()

    def seen(tensor: Any, files: Any) -> Any:
        names.append(tensor.name)
        return read(tensor, files)

    monkeypatch.setattr(gguf_file.GGUFTensor, "read", seen)
    interrupted()
    tensors = export(str(folder), output=output).tensors
    assert output.read_bytes() == wanted.read_bytes()
    assert len(names) == tensors - 4
    output.unlink()

    interrupted(type="f16")
    export(str(folder), output=output)
    assert output.read_bytes() == wanted.read_bytes()
    assert len(names) == tensors
    output.unlink()

    # After a loss of power: blocks of zeros within the size, and no note of them.
    interrupted()
    (partial,) = (path for path in gguf_file.partials(output) if ".size." not in path.name)
    note = partial.with_name(partial.name.replace(".partial", ".size.partial"))
    kept = int(note.read_text())
    assert kept < wanted.stat().st_size
    with partial.open("r+b") as file:
        file.seek(kept)
        file.write(bytes(wanted.stat().st_size - kept))
    export(str(folder), output=output)
    assert output.read_bytes() == wanted.read_bytes()
    assert len(names) == tensors - 4
    output.unlink()

    interrupted()
    note.unlink()
    partial.write_bytes(bytes(wanted.stat().st_size))
    export(str(folder), output=output)
    assert output.read_bytes() == wanted.read_bytes()
    output.unlink()

    # The note of a file that was deleted says nothing about the next one.
    interrupted()
    partial.unlink()
    with monkeypatch.context() as patch:
        patch.setattr(gguf_file, "progress_bar", _killed)
        with pytest.raises(KeyboardInterrupt):
            export(str(folder), output=output)
    assert not note.exists()
    export(str(folder), output=output)
    assert output.read_bytes() == wanted.read_bytes()
    output.unlink()

    interrupted()
    shard = next(folder.glob("*.safetensors"))
    os.utime(shard, ns=(0, 0))
    export(str(folder), output=output)
    assert output.read_bytes() == wanted.read_bytes()
    assert len(names) == tensors
    assert not list(tmp_path.glob(".x.gguf*partial"))
    assert not list(tmp_path.glob("*.head"))
