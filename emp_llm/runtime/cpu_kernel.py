"""Products with packed rows on CPUs: loops in LLVM IR, compiled at their first use for the processor on which they run.

A mask word has the bits of 64 columns. Instructions take it in chunks of one vector: they load as many values as it may hold,
spread them over the lanes whose bits are set, and leave zero in the others. A row is always summed in the same order, so
results do not depend on the number of threads.
"""

import ctypes
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from llvmlite import binding as llvm
from llvmlite import ir
from torch import Tensor
from torch.nn import functional

from emp_llm.runtime.packed_rows import WORD_COLUMNS, PackedRows

I1, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
FLOAT = ir.FloatType()
NAMES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}
_WORD = {"BF16": I16, "F16": I16, "F32": I32}
_LONGEST_LOAD = 16  # values that one load reads
_AHEAD = 4096  # bytes of values to ask for in advance
_REGISTERS = 16  # vectors of sums; the weights and the inputs need the others
_MOST_VECTORS = 8  # that one product takes; more leave no registers for their sums
_FEW = 32  # vectors up to which rows are not made dense
_PART = 1 << 16  # weights in a part of the work
_TILE = 1 << 19  # weights of rows that are dense at a time
_OPENMP = ("libgomp", "libiomp5", "libomp")  # each has GOMP_parallel
Values = Sequence[Any]  # values of LLVM that a loop carries
Spread = Callable[[int, int], Any]  # the words of the columns of a chunk, by the place of the row and the number of the chunk
_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)

# A task is an array of numbers of 64 bits. Threads call one function with one task; each takes the next part of the rows until
# none is left. next: the number of the next part, which threads raise; parts: their number; first, last: rows from first to
# last - 1; height: rows in a part; values, mask, offsets: addresses; tail: address of the values for the rows from `safe` on,
# which are followed by enough others for the widest load; words: mask words of a row; inputs, results: addresses, and numbers
# from one row of each to the next.
_TASK = (
    *("next", "parts", "first", "last", "height", "values", "tail", "safe", "mask", "offsets", "words"),
    *("inputs", "inputs_stride", "results", "results_stride"),
)
_Task = ctypes.c_int64 * len(_TASK)
_engines: list[Any] = []  # they own the compiled code


@dataclass(frozen=True, eq=False)
class Instructions:
    """How a processor spreads the values of a chunk over its columns.

    Attributes:
        name: of the set of instructions.
        features: names in LLVM of what a processor needs for it.
        lanes: float32 numbers in a vector, and columns of a chunk.
        spread: (builder, address of the values, position, bits from the chunk on, dtype) -> the words of the columns, in 32
            bits each.
    """

    name: str
    features: tuple[str, ...]
    lanes: int
    spread: Callable[[Any, Any, Any, Any, str], Any]


