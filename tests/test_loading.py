"""Loading: a model whose checkpoint is incomplete is refused, with the full reason."""

import gc
import json
import logging
import re
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import transformers
from safetensors.torch import save_file
from test_blockwise import block_map
from tiny import weights_of
from torch import Tensor

from emp_llm.common.errors import UserError
from emp_llm.common.machine import OutOfMemory
from emp_llm.models.loading import load_model, load_tokenizer

Models = Callable[[str], Path]
Change = Callable[[dict[str, Tensor]], dict[str, Tensor]]
# An MLP matrix (of an expert, in mixtures), a layer norm, and the head (the embeddings, where the
# head is tied to them).
PARTS = ("mlp", "norm", "head")


def changed(source: Path, folder: Path, change: Change) -> Path:
    """A copy of a model with other tensors, in one shard."""
    ignored = shutil.ignore_patterns("*.safetensors", "*.index.json")
    shutil.copytree(source, folder, ignore=ignored)
    save_file(change(weights_of(source)), folder / "model.safetensors", {"format": "pt"})
    return folder


def without(*names: str) -> Change:
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if name not in names}


def larger(name: str) -> Change:
    return lambda tensors: (
        tensors
        | {name: torch.zeros([size + 1 for size in tensors[name].shape], dtype=torch.bfloat16)}
    )


def name_of(folder: Path, part: str) -> str:
    """The stored name of a part: of the second block, or the head."""
    words = {
        "mlp": (
            "up_proj",
            "gate_up_proj",
            "c_fc",
            "fc1",
            "dense_h_to_4h",
            "experts.1.w2",
            "experts.1.up_proj",
        ),
        "norm": ("input_layernorm", "ln_1", "self_attn_layer_norm"),
        "head": ("lm_head", "embed_out", "embed_tokens", "wte"),
    }[part]
    names = [name for name in weights_of(folder) if ".1." in name or part == "head"]
    return next(name for word in words for name in names if name.endswith(f"{word}.weight"))


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_missing_weights_are_refused(models: Models, tmp_path: Path, family: str) -> None:
    for part in PARTS:
        name = name_of(models(family), part)
        folder = changed(models(family), tmp_path / part, without(name))
        for where in ("cpu", "disk", block_map(models(family)))[: 1 if part == "norm" else 3]:
            with pytest.raises(
                UserError,
                match=rf"{folder}.*(1 weight|parts of).*{leaf_of(name)}.*complete checkpoint",
            ):
                load_model(folder, where)


def leaf_of(name: str) -> str:
    """What a message names. For a matrix of an expert, transformers names only the parameter
    that merges the matrices.
    """
    leaf = (
        name.removesuffix(".weight").rpartition(".")[2].replace("embed_out", "(lm_head|embed_out)")
    )
    return "experts" if ".experts." in name else leaf


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("family", ["llama-tied", "gpt2", "qwen3_moe"])
def test_weights_of_another_shape_are_refused(
    models: Models, tmp_path: Path, family: str, part: str
) -> None:
    name = name_of(models(family), part)
    folder = changed(models(family), tmp_path / "model", larger(name))
    for where in ("cpu", "disk"):
        with pytest.raises(UserError, match=rf"{folder}.*{leaf_of(name)}.*config.json"):
            load_model(folder, where)


def test_an_expert_of_a_stack_that_lies_on_the_disk(models: Models, tmp_path: Path) -> None:
    """transformers reads a stack of three experts in place of four, without a message."""
    folder = changed(
        models("qwen3_moe"),
        tmp_path / "model",
        without("model.layers.1.mlp.experts.3.down_proj.weight"),
    )
    for where in ("cpu", "disk"):
        with pytest.raises(
            UserError,
            match=r"1 weight .*model\.layers\.1\.mlp\.experts\.down_proj is \[3, 32, "
            r"24\].* \[4, 32, 24\]",
        ):
            load_model(folder, where)


