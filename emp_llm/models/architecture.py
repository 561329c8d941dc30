"""The layers of a model, where a checkpoint stores them, and the choice of targets. Imports neither
torch nor transformers.

    architecture = Architecture.of_checkpoint(checkpoint)  # reads config.json and headers alone
    targets = architecture.select("mlp")                   # layers of the model, stored matrices
    coverage = architecture.coverage(targets)
"""

import logging
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from emp_llm.checkpoint.checkpoint import Checkpoint
from emp_llm.checkpoint.matrices import FP8_DTYPE, PRUNABLE_DTYPES, Matrix, block_scales
from emp_llm.common.errors import UserError, count_of, did_you_mean, quotable, shorten_list
from emp_llm.models.layers import (
    EMBEDDINGS,
    HEAD_LEAVES,
    HEADS,
    IN_ADAPTER,
    IN_WRAPPER,
    LLAMA_ATTENTION,
    LLAMA_BLOCKS,
    LLAMA_EMBEDDING,
    LLAMA_HEAD,
    LLAMA_MLP,
    LLAMA_MORE_NORMS,
    LLAMA_NORM,
    LLAMA_NORMS,
    MIXES_TOKENS,
    ROUTERS,
    SECOND_TOKEN,
    Layer,
    Purpose,
    Shape,
    Tower,
    is_router,
    named_tower,
    tower_of,
    within,
)
from emp_llm.records.run_report import TargetsRecord

if TYPE_CHECKING:
    from torch import nn

    from emp_llm.options.recipe import Recipe, Targets

logger = logging.getLogger(__name__)

_SCOPES: dict[str, tuple[Purpose, ...]] = {
    "mlp": ("mlp",),
    "attention": ("attention",),
    "all-linear": ("mlp", "attention", "other"),
}
_LONGEST = 2**31 - 1  # rows or columns, which kernels count in 32 bits
_SECONDS = 2.0  # for one match of a user's expression
_NAMES_ONLY = re.compile(r"[\w.-]+(\s*,\s*[\w.-]+)*")


@dataclass(frozen=True)
class Target:
    """A layer to prune, and its stored weight."""

    layer: Layer
    matrix: Matrix

    @property
    def name(self) -> str:
        return self.layer.name


def healed_tensors(architecture: "Architecture", recipe: "Recipe") -> set[str]:
    """The stored tensors of a dense model that healing by a recipe may change; none if it does
    not heal.
    """
    if recipe.heal is None:
        return set()
    if recipe.heal.weights == "all":
        stored = {
            architecture.stored_names[name]
            for name in architecture.block_shapes
            if name in architecture.stored_names
        }
        return stored | {matrix.stored.name for matrix in architecture.experts.values()}
    return {target.matrix.stored.name for target in architecture.targets_of(recipe.targets)}


def check_coverage(coverage: TargetsRecord, targets: str | list[str], allow_partial: bool) -> None:
    """Warn if layers in the scope cannot be pruned.

    Raises:
        UserError: they hold more than half of the weights in blocks, and `allow_partial` is false.
    """
    share = coverage.unreachable_share_of_blocks
    whole = any(part in (["mlp"], ["all-linear"]) for part in parts_of(targets))
    if not whole or share < 0.01:
        return
    problem = (
        f"{100 * share:.0f} % of the weights in decoder blocks cannot be pruned "
        f"({shorten_list(coverage.unreachable)})"
    )
    if share > 0.5 and not allow_partial:
        raise UserError(f"{problem}. To prune only the others, add --allow-partial.")
    logger.warning("warning: %s; they stay dense.", problem)


