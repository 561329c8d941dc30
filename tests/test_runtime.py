"""The sparse runtime: products of packed rows against float64, models of every family, and the
commands that run them.
"""

import copy
import errno
import io
import itertools
import json
import os
import pickle
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import DEMO, Run
from hypothesis import given, settings
from hypothesis import strategies as st
from llvmlite import binding as llvm
from safetensors.torch import load_file, save_file
from tiny import FAMILIES, make_model
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import emp_llm
from emp_llm.checkpoint.checkpoint import StoredTensor
from emp_llm.checkpoint.packed import PackedFolder, PackedShard
from emp_llm.commands import bench as bench_file
from emp_llm.common.errors import UserError
from emp_llm.common.machine import torch_openmp
from emp_llm.records.base import read_record
from emp_llm.records.evaluation import Bench
from emp_llm.records.run_report import Results
from emp_llm.runtime import SparseLinear, cpu_kernel, load, loader
from emp_llm.runtime.cpu_kernel import (
    INSTRUCTIONS,
    CpuProducts,
    instructions_for,
    processor_features,
    product_module,
    tile_module,
)
from emp_llm.runtime.loader import NEVER, products_of, sparse_layers
from emp_llm.runtime.packed_rows import PackedRows, pack_rows, torch_product

Models = Callable[[str], Path]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Of a sum that is rounded once.
ERROR = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-20}
# The instructions of this processor and torch alone.
WAYS = [*(each.name for each in instructions_for(torch.bfloat16)), "torch"]
Product = Callable[..., Tensor]


def product_by(rows: PackedRows, way: str) -> Product:
    chosen = [each for each in INSTRUCTIONS if each.name == way]
    return CpuProducts(rows, chosen[0]) if chosen else partial(torch_product, rows)


def sparse_matrix(
    rows: int, columns: int, zeros: float, dtype: torch.dtype, seed: int = 0
) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    kept = torch.rand(rows, columns, generator=generator) >= zeros
    return torch.where(kept, torch.randn(rows, columns, generator=generator), 0).to(dtype)


def check_product(product: Tensor, x: Tensor, weight: Tensor) -> None:
    """Each product is the exact one, but for sums in float32 and one rounding, which is absolute
    for numbers below the smallest normal one.
    """
    exact = x.double() @ weight.double().T
    size = x.double().abs() @ weight.double().abs().T
    assert product.dtype == x.dtype
    assert product.shape == exact.shape
    about = torch.finfo(x.dtype)
    least = about.smallest_normal * about.eps / 2
    assert (
        (product.double() - exact).abs() <= ERROR[x.dtype] * exact.abs() + 2**-19 * size + least
    ).all()


@given(
    rows=st.integers(0, 70),
    columns=st.one_of(st.integers(1, 150), st.just(1000)),
    zeros=st.sampled_from([0.0, 0.3, 0.9, 1.0]),
    tokens=st.sampled_from([0, 1, 2, 5, 17, 40]),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60, deadline=None)
def test_products_are_those_of_float64(
    rows: int, columns: int, zeros: float, tokens: int, dtype: torch.dtype, seed: int
) -> None:
    weight = sparse_matrix(rows, columns, zeros, dtype, seed)
    packed = pack_rows(weight)
    assert torch.equal(packed.dense(), weight)
    assert packed.values.numel() == int(weight.ne(0).sum()) + int(
        (weight.eq(0) & weight.signbit()).sum()
    )
    x = torch.randn(tokens, columns, generator=torch.Generator().manual_seed(seed)).to(dtype)
    check_product(products_of(packed)(x), x, weight)
    for way in WAYS:
        check_product(product_by(packed, way)(x), x, weight)
        if tokens == 1:
            check_product(product_by(packed, way)(x.float()), x.float(), weight)


