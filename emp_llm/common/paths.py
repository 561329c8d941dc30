"""Names of files in model folders and output folders, and the folders for cached results and for
data that users edit.
"""

import os
from importlib import resources
from pathlib import Path, PurePath

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
REPORT_NAME = "emp_report.json"  # of a pruning run
MANIFEST_NAME = "emp_manifest.json"
PACK_NAME = "emp_pack.json"  # of a packed checkpoint
PACKED_SUFFIX = ".packed.safetensors"
SWEEP_NAME = "sweep.jsonl"
CARD_NAME = "README.md"
# The mark of a card that a push replaces. A card without it is the user's.
CARD_MARK = (
    "<!-- emp-llm writes this card again at every push. Delete this line to keep your own "
    "changes. -->"
)
EXTRAS = "emp_llm"  # subfolder of an output, for files of the run that are not part of the model
ACTIVATIONS_NAME = Path(EXTRAS) / "activations.safetensors"
SELF_NAME = Path(EXTRAS) / "self.jsonl"  # the calibration text that the model itself wrote
CRITERION_NAME = Path(EXTRAS) / "criterion.py"  # the source file of a criterion of the user's own
STRUCTURE_NAME = Path(EXTRAS) / "structure.safetensors"  # the kept units, and all scores
EXPERTS_NAME = Path(EXTRAS) / "experts.json"  # the numbers of the kept experts, for other tools
# What a calibration has collected for scores by gradients, experts or layers.
SUMS_NAME = Path(EXTRAS) / "sums.safetensors"
# Other formats of weights, and pickles. They hold the dense model, so a pruned one gets no copy.
OTHER_WEIGHTS = (
    ".bin",
    ".pt",
    ".pth",
    ".ckpt",
    ".h5",
    ".msgpack",
    ".onnx",
    ".onnx_data",
    ".gguf",
    ".ot",
    ".safetensors",
    ".npz",
    ".npy",
    ".tflite",
    ".pdparams",
    ".mlmodel",
    ".nemo",
    ".keras",
    ".pkl",
    ".pickle",
    ".joblib",
)


def is_hidden(relative: PurePath) -> bool:
    """Whether a path in a model folder is hidden, or lies in a hidden folder. Such files are of
    git, of a download or of the user.
    """
    return any(name.startswith(".") for name in relative.parts)


def file_state(path: Path) -> tuple[int, int, int] | None:
    """Size in bytes, inode and change time in ns of a file, by which changes are detected; None if
    the file is missing. No program can set the change time.
    """
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_size, status.st_ino, status.st_ctime_ns


def cache_folder() -> Path:
    """$EMP_LLM_CACHE, else emp_llm in $XDG_CACHE_HOME or ~/.cache. The folder may not exist yet."""
    root = os.environ.get("EMP_LLM_CACHE")
    if root:
        return Path(root)
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "emp_llm"


def data_folder(name: str) -> Path:
    """The path of `calibration/` or `eval/`. The wheel holds them in
    `emp_llm/data`.
    """
    packaged = Path(str(resources.files("emp_llm"))) / "data" / name
    checkout = Path(__file__).parents[2]
    if packaged.is_dir():
        return packaged
    return checkout / name


def shown_name(model: str) -> str:
    """A model for a page that others read: a Hub id as it is, and a folder without those above."""
    path = PurePath(model)
    return path.name if path.is_absolute() or model.startswith((".", "~")) else model
