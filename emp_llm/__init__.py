"""emp-llm: Effective Model Pruning for Hugging Face causal language models.

Import from here the mathematics, the commands as functions, and the tools that keep a pruned model
sparse during training: `from emp_llm import effective_mask, prune, reapply_mask`.
"""

import sys
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

if sys.platform == "win32":  # without locks of files, and more
    _SENTENCE = (
        "emp-llm runs on Linux and macOS. On Windows, install and run it in WSL: "
        "https://learn.microsoft.com/windows/wsl/install"
    )
    if sys.argv[:1] == ["-m"] or "emp-llm" in "".join(sys.argv[:1]):  # a command
        print(f"error: {_SENTENCE}", file=sys.stderr)
        sys.exit(2)
    raise ImportError(_SENTENCE)

COMMANDS = {
    "bench": "Measure speed and memory of a pruned model against the dense one.",
    "calibrate": "Run a text through a model, and write the norms of its layers' inputs.",
    "env": "Show versions, processor and kernels, for a report of an error.",
    "evaluate": "Measure perplexity and lm-eval tasks of a model, compared with a baseline.",
    "fetch": "Download a model and data into the cache, for runs without a network.",
    "generate": "Continue a text with a pruned model, from its packed weights.",
    "heal": "Train the kept weights of a pruned checkpoint on the dense model's probabilities.",
    "measure": "Measure the redundancy of a model; no weights are written.",
    "pack": "Compress a pruned checkpoint without loss, or only its mask, for shipping.",
    "plan": "Plan a study of models and methods, for Snakemake.",
    "prune": "Prune a model and write the pruned checkpoint.",
    "push": "Push a pruned checkpoint to the Hub, with a model card.",
    "report": "Write a report with tables and figures of runs, sweeps, results or a study.",
    "sweep": "Prune a model by many recipes, and evaluate each.",
    "unpack": "Restore a packed checkpoint, bit for bit; or apply a mask to its base model.",
    "verify": "Check a pruned checkpoint: files, bytes and masks.",
}
# The other public names, by their modules.
_MODULES = {
    "runs.prune_model": ("ModelReport", "masks_of", "prune_model"),
    "healing.training": ("heal_model",),
    "options.recipe": (
        "ByCost",
        "Effective",
        "Given",
        "Heal",
        "Magnitude",
        "Match",
        "Own",
        "Pattern",
        "Recipe",
        "Relative",
        "Ria",
        "Share",
        "Targets",
        "Wanda",
    ),
    "options.words": ("recipe_of",),
    "update.update": ("Admm", "Refit", "SparseGPT"),
    "common.errors": ("UserError",),
    "calibration.activations": ("Activations",),
    "records.run_report": ("RunReport",),
    "records.base": ("read_record",),
    "models.masks": ("Masks", "reapply_mask"),
    "models.callback": ("SparsityCallback",),
    "selection.criteria": ("InputStatistics", "exponential", "shift"),
    "selection.effective": (
        "effective_mask",
        "effective_mass",
        "effective_mass_bound",
        "effective_number",
        "loss_change_bound",
    ),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}
__all__ = [*COMMANDS, *_MODULE_OF, "runtime"]

try:
    __version__ = version("emp-llm")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0+unknown"


def __getattr__(name: str) -> object:
    """Import torch or transformers only for what needs them, so that `--help` does not wait for
    them.
    """
    if name in _MODULE_OF:
        return getattr(import_module(f"emp_llm.{_MODULE_OF[name]}"), name)
    if name in COMMANDS:
        return getattr(import_module(f"emp_llm.commands.{name}"), name)
    if name == "runtime":
        return import_module("emp_llm.runtime")
    raise AttributeError(f"module 'emp_llm' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