@dataclass(frozen=True)
class Architecture:
    """The layers of a model and their weights in a checkpoint.

    Attributes:
        checkpoint: only its folder, config and tensors are used, so headers without weights
            suffice.
        layers: all of them, in the model's order.
        stored_names: parameter -> stored tensor, for parameters stored one to one.
        block_shapes: parameter -> shape in the model, for the parameters of decoder blocks.
        shapes: parameter -> shape in the model, if the model's class is known.
        experts: name of an expert's layer -> its stored matrix.
        towers: name of a module outside the language tower -> its tower; empty for a model of text
            alone.
        language: name of the module of the language tower; empty if it is the whole model.
        main: the tower of the decoder blocks: of the language model, or of the list that --blocks
            names.
        unused: stored tensors that are no part of the model: of layers that predict a second token,
            of other heads, old masks; and further copies of tied weights.
    """

    checkpoint: Checkpoint
    layers: list[Layer]
    stored_names: dict[str, str]
    block_shapes: dict[str, Shape]
    shapes: dict[str, Shape] = field(default_factory=dict)
    experts: dict[str, Matrix] = field(default_factory=dict)
    towers: dict[str, Tower] = field(default_factory=dict)
    language: str = ""
    main: Tower = "language"
    unused: list[str] = field(default_factory=list)

    @classmethod
    def of_checkpoint(
        cls,
        checkpoint: Checkpoint,
        blocks: str | None = None,
        trust_remote_code: bool = False,
        names_suffice: bool = False,
    ) -> "Architecture":
        """The architecture of a checkpoint: from conventional names, else from the class of
        config.json, built without weights.

        Importing transformers takes several times as long as pruning a small model. Most published
        models follow the conventions of Llama, and then names and shapes tell the same as the
        class; `scripts/check_conventional.py` compares the two ways for every class of
        transformers.

        Args:
            checkpoint: the model.
            blocks: name of the list of decoder blocks; None: detected.
            trust_remote_code: run code from the model's folder.
            names_suffice: for a model without a known class, derive the layers from the names in
                the checkpoint.

        Raises:
            UserError: transformers has no class for the model, or the checkpoint lacks some of its
                weights.
        """
        known = conventional(checkpoint, blocks)
        if known is not None:
            return known
        from emp_llm.models.loading import NoModelClassError, build_skeleton

        try:
            return cls.of_model(
                checkpoint, build_skeleton(checkpoint.folder, trust_remote_code), blocks
            )
        except NoModelClassError as error:
            if not names_suffice:
                raise
            if blocks is not None:
                raise UserError(
                    f"{error} Its layers are derived from the names of its tensors, so --blocks "
                    f"{blocks} has no effect. Leave it out."
                ) from error
            logger.warning("%s Its layers are derived from the names of its tensors.", error)
            return by_names(checkpoint)

    @classmethod
    def of_model(
        cls, checkpoint: Checkpoint, model: "nn.Module", blocks: str | None = None
    ) -> "Architecture":
        """The architecture of a model of transformers, with or without weights, and its checkpoint.

        Args:
            checkpoint: its weights.
            model: a model of any class.
            blocks: name of the list of decoder blocks; None: detected.

        Raises:
            UserError: the model has no decoder blocks, or the checkpoint lacks some of its weights.
        """
        from emp_llm.models.loading import head_parameter, headless_class
        from emp_llm.models.modules import block_lists, find_names, find_stacks, model_layers

        towers = block_lists(model, blocks)
        stored = find_names(model, checkpoint, find_stacks(model, towers))
        _check_merged(checkpoint.folder, stored.unused)
        wrapped = next(filter(IN_WRAPPER.search, stored.unused), None)
        if wrapped is not None:
            raise UserError(
                f"{checkpoint.folder}: {quotable(wrapped)} is the name of a tensor in a compiled "
                "or parallel model. Save the model inside of it by save_pretrained."
            )
        # A reward model has none.
        head = head_parameter(model) if headless_class(checkpoint.config) is not None else None
        missing = [name for name in stored.missing if name != head]
        if missing:
            raise UserError(
                f"{checkpoint.folder}: {count_of(len(missing), 'weight')} of the model "
                f"{'is' if len(missing) == 1 else 'are'} missing: {shorten_list(missing)}. The "
                "checkpoint is incomplete; download it again."
            )
        shapes = {
            name: tuple(parameter.shape)
            for name, parameter in model.named_parameters(remove_duplicate=False)
        }
        order = {name: number for number, name in enumerate(shapes)}
        layers = model_layers(model, towers) + [layer for layer, _ in stored.experts]
        return cls(
            checkpoint=checkpoint,
            layers=sorted(layers, key=lambda layer: order.get(layer.parameter, len(order))),
            stored_names=stored.names,
            block_shapes={
                f"{blocks.path}.{name}": tuple(parameter.shape)
                for blocks in towers.lists
                for name, parameter in blocks.modules.named_parameters()
            },
            shapes=shapes,
            experts={layer.name: matrix for layer, matrix in stored.experts},
            towers=towers.others,
            language=towers.language,
            main=towers.lists[0].tower,
            unused=stored.unused,
        )

    def targets_of(self, scope: "Targets") -> list[Target]:
        """The targets of a recipe; as `select`."""
        return self.select(scope.layers, scope.ignore, scope.tower)

    def select(
        self,
        targets: str | list[str],
        ignore: str | list[str] | None = None,
        tower: str = "language",
    ) -> list[Target]:
        """The targets that match a specification, in the model's order.

        Args:
            targets: "mlp", "attention", "all-linear" and name suffixes, as a list or separated by
                commas; or a regular expression for the whole module name. Heads and embeddings
                match only if their name is written out.
            ignore: modules to leave out, in the same form.
            tower: the part of a multimodal model, "language", "vision" or "all".

        Raises:
            UserError: a name or an expression matches nothing, the model has no such tower, a
                regular expression is invalid, or a weight is not stored as a 16-, 32- or 64-bit
                floating-point matrix.
        """
        self._check_tower(tower)
        chosen = self._named("--targets", targets, in_scope, tower)
        left_out = self._named("--ignore", ignore or [], is_named)
        matching = [layer for layer in self.layers if layer.name in chosen - left_out]
        embeddings = {
            self.stored_names.get(layer.parameter)
            for layer in self.layers
            if layer.purpose == "embedding"
        }
        matching = self._without_grouped(matching, targets)
        target_at: dict[tuple[str, int | None], Target] = {}
        for layer in matching:
            matrix = self._matrix(layer) if self._includes(tower, layer.tower) else None
            if matrix is None:
                continue
            place = matrix.stored.name, matrix.expert
            if place in target_at:
                logger.warning(
                    "%s shares its weight with %s; it is pruned once.",
                    layer.name,
                    target_at[place].name,
                )
                continue
            if layer.purpose == "head" and matrix.stored.name in embeddings:
                logger.warning(
                    "warning: %s is tied to the embeddings (%s); both change.",
                    layer.name,
                    matrix.stored.name,
                )
            target_at[place] = Target(layer, matrix)
        if target_at:
            return list(target_at.values())
        asked = f"--targets {targets!r}{f' without {ignore!r}' if ignore else ''}"
        if matching:
            elsewhere = shorten_list([layer.name for layer in matching])
            raise UserError(
                f"{asked} match only layers without a matrix in the checkpoint: {elsewhere}."
            )
        raise UserError(f"{asked} match nothing in {self.checkpoint.folder}.")

    def _named(
        self,
        flag: str,
        names: str | list[str],
        matches: Callable[[Layer, str | list[str]], bool],
        tower: str = "all",
    ) -> set[str]:
        """The names of the layers that a specification matches.

        Raises:
            UserError: one of its names matches no layer of the tower.
        """
        found: set[str] = set()
        for part in parts_of(names):
            layers = [layer for layer in self.layers if matches(layer, part)]
            asked = f"{flag} {quotable(part if isinstance(part, str) else part[0])!r}"
            if not layers:
                raise UserError(f"{asked} matches no layer. {self._layers_there(part)}")
            if not any(self._includes(tower, layer.tower) for layer in layers):
                elsewhere = shorten_list([layer.name for layer in layers])
                raise UserError(
                    f"{asked} matches no layer of the {tower} tower, only {elsewhere}. Add "
                    "--tower all."
                )
            found.update(layer.name for layer in layers)
        return found

    def _layers_there(self, part: str | list[str]) -> str:
        """What could have been meant by a name, or an expression, that matches no layer."""
        roles = sorted({layer.role for layer in self.layers if layer.block is not None})
        known = [*_SCOPES, *dict.fromkeys(layer.leaf for layer in self.layers), *roles]
        hint = "" if isinstance(part, str) else did_you_mean(part[0], known).lstrip()
        unreachable = self._unreachable(self._in_blocks("all"))
        sentences = [
            hint,
            f"The layers of its blocks are: {', '.join(roles) or 'none'}.",
            f"These weights belong to no layer: {shorten_list(unreachable)}."
            if unreachable
            else "",
        ]
        return " ".join(filter(None, sentences))

    @staticmethod
    def _without_grouped(layers: list[Layer], targets: str | list[str]) -> list[Layer]:
        """The layers whose weight is one matrix times all inputs.

        Raises:
            UserError: another one is named.
        """
        grouped = [layer for layer in layers if layer.grouped]
        if not grouped:
            return layers
        problem = "each group of rows has inputs of its own, and such a weight cannot be pruned"
        if not (isinstance(targets, str) and targets in _SCOPES):
            raise UserError(
                f"--targets: {grouped[0].name} is block-diagonal: {problem}. Leave it out of "
                f"--targets, or add --ignore {grouped[0].leaf}."
            )
        names = shorten_list([layer.name for layer in grouped])
        logger.warning("warning: block-diagonal layers stay dense (%s): %s.", names, problem)
        return [layer for layer in layers if not layer.grouped]

    @cached_property
    def parameters(self) -> int:
        """The number of the model's parameters: elements of the stored tensors that it uses."""
        unused = set(self.unused)
        tensors = self.checkpoint.tensors.values()
        return sum(tensor.numel for tensor in tensors if tensor.name not in unused)

    def coverage(self, targets: list[Target], tower: str = "language") -> TargetsRecord:
        """The share of the model, or of its chosen tower, that these targets cover; nothing is
        pruned yet.
        """
        inside = [target.matrix.numel for target in targets if target.layer.block is not None]
        blocks = self._in_blocks(tower)
        in_blocks = sum(weights for _, weights in blocks.values())
        unreachable = self._unreachable(blocks)
        weights_there = sum(blocks[name][1] for name in unreachable)
        dense = sorted(self._dense_towers(tower).items(), key=lambda item: -item[1])
        weights = sum(target.matrix.numel for target in targets)
        parameters = self.parameters
        return TargetsRecord(
            matrices=len(targets),
            matrices_outside=len(targets) - len(inside),
            matrices_in_blocks=sum(number for number, _ in blocks.values()),
            weights=weights,
            sparsity_of_targets=0.0,
            parameters=parameters,
            share_of_all_parameters=weights / (parameters or 1),
            share_of_blocks=sum(inside) / in_blocks if in_blocks else None,
            unreachable=list(unreachable),
            unreachable_share_of_all_parameters=weights_there / (parameters or 1),
            unreachable_share_of_blocks=weights_there / in_blocks if in_blocks else 0.0,
            dense_towers={name: number / (parameters or 1) for name, number in dense},
        )

    @property
    def further_blocks(self) -> dict[str, str]:
        """Unused tensors that look like a decoder block's -> their name within it.

        They are of layers that predict a second token: model.layers.N behind the last one,
        mtp.layers.0, mtp.block, ...
        """
        ends = {within_block(name) for name in self.checkpoint.tensors.keys() - set(self.unused)}
        ends_of = {}
        for name in self.unused:
            parts = name.split(".")
            tails = (".".join(parts[n:]) for n in range(1, len(parts) - 1))
            end = next((tail for tail in tails if tail in ends), None)
            if end is not None:
                ends_of[name] = end
        return ends_of

    def _includes(self, choice: str, tower: Tower) -> bool:
        """Whether a choice of towers includes a tower. "language" means the tower of --blocks,
        if that names another.
        """
        return choice == "all" or tower == (self.main if choice == "language" else choice)

    def _in_blocks(self, tower: str) -> dict[str, tuple[int, int]]:
        """Name -> numbers of matrices and of weights, for each parameter of the decoder blocks
        that holds matrices.
        """
        layers = Counter(layer.parameter for layer in self.layers if layer.block is not None)
        tables = {layer.parameter for layer in self.layers if layer.purpose == "embedding"}
        return {
            name: (layers[name] or math.prod(shape[:-2]), math.prod(shape))
            for name, shape in self.block_shapes.items()
            if len(shape) >= 2
            and min(shape) > 1
            and "bias" not in name.rpartition(".")[2]
            and name not in tables
            if self._includes(tower, tower_of(self.towers, name))
        }

    def _unreachable(self, in_blocks: Iterable[str]) -> tuple[str, ...]:
        """Those parameters whose matrices cannot be targets, without routers."""
        reached = {
            layer.parameter
            for layer in self.layers
            if layer.expert or (layer.parameter in self.stored_names and not layer.grouped)
        }
        others = [name for name in in_blocks if name not in reached]
        return tuple(
            name
            for name in others
            if ROUTERS.isdisjoint(name.removesuffix(".weight").split(".")[-2:])
        )

    def _dense_towers(self, tower: str) -> dict[str, int]:
        """Name -> number of parameters of each part outside the chosen tower."""
        sizes = dict.fromkeys(self.towers, 0)
        for name, shape in self.shapes.items():
            root = next((root for root in self.towers if within(name, root)), None)
            if root is not None:
                sizes[root] += math.prod(shape)
        dense = {
            root: size
            for root, size in sizes.items()
            if not self._includes(tower, self.towers[root])
        }
        if self.towers and not self._includes(tower, "language"):
            dense[self.language or "language model"] = self.parameters - sum(sizes.values())
        return dense

    def _check_tower(self, tower: str) -> None:
        """Raise UserError if the model has no layers in a tower."""
        towers = sorted({layer.tower for layer in self.layers if layer.purpose != "embedding"})
        if not towers or any(self._includes(tower, candidate) for candidate in towers):
            return
        remedy = (
            "Leave it out."
            if towers == ["language"]
            else "To prune them by a magnitude method, add --tower all."
        )
        raise UserError(
            f"--tower {tower}: {self.checkpoint.folder} has no {tower} tower; its layers belong "
            f"to: {', '.join(towers)}. {remedy}"
        )

    def _matrix(self, layer: Layer) -> Matrix | None:
        """The stored weight of a layer; None, with a warning, if it is not a tensor of its own."""
        if layer.expert is not None:
            matrix = self.experts[layer.name]
        elif layer.parameter in self.stored_names:
            matrix = Matrix(
                self.checkpoint.tensors[self.stored_names[layer.parameter]], layer.transposed
            )
        else:
            logger.warning(
                "%s: its weight is not a separate tensor in the checkpoint; it stays dense.",
                layer.name,
            )
            return None
        stored = matrix.stored
        if 0 in stored.shape:
            logger.warning(
                "warning: %s has no weights: its shape is %s.", layer.name, list(stored.shape)
            )
            return None
        if max(stored.shape) > _LONGEST:
            raise UserError(
                f"{layer.name}: its shape is {list(stored.shape)}, and at most {_LONGEST:,} rows "
                f"and columns can be pruned. Leave it out by --ignore {layer.leaf}."
            )
        if stored.dtype == FP8_DTYPE and len(stored.shape) == 2:
            matrix = replace(
                matrix, scales=block_scales(stored, self.checkpoint.tensors, self.checkpoint.config)
            )
        elif stored.dtype not in PRUNABLE_DTYPES or len(stored.shape) != (
            2 if matrix.expert is None else 3
        ):
            raise UserError(
                f"{stored.shard}: {stored.name} is stored as {stored.dtype} {list(stored.shape)}; "
                "only 16-, 32- and 64-bit floating-point matrices can be pruned. Prune the "
                "original model and quantise the result."
            )
        shape = stored.shape if layer.expert else self.shapes.get(layer.parameter, stored.shape)
        if shape != stored.shape:
            raise UserError(
                f"{self.checkpoint.folder}: {layer.name} has the shape {list(shape)} by "
                f"config.json, and {list(stored.shape)} in the checkpoint; they do not belong "
                "together. Download the model again."
            )
        return matrix


