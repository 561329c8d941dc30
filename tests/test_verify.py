"""`verify` on sound outputs, and on outputs with one defect each."""

import json
import os
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from conftest import Run
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from emp_llm import Recipe, calibrate, prune, prune_model, recipe_of, verify
from emp_llm.checkpoint.checkpoint import Checkpoint, identity_of
from emp_llm.checkpoint.files import file_hash
from emp_llm.common.errors import UserError
from emp_llm.pruning import masks, verification

Models = Callable[[str], Path]
DOWN = "model.layers.1.mlp.down_proj"


RUNS: dict[str, dict[str, Any]] = {
    "emp-wanda": {"method": "emp-wanda"},
    "order and beta": {"method": "emp-magnitude", "order": 1.0, "beta": 0.7},
    "neff in bfloat16": {"method": "emp-magnitude", "neff_dtype": "bfloat16"},
    "matrix": {"method": "emp-magnitude", "group": "matrix", "targets": "all-linear"},
    "all": {"method": "wanda", "group": "all"},
    "transposed": {"family": "gpt2", "method": "magnitude"},
    "pattern": {"method": "magnitude", "pattern": "2:4", "targets": "q_proj,down_proj"},
    "head": {"method": "magnitude", "targets": "lm_head"},
}


@pytest.mark.parametrize(
    "options", [pytest.param(options, id=name) for name, options in RUNS.items()]
)
def test_sound(
    models: Models, norms: Callable[[str], Path], tmp_path: Path, options: dict[str, Any]
) -> None:
    options = options.copy()
    family = options.pop("family", "llama")
    source = models(family)
    out = tmp_path / "out"
    given = norms(family) if "wanda" in options["method"] else None
    prune(model=source, output=out, activations=given, **options)
    before = oracle.digest(tmp_path)
    assert verify(out).differences == []
    found = verify(out, source=str(source), activations=given)
    assert found.differences == []
    assert found.checked["targets"] == len(
        json.loads((out / "emp_report.json").read_text())["matrices"]
    )
    sizes = sum(path.stat().st_size for path in source.glob("*.safetensors"))
    assert 0 < found.checked["other bytes"] < sizes
    assert oracle.digest(tmp_path) == before, "only reading"


