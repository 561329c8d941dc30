"""The identity of checkpoints in records of format 1: a hash of a few bytes of each tensor, for checking old records."""

import hashlib
from pathlib import Path

from emp_llm.checkpoint.checkpoint import Checkpoint
from emp_llm.storage.direct_io import reading

_SAMPLE = 256


def sha256_of_samples(checkpoint: Checkpoint) -> str:
    """SHA-256 of every tensor's name, dtype, shape and up to 256 bytes from its middle on."""
    samples: dict[str, bytes] = {}
    for shard in checkpoint.shards:
        samples |= _samples(checkpoint, shard)
    digest = hashlib.sha256()
    for name in sorted(checkpoint.tensors):
        tensor = checkpoint.tensors[name]
        digest.update(f"{name} {tensor.dtype} {tensor.shape}".encode() + samples[name])
    return digest.hexdigest()


def _samples(checkpoint: Checkpoint, shard: Path) -> dict[str, bytes]:
    samples = {}
    with reading(shard), shard.open("rb") as file:
        for tensor in checkpoint.tensors.values():
            if tensor.shard == shard:
                middle = tensor.start + (tensor.end - tensor.start) // 2
                file.seek(middle)
                samples[tensor.name] = file.read(min(_SAMPLE, tensor.end - middle))
    return samples