def within_block(tensor: str) -> str:
    """The name of a stored tensor within its block: what follows the first number; "" without a
    number.
    """
    return re.sub(r"^.*?\.\d+\.", "", tensor) if re.search(r"\.\d+\.", tensor) else ""


def parts_of(names: str | list[str]) -> list[str | list[str]]:
    """The elements of a specification, each in a form of its own: a list of one name, or an
    expression as text.
    """
    if isinstance(names, str) and not _NAMES_ONLY.fullmatch(names):
        return [names]
    listed = names.split(",") if isinstance(names, str) else names
    return [[name.strip()] for name in listed]


def in_scope(layer: Layer, part: str | list[str]) -> bool:
    """Whether an element of the targets matches a layer. Heads, embeddings and routers match only
    if their name is written out.
    """
    if not is_named(layer, part):
        return False
    written = part if isinstance(part, str) else part[0]
    written_out = re.search(rf"(?<!\w){re.escape(layer.leaf)}(?!\w)", written) is not None
    return layer.purpose not in ("head", "embedding", "router") or written_out


def is_named(layer: Layer, part: str | list[str]) -> bool:
    """Whether an element, as of `parts_of`, matches a layer: "mlp", "attention", "all-linear", a
    suffix of the name, or an expression for the whole name.
    """
    if not isinstance(part, str):
        (name,) = part
        if name in _SCOPES:
            return layer.purpose in _SCOPES[name]
        return layer.name == name or layer.name.endswith(f".{name}")
    # re, with a limit of time: a report of others may hold an expression that never ends.
    import regex

    try:
        return regex.fullmatch(part, layer.name, timeout=_SECONDS) is not None
    except (regex.error, RecursionError, MemoryError) as error:
        raise UserError(
            f"--targets or --ignore {quotable(part)!r} is not a valid regular expression "
            f"({str(error) or 'it is nested too deeply'})."
        ) from error
    except TimeoutError as error:
        raise UserError(
            f"--targets or --ignore {quotable(part)!r}: takes more than {_SECONDS:g} seconds "
            f"on the name {layer.name}. Write it without repeats inside repeats."
        ) from error