def test_a_share_of_the_rows_by_the_reference(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel decides the others, and a weight is wrong wherever it is."""
    source = tiny_llama
    columns = oracle.tensors(source)[f"{DOWN}.weight"].shape[1]
    out = tmp_path / "out"
    prune(model=source, output=out, method="magnitude", sparsity=0.5, targets="down_proj")
    monkeypatch.setattr(masks, "_SMALL", 0)
    monkeypatch.setattr(verification, "_CHUNK_WEIGHTS", 2 * columns)
    found = verify(out, source=str(source))
    assert found.differences == []
    ((words, rows),) = ((w, n) for w, n in found.checked.items() if "by the reference" in w)
    total = int(words.split()[1])
    assert 0 < rows <= total // 4
    found = verify(out, source=str(source), all_rows=True)
    assert (found.differences, list(found.checked)[-1]) == ([], "targets")
    tensor = oracle.tensors(out)[f"{DOWN}.weight"]
    for row in (0, 3):  # of the first chunk, and of the next one
        damaged = tmp_path / str(row)
        shutil.copytree(out, damaged)
        shard = damaged / tensor.shard.name
        raw = bytearray(shard.read_bytes())
        place = tensor.start + 2 * row * columns
        raw[place : place + 2 * columns] = b"\x80\x3f" * columns
        shard.write_bytes(raw)
        rehash(damaged)
        (difference,) = verify(damaged, source=str(source)).differences
        assert re.match(rf"{DOWN}: \d+ weights not as the recipe decides", difference)


@pytest.fixture(scope="module")
def sound(tiny_llama: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("sound") / "out"
    prune(model=str(tiny_llama), output=out, calibration=str(text), samples=4, seqlen=64)
    return out


def change(folder: Path, name: str, value: int, where: int = 0) -> None:
    """Change the bits of a stored number: the first zero, or with `where` the first that is not
    zero.
    """
    tensor = oracle.tensors(folder)[name]
    bits = oracle.bits(tensor).reshape(-1)
    at = next(i for i, number in enumerate(bits) if bool(number) == bool(where))
    raw = bytearray(tensor.shard.read_bytes())
    raw[tensor.start + 2 * at : tensor.start + 2 * at + 2] = value.to_bytes(2, "little")
    tensor.shard.write_bytes(raw)


def rehash(folder: Path) -> None:
    """Make the manifest agree with the files, so that only the deeper checks can see a change."""
    manifest = json.loads((folder / "emp_manifest.json").read_text())
    for name, entry in manifest["files"].items():
        entry |= {"bytes": (folder / name).stat().st_size, "blake3": file_hash(folder / name)}
    (folder / "emp_manifest.json").write_text(json.dumps(manifest))


WRONG: dict[str, tuple[Callable[[Path], object], str, str | None]] = {
    "weight kept that should go": (
        lambda out: change(out, f"{DOWN}.weight", 0x3C00),
        r"BLAKE3",
        rf"{DOWN}: 1 weight ",
    ),
    "weight gone that should stay": (
        lambda out: change(out, f"{DOWN}.weight", 0, 1),
        r"BLAKE3",
        rf"{DOWN}: 1 weight ",
    ),
    "minus zero": (
        lambda out: change(out, f"{DOWN}.weight", 0x8000),
        r"BLAKE3",
        rf"{DOWN}: 1 "
        r"weight ",
    ),
    "byte of no target": (
        lambda out: change(out, "model.norm.weight", 0x3C00, 1),
        r"BLAKE3",
        r"model\.norm\.weight: differs from the source in \d bytes? outside",
    ),
    "config": (
        lambda out: (out / "config.json").write_text("{}"),
        r"config\.json: it has 2 bytes",
        r"config\.json: differs from the source",
    ),
    "file missing": (
        lambda out: (out / "config.json").unlink(),
        r"config\.json: it is missing",
        None,
    ),
    "shard missing": (lambda out: next(out.glob("*.safetensors")).unlink(), r"it is missing", None),
    "other weights": (
        lambda out: (out / "adapter.bin").write_bytes(b""),
        r"adapter\.bin: weights that the manifest",
        None,
    ),
}


@pytest.mark.parametrize(
    ("spoil", "at_once", "deeper"), [pytest.param(*case, id=name) for name, case in WRONG.items()]
)
def test_not_sound(
    tiny_llama: Path,
    sound: Path,
    command: Run,
    tmp_path: Path,
    spoil: Callable[[Path], object],
    at_once: str,
    deeper: str | None,
) -> None:
    out = Path(shutil.copytree(sound, tmp_path / "out"))
    spoil(out)
    done = command(f"verify {out}", code=1)
    assert re.search(r"differences?; checked \d files", done.stdout)
    assert re.search(at_once, done.stdout)
    if deeper is not None:
        rehash(out)
        assert verify(out).differences == []
        (difference,) = verify(out, source=str(tiny_llama)).differences
        assert re.search(deeper, difference)


def test_wrong_input(models: Models, sound: Path, llama_norms: Path, tmp_path: Path) -> None:
    source = str(models("llama"))
    with pytest.raises(UserError, match=r"no emp_manifest\.json in it; give the --output folder"):
        verify(models("llama"))
    with pytest.raises(UserError, match=r"--source .*not those that were pruned"):
        verify(sound, source=str(models("qwen2")))
    with pytest.raises(UserError, match=r"name that with --source"):
        verify(sound, activations=tmp_path / "norms")
    other = tmp_path / "other.safetensors"
    calibrate(
        model=source, output=other, calibration="demo", samples=1, seqlen=16, device_map="cpu"
    )
    with pytest.raises(UserError, match=r"other\.safetensors: not the norms that decided"):
        verify(sound, source=source, activations=other)
    units = {"structure": "neurons", "method": "magnitude", "sparsity": 0.5}
    prune(source, output=tmp_path / "small", **units)
    prune(source, output=tmp_path / "zeros", method="magnitude")
    for name, folder in (
        ("activations", "small"),
        ("activations", "zeros"),
        ("criterion", "small"),
        ("criterion", "zeros"),
        ("scores", "zeros"),
        ("all_rows", "small"),
    ):
        flag = name.replace("_", "-")
        how = "--structure neurons --method" if folder == "small" else "--method"
        with pytest.raises(
            UserError, match=f"--{flag} has no effect: .*{folder} was pruned by {how} magnitude"
        ):
            verify(tmp_path / folder, source=source, **{name: True if "rows" in name else "x"})
    verify(tmp_path / "zeros", source=source, all_rows=True)
    out = tmp_path / "out"
    prune(model=source, output=out, method="wanda", activations=llama_norms)
    with pytest.raises(
        UserError,
        match=r"does not hold the norms that decided its masks.*--activations FILE",
    ):
        verify(out, source=source)
    (out / "emp_manifest.json").write_text(
        '{"format": "emp-llm manifest 1", "files": {"../x": {}}}'
    )
    with pytest.raises(UserError, match=r"emp_manifest\.json: "):
        verify(out)


def _replaced(value: Any, path: tuple[str, ...], new: Any) -> Any:
    return new if not path else value | {path[0]: _replaced(value.get(path[0]), path[1:], new)}


@pytest.mark.parametrize("new", [None, 7, {}], ids=repr)
@pytest.mark.parametrize(
    "path",
    [
        "files",
        "files.config.json",
        "files.config.json.bytes",
        "files.config.json.blake3",
        "source",
        "recipe",
        "recipe.targets",
        "recipe.score",
        "recipe.counts",
        "recipe.update",
        "recipe.targets.layers",
        "source.identity",
        "recipe.targets.ignore",
        "recipe.targets.min_expert_tokens",
        "recipe.group",
        "recipe.counts.effective.beta",
        "recipe.counts.effective.order",
        "recipe.counts.effective.neff_dtype",
        "activations",
        "activations.norms",
    ],
)
def test_manifests_that_lie(
    tiny_llama: Path, sound: Path, tmp_path: Path, path: str, new: Any
) -> None:
    """Whatever a manifest says: it is refused in a sentence, or a difference is found."""
    parts = tuple(path.replace("config.json", "config/json").split("."))
    out = Path(shutil.copytree(sound, tmp_path / "out", copy_function=os.link))
    text = (out / "emp_manifest.json").read_text()
    (out / "emp_manifest.json").unlink()
    lying = _replaced(json.loads(text), tuple(part.replace("/", ".") for part in parts), new)
    (out / "emp_manifest.json").write_text(json.dumps(lying))
    with suppress(UserError):
        found = verify(out, source=str(tiny_llama)).differences
        default = path.startswith("recipe") and new in (None, {})  # the run was the default recipe
        # Then all is compared by the names of tensors.
        as_in_memory = path.startswith("source") and new in (None, {})
        unused = path in ("files", "recipe.targets.ignore", "recipe.targets.min_expert_tokens")
        assert found or default or as_in_memory or unused, "it is a lie"


@pytest.mark.parametrize("group", ["row", "all"])
def test_a_source_that_is_damaged_since(tiny_llama: Path, tmp_path: Path, group: Any) -> None:
    source = Path(shutil.copytree(tiny_llama, tmp_path / "model"))
    out = tmp_path / "out"
    prune(model=source, output=out, method="magnitude", group=group)
    change(source, f"{DOWN}.weight", 0x7FC0, 1)
    with pytest.raises(UserError, match=r"its weights are not those that were pruned"):
        verify(out, source=source)
    manifest = json.loads((out / "emp_manifest.json").read_text())
    # Damaged already when it was hashed.
    manifest["source"]["identity"] = identity_of(Checkpoint(source))
    (out / "emp_manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match=rf"{DOWN}\.weight holds NaN or infinity \(rows 0 to \d+\)"):
        verify(out, source=source)


def save_in_memory(source: Path, folder: Path, recipe: Recipe, text: Path, **how: Any) -> None:
    """Prune a model in Python, and save it."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    tokenizer = AutoTokenizer.from_pretrained(source)
    report = prune_model(
        model,
        recipe,
        str(text) if recipe.needs_activations else None,
        tokenizer,
        samples=4,
        seqlen=64,
    )
    model.save_pretrained(folder, **how)
    tokenizer.save_pretrained(folder)
    report.save(folder)


def rewrite(folder: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    """Edit the tensors of a folder, which lie in one shard from then on."""
    tensors = {}
    for shard in folder.glob("*.safetensors"):
        tensors |= load_file(shard)
        shard.unlink()
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)
    edit(tensors)
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        folder / "model.safetensors",
        {"format": "pt"},
    )


