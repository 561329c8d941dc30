"""Names of files in model folders and output folders."""

from pathlib import Path

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
REPORT_NAME = "emp_report.json"  # of a pruning run
MANIFEST_NAME = "emp_manifest.json"
PACK_NAME = "emp_pack.json"  # of a packed checkpoint
SWEEP_NAME = "sweep.json"
CARD_NAME = "README.md"
EXTRAS = "emp_llm"  # subfolder of an output, for files of the run that are not part of the model
ACTIVATIONS_NAME = Path(EXTRAS) / "activations.safetensors"
STRUCTURE_NAME = Path(EXTRAS) / "structure.safetensors"  # the kept heads and neurons, and all scores
TAYLOR_NAME = Path(EXTRAS) / "taylor.safetensors"  # sums of |gradient x activation|, from which heads and neurons are scored
# Other formats of weights. A copy of such a file would add the dense model to a pruned one.
OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".gguf", ".ot", ".safetensors", ".npz")
