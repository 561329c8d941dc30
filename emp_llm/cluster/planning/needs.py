"""The needs of a job, estimated from its model's config: GPUs, memory, disk and hours."""

import math

from emp_llm.cluster.plan_file import JobKind, Needs
from emp_llm.cluster.planning.model_size import ModelSize
from emp_llm.cluster.planning.workload import (
    CPU_FLOPS,
    DISK,
    GPU_FLOPS,
    UNKNOWN_TASK,
    Work,
    block_of,
    blocks_at_a_time,
    hours_of,
    is_known,
    size_of_task,
)
from emp_llm.common.errors import UserError

# Memory of a process beside weights and passes, measured by scripts/measure_needs.py: scripts/results/needs.md.
BASE = 0.35e9  # Python with torch, transformers and the tokenizer
BASE_OF_TASKS = 0.12e9  # lm-eval, beside it
BASE_OF_PRUNE = 0.42e9  # a prune that runs no model: torch, the compiled kernels, and blocks of rows
EXAMPLE_BYTES = 10_000  # of a question of a task with one answer, held with its result; not measured

# Not measured: there was no GPU.
BASE_WITH_GPU = 4.0e9  # memory of the node beside a model on the GPU: CUDA's libraries, and buffers of loading
GPU_CONTEXT = 1.0e9  # memory of a GPU that CUDA and its libraries take
GPU_SHARE = 0.9  # of a GPU's memory that weights may take: accelerate's rule

_PIECE = 256  # positions of logits that evaluation.perplexity converts to float32 at a time
MOST_GPUS = 64  # for one model
HOURS_FACTOR = 2.0  # a job is given twice the estimated time
LEAST_HOURS = 0.1


def estimated_needs(kind: JobKind, size: ModelSize, work: Work) -> Needs:
    """The needs of a job.

    Args:
        kind: the command.
        size: of its model.
        work: what it does.

    Raises:
        UserError: the model does not fit on one GPU, and each of several processes needs it whole.
    """
    runs = work.calibrates or work.refit or kind != "prune"
    on_gpu = runs and work.gpu_gb > 0
    gpus = _gpus(kind, size, work) * work.processes if on_gpu else 0
    memory = BASE_OF_PRUNE
    if runs:
        own = BASE_WITH_GPU if on_gpu else BASE + _weights(kind, size, work) + _passes(kind, size, work)
        memory = max(memory, own + _questions(work) + _held(size, work))
    return Needs(
        processes=work.processes,
        gpus=gpus,
        gpu_gb=work.gpu_gb if on_gpu else 0.0,
        memory_gb=_rounded(work.processes * memory / 1e9),
        disk_gb=_rounded(_disk(kind, size, work) / 1e9),
        hours=_rounded(max(LEAST_HOURS, HOURS_FACTOR * hours_of(kind, size, work))),
    )


def assumptions(size: ModelSize, work: Work) -> list[str]:
    """The assumptions of an estimate, as sentences."""
    rate, device = (GPU_FLOPS, "GPU") if work.gpu_gb else (CPU_FLOPS, "process on the CPU")
    said = [
        f"{size.name}: {size.parameters:,} parameters by its config, in {size.dtype if work.dtype == 'auto' else work.dtype}.",
        f"Hours: {HOURS_FACTOR:g} times the operations at {rate / 1e12:g} TFLOP/s a {device}, and the bytes at "
        f"{DISK / 1e9:g} GB/s.",
    ]
    if work.gpu_gb:
        said.append(f"Weights take at most {100 * GPU_SHARE:g} % of a GPU of {work.gpu_gb:g} GB; a larger model takes several.")
    else:
        said.append("Memory: weights lie in the memory of the node; pages of other files do not count.")
    unknown = [task.name for task in (work.suite.tasks if work.suite else ()) if not is_known(task)]
    if unknown:
        said.append(
            f"Tasks of unknown size ({', '.join(unknown)}): {UNKNOWN_TASK.examples:,} examples of {UNKNOWN_TASK.choices} "
            f"answers, {UNKNOWN_TASK.length} tokens each."
        )
    return said


def _weights(kind: JobKind, size: ModelSize, work: Work) -> int:
    """Bytes of the weights in memory. A calibration computes no logits, so it never reads the pages of a head of its own."""
    parameters = size.parameters
    only_norms = kind == "calibrate" or (kind == "prune" and not work.refit)
    if only_norms and size.itemsize() == size.itemsize(work.dtype):
        parameters -= size.head if size.embeddings > size.head else 0
    return size.bytes_of(parameters, work.dtype)


