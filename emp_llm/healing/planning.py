"""What is known of a healing before it: whether it is possible, its memory and its disk."""

import logging
import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

import msgspec

from emp_llm.checkpoint.checkpoint import Checkpoint
from emp_llm.common.errors import UserError, count_of, format_bytes, quotable, reason
from emp_llm.common.machine import available_memory, has_bfloat16
from emp_llm.common.ranks import ranks
from emp_llm.models.architecture import Target
from emp_llm.models.placement import indexed, parse_device_map
from emp_llm.options.recipe import MOST_STEPS, Heal, Recipe
from emp_llm.options.shared import Place
from emp_llm.records.base import Corpus
from emp_llm.walk.checks import check_blocks_separable, check_update, held_out

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)


SEQUENCES = 4  # of a step
SET_ASIDE = 16  # sequences that choose the step, at most
POSITIONS = 32  # of a sequence whose probabilities are in memory in float32 at a time
# Of a weight on disk, at most: the best, the last and the next checkpoint, each with its value and
# two moments in bfloat16.
HEALING_BYTES = 3 * 8


def check_healable(config: Any, targets: Sequence[Target] | None = None) -> None:
    """Raise UserError if weights cannot be trained: because of the model's config, or of how
    targets are stored.
    """
    from emp_llm.models.loading import headless_class

    if targets is not None:
        check_update(targets, "--heal", "Leave out --heal")
    if config.get("is_encoder_decoder"):
        raise UserError(
            "--heal is for decoders, and this model has an encoder too. Leave out --heal."
        )
    if (name := headless_class(config)) is not None:
        raise UserError(
            f"--heal learns the probabilities of tokens, and {name} has no head for "
            "them. Leave out --heal."
        )


def check_trains(samples: int, length: int) -> None:
    """Raise UserError for a text of too few sequences for a step, or of a single token each."""
    if length < 2:
        raise UserError(
            "--heal: a sequence of 1 token has no next token to predict. Give a higher --seqlen."
        )
    if samples <= SEQUENCES:
        raise UserError(
            f"--heal: the text has {count_of(samples, 'sequence')}, and {SEQUENCES + 1} are "
            f"needed: {SEQUENCES} for a step, and one that is held out. Give more --samples, or a "
            "lower --seqlen."
        )


def set_aside(sequences: int) -> int:
    """How many sequences of a text choose the step, and are not trained on: one of sixteen, and at
    most 16.
    """
    return min(SET_ASIDE, held_out(sequences))


def sequences_for(steps: int) -> int:
    """How many sequences `steps` steps read if none is read twice."""
    return SEQUENCES * steps + SET_ASIDE