def test_special_numbers_survive() -> None:
    weight = torch.tensor(
        [[-0.0, 0.0, torch.inf, 0.0], [1e-40, 0.0, torch.nan, -1.0], [0.0, 0.0, 0.0, 0.0]]
    )
    for dtype in DTYPES:
        own = weight.to(dtype)
        packed = pack_rows(own)
        bits = torch.int32 if dtype == torch.float32 else torch.int16
        assert torch.equal(packed.dense().view(bits), own.view(bits))
        for tokens in (1, 20):
            product = products_of(packed)(torch.ones(tokens, 4, dtype=dtype))
            assert product[:, 0].eq(torch.inf).all()
            assert product[:, 1].isnan().all()
            assert product[:, 2].eq(0).all()


@pytest.mark.parametrize("way", WAYS)
def test_threads_change_no_bit(way: str) -> None:
    packed = pack_rows(sparse_matrix(3000, 200, 0.6, torch.bfloat16))
    x = torch.randn(30, 200).bfloat16()
    threads = torch.get_num_threads()
    results = []
    try:
        for number in (1, 2, 5):
            torch.set_num_threads(number)
            product = product_by(packed, way)
            results.append(torch.cat([product(x), product(x[:3])]))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(one, other) for one, other in pairwise(results))


def test_no_load_leaves_the_values(tmp_path: Path) -> None:
    """The last values lie at the end of a mapped page; a wide load behind them would kill the
    process.
    """
    size = 4096 // 2
    weight = torch.zeros(40, 64, dtype=torch.bfloat16)
    weight.view(-1)[:size] = torch.randn(size).bfloat16()
    path = tmp_path / "values"
    path.write_bytes(pack_rows(weight).values.view(torch.uint8).numpy().tobytes())
    values = torch.from_numpy(np.memmap(path, dtype=np.int16, mode="c")).view(torch.bfloat16)
    packed = pack_rows(weight)
    mapped = PackedRows(packed.mask, values, packed.offsets, packed.columns)
    x = torch.randn(2, 64).bfloat16()
    for way in WAYS:
        check_product(product_by(mapped, way)(x), x, weight)


def test_every_instruction_set_compiles() -> None:
    """For processors that are not here, to assembly: it must hold the instruction that spreads
    the values.
    """
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    wanted = {
        "avx512bf16": ("sapphirerapids", ["vpexpandw", "vdpbf16ps"]),
        "avx512": ("skylake-avx512", ["vpexpandd", "vfmadd"]),
        "avx2": ("haswell", ["vpermd", "vfmadd"]),
    }
    for instructions in INSTRUCTIONS:
        processor, names = wanted[instructions.name]
        dtypes = ("BF16",) if instructions.dot else cpu_kernel.NAMES.values()
        for dtype, of_module in itertools.product(dtypes, (product_module, tile_module)):
            result_dtype = (dtype,) if of_module is tile_module else ()
            module = of_module(dtype, instructions, *result_dtype, 2)
            module.triple = "x86_64-unknown-linux-gnu"
            parsed = llvm.parse_assembly(str(module))
            parsed.verify()
            machine = llvm.Target.from_triple(module.triple).create_target_machine(processor, opt=3)
            text = machine.emit_assembly(parsed)
            assert all(name in text for name in names)


