"""The needs of a job, estimated from its model's config: GPUs, memory, disk and hours."""

import math

from emp_llm.cluster.plan_file import JobKind, Needs
from emp_llm.cluster.planning.model_size import ModelSize
from emp_llm.cluster.planning.workload import (
    CPU_FLOPS,
    DISK,
    EXAMPLES,
    GPU_FLOPS,
    TASKS,
    Work,
    block_of,
    blocks_at_a_time,
    hours_of,
)
from emp_llm.common.errors import UserError

BASE = 0.6e9  # Python with torch, transformers and the tokenizer
BASE_OF_TASKS = 0.5e9  # lm-eval and its data, beside it
BASE_OF_PRUNE = 0.35e9  # a prune that runs no model
BASE_WITH_GPU = 4.0e9  # memory of the node beside a model on the GPU: CUDA's libraries, and buffers of loading; not measured
GPU_CONTEXT = 1.0e9  # memory of a GPU that CUDA and its libraries take; not measured
GPU_SHARE = 0.9  # of a GPU's memory that weights may take: accelerate's rule
LONGEST = 1024  # tokens of the longest question of a task
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
    device = size.weight_bytes(work.dtype) + _passes(kind, size, work)
    gpus = _gpus(size, work) * work.processes if on_gpu else 0
    if not runs:
        memory = BASE_OF_PRUNE
    elif on_gpu:
        memory = (BASE_WITH_GPU + _held_states(kind, size, work)) * work.processes
    else:
        memory = (BASE + device + _held_states(kind, size, work)) * work.processes
    memory += BASE_OF_TASKS * work.processes if _has_tasks(work) else 0
    return Needs(
        processes=work.processes,
        gpus=gpus,
        gpu_gb=work.gpu_gb if on_gpu else 0.0,
        memory_gb=_rounded(memory / 1e9),
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
    unknown = [task.name for task in (work.suite.tasks if work.suite else ()) if task.name not in TASKS]
    if unknown:
        said.append(f"Tasks of unknown size ({', '.join(unknown)}) have {EXAMPLES:,} examples.")
    return said


def _gpus(size: ModelSize, work: Work) -> int:
    """The GPUs that one process needs."""
    usable = GPU_SHARE * (work.gpu_gb * 1e9 - GPU_CONTEXT)
    weights = size.weight_bytes(work.dtype)
    if weights + _activations(size, work.batch_size * work.seqlen, work.dtype) <= usable:
        return 1
    room = usable - size.bytes_of(size.largest_block, work.dtype)  # a block lies on one GPU
    if room <= 0:
        raise UserError(
            f"{size.name}: one of its blocks does not fit on a GPU of {work.gpu_gb:g} GB. Name larger GPUs, or use the CPU."
        )
    if work.processes > 1:
        raise UserError(
            f"{size.name}: its weights take {weights / 1e9:.0f} GB, and each of {work.processes} processes holds them on one "
            f"GPU of {work.gpu_gb:g} GB. Use one process: the model is spread over several GPUs."
        )
    return math.ceil(weights / room)


def _passes(kind: JobKind, size: ModelSize, work: Work) -> float:
    """Memory of forward passes beside the weights."""
    most = 0.0
    if work.calibrates or work.refit:
        most = _activations(size, work.batch_size * work.seqlen, work.dtype)
    suite = work.measured
    if kind in ("evaluate", "sweep") and suite is not None:
        if suite.corpus is not None:
            tokens = block_of(size, suite.corpus) * blocks_at_a_time(size, suite)
            most = max(most, _activations(size, tokens, work.dtype) + tokens * size.vocabulary * size.itemsize(work.dtype))
        if suite.tasks:
            tokens = work.task_batch * min(LONGEST, size.context or LONGEST)
            logits = 2 * tokens * size.vocabulary * size.itemsize(work.dtype)
            most = max(most, _activations(size, tokens, work.dtype) + logits)
    return most


def _activations(size: ModelSize, tokens: int, dtype: str) -> float:
    """Memory of a forward pass of a batch."""
    return float(tokens * (3 * size.widest_input + 6 * size.hidden_size) * size.itemsize(dtype))


def _held_states(kind: JobKind, size: ModelSize, work: Work) -> float:
    """Hidden states that are held between blocks, and the work memory of a refit."""
    if not (work.refit or work.propagates):
        return 0.0
    states = work.tokens * size.hidden_size * size.itemsize(work.dtype)
    if not work.refit:
        return float(states)
    from emp_llm.reconstruction.least_squares import workspace_bytes

    single = max(4 * inputs * (inputs + max(inputs, outputs)) for outputs, inputs, _ in size.shapes)
    solver = max(workspace_bytes(outputs, inputs) for outputs, inputs, _ in size.shapes)
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


def _has_tasks(work: Work) -> bool:
    return work.suite is not None and bool(work.suite.tasks)


def _rounded(value: float) -> float:
    """Three significant digits, and not less."""
    if value <= 0:
        return 0.0
    unit = 10.0 ** (math.floor(math.log10(value)) - 2)
    return float(f"{math.ceil(value / unit - 1e-9) * unit:.6g}")
