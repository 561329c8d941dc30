"""Malicious model folders: refused in a sentence, without reading files outside them or
allocating the sizes they claim.
"""

import json
import os
import random
import shutil
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import fuzz_checkpoint as fuzz
import pytest
import torch
from conftest import Run
from runs import check_verified
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from emp_llm import bench, evaluate, generate, pack, prune, prune_model, recipe_of
from emp_llm.checkpoint.checkpoint import Checkpoint, header_text, read_header
from emp_llm.checkpoint.files import file_hash, read_json
from emp_llm.checkpoint.packed import packed_name
from emp_llm.common.errors import UserError
from emp_llm.common.paths import PACK_NAME
from emp_llm.models.architecture import Architecture
from emp_llm.models.loading import load_model
from emp_llm.records.run_report import RunReport
from emp_llm.runtime import load
from emp_llm.runtime.loader import StoredWeights, sparse_layers

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
    "duplicate name": (
        "a occurs twice in it",
        raw(f'{{"a":{json.dumps(entry())},"a":{json.dumps(entry())}}}'),
    ),
    "duplicate field": (
        "shape occurs twice in it",
        raw('{"a":{"dtype":"U8","shape":[8],"shape":[8],"data_offsets":[0,8]}}'),
    ),
    "metadata of numbers": ("map of strings", raw({"__metadata__": {"a": 1}}, 0)),
    "overlap": ("b overlaps", raw({"a": entry(), "b": entry(4, 12)}, 12)),
    "gap": ("b leaves a gap", raw({"a": entry(), "b": entry(9, 17)}, 17)),
    "bytes of no tensor": ("1 bytes at its end", raw({"a": entry()}, 9)),
    "beyond the end": ("a do not lie within", raw({"a": entry()}, 7)),
    "backwards": ("a do not lie within", raw({"a": entry(8, 0)})),
    "negative size": ("shape of tensor a", raw({"a": entry(shape=[-2, -2])})),
    "sizes without end": ("shape of tensor a", raw({"a": entry(shape=[2**62] * 50_000)})),
    "size 2^62 of nothing": (
        "shape of tensor a is too large",
        raw({"a": entry(0, 0, [0, 2**62, 2**62])}, 0),
    ),
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


@pytest.mark.parametrize(
    ("match", "content"), [pytest.param(*case, id=name) for name, case in HEADERS.items()]
)
def test_invalid_headers(tmp_path: Path, match: str, content: bytes) -> None:
    (tmp_path / "x.safetensors").write_bytes(content)

    def read() -> None:
        with pytest.raises(
            UserError,
            match=r"x\.safetensors: not a complete safetensors "
            rf"file.*{match}.*again",
        ) as caught:
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
        with pytest.raises(
            UserError, match="claims 150,000,000 bytes, and 100,000,000 are allowed"
        ):
            read_header(path)

    assert peak_of(read) < 1e6


def test_all_dtypes_of_the_library(tmp_path: Path) -> None:
    """A checkpoint is read even if only some of its dtypes can be pruned."""
    kinds = [
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
    ]
    kinds += [
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.complex64,
        torch.uint16,
        torch.uint32,
    ]
    tensors = {str(dtype): torch.zeros((3, 5), dtype=dtype) for dtype in kinds} | {
        "empty": torch.zeros((0, 5))
    }
    save_file(
        tensors | {"scalar": torch.zeros(())},
        tmp_path / "x.safetensors",
        {"format": "pt", "é": "ü"},
    )
    stored = {tensor.name: tensor for tensor in read_header(tmp_path / "x.safetensors")}
    assert stored.keys() == tensors.keys() | {"scalar"}
    assert all(stored[name].shape == tuple(tensor.shape) for name, tensor in tensors.items())


@pytest.fixture
def model(tiny_llama: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_llama, tmp_path / "model"))


def change_index(model: Path, change: Callable[[dict[str, Any]], object]) -> None:
    index = json.loads((model / INDEX).read_text())
    change(index["weight_map"])
    (model / INDEX).write_text(json.dumps(index))


NAMES = [
    "sub/x.safetensors",
    "..",
    "",
    "config.json",
    "x.safetensors/",
    ".x.safetensors",
    "a\0.safetensors",
]
NAMES += ["a\n.safetensors", "x" * 300 + ".safetensors", "..\\x.safetensors"]