def check_calibrated(layers: Iterable[Layer]) -> None:
    """Raise UserError if a layer, which needs input activations, is in a tower that a text does
    not reach.
    """
    beside = next((layer for layer in layers if layer.tower != "language"), None)
    if beside is None:
        return
    remedy = "Use a magnitude method, which needs none."
    if beside.tower == "vision":
        remedy = (
            "Use a magnitude method, which needs none; or in Python, give batches with images to "
            "prune_model."
        )
    raise UserError(
        f"{beside.name} is in the {beside.tower} tower. Calibration runs on text, so this tower "
        f"has no input activations. {remedy}"
    )


def conventional(checkpoint: Checkpoint, blocks: str | None = None) -> Architecture | None:
    """The architecture of a checkpoint that follows the conventions of Llama in every name and
    shape; None for any other.

    Args:
        checkpoint: the model.
        blocks: name of the list of decoder blocks, if given by the user.
    """
    config = checkpoint.config
    shape_of = _llama_shapes(config)
    if shape_of is None or blocks not in (None, LLAMA_BLOCKS):
        return None
    number = config["num_hidden_layers"]
    shapes = {name: tensor.shape for name, tensor in checkpoint.tensors.items()}
    roles: list[str] = []
    for variants in (LLAMA_ATTENTION, LLAMA_MLP):
        for names in variants:
            if all(f"{LLAMA_BLOCKS}.0.{name}.weight" in shapes for name in names):
                roles += names
                break
    layers = [Layer(LLAMA_EMBEDDING, "embedding", None)]
    for block in range(number):
        for role in roles:
            purpose: Purpose = "mlp" if role.startswith("mlp.") else "attention"
            layers.append(Layer(f"{LLAMA_BLOCKS}.{block}.{role}", purpose, block))
    layers.append(Layer(LLAMA_HEAD, "head", None))
    head = f"{LLAMA_HEAD}.weight"
    tied = config.get("tie_word_embeddings")
    if head in shapes and not isinstance(tied, bool):
        return None  # only the class knows
    matrices = {
        layer.parameter: shape_of[layer.leaf]
        for layer in layers
        if layer.purpose != "head" or not tied or head in shapes
    }
    norm = f"{LLAMA_NORM}.weight"
    if norm not in shapes or not matrices.items() <= shapes.items():
        return None
    # The other tensors are norms and biases, one of each in every block.
    others = Counter(
        re.sub(r"\.\d+\.", ".*.", name) for name in shapes.keys() - matrices.keys() - {norm}
    )
    in_block = f"{LLAMA_BLOCKS}.*"
    norms = {f"{in_block}.{name}.weight" for name in LLAMA_NORMS}
    more_norms = {f"{in_block}.{name}.weight" for name in LLAMA_MORE_NORMS}
    biases = {f"{in_block}.{role}.bias" for role in roles}
    known = norms <= others.keys() <= norms | more_norms | biases
    if not known or set(others.values()) != {number}:
        return None
    stored_names = {head: f"{LLAMA_EMBEDDING}.weight"} | {name: name for name in shapes}
    block_shapes = {
        name: shape for name, shape in shapes.items() if name.startswith(f"{LLAMA_BLOCKS}.")
    }
    unused = [head] if tied and head in shapes else []
    return Architecture(checkpoint, layers, stored_names, block_shapes, unused=unused)


