"""Recipes that are tried on the dense model of a run, one after the other."""

import logging
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cached_property
from pathlib import Path

from emp_llm.common.machine import Stopwatch
from emp_llm.pruning.loaded_model import holds_stored_weights, pruned
from emp_llm.pruning.masks import Pruner
from emp_llm.pruning.outcome import Outcomes
from emp_llm.pruning.writing import write_checkpoint
from emp_llm.runs.run import Run, dense_model
from emp_llm.walk.moved import MovedWeights

logger = logging.getLogger(__name__)


class Trials:
    """The model of a run, pruned for as long as it is measured: in memory, or from a temporary
    checkpoint.

    Args:
        run: its dense model, targets and models.
        scratch: folder of the temporary checkpoint.
    """

    def __init__(self, run: Run, scratch: Path) -> None:
        self.run = run
        self._scratch = scratch

    @cached_property
    def in_memory(self) -> bool:
        """Whether the loaded weights are the stored ones; offloaded ones are not."""
        run = self.run
        if holds_stored_weights(dense_model(run), run.checkpoint, run.targets):
            return True
        logger.info(
            "the loaded weights differ from the stored ones; each point is written to a temporary "
            "checkpoint."
        )
        run.models.free()
        return False

    @contextmanager
    def pruned(
        self, pruner: Pruner, stopwatch: Stopwatch, moved: MovedWeights | None = None
    ) -> Iterator[tuple[Path, Outcomes]]:
        """Inside this context, the model in a folder is pruned.

        Args:
            stopwatch: times the pruning.
            moved: new values of the weights that stay.

        Returns:
            The folder: in memory, that of the dense model, whose weights are restored; and the
            outcomes.
        """
        if self.in_memory:
            with ExitStack() as masked:
                with stopwatch("prune"):
                    outcomes = masked.enter_context(pruned(dense_model(self.run), pruner, moved))
                yield self.run.source.folder, outcomes
            return
        shutil.rmtree(self._scratch, ignore_errors=True)
        self._scratch.mkdir(parents=True)
        try:
            with stopwatch("prune"):
                outcomes = write_checkpoint(pruner, self._scratch, moved=moved).outcomes
            yield self._scratch, outcomes
        finally:
            self.run.models.free()  # the next one has the same path
            shutil.rmtree(self._scratch, ignore_errors=True)
