"""Malicious model folders: refused in a sentence, without reading files outside them or allocating the sizes they claim."""

import json
import os
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fuzz_checkpoint as fuzz
import pytest
from conftest import Run
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from emp_llm.checkpoint.checkpoint import Checkpoint
from emp_llm.checkpoint.files import read_json
from emp_llm.checkpoint.headers import read_header
from emp_llm.common.errors import UserError

INDEX = "model.safetensors.index.json"
SHARD = "model-00001-of-00002.safetensors"


def entry(start: int = 0, end: int = 8, shape: Any = (2, 2), dtype: Any = "BF16") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def raw(header: Any, data: int = 8, claimed: int | None = None) -> bytes:
    """A file with a header (text, or a value for JSON), followed by zero bytes."""
    text = header.encode() if isinstance(header, str) else json.dumps(header).encode()
    return (len(text) if claimed is None else claimed).to_bytes(8, "little") + text + bytes(data)


DEEP = "[" * 100_000
HEADERS: dict[str, tuple[str, bytes]] = {
    "empty": ("ends before its header", b""),
    "length of 16 EB": ("ends before its header", raw({"a": entry()}, claimed=2**64 - 1)),
    "white space first": ("not a JSON object", raw(" {}", 0)),
    "not UTF-8": ("invalid start byte", (4).to_bytes(8, "little") + b'{"\xff"'),
    "deep": ("nested too deeply", raw('{"a":' + DEEP, 0)),
    "duplicate name": ("a occurs twice in it", raw(f'{{"a":{json.dumps(entry())},"a":{json.dumps(entry())}}}')),
    "duplicate field": ("shape occurs twice in it", raw('{"a":{"dtype":"U8","shape":[8],"shape":[8],"data_offsets":[0,8]}}')),
    "metadata of numbers": ("map of strings", raw({"__metadata__": {"a": 1}}, 0)),
    "overlap": ("b overlaps", raw({"a": entry(), "b": entry(4, 12)}, 12)),
    "gap": ("b leaves a gap", raw({"a": entry(), "b": entry(9, 17)}, 17)),
    "bytes of no tensor": ("1 bytes at its end", raw({"a": entry()}, 9)),
    "beyond the end": ("a do not lie within", raw({"a": entry()}, 7)),
    "backwards": ("a do not lie within", raw({"a": entry(8, 0)})),
    "negative size": ("shape of tensor a", raw({"a": entry(shape=[-2, -2])})),
    "sizes without end": ("shape of tensor a", raw({"a": entry(shape=[2**62] * 50_000)})),
    "size 2^62 of nothing": ("shape of tensor a is too large", raw({"a": entry(0, 0, [0, 2**62, 2**62])}, 0)),
    "size true": ("shape of tensor a", raw({"a": entry(shape=[True, 4])})),
    "size 4.0": ("4.0 is not a whole number", raw({"a": entry(shape=[4.0])})),
    "no offsets": ("no dtype, shape and data_offsets", raw({"a": {"dtype": "BF16", "shape": [4]}})),
    "wrong dtype": ("bytes that its dtype and shape need", raw({"a": entry(dtype="F32")})),
    "unknown dtype": ("unknown dtype, F128", raw({"a": entry(dtype="F128")})),
    "name with a line break": ("not printable", raw({"a\nerror: all is well": entry()})),
    "name of half a character": ("surrogate", raw('{"\\ud800":' + json.dumps(entry()) + "}")),
}


def peak_of(call: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(("match", "content"), [pytest.param(*case, id=name) for name, case in HEADERS.items()])
def test_invalid_headers(tmp_path: Path, match: str, content: bytes) -> None:
    (tmp_path / "x.safetensors").write_bytes(content)

    def read() -> None:
        with pytest.raises(UserError, match=rf"x\.safetensors: not a complete safetensors file.*{match}.*again") as caught:
            read_header(tmp_path / "x.safetensors")
        assert len(str(caught.value)) < 500
        assert str(caught.value).isprintable()

    assert peak_of(read) < 20e6


def test_huge_header_in_a_sparse_file(tmp_path: Path) -> None:
    """The file has 200 MB but takes up no space; its header is not read."""
    path = tmp_path / "x.safetensors"
    path.write_bytes((150_000_000).to_bytes(8, "little") + b"{")
    os.truncate(path, 200_000_000)

    def read() -> None:
        with pytest.raises(UserError, match="claims 150,000,000 bytes, and 100,000,000 are allowed"):
            read_header(path)

    assert peak_of(read) < 1e6


def test_all_dtypes_of_the_library(tmp_path: Path) -> None:
    """A checkpoint is read even if only some of its dtypes can be pruned."""
    import torch
    from safetensors.torch import save_file

    kinds = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float8_e4m3fn, torch.float8_e5m2]
    kinds += [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.uint16, torch.uint32]
    tensors = {str(dtype): torch.zeros((3, 5), dtype=dtype) for dtype in kinds} | {"empty": torch.zeros((0, 5))}
    save_file(tensors | {"scalar": torch.zeros(())}, tmp_path / "x.safetensors", {"format": "pt", "é": "ü"})
    stored = {tensor.name: tensor for tensor in read_header(tmp_path / "x.safetensors")}
    assert stored.keys() == tensors.keys() | {"scalar"}
    assert all(stored[name].shape == tuple(tensor.shape) for name, tensor in tensors.items())