def _llama_shapes(config: dict[str, Any]) -> dict[str, Shape] | None:
    """Leaf of a layer -> shape of its weight, by a config.json with the fields of Llama; None for
    any other, and for code of the repository's own.
    """
    classes = config.get("architectures")
    if not isinstance(classes, list) or len(classes) != 1:
        return None
    if not str(classes[0]).endswith("ForCausalLM"):
        return None
    if "auto_map" in config or "model_type" not in config:
        return None
    keys = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
    )
    sizes: list[Any] = [config.get(key) for key in keys]
    sizes.append(config.get("num_key_value_heads") or sizes[-1])
    if not all(type(size) is int and size > 0 for size in sizes):
        return None
    vocabulary, hidden, inner, _, heads, groups = sizes
    head = config.get("head_dim") or hidden // heads
    if type(head) is not int:
        return None
    queries = heads * head
    values = groups * head
    return {
        "q_proj": (queries, hidden),
        "k_proj": (values, hidden),
        "v_proj": (values, hidden),
        "qkv_proj": (queries + 2 * values, hidden),
        "o_proj": (hidden, queries),
        "gate_proj": (inner, hidden),
        "up_proj": (inner, hidden),
        "gate_up_proj": (2 * inner, hidden),
        "down_proj": (hidden, inner),
        "embed_tokens": (vocabulary, hidden),
        "lm_head": (vocabulary, hidden),
    }