def in_steps(heal: Heal, corpora: Sequence[Corpus]) -> Heal:
    """The same healing with the steps that read its tokens.

    Args:
        corpora: its text; all have the same seqlen.

    Raises:
        UserError: the tokens are too few for a step, or too many.
    """
    if heal.tokens is None:
        return heal
    length = corpora[0].seqlen or 0
    of_step = SEQUENCES * length
    if not of_step <= heal.tokens <= MOST_STEPS * of_step:
        raise UserError(
            f"--heal-tokens {heal.tokens:g}: a step reads {SEQUENCES} sequences of {length:,} "
            f"tokens. Give {of_step:,} to {MOST_STEPS * of_step:,}."
        )
    return replace(heal, steps=int(heal.tokens // of_step), tokens=None)


def healing_weights(checkpoint: Checkpoint, targets: Sequence[Target], heal: Heal) -> int:
    """An upper bound on the number of weights that healing moves."""
    return (
        checkpoint.elements
        if heal.weights == "all"
        else sum(target.matrix.numel for target in targets)
    )


def healing_bytes(
    checkpoint: Checkpoint, targets: Sequence[Target], heal: Heal, by_blocks: bool
) -> int:
    """An upper bound on the disk that healing takes beside the output."""
    if by_blocks:  # the weights of finished blocks are kept
        return sum(target.matrix.numel * target.matrix.itemsize for target in targets)
    return HEALING_BYTES * healing_weights(checkpoint, targets, heal)


# How a model heals, by the memory of the devices on which it will lie: whole, with as many
# sequences at a time as fit, or block by block. It is known before the first pass of a run.
#
# All of it is arithmetic on config.json and the headers of the checkpoint; docs/gpu.md compares it
# with measured runs.


Parts = dict[str, int]
_ON_GPU = 0.92  # of its free memory; the rest is for the allocator's gaps and the libraries
_WORK = 24  # bytes for each weight of the matrix that moves: float32 copies in a step of Adam


@dataclass(frozen=True)
class Sizes:
    """The sizes of a healing, in weights and bytes.

    Attributes:
        config: the content of config.json.
        layers: number of decoder blocks.
        moving, others: numbers of weights that move, and of those that do not.
        largest: weights of the largest parameter that moves.
        block: bytes of the largest decoder block in the dense model; of_block: its weights that
            move.
        length, samples: tokens per sequence, and number of sequences.
        in_bfloat16: the dtype of the products; else they are of float32.
        stored_so: whether the weights are stored in bfloat16, in which they can stay.
    """

    config: Mapping[str, Any]
    layers: int
    moving: int
    others: int
    largest: int
    block: int
    of_block: int
    length: int
    samples: int
    in_bfloat16: bool
    stored_so: bool

    @classmethod
    def of(
        cls,
        checkpoint: Checkpoint,
        targets: Sequence[Target],
        heal: Heal,
        length: int,
        samples: int,
        in_bfloat16: bool,
    ) -> Self:
        """Those of a checkpoint; arguments as the attributes."""
        moving = healing_weights(checkpoint, targets, heal)
        numels: dict[str, int] = {}  # experts of a layer are one parameter
        blocks: dict[int | None, int] = {}
        for target in targets:
            layer = target.layer
            numel = target.matrix.numel
            numels[layer.parameter] = numels.get(layer.parameter, 0) + numel
            blocks[layer.block] = blocks.get(layer.block, 0) + numel
        config = checkpoint.config
        layers = _value(config, "num_hidden_layers", "n_layer", "num_layers") or len(blocks)
        stored = sum(checkpoint.sizes.values())
        return cls(
            config,
            max(1, layers),
            moving,
            checkpoint.elements - moving,
            max(numels.values(), default=0),
            max(0, stored - 2 * _table(config)) // max(1, layers),
            max(blocks.values(), default=0),
            length,
            samples,
            in_bfloat16,
            all(target.matrix.stored.dtype == "BF16" for target in targets),
        )

    @property
    def width(self) -> int:
        """The size of a hidden state."""
        return _width(self.config)

    @property
    def reached(self) -> float:
        """The weights that a token meets: of a mixture's experts, those that it is routed to."""
        experts = _value(self.config, "num_local_experts", "num_experts", "n_routed_experts")
        share = _value(self.config, "num_experts_per_tok") / experts if experts else 1.0
        return (self.moving + self.others - 2 * _table(self.config)) * (share or 1.0)

    @property
    def token(self) -> int:
        """Bytes that a block keeps of a token for its gradients: with d inputs and f neurons,
        about 24 d + 8 f; with scores that are soft-capped (Gemma 2), 8 for each of them too.
        """
        of_expert = _value(self.config, "moe_intermediate_size", "intermediate_size")
        routed = _value(self.config, "num_experts_per_tok") * of_expert
        neurons = max(_value(self.config, "intermediate_size", "n_inner", "ffn_dim"), routed)
        scores = 0
        if _text(self.config).get("attn_logit_softcapping"):
            scores = _value(self.config, "num_attention_heads") * self.length
        return 24 * self.width + 8 * (neurons or 4 * self.width) + 8 * scores

    def whole(self, at_once: int, checkpointing: bool, passes: int) -> Parts:
        """What healing the whole model takes.

        Args:
            at_once: sequences of a forward pass.
            checkpointing: of gradients: blocks keep their inputs alone, and run again.
            passes: forward passes of a step. With a single one, a gradient is freed as soon as its
                weight has moved.
        """
        tokens = at_once * self.length
        size = 2 if self.in_bfloat16 else 4
        vocabulary = _value(self.config, "vocab_size")
        # Of both models, and their gradient twice; one more of the dense model's; and pieces of
        # them in float32.
        rows = 4 * tokens + (self.length if at_once > 1 else 0)
        logits = size * rows + 12 * POSITIONS * at_once
        of_other = 4
        if self.in_bfloat16:  # a copy in bfloat16 is made for a product
            of_other = 2 if self.stored_so else 6
        kept = self.layers * self.token
        if checkpointing:
            kept = self.layers * 4 * hidden_width(self.config) + self.token
        return {
            "weights": 4 * self.moving + of_other * self.others,
            "optimiser": 4 * self.moving,
            "gradients": size * (self.moving if passes > 1 else self.largest),
            "dense embeddings and head": 2 * size * _table(self.config),
            "activations": tokens * kept,
            "logits": vocabulary * logits,
            "step": _WORK * self.largest,
        }

    def by_blocks(self, at_once: int) -> Parts:
        """What healing the largest block takes: its dense weights and those of the next one, and
        of each weight that moves its value before and now, in float32 too, a gradient in both
        dtypes and two moments of bfloat16.
        """
        size = 2 if self.in_bfloat16 else 4
        return {
            "weights": 2 * self.block + (2 * size + 4) * self.of_block,
            "optimiser": 4 * self.of_block,
            "gradients": (size + 4) * self.of_block,
            "activations": at_once * self.length * self.token,
            "step": _WORK * self.largest,
        }

    @property
    def both_hidden_states(self) -> int:
        """Bytes of the hidden states of the text in the dense and in the pruned model."""
        numbers = self.samples * self.length * hidden_width(self.config)
        return 2 * numbers * (2 if self.in_bfloat16 else 4)


def _text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return config.get("text_config") or config


def _value(config: Mapping[str, Any], *names: str) -> int:
    """The first of some fields of config.json that is a number, or has one for each layer: then
    the largest of them; 0 if none is.
    """
    text = _text(config)
    for name in names:
        value = text.get(name)
        if isinstance(value, list) and value and all(isinstance(each, int) for each in value):
            return int(max(value))
        if isinstance(value, int):
            return value
    return 0


def _width(config: Mapping[str, Any]) -> int:
    return _value(config, "hidden_size", "n_embd", "d_model")


def hidden_width(config: Mapping[str, Any]) -> int:
    """How many numbers of a token one block hands to the next: several streams of hidden states in
    DeepSeek-V4 and Gemma 3n.
    """
    return _width(config) * (_value(config, "hc_mult", "altup_num_inputs") or 1)


def _table(config: Mapping[str, Any]) -> int:
    """The number of weights of the embeddings of a vocabulary."""
    return _value(config, "vocab_size") * _width(config)


@dataclass(frozen=True)
class HealingPlan:
    """How a model heals.

    Attributes:
        by: the whole model, or block by block.
        device_map: of the models, for `load_model`.
        device: computes what does not lie on a device.
        at_once: sequences of a forward pass.
        checkpointing: of gradients: blocks keep their inputs alone, and run again.
        hidden_states: where they are kept.
        parts: bytes that it takes, by what takes them.
        free: bytes that are free on the devices.
    """

    by: Literal["model", "blocks"]
    device_map: str
    device: str
    at_once: Annotated[int, msgspec.Meta(ge=1, le=SEQUENCES)]
    checkpointing: bool
    hidden_states: Place
    parts: Parts
    free: int

    @property
    def needed(self) -> int:
        """Bytes of memory."""
        return sum(self.parts.values())

    def words(self) -> str:
        """The plan in words."""
        how = "the whole model" if self.by == "model" else "block by block"
        places = self.device if self.device_map != "balanced" else "all GPUs together"
        parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in self.parts.items())
        again = ", with gradient checkpointing" if self.checkpointing else ""
        return (
            f"{how}, {count_of(self.at_once, 'sequence')} at a time{again}; "
            f"{format_bytes(self.needed)} of memory ({parts}); "
            f"{format_bytes(self.free)} free on {places}"
        )


def plan_healing(
    checkpoint: Checkpoint,
    targets: Sequence[Target],
    recipe: Recipe,
    heal: Heal,
    *,
    device_map: str,
    length: int,
    samples: int,
    batch_size: int = SEQUENCES,
    hidden_states: Place = "auto",
    kept: HealingPlan | None = None,
) -> HealingPlan:
    """How a checkpoint will heal. All ranks have the same answer: a collective call.

    Args:
        checkpoint: dense or pruned.
        targets: the weights that move.
        recipe: of the pruning.
        heal: which layers heal.
        device_map: the user's.
        length, samples: tokens per sequence, and number of sequences.
        batch_size: sequences at a time, at most. On a CPU the whole model takes one: more take more
            memory, and no less time.
        hidden_states: where the user wants them.
        kept: the plan with which an interrupted run has begun to heal, on which its bytes depend.

    Raises:
        UserError: it fits neither whole nor block by block, cannot go block by block, or no longer
            fits as the interrupted run began.
    """
    devices = devices_of(device_map)
    free = {str(device): free_on(device) for device in devices}
    in_bfloat16 = all(has_bfloat16(device) for device in devices)
    sizes = Sizes.of(checkpoint, targets, heal, length, samples, in_bfloat16)
    plan = None
    if not keeps_elsewhere(device_map) and (kept is None or kept.by == "model"):
        most = 1 if "cpu" in free else min(batch_size, SEQUENCES)
        numbers = down_from(most) if kept is None else [kept.at_once]
        plan = _whole(sizes, device_map, free, numbers, hidden_states)
    # What one rank cannot do whole, none does.
    if any(one is None for one in ranks().gather(plan)):
        if kept is not None and kept.by == "model":
            raise UserError(
                f"{_too_little(sizes, kept.at_once, free)}; the interrupted run has begun to "
                "heal it whole. Free memory, or start over with --overwrite."
            )
        numbers = down_from(min(batch_size, SEQUENCES)) if kept is None else [kept.at_once]
        plan = _by_blocks(checkpoint, sizes, recipe, heal, device_map, free, numbers, hidden_states)
    assert plan is not None
    return replace(plan, at_once=min(ranks().gather(plan.at_once)))


def passes_of(at_once: int) -> int:
    """The forward passes of each rank in a step."""
    return math.ceil(SEQUENCES / (at_once * ranks().count))


def ways(sizes: Sizes, numbers: Sequence[int]) -> list[tuple[int, bool, Parts]]:
    """Ways to heal the whole model, the fastest first: sequences at a time; whether gradients are
    checkpointed; and what that takes.
    """
    return [
        (at_once, checkpointing, sizes.whole(at_once, checkpointing, passes_of(at_once)))
        for checkpointing in (False, True)
        for at_once in numbers
    ]


def down_from(most: int) -> Sequence[int]:
    """Numbers of sequences at a time, of which no rank has more in a step than needed."""
    most = min(most, math.ceil(SEQUENCES / ranks().count))
    return [most, *(number for number in (2, 1) if number < most)]


def _whole(
    sizes: Sizes,
    device_map: str,
    free: dict[str, int],
    numbers: Sequence[int],
    hidden_states: Place,
) -> HealingPlan | None:
    """Healing the whole model: on the device with the most free memory, else over all of them;
    None if it does not fit.
    """
    device, room = max(free.items(), key=lambda entry: entry[1])
    places = {device: room}
    if ranks().count > 1:  # each has a device of its own
        places = {device_map: room}
    elif len(free) > 1:  # the blocks are spread evenly
        places["balanced"] = len(free) * min(free.values())
    for device_map, room in places.items():
        for at_once, checkpointing, parts in ways(sizes, numbers):
            if sum(parts.values()) <= room:
                return HealingPlan(
                    "model", device_map, device, at_once, checkpointing, hidden_states, parts, room
                )
    return None


def _by_blocks(
    checkpoint: Checkpoint,
    sizes: Sizes,
    recipe: Recipe,
    heal: Heal,
    device_map: str,
    free: dict[str, int],
    numbers: Sequence[int],
    hidden_states: Place,
) -> HealingPlan:
    """Healing block by block.

    Raises:
        UserError: it does not fit either, or the model or the recipe needs the whole model.
    """
    if keeps_elsewhere(device_map):
        problem = f"--heal with --device-map {quotable(device_map)} goes block by block"
    else:
        problem = _too_little(sizes, 1, free)
        device_map = "disk"
    smaller = recipe.structure is not None and not recipe.structure.keep_shapes
    needs = {
        "--structure": smaller,
        "--heal-weights all": heal.weights == "all",
        "--heal-labels": heal.labels,
    }
    flag = next((name for name, given in needs.items() if given), None)
    if flag is not None:
        raise UserError(f"{problem}; {flag} needs the whole model. Use devices with more memory.")
    check_blocks_separable(
        checkpoint.config, f"{problem}. The other way", "Use devices with more memory"
    )
    device = next(iter(free))
    room = min(free.values())
    for at_once in numbers:
        parts = sizes.by_blocks(at_once)
        if (needed := sum(parts.values())) <= room:
            if hidden_states == "auto" and device != "cpu":
                beside = needed + sizes.both_hidden_states
                hidden_states = "device" if beside <= room else _off_device(sizes)
            return HealingPlan(
                "blocks", device_map, device, at_once, False, hidden_states, parts, room
            )
    raise UserError(
        f"{problem}; block by block it takes {format_bytes(needed)}. Lower --seqlen, or use a "
        "device with more memory."
    )


def _too_little(sizes: Sizes, at_once: int, free: dict[str, int]) -> str:
    """What healing the whole model takes at least, and what is free."""
    _, _, least = ways(sizes, [at_once])[-1]
    return (
        f"--heal of the whole model takes {format_bytes(sum(least.values()))} of memory, and "
        + " and ".join(f"{name} has {format_bytes(size)}" for name, size in free.items())
    )


def _off_device(sizes: Sizes) -> Place:
    return "cpu" if 2 * sizes.both_hidden_states < available_memory() else "disk"


def keeps_elsewhere(device_map: str) -> bool:
    """Whether a device map keeps weights elsewhere than where they are used."""
    placement = parse_device_map(device_map)
    places = set(map(str, placement.values())) if isinstance(placement, dict) else set()
    return "disk" in places or ("cpu" in places and len(places) > 1)


def devices_of(device_map: str) -> "list[torch.device]":
    """The devices that compute by a device map: several, if a model may be spread over them."""
    import torch

    placement = parse_device_map(device_map)
    if isinstance(placement, dict):
        names = [f"cuda:{name}" if isinstance(name, int) else name for name in placement.values()]
        devices = [indexed(torch.device(name)) for name in dict.fromkeys(names) if name != "disk"]
        if any(device.type != "cpu" for device in devices):
            devices = [device for device in devices if device.type != "cpu"]
        return devices or [indexed(ranks().device)]
    if not torch.accelerator.is_available():
        return [torch.device("cpu")]
    present = torch.accelerator.current_accelerator()
    return [
        torch.device(str(present), number) for number in range(torch.accelerator.device_count())
    ]


def free_on(device: "torch.device") -> int:
    """Bytes of a device that a healing may take."""
    import torch

    if device.type == "cuda":
        return int(_ON_GPU * torch.cuda.mem_get_info(device)[0])
    return available_memory() // ranks_here()


def ranks_here() -> int:
    """The number of ranks that share this machine's memory."""
    return min(ranks().count, int(os.environ.get("LOCAL_WORLD_SIZE") or ranks().count))


# The numbers of a training, sent to a tracker while it runs.


PROJECT = "emp-llm"  # of the run, in a tracker that has projects
FOLDER = "runs"  # of TensorBoard's files, in the current folder
Log = Callable[[Mapping[str, float], int], None]


def check_tracker(name: str) -> None:
    """Raise UserError for a tracker that is not installed."""
    if name == "none":
        return
    found = find_spec(name)
    if found is None or found.origin is None:  # a folder, such as the one that wandb writes
        raise UserError(f"--report-to {name} needs the package {name}: pip install {name}")


@contextmanager
def tracking(name: str, run: str, settings: Mapping[str, Any]) -> Iterator[Log | None]:
    """A function that sends the numbers of a step, by name; None without a tracker, and on all
    ranks but the first. A failure to send, or to finish, ends no run.

    Args:
        name: "none", "trackio", "tensorboard" or "wandb".
        run: its name in the tracker.
        settings: of the training.

    Raises:
        UserError: the tracker is not installed, or does not start.
    """
    if name == "none" or not ranks().main:
        yield None
        return
    check_tracker(name)
    shown = threading.excepthook
    threading.excepthook = partial(_in_thread, shown)
    try:
        send, end = _tensorboard(run) if name == "tensorboard" else _service(name, run, settings)
    # A folder that cannot be written, a missing login, a network: kinds of their own.
    except (Exception, SystemExit) as error:
        threading.excepthook = shown
        raise UserError(f"--report-to {name}: it does not start ({reason(error)}).") from error
    failed = False

    def attempt(work: Callable[[], Any]) -> None:
        nonlocal failed
        try:
            work()
        except (Exception, SystemExit) as error:
            if not failed:
                logger.warning(
                    "warning: --report-to %s: numbers are lost (%s). The run goes on.",
                    name,
                    reason(error),
                )
            failed = True

    try:
        yield lambda numbers, step: attempt(partial(send, numbers, step))
    finally:
        attempt(end)
        threading.excepthook = shown


def _in_thread(shown: Callable[[threading.ExceptHookArgs], Any], about: Any) -> None:
    """Show what ends a thread, unless it is TensorBoard's, whose next call raises it again."""
    if not type(about.thread).__module__.startswith("tensorboard."):
        shown(about)


def _tensorboard(run: str) -> tuple[Log, Callable[[], Any]]:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(f"{FOLDER}/{run}")

    def send(numbers: Mapping[str, float], step: int) -> None:
        for name, value in numbers.items():
            writer.add_scalar(name, value, step)

    return send, writer.close


def _service(name: str, run: str, settings: Mapping[str, Any]) -> tuple[Log, Callable[[], Any]]:
    """trackio and wandb have the same functions."""
    module = import_module(name)
    started = module.init(project=PROJECT, name=run, config=dict(settings))
    return lambda numbers, step: started.log(dict(numbers), step=step), started.finish
