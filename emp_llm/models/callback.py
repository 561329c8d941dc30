"""Keeps a model sparse while it trains. In a file of its own: the callbacks of transformers import
peft and bitsandbytes where they are installed, which takes seconds.
"""

from typing import Any

from transformers import TrainerCallback

from emp_llm.models.masks import Masks, Source, find_masks


class SparsityCallback(TrainerCallback):  # type: ignore[misc]
    """Keeps a model as sparse as a pruned checkpoint, or as masks, while `transformers.Trainer`
    trains it.

    Each step of the optimizer changes the removed weights too; the callback sets them to zero
    again, before anything is saved or evaluated:
    `Trainer(..., callbacks=[SparsityCallback("pruned")])`. LoRA freezes the base and needs no
    callback; call `reapply_mask(model.merge_and_unload(), "pruned")` after the training. It works
    under DistributedDataParallel and FSDP2 too, where each process masks its own part. The masks
    take one bit of memory for every weight of the targets. Arguments and errors are those of
    `reapply_mask`; errors are raised when the training begins.
    """

    def __init__(
        self, masks: Source, targets: str | list[str] | None = None, blocks: str | None = None
    ) -> None:
        self._source = masks
        self._targets = targets
        self._blocks = blocks
        self._masks: Masks | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **context: Any) -> None:
        """Read the masks, and make the model sparse before the first step."""
        self._masks = find_masks(self._source, context["model"], self._targets, self._blocks)
        self._masks.apply(context["model"])

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **context: Any) -> None:
        """Set the removed weights to zero again."""
        if self._masks is not None:
            self._masks.apply(context["model"])