def by_names(checkpoint: Checkpoint) -> Architecture:
    """The architecture derived from the names in a checkpoint, for a model without a known
    class.
    """
    shapes = {name: tensor.shape for name, tensor in checkpoint.tensors.items()}
    _check_merged(checkpoint.folder, shapes)
    vocabulary = checkpoint.config.get("vocab_size")
    unused = [name for name in shapes if _is_further(name, checkpoint.config)]
    if unused:
        logger.warning(
            "warning: config.json explains no layers of these names, and they stay dense: %s.",
            shorten_list(unused),
        )
    known = {name: shape for name, shape in shapes.items() if name not in unused}
    named = (_layer_by_name(name, shape, vocabulary) for name, shape in known.items())
    layers = [layer for layer in named if layer is not None]
    towers: dict[str, Tower] = {}
    for name in shapes:
        root = ""
        for component in name.split("."):
            root = f"{root}.{component}" if root else component
            if (tower := named_tower(component)) is not None:
                towers[root] = tower
                break
    return Architecture(
        checkpoint=checkpoint,
        layers=layers,
        stored_names={layer.parameter: layer.parameter for layer in layers},
        block_shapes={
            name: shape for name, shape in known.items() if re.search(r"(^|\.)\d+\.", name)
        },
        shapes=shapes,
        towers=towers,
        unused=unused,
    )