@pytest.mark.skipif("len(WAYS) == 1", reason="this processor has neither AVX-512 nor AVX2")
@pytest.mark.parametrize("way", WAYS[:-1])
@pytest.mark.parametrize("columns", [203, 256, 4500])
def test_all_ways_at_every_number_of_tokens(
    way: str, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loops, the tiles and, on processors with AMX, torch's product, around their limits, with
    a bias that is added before the rounding.
    """
    monkeypatch.setattr(cpu_kernel, "_CHUNK", 30)  # tokens
    monkeypatch.setattr(cpu_kernel, "_TILED", 20)  # likewise
    monkeypatch.setattr(cpu_kernel, "_TORCH_TILE", 1 << 12)  # weights that are dense at a time
    weight = sparse_matrix(91, columns, 0.5, torch.bfloat16)
    bias = torch.randn(91).bfloat16()
    x = torch.randn(40, columns).bfloat16()
    wide_x = functional.pad(x, (0, 1), value=1)
    wide_weight = torch.cat([weight, bias[:, None]], 1)
    product = product_by(pack_rows(weight), way)
    by_torch = []
    of_torch = CpuProducts.by_torch

    def noted(self: CpuProducts, x: Tensor, bias: Tensor | None) -> Tensor:
        by_torch.append(x.shape[0])
        return of_torch(self, x, bias)

    monkeypatch.setattr(CpuProducts, "by_torch", noted)
    without_amx = processor_features() - {"amx-bf16"}
    for features in (without_amx, without_amx | {"amx-bf16"}):
        monkeypatch.setattr(cpu_kernel, "processor_features", lambda features=features: features)
        by_torch.clear()
        for tokens in range(41):
            check_product(product(x[:tokens]), x[:tokens], weight)
            check_product(product(x[:tokens], bias), wide_x[:tokens], wide_weight)
        has_amx = way == "avx512bf16" and features != without_amx
        assert set(by_torch) == set(range(21, 41) if has_amx else ())
        assert torch.equal(product(x.double()), product(x.float()).double())
        by_default = product(x.clone().requires_grad_())  # a model that is called without no_grad
        assert torch.equal(by_default.detach(), product(x))


def test_it_is_a_linear_layer() -> None:
    weight = sparse_matrix(30, 50, 0.5, torch.float32)
    bias = torch.nn.Parameter(torch.randn(30))
    layer = SparseLinear(pack_rows(weight), bias)
    dense = torch.nn.Linear(50, 30)
    dense.load_state_dict(layer.state_dict())
    assert torch.equal(layer.state_dict()["weight"], weight)
    with pytest.raises(RuntimeError, match="Unexpected key"):
        layer.load_state_dict({"weight": weight})
    x = torch.randn(2, 3, 50)
    with torch.no_grad():
        torch.testing.assert_close(layer(x), dense(x))
        # not contiguous.
        torch.testing.assert_close(layer(x.transpose(0, 1)), dense(x.transpose(0, 1)))
        assert layer(x[:, :0]).shape == (2, 0, 30)
        for same in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), layer.to("cpu")):
            assert torch.equal(same(x), layer(x))
    assert layer(x.double()).dtype == torch.float64
    doubled = copy.deepcopy(layer).double()  # its weights stay in float32
    assert torch.equal(doubled(x.double()), layer(x).double())
    assert torch.equal(doubled.state_dict()["weight"], weight)
    half_weight = sparse_matrix(8, 64, 0.5, torch.bfloat16)
    wide = torch.randn(1, 64)
    check_product(SparseLinear(pack_rows(half_weight)).float()(wide), wide, half_weight.float())


def test_without_a_compiler(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    loader.cpu_instructions.cache_clear()
    monkeypatch.setattr(loader, "find_spec", lambda name: None)
    weight = sparse_matrix(8, 70, 0.5, torch.bfloat16)
    x = torch.randn(3, 70).bfloat16()
    try:
        for _ in range(2):
            check_product(SparseLinear(pack_rows(weight))(x), x, weight)
    finally:
        loader.cpu_instructions.cache_clear()
    assert caplog.text.count("numba is missing") == 1


def half(model: Path, output: Path) -> None:
    """Remove half of all linear layers."""
    options = {"targets": "all-linear", "allow_partial": True, "quiet": True}
    emp_llm.prune(model, method="magnitude", sparsity=0.5, output=output, **options)


@pytest.fixture(scope="module")
def sparse_models(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Pruned checkpoint of a family, all linear layers, beside its packed folder FAMILY-packed;
    made at first use.
    """
    root = tmp_path_factory.mktemp("sparse")

    def folder(family: str) -> Path:
        if not (root / family).exists():
            half(models(family), root / family)
            emp_llm.pack(root / family, root / f"{family}-packed")
        return root / family

    return folder


def dense_of(folder: Path, dtype: Any = "auto") -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(family: str, sparse_models: Models, tmp_path: Path) -> None:
    folder = sparse_models(family)
    ids = torch.randint(3, 250, (2, 24), generator=torch.Generator().manual_seed(0))
    dense = dense_of(folder)
    exact = dense_of(folder, torch.float32)
    with torch.no_grad():
        expected = exact(ids).logits
    for source, packed in ((folder, load(folder)), (folder, load(f"{folder}-packed"))):
        assert type(packed) is type(dense)
        assert packed.dtype == dense.dtype
        assert len(sparse_layers(packed)) >= 8, source
        own = packed.state_dict()
        theirs = dense.state_dict()
        assert own.keys() == theirs.keys()
        assert all(torch.equal(own[name], theirs[name]) for name in own)
    with torch.no_grad():
        logits = load(f"{folder}-packed", dtype="float32")(ids).logits
        torch.testing.assert_close(
            logits, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max())
        )
        assert (packed(ids).logits - expected).abs().max() <= 2 * (
            dense(ids).logits - expected
        ).abs().max() + 1e-3
    options = {
        "max_new_tokens": 6,
        "do_sample": False,
        "attention_mask": torch.ones_like(ids[:, :5]),
        "pad_token_id": 2,
    }
    assert torch.equal(
        packed.generate(ids[:, :5], **options), dense.generate(ids[:, :5], **options)
    )
    packed.save_pretrained(tmp_path / "again")
    again = dense_of(tmp_path / "again")
    assert all(
        torch.equal(a, b) for a, b in zip(again.state_dict().values(), theirs.values(), strict=True)
    )