@pytest.mark.parametrize("name", NAMES)
def test_index_with_other_than_plain_names(model: Path, name: str) -> None:
    (model / "sub").mkdir()
    shutil.copyfile(model / SHARD, model / "sub" / "x.safetensors")
    change_index(model, lambda weights: weights.update({"lm_head.weight": name}))
    with pytest.raises(
        UserError,
        match=rf"{INDEX}: .* is not the plain name of a safetensors "
        r"file",
    ) as caught:
        Checkpoint(model)
    assert str(caught.value).isprintable()


def test_indexes_that_name_too_little_or_twice(model: Path) -> None:
    """What it does not name is loaded all the same; what lies in two shards is loaded by chance."""
    dense = AutoModelForCausalLM.from_pretrained(model)(torch.arange(8)[None]).logits
    change_index(model, lambda weights: weights.pop("model.norm.weight"))
    assert torch.equal(
        AutoModelForCausalLM.from_pretrained(model)(torch.arange(8)[None]).logits, dense
    )
    assert "model.norm.weight" in Checkpoint(model).tensors
    first, second = sorted(model.glob("*.safetensors"))[:2]
    more = load_file(second) | dict(list(load_file(first).items())[:1])
    kept = second.read_bytes()
    save_file(more, second, {"format": "pt"})
    with pytest.raises(
        UserError,
        match=r"is also in .*, and which of them is loaded depends on "
        r"the program.*save_pretrained",
    ):
        Checkpoint(model)
    second.write_bytes(kept)
    (model / INDEX).write_text(f'{{"weight_map": {{"a": "{SHARD}", "a": "{SHARD}"}}}}')
    with pytest.raises(UserError, match=rf"{INDEX}: cannot be read .*a occurs twice in it"):
        Checkpoint(model)


def test_metadata_that_is_null(tmp_path: Path) -> None:
    """safetensors reads it too."""
    header = b'{"__metadata__":null,"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    assert load_file(path).keys() == {"a"}
    assert [tensor.name for tensor in read_header(path)] == ["a"]