class CpuProducts:
    """Multiplies packed rows on the CPU.

    Args:
        rows: on the CPU; kept as long as this object.
        how: instructions that this processor has.
    """

    def __init__(self, rows: PackedRows, how: Instructions) -> None:
        self._rows, self._dtype, self._how = rows, NAMES[rows.values.dtype], how
        self._padded = rows.words * WORD_COLUMNS
        safe = int(torch.searchsorted(rows.offsets[1:], rows.values.numel() - _LONGEST_LOAD, right=True))
        before = int(rows.offsets[safe])
        self._tail = functional.pad(rows.values[before:], (0, _LONGEST_LOAD))
        tail = self._tail.data_ptr() - before * rows.values.element_size()  # so that the same positions hold
        self._weights = (rows.values.data_ptr(), tail, safe, rows.mask.data_ptr(), rows.offsets.data_ptr(), rows.words)

    def __call__(self, x: Tensor) -> Tensor:
        """x @ W.T for x of shape (tokens, inputs), in float32 sums, rounded to the dtype of x; shape (tokens, outputs)."""
        if x.shape[0] > _FEW:
            return self._by_tiles(x)
        if x.shape[0] > _MOST_VECTORS:
            return torch.cat([self(x[:_MOST_VECTORS]), self(x[_MOST_VECTORS:])])
        function = _compiled(product_module, self._dtype, self._how, x.shape[0])
        result = torch.empty(x.shape[0], self._rows.rows)
        self._run(function, 0, self._rows.rows, max(1, _PART // self._padded), self._inputs(x), result)
        return result if x.dtype == torch.float32 else result.to(x.dtype)

    def _inputs(self, x: Tensor) -> Tensor:
        """The inputs in float32, with zeros up to whole mask words."""
        if self._padded != x.shape[1]:
            x = functional.pad(x, (0, self._padded - x.shape[1]))
        return x.float().contiguous()

    def _by_tiles(self, x: Tensor) -> Tensor:
        """As `__call__`, by dense rows that stay in the cache and matrix products of torch."""
        fast = x.dtype == self._rows.values.dtype == torch.bfloat16 and multiplies_bfloat16()
        dtype, rows = torch.bfloat16 if fast else torch.float32, self._rows.rows
        inputs, result = x.to(dtype).T, torch.empty(rows, x.shape[0], dtype=dtype)
        tile = torch.empty(max(16, min(rows, _TILE // max(1, self._padded))), self._padded, dtype=self._rows.values.dtype)
        for first in range(0, rows, tile.shape[0]):
            last = min(first + tile.shape[0], rows)
            height = -(-(last - first) // (4 * torch.get_num_threads()))
            self._run(_compiled(dense_module, self._dtype, self._how), first, last, height, None, tile)
            torch.mm(tile[: last - first, : x.shape[1]].to(dtype), inputs, out=result[first:last])
        return torch.empty(x.shape[0], rows, dtype=x.dtype).copy_(result.T)

    def _run(self, function: int, first: int, last: int, height: int, inputs: Tensor | None, results: Tensor) -> None:
        parts = -(-(last - first) // height)
        source = (0, 0) if inputs is None else (inputs.data_ptr(), self._padded)
        task = _Task(0, parts, first, last, height, *self._weights, *source, results.data_ptr(), results.stride(0))
        _run_on_threads(function, ctypes.addressof(task), min(parts, torch.get_num_threads()))


@cache
def processor_features() -> frozenset[str]:
    """The names in LLVM of what this processor can do."""
    return frozenset(name for name, has in llvm.get_host_cpu_features().items() if has)


@cache
def multiplies_bfloat16() -> bool:
    """Whether this processor has instructions that multiply bfloat16 matrices."""
    return bool(processor_features() & {"avx512bf16", "amx-bf16", "bf16"})


def instructions_for(dtype: torch.dtype) -> list[Instructions]:
    """The instructions of this processor for weights of a dtype, the fastest first."""
    return [each for each in INSTRUCTIONS if dtype in NAMES and processor_features().issuperset(each.features)]


def product_module(dtype: str, how: Instructions, vectors: int) -> ir.Module:
    """Products of rows with vectors, in float32: results[j, row] = the sum over the columns of row * inputs[j].

    inputs: float32, shape (vectors, inputs_stride), zero beyond the columns. results: float32, shape (vectors,
    results_stride). No dense row is written to memory.
    """
    kind = ir.VectorType(FLOAT, how.lanes)

    def product(b: Any, task: dict[str, Any], row: Any, together: int) -> None:
        """Rows that share their loads of the inputs."""
        many = 2 if vectors * together == 1 else 1  # two sums for one product, or each addition would wait for the last
        rows = [b.add(row, number(i)) for i in range(together)]

        def add_word(at: Any, spread: Spread, sums: list[Any]) -> list[Any]:
            for chunk in range(WORD_COLUMNS // how.lanes):
                weights = [_floats(b, spread(i, chunk), dtype, how.lanes) for i in range(together)]
                column = b.add(b.mul(at, number(WORD_COLUMNS)), number(chunk * how.lanes))
                for j in range(vectors):
                    x = fetch(b, task["inputs"], b.add(column, b.mul(task["inputs_stride"], number(j))), kind)
                    for i in range(together):
                        k = (i * vectors + j) * many + chunk % many
                        sums[k] = intrinsic(b, f"llvm.fma.v{how.lanes}f32", kind, [weights[i], x, sums[k]])
            return sums

        sums = _each_mask_word(b, task, how, dtype, rows, [ir.Constant(kind, None)] * (together * vectors * many), add_word)
        for i in range(together):
            for j in range(vectors):
                lanes = sums[(i * vectors + j) * many]
                lanes = lanes if many == 1 else b.fadd(lanes, sums[1])
                zero = ir.Constant(FLOAT, -0.0)
                total = intrinsic(b, f"llvm.vector.reduce.fadd.v{how.lanes}f32", FLOAT, [zero, lanes], ("reassoc",))
                store(b, total, task["results"], b.add(rows[i], b.mul(task["results_stride"], number(j))))

    def rows_of_part(b: Any, task: dict[str, Any], first: Any, last: Any) -> None:
        together = max(1, min(4, _REGISTERS // vectors)) if vectors > 1 else 1
        middle = b.add(first, b.mul(b.sdiv(b.sub(last, first), number(together)), number(together)))
        _count(b, first, middle, together, [], lambda row, _: product(b, task, row, together))
        if together > 1:
            _count(b, middle, last, 1, [], lambda row, _: product(b, task, row, 1))

    return _module(dtype, FLOAT, rows_of_part)


def dense_module(dtype: str, how: Instructions) -> ir.Module:
    """Rows with their zeros: results[row - first, column], the words of the weights, for all columns of their mask words."""

    def dense(b: Any, task: dict[str, Any], row: Any) -> None:
        start = b.mul(b.sub(row, task["first"]), task["results_stride"])

        def put_word(at: Any, spread: Spread, _: list[Any]) -> None:
            for chunk in range(WORD_COLUMNS // how.lanes):
                words = spread(0, chunk)
                words = words if dtype == "F32" else b.trunc(words, ir.VectorType(I16, how.lanes))
                column = b.add(b.mul(at, number(WORD_COLUMNS)), number(chunk * how.lanes))
                store(b, words, task["results"], b.add(start, column))

        _each_mask_word(b, task, how, dtype, [row], [], put_word)

    def rows_of_part(b: Any, task: dict[str, Any], first: Any, last: Any) -> None:
        _count(b, first, last, 1, [], lambda row, _: dense(b, task, row))

    return _module(dtype, _WORD[dtype], rows_of_part)


def _module(dtype: str, result: Any, rows_of_part: Callable[[Any, dict[str, Any], Any, Any], None]) -> ir.Module:
    """A function "run" of a task that calls `rows_of_part(builder, task, first, last)` for parts until none is left."""
    module = ir.Module("rows")
    run = ir.Function(module, ir.FunctionType(ir.VoidType(), [I64.as_pointer()]), "run")
    b = ir.IRBuilder(run.append_basic_block("entry"))
    word = _WORD[dtype]
    addresses = {"values": word, "tail": word, "mask": I64, "offsets": I64, "inputs": FLOAT, "results": result}
    task = {}
    for place, name in enumerate(_TASK):
        value = b.load(b.gep(run.args[0], [number(place)]))
        task[name] = b.inttoptr(value, addresses[name].as_pointer()) if name in addresses else value

    def take() -> Any:
        return b.atomic_rmw("add", run.args[0], number(1), "monotonic")

    def part(values: list[Any]) -> Values:
        first = b.add(task["first"], b.mul(values[0], task["height"]))
        end = b.add(first, task["height"])
        rows_of_part(b, task, first, b.select(b.icmp_signed("<", end, task["last"]), end, task["last"]))
        return [take()]

    _loop(b, [take()], lambda values: b.icmp_signed("<", values[0], task["parts"]), part)
    b.ret_void()
    return module


def _each_mask_word(
    b: Any,
    task: dict[str, Any],
    how: Instructions,
    dtype: str,
    rows: Values,
    initial: Values,
    body: Callable[[Any, Spread, list[Any]], Values | None],
) -> list[Any]:
    """Walk some rows together: `values = body(at, spread, values)` for each place `at` of a mask word."""
    word = _WORD[dtype]
    starts = [fetch(b, task["offsets"], row, I64) for row in rows]
    masks = [b.mul(row, task["words"]) for row in rows]
    values = [b.select(b.icmp_signed("<", row, task["safe"]), task["values"], task["tail"]) for row in rows]

    def one_word(at: Any, carried: list[Any]) -> Values:
        places, others = carried[: len(rows)], carried[len(rows) :]
        bits = [fetch(b, task["mask"], b.add(mask, at), I64) for mask in masks]
        for base, place in zip(values, places, strict=True):
            _ask_for(b, base, b.add(place, number(_AHEAD * 8 // word.width)), word)

        def spread(i: int, chunk: int) -> Any:
            first = chunk * how.lanes
            below = _ones(b, b.and_(bits[i], number((1 << first) - 1)))
            return how.spread(b, values[i], b.add(places[i], below), b.lshr(bits[i], number(first)), dtype)

        following = body(at, spread, others) or []
        return [*(b.add(place, _ones(b, mask)) for place, mask in zip(places, bits, strict=True)), *following]

    return _count(b, number(0), task["words"], 1, [*starts, *initial], one_word)[len(rows) :]


def _floats(b: Any, words: Any, dtype: str, lanes: int) -> Any:
    """The words of a chunk as float32 numbers."""
    kind = ir.VectorType(FLOAT, lanes)
    if dtype == "F16":
        return b.fpext(b.bitcast(b.trunc(words, ir.VectorType(I16, lanes)), ir.VectorType(ir.HalfType(), lanes)), kind)
    if dtype == "BF16":
        words = b.shl(words, ir.Constant(words.type, [16] * lanes))
    return b.bitcast(words, kind)


def _next_values(b: Any, values: Any, at: Any, lanes: int, dtype: str) -> Any:
    """The values from a position, extended with zeros to 32 bits."""
    words = fetch(b, values, at, ir.VectorType(_WORD[dtype], lanes))
    return words if dtype == "F32" else b.zext(words, ir.VectorType(I32, lanes))


def _expand(b: Any, values: Any, at: Any, bits: Any, dtype: str) -> Any:
    """By vpexpandd."""
    words = _next_values(b, values, at, 16, dtype)
    lanes = b.bitcast(b.trunc(bits, I16), ir.VectorType(I1, 16))
    arguments = [words, ir.Constant(words.type, None), lanes]
    return intrinsic(b, "llvm.x86.avx512.mask.expand.v16i32", words.type, arguments)


def _permute(b: Any, values: Any, at: Any, bits: Any, dtype: str) -> Any:
    """By vpermd: for each mask of eight bits, a table has the number of set bits below each bit."""
    words, lanes = _next_values(b, values, at, 8, dtype), ir.VectorType(I32, 8)
    zero, byte = ir.Constant(lanes, None), b.and_(bits, number(255))
    if "places" not in b.module.globals:
        table = [(mask & ((1 << bit) - 1)).bit_count() for mask in range(256) for bit in range(8)]
        kind = ir.ArrayType(I8, len(table))
        places = ir.GlobalVariable(b.module, kind, "places")
        places.linkage, places.global_constant, places.initializer = "internal", True, ir.Constant(kind, table)
    order = b.zext(fetch(b, b.module.globals["places"], b.mul(byte, number(8)), ir.VectorType(I8, 8)), lanes)
    moved = intrinsic(b, "llvm.x86.avx2.permd", lanes, [words, order])
    single = b.insert_element(ir.Constant(lanes, ir.Undefined), b.trunc(byte, I32), ir.Constant(I32, 0))
    own = b.and_(
        b.shuffle_vector(single, ir.Constant(lanes, ir.Undefined), zero), ir.Constant(lanes, [1 << i for i in range(8)])
    )
    return b.select(b.icmp_unsigned("!=", own, zero), moved, zero)


# The fastest first. AVX-512's VBMI2 spreads twice as many words of 16 bits at once, and was no faster where it was measured.
INSTRUCTIONS = (
    Instructions("avx512", ("avx512f", "avx512bw", "avx512dq", "avx512vl", "bmi", "popcnt"), 16, _expand),
    Instructions("avx2", ("avx2", "fma", "f16c", "bmi", "popcnt"), 8, _permute),
)


def number(value: int) -> Any:
    """A constant of 64 bits."""
    return ir.Constant(I64, value)


def intrinsic(b: Any, name: str, result: Any, arguments: Values, flags: Sequence[str] = ()) -> Any:
    """Call an intrinsic of LLVM, declared at its first use."""
    if name not in b.module.globals:
        ir.Function(b.module, ir.FunctionType(result, [argument.type for argument in arguments]), name)
    return b.call(b.module.globals[name], arguments, fastmath=flags)


def fetch(b: Any, base: Any, index: Any, kind: Any) -> Any:
    """The vector or number of a type at `base[index]`, where the index counts elements; the address need not be aligned."""
    return b.load(_address(b, base, index, kind), align=1)


def store(b: Any, value: Any, base: Any, index: Any) -> None:
    """Store a vector or number at `base[index]`, as in `fetch`."""
    b.store(value, _address(b, base, index, value.type), align=1)


def _address(b: Any, base: Any, index: Any, kind: Any) -> Any:
    element = kind.element if isinstance(kind, ir.VectorType) else kind
    return b.bitcast(b.gep(b.bitcast(base, element.as_pointer()), [index]), kind.as_pointer())


def _ask_for(b: Any, base: Any, index: Any, element: Any) -> None:
    """Ask for the cache line of `base[index]`. An address outside the array does no harm."""
    place = b.bitcast(_address(b, base, index, element), I8.as_pointer())
    read_keep_data = [ir.Constant(I32, flag) for flag in (0, 3, 1)]
    intrinsic(b, "llvm.prefetch.p0", ir.VoidType(), [place, *read_keep_data])


def _ones(b: Any, bits: Any) -> Any:
    """The number of set bits of a mask word."""
    return intrinsic(b, "llvm.ctpop.i64", I64, [bits])


def _loop(b: Any, initial: Values, proceed: Callable[[Any], Any], body: Callable[[list[Any]], Values]) -> list[Any]:
    """`while proceed(values): values = body(values)`; returns the last values. The builder continues after the loop."""
    before, head = b.block, b.append_basic_block("head")
    inside, after = b.append_basic_block("body"), b.append_basic_block("after")
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


def _count(
    b: Any, first: Any, last: Any, step: int, initial: Values, body: Callable[[Any, list[Any]], Values | None]
) -> list[Any]:
    """`for i in range(first, last, step): values = body(i, values)`; returns the last values."""

    def each(values: list[Any]) -> Values:
        following = body(values[0], values[1:]) or []
        return [b.add(values[0], number(step)), *following]

    return _loop(b, [first, *initial], lambda values: b.icmp_signed("<", values[0], last), each)[1:]


@cache
def _compiled(module_of: Callable[..., ir.Module], *arguments: Any) -> int:
    """The address of the function "run" of `module_of(*arguments)`, compiled for this processor."""
    module = module_of(*arguments)
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    features = llvm.get_host_cpu_features().flatten()
    if "avx512f" in processor_features():
        features += ",-prefer-256-bit"  # or LLVM halves the vectors
    machine = llvm.Target.from_default_triple().create_target_machine(llvm.get_host_cpu_name(), features, opt=3)
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
    """Call a function `void run(task)` on each of several threads, those of torch's OpenMP where they can be found.

    torch's threads spin for a while after each of its operations. Other threads would wait for a processor until they sleep.
    """
    call = _FUNCTION(function)
    parallel = _openmp() if threads > 1 else None
    if parallel is not None:
        parallel(function, task, threads, 0)
        return
    others = [_pool(threads - 1).submit(call, task) for _ in range(threads - 1)]
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
            parallel.argtypes, parallel.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint], None
            return parallel
    return None


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="emp-llm-products")
