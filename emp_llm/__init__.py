"""emp-llm: Effective Model Pruning for Hugging Face causal language models.

Import from here the mathematics, the commands as functions, and the tools that keep a pruned model
sparse during training: `from emp_llm import effective_mask, prune, reapply_mask`.
"""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from emp_llm.bench import bench as bench
    from emp_llm.calibrate import calibrate as calibrate
    from emp_llm.calibration.activations import Activations as Activations
    from emp_llm.collect import collect as collect
    from emp_llm.common.errors import UserError as UserError
    from emp_llm.env import env as env
    from emp_llm.evaluate import evaluate as evaluate
    from emp_llm.generate import generate as generate
    from emp_llm.heal import heal as heal
    from emp_llm.in_memory.healing import heal_model as heal_model
    from emp_llm.in_memory.masks import Masks as Masks
    from emp_llm.in_memory.model_report import ModelReport as ModelReport
    from emp_llm.in_memory.prune_model import masks_of as masks_of
    from emp_llm.in_memory.prune_model import prune_model as prune_model
    from emp_llm.in_memory.reapply import SparsityCallback as SparsityCallback
    from emp_llm.in_memory.reapply import reapply_mask as reapply_mask
    from emp_llm.in_memory.rotation import rotate_model as rotate_model
    from emp_llm.measure import measure as measure
    from emp_llm.options.recipe import Effective as Effective
    from emp_llm.options.recipe import Given as Given
    from emp_llm.options.recipe import Heal as Heal
    from emp_llm.options.recipe import Magnitude as Magnitude
    from emp_llm.options.recipe import Match as Match
    from emp_llm.options.recipe import Owl as Owl
    from emp_llm.options.recipe import Own as Own
    from emp_llm.options.recipe import Pattern as Pattern
    from emp_llm.options.recipe import Recipe as Recipe
    from emp_llm.options.recipe import Relative as Relative
    from emp_llm.options.recipe import Ria as Ria
    from emp_llm.options.recipe import Share as Share
    from emp_llm.options.recipe import Targets as Targets
    from emp_llm.options.recipe import Wanda as Wanda
    from emp_llm.options.words import recipe_of as recipe_of
    from emp_llm.pack import pack as pack
    from emp_llm.plan import plan as plan
    from emp_llm.prune import prune as prune
    from emp_llm.push import push as push
    from emp_llm.records.base import read_record as read_record
    from emp_llm.records.run_report import RunReport as RunReport
    from emp_llm.report import report as report
    from emp_llm.rotate import rotate as rotate
    from emp_llm.run import run as run
    from emp_llm.selection.criteria import InputStatistics as InputStatistics
    from emp_llm.selection.criteria import exponential as exponential
    from emp_llm.selection.criteria import shift as shift
    from emp_llm.selection.effective import effective_mask as effective_mask
    from emp_llm.selection.effective import effective_mass as effective_mass
    from emp_llm.selection.effective import effective_mass_bound as effective_mass_bound
    from emp_llm.selection.effective import effective_number as effective_number
    from emp_llm.selection.effective import loss_change_bound as loss_change_bound
    from emp_llm.status import status as status
    from emp_llm.submit import submit as submit
    from emp_llm.sweep import sweep as sweep
    from emp_llm.unpack import unpack as unpack
    from emp_llm.update.admm import Admm as Admm
    from emp_llm.update.sparsegpt import SparseGPT as SparseGPT
    from emp_llm.update.update import Refit as Refit
    from emp_llm.verify import verify as verify

COMMANDS = {
    "bench": "Measure speed and memory of a pruned model against the dense one.",
    "calibrate": "Collect the input norms of a model's linear layers on a text.",
    "collect": "Collect the results of a study as tables and a report.",
    "env": "Show versions, processor and kernels, for a report of an error.",
    "evaluate": "Measure perplexity and lm-eval tasks of a model, compared with a baseline.",
    "generate": "Continue a text with a pruned model, computed from its packed weights.",
    "heal": "Train the kept weights of a pruned checkpoint on the dense model's probabilities.",
    "measure": "Measure the redundancy of a model; no weights are written.",
    "pack": "Compress a pruned checkpoint without loss, or only its mask, for shipping.",
    "plan": "Plan a study of models x methods as a file of jobs.",
    "prune": "Prune a model and write the pruned checkpoint.",
    "push": "Push a pruned checkpoint to the Hub, with a model card.",
    "report": "Write tables, figures and a web page from runs, sweeps, measures and results.",
    "rotate": "Turn the basis of a model: the same function, which loses less when it is pruned.",
    "run": "Run the jobs of a plan on this machine.",
    "status": "Show what is done, running, failed and missing of a study.",
    "submit": "Submit the jobs of a plan to a Slurm cluster.",
    "sweep": "Prune a model by many recipes, and evaluate each.",
    "unpack": "Restore a packed checkpoint, bit for bit; or apply a mask to its base model.",
    "verify": "Check a pruned checkpoint: files, bytes and masks.",
}
# The other public names, by their modules.
_MODULES = {
    "in_memory.prune_model": ("masks_of", "prune_model"),
    "in_memory.healing": ("heal_model",),
    "in_memory.rotation": ("rotate_model",),
    "options.recipe": (
        "Effective",
        "Given",
        "Heal",
        "Magnitude",
        "Match",
        "Own",
        "Owl",
        "Pattern",
        "Recipe",
        "Relative",
        "Ria",
        "Share",
        "Targets",
        "Wanda",
    ),
    "options.words": ("recipe_of",),
    "update.update": ("Refit",),
    "update.sparsegpt": ("SparseGPT",),
    "update.admm": ("Admm",),
    "common.errors": ("UserError",),
    "calibration.activations": ("Activations",),
    "in_memory.model_report": ("ModelReport",),
    "records.run_report": ("RunReport",),
    "records.base": ("read_record",),
    "in_memory.masks": ("Masks",),
    "in_memory.reapply": ("SparsityCallback", "reapply_mask"),
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
__all__ = [*COMMANDS, *_MODULE_OF]

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
        return import_module(f"emp_llm.{name}")  # which can be called like its function
    raise AttributeError(f"module 'emp_llm' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