def as_published(tensors: dict[str, Tensor]) -> None:
    """GPT-2's names without the prefix of its class, and the buffers of old versions."""
    for name in list(tensors):
        tensors[name.removeprefix("transformer.")] = tensors.pop(name)
    tensors["h.0.attn.bias"] = torch.ones(1, 1, 8, 8)


SAVED: dict[str, tuple[str, Recipe, Callable[[dict[str, Tensor]], object] | None]] = {
    "shards": ("llama", recipe_of(), None),
    "one shard": ("llama", recipe_of(method="emp-magnitude", group="all"), lambda tensors: None),
    "old buffers": (
        "llama",
        recipe_of(method="magnitude"),
        lambda tensors: tensors.update(
            {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
        ),
    ),
    "head stored though tied": (
        "llama-tied",
        recipe_of(method="magnitude", group="matrix"),
        lambda tensors: tensors.update(
            {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
        ),
    ),
    "other names": ("gpt2", recipe_of(), as_published),
    "experts": ("mixtral", recipe_of(targets="all-linear"), None),
}


@pytest.mark.parametrize("case", SAVED)
def test_folders_of_save_pretrained(
    models: Models, text: Path, command: Run, tmp_path: Path, case: str
) -> None:
    """Their files are not those of the source, so tensors are compared by name."""
    family, recipe, edit = SAVED[case]
    source = Path(shutil.copytree(models(family), tmp_path / "source"))
    if edit is not None:
        rewrite(source, edit)
    for name, size in (("one", "1GB"), ("several", "30KB")):
        out = tmp_path / name
        save_in_memory(source, out, recipe, text, max_shard_size=size)
        more = (
            ("--activations", out / "emp_llm/activations.safetensors")
            if recipe.needs_activations
            else ()
        )
        done = command(f"verify {out} --source {source}", *more)
        assert done.stderr.count("tokenizer") == 1
        found = re.search(
            r"0 differences; .* 1 config\.json, (\S+) other bytes, \d+ targets",
            done.stdout,
        )
        assert found is not None, done.stdout
        assert int(found[1].replace(",", "")) > 1000


@pytest.fixture(scope="module")
def saved(tiny_llama: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("saved") / "out"
    save_in_memory(tiny_llama, out, recipe_of(), text)
    return out


def set_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


WRONG_SAVED: dict[str, tuple[Callable[[Path], object], str]] = {
    "weight kept that should go": (
        lambda out: change(out, f"{DOWN}.weight", 0x3C00),
        rf"^{DOWN}: "
        r"1 weight ",
    ),
    "weight gone that should stay": (
        lambda out: change(out, f"{DOWN}.weight", 0, 1),
        rf"^{DOWN}: "
        r"1 weight ",
    ),
    "weight of no target": (
        lambda out: change(out, "model.norm.weight", 0x3C00, 1),
        r"^model\.norm\.weight: differs from the source in \d bytes? outside",
    ),
    "tensor missing": (
        lambda out: rewrite(out, lambda tensors: tensors.pop("lm_head.weight")),
        r"1 weight of the model is missing: lm_head\.weight",
    ),
    "target missing": (
        lambda out: rewrite(out, lambda tensors: tensors.pop(f"{DOWN}.weight")),
        rf"missing: {DOWN}\.weight",
    ),
    "tensor too many": (
        lambda out: rewrite(out, lambda tensors: tensors.update(extra=torch.ones(2))),
        r"^extra: the source has no such tensor",
    ),
    "other dtype": (
        lambda out: rewrite(
            out,
            lambda tensors: tensors.update({"lm_head.weight": tensors["lm_head.weight"].float()}),
        ),
        r"^lm_head\.weight: F32 \[256, 32\]; the source has BF16 \[256, 32\]",
    ),
    "config": (
        lambda out: set_config(out, rms_norm_eps=0.1),
        r"^config\.json: its values are not the source's: rms_norm_eps\.",
    ),
    "no config": (
        lambda out: set_config(out, model_type="llamma"),
        r"does not know the model type",
    ),
}


@pytest.mark.parametrize("case", WRONG_SAVED)
def test_folders_of_save_pretrained_with_a_defect(
    tiny_llama: Path, saved: Path, command: Run, tmp_path: Path, case: str
) -> None:
    spoil, message = WRONG_SAVED[case]
    out = Path(shutil.copytree(saved, tmp_path / "out"))
    spoil(out)
    command(f"verify {out}", code=1)
    rehash(out)
    done = command(f"verify {out} --source {tiny_llama}", code=1)
    difference, figures = done.stdout.splitlines()
    assert re.search(message, difference)
    assert figures.startswith("1 difference; ")


def test_a_folder_of_save_pretrained_with_another_source(
    models: Models, saved: Path, command: Run
) -> None:
    done = command(f"verify {saved} --source", models("gpt2"), code=1)
    assert "model.norm.weight: the source has no such tensor" in done.stdout