@pytest.fixture
def model(models: Callable[[str], Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(models("llama"), tmp_path / "model"))


def change_index(model: Path, change: Callable[[dict[str, Any]], object]) -> None:
    index = json.loads((model / INDEX).read_text())
    change(index["weight_map"])
    (model / INDEX).write_text(json.dumps(index))


NAMES = ["sub/x.safetensors", "..", "", "config.json", "x.safetensors/", ".x.safetensors", "a\0.safetensors"]
NAMES += ["a\n.safetensors", "x" * 300 + ".safetensors", "..\\x.safetensors"]


@pytest.mark.parametrize("name", NAMES)
def test_index_with_other_than_plain_names(model: Path, name: str) -> None:
    (model / "sub").mkdir()
    shutil.copyfile(model / SHARD, model / "sub" / "x.safetensors")
    change_index(model, lambda weights: weights.update({"lm_head.weight": name}))
    with pytest.raises(UserError, match=rf"{INDEX}: .* is not the plain name of a safetensors file") as caught:
        Checkpoint(model)
    assert str(caught.value).isprintable()


def test_indexes_that_name_too_little_or_twice(model: Path) -> None:
    change_index(model, lambda weights: weights.pop("model.norm.weight"))
    with pytest.raises(UserError, match=rf"{INDEX}: it does not name model\.norm\.weight"):
        Checkpoint(model)
    (model / INDEX).write_text(f'{{"weight_map": {{"a": "{SHARD}", "a": "{SHARD}"}}}}')
    with pytest.raises(UserError, match=rf"{INDEX}: cannot be read .*a occurs twice in it"):
        Checkpoint(model)


def test_a_header_of_odd_length(model: Path, tmp_path: Path, command: Run) -> None:
    """Words that start at odd bytes of the file are pruned like others."""

    def parts(shard: Path) -> tuple[bytes, bytes]:
        content = shard.read_bytes()
        end = 8 + int.from_bytes(content[:8], "little")
        return content[8:end], content[end:]

    odd = Path(shutil.copytree(model, tmp_path / "odd"))
    for shard in odd.glob("*.safetensors"):
        header, data = parts(shard)
        shard.write_bytes((len(header) + 1).to_bytes(8, "little") + header + b" " + data)
    for source in (model, odd):
        line = ("prune", "--model", source, "--method", "emp-magnitude", "--output", source.with_suffix(".out"))
        assert command(*line).returncode == 0
    shards = [shard.name for shard in model.glob("*.safetensors")]
    pruned = [parts(model.with_suffix(".out") / name)[1] for name in shards]
    assert pruned == [parts(odd.with_suffix(".out") / name)[1] for name in shards]
    assert pruned != [parts(model / name)[1] for name in shards]


@pytest.mark.parametrize("name", ["config.json", INDEX])
@pytest.mark.parametrize(
    ("match", "content"),
    [
        ("nested too deeply", '{"a":' + DEEP),
        ("nested too deeply", '{"a":' * 100_000),
        ("cannot be read", '{"a":' + "9" * 100_000 + "}"),
        ("expected a JSON object", "[]"),
    ],
    ids=["lists", "objects", "digits", "list"],
)
def test_json_bombs(model: Path, name: str, match: str, content: str) -> None:
    (model / name).write_text(content)
    with pytest.raises(UserError, match=rf"{name}: .*{match}"):
        _ = Checkpoint(model).config


def test_json_that_is_too_large(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    os.truncate(tmp_path / "config.json", 1 << 31)

    def read() -> None:
        with pytest.raises(UserError, match=r"config\.json: .*2,147,483,648 bytes, and 16,777,216 are allowed"):
            read_json(tmp_path / "config.json")

    assert peak_of(read) < 1e6


@pytest.mark.parametrize("change", [{"num_hidden_layers": 10**9}, {"text_config": {"n_layer": 10**9}}])
def test_config_of_a_billion_layers(model: Path, change: dict[str, Any]) -> None:
    config = json.loads((model / "config.json").read_text()) | change
    (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"config\.json: .* is 1000000000, and the checkpoint has \d+ tensors"):
        _ = Checkpoint(model).config


@pytest.mark.parametrize("name", [SHARD, "config.json", "notes.txt", "folder"])
def test_links_out_of_the_folder(model: Path, tmp_path: Path, name: str) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    if (model / name).exists():
        (model / name).rename(outside / name)
    elif name != "folder":
        (outside / name).write_text("a secret")
    (model / name).symlink_to(outside if name == "folder" else outside / name)
    with pytest.raises(UserError, match=rf"{name}: a link to .*outside the model folder"):
        Checkpoint(model)
    (model / name).unlink()
    (model / name).symlink_to(name)
    with pytest.raises(UserError, match=rf"{name}: a circular link"):
        Checkpoint(model)


def test_links_of_the_hub_cache(model: Path, tmp_path: Path) -> None:
    """snapshots/REVISION/FILE -> ../../blobs/HASH is allowed, also through a link to the folder; so are links within it."""
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / "0123", tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate(sorted(model.iterdir())):
        path.rename(blobs / str(number))
        (snapshot / path.name).symlink_to(Path("../../blobs") / str(number))
    (snapshot / "LICENSE").symlink_to("config.json")
    (tmp_path / "link").symlink_to(snapshot)
    for folder in (snapshot, tmp_path / "link"):
        assert len(Checkpoint(folder).shards) == 2


@settings(max_examples=400, deadline=5000, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.randoms(use_true_random=False), st.booleans())
def test_readers_accept_or_refuse(tmp_path: Path, rng: Any, whole_folder: bool) -> None:
    """A short run of scripts/fuzz_checkpoint.py."""
    reader = fuzz.fuzz_folder if whole_folder else fuzz.fuzz_header
    assert fuzz.outcome_of(reader, tmp_path, rng) in ("accepted", "refused")
