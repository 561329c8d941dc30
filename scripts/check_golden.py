"""The bytes of pruned checkpoints, compared with digests recorded with version 0.1.0: every method,
group and budget.

    python scripts/check_golden.py [--models NAME ...] [--write]

The norms come from a formula and not from a forward pass, so the bytes depend on no library and no
processor. The models are the demo model and, if the folder `shared` lies beside the checkout,
stories260K and wiki-llama-5m. The exit code is 1 if a digest differs.
"""

import argparse
import hashlib
import itertools
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from emp_llm import prune
from emp_llm.common.errors import count_of

ROOT = Path(__file__).parents[1]
DIGESTS = ROOT / "tests" / "data" / "golden.json"
METHODS = ("emp-wanda", "emp-magnitude", "wanda", "magnitude")


def models() -> dict[str, Path]:
    """The models that exist here, by their names in the digests."""
    shared = ROOT.parent / "shared" / "models"
    found = {"demo": ROOT / "scripts" / "demo" / "model", "stories260K": shared / "stories260K"}
    found["wiki-llama-5m"] = shared / "wiki-llama-5m"
    return {name: path for name, path in found.items() if path.is_dir()}


def cases() -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, options of prune) of each case; `match` names another case."""
    for method, group, targets in itertools.product(
        METHODS, ("row", "matrix", "all"), ("mlp", "all-linear")
    ):
        yield f"{method} {group} {targets}", {"method": method, "group": group, "targets": targets}
    for method in ("emp-wanda", "emp-magnitude"):
        for order in (0.5, 1.0, 3.0):
            yield f"{method} order {order}", {"method": method, "order": order}
        for beta in (0.5, 1.25):
            yield f"{method} beta {beta}", {"method": method, "beta": beta}
        yield f"{method} bfloat16", {"method": method, "neff_dtype": "bfloat16"}
        plain = method.removeprefix("emp-")
        yield f"{plain} 2:4", {"method": plain, "pattern": "2:4"}
        yield f"{plain} 0.7", {"method": plain, "sparsity": 0.7}
        for by in ("total", "matrix"):
            yield (
                f"{plain} match {by}",
                {"method": plain, "match": f"{method} row mlp", "match_by": by},
            )


def digest_of(model: Path, options: dict[str, Any], folder: Path) -> str:
    """Prune into `folder`; returns 16 hexadecimal digits of SHA-256 over the shards. The norms
    are synthetic.
    """
    norms = folder.parent / "norms.safetensors"
    if not norms.exists():
        save_norms(model, norms)
    given = {"activations": norms} if "wanda" in options["method"] else {}
    if "match" in options:
        given["match"] = folder.parent / options["match"]
    prune(model=str(model), output=folder, **options | given)
    digest = hashlib.sha256()
    for shard in sorted(folder.glob("*.safetensors")):
        digest.update(hashlib.sha256(shard.read_bytes()).hexdigest().encode())
    return digest.hexdigest()[:16]


def save_norms(model: Path, path: Path) -> None:
    """Write an activations file with numbers from a formula; some inputs dominate."""
    norms = {}
    for shard in sorted(model.glob("*.safetensors")):
        with safe_open(shard, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                shape = file.get_slice(name).get_shape()
                if len(shape) == 2 and ".layers." in name:
                    layer = name.removesuffix(".weight")
                    values = ((np.arange(shape[1]) * 7919 + len(layer)) % 1000 + 1) / 250.0
                    values[::97] *= 40
                    norms[layer] = torch.tensor(values, dtype=torch.float32)
    metadata = {
        "format": "emp-llm activations 1",
        "inputs": {name: name for name in norms},
        "about": {"model": "made up"},
    }
    save_file(norms, path, {"emp_llm": json.dumps(metadata | {"tokens": {}})})


def main(line: list[str] | None = None) -> None:
    """Compare all cases of all models, or write their digests."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--models", nargs="+", choices=tuple(models()), default=[*models()], help="default: all"
    )
    parser.add_argument(
        "--write", action="store_true", help="write the digests to tests/data/golden.json"
    )
    arguments = parser.parse_args(line)
    recorded = json.loads(DIGESTS.read_text()) if DIGESTS.is_file() else {}
    found: dict[str, str] = {}
    for name, model in ((name, models()[name]) for name in arguments.models):
        with tempfile.TemporaryDirectory() as folder:
            for case, options in cases():
                found[f"{name} {case}"] = digest_of(model, options, Path(folder) / case)
    if arguments.write:
        DIGESTS.write_text(json.dumps(recorded | found, indent=1) + "\n")
    different = [name for name, digest in found.items() if recorded.get(name) != digest]
    print(
        f"{count_of(len(found), 'checkpoint')}, {len(different)} different from the recorded "
        "digests",
        *different,
        sep="\n",
    )
    sys.exit(1 if different and not arguments.write else 0)


if __name__ == "__main__":
    main()