def _gpus(kind: JobKind, size: ModelSize, work: Work) -> int:
    """The GPUs that one process needs: for whole blocks, and for the passes on each of them."""
    free = work.gpu_gb * 1e9 - GPU_CONTEXT
    weights, passes = size.weight_bytes(work.dtype), _passes(kind, size, work)
    block = size.bytes_of(size.largest_block, work.dtype)
    for number in range(1, MOST_GPUS + 1):
        lost = (number - 1) * block  # a block lies on one GPU
        if weights + lost <= number * GPU_SHARE * free and weights / number + passes <= free:
            break
    else:
        raise UserError(
            f"{size.name}: it takes {weights / 1e9:.0f} GB, with blocks of {block / 1e9:.1f} GB and {passes / 1e9:.1f} GB for "
            f"forward passes, more than {MOST_GPUS} GPUs of {work.gpu_gb:g} GB hold. Name larger GPUs, or use the CPU."
        )
    if number > 1 and work.processes > 1:
        raise UserError(
            f"{size.name}: its weights take {weights / 1e9:.0f} GB, and each of {work.processes} processes holds them on one "
            f"GPU of {work.gpu_gb:g} GB. Use one process: the model is spread over several GPUs."
        )
    return number


def _passes(kind: JobKind, size: ModelSize, work: Work) -> float:
    """Memory of forward passes beside the weights."""
    item, most = size.itemsize(work.dtype), 0.0
    if work.calibrates or work.refit:
        tokens = work.batch_size * work.seqlen
        squares = 8 * tokens * (size.widest_input + size.hidden_size)  # of inputs and outputs, in float32
        most = _activations(size, tokens, item) + squares
    suite = work.measured
    if kind in ("evaluate", "sweep") and suite is not None:
        if suite.corpus is not None:
            blocks, length = blocks_at_a_time(size, suite), block_of(size, suite.corpus)
            tokens, pieces = blocks * length, 8 * blocks * min(length, _PIECE)
            most = max(most, _activations(size, tokens, item) + size.vocabulary * (tokens * item + pieces))
        if suite.tasks:
            tasks = [size_of_task(task) for task in suite.tasks]
            tokens = work.task_batch * min(max(task.longest for task in tasks), size.context or 2048)
            logits = 2 * tokens * size.vocabulary * item  # and their logarithms
            most = max(most, _activations(size, tokens, item) + logits)
    return most


def _questions(work: Work) -> float:
    """Memory of lm-eval and of the questions of its largest task."""
    suite = work.measured
    if suite is None or not suite.tasks:
        return 0.0
    tasks = [size_of_task(task) for task in suite.tasks]
    return BASE_OF_TASKS + EXAMPLE_BYTES * max(task.examples * task.choices for task in tasks)


def _activations(size: ModelSize, tokens: int, itemsize: int) -> float:
    """Memory of a forward pass of a batch: what a block holds at its widest."""
    return float(tokens * (4 * size.widest_input + 6 * size.hidden_size) * itemsize)


def _held(size: ModelSize, work: Work) -> float:
    """Memory of the node for hidden states between blocks, and for the work of a refit."""
    if not (work.refit or work.propagates):
        return 0.0
    states = work.tokens * size.hidden_size * size.itemsize(work.dtype)
    if not work.refit:  # beside the masks of a block and its dense weights
        return float(states + size.largest_block * (1 + size.itemsize(work.dtype)))
    from emp_llm.update.admm import admm_workspace_bytes
    from emp_llm.update.least_squares import workspace_bytes

    single = max(4 * inputs * (inputs + max(inputs, outputs)) for outputs, inputs, _ in size.shapes)
    workspace = admm_workspace_bytes if work.searches else workspace_bytes
    solver = max(workspace(outputs, inputs) for outputs, inputs, _ in size.shapes)
    return 5 * states + single + solver + size.largest_block * (2 * size.itemsize(work.dtype) + 5)


def _disk(kind: JobKind, size: ModelSize, work: Work) -> float:
    """Bytes written."""
    norms = 8.0 * sum(inputs * number for _, inputs, number in size.shapes)
    if kind == "evaluate":
        return 1e7
    if kind == "calibrate":
        return norms
    if kind == "sweep":
        return norms + 1e7 * work.points + (size.file_bytes * work.points if work.keep else 0)
    return norms + size.file_bytes + (size.bytes_of(size.in_blocks) if work.refit else 0)


def _rounded(value: float) -> float:
    """Three significant digits, and not less."""
    if value <= 0:
        return 0.0
    unit = 10.0 ** (math.floor(math.log10(value)) - 2)
    return float(f"{math.ceil(value / unit - 1e-9) * unit:.6g}")