def _check_merged(folder: Path, names: Iterable[str]) -> None:
    """Raise UserError for tensors of an adapter, or of a model in one: the product of an adapter's
    factors changes the weights that would be pruned.
    """
    name = next(filter(IN_ADAPTER.search, names), None)
    if name is not None:
        raise UserError(
            f"{folder}: {quotable(name)} is of an adapter that is not merged. Merge it into its "
            "base model first (merge_and_unload, save_pretrained), and give that folder."
        )


def _is_further(name: str, config: dict[str, Any]) -> bool:
    """Whether a stored tensor belongs to a layer that predicts a second token: by its name, or
    because it comes after the last layer of config.json.
    """
    if SECOND_TOKEN.search(name):
        return True
    if named_tower(name) is not None or config.get("is_encoder_decoder"):
        return False
    text = config.get("text_config")
    number = (text if isinstance(text, dict) else config).get("num_hidden_layers")
    place = re.match(r"(?:\w+\.)*?layers\.(\d+)\.", name)
    return place is not None and type(number) is int and 0 < number <= int(place[1])


def _layer_by_name(name: str, shape: Shape, vocabulary: Any) -> Layer | None:
    """The layer of a stored weight, by its name and shape; None if that is not the weight of a
    layer. `vocabulary` is the vocab_size of config.json.
    """
    module, _, parameter = name.rpartition(".")
    if parameter != "weight" or len(shape) != 2:
        return None
    number = re.search(r"(?:^|\.)(\d+)\.", name)
    leaf = module.rpartition(".")[2]
    if HEADS.search(module) or shape[0] == vocabulary != shape[1]:
        return Layer(module, "embedding" if EMBEDDINGS.search(leaf) else "head", None)
    if number is None:
        purpose: Purpose = "head" if leaf in HEAD_LEAVES else "embedding"
    elif EMBEDDINGS.search(leaf):
        purpose = "embedding"
    elif is_router(module, *shape):
        purpose = "router"
    else:
        purpose = "attention" if MIXES_TOKENS.search(module) else "mlp"
    block = None if number is None or purpose == "embedding" else int(number[1])
    tower = named_tower(module) or "language"
    block_list = "" if tower == "language" else tower
    return Layer(module, purpose, block, tower=tower, block_list=block_list)
