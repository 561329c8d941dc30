"""The identity of a checkpoint: a hash of all its shards, so that different models have different identities.

The hashes of a pruned checkpoint's shards are taken from its manifest if that describes these files. Otherwise the files are
hashed once, and the hashes are cached by path, size and modification time.
"""

import json
import logging
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from blake3 import blake3

from emp_llm.checkpoint.checkpoint import Checkpoint
from emp_llm.common.cache_folder import cache_folder
from emp_llm.common.errors import UserError
from emp_llm.common.file_names import MANIFEST_NAME
from emp_llm.storage.atomic import write_json
from emp_llm.storage.hashing import file_hash
from emp_llm.storage.json_files import INDEX_LIMIT, read_json

logger = logging.getLogger(__name__)


def identity_of(checkpoint: Checkpoint) -> str:
    """The identity of a checkpoint: BLAKE3 of its shards' names, sizes and BLAKE3 hashes, in hexadecimal.

    Raises:
        UserError: a shard cannot be read, or changes while it is read.
    """
    known = known_hashes(checkpoint)
    if known is None:
        with ThreadPoolExecutor(2, thread_name_prefix="emp-llm-identity") as threads:
            hashes = threads.map(file_hash, checkpoint.shards)
            known = {shard.name: digest for shard, digest in zip(checkpoint.shards, hashes, strict=True)}
        checkpoint.check_unchanged()
        remember_hashes(checkpoint, known)
    return identity_from_hashes(checkpoint, known)


def known_hashes(checkpoint: Checkpoint) -> dict[str, str] | None:
    """BLAKE3 of each shard by name, from the manifest or the cache; None if not all are known."""
    return _hashes_in_manifest(checkpoint) or _hashes_in_cache(checkpoint)


def remember_hashes(checkpoint: Checkpoint, hashes: dict[str, str]) -> None:
    """Cache the shards' hashes, for their sizes and modification times when the checkpoint was opened."""
    with suppress(OSError):  # the cache is optional
        write_json(_cache_file(checkpoint), {"files": _state(checkpoint), "blake3": hashes})


def identity_from_hashes(checkpoint: Checkpoint, hashes: dict[str, str]) -> str:
    """The identity of a checkpoint, given BLAKE3 of each shard by name."""
    sizes = checkpoint.states
    return identity_from_files({name: (sizes[name][0], digest) for name, digest in hashes.items()})


def identity_from_files(files: dict[str, tuple[int, str]]) -> str:
    """The identity of a checkpoint, given size and BLAKE3 of each shard by name."""
    lines = [f"{name} {size} {digest}\n" for name, (size, digest) in sorted(files.items())]
    return blake3("".join(lines).encode()).hexdigest()


def _hashes_in_manifest(checkpoint: Checkpoint) -> dict[str, str] | None:
    """The hashes in a pruned checkpoint's manifest, if it names these shards and none of them is newer."""
    path = checkpoint.folder / MANIFEST_NAME
    if not path.is_file():
        return None
    try:
        files = read_json(path, limit=INDEX_LIMIT).get("files")
    except UserError:
        return None
    if not isinstance(files, dict):
        return None
    written = path.stat().st_mtime_ns
    hashes: dict[str, str] = {}
    for name, (size, modified) in checkpoint.states.items():
        entry = files.get(name)
        if not isinstance(entry, dict) or entry.get("bytes") != size or modified > written:
            return None
        digest = entry.get("blake3")
        if not isinstance(digest, str):
            return None
        hashes[name] = digest
    return hashes


def _hashes_in_cache(checkpoint: Checkpoint) -> dict[str, str] | None:
    with suppress(OSError, ValueError):
        entry: Any = json.loads(_cache_file(checkpoint).read_text(encoding="utf-8"))
        if isinstance(entry, dict) and entry.get("files") == _state(checkpoint):
            hashes = entry.get("blake3")
            if isinstance(hashes, dict) and hashes.keys() == checkpoint.states.keys():
                return {str(name): str(digest) for name, digest in hashes.items()}
    return None


def _state(checkpoint: Checkpoint) -> dict[str, list[int]]:
    return {name: list(state) for name, state in checkpoint.states.items()}


def _cache_file(checkpoint: Checkpoint) -> Path:
    key = blake3(str(checkpoint.folder.resolve()).encode()).hexdigest()[:32]
    return cache_folder() / "identities" / f"{key}.json"
