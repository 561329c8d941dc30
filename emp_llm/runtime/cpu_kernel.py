"""Products with packed rows on CPUs: loops in LLVM IR, compiled at their first use for the
processor on which they run.

A mask word has the bits of 64 columns. The loops take it in chunks of one vector: they load as many
values as the vector holds, spread them over the lanes whose bits are set, and leave zero in the
others. A row is always summed in the same order, so results do not depend on the number of threads.

Few tokens are multiplied while the values are spread, and no dense row is written to memory. For
more tokens, each thread makes a few rows dense in its cache, in the order in which its processor
multiplies matrices. Only the matrix units of AMX are left to torch, with rows that are made dense.
"""

import ctypes
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from llvmlite import binding as llvm
from llvmlite import ir
from torch import Tensor
from torch.nn import functional

from emp_llm.common.machine import torch_openmp
from emp_llm.runtime.packed_rows import WORD_COLUMNS, PackedRows

I1, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
FLOAT = ir.FloatType()
NAMES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}
_WORD = {"BF16": I16, "F16": I16, "F32": I32}
_LONGEST_LOAD = 32  # values that one load reads
_PACE = 16  # bits of the fraction of a pace
_AHEAD = 4096  # bytes of values of each row to ask for in advance
_FEW = 5  # tokens for which the loops are faster than tiles
_MOST_VECTORS = 8  # likewise, if all inputs stay in the nearest cache
_CACHED = 40 << 10  # bytes of them
_VECTORS = 2  # of rows that are dense at a time
_CHUNK = 2048  # tokens; of more, the inputs leave the caches while the rows pass
_TILED = 32  # tokens for which tiles are faster than torch with AMX, by estimate
_TORCH_TILE = 1 << 21  # weights that are dense at a time for torch, for each thread
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
    "bias",  # address of what is added to the results
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

    @property
    def per_word(self) -> int:
        """Weights or inputs in a word of 32 bits."""
        return 2 if self.dot else 1

    @property
    def words(self) -> int:
        """Words of 32 bits in a vector."""
        return self.lanes // self.per_word


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

    @torch.no_grad()  # with a gradient, torch writes no result in place
    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x @ W.T + bias for x of shape (tokens, inputs), in float32 sums, rounded once to the
        dtype of x.

        Returns:
            Shape (tokens, outputs).
        """
        instructions = self._instructions
        if instructions.dot and x.dtype != torch.bfloat16:
            instructions = AVX512
        tokens = x.shape[0]
        size = tokens * self._padded * instructions.dtype.itemsize
        if tokens == 0 or self._rows.rows == 0:
            return x.new_empty(tokens, self._rows.rows)
        if tokens <= _FEW or (tokens <= _MOST_VECTORS and size <= _CACHED):
            return self.by_loops(x, instructions, bias)
        if tokens > _TILED and instructions.dot and "amx-bf16" in processor_features():
            return self.by_torch(x, bias)
        return self.by_tiles(x, instructions, bias)

    def by_loops(self, x: Tensor, instructions: Instructions, bias: Tensor | None = None) -> Tensor:
        """The products of at most eight tokens: no dense row is written to memory."""
        tokens = x.shape[0]
        rows = self._rows.rows
        padded = self._padded_inputs(x, instructions)
        # The columns of a mask word lie together, for one token after another.
        inputs = padded.reshape(tokens, -1, WORD_COLUMNS).transpose(0, 1).contiguous()
        sums = torch.empty(tokens, rows, dtype=torch.float32, device=x.device)
        height = 12 * -(-rows // (12 * 16 * torch.get_num_threads()))
        product = _compile(product_module, self._dtype, instructions, tokens)
        self._run(product, 0, rows, height, None, inputs, sums, _start(bias, rows))
        return sums.to(x.dtype)

    def by_tiles(self, x: Tensor, instructions: Instructions, bias: Tensor | None = None) -> Tensor:
        """The products of more tokens: each thread makes a few rows dense in its cache and
        multiplies them with all tokens.
        """
        rows = self._rows.rows
        height = _VECTORS * instructions.words
        width = max(rows, height)
        words = self._padded // instructions.per_word
        threads = torch.get_num_threads()
        tile = torch.empty(threads, height * words, dtype=torch.int32, device=x.device)
        start = _start(bias, width)
        result_dtype = x.dtype if x.dtype in NAMES else torch.float32
        result = x.new_empty(x.shape[0], width, dtype=result_dtype)
        for first in range(0, x.shape[0], _CHUNK):
            inputs = self._padded_inputs(x[first : first + _CHUNK], instructions).contiguous()
            tokens = inputs.shape[0]
            passes = -(-tokens // (instructions.sums // _VECTORS))
            arguments = self._dtype, instructions, NAMES[result_dtype], -(-tokens // passes)
            product = _compile(tile_module, *arguments)
            results = result[first : first + tokens]
            self._run(product, 0, rows, height, tile, inputs, results, start)
        return result[:, :rows].contiguous().to(x.dtype)

    def _padded_inputs(self, x: Tensor, instructions: Instructions) -> Tensor:
        """The inputs in the dtype of the instructions, with zeros up to whole mask words."""
        missing = self._padded - x.shape[1]
        inputs = x.to(instructions.dtype)
        return functional.pad(inputs, (0, missing)) if missing else inputs

    def by_torch(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """The products by torch, in bfloat16: some rows after others are made dense."""
        rows = self._rows.rows
        threads = torch.get_num_threads()
        result = x.new_empty(x.shape[0], rows)
        dense = _compile(dense_module, self._dtype, self._instructions)
        height = max(1, min(rows, threads * _TORCH_TILE // max(1, self._padded)))
        # One word lies between two rows, or many rows would share the same lines of the cache.
        tile = x.new_empty(height, self._padded + WORD_COLUMNS)
        for first in range(0, rows, height):
            last = min(first + height, rows)
            self._run(dense, first, last, -(-(last - first) // (4 * threads)), tile)
            weights = tile[: last - first, : x.shape[1]].T
            products = result[:, first:last]
            if bias is None:
                torch.mm(x, weights, out=products)
            else:
                torch.addmm(bias[first:last].to(x.dtype), x, weights, out=products)
        return result

    def _run(
        self,
        function: int,
        first: int,
        last: int,
        height: int,
        tile: Tensor | None,
        inputs: Tensor | None = None,
        results: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> None:
        """Call a function on each thread, for the rows first to last - 1, `height` at a time."""
        numbers = [
            number
            for matrix in (tile, inputs, results)
            for number in ((0, 0) if matrix is None else (matrix.data_ptr(), matrix.stride(0)))
        ]
        numbers.append(0 if bias is None else bias.data_ptr())
        stripes = -(-(last - first) // height)
        tokens = 0 if results is None else results.shape[0]
        task = _Task(0, stripes, first, last, height, 0, *self._weights, tokens, *numbers)
        _run_on_threads(function, ctypes.addressof(task), min(stripes, torch.get_num_threads()))


def _start(bias: Tensor | None, rows: int) -> Tensor:
    """What is added to the results of each row: the bias, or zero."""
    start = torch.zeros(rows, dtype=torch.float32, device="cpu")
    if bias is not None:
        start[: bias.shape[0]] = bias
    return start


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


def product_module(dtype: str, instructions: Instructions, tokens: int) -> ir.Module:
    """Products of rows with inputs: results[token, row] = bias[token, row] + sum over the columns
    of W[row, column] * inputs[token, column]. The inputs are in the dtype of the instructions, and
    zero beyond the columns; bias and results are float32.

    Args:
        dtype: of the values: "BF16", "F16" or "F32".
        tokens: how many, 1 to 8.
    """
    word = ir.VectorType(I16 if instructions.dot else FLOAT, instructions.lanes)
    sum_type = ir.VectorType(FLOAT, instructions.words)
    # Rows that share their loads of the inputs.
    shared = min(4, (instructions.sums + 3) // (tokens + 1)) if tokens > 1 else 1
    # A single result has two sums, or each addition would wait for the one before.
    parallel = 2 if tokens == 1 else 1

    def product(b: Any, task: dict[str, Any], row: Any, together: int) -> None:
        """The results of `together` rows from `row` on."""
        rows = [b.add(row, number(i)) for i in range(together)]

        def add_word(at: Any, weights: Weights, sums: list[Any]) -> list[Any]:
            inputs = b.mul(at, number(tokens * WORD_COLUMNS))
            for chunk in range(WORD_COLUMNS // instructions.lanes):
                factors = [weights(i, chunk) for i in range(together)]
                for token in range(tokens):
                    column = number(token * WORD_COLUMNS + chunk * instructions.lanes)
                    x = fetch(b, task["inputs"], b.add(inputs, column), word)
                    for i in range(together):
                        k = (i * tokens + token) * parallel + chunk % parallel
                        sums[k] = _multiply_add(b, sums[k], factors[i], x)
            return sums

        ahead = number(_AHEAD * together * 8 // _WORD[dtype].width)
        if together > 1:  # at least what all of them have, or they ask for each other's values
            end = fetch(b, task["offsets"], b.add(row, number(together)), I64)
            own = b.sub(end, fetch(b, task["offsets"], row, I64))
            ahead = b.select(b.icmp_signed("<", ahead, own), own, ahead)
        sums = [ir.Constant(sum_type, None)] * (together * tokens * parallel)
        sums = _for_each_mask_word(b, task, instructions, dtype, rows, sums, add_word, ahead)
        for i in range(together):
            for token in range(tokens):
                lanes = sums[(i * tokens + token) * parallel]
                if parallel == 2:
                    lanes = b.fadd(lanes, sums[1])
                name = f"llvm.vector.reduce.fadd.v{sum_type.count}f32"
                total = intrinsic(b, name, FLOAT, [ir.Constant(FLOAT, -0.0), lanes], ("reassoc",))
                total = b.fadd(total, fetch(b, task["bias"], rows[i], FLOAT))
                place = b.add(rows[i], b.mul(task["results_stride"], number(token)))
                store(b, total, task["results"], place)

    def multiply_stripe(b: Any, task: dict[str, Any], first: Any, last: Any, _: Any) -> None:
        middle = b.add(first, b.mul(b.sdiv(b.sub(last, first), number(shared)), number(shared)))
        _for_range(b, first, middle, shared, [], lambda row, _: product(b, task, row, shared))
        if shared > 1:
            _for_range(b, middle, last, 1, [], lambda row, _: product(b, task, row, 1))

    return _module(multiply_stripe)


def tile_module(
    dtype: str, instructions: Instructions, result_dtype: str, together: int
) -> ir.Module:
    """The products of `product_module` for more tokens, rounded to the dtype of the results.

    Each thread makes some rows dense in its tile. There, a word of 32 bits of each row lies beside
    the same word of the next row. So one vector holds the same word of many rows, and is multiplied
    with that word of an input, which is copied to all its lanes.

    Args:
        dtype: of the values: "BF16", "F16" or "F32".
        result_dtype: likewise.
        together: tokens that are taken together, at most the number of tokens. The last ones end
            with the last token, so some may be taken twice.
    """
    count = instructions.words
    vector = ir.VectorType(I32, count)
    sum_type = ir.VectorType(FLOAT, count)
    operand = ir.VectorType(I16, instructions.lanes) if instructions.dot else sum_type
    height = _VECTORS * count
    mask_words = WORD_COLUMNS // instructions.per_word  # words of 32 bits for each

    def fill_tile(b: Any, task: dict[str, Any], tile: Any, first: Any) -> None:
        latest = b.sub(task["last"], number(1))

        def fill_vector(start: Any, _: Any) -> None:
            row = b.add(first, start)
            rows = [_least(b, b.add(row, number(i)), latest) for i in range(count)]

            def put_word(at: Any, weights: Weights, _: list[Any]) -> None:
                place = b.add(tile, b.add(b.mul(at, number(mask_words * height)), start))
                for chunk in range(WORD_COLUMNS // instructions.lanes):
                    words = [b.bitcast(weights(i, chunk), vector) for i in range(count)]
                    for i, column in enumerate(_transposed(b, words), chunk * count):
                        store(b, column, task["tile"], b.add(place, number(i * height)))

            _for_each_mask_word(b, task, instructions, dtype, rows, [], put_word)

        _for_range(b, number(0), number(height), count, [], fill_vector)

    def multiply_stripe(b: Any, task: dict[str, Any], first: Any, _: Any, following: Any) -> None:
        first = _least(b, first, b.sub(task["last"], number(height)))
        first = b.select(b.icmp_signed("<", first, number(0)), number(0), first)
        tile = b.mul(task["slot"], task["tile_stride"])
        fill_tile(b, task, tile, first)
        words = b.mul(task["words"], number(mask_words))
        # While it multiplies, it asks for the values and masks of its next rows, evenly: in bursts,
        # the memory does not keep up.
        next_mask = b.mul(following, task["words"])
        next_value = fetch(b, task["offsets"], following, I64)
        after_next = _least(b, b.add(following, number(height)), task["last"])
        last_value = fetch(b, task["offsets"], after_next, I64)
        passes = b.sdiv(b.add(task["tokens"], number(together - 1)), number(together))
        next_values = b.shl(b.sub(last_value, next_value), number(_PACE))
        pace = b.sdiv(next_values, b.mul(passes, words))  # values for each word, a fraction

        def of_tokens(token: Any, _: Any) -> None:
            asked = b.mul(b.sdiv(token, number(together)), words)
            token = _least(b, token, b.sub(task["tokens"], number(together)))
            stride = b.sdiv(task["inputs_stride"], number(instructions.per_word))
            inputs = [b.mul(b.add(token, number(j)), stride) for j in range(together)]

            def add_word(k: Any, sums: list[Any]) -> list[Any]:
                values = b.ashr(b.mul(b.add(asked, k), pace), number(_PACE))
                _ask_for(b, task["values"], b.add(next_value, values), _WORD[dtype])
                _ask_for(b, task["mask"], b.add(next_mask, k), I64)
                weights = []
                for start in range(0, height, count):
                    place = b.add(b.add(tile, b.mul(k, number(height))), number(start))
                    weights.append(b.bitcast(fetch(b, task["tile"], place, vector), operand))
                for j in range(together):
                    x = fetch(b, task["inputs"], b.add(inputs[j], k), I32)
                    x = b.bitcast(_in_all_lanes(b, x, count), operand)
                    for i in range(_VECTORS):
                        sum_place = j * _VECTORS + i
                        sums[sum_place] = _multiply_add(b, sums[sum_place], weights[i], x)
                return sums

            places = [
                (b.add(token, number(j)), b.add(first, number(start)))
                for j in range(together)
                for start in range(0, height, count)
            ]
            sums = [fetch(b, task["bias"], row, sum_type) for _, row in places]
            sums = _for_range(b, number(0), words, 1, sums, add_word)
            for (result_token, row), total in zip(places, sums, strict=True):
                place = b.add(b.mul(result_token, task["results_stride"]), row)
                store(b, _rounded(b, total, result_dtype), task["results"], place)

        _for_range(b, number(0), task["tokens"], together, [], of_tokens)

    return _module(multiply_stripe)


def dense_module(dtype: str, instructions: Instructions) -> ir.Module:
    """Rows with their zeros: tile[row - first, column], in the dtype of the instructions, for all
    columns of their mask words.
    """

    def expand_stripe(b: Any, task: dict[str, Any], first: Any, last: Any, _: Any) -> None:
        def expand_row(row: Any, _: Any) -> None:
            start = b.mul(b.sub(row, task["first"]), task["tile_stride"])

            def put_word(at: Any, weights: Weights, _: list[Any]) -> None:
                for chunk in range(WORD_COLUMNS // instructions.lanes):
                    place = b.add(start, _column(b, instructions, at, chunk))
                    store(b, weights(0, chunk), task["tile"], place)

            ahead = number(_AHEAD * 8 // _WORD[dtype].width)
            _for_each_mask_word(b, task, instructions, dtype, [row], [], put_word, ahead)

        _for_range(b, first, last, 1, [], expand_row)

    return _module(expand_stripe)


def _least(b: Any, one: Any, other: Any) -> Any:
    return b.select(b.icmp_signed("<", one, other), one, other)


def _column(b: Any, instructions: Instructions, at: Any, chunk: int) -> Any:
    """The first column of a chunk of the mask word at a place."""
    return b.add(b.mul(at, number(WORD_COLUMNS)), number(chunk * instructions.lanes))


def _module(body: Callable[[Any, dict[str, Any], Any, Any, Any], None]) -> ir.Module:
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
    for name in ("values", "tail", "mask", "offsets", "tile", "inputs", "results", "bias"):
        task[name] = b.inttoptr(task[name], I8.as_pointer())

    def take() -> Any:
        return b.atomic_rmw("add", run.args[0], number(1), "monotonic")

    def first_row(stripe: Any) -> Any:
        return b.add(task["first"], b.mul(stripe, task["height"]))

    def stripe(values: list[Any]) -> Values:
        following = take()
        first = first_row(values[0])
        last = _least(b, b.add(first, task["height"]), task["last"])
        body(b, task, first, last, _least(b, first_row(following), task["last"]))
        return [following]

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
    ahead: Any = None,
) -> list[Any]:
    """Walk some rows together, `values = body(at, weights, values)` for each mask word: `at` is its
    place in a row, and `weights` gives the weights of its chunks. Returns the last values.

    Values are asked for so many in advance, if `ahead` is given.
    """
    width = _WORD[dtype]
    count = len(rows)
    masks = [b.mul(row, task["words"]) for row in rows]
    starts = []
    for row in rows:
        values = b.select(b.icmp_signed("<", row, task["safe"]), task["values"], task["tail"])
        starts.append(_address(b, values, fetch(b, task["offsets"], row, I64), width))

    def one_word(at: Any, carried: list[Any]) -> Values:
        values = carried[:count]
        bits = [fetch(b, task["mask"], b.add(mask, at), I64) for mask in masks]
        if ahead is not None:
            for value in values:
                _ask_for(b, value, ahead, width)

        def weights(i: int, chunk: int) -> Any:
            first = chunk * instructions.lanes
            below = _popcount(b, b.and_(bits[i], number((1 << first) - 1)))
            rest = b.lshr(bits[i], number(first))
            words = instructions.spread(b, values[i], below, rest, dtype)
            return words if instructions.dot else _floats(b, words, dtype, instructions.lanes)

        following = body(at, weights, carried[count:]) or []
        next_values = [
            _address(b, value, _popcount(b, mask), width)
            for value, mask in zip(values, bits, strict=True)
        ]
        return [*next_values, *following]

    return _for_range(b, number(0), task["words"], 1, [*starts, *initial], one_word)[count:]


def _multiply_add(b: Any, sums: Any, weights: Any, x: Any) -> Any:
    """sums + weights * x. Of bfloat16 words, two adjacent products are added to each sum."""
    sum_type = sums.type
    if weights.type == sum_type:
        return intrinsic(b, f"llvm.fma.v{sum_type.count}f32", sum_type, [weights, x, sums])
    pairs = ir.VectorType(I32, sum_type.count)
    arguments = [sums, b.bitcast(weights, pairs), b.bitcast(x, pairs)]
    return intrinsic(b, "llvm.x86.avx512bf16.dpbf16ps.512", sum_type, arguments)


def _transposed(b: Any, rows: Values) -> list[Any]:
    """The columns of a square matrix, which is given by its rows. Their number is a power of two.

    Blocks of half the size change their places, then the blocks within them.
    """
    vectors = list(rows)
    count = len(vectors)
    size = count // 2
    while size:
        halves = [bool(i & size) for i in range(count)]
        upper = [count + j - size if second else j for j, second in enumerate(halves)]
        lower = [count + j if second else j + size for j, second in enumerate(halves)]
        orders = [ir.Constant(ir.VectorType(I32, count), order) for order in (upper, lower)]
        for i in range(count):
            if not halves[i]:
                pair = vectors[i], vectors[i + size]
                vectors[i], vectors[i + size] = (b.shuffle_vector(*pair, way) for way in orders)
        size //= 2
    return vectors


def _in_all_lanes(b: Any, word: Any, count: int) -> Any:
    """A vector with the same word of 32 bits in all its lanes."""
    undefined = ir.Constant(ir.VectorType(I32, count), ir.Undefined)
    single = b.insert_element(undefined, word, ir.Constant(I32, 0))
    return b.shuffle_vector(single, undefined, ir.Constant(ir.VectorType(I32, count), None))


def _rounded(b: Any, floats: Any, dtype: str) -> Any:
    """float32 numbers in a dtype, to the nearest, of two the even one."""
    count = floats.type.count
    if dtype == "F32":
        return floats
    if dtype == "F16":
        return b.fptrunc(floats, ir.VectorType(ir.HalfType(), count))
    words = ir.VectorType(I32, count)
    bits = b.bitcast(floats, words)
    odd = b.and_(b.lshr(bits, ir.Constant(words, [16] * count)), ir.Constant(words, [1] * count))
    half = b.add(odd, ir.Constant(words, [(1 << 15) - 1] * count))
    nearest = b.lshr(b.add(bits, half), ir.Constant(words, [16] * count))
    nan = ir.Constant(words, [0x7FC0] * count)
    chosen = b.select(b.fcmp_unordered("uno", floats, floats), nan, nearest)
    return b.trunc(chosen, ir.VectorType(I16, count))


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
def _compile(module_of: Callable[..., ir.Module], *arguments: Any) -> int:
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
    tuning = llvm.create_pipeline_tuning_options(speed_level=2)
    tuning.loop_unrolling = False  # twice as many sums do not fit into the registers
    passes = llvm.create_pass_builder(machine, tuning)
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
    openmp = torch_openmp() if threads > 1 else None
    if openmp is not None:
        openmp.GOMP_parallel(ctypes.c_void_p(function), ctypes.c_void_p(task), threads, 0)
        return
    others = [_thread_pool(threads - 1).submit(call, task) for _ in range(threads - 1)]
    call(task)
    for other in others:
        if not other.cancel():
            other.result()


@cache
def _thread_pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="emp-llm-products")