def test_values_are_mapped_and_not_copied(sparse_models: Models) -> None:
    folder = Path(f"{sparse_models('llama')}-packed")
    shards = [shard.path for shard in PackedFolder(folder).shards.values()]
    mapped = Path("/proc/self/maps")
    if not mapped.is_file():
        pytest.skip("this system does not list mapped files")
    model = load(folder)
    layer = model.model.layers[0].mlp.down_proj
    assert isinstance(layer, SparseLinear)
    areas = [
        line.split(maxsplit=5)
        for line in mapped.read_text().splitlines()
        if any(str(shard) in line for shard in shards)
    ]
    ranges = [tuple(int(end, 16) for end in area[0].split("-")) for area in areas]
    for tensor in (layer.values, model.model.embed_tokens.weight, model.model.norm.weight):
        assert any(first <= tensor.data_ptr() < last for first, last in ranges)


def test_layers_that_stay_dense(
    tiny_llama: Path, sparse_models: Models, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Those without enough zeros, and other dtypes."""
    assert not sparse_layers(load(tiny_llama))
    assert "no linear layer with enough zeros" in caplog.text
    assert not sparse_layers(load(sparse_models("llama"), least_zeros=2))
    assert not sparse_layers(load(f"{sparse_models('llama')}-packed", least_zeros=0.7))
    assert sparse_layers(load(f"{sparse_models('llama')}-packed", least_zeros=0.3))
    make_model(tmp_path / "dense", "llama", torch.float64)
    half(tmp_path / "dense", tmp_path / "pruned")
    assert not sparse_layers(load(tmp_path / "pruned"))
    assert "15 linear layers in F64, which is never packed" in caplog.text


def test_zstd_float16_and_damage(tmp_path: Path) -> None:
    make_model(tmp_path / "dense", "gpt2", torch.float16)
    half(tmp_path / "dense", tmp_path / "pruned")
    packed = tmp_path / "packed"
    emp_llm.pack(tmp_path / "pruned", packed, zstd=True)
    own = load(packed).state_dict()
    theirs = dense_of(tmp_path / "pruned").state_dict()
    assert all(torch.equal(own[name], theirs[name]) for name in theirs)
    shard = next(iter(PackedFolder(packed).shards.values())).path
    raw = bytearray(shard.read_bytes())
    raw[-5] ^= 1
    shard.write_bytes(raw)
    with pytest.raises(UserError, match=rf"{shard.name}: not a sound packed file .*checksum"):
        load(packed)
    (packed / "config.json").write_text("{}")
    with pytest.raises(UserError, match=r"config\.json: not a sound packed file"):
        load(packed)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("generate --model {}-packed --prompt=", "--prompt is empty"),
        ("generate --model {} --prompt a --chat", "has none. Leave it out"),
        ("generate --model {} --prompt a --max-new-tokens 200", "the model's 128 positions"),
        ("generate --model {} --prompt a --top-p 0.5", "no effect at temperature 0"),
        ("generate --model {} --prompt a --temperature -1", "--temperature must be at least 0"),
        (
            "generate --model {} --prompt a --device tpu",
            "--device 'tpu' is not auto, cpu, cuda or cuda:N",
        ),
        (
            "generate --model {}-mask --prompt a",
            "a mask holds no weights. Unpack it first: emp-llm unpack",
        ),
        ("generate --model {}-fp8 --prompt a", "it is quantised (fp8)"),
        ("evaluate --model {} --runtime sparse --load-in-8bit", "leave out --load-in-8bit"),
        ("evaluate --model {} --runtime sparse --device-map disk", "runs on one device"),
        (
            "evaluate --model {}-packed --suite perplexity",
            "a packed checkpoint. Unpack it first: emp-llm unpack",
        ),
        ("bench {}-t5", "bench measures models that continue their prompt"),
        (
            "bench {}-dense --prompt-tokens 8 --new-tokens 2",
            "no layer has enough zeros to be packed",
        ),
        ("bench {} --batch-sizes 1,1", "expected different whole numbers from 1 on"),
        ("bench {} --batch-sizes 0.5", "expected different whole numbers from 1 on"),
        ("bench {} --batch-sizes a", "expected numbers separated by commas"),
        ("bench {} --batch-sizes 1e12 --prompt-tokens 8", "8,000,000,000,000 tokens at once"),
    ],
)
def test_wrong_input(
    line: str, message: str, tiny_llama: Path, sparse_models: Models, command: Run, tmp_path: Path
) -> None:
    source = sparse_models("llama")
    if "-dense" in line:
        source = tiny_llama
        line = line.replace("-dense", "")
    changes = {
        "fp8": {"quantization_config": {"quant_method": "fp8"}},
        "t5": {"model_type": "t5", "is_encoder_decoder": True},
    }
    for name, change in changes.items():
        if f"-{name}" in line:
            config = json.loads((source / "config.json").read_text())
            (Path(shutil.copytree(source, f"{tmp_path}/model-{name}")) / "config.json").write_text(
                json.dumps(config | change)
            )
            source = tmp_path / "model"
    if "-mask" in line:
        emp_llm.pack(source, f"{source}-mask", mask_only=True)
    done = command(*(word.format(source) for word in line.split()), code=2)
    assert message in done.stderr
    assert not (tmp_path / "bench.json").exists()


def test_generate(sparse_models: Models, command: Run) -> None:
    model = sparse_models("llama")
    line = ("--prompt", "The lamp", "--max-new-tokens", 12, "--device", "cpu")
    sparse = command("generate --model", f"{model}-packed", *line)
    assert "8 prompt tokens, first new token after" in sparse.stderr
    assert "tokens/s; peak memory" in sparse.stderr
    quiet = command(f"generate --model {model}", *line, "--runtime", "dense", "-q")
    assert (quiet.stdout, quiet.stderr) == (sparse.stdout, "")


def test_a_prompt_of_standard_input_is_utf8(
    sparse_models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"na\xefve"), "utf-8"))
    with pytest.raises(UserError, match=r"prompt -: the standard input is not UTF-8"):
        emp_llm.generate(sparse_models("llama"), prompt="-", device="cpu")


@pytest.mark.skipif(torch_openmp() is None, reason="torch has no OpenMP of GCC here")
def test_generation_has_the_processors_for_itself(sparse_models: Models) -> None:
    """The threads of the caller's team end, or those of the generation would sleep at each wait."""
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        generation = emp_llm.generate(
            sparse_models("llama"), prompt="The lamp", max_new_tokens=3, device="cpu"
        )
        torch.ones(1 << 20).add_(1)
        before = len(os.listdir("/proc/self/task"))
        assert generation.text
        assert torch.get_num_threads() == 3
        deadline = time.monotonic() + 10  # its own threads end a moment later
        while len(os.listdir("/proc/self/task")) > before - 2:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        torch.set_num_threads(threads)


def test_generate_from_python(sparse_models: Models) -> None:
    generation = emp_llm.generate(
        sparse_models("llama"), prompt="The lamp", max_new_tokens=5, device="cpu"
    )
    assert "".join(generation) == generation.text
    assert generation.figures.new_tokens <= 5
    assert generation.figures.memory_bytes > 1e7
    first, same, other = (
        emp_llm.generate(
            sparse_models("llama"),
            prompt="The",
            max_new_tokens=8,
            temperature=1.5,
            seed=seed,
            device="cpu",
        ).text
        for seed in (1, 1, 2)
    )
    assert first == same != other
    halves = [
        emp_llm.generate(
            sparse_models("llama"), prompt=prompt, max_new_tokens=3, chat=False, device="cpu"
        ).text
        for prompt in ("The \ud83d", "The \ufffd")
    ]
    assert halves[0] == halves[1]
    abandoned = emp_llm.generate(
        sparse_models("llama"), prompt="The lamp", max_new_tokens=100, device="cpu"
    )
    pieces = iter(abandoned)
    next(pieces)
    pieces.close()  # as Ctrl-C does
    assert not any(thread.name == "emp-llm-generate" for thread in threading.enumerate())
    assert abandoned.figures is None
    text = abandoned.text  # from the beginning
    assert abandoned.text == text


def test_a_dense_load_packs_nothing(sparse_models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("emp_llm.runtime.loader.pack_words", None)
    model = load(sparse_models("llama"), least_zeros=NEVER)
    assert not sparse_layers(model)


def test_evaluate(sparse_models: Models, text: Path, tmp_path: Path) -> None:
    """What is judged is what is served: the same numbers, identity and recipe as for the dense
    execution.
    """
    folder = sparse_models("llama")
    results = {}
    for name, model, runtime in (
        ("dense", folder, "dense"),
        ("packed", f"{folder}-packed", "sparse"),
    ):
        options = {
            "suite": f"perplexity,file={text},seqlen=64",
            "limit": 20,
            "dtype": "float32",
            "quiet": True,
        }
        emp_llm.evaluate(
            str(model), runtime=runtime, output=tmp_path / name, device_map="cpu", **options
        )
        results[name] = read_record(tmp_path / name, Results)
    values = [record.perplexity.perplexity for record in results.values()]
    assert values[1] == pytest.approx(values[0], rel=1e-5)
    assert results["packed"].made_by.model == results["dense"].made_by.model
    assert results["packed"].pruned == results["dense"].pruned
    assert [each.made_by.runtime for each in results.values()] == [None, "sparse"]


def test_bench(sparse_models: Models, command: Run, tmp_path: Path) -> None:
    output = tmp_path / "bench.json"
    pruned = sparse_models("llama")
    line = (
        "--prompt-tokens",
        16,
        "--new-tokens",
        4,
        "--repeats",
        3,
        "--device",
        "cpu",
        "--output",
        output,
    )
    done = command("bench", f"{pruned}-packed", *line, "--batch-sizes", "3,1")
    record = read_record(output, Bench)
    assert record.layers == 14
    assert record.sparsity == pytest.approx(0.5, abs=0.02)
    assert record.sparse.weight_bytes < record.dense.weight_bytes
    assert record.text == "eval/demo/heldout.txt"
    assert record.text in done.stdout
    assert [batch.batch_size for batch in record.batches] == [1, 3]
    for batch in record.batches:
        assert batch.equal_tokens is not None
        for name, speed in (("prefill", batch.prefill), ("decode", batch.decode)):
            ratios = sorted(
                d / s for d, s in zip(speed.dense_seconds, speed.sparse_seconds, strict=True)
            )
            assert [speed.lowest_ratio, speed.ratio, speed.highest_ratio] == pytest.approx(
                ratios, rel=2e-2
            )
            assert f"{name} x {batch.batch_size}, tokens/s" in done.stdout
            assert (
                f"{speed.ratio:.2f}  {speed.lowest_ratio:.2f}-{speed.highest_ratio:.2f}"
            ) in done.stdout
    assert "exists" in command("bench", f"{pruned}-packed", *line, code=2).stderr
    command(f"report --no-plots {output} --output {tmp_path}/report")
    page = (tmp_path / "report" / "report.md").read_text()
    assert "## Speed and memory" in page
    assert f"({speed.ratio:.2f} x, {speed.lowest_ratio:.2f} to {speed.highest_ratio:.2f})" in page
    pushed = ("user/name", "--results", output, "--base-model", "user/base", "--dry-run")
    command("push", pruned, *pushed)
    assert ("is of other weights than those in") in command(
        "push", sparse_models("opt"), *pushed, code=2
    ).stderr


def test_bench_of_a_smaller_model(command: Run, tmp_path: Path) -> None:
    """A model with fewer units has no zeros to pack; it is compared with the one that is named."""
    small = tmp_path / "small"
    command(
        f"prune --model {DEMO} --structure neurons --method magnitude --sparsity 0.5 "
        f"--output {small}"
    )
    line = f"bench {small} --prompt-tokens 8 --new-tokens 2 --repeats 1 --batch-sizes 1"
    assert "Name the model to compare it with: --baseline." in command(line, code=2).stderr
    done = command(f"{line} --baseline {DEMO} --output {tmp_path}/bench.json")
    assert "dense  smaller  ratio" in done.stdout
    assert "packed" not in done.stdout
    record = read_record(tmp_path / "bench.json", Bench)
    assert record.layers == record.sparsity == 0
    assert record.sparse.weight_bytes < record.dense.weight_bytes
    command(f"report --no-plots {tmp_path}/bench.json --output {tmp_path}/report")
    assert "0.0%" not in (tmp_path / "report" / "report.md").read_text()


def test_bench_prompts(
    sparse_models: Models, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The first tokens of a text; random ones without a tokenizer."""
    model = Path(shutil.copytree(sparse_models("llama"), tmp_path / "model"))
    prompts = partial(bench_file._prompts, model, sequences=4)
    options = bench_file.BenchOptions(str(model), prompt_tokens=100, new_tokens=1)
    text, ids = prompts(options)
    assert (
        AutoTokenizer.from_pretrained(model).decode(ids.view(-1))
        == (Path(__file__).parents[1] / text).read_text()[:400]
    )
    for path in model.glob("tokenizer*"):
        path.unlink()
    text, random = prompts(options)
    assert text is None
    assert random.shape == ids.shape == (4, 100)
    assert "no tokenizer, so the prompts are random tokens" in caplog.text


class TestMemory:
    """A small packed folder may declare large tensors, and its config may ask for them: nothing
    large is expanded.
    """

    @pytest.fixture
    def expanded(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        """The names of the tensors that are expanded."""
        names = []
        words = PackedShard.words

        def listed(shard: PackedShard, tensor: StoredTensor) -> Iterator[Any]:
            names.append(tensor.name)
            return words(shard, tensor)

        monkeypatch.setattr(PackedShard, "words", listed)
        return names

    def packed(self, models: Models, folder: Path, **changes: Any) -> Path:
        """A packed folder of a dense model with more tensors, or others."""
        shutil.copytree(models("opt"), folder / "model")
        for shard in (folder / "model").glob("*.safetensors"):
            tensors = load_file(shard)
            tensors |= {name: changes.pop(name) for name in list(changes) if name in tensors}
            save_file(tensors, shard, {"format": "pt"})
        if changes:
            save_file(changes, folder / "model" / "more.safetensors", {"format": "pt"})
            for index in (folder / "model").glob("*.index.json"):
                told = json.loads(index.read_text())
                told["weight_map"] |= dict.fromkeys(changes, "more.safetensors")
                index.write_text(json.dumps(told))
        emp_llm.pack(folder / "model", folder / "packed", zstd=True)
        return folder / "packed"

    @pytest.mark.parametrize("check", [False, True])
    def test_a_tensor_without_use(
        self,
        models: Models,
        expanded: list[str],
        tmp_path: Path,
        caplog: pytest.LogCaptureFixture,
        check: bool,
    ) -> None:
        load(self.packed(models, tmp_path, unused=torch.zeros(1 << 20)), check=check)
        assert expanded
        assert "unused" not in expanded
        assert "holds 1 tensor that the model does not use: unused" in caplog.text

    def test_a_tensor_of_another_shape(
        self, models: Models, expanded: list[str], tmp_path: Path
    ) -> None:
        name = "model.decoder.layers.0.fc1.bias"
        folder = self.packed(models, tmp_path, **{name: torch.zeros(1 << 20)})
        with pytest.raises(
            UserError,
            match=r"packed: the checkpoint does not fit "
            rf"config\.json.*{name} is \[1048576\]",
        ):
            load(folder)
        assert not expanded

    @pytest.mark.parametrize("packed", [False, True])
    def test_a_config_of_large_weights(
        self, sparse_models: Models, tmp_path: Path, packed: bool
    ) -> None:
        """The machine does not have the petabytes that it asks for."""
        shutil.copytree(f"{sparse_models('llama')}{'-packed' * packed}", tmp_path / "model")
        config = json.loads((tmp_path / "model" / "config.json").read_text()) | {
            "vocab_size": 1 << 45
        }
        (tmp_path / "model" / "config.json").write_text(json.dumps(config))
        with pytest.raises(
            UserError,
            match=r"the checkpoint does not fit config\.json\. The shapes of 2 weights differ",
        ):
            load(tmp_path / "model", check=False)

    def test_more_than_the_free_memory(
        self,
        models: Models,
        sparse_models: Models,
        expanded: list[str],
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        emp_llm.pack(sparse_models("llama"), tmp_path / "packed", zstd=True)
        for free, names in ((10_000, 0), (40_000, 14)):
            monkeypatch.setattr("emp_llm.runtime.loader.available_memory", lambda free=free: free)
            with pytest.raises(
                UserError,
                match=r"packed: .* needs [\d.]+ kB of memory, and \d+\.0 kB are free",
            ):
                load(tmp_path / "packed")
            assert len(expanded) <= names


def test_a_tokenizer_cannot_write_to_the_terminal(
    sparse_models: Models, tmp_path: Path, command: Run
) -> None:
    """Control characters of a generated text are shown, and not obeyed; Python gets them as they
    are.
    """
    model = Path(shutil.copytree(sparse_models("llama"), tmp_path / "model"))
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    tokenizer["decoder"] = {
        "type": "Replace",
        "pattern": {"Regex": ".+"},
        "content": "\x1b]0;title\x07\r\x9b2J\u200dé\n",
    }
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    line = ("--model", model, "--prompt", "The lamp", "--max-new-tokens", 12, "--device", "cpu")
    done = command("generate", *line)
    assert "�]0;title��" in done.stdout
    assert "\u200dé\n" in done.stdout
    assert not set(done.stdout) & set("\x1b\x07\x9b")
    assert (
        "\x1b]0;"
        in emp_llm.generate(str(model), prompt="The lamp", max_new_tokens=12, device="cpu").text
    )


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_a_bench_on_a_failing_disk(
    sparse_models: Models,
    command: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
) -> None:
    """A failure is told before the measurement; one after it still shows the figures."""
    output = tmp_path / "results" / "bench.json"
    line = (
        f"{sparse_models('llama')}-packed",
        "--prompt-tokens",
        8,
        "--new-tokens",
        2,
        "--repeats",
        1,
        "--device",
        "cpu",
    )
    run = bench_file._time_run

    def fail(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    for moment in ("before", "after"):
        if moment == "before":
            monkeypatch.setattr("emp_llm.commands.bench.write_bytes", fail)
            monkeypatch.setattr(bench_file, "_time_run", None)
        else:
            monkeypatch.undo()
            assert bench_file._time_run is run
            monkeypatch.setattr(Bench, "save", fail)
        done = command("bench", *line, "--output", output, code=2)
        assert (
            f"error: --output {output}: cannot be written there ({os.strerror(number).lower()})"
        ) in done.stderr
        assert ("prefill x 1, tokens/s" in done.stderr) == (moment == "after")
        assert not list(output.parent.glob("*"))
