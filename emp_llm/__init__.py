"""emp-llm: Effective Model Pruning for Hugging Face causal language models.

Import from here the mathematics, the commands as functions, and the tools that keep a pruned model sparse during training:
`from emp_llm import effective_mask, prune, reapply_mask`.
"""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from emp_llm.bench import bench as bench
    from emp_llm.calibrate import calibrate as calibrate
    from emp_llm.collect import collect as collect
    from emp_llm.evaluate import evaluate as evaluate
    from emp_llm.generate import generate as generate
    from emp_llm.in_memory.masks import Masks as Masks
    from emp_llm.in_memory.prune_model import masks_of as masks_of
    from emp_llm.in_memory.prune_model import prune_model as prune_model
    from emp_llm.in_memory.reapply import SparsityCallback as SparsityCallback
    from emp_llm.in_memory.reapply import reapply_mask as reapply_mask
    from emp_llm.measure import measure as measure
    from emp_llm.options.recipe import Recipe as Recipe
    from emp_llm.pack import pack as pack
    from emp_llm.plan import plan as plan
    from emp_llm.prune import prune as prune
    from emp_llm.push import push as push
    from emp_llm.report import report as report
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
    from emp_llm.verify import verify as verify

_HOME = {
    "effective_mask": "selection.effective",
    "effective_number": "selection.effective",
    "effective_mass": "selection.effective",
    "effective_mass_bound": "selection.effective",
    "loss_change_bound": "selection.effective",
    "InputStatistics": "selection.criteria",
    "shift": "selection.criteria",
    "exponential": "selection.criteria",
    "Masks": "in_memory.masks",
    "Recipe": "options.recipe",
    "masks_of": "in_memory.prune_model",
    "prune_model": "in_memory.prune_model",
    "reapply_mask": "in_memory.reapply",
    "SparsityCallback": "in_memory.reapply",
}

try:
    __version__ = version("emp-llm")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0+unknown"


def __getattr__(name: str) -> object:
    """Import torch or transformers only for what needs them, so that `--help` does not wait for them."""
    if name in _HOME:
        return getattr(import_module(f"emp_llm.{_HOME[name]}"), name)
    from emp_llm.cli import COMMANDS

    if name in COMMANDS:  # a module that can be called like its function
        return import_module(f"emp_llm.{name}")
    raise AttributeError(f"module 'emp_llm' has no attribute {name!r}")


def __dir__() -> list[str]:
    from emp_llm.cli import COMMANDS

    return [*_HOME, *COMMANDS, "__version__"]
