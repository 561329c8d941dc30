"""Rotation: the same function in a basis in which fewer weights matter.

    readers  W <- W diag(g) Q     writers  W <- Q^T W     embeddings  E <- E Q     head  H <- H
    diag(g) Q values of a head  V <- R^T V     and what reads them  O <- O R

Q turns the residual stream, R the values of a head; both are orthogonal. g are the weights of the
RMSNorm in front of a reader; they become one. An RMSNorm without weights commutes with Q, so the
model still computes the same.

Q and R start from the eigenvectors of the inputs' second moments. Then Adam lowers the mean of
N_eff/N over all rows, for the scores |W| ||X||. It moves the entries of A = -A^T in the Cayley
transforms (I + A)^-1 (I - A).

For patterns N:M, the columns then get an order that spreads large ones over the groups. An order is
a rotation too: of the stream, of each head's values, and of the neurons.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from emp_llm.calibration.data import data_in_memory
from emp_llm.calibration.passes import in_evaluation_mode
from emp_llm.common.errors import UserError, count_of
from emp_llm.common.machine import default_modes, enough_memory, exact_device, out_of_memory
from emp_llm.common.progress import progress_bar
from emp_llm.common.ranks import alone
from emp_llm.models.layers import Layer
from emp_llm.models.model_weights import ModelWeights, architecture_of
from emp_llm.models.modules import bias_of, body_of, find_blocks, weight_of
from emp_llm.models.names import ROUTERS, WRITERS
from emp_llm.models.offload import input_device, is_offloaded
from emp_llm.models.sharded import check_not_sharded
from emp_llm.options.calibration import CalibrationOptions
from emp_llm.options.recipe import parse_pattern
from emp_llm.records.rotation import RotationRecord

# Of Adam on the entries of A, over the root of its width: the best at widths of 64, 192 and 256.
_RATE = 0.2
_ROWS = 512  # of each matrix, drawn anew in each step
_BLOCKS = 8  # in each step, drawn anew
_ROWS_OF_ORDER = 2**16  # at most, of all matrices, to choose the order of columns
_SWAPS = 300  # rounds; in each, every group of columns tries one swap
_TINY = 1e-20  # the least sum of a row's squared scores: no division by zero
_LIMIT = 1e-3  # of the difference of logits in float32, as a share of their norm
# With weights rounded to what they are stored in.
_LIMITS = {torch.float16: 0.02, torch.bfloat16: 0.1}


# A turn of the stream, shape (width, width); and of each block one for every group of heads, shape
# (groups, dim, dim), or None if its values cannot be turned.
_Turns = tuple[Tensor, list[Tensor | None]]


@dataclass
class _Writer:
    """A matrix whose outputs are added to the residual stream, with its bias.

    Attributes:
        module: has the same inputs; None for an expert of a stack.
        heads: number of heads that it reads, if their values can be turned; else 0.
        mates: matrices and biases whose outputs are its inputs.
        moments: of its inputs: of each head, shape (heads, dim, dim), or their diagonal, shape
            (inputs,). A number if it has no module, or no token reached it.
    """

    weight: Tensor
    bias: Tensor | None
    module: nn.Module | None
    heads: int = 0
    mates: list[Tensor] = field(default_factory=list)
    moments: Any = 0.0


@dataclass
class _Block:
    """The weights of a block as float32 views that change in place.

    Attributes:
        norms: in front of the attention, and in front of the MLP.
        readers: of the outputs of each norm, shape (outputs, width), without the values of heads
            that can be turned.
        values: of those, shape (groups, dim, width), and their bias, shape (groups, dim, 1); empty
            if there are none.
        writers: of the attention and the MLP.
        moments: the second moments of the readers' inputs, for each norm, shape (width, width).
    """

    norms: list[nn.Module]
    readers: tuple[list[Tensor], list[Tensor]] = field(default_factory=lambda: ([], []))
    values: list[Tensor] = field(default_factory=list)
    writers: list[_Writer] = field(default_factory=list)
    moments: list[Any] = field(default_factory=lambda: [0.0, 0.0])


@dataclass(frozen=True)
class _Stream:
    """A model by what its weights do to the residual stream.

    Attributes:
        outside: embeddings and head, shape (vocabulary, width).
        norm: in front of the head.
    """

    outside: list[Tensor]
    norm: nn.Module
    blocks: list[_Block]


@default_modes()
def rotate_model(
    model: PreTrainedModel,
    data: Any,
    tokenizer: Any = None,
    *,
    steps: int = 120,
    pattern: str | None = None,
    samples: int | None = None,
    seqlen: int | None = None,
    batch_size: int = 4,
    seed: int = 0,
) -> RotationRecord:
    """Rotate the basis of a dense model in memory, in place. It computes the same and loses less
    when it is pruned. Each of several processes rotates its model alone, as for `prune_model`.

    Args:
        model: a decoder of transformers with an RMSNorm in front of each attention, MLP and head,
            whole in memory, of any floating-point dtype, which it keeps; float32 during the call. A
            head that is tied to the embeddings gets weights of its own.
        data, tokenizer, samples, seqlen, batch_size, seed: the text, as for `prune_model`, but no
            batches.
        steps: of the search for Q and R; 0: the eigenvectors of the inputs' second moments.
        pattern: N:M, to choose an order of the columns for it.

    Returns:
        N_eff/N before and after, and the difference of the logits.

    Raises:
        UserError: once turned, the model would compute something else. This shows in its structure,
            or in its logits; in the second case the model is changed already.
    """
    started = time.perf_counter()
    if type(steps) is not int or steps < 0:
        raise UserError(f"--steps must be a whole number of at least 0, got {steps!r}.")
    if pattern is not None:
        parse_pattern(pattern)
    options = CalibrationOptions(samples=samples, seqlen=seqlen, batch_size=batch_size, seed=seed)
    if not isinstance(model, PreTrainedModel) or model.get_output_embeddings() is None:
        raise _refusal(f"{type(model).__name__} is no model of transformers with a head for tokens")
    text = data_in_memory(data, tokenizer, options, model.config)
    if text is None:
        raise UserError("a rotation is found on text: give texts or token ids, not batches.")
    _check_rotatable(model)
    tokens = text.tokens
    random = torch.Generator().manual_seed(seed)
    dtype = model.dtype
    dtypes = {values: values.dtype for values in [*model.parameters(), *model.buffers()]}
    with (
        alone(),
        torch.no_grad(),
        in_evaluation_mode(model),
        out_of_memory(lambda: "rotation: out of memory. Use a larger device."),
    ):
        try:
            model.float()
            before = _first_logits(model, tokens)
            parameters = model.num_parameters()
            if not bool(before.isfinite().all()):
                raise _refusal(
                    "its logits are NaN or infinite. Look for such weights, or for text "
                    "that it cannot read"
                )
            stream = _stream_of(model)
            _fold_norms(stream)
            _add_moments(model, stream, tokens, batch_size)
            n_eff_before = _mean_n_eff(stream, _no_turns(stream))
            _turn(stream, _eigenvectors(stream, random))
            _check(model, before, tokens)  # before the search, which takes longer
            none = _no_turns(stream)
            turns = _search(stream, steps, random) if steps else none
            if _mean_n_eff(stream, turns) < _mean_n_eff(stream, none):
                _turn(stream, turns)
            if pattern is not None:
                _turn(stream, _turns_for_pattern(stream, pattern, random))
            n_eff_after = _mean_n_eff(stream, none)
            difference = _check(model, before, tokens)
            for name, values in [*model.named_parameters(), *model.named_buffers()]:
                values.data = _rounded(name, values.data, dtypes.get(values, dtype))
            _check(model, before, tokens, _LIMITS.get(dtype, _LIMIT))  # of what is written
        finally:
            for values in [*model.parameters(), *model.buffers()]:
                # The weight of a head that was tied is new.
                values.data = values.data.to(dtypes.get(values, dtype))
    return RotationRecord(
        steps=steps,
        pattern=pattern,
        n_eff_before=n_eff_before,
        n_eff_after=n_eff_after,
        difference=difference,
        parameters_before=parameters,
        parameters_after=model.num_parameters(),
        seconds=round(time.perf_counter() - started, 1),
    )


def _check_rotatable(model: PreTrainedModel) -> None:
    """Raise UserError unless all weights of a decoder are in memory, as finite numbers."""
    check_not_sharded(model)
    if is_offloaded(model):
        raise UserError(
            "a rotation needs the model whole in memory in float32, and a part of it is offloaded."
        )
    if model.config.is_encoder_decoder:
        raise _refusal("it has an encoder too")
    if getattr(model.config, "quantization_config", None) is not None:
        raise _refusal(
            "its weights are quantised. Rotate the original model, and quantise the result"
        )
    for name, values in model.named_parameters():
        if values.is_inference():
            raise UserError(
                f"{name} was made in torch.inference_mode, so it cannot be turned in place. Load "
                "the model outside of that context."
            )
        if not bool(values.isfinite().all()):
            raise _refusal(f"{name} holds NaN or infinite values")


def _rounded(name: str, values: Tensor, dtype: torch.dtype) -> Tensor:
    """Values as they will be stored, in float32 if they are floating; UserError if one is too
    large.
    """
    rounded = values.to(dtype)
    if bool((rounded.isinf() & values.isfinite()).any()):
        raise _refusal(
            f"once turned, {name} is beyond the range of {dtype}. Save it in bfloat16 first"
        )
    return rounded.float() if values.is_floating_point() else rounded


# The weights by what they do.


def _stream_of(model: PreTrainedModel) -> _Stream:
    """The weights of a model. A tied head is untied."""
    architecture = architecture_of(model, ModelWeights(model))
    config = model.config.get_text_config()
    path, modules = find_blocks(model)
    embeddings = model.get_input_embeddings()
    head = model.get_output_embeddings()
    if head is None or embeddings is None or architecture.towers:
        raise _refusal("it is not a decoder of text alone with embeddings and a head")
    last = _norms_in(model.get_submodule(path.rpartition(".")[0]))
    if len(last) != 1:
        raise _refusal("it does not have one norm in front of its head")
    width = embeddings.weight.shape[1]
    blocks = []
    for number, module in enumerate(modules):
        name = f"{path}.{number}"
        layers = [
            layer
            for layer in architecture.layers
            if layer.block == number and layer.name.startswith(f"{name}.")
        ]
        blocks.append(_read_block(model, name, _norms_in(module), layers, width))
    for norm in (last[0], *(norm for block in blocks for norm in block.norms)):
        _scales(norm)  # refuses other classes
    if head.weight is embeddings.weight:
        head.weight = nn.Parameter(
            head.weight.detach().clone(), requires_grad=head.weight.requires_grad
        )
        model.config.tie_word_embeddings = config.tie_word_embeddings = False
    return _Stream([embeddings.weight.data, head.weight.data], last[0], blocks)


def _read_block(
    model: PreTrainedModel, name: str, norms: list[nn.Module], layers: list[Layer], width: int
) -> _Block:
    """The weights of a block, by the names and shapes of its layers."""
    if len(norms) != 2:
        told = count_of(len(norms), "norm")
        raise _refusal(
            f"{name} has {told}, and not one in front of the attention and one in front of the MLP"
        )
    block = _Block(norms)
    weights = {layer: weight_of(model, layer) for layer in layers if layer.leaf not in WRITERS}
    # Others read readers.
    readers = {layer: weight for layer, weight in weights.items() if weight.shape[1] == width}
    for layer in (layer for layer in layers if layer.leaf in WRITERS):
        weight = weight_of(model, layer)
        if weight.shape[0] != width:
            raise _refusal(f"{layer.name} does not write to the residual stream")
        module = model.get_submodule(layer.name) if layer.expert is None else None
        writer = _Writer(weight, bias_of(model, layer), module)
        block.writers.append(writer)
        parent = layer.name.rpartition(".")[0]
        mates = {
            reader: values
            for reader, values in readers.items()
            if reader.name.rpartition(".")[0] == parent
        }
        if layer.purpose == "attention":
            readers |= _take_values(model, block, writer, mates)
        elif layer.expert is None and all(
            len(values) % weight.shape[1] == 0 for values in mates.values()
        ):
            biases = [bias_of(model, mate) for mate in mates]
            writer.mates += [*mates.values(), *(bias for bias in biases if bias is not None)]
    if not block.writers:
        raise _refusal(
            f"{name} has no linear layer with a known name that writes to the residual stream"
        )
    for layer, weight in readers.items():
        if len(weight):
            block.readers[layer.purpose != "attention"].append(weight)
    known = {layer.parameter for layer in layers}
    for leaf, parameter in model.get_submodule(name).named_parameters():
        if f"{name}.{leaf}" not in known and parameter.dim() > 1 and width in parameter.shape:
            if leaf.rpartition(".")[0].rpartition(".")[2] not in ROUTERS or parameter.shape[1:] != (
                width,
            ):
                raise _refusal(f"{name}.{leaf} is not the weight of a linear layer")
            block.readers[1].append(parameter.data)
    return block


def _take_values(
    model: PreTrainedModel, block: _Block, writer: _Writer, mates: dict[Layer, Tensor]
) -> dict[Layer, Tensor]:
    """Put the values of an attention into its block, if they can be turned. Returns the layer that
    makes them, with its other rows.

    Args:
        mates: the layers that make queries, keys and values.
    """
    heads = model.config.get_text_config().num_attention_heads
    inputs = writer.weight.shape[1]
    sizes = {mate.leaf: len(weight) for mate, weight in mates.items()}
    rows = sizes.get("v_proj", (sizes.get("qkv_proj", 0) - inputs) // 2)
    layer = next((mate for mate in mates if mate.leaf in ("v_proj", "qkv_proj")), None)
    # Queries are as many as the writer's inputs, unless a gate stands between values and writer.
    plain = (
        inputs % heads == 0
        and rows % (inputs // heads) == 0
        and sizes.get("q_proj", inputs) == inputs
    )
    if layer is None or not plain:
        return {}
    writer.heads = heads
    values = mates[layer][-rows:].view(-1, inputs // heads, mates[layer].shape[1])
    block.values.append(values)
    bias = bias_of(model, layer)
    if bias is not None:
        block.values.append(bias[-rows:].view(*values.shape[:2], 1))
    return {layer: mates[layer][:-rows]}


def _norms_in(module: nn.Module) -> list[nn.Module]:
    """The normalisations that are a module's own, in its order."""
    return [child for child in module.children() if "norm" in type(child).__name__.lower()]


