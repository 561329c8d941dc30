"""Products with packed rows on CPUs: loops in LLVM IR, compiled at their first use for the
processor on which they run.

A mask word has the bits of 64 columns. The loops take it in chunks of one vector: they load as many
values as the vector holds, spread them over the lanes whose bits are set, and leave zero in the
others. A row is always summed in the same order, so results do not depend on the number of threads.
"""

import ctypes
import hashlib
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from llvmlite import binding as llvm
from llvmlite import ir
from torch import Tensor
from torch.nn import functional

from emp_llm.checkpoint.files import write_bytes
from emp_llm.common.paths import cache_folder
from emp_llm.runtime.packed_rows import WORD_COLUMNS, PackedRows

I1, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
FLOAT = ir.FloatType()
NAMES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}
_WORD = {"BF16": I16, "F16": I16, "F32": I32}
_LONGEST_LOAD = 32  # values that one load reads
_AHEAD = 4096  # bytes of values of each row to ask for in advance
_MOST_VECTORS = 8  # of inputs that are multiplied together; more leave no registers for their sums
_FEW = 192  # tokens whose inputs stay in the cache while many rows pass
_CACHED = 9 << 16  # bytes of dense rows that stay in a thread's cache
_MARGIN = 1.05  # by which torch must be faster: fewer columns than those measured favour the loops
_TILE = 1 << 21  # weights that are dense at a time for torch, for each thread
_OPENMP = ("libgomp", "libiomp5", "libomp")  # each has GOMP_parallel
Values = Sequence[Any]  # values of LLVM that a loop carries
# (index of a row, number of a chunk) -> the weights of the chunk, one vector
Weights = Callable[[int, int], Any]
_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)

# A task is an array of numbers of 64 bits. All threads call one function with the same task; each
# takes the next stripe of rows until none is left. A stride is the distance of two rows in numbers.
_TASK = (
    "next",  # number of the next stripe, which threads raise
    "stripes",  # number of stripes
    "first",  # row
    "last",  # row after the last one
    "height",  # rows of a stripe
    "slot",  # number of the next thread, which threads raise
    "values",  # address
    "tail",  # address of a copy of the last values, followed by room for the widest load
    "safe",  # row from which on the values are read from the tail
    "mask",  # address
    "offsets",  # address
    "words",  # mask words of a row
    "tokens",  # rows of inputs
    "tile",  # address of the rows that are made dense
    "tile_stride",
    "inputs",  # address
    "inputs_stride",
    "results",  # address
    "results_stride",
)
_Task = ctypes.c_int64 * len(_TASK)
_engines: list[Any] = []  # they own the compiled code


@dataclass(frozen=True, eq=False)
class Instructions:
    """How a processor spreads the values of a chunk over its columns, and multiplies.

    Attributes:
        name: of the set of instructions.
        features: names in LLVM of what a processor needs for it.
        lanes: columns of a chunk.
        sums: how many vectors of sums leave enough registers for weights and inputs.
        spread: (builder, address of the values, position, bits from the chunk on, dtype) -> the
            words of the columns, in 32 bits each; for `dot`, in 16.
        dot: weights and inputs are multiplied in bfloat16. Otherwise they become float32 numbers.
    """

    name: str
    features: tuple[str, ...]
    lanes: int
    sums: int
    spread: Callable[[Any, Any, Any, Any, str], Any]
    dot: bool = False

    @property
    def dtype(self) -> torch.dtype:
        """In which weights and inputs are multiplied."""
        return torch.bfloat16 if self.dot else torch.float32


