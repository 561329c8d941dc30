"""pack and unpack: bit for bit, in little memory; damaged, foreign and hostile files are
refused.
"""

import json
import shutil
import struct
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Run
from hypothesis import given, settings
from hypothesis import strategies as st
from runs import report_of
from safetensors.torch import save_file
from tiny import weights_of
from transformers import AutoModelForCausalLM

from emp_llm import pack, unpack, verify
from emp_llm.checkpoint.checkpoint import Checkpoint
from emp_llm.checkpoint.matrices import (
    join_planes,
    mask_of,
    nonzero_words,
    put_zeros_in,
    split_planes,
    zstd_frames,
)
from emp_llm.checkpoint.packed import (
    PackedFolder,
    PackedSizes,
    PackLayout,
    other_files,
    pack_checkpoint,
    unpack_folder,
)
from emp_llm.common.errors import UserError

Models = Callable[[str], Path]


def packed_with(source: Path, folder: Path, layout: PackLayout) -> PackedSizes:
    """Pack into a new folder with a layout that the command does not offer."""
    folder.mkdir()
    checkpoint = Checkpoint(source)
    return pack_checkpoint(checkpoint, layout, other_files(checkpoint, layout), folder)


@pytest.fixture(scope="module")
def packed_llama(pruned_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pruned checkpoint, packed raw. Read-only."""
    folder = tmp_path_factory.mktemp("packed") / "packed"
    pack(pruned_llama, folder)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    """Every file by its path, without hidden ones."""
    found = {
        str(path.relative_to(folder)): path for path in sorted(folder.rglob("*")) if path.is_file()
    }
    return {name: path.read_bytes() for name, path in found.items() if not name.startswith(".")}


def odd_checkpoint(folder: Path) -> Path:
    """One shard with every dtype, special numbers, empty tensors, names that clash, and a header
    with blanks and metadata.
    """
    (folder / "sub").mkdir(parents=True)
    torch.manual_seed(0)
    late, early = torch.ones(2, 1000).bfloat16()
    late[64:], early[:64] = 0, 0
    tensors = {
        "bf16": torch.randn(70, 33).bfloat16(),
        "f16": torch.randn(513).half(),
        "f32": torch.randn(9, 31),
    }
    tensors["f64"] = torch.randn(65).double()
    for tensor in tensors.values():
        tensor.view(-1)[::2] = 0
    tensors |= {
        "i64": torch.arange(-9, 9),
        "u8": torch.arange(100, dtype=torch.uint8) % 3,
        "bool": torch.arange(100) % 3 == 0,
    }
    tensors |= {
        "f8": torch.randn(77).to(torch.float8_e4m3fn),
        "scalar": torch.tensor(0.0),
        "empty": torch.empty(0, 4),
    }
    tensors |= {
        "zero": torch.zeros(129).bfloat16(),
        "late": late,
        "early": early,
        "clash": torch.zeros(1000).half(),
    }
    tensors |= {"clash.mask": torch.ones(3).half(), "clash.values": torch.zeros(64).half()}
    special = [0.0, -0.0, float("nan"), -float("nan"), float("inf"), 1e-40]
    tensors["special"] = torch.tensor(special * 50).bfloat16()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt", "note": "ünïcode"})
    raw = (folder / "model.safetensors").read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    raw = struct.pack("<Q", length + 5) + raw[8 : 8 + length] + b" " * 5 + raw[8 + length :]
    (folder / "model.safetensors").write_bytes(raw)
    (folder / "sub" / "notes.bin").write_bytes(bytes(range(256)))
    (folder / "config.json").write_text("{}")
    return folder


@pytest.mark.parametrize("zstd", [False, True])
@pytest.mark.parametrize("family", ["gpt2", "qwen3_moe"])
def test_every_file_is_restored_bit_for_bit(
    pruned: Callable[[str], Path], tmp_path: Path, family: str, zstd: bool
) -> None:
    source = pruned(family)
    before = contents(source)
    told = report_of(source)["sizes"]
    sizes = pack(source, tmp_path / "packed", zstd=zstd).sizes
    unpack(tmp_path / "packed", tmp_path / "back")
    assert contents(tmp_path / "back") == before == contents(source)
    assert sizes.sparse > 0
    assert sizes.packed_bytes < sizes.dense_bytes
    assert told["dense"] == sum(t.nbytes for t in weights_of(source).values())
    if not zstd and family != "gpt2":  # whose biases are zero before it is pruned
        assert told["packed"] == sum(t.nbytes for t in weights_of(tmp_path / "packed").values())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "packed"], (
        "no temporary file is left"
    )
    assert pack(source, tmp_path / "again", zstd=zstd).sizes == sizes
    assert contents(tmp_path / "again") == contents(tmp_path / "packed")


@pytest.mark.parametrize("chunk", [64, 1 << 20])
@pytest.mark.parametrize("zstd", [False, True])
def test_every_dtype_and_odd_shapes(tmp_path: Path, zstd: bool, chunk: int) -> None:
    source = odd_checkpoint(tmp_path / "odd")
    sizes = packed_with(source, tmp_path / "packed", PackLayout(zstd=zstd, chunk=chunk))
    assert sizes.sparse >= 6
    unpack(tmp_path / "packed", tmp_path / "back")
    assert contents(tmp_path / "back") == contents(source)
    # plain safetensors, aligned
    parts = weights_of(tmp_path / "packed")
    original = weights_of(source)
    assert ("early" in parts, "late" in parts) == (not zstd, False), (
        "all zeros of a tensor decide its form"
    )
    if not zstd:
        assert torch.equal(parts["clash"], original["clash"])
        assert torch.equal(parts["bf16.values"], original["bf16"][original["bf16"] != 0])


@pytest.mark.parametrize("layout", [{}, {"zstd": True}, {"mask_only": True}])
def test_memory_does_not_grow_with_the_tensor(tmp_path: Path, layout: dict[str, Any]) -> None:
    def peak(rows: int) -> int:
        """Traced bytes while a matrix of `rows` times 2,000 bytes is packed and unpacked."""
        folder = tmp_path / str(rows)
        for name in ("model", "back"):
            (folder / name).mkdir(parents=True)
        weight = torch.randn(rows, 1000).bfloat16()
        save_file(
            {"w": weight.masked_fill(weight.abs() < 0.5, 0)}, folder / "model" / "model.safetensors"
        )
        source = Checkpoint(folder / "model")
        tracemalloc.start()
        packed_with(folder / "model", folder / "packed", PackLayout(chunk=1 << 13, **layout))
        unpack_folder(
            PackedFolder(folder / "packed"),
            source if "mask_only" in layout else None,
            folder / "back",
        )
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert contents(folder / "back") == contents(folder / "model")
        return peak

    peak(100)  # imports and caches
    assert peak(4000) - peak(1000) < 1_000_000, "of 6 MB more"


@pytest.mark.parametrize("zstd", [False, True])
def test_a_mask_and_the_base_are_the_pruned_checkpoint(
    pruned: Callable[[str], Path], models: Models, tmp_path: Path, zstd: bool
) -> None:
    source = pruned("qwen3_moe")
    base = str(models("qwen3_moe"))
    mask = tmp_path / "mask"
    sizes = pack(source, mask, zstd=zstd, mask_only=True).sizes
    assert sizes.packed_bytes == sum(path.stat().st_size for path in mask.glob("*.safetensors")), (
        "with the headers"
    )
    # Headers are most of it in a model this small.
    assert sizes.packed_bytes < sizes.dense_bytes / 4
    told = report_of(source)["sizes"]["mask"]
    assert zstd or told == sum(
        t.nbytes for name, t in weights_of(mask).items() if name.endswith(".mask")
    )
    unpack(mask, tmp_path / "back", base=base)
    assert contents(tmp_path / "back") == contents(source)
    tuned = shutil.copytree(source, tmp_path / "tuned")
    shard = next(tuned.glob("*.safetensors"))
    raw = shard.read_bytes()
    shard.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    pack(tuned, tmp_path / "changed", mask_only=True)
    for folder, on, said in (
        (mask, None, r"a mask holds no weights\. Name the model that it is for: --base"),
        (mask, str(source), "not those that were pruned"),
        (mask, str(models("llama")), r"it has no .* is not the model that the mask is for"),
        (tmp_path / "changed", base, "does not yield the packed file"),
    ):
        with pytest.raises(UserError, match=said):
            unpack(folder, tmp_path / "none", base=on)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "changed", "mask", "tuned"]


def test_sizes_of_gaussian_weights(tmp_path: Path) -> None:
    """At 40 % sparsity at most 0.67 of the dense bytes raw, at most 0.46 with zstd. Random zeros
    are the worst case.
    """
    torch.manual_seed(0)
    weight = torch.randn(1024, 1024).bfloat16() * 0.02
    for name, score in (("magnitude", weight.abs().float()), ("random", torch.rand(1024, 1024))):
        (tmp_path / name).mkdir()
        cut = score.flatten().kthvalue(int(0.4 * weight.numel())).values
        save_file({"w": weight.masked_fill(score <= cut, 0)}, tmp_path / name / "model.safetensors")
        for zstd, most in ((False, 0.67), (True, 0.46)):
            sizes = pack(tmp_path / name, tmp_path / f"{name}-{zstd}", zstd=zstd).sizes
            assert sizes.packed_bytes <= most * sizes.dense_bytes
    mask = pack(tmp_path / "random", tmp_path / "mask", mask_only=True).sizes
    assert mask.packed_bytes <= weight.numel() / 8 + 1000


@pytest.mark.parametrize(
    "options", [{}, {"zstd": True}, {"mask_only": True}, {"mask_only": True, "zstd": True}]
)
def test_damage_is_refused_and_leaves_nothing(
    pruned_llama: Path, tiny_llama: Path, tmp_path: Path, options: dict[str, bool]
) -> None:
    """A flipped bit is refused, or has no effect (in the padding of a header): the output is
    right, or there is none.
    """
    packed = tmp_path / "packed"
    pack(pruned_llama, packed, **options)
    base = str(tiny_llama) if "mask_only" in options else None
    wanted = contents(pruned_llama)
    rng = np.random.default_rng(0)
    refused = 0
    files = sorted(path for path in packed.rglob("*") if path.is_file())
    for path in rng.choice(files, 16):
        sound = path.read_bytes()
        raw = bytearray(sound)
        raw[rng.integers(len(raw))] ^= 1 << rng.integers(8)
        path.write_bytes(raw)
        try:
            unpack(packed, tmp_path / "back", base=base)
        except UserError:
            refused += 1
        else:
            assert contents(tmp_path / "back") == wanted
            shutil.rmtree(tmp_path / "back")
        assert [each.name for each in tmp_path.iterdir()] == ["packed"]
        path.write_bytes(sound)
    assert refused > 12


def test_truncated_and_missing_files_are_refused(packed_llama: Path, tmp_path: Path) -> None:
    packed = shutil.copytree(packed_llama, tmp_path / "packed")
    for path in [path for path in packed.rglob("*") if path.is_file()]:
        raw = path.read_bytes()
        path.write_bytes(raw[: len(raw) // 2])
        with pytest.raises(UserError):
            unpack(packed, tmp_path / "back")
        path.unlink()
        with pytest.raises(UserError):
            unpack(packed, tmp_path / "back")
        path.write_bytes(raw)
    unpack(packed, tmp_path / "back")


BOMB = json.dumps({"x": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]}})
BOMB_SHARD = {"header": BOMB, "bytes": (1 << 42) + 8 + len(BOMB)}


@pytest.mark.parametrize(
    ("top", "shard"),
    [
        ({"files": {"../escaped": "0" * 64}}, {}),
        ({"files": {"config.json": 3}}, {}),
        ({"shards": {"/tmp/escaped.safetensors": {}}}, {}),
        ({"shards": {}}, {}),
        ({"shards": []}, {}),
        ({}, BOMB_SHARD),
        ({"codec": "zstd", "block": 64}, BOMB_SHARD),
        ({"format": "emp-llm pack 2"}, {}),
        ({"format": "emp-llm pack x"}, {}),
        ({"kind": "mask"}, {}),
        ({"codec": "zstd"}, {}),
        ({"codec": "brotli"}, {}),
        ({"block": 0}, {}),
        ({"block": True}, {}),
        ({"base": None}, {}),
        ({}, {"bytes": -1}),
        ({}, {"header": "{}"}),
        ({}, {"header": 7}),
        ({}, {"blake3": "0" * 64}),
    ],
)
def test_hostile_lists_are_refused(
    packed_llama: Path, tmp_path: Path, top: dict[str, Any], shard: dict[str, Any]
) -> None:
    packed = shutil.copytree(packed_llama, tmp_path / "packed")
    told = json.loads((packed / "emp_pack.json").read_text())
    first = next(iter(told["shards"]))
    told["shards"][first] |= shard
    for key, value in top.items():
        if key == "base":
            del told[key]
        elif key == "files":
            told[key] |= value
        elif value and key == "shards":
            told[key] = dict.fromkeys(value, told[key][first])
        else:
            told[key] = value
    (packed / "emp_pack.json").write_text(json.dumps(told))
    with pytest.raises(UserError):
        unpack(packed, tmp_path / "deep" / "back")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["packed"]


def test_wrong_use_is_answered(pruned_llama: Path, tiny_llama: Path, tmp_path: Path) -> None:
    source = shutil.copytree(pruned_llama, tmp_path / "source")
    pack(source, tmp_path / "packed")
    for call, said in (
        (lambda: pack(tmp_path / "packed", tmp_path / "x"), "a packed checkpoint. Unpack it first"),
        (lambda: verify(tmp_path / "packed"), "a packed checkpoint. Unpack it first"),
        (lambda: pack(source, tmp_path / "packed"), "output .*: it exists"),
        (
            lambda: pack(source, source / "inside"),
            "it is the input folder, lies inside it or contains it",
        ),
        (lambda: pack(source, source), "it is the input"),
        (
            lambda: pack(tiny_llama, tmp_path / "x", mask_only=True),
            "it has no zeros, so it has no mask",
        ),
        (lambda: unpack(source, tmp_path / "x"), "no emp_pack.json in it"),
        (
            lambda: unpack(tmp_path / "packed", tmp_path / "x", base=str(tiny_llama)),
            "leave --base out",
        ),
        (lambda: unpack(tmp_path / "packed", source), "output .*: it exists"),
    ):
        with pytest.raises(UserError, match=said):
            call()
    (source / "pytorch_model.bin").write_bytes(b"weights")
    with pytest.raises(
        UserError,
        match=r"pytorch_model\.bin: other weights, which do not belong in a mask",
    ):
        pack(source, tmp_path / "x", mask_only=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["packed", "source"]
    pack(source, tmp_path / "packed", zstd=True, overwrite=True)
    unpack(tmp_path / "packed", source.with_name("other"))
    assert contents(tmp_path / "other") == contents(source)


def test_refused_with_the_remedy(
    pruned_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack(pruned_llama, tmp_path / "packed", zstd=True)
    told = (tmp_path / "packed" / "emp_pack.json").read_text()
    for more, said in (
        ({"format": "emp-llm pack 4"}, r"a newer emp-llm wrote it.*Update emp-llm"),
        ({"block": 128}, "dtype and the shape"),
    ):
        (tmp_path / "packed" / "emp_pack.json").write_text(json.dumps(json.loads(told) | more))
        with pytest.raises(UserError, match=said):
            unpack(tmp_path / "packed", tmp_path / "x")
    monkeypatch.setitem(sys.modules, "zstandard", None)
    (tmp_path / "packed" / "emp_pack.json").write_text(told)
    with pytest.raises(
        UserError,
        match=r"--zstd needs zstandard. Install it: pip install zstandard",
    ):
        pack(pruned_llama, tmp_path / "x", zstd=True)
    with pytest.raises(UserError, match=r"pip install zstandard"):
        unpack(tmp_path / "packed", tmp_path / "x")


def test_from_the_shell(pruned_llama: Path, tiny_llama: Path, command: Run, tmp_path: Path) -> None:
    done = command(f"pack --mask-only {pruned_llama} packed")
    assert "tensors sparse" in done.stdout
    unpack(tmp_path / "packed", tmp_path / "back", base=str(tiny_llama))
    AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    wrong = command("unpack packed other", code=2)
    assert wrong.stderr.startswith("error: ")
    assert "Traceback" not in wrong.stderr


@given(
    st.lists(st.integers(0, 3) | st.integers(0, 65535), max_size=300),
    st.sampled_from([np.uint8, np.uint16, np.uint32, np.uint64]),
)
@settings(deadline=None, max_examples=100)
def test_words_are_restored_from_their_parts(numbers: list[int], dtype: Any) -> None:
    words = np.array(numbers, dtype=np.uint64).astype(dtype)
    mask = mask_of(words)
    values = nonzero_words(words)
    assert [int(mask[j // 8] >> (j % 8) & 1) for j in range(8 * mask.size)] == [
        int(j < words.size and words[j] != 0) for j in range(8 * mask.size)
    ]
    assert values.dtype == dtype
    assert values.tolist() == [word for word in words.tolist() if word]
    assert np.array_equal(put_zeros_in(mask, values, words.size), words)
    for wrong in (np.append(values, dtype(1)), values[:-1]):
        if wrong.size != values.size:
            with pytest.raises(ValueError, match="bits set for"):
                put_zeros_in(mask, wrong, words.size)
    for name in ("BF16", "F32") if words.itemsize in (2, 4) else ("U8",):
        frames = [memoryview(frame) for frame in zstd_frames(split_planes(words, name))]
        assert np.array_equal(join_planes(frames, words.size, name), words)


@pytest.mark.parametrize("version", ["²", "9" * 5000, "4" * 10])
def test_versions_that_are_no_numbers(packed_llama: Path, tmp_path: Path, version: str) -> None:
    told = Path(shutil.copytree(packed_llama, tmp_path / "packed")) / "emp_pack.json"
    told.write_text(
        json.dumps(json.loads(told.read_text()) | {"format": f"emp-llm pack {version}"})
    )
    with pytest.raises(UserError, match=r"not a sound packed file \(its format is emp-llm pack"):
        unpack(tmp_path / "packed", tmp_path / "back")