def test_a_model_with_an_adapter_beside_it(model: Path, tmp_path: Path) -> None:
    """transformers runs both where peft is installed, and neither where it is not."""
    (model / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    says = r"model: it holds a model and a PEFT adapter \(adapter_config.json\).*merge_and_unload"
    with pytest.raises(UserError, match=says):
        prune(model, output=tmp_path / "out", method="emp-magnitude")
    with pytest.raises(UserError, match=says):
        load_model(model, "cpu")
    assert not (tmp_path / "out").exists()


def test_weights_in_other_formats_are_not_copied(model: Path, tmp_path: Path) -> None:
    names = [
        "onnx/model.onnx",
        "onnx/model.onnx_data",
        "onnx/model.onnx.data",
        "training_args.bin",
        "state.pkl",
        "x.tflite",
    ]
    for name in names:
        (model / name).parent.mkdir(exist_ok=True)
        (model / name).write_bytes(b"x")
    (model / "notes.txt").write_text("copied")
    prune(model, output=tmp_path / "out", method="emp-magnitude")
    assert (tmp_path / "out" / "notes.txt").is_file()
    assert not [name for name in names if (tmp_path / "out" / name).exists()]


@pytest.mark.parametrize("name", ["lm_heads.0", "model.layers.9.unembed", "heads.1.proj"])
def test_a_head_is_no_target_where_only_names_are_known(
    model: Path, tmp_path: Path, name: str
) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(
        json.dumps(config | {"model_type": "nonesuch", "architectures": ["Nonesuch"]})
    )
    shard = model / SHARD
    tensors = load_file(shard)
    width = next(
        value.shape[0] for key, value in tensors.items() if key.endswith("layernorm.weight")
    )
    save_file(
        tensors | {f"{name}.weight": torch.randn(config["vocab_size"], width)},
        shard,
        {"format": "pt"},
    )
    report = prune(model, output=tmp_path / "out", method="emp-magnitude")
    assert report.matrices
    assert name not in report.matrices


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
        line = (
            f"prune --method emp-magnitude --model {source} --output",
            source.with_suffix(".out"),
        )
        command(*line)
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
        with pytest.raises(
            UserError,
            match=r"config\.json: .*2,147,483,648 bytes, and 16,777,216 are allowed",
        ):
            read_json(tmp_path / "config.json")

    assert peak_of(read) < 1e6


@pytest.mark.parametrize(
    "change", [{"num_hidden_layers": 10**9}, {"text_config": {"n_layer": 10**9}}]
)
def test_config_of_a_billion_layers(model: Path, change: dict[str, Any]) -> None:
    config = json.loads((model / "config.json").read_text()) | change
    (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        UserError,
        match=r"config\.json: .* is 1000000000, and the checkpoint has \d+ tensors",
    ):
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
    """snapshots/REVISION/FILE -> ../../blobs/HASH is allowed, also through a link to the folder;
    so are links within it.
    """
    snapshot = tmp_path / "models--a--b" / "snapshots" / "0123"
    blobs = tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate(sorted(model.iterdir())):
        path.rename(blobs / str(number))
        (snapshot / path.name).symlink_to(Path("../../blobs") / str(number))
    (snapshot / "LICENSE").symlink_to("config.json")
    (tmp_path / "link").symlink_to(snapshot)
    for folder in (snapshot, tmp_path / "link"):
        assert len(Checkpoint(folder).shards) == 2


@pytest.mark.parametrize(
    ("reader", "number"), [("fuzz_header", 200), ("fuzz_folder", 200), ("fuzz_packed", 100)]
)
def test_readers_accept_or_refuse(tmp_path: Path, reader: str, number: int) -> None:
    """A short run of scripts/fuzz_checkpoint.py."""
    for seed in range(number):
        assert fuzz.outcome_of(getattr(fuzz, reader), tmp_path, random.Random(seed)) in (
            "accepted",
            "refused",
        ), seed


class TestPacked:
    """Packed folders by an author who computes the hashes again."""

    @pytest.fixture(scope="class")
    def packed(
        self, models: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
    ) -> Path:
        folder = tmp_path_factory.mktemp("packed")
        options = {"targets": "all-linear", "allow_partial": True, "quiet": True}
        prune(
            models("llama"), method="magnitude", sparsity=0.5, output=folder / "pruned", **options
        )
        pack(folder / "pruned", folder / "packed")
        return folder / "packed"

    @pytest.fixture
    def folder(self, packed: Path, tmp_path: Path) -> Path:
        return Path(shutil.copytree(packed, tmp_path / "packed"))

    def change(self, folder: Path, change: Callable[..., object], odd: int = 0) -> None:
        """Apply `change(header, data, entry of emp_pack.json)` to the first packed shard."""
        told = json.loads((folder / PACK_NAME).read_text())
        path = folder / packed_name(SHARD)
        entry = told["shards"][SHARD]
        content = path.read_bytes()
        end = 8 + int.from_bytes(content[:8], "little")
        header = json.loads(content[8:end])
        data = bytearray(content[end:])
        change(header, data, entry)
        fuzz.write_shard(path, header, data, odd)
        entry["packed"]["blake3"] = file_hash(path)
        (folder / PACK_NAME).write_text(json.dumps(told))

    @staticmethod
    def mask(header: dict[str, Any]) -> tuple[str, slice]:
        """The name of the first packed weight, and where its mask lies."""
        name = next(name for name in header if name.endswith(".mask"))
        return name.removesuffix(".mask"), slice(*header[name]["data_offsets"])

    def more_bits(self, header: Any, data: bytearray, entry: Any) -> None:
        place = self.mask(header)[1]
        data[place] = b"\xff" * (place.stop - place.start)

    def fewer_bits(self, header: Any, data: bytearray, entry: Any) -> None:
        place = self.mask(header)[1]
        data[place] = bytes(place.stop - place.start)

    def one_entry_of_two_tensors(self, header: Any, data: bytearray, entry: Any) -> None:
        name = f"{self.mask(header)[0]}.values"
        original = json.loads(entry["header"])
        size = header[name]["data_offsets"][1] - header[name]["data_offsets"][0]
        end = max(
            each["data_offsets"][1] for key, each in original.items() if key != "__metadata__"
        )
        original[name] = header[name] | {"data_offsets": [end, end + size]}
        entry["header"] = json.dumps(original)
        entry["bytes"] = 8 + len(entry["header"]) + end + size

    def shared_bytes(self, header: Any, data: bytearray, entry: Any) -> None:
        name, place = self.mask(header)
        header[f"{name}.values"]["data_offsets"][0] = place.start

    def values_of_another_dtype(self, header: Any, data: bytearray, entry: Any) -> None:
        header[f"{self.mask(header)[0]}.values"]["dtype"] = "F16"

    def more_rows(self, header: Any, data: bytearray, entry: Any) -> None:
        original = json.loads(entry["header"])
        original[self.mask(header)[0]]["shape"][0] *= 2
        entry["header"] = json.dumps(original)

    @pytest.mark.parametrize(
        ("change", "match"),
        [
            ("more_bits", r"its mask has 2,560 bits set for 1,280 values"),
            ("fewer_bits", r"its mask has 0 bits set for 1,280 values"),
            ("one_entry_of_two_tensors", r"weight\.values belongs to two tensors"),
            ("shared_bytes", r"weight\.values (overlaps|does not have the bytes)"),
            ("values_of_another_dtype", r"weight\.values does not have the dtype and the shape"),
            ("more_rows", r"does not have the bytes that its dtype and shape need"),
        ],
    )
    def test_crafted(self, folder: Path, change: str, match: str, command: Run) -> None:
        self.change(folder, getattr(self, change))
        for check in (True, False):
            with pytest.raises(UserError, match=match):
                load(folder, check=check)
        done = command(f"generate --prompt a --device cpu --model {folder}", code=2)
        assert (done.stderr.count("\n"), done.stderr[:7]) == (1, "error: ")

    def test_a_tensor_in_two_shards(self, folder: Path) -> None:
        told = json.loads((folder / PACK_NAME).read_text())
        told["shards"]["again.safetensors"] = told["shards"][SHARD]
        shutil.copy(folder / packed_name(SHARD), folder / "again.packed.safetensors")
        (folder / PACK_NAME).write_text(json.dumps(told))
        with pytest.raises(
            UserError,
            match=rf"{PACK_NAME}: not a sound packed file \(model\..* is "
            r"in two shards\)",
        ):
            load(folder)

    def test_a_header_of_2_gb(self, folder: Path) -> None:
        """In a file that takes no space."""
        path = folder / packed_name(SHARD)
        path.write_bytes((2 << 30).to_bytes(8, "little") + b"{")
        os.truncate(path, (2 << 30) + 8)

        def read() -> None:
            with pytest.raises(
                UserError, match="claims 2,147,483,648 bytes, and 100,000,000 are allowed"
            ):
                load(folder, check=False)

        assert peak_of(read) < 5e6

    def test_values_at_odd_bytes(self, packed: Path, folder: Path) -> None:
        self.change(folder, lambda *_: None, odd=1)
        found = load(folder)
        expected = load(packed)
        ids = torch.arange(3, 9)[None]
        for name, layer in sparse_layers(found).items():
            assert layer.values.data_ptr() % 2 == 0, name
        with torch.no_grad():
            assert torch.equal(found(ids).logits, expected(ids).logits)

    def test_a_file_that_shrinks(self, folder: Path) -> None:
        """Before it is opened, and between the check of its header and its mapping."""
        path = folder / packed_name(SHARD)
        weights = StoredWeights(folder)
        name = self.mask(json.loads(header_text(path)))[0]
        os.truncate(path, path.stat().st_size - 2)
        with pytest.raises(UserError, match=rf"{path.name}: .*weight.mask cannot be mapped"):
            weights.rows(name, 0.2)
        with pytest.raises(UserError, match=rf"{path.name}: not a complete safetensors file"):
            load(folder)

    def test_another_file_in_its_place(self, folder: Path) -> None:
        weights = StoredWeights(folder)
        path = folder / packed_name(SHARD)
        name = self.mask(json.loads(header_text(path)))[0]
        save_file(
            {f"{name}.mask": torch.zeros(8, dtype=torch.uint8), f"{name}.values": torch.zeros(0)},
            path,
        )
        with pytest.raises(UserError, match=rf"{path.name}: it changed while it was read"):
            weights.rows(name, 0.2)

    def test_a_matrix_of_odd_width(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Its bits are moved, as bytes, if there is room; none lies behind the last weight."""
        (tmp_path / "model").mkdir()
        save_file(
            {"a": torch.tensor([[0.0, 0.0, 0.0, 1.0, 0.0]] * 5)},
            tmp_path / "model" / "model.safetensors",
        )
        pack(tmp_path / "model", tmp_path / "packed")
        rows = StoredWeights(tmp_path / "packed").rows("a", 0.2)
        assert rows.offsets.tolist() == [0, 1, 2, 3, 4, 5]
        monkeypatch.setattr("emp_llm.runtime.loader.available_memory", lambda: 300)
        with pytest.raises(UserError, match=r"a needs 370 B of memory, and 300 B are free"):
            StoredWeights(tmp_path / "packed").rows("a", 0.2)
        monkeypatch.undo()
        path = tmp_path / "packed" / "model.packed.safetensors"
        content = bytearray(path.read_bytes())
        (place,) = (tensor.end for tensor in read_header(path) if tensor.name == "a.mask")
        content[place - 1] = 128
        path.write_bytes(content)
        with pytest.raises(UserError, match=r"a: a mask does not fit its numbers"):
            StoredWeights(tmp_path / "packed").rows("a", 0.2)


@pytest.fixture(scope="module")
def talking(evaluable_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a tokenizer."""
    return Path(shutil.copytree(evaluable_llama, tmp_path_factory.mktemp("talking") / "model"))


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{ raise_exception('\x1b[31mno') }}", r"the chat template refuses a conversation"),
        ("{{ messages.nothing.at.all }}", r"the chat template refuses a conversation"),
        ("{{ 1 // 0 }}", r"the chat template refuses a conversation"),
        ("{% for", r"the chat template refuses a conversation"),
        ("{{ 'x' * 100000000000 }}", r"the chat template refuses a conversation \(MemoryError\)"),
    ],
)
def test_a_chat_template_is_a_stranger_s_program(talking: Path, template: str, says: str) -> None:
    (talking / "chat_template.jinja").write_text(template)
    with pytest.raises(UserError, match=says) as caught:
        generate(talking, prompt="Hello", chat=True, max_new_tokens=2)
    assert "\x1b" not in str(caught.value)
    (talking / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    assert generate(talking, prompt="Hello", chat=True, max_new_tokens=2).text


def test_token_ids_beyond_the_embeddings(talking: Path, text: Path, tmp_path: Path) -> None:
    """The tokenizer of another model: a sentence, no error of an index."""
    source = tmp_path / "model"
    model = AutoModelForCausalLM.from_pretrained(talking)
    model.resize_token_embeddings(50)
    model.save_pretrained(source)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(talking / name, source / name)
    says = r"token id \d+ is beyond the model's 50 tokens. The tokenizer may be another model's"
    with pytest.raises(UserError, match=says):
        generate(source, prompt="Once upon a time", max_new_tokens=2)
    with pytest.raises(UserError, match=says):
        bench(source, output=tmp_path / "bench.json", prompt_tokens=8, new_tokens=2)
    suite = tmp_path / "mine.toml"
    suite.write_text(f'[perplexity]\nfile = "{text}"\nseqlen = 32\n')
    with pytest.raises(UserError, match=says):
        evaluate(source, suite=str(suite), output=tmp_path / "results.json")


@pytest.mark.parametrize("shape", [(0, 8), (8, 0), (0, 0)])
@pytest.mark.parametrize("group", ["row", "matrix", "all"])
def test_matrices_without_weights(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, shape: tuple[int, int], group: str
) -> None:
    source = tmp_path / "model"
    out = tmp_path / "out"
    source.mkdir()
    (source / "config.json").write_text('{"model_type": "nonesuch"}')
    full = "model.layers.0.mlp.up_proj"
    empty = "model.layers.0.mlp.down_proj"
    tensors = {f"{full}.weight": torch.randn(8, 8), f"{empty}.weight": torch.zeros(shape)}
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    report = prune(source, output=out, method="emp-magnitude", group=group)
    assert isinstance(report, RunReport)
    assert f"{empty} has no weights: its shape is {list(shape)}" in caplog.text
    check_verified(out, source)
    model = torch.nn.ModuleDict(
        {"a": torch.nn.Linear(8, 8), "b": torch.nn.Linear(shape[1], shape[0])}
    )
    recipe = recipe_of(method="magnitude", targets=".*", group=group)  # type: ignore[arg-type]
    assert set(prune_model(model, recipe).masks) == {"a.weight"}


def test_more_rows_than_kernels_count(model: Path) -> None:
    checkpoint = Checkpoint(model)
    name = "model.layers.0.mlp.up_proj.weight"
    architecture = Architecture.of_checkpoint(checkpoint)
    checkpoint.tensors[name] = replace(checkpoint.tensors[name], shape=(2**31 + 8, 1))
    with pytest.raises(
        UserError,
        match=r"at most 2,147,483,647 rows and columns can be pruned. Leave it out by "
        r"--ignore up_proj",
    ):
        architecture.select("mlp")