def _refusal(why: str) -> UserError:
    return UserError(f"this model cannot be rotated: {why}.")


# The function stays.


def _fold_norms(stream: _Stream) -> None:
    """Move the weights of the norms into the matrices that read their outputs."""
    _fold_norm(stream.norm, stream.outside[1:])
    for block in stream.blocks:
        for norm, readers, values in zip(
            block.norms, block.readers, (block.values[:1], []), strict=True
        ):
            _fold_norm(norm, [*readers, *values])


def _fold_norm(norm: nn.Module, readers: Sequence[Tensor]) -> None:
    scales = _scales(norm)
    for weight in readers:
        weight *= scales.to(weight.device)
    for value in (1, 0):  # some classes add one to their weight
        norm.weight.data.fill_(value)  # type: ignore[operator]
        if bool((_scales(norm) - 1).abs().max() < 1e-5):
            return
    raise _refusal(f"{type(norm).__name__} is no RMSNorm")


def _scales(norm: nn.Module) -> Tensor:
    """What a norm multiplies each feature with after x / rms(x), shape (width,)."""
    weight: Any = getattr(norm, "weight", None)
    if not isinstance(weight, Tensor):
        raise _refusal(f"{type(norm).__name__} has no weights")
    x = torch.rand(4, len(weight), generator=torch.Generator().manual_seed(0)).to(weight.device) + 1
    x[2:] -= 2
    x *= 100  # so that epsilon does not count
    scales: Tensor = norm(x) / (x * x.square().mean(-1, keepdim=True).rsqrt())
    if not bool((scales - scales[0]).abs().max() <= 1e-4 * scales.abs().max()):
        raise _refusal(f"{type(norm).__name__} is no RMSNorm")
    return scales.mean(0)