class CpuProducts:
    """Multiplies packed rows on the CPU.

    Args:
        rows: on the CPU; kept as long as this object.
        instructions: those of this processor for the dtype of the rows.
    """

    def __init__(self, rows: PackedRows, instructions: Instructions) -> None:
        self._rows = rows
        self._dtype = NAMES[rows.values.dtype]
        self._instructions = instructions
        self._padded = rows.words * WORD_COLUMNS
        safe = int(
            torch.searchsorted(rows.offsets[1:], rows.values.numel() - _LONGEST_LOAD, right=True)
        )
        before = int(rows.offsets[safe])
        self._tail = functional.pad(rows.values[before:], (0, _LONGEST_LOAD))
        # So that the same positions hold.
        tail = self._tail.data_ptr() - before * rows.values.element_size()
        self._weights = (
            rows.values.data_ptr(),
            tail,
            safe,
            rows.mask.data_ptr(),
            rows.offsets.data_ptr(),
            rows.words,
        )

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x @ W.T + bias for x of shape (tokens, inputs), in float32 sums, rounded once to the
        dtype of x.

        Returns:
            Shape (tokens, outputs).
        """
        instructions = self._instructions
        if instructions.dot and x.dtype != torch.bfloat16:
            instructions = AVX512
        if x.shape[0] <= _MOST_VECTORS or x.shape[0] <= most_loop_tokens(instructions):
            return self.by_loops(x, instructions, bias)
        return self.by_torch(x, instructions, bias)

    def by_loops(self, x: Tensor, instructions: Instructions, bias: Tensor | None = None) -> Tensor:
        """The products by the compiled loops. For many tokens, they make a stripe of rows dense in
        the thread's cache first.
        """
        tokens = x.shape[0]
        rows = self._rows.rows
        threads = torch.get_num_threads()
        inputs = self._room(tokens, instructions).zero_()
        result = x.new_empty(tokens, rows)
        tiles = tokens > _MOST_VECTORS
        inputs[:, : x.shape[1]] = x
        cached_rows = _CACHED // (inputs.stride(0) * inputs.itemsize) // 12 * 12
        height = max(12, min(cached_rows, rows // (4 * threads)))
        tile = self._room(threads * height if tiles else 0, instructions)
        sums = torch.empty(min(_FEW, tokens), rows)
        for first in range(0, tokens if rows else 0, _FEW):
            some_inputs = inputs[first : first + _FEW]
            some_sums = sums[: tokens - first]
            passes = -(-some_inputs.shape[0] // _MOST_VECTORS)
            vectors = -(-some_inputs.shape[0] // passes)
            product = _compiled(product_module, self._dtype, instructions, vectors, tiles)
            self._run(product, 0, rows, height, tile, some_inputs, some_sums)
            if bias is not None:
                some_sums.add_(bias)
            result[first : first + _FEW] = some_sums
        return result

    @torch.no_grad()  # with a gradient, torch writes no result in place
    def by_torch(self, x: Tensor, instructions: Instructions, bias: Tensor | None = None) -> Tensor:
        """The products by torch, in the dtype of the instructions: a tile of rows after another is
        made dense.
        """
        tokens = x.shape[0]
        rows = self._rows.rows
        threads = torch.get_num_threads()
        inputs = x.to(instructions.dtype)
        result = inputs.new_empty(tokens, rows)
        dense = _compiled(dense_module, self._dtype, instructions)
        tile = self._room(max(1, min(rows, threads * _TILE // max(1, self._padded))), instructions)
        for first in range(0, rows, tile.shape[0]):
            last = min(first + tile.shape[0], rows)
            self._run(dense, first, last, -(-(last - first) // (4 * threads)), tile)
            weights = tile[: last - first, : x.shape[1]].T
            products = result[:, first:last]
            if bias is None:
                torch.mm(inputs, weights, out=products)
            else:
                some_bias = bias[first:last].to(instructions.dtype)
                torch.addmm(some_bias, inputs, weights, out=products)
        return result.to(x.dtype)

    def _room(self, rows: int, instructions: Instructions) -> Tensor:
        """Memory for dense rows, padded to whole mask words. One word lies between two rows, or
        many rows would share the same lines of the cache.
        """
        return torch.empty(rows, self._padded + WORD_COLUMNS, dtype=instructions.dtype)[
            :, : self._padded
        ]

    def _run(
        self,
        function: int,
        first: int,
        last: int,
        height: int,
        tile: Tensor,
        *inputs_and_results: Tensor,
    ) -> None:
        matrices = [
            number
            for matrix in (tile, *inputs_and_results)
            for number in (matrix.data_ptr(), matrix.stride(0))
        ]
        stripes = -(-(last - first) // height)
        tokens = inputs_and_results[0].shape[0] if inputs_and_results else 0
        task = _Task(0, stripes, first, last, height, 0, *self._weights, tokens, *matrices)
        _run_on_threads(function, ctypes.addressof(task), min(stripes, torch.get_num_threads()))


@cache
def most_loop_tokens(instructions: Instructions) -> int:
    """The most tokens for which the compiled loops are faster than torch with dense rows.

    This is measured once for a processor, its threads and a version of torch, in about a
    second; the result is kept in a file of the cache folder.
    """
    machine = (
        llvm.get_host_cpu_name(),
        sorted(processor_features()),
        instructions.name,
        torch.get_num_threads(),
        torch.__version__,
    )
    path = cache_folder() / "products" / hashlib.sha256(repr(machine).encode()).hexdigest()[:32]
    with suppress(OSError, ValueError):
        return int(path.read_text())
    rows = 2048  # more weights than a cache holds
    columns = 4096
    counts = (16, 32, 64, 128, 256)
    gains = [0.0]
    offsets = torch.arange(0, rows * columns // 2 + 1, columns // 2)
    mask = torch.full((rows, columns // 8), 0x55, dtype=torch.uint8)
    values = torch.ones(rows * columns // 2, dtype=instructions.dtype)
    products = CpuProducts(PackedRows(mask, values, offsets, columns), instructions)
    for tokens in counts:
        x = torch.ones(tokens, columns, dtype=instructions.dtype)
        seconds = []
        for run in 3 * (products.by_loops, products.by_torch):
            begin = time.perf_counter()
            run(x, instructions)
            seconds.append(time.perf_counter() - begin)
        gains.append(gains[-1] + math.log(_MARGIN * min(seconds[1::2]) / min(seconds[::2])))
    # One wrong time does not decide.
    most = (_MOST_VECTORS, *counts[:-1], 1 << 62)[gains.index(max(gains))]
    with suppress(OSError):
        write_bytes(path, str(most).encode())
    return most


@cache
def processor_features() -> frozenset[str]:
    """The names in LLVM of what this processor can do."""
    return frozenset(name for name, has in llvm.get_host_cpu_features().items() if has)


def instructions_for(dtype: torch.dtype) -> list[Instructions]:
    """The instructions of this processor for weights of a dtype, the fastest first."""
    fitting = [
        each
        for each in INSTRUCTIONS
        if dtype == torch.bfloat16 or (dtype in NAMES and not each.dot)
    ]
    return [each for each in fitting if processor_features().issuperset(each.features)]


def product_module(dtype: str, instructions: Instructions, vectors: int, tiles: bool) -> ir.Module:
    """Products of rows with inputs: results[token, row] = sum over the columns of
    W[row, column] * inputs[token, column]. The inputs are in the dtype of the instructions, and
    zero beyond the columns; the results are float32.

    Args:
        dtype: of the values: "BF16", "F16" or "F32".
        vectors: tokens that are taken together, at most the number of tokens. The last ones end
            with the last token, so some may be taken twice.
        tiles: a stripe of rows is made dense in `tile`, which has room for one of each thread.
            Otherwise no dense row is written to memory.
    """
    word = ir.VectorType(I16 if instructions.dot else FLOAT, instructions.lanes)
    sum_type = ir.VectorType(
        FLOAT, instructions.lanes // 2 if instructions.dot else instructions.lanes
    )
    # Rows that share their loads of the inputs.
    shared = min(4, instructions.sums // vectors) if vectors > 1 else 1
    # A single result has two sums, or each addition would wait for the one before.
    parallel = 2 if vectors == 1 else 1

    def product(
        b: Any, task: dict[str, Any], tile: Any, token: Any, row: Any, together: int
    ) -> None:
        """The results of `vectors` tokens from `token` on and `together` rows from `row` on."""
        rows = [b.add(row, number(i)) for i in range(together)]
        tokens = [b.add(token, number(j)) for j in range(vectors)]
        inputs = [b.mul(each, task["inputs_stride"]) for each in tokens]
        dense = [b.mul(b.add(tile, each), task["tile_stride"]) for each in rows]

        def add_word(at: Any, weights: Weights, sums: list[Any]) -> list[Any]:
            for chunk in range(WORD_COLUMNS // instructions.lanes):
                factors = [weights(i, chunk) for i in range(together)]
                column = _column(b, instructions, at, chunk)
                for j in range(vectors):
                    x = fetch(b, task["inputs"], b.add(column, inputs[j]), word)
                    for i in range(together):
                        k = (i * vectors + j) * parallel + chunk % parallel
                        sums[k] = _multiply_add(b, sums[k], factors[i], x)
            return sums

        def add_dense(at: Any, sums: list[Any]) -> list[Any]:
            def weights(i: int, chunk: int) -> Any:
                column = _column(b, instructions, at, chunk)
                return fetch(b, task["tile"], b.add(dense[i], column), word)

            return add_word(at, weights, sums)

        sums = [ir.Constant(sum_type, None)] * (together * vectors * parallel)
        if tiles:
            sums = _for_range(b, number(0), task["words"], 1, sums, add_dense)
        else:
            sums = _for_each_mask_word(b, task, instructions, dtype, rows, sums, add_word)
        for i in range(together):
            for j in range(vectors):
                lanes = sums[(i * vectors + j) * parallel]
                if parallel == 2:
                    lanes = b.fadd(lanes, sums[1])
                name = f"llvm.vector.reduce.fadd.v{sum_type.count}f32"
                total = intrinsic(b, name, FLOAT, [ir.Constant(FLOAT, -0.0), lanes], ("reassoc",))
                place = b.add(rows[i], b.mul(task["results_stride"], tokens[j]))
                store(b, total, task["results"], place)

    def multiply_stripe(b: Any, task: dict[str, Any], first: Any, last: Any) -> None:
        # The place of a row in the tile, less its number.
        tile = b.sub(b.mul(task["slot"], task["height"]), first)
        if tiles:
            _make_dense(b, task, instructions, dtype, tile, first, last)
        middle = b.add(first, b.mul(b.sdiv(b.sub(last, first), number(shared)), number(shared)))

        def of_tokens(token: Any, _: Any) -> None:
            latest = b.sub(task["tokens"], number(vectors))
            token = b.select(b.icmp_signed("<", token, latest), token, latest)
            _for_range(
                b,
                first,
                middle,
                shared,
                [],
                lambda row, _: product(b, task, tile, token, row, shared),
            )
            if shared > 1:
                _for_range(
                    b, middle, last, 1, [], lambda row, _: product(b, task, tile, token, row, 1)
                )

        _for_range(b, number(0), task["tokens"], vectors, [], of_tokens)

    return _module(multiply_stripe)


def dense_module(dtype: str, instructions: Instructions) -> ir.Module:
    """Rows with their zeros: tile[row - first, column], in the dtype of the instructions, for all
    columns of their mask words.
    """

    def expand_stripe(b: Any, task: dict[str, Any], first: Any, last: Any) -> None:
        _make_dense(b, task, instructions, dtype, b.neg(task["first"]), first, last)

    return _module(expand_stripe)


def _make_dense(
    b: Any,
    task: dict[str, Any],
    instructions: Instructions,
    dtype: str,
    tile: Any,
    first: Any,
    last: Any,
) -> None:
    """Write the dense rows first to last - 1; row r is row r + `tile` of the task's tile."""

    def dense(row: Any, _: Any) -> None:
        start = b.mul(b.add(row, tile), task["tile_stride"])

        def put_word(at: Any, weights: Weights, _: list[Any]) -> None:
            for chunk in range(WORD_COLUMNS // instructions.lanes):
                store(
                    b,
                    weights(0, chunk),
                    task["tile"],
                    b.add(start, _column(b, instructions, at, chunk)),
                )

        _for_each_mask_word(b, task, instructions, dtype, [row], [], put_word)

    _for_range(b, first, last, 1, [], dense)


def _column(b: Any, instructions: Instructions, at: Any, chunk: int) -> Any:
    """The first column of a chunk of the mask word at a place."""
    return b.add(b.mul(at, number(WORD_COLUMNS)), number(chunk * instructions.lanes))


def _module(body: Callable[[Any, dict[str, Any], Any, Any], None]) -> ir.Module:
    """A function `run(task)` that runs the code of `body(builder, task, first, last)` for stripe
    after stripe of rows, first to last - 1, until none is left.
    """
    module = ir.Module("rows")
    run = ir.Function(module, ir.FunctionType(ir.VoidType(), [I64.as_pointer()]), "run")
    b = ir.IRBuilder(run.append_basic_block("entry"))
    task = {name: b.load(b.gep(run.args[0], [number(place)])) for place, name in enumerate(_TASK)}
    task["slot"] = b.atomic_rmw(
        "add", b.gep(run.args[0], [number(_TASK.index("slot"))]), number(1), "monotonic"
    )
    for name in ("values", "tail", "mask", "offsets", "tile", "inputs", "results"):
        task[name] = b.inttoptr(task[name], I8.as_pointer())

    def take() -> Any:
        return b.atomic_rmw("add", run.args[0], number(1), "monotonic")

    def stripe(values: list[Any]) -> Values:
        first = b.add(task["first"], b.mul(values[0], task["height"]))
        end = b.add(first, task["height"])
        body(b, task, first, b.select(b.icmp_signed("<", end, task["last"]), end, task["last"]))
        return [take()]

    _while(b, [take()], lambda values: b.icmp_signed("<", values[0], task["stripes"]), stripe)
    b.ret_void()
    return module


def _for_each_mask_word(
    b: Any,
    task: dict[str, Any],
    instructions: Instructions,
    dtype: str,
    rows: Values,
    initial: Values,
    body: Callable[[Any, Weights, list[Any]], Values | None],
) -> list[Any]:
    """Walk some rows together, `values = body(at, weights, values)` for each mask word: `at` is its
    place in a row, and `weights` gives the weights of its chunks. Returns the last values.
    """
    word = _WORD[dtype]
    starts = [fetch(b, task["offsets"], row, I64) for row in rows]
    masks = [b.mul(row, task["words"]) for row in rows]
    values = [
        b.select(b.icmp_signed("<", row, task["safe"]), task["values"], task["tail"])
        for row in rows
    ]

    def one_word(at: Any, carried: list[Any]) -> Values:
        places = carried[: len(rows)]
        others = carried[len(rows) :]
        bits = [fetch(b, task["mask"], b.add(mask, at), I64) for mask in masks]
        for base, place in zip(values, places, strict=True):
            _ask_for(b, base, b.add(place, number(_AHEAD * len(rows) * 8 // word.width)), word)

        def weights(i: int, chunk: int) -> Any:
            first = chunk * instructions.lanes
            below = _popcount(b, b.and_(bits[i], number((1 << first) - 1)))
            words = instructions.spread(
                b, values[i], b.add(places[i], below), b.lshr(bits[i], number(first)), dtype
            )
            return words if instructions.dot else _floats(b, words, dtype, instructions.lanes)

        following = body(at, weights, others) or []
        return [
            *(b.add(place, _popcount(b, mask)) for place, mask in zip(places, bits, strict=True)),
            *following,
        ]

    return _for_range(b, number(0), task["words"], 1, [*starts, *initial], one_word)[len(rows) :]


def _multiply_add(b: Any, sums: Any, weights: Any, x: Any) -> Any:
    """sums + weights * x. Of bfloat16 words, two adjacent products are added to each sum."""
    sum_type = sums.type
    if weights.type == sum_type:
        return intrinsic(b, f"llvm.fma.v{sum_type.count}f32", sum_type, [weights, x, sums])
    pairs = ir.VectorType(I32, sum_type.count)
    arguments = [sums, b.bitcast(weights, pairs), b.bitcast(x, pairs)]
    return intrinsic(b, "llvm.x86.avx512bf16.dpbf16ps.512", sum_type, arguments)


def _floats(b: Any, words: Any, dtype: str, lanes: int) -> Any:
    """The words of a chunk as float32 numbers."""
    floats = ir.VectorType(FLOAT, lanes)
    if dtype == "F16":
        halves = b.trunc(words, ir.VectorType(I16, lanes))
        return b.fpext(b.bitcast(halves, ir.VectorType(ir.HalfType(), lanes)), floats)
    if dtype == "BF16":
        words = b.shl(words, ir.Constant(words.type, [16] * lanes))
    return b.bitcast(words, floats)


def _next_values(b: Any, values: Any, at: Any, lanes: int, dtype: str) -> Any:
    """The values from a position, extended with zeros to 32 bits."""
    words = fetch(b, values, at, ir.VectorType(_WORD[dtype], lanes))
    return words if dtype == "F32" else b.zext(words, ir.VectorType(I32, lanes))


def _expand(b: Any, values: Any, at: Any, bits: Any, dtype: str) -> Any:
    """Spread values by vpexpandd."""
    return _expand_vector(b, _next_values(b, values, at, 16, dtype), bits)


def _expand_words(b: Any, values: Any, at: Any, bits: Any, dtype: str) -> Any:
    """Spread values by vpexpandw."""
    return _expand_vector(b, fetch(b, values, at, ir.VectorType(I16, 32)), bits)


def _expand_vector(b: Any, words: Any, bits: Any) -> Any:
    """The words in turn in the lanes whose bits are set, and zero in the others."""
    count = words.type.count
    lanes = b.bitcast(b.trunc(bits, ir.IntType(count)), ir.VectorType(I1, count))
    name = f"llvm.x86.avx512.mask.expand.v{count}i{words.type.element.width}"
    return intrinsic(b, name, words.type, [words, ir.Constant(words.type, None), lanes])


def _permute(b: Any, values: Any, at: Any, bits: Any, dtype: str) -> Any:
    """Spread values by vpermd: a table has, for each mask of eight bits, the number of set bits
    below each bit.
    """
    words = _next_values(b, values, at, 8, dtype)
    lanes = ir.VectorType(I32, 8)
    zero = ir.Constant(lanes, None)
    byte = b.and_(bits, number(255))
    if "places" not in b.module.globals:
        table = [(mask & ((1 << bit) - 1)).bit_count() for mask in range(256) for bit in range(8)]
        table_type = ir.ArrayType(I8, len(table))
        places = ir.GlobalVariable(b.module, table_type, "places")
        places.linkage = "internal"
        places.global_constant = True
        places.initializer = ir.Constant(table_type, table)
    order = b.zext(
        fetch(b, b.module.globals["places"], b.mul(byte, number(8)), ir.VectorType(I8, 8)), lanes
    )
    moved = intrinsic(b, "llvm.x86.avx2.permd", lanes, [words, order])
    single = b.insert_element(
        ir.Constant(lanes, ir.Undefined), b.trunc(byte, I32), ir.Constant(I32, 0)
    )
    stored = b.and_(
        b.shuffle_vector(single, ir.Constant(lanes, ir.Undefined), zero),
        ir.Constant(lanes, [1 << i for i in range(8)]),
    )
    return b.select(b.icmp_unsigned("!=", stored, zero), moved, zero)


_AVX512 = ("avx512f", "avx512bw", "avx512dq", "avx512vl", "bmi", "popcnt")
AVX512 = Instructions("avx512", _AVX512, 16, 24, _expand)
INSTRUCTIONS = (  # the fastest first
    Instructions(
        "avx512bf16", (*_AVX512, "avx512vbmi2", "avx512bf16"), 32, 24, _expand_words, dot=True
    ),
    AVX512,
    Instructions("avx2", ("avx2", "fma", "f16c", "bmi", "popcnt"), 8, 16, _permute),
)


def number(value: int) -> Any:
    """A constant of 64 bits."""
    return ir.Constant(I64, value)


def intrinsic(b: Any, name: str, result: Any, arguments: Values, flags: Sequence[str] = ()) -> Any:
    """Call an intrinsic of LLVM, declared at its first use."""
    if name not in b.module.globals:
        ir.Function(
            b.module, ir.FunctionType(result, [argument.type for argument in arguments]), name
        )
    return b.call(b.module.globals[name], arguments, fastmath=flags)


def fetch(b: Any, base: Any, index: Any, value_type: Any) -> Any:
    """The vector or number of a type at `base[index]`, where the index counts elements; the
    address need not be aligned.
    """
    return b.load(_address(b, base, index, value_type), align=1)


def store(b: Any, value: Any, base: Any, index: Any) -> None:
    """Store a vector or number at `base[index]`, as in `fetch`."""
    b.store(value, _address(b, base, index, value.type), align=1)


def _address(b: Any, base: Any, index: Any, value_type: Any) -> Any:
    element = value_type.element if isinstance(value_type, ir.VectorType) else value_type
    return b.bitcast(b.gep(b.bitcast(base, element.as_pointer()), [index]), value_type.as_pointer())


def _ask_for(b: Any, base: Any, index: Any, element: Any) -> None:
    """Ask for the cache line of `base[index]`. An address outside the array does no harm."""
    place = b.bitcast(_address(b, base, index, element), I8.as_pointer())
    read_keep_data = [ir.Constant(I32, flag) for flag in (0, 3, 1)]
    intrinsic(b, "llvm.prefetch.p0", ir.VoidType(), [place, *read_keep_data])


def _popcount(b: Any, bits: Any) -> Any:
    """The number of set bits of a mask word."""
    return intrinsic(b, "llvm.ctpop.i64", I64, [bits])


def _while(
    b: Any, initial: Values, proceed: Callable[[Any], Any], body: Callable[[list[Any]], Values]
) -> list[Any]:
    """`while proceed(values): values = body(values)`; returns the last values. The builder
    continues after the loop.
    """
    before = b.block
    head = b.append_basic_block("head")
    inside = b.append_basic_block("body")
    after = b.append_basic_block("after")
    b.branch(head)
    b.position_at_end(head)
    values = [b.phi(value.type) for value in initial]
    b.cbranch(proceed(values), inside, after)
    b.position_at_end(inside)
    following = body(values)
    for phi, first, then in zip(values, initial, following, strict=True):
        phi.add_incoming(first, before)
        phi.add_incoming(then, b.block)
    b.branch(head)
    b.position_at_end(after)
    return values


def _for_range(
    b: Any,
    first: Any,
    last: Any,
    step: int,
    initial: Values,
    body: Callable[[Any, list[Any]], Values | None],
) -> list[Any]:
    """`for i in range(first, last, step): values = body(i, values)`; returns the last values."""

    def step_on(values: list[Any]) -> Values:
        following = body(values[0], values[1:]) or []
        return [b.add(values[0], number(step)), *following]

    return _while(
        b, [first, *initial], lambda values: b.icmp_signed("<", values[0], last), step_on
    )[1:]


@cache
def _compiled(module_of: Callable[..., ir.Module], *arguments: Any) -> int:
    """The address of the function "run" of `module_of(*arguments)`, compiled for this processor."""
    module = module_of(*arguments)
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    features = llvm.get_host_cpu_features().flatten()
    if "avx512f" in processor_features():
        features += ",-prefer-256-bit"  # or LLVM halves the vectors
    machine = llvm.Target.from_default_triple().create_target_machine(
        llvm.get_host_cpu_name(), features, opt=3
    )
    module.triple = machine.triple
    parsed = llvm.parse_assembly(str(module))
    parsed.verify()
    passes = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=2))
    passes.getModulePassManager().run(parsed, passes)
    engine = llvm.create_mcjit_compiler(parsed, machine)
    engine.finalize_object()
    _engines.append(engine)
    return int(engine.get_function_address("run"))


def _run_on_threads(function: int, task: int, threads: int) -> None:
    """Call a function `void run(task)` on each of several threads, if possible those of torch's
    OpenMP.

    After each operation of torch, its threads spin for a while, and threads of our own would wait
    for a processor until then.
    """
    call = _FUNCTION(function)
    parallel = _openmp() if threads > 1 else None
    if parallel is not None:
        parallel(function, task, threads, 0)
        return
    others = [_thread_pool(threads - 1).submit(call, task) for _ in range(threads - 1)]
    call(task)
    for other in others:
        if not other.cancel():
            other.result()


@cache
def _openmp() -> Callable[..., Any] | None:
    """GOMP_parallel of the OpenMP library that torch has loaded; None if there is none."""
    maps = Path("/proc/self/maps")
    lines = maps.read_text().splitlines() if maps.is_file() else []
    paths = {line.split(maxsplit=5)[-1] for line in lines if "/" in line}
    for path in sorted(paths, key=lambda path: ("/torch" not in path, path)):  # torch's own first
        library = ctypes.CDLL(path) if Path(path).name.startswith(_OPENMP) else None
        if library is not None and hasattr(library, "GOMP_parallel"):
            parallel = library.GOMP_parallel
            parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
            parallel.restype = None
            return parallel
    return None


@cache
def _thread_pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="emp-llm-products")