def test_missing_weights_of_a_quantised_model(tiny_llama: Path, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    load_model(tiny_llama, "cpu", quantization="4bit")
    name = name_of(tiny_llama, "mlp")
    with pytest.raises(UserError, match=name):
        load_model(
            changed(tiny_llama, tmp_path / "model", without(name)), "cpu", quantization="4bit"
        )


def test_all_commands_that_load_refuse(
    tiny_llama: Path, text: Path, tmp_path: Path, command: Callable[..., object]
) -> None:
    """The message names a few weights and counts the others."""
    folder = changed(
        tiny_llama,
        tmp_path / "model",
        without(*(name for name in weights_of(tiny_llama) if "norm" in name)),
    )
    (tmp_path / "suite.toml").write_text(f'[perplexity]\nfile = "{text}"\nseqlen = 64\n')
    given = ["--calibration", text, "--samples", 2, "--seqlen", 32, "--device-map", "cpu"]
    for line in (
        ["calibrate --output norms --model", folder, *given],
        ["prune --output out --model", folder, *given],
        ["evaluate --suite suite.toml --device-map cpu --model", folder],
    ):
        done = command(*line, code=2)
        assert re.search(
            r"5 .*model\.layers\.0\.input_layernorm\.weight, .* and 2 more",
            done.stderr,
        ), done.stderr
        assert "LOAD REPORT" not in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "suite.toml"]


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_complete_checkpoints_are_loaded_silently(
    models: Models, family: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    for where in ("cpu", "disk"):
        load_model(models(family), where)
    assert not [message for message in caplog.messages if message.startswith("warning:")]


def test_a_base_model_without_its_prefix(models: Models, tmp_path: Path) -> None:
    """As GPT-2 is stored on the Hub: no prefix, a tied head that is not stored, and buffers of
    old versions.
    """

    def bare(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        plain = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
        return plain | {
            "h.0.attn.bias": torch.ones(1, 1, 128, 128),
            "h.0.attn.masked_bias": torch.ones(()),
        }

    folder = changed(models("gpt2"), tmp_path / "model", bare)
    model = load_model(folder, "cpu")
    assert torch.equal(model.lm_head.weight, weights_of(models("gpt2"))["transformer.wte.weight"])
    load_model(folder, "disk")


def test_unexpected_weights_are_named(
    tiny_llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    extra = {
        f"model.layers.{number}.mlp.up_proj.weight": torch.zeros(80, 32) for number in (2, 3, 4, 5)
    }
    load_model(changed(tiny_llama, tmp_path / "model", lambda tensors: tensors | extra), "cpu")
    (warning,) = [message for message in caplog.messages if message.startswith("warning:")]
    assert "4 tensors" in warning
    assert "model.layers.2.mlp.up_proj.weight" in warning
    assert warning.endswith("and 1 more.")


def test_memory_that_runs_out_while_loading(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    for place, family in (
        ("core_model_loading.Concatenate.convert", "mixtral"),
        ("AutoModelForCausalLM.from_pretrained", "llama"),
    ):
        monkeypatch.setattr(f"transformers.{place}", fail)
        with pytest.raises(
            OutOfMemory,
            match=r"out of memory while loading it with --device-map cpu\. .*auto, disk",
        ):
            load_model(models(family), "cpu")


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (RuntimeError("a kernel failed"), None),
        (AttributeError("no such thing"), None),
        (
            ImportError("This modeling file needs packages.\nRun `pip install einops`."),
            r"cannot load it \(This modeling file needs packages\. Run `pip install einops`\)",
        ),
    ],
)
def test_errors_of_transformers(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, sentence: str | None
) -> None:
    """Those that users can fix are shown in full; the others keep their traceback."""

    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", fail)
    with pytest.raises(UserError if sentence else type(error), match=sentence or str(error)):
        load_model(tiny_llama, "cpu")


def test_tokenizers_that_cannot_be_loaded(tiny_llama: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_llama, folder)
    (folder / "tokenizer.json").write_text(
        json.dumps({"version": "1.0", "added_tokens": [], "model": {"type": "Abacus"}})
    )
    with pytest.raises(
        UserError,
        match=r"no tokenizer that transformers can load \(.*\)\. Copy "
        r"the model's tokenizer files",
    ):
        load_tokenizer(folder)
    for path in folder.glob("tokenizer*"):
        path.unlink()
    with pytest.raises(
        UserError,
        match=r"\(1\) a `tokenizers` library.*\(3\).*sentencepiece or tiktoken installed",
    ):
        load_tokenizer(folder)


@pytest.mark.parametrize("terminal", [False, True])
def test_the_bar_of_transformers_is_for_terminals(
    tiny_llama: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    terminal: bool,
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    enabled = transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.enable_progress_bar()
    load_model(tiny_llama, "cpu")
    assert ("Loading weights" in capfd.readouterr().err) == terminal
    assert transformers.utils.logging.is_progress_bar_enabled(), "as it was before"
    if not enabled:
        transformers.utils.logging.disable_progress_bar()


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    return tmp_path / "tmp"


def test_a_folder_for_offloaded_weights_exists_only_while_it_holds_some(
    models: Models, tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that ends without its exit handlers, such as a child of multiprocessing, would
    leave the folder.
    """
    for family, where in (
        ("llama", "cpu"),
        ("llama", "disk"),
        ("llama", block_map(models("llama"))),
        ("mixtral", "cpu"),
    ):
        model = load_model(models(family), where)
        assert not list(temporary.iterdir()), (family, where)
    model = load_model(models("mixtral"), "disk")
    (folder,) = temporary.glob("emp-llm-offload-*")
    assert any(path.suffix == ".safetensors" for path in folder.iterdir()), "merged experts"
    assert folder.stat().st_mode & 0o077 == 0, "nobody else can read the weights"
    del model
    gc.collect()
    assert not list(temporary.iterdir())
    broken = changed(models("mixtral"), tmp_path / "model", without("model.norm.weight"))
    with pytest.raises(UserError, match=r"model\.norm\.weight"):
        load_model(broken, "disk")
    assert not list(temporary.iterdir()), "after an error, at once"
    with monkeypatch.context() as patch:
        patch.setattr(
            transformers.AutoModelForCausalLM,
            "from_pretrained",
            lambda *_, **more: fail_in(more["offload_folder"]),
        )
        with pytest.raises(KeyboardInterrupt):
            load_model(models("llama"), "disk")
    assert not list(temporary.iterdir())


def fail_in(folder: Any) -> None:
    """Write a weight, then end as on Ctrl-C."""
    Path(folder, "weight.safetensors").write_bytes(b"1")
    raise KeyboardInterrupt


def test_no_folder_for_temporary_files(
    models: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a read-only container. A model that is loaded may be offloaded there."""
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/proc/none"])
    with pytest.raises(UserError, match=r"temporary files .* Set TMPDIR"):
        load_model(models("llama"), "cpu")