def _turn(stream: _Stream, turns: _Turns) -> None:
    """Turn the weights of a model whose norms have none, and the moments of its inputs."""
    q, by_block = turns
    for weight in stream.outside:
        weight.copy_(weight @ q.to(weight.device))
    for block, turn in zip(stream.blocks, by_block, strict=True):
        q = q.to(block.writers[0].weight.device)
        for weight in (*block.readers[0], *block.readers[1], *block.values[:1]):
            weight.copy_(weight @ q)
        block.moments = [q.T @ moments @ q for moments in block.moments]
        if turn is not None:
            for values in block.values:
                values.copy_(turn.mT @ values)
        for writer in block.writers:
            weight = q.T @ writer.weight
            if writer.heads:
                by_head = _of_heads(turn, writer)
                weight = _by_heads(weight, by_head)
                writer.moments = by_head.mT @ writer.moments @ by_head
            writer.weight.copy_(weight)
            if writer.bias is not None:
                writer.bias.copy_(q.T @ writer.bias)


def _of_heads(turn: Tensor | None, writer: _Writer) -> Tensor:
    """The turn of each head that a writer reads, shape (heads, dim, dim)."""
    assert turn is not None
    return turn.repeat_interleave(writer.heads // len(turn), 0)


def _by_heads(weight: Tensor, turns: Tensor) -> Tensor:
    """A matrix of shape (outputs, heads * dim) times a turn of each head, shape (heads, dim,
    dim).
    """
    return torch.einsum("ohd,hde->ohe", weight.view(len(weight), len(turns), -1), turns).flatten(1)


def _first_logits(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    """The logits of the first sequence, float32, shape (tokens, vocabulary)."""
    logits: Tensor = model(tokens[:1, :512].to(input_device(model)), use_cache=False).logits
    return logits[0].float()


def _check(model: PreTrainedModel, before: Tensor, tokens: Tensor, limit: float = _LIMIT) -> float:
    """The difference of the logits as a share of their norm, a median over the tokens.

    Raises:
        UserError: it is more than rounding.
    """
    after = _first_logits(model, tokens)
    difference = float(((after - before).norm(dim=1) / before.norm(dim=1)).median())
    if not difference <= limit:
        raise _refusal(
            f"once turned, its logits differ by {difference:.2g} of their norm, so something "
            "beside linear layers and RMSNorms reads or writes its residual stream"
        )
    return difference


# The basis.


def _add_moments(model: PreTrainedModel, stream: _Stream, tokens: Tensor, batch_size: int) -> None:
    """Add up the second moments over a text, for a model whose norms have no weights."""
    with ExitStack() as hooks, closing(progress_bar(len(tokens), "moments", "seq")) as bar:

        def watch_norm(block: _Block, number: int, norm: nn.Module) -> None:
            def add(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
                x = output.flatten(0, -2)[None]
                block.moments[number] = block.moments[number] + (x.mT @ x)[0]

            hooks.callback(norm.register_forward_hook(add).remove)

        def watch_writer(writer: _Writer, module: nn.Module) -> None:
            def add(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
                x = inputs[0].flatten(0, -2)
                if writer.heads:
                    by_head = x.view(len(x), writer.heads, -1).transpose(0, 1)
                    writer.moments = writer.moments + by_head.mT @ by_head
                else:
                    writer.moments = writer.moments + x.square().sum(0)

            hooks.callback(module.register_forward_hook(add).remove)

        for block in stream.blocks:
            for number, norm in enumerate(block.norms):
                watch_norm(block, number, norm)
            for writer in block.writers:
                if writer.module is not None:
                    watch_writer(writer, writer.module)
        for batch in torch.split(tokens, batch_size):
            with enough_memory(lambda: ("rotation", input_device(model)), batch):
                body_of(model)(batch.to(input_device(model)), use_cache=False)
            bar.update(len(batch))
    moments = [
        values
        for block in stream.blocks
        for values in [*block.moments, *(writer.moments for writer in block.writers)]
    ]
    if not all(bool(torch.as_tensor(values).isfinite().all()) for values in moments):
        raise _refusal(
            "the second moments of its inputs are not finite, so its weights or its "
            "text are too large"
        )


def _no_turns(stream: _Stream) -> _Turns:
    """No turn: identity matrices."""
    q = torch.eye(stream.outside[0].shape[1], device=stream.outside[0].device)
    turns: list[Tensor | None] = []
    for block in stream.blocks:
        turn = None
        if block.values:
            groups, dim, _ = block.values[0].shape
            turn = torch.eye(dim, device=block.values[0].device).repeat(groups, 1, 1)
        turns.append(turn)
    return q, turns


def _eigenvectors(stream: _Stream, random: torch.Generator) -> _Turns:
    """The eigenvectors of the mean second moments of the readers' inputs, and of the heads of
    each group; in a random order.
    """
    q, turns = _no_turns(stream)
    total = sum(
        (moments / moments.trace()).to(q.device)
        for block in stream.blocks
        for moments in block.moments
    )
    order = torch.randperm(len(q), generator=random).to(q.device)
    q = _eigenvectors_of(total)[:, order]
    for number, block in enumerate(stream.blocks):
        for writer in block.writers:
            turn = turns[number]
            if writer.heads and turn is not None:
                order = torch.randperm(turn.shape[-1], generator=random).to(turn.device)
                of_groups = writer.moments.view(len(turn), -1, *turn.shape[1:]).sum(1)
                turns[number] = _eigenvectors_of(of_groups)[..., order]
    return q, turns


def _eigenvectors_of(moments: Tensor) -> Tensor:
    """The eigenvectors of a symmetric matrix, or of each of a stack."""
    # Devices without float64 have no such factorisation.
    vectors: Tensor = torch.linalg.eigh(moments.to(exact_device(moments.device))).eigenvectors
    return vectors.to(moments.device)


def _squared_scores(
    block: _Block,
    q: Tensor,
    turn: Tensor | None,
    rows: int | None = None,
    random: torch.Generator | None = None,
) -> Iterator[tuple[Tensor, int]]:
    """Squared scores (|W| ||X||)^2 of each matrix of a block if it is turned, and its number of
    rows.

    Args:
        q: on any device.
        rows: of each matrix, drawn at random; None: all.

    Yields:
        shape (rows, inputs), float32.
    """

    def drawn(length: int) -> Tensor | slice:
        if rows is None or rows >= length:
            return slice(None)
        return torch.randperm(length, generator=random)[:rows]

    q = q.to(block.moments[0].device)
    norms = [(q * (moments @ q)).sum(0) for moments in block.moments]
    for readers, norm in zip(block.readers, norms, strict=True):
        for weight in readers:
            yield (weight[drawn(len(weight))] @ q).square() * norm, len(weight)
    if turn is not None:
        values = (turn.mT @ (block.values[0] @ q)).flatten(0, 1)
        yield values[drawn(len(values))].square() * norms[0], len(values)
    for writer in _reached(block):
        weight = q[:, drawn(len(q))].T @ writer.weight
        norm = writer.moments
        if writer.heads:
            by_head = _of_heads(turn, writer)
            weight = _by_heads(weight, by_head)
            norm = (by_head * (norm @ by_head)).sum(1).flatten()
        yield weight.square() * norm, len(q)


def _reached(block: _Block) -> list[_Writer]:
    """The writers of a block whose inputs have moments."""
    return [writer for writer in block.writers if isinstance(writer.moments, Tensor)]


def _n_eff(scores: Tensor) -> Tensor:
    """N_eff/N of rows of squared scores; 0 of a row of zeros."""
    total = scores.sum(1).clamp(min=_TINY)
    return (scores + 1e-12 * total[:, None]).sqrt().sum(1).square() / total / scores.shape[1]


def _mean_n_eff(stream: _Stream, turns: _Turns) -> float:
    """The mean of N_eff/N over all rows, if the model is turned."""
    total = rows = 0.0
    for block, turn in zip(stream.blocks, turns[1], strict=True):
        for scores, number in _squared_scores(block, turns[0], turn):
            total = total + float(_n_eff(scores).sum())
            rows = rows + number
    return total / rows


def _search(stream: _Stream, steps: int, random: torch.Generator) -> _Turns:
    """The turn of least N_eff/N that Adam finds, from no turn."""
    none, none_of_blocks = _no_turns(stream)
    free = [torch.zeros_like(turn) for turn in (none, *none_of_blocks) if turn is not None]
    adam = torch.optim.Adam(
        [
            {"params": [entries.requires_grad_()], "lr": _RATE * entries.shape[-1] ** -0.5}
            for entries in free
        ]
    )
    # Before a step, Adam asks CUDA for its stream, which takes memory of a GPU that is not used.
    adam._accelerator_graph_capture_health_check = lambda: None  # type: ignore[method-assign]
    rates = torch.optim.lr_scheduler.LambdaLR(adam, lambda step: min(1.0, 2 * (1 - step / steps)))

    def turns() -> _Turns:
        rest = iter(free[1:])
        return _cayley(free[0]), [
            None if turn is None else _cayley(next(rest)) for turn in none_of_blocks
        ]

    with torch.enable_grad(), closing(progress_bar(steps, "rotate", "step")) as bar:
        rows = sum(
            len(weight)
            for block in stream.blocks
            for readers in block.readers
            for weight in readers
        )
        for _ in range(steps):
            adam.zero_grad()
            q, by_block = turns()
            leaf = q.detach().requires_grad_()  # so that memory holds the graph of one block
            for number in torch.randperm(len(by_block), generator=random)[:_BLOCKS].tolist():
                block = stream.blocks[number]
                sums = [
                    rows_of_matrix * _n_eff(scores).mean()
                    for scores, rows_of_matrix in _squared_scores(
                        block, leaf, by_block[number], _ROWS, random
                    )
                ]
                zero = torch.zeros((), device=block.moments[0].device)
                (sum(sums, zero) / rows).backward()  # type: ignore[no-untyped-call]
            q.backward(leaf.grad)  # type: ignore[no-untyped-call]
            adam.step()
            rates.step()
            bar.update(1)
    return turns()


def _cayley(free: Tensor) -> Tensor:
    """An orthogonal matrix (I + A)^-1 (I - A), A = (F - F^T) / 2; or one of each matrix of a
    stack.
    """
    skew = (free - free.mT) / 2
    one = torch.eye(free.shape[-1], device=free.device)
    exact = exact_device(free.device)
    turned: Tensor = torch.linalg.solve((one + skew).to(exact), (one - skew).to(exact))
    return turned.to(free.device)


# The order of the columns, for N:M.


def _turns_for_pattern(stream: _Stream, pattern: str, random: torch.Generator) -> _Turns:
    """Put the neurons in an order for a pattern, and return turns that do the same with the
    stream and the values of heads.
    """
    asked = parse_pattern(pattern)
    q, turns = _no_turns(stream)
    rows: list[Tensor] = []
    matrices = sum(len(readers) for block in stream.blocks for readers in block.readers)
    drawn = max(1, min(_ROWS, _ROWS_OF_ORDER // matrices))

    def order_of(scores: Tensor) -> Tensor:
        return _column_order(scores, asked.kept, asked.group, random)

    for number, (block, turn) in enumerate(zip(stream.blocks, turns, strict=True)):
        squared = [scores for scores, _ in _squared_scores(block, q, turn, drawn, random)]
        shares = [scores / scores.sum(1, keepdim=True).clamp(min=_TINY) for scores in squared]
        readers = sum(len(of_norm) for of_norm in block.readers) + len(block.values[:1])
        rows += [scores.to(q.device) for scores in shares[:readers]]
        for writer, scores in zip(_reached(block), shares[readers:], strict=True):
            if writer.heads and turn is not None:
                by_group = (
                    scores.view(len(scores), len(turn), -1, turn.shape[-1])
                    .transpose(0, 1)
                    .flatten(1, 2)
                )
                orders = [order_of(of_group) for of_group in by_group]
                turns[number] = torch.stack(
                    [of_group[:, order] for of_group, order in zip(turn, orders, strict=True)]
                )
            elif writer.mates:
                order = order_of(scores)
                writer.moments = writer.moments[order]
                writer.weight.copy_(writer.weight[:, order])
                for mate in writer.mates:
                    mate.copy_(mate.view(-1, len(order), *mate.shape[1:])[:, order].flatten(0, 1))
    return q[:, order_of(torch.cat(rows))], turns


def _column_order(shares: Tensor, keep: int, of: int, random: torch.Generator) -> Tensor:
    """An order of columns in which pruning by N:M takes little away.

    Each group of M gets one column of each M-th by energy. Then random pairs of columns of two
    groups swap if the smaller M - N of each group have less energy then. Columns beyond the last
    whole group stay at the end.

    Args:
        shares: scores, shape (rows, columns).
    """
    columns = shares.shape[1] // of * of
    order = shares.sum(0).argsort(descending=True)
    rest = order[columns:]
    order = order[:columns].view(of, -1).T.contiguous()

    def losses(groups: Tensor) -> Tensor:
        return shares[:, groups].sort(2).values[..., : of - keep].sum((0, 2))

    lost = losses(order)
    for _ in range(_SWAPS if len(order) > 1 else 0):
        pairs = (
            torch.randperm(len(order), generator=random)[: len(order) // 2 * 2]
            .view(2, -1)
            .to(shares.device)
        )
        at = torch.randint(of, pairs.shape, generator=random).to(shares.device)
        new = order.clone()
        new[pairs[0], at[0]], new[pairs[1], at[1]] = order[pairs[1], at[1]], order[pairs[0], at[0]]
        after = losses(new)
        better = pairs[:, after[pairs].sum(0) < lost[pairs].sum(0)].flatten()
        order[better], lost[better] = new[better], after[better]
    return torch.cat([order.flatten(), rest])
