"""Rotation: the same function in a basis in which fewer weights matter.

    readers  W <- W diag(g) Q     writers  W <- Q^T W     embeddings  E <- E Q     head  H <- H
    diag(g) Q values of a head  V <- R^T V     and what reads them  O <- O R

Q turns the residual stream, R the values of a head; both are orthogonal. g are the weights of the
RMSNorm in front of a reader, which become one. An RMSNorm without weights commutes with Q, so the
model computes what it did. Q and R start from the eigenvectors of the inputs' second moments. Adam
then lowers the mean of N_eff/N over all rows, of the scores |W| ||X||, on the parameters of Cayley
transforms (I + A)^-1 (I - A) with A = -A^T.

For patterns N:M, the columns are put in an order afterwards in which large ones are spread over the
groups. An order is a rotation too: of the stream, of each head's values, and of the neurons.
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
from emp_llm.common.machine import enough_memory, out_of_memory
from emp_llm.common.progress import progress_bar
from emp_llm.models.layers import Layer
from emp_llm.models.model_weights import ModelWeights, architecture_of
from emp_llm.models.modules import bias_of, body_of, find_blocks, weight_of
from emp_llm.models.names import ROUTERS, WRITERS
from emp_llm.models.offload import input_device, is_offloaded
from emp_llm.options.calibration import CalibrationOptions
from emp_llm.options.recipe import parse_pattern
from emp_llm.records.rotation import RotationRecord

# Of Adam on the entries of A, over the root of its width: the best at widths of 64, 192 and 256.
_RATE = 0.2
_ROWS = 512  # of each matrix, drawn anew in each step
_BLOCKS = 8  # in each step, drawn anew
_ROWS_OF_ORDER = 2**16  # at most, of all matrices, to choose the order of columns
_SWAPS = 300  # rounds; in each, every group of columns tries one swap
_TINY = 1e-20  # the least sum of a row's squared scores, so that nothing is divided by zero
_LIMIT = 1e-3  # of the difference of logits in float32, as a share of their norm
# With weights rounded to what they are stored in.
_LIMITS = {torch.float16: 0.02, torch.bfloat16: 0.1}


@dataclass(frozen=True)
class _Writer:
    """A matrix whose outputs are added to the residual stream, with its bias.

    Attributes:
        inputs: the module whose inputs are its own; None for an expert of a stack.
        heads: number of heads that it reads, if their values can be turned; else 0.
        mates: matrices and biases whose outputs are its inputs.
    """

    weight: Tensor
    bias: Tensor | None
    inputs: nn.Module | None
    heads: int = 0
    mates: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class _Block:
    """The weights of a block as float32 views that change in place.

    Attributes:
        norms: in front of the attention, and in front of the MLP.
        readers: of the outputs of each norm, shape (outputs, width), without the values of heads
            that can be turned.
        values: of those, shape (groups, dim, width), and their bias, shape (groups, dim, 1); empty
            if there are none.
        writers: of the attention and the MLP.
    """

    norms: list[nn.Module]
    readers: tuple[list[Tensor], list[Tensor]]
    values: list[Tensor]
    writers: list[_Writer]


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
    """Turn the basis of a dense model in memory, in place. It computes the same and loses less when
    it is pruned.

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
        UserError: the model cannot be turned without a change of its function, which is found by
            its structure, or by its logits; in the second case it is changed already.
    """
    started = time.perf_counter()
    if type(steps) is not int or steps < 0:
        raise UserError(f"--steps must be a whole number of at least 0, got {steps!r}.")
    if pattern is not None:
        parse_pattern(pattern)
    how = CalibrationOptions(samples=samples, seqlen=seqlen, batch_size=batch_size, seed=seed)
    if not isinstance(model, PreTrainedModel) or model.get_output_embeddings() is None:
        raise _refusal(f"{type(model).__name__} is no model of transformers with a head for tokens")
    text = data_in_memory(data, tokenizer, how, model.config)
    if text is None:
        raise UserError("a rotation is found on text: give texts or token ids, not batches.")
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
    for name, each in model.named_parameters():
        if not bool(each.isfinite().all()):
            raise _refusal(f"{name} holds NaN or infinite values")
    tokens = text.tokens
    random = torch.Generator().manual_seed(seed)
    own = model.dtype
    dtypes = {each: each.dtype for each in [*model.parameters(), *model.buffers()]}
    with (
        torch.no_grad(),
        in_evaluation_mode(model),
        out_of_memory(lambda: "rotation: out of memory. Use a larger device."),
    ):
        try:
            model.float()
            before = _logits(model, tokens)
            parameters = model.num_parameters()
            if not bool(before.isfinite().all()):
                raise _refusal(
                    "its logits are NaN or infinite. Look for such weights, or for text "
                    "that it cannot read"
                )
            stream = _stream_of(model)
            _fold(stream)
            moments = _moments(model, stream, tokens, batch_size)
            n_eff = [_mean_n_eff(stream, moments)]
            _turn(stream, moments, *_eigenvectors(stream, moments, random))
            _check(model, before, tokens)  # before the search, which takes longer
            found = _search(stream, moments, steps, random) if steps else _no_turns(stream)
            if _mean_n_eff(stream, moments, *found) < _mean_n_eff(stream, moments):
                _turn(stream, moments, *found)
            if pattern is not None:
                _turn(stream, moments, *_in_order(stream, moments, pattern, random))
            n_eff.append(_mean_n_eff(stream, moments))
            difference = _check(model, before, tokens)
            for name, each in [*model.named_parameters(), *model.named_buffers()]:
                rounded = each.data.to(dtypes.get(each, own))
                if bool((rounded.isinf() & each.data.isfinite()).any()):
                    raise _refusal(
                        f"once turned, {name} is beyond the range of {rounded.dtype}. "
                        "Save it in bfloat16 first"
                    )
                each.data = rounded.float() if each.is_floating_point() else rounded
            _check(model, before, tokens, _LIMITS.get(own, _LIMIT))  # of what is written
        finally:
            for each in [*model.parameters(), *model.buffers()]:
                # The weight of a head that was tied is new.
                each.data = each.data.to(dtypes.get(each, own))
    return RotationRecord(
        steps=steps,
        pattern=pattern,
        n_eff_before=n_eff[0],
        n_eff_after=n_eff[1],
        difference=difference,
        parameters_before=parameters,
        parameters_after=model.num_parameters(),
        seconds=round(time.perf_counter() - started, 1),
    )


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
        blocks.append(_block_of(model, name, _norms_in(module), layers, width, config))
    for norm in (last[0], *(norm for block in blocks for norm in block.norms)):
        _scales(norm)  # refuses other classes
    if head.weight is embeddings.weight:
        head.weight = nn.Parameter(
            head.weight.detach().clone(), requires_grad=head.weight.requires_grad
        )
        model.config.tie_word_embeddings = config.tie_word_embeddings = False
    return _Stream([embeddings.weight.data, head.weight.data], last[0], blocks)


def _block_of(
    model: PreTrainedModel,
    name: str,
    norms: list[nn.Module],
    layers: list[Layer],
    width: int,
    config: Any,
) -> _Block:
    """The weights of a block, by the names and shapes of its layers."""
    if len(norms) != 2:
        told = count_of(len(norms), "norm")
        raise _refusal(
            f"{name} has {told}, and not one in front of the attention and one in front of the MLP"
        )
    heads = config.num_attention_heads
    block = _Block(norms, ([], []), [], [])
    readers = {layer: weight_of(model, layer) for layer in layers if layer.leaf not in WRITERS}
    # Others read readers.
    readers = {layer: weight for layer, weight in readers.items() if weight.shape[1] == width}
    for layer in (layer for layer in layers if layer.leaf in WRITERS):
        weight = weight_of(model, layer)
        bias = bias_of(model, layer)
        parent = layer.name.rpartition(".")[0]
        if weight.shape[0] != width:
            raise _refusal(f"{layer.name} does not write to the residual stream")
        mates = {
            each: own for each, own in readers.items() if each.name.rpartition(".")[0] == parent
        }
        if layer.purpose == "attention":
            # Queries are as many as the writer's inputs, unless a gate stands between values and
            # writer.
            sizes = {each.leaf: len(own) for each, own in mates.items()}
            inputs = weight.shape[1]
            value = next((each for each in mates if each.leaf in ("v_proj", "qkv_proj")), None)
            rows = sizes.get("v_proj", (sizes.get("qkv_proj", 0) - inputs) // 2)
            plain = (
                inputs % heads == 0
                and rows % (inputs // heads) == 0
                and sizes.get("q_proj", inputs) == inputs
            )
            turns = value is not None and plain
            turned = heads if turns else 0
            block.writers.append(_Writer(weight, bias, model.get_submodule(layer.name), turned))
            if value is not None and turns:
                readers[value] = mates[value][:-rows]
                values = mates[value][-rows:]
                its_bias = bias_of(model, value)
                block.values.append(values.view(-1, inputs // heads, width))
                if its_bias is not None:
                    block.values.append(its_bias[-rows:].view(*block.values[0].shape[:2], 1))
        else:
            whole = (
                all(own.shape[0] % weight.shape[1] == 0 for own in mates.values())
                and layer.expert is None
            )
            biases = [bias_of(model, each) for each in mates]
            inside = (
                [*mates.values(), *(each for each in biases if each is not None)] if whole else []
            )
            module = model.get_submodule(layer.name) if layer.expert is None else None
            block.writers.append(_Writer(weight, bias, module, mates=inside))
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


def _norms_in(module: nn.Module) -> list[nn.Module]:
    """The normalisations that are a module's own, in its order."""
    return [child for child in module.children() if "norm" in type(child).__name__.lower()]


def _refusal(why: str) -> UserError:
    return UserError(f"this model cannot be rotated: {why}.")


# The function stays.


def _fold(stream: _Stream) -> None:
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
    some = (
        torch.rand(4, len(weight), generator=torch.Generator().manual_seed(0)).to(weight.device) + 1
    )
    some[2:] -= 2
    some *= 100  # so that epsilon does not count
    found: Tensor = norm(some) / (some * some.square().mean(-1, keepdim=True).rsqrt())
    if not bool((found - found[0]).abs().max() <= 1e-4 * found.abs().max()):
        raise _refusal(f"{type(norm).__name__} is no RMSNorm")
    return found.mean(0)


def _turn(
    stream: _Stream, moments: list["_Moments"], q: Tensor, turns: list[Tensor | None]
) -> None:
    """Turn the weights of a model whose norms have none, and the moments of its inputs."""
    for weight in stream.outside:
        weight.copy_(weight @ q.to(weight.device))
    for block, own, turn in zip(stream.blocks, moments, turns, strict=True):
        q = q.to(block.writers[0].weight.device)
        for weight in (*block.readers[0], *block.readers[1], *block.values[:1]):
            weight.copy_(weight @ q)
        own.stream = [q.T @ each @ q for each in own.stream]
        if turn is not None:
            for values in block.values:
                values.copy_(turn.mT @ values)
        for number, writer in enumerate(block.writers):
            weight = q.T @ writer.weight
            if writer.heads:
                assert turn is not None
                by_head = turn.repeat_interleave(writer.heads // len(turn), 0)
                weight = _by_heads(weight, by_head)
                own.inputs[number] = by_head.mT @ own.inputs[number] @ by_head
            writer.weight.copy_(weight)
            if writer.bias is not None:
                writer.bias.copy_(q.T @ writer.bias)


def _by_heads(weight: Tensor, turns: Tensor) -> Tensor:
    """A matrix of shape (outputs, heads * dim) times a turn of each head, shape (heads, dim,
    dim).
    """
    return torch.einsum("ohd,hde->ohe", weight.view(len(weight), len(turns), -1), turns).flatten(1)


def _logits(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    """float32, shape (tokens, vocabulary), of the first sequence."""
    logits: Tensor = model(tokens[:1, :512].to(input_device(model)), use_cache=False).logits
    return logits[0].float()


def _check(model: PreTrainedModel, before: Tensor, tokens: Tensor, limit: float = _LIMIT) -> float:
    """The difference of the logits as a share of their norm, a median over the tokens.

    Raises:
        UserError: it is more than rounding.
    """
    after = _logits(model, tokens)
    difference = float(((after - before).norm(dim=1) / before.norm(dim=1)).median())
    if not difference <= limit:
        raise _refusal(
            f"once turned, its logits differ by {difference:.2g} of their norm, so something "
            "beside linear layers and RMSNorms reads or writes its residual stream"
        )
    return difference


# The basis.


@dataclass
class _Moments:
    """The second moments of the inputs in a block.

    Attributes:
        stream: of the readers of each norm, shape (width, width).
        inputs: of each writer: shape (heads, dim, dim); its diagonal, shape (inputs,); or None for
            an expert of a stack.
    """

    stream: list[Any]
    inputs: list[Any]


def _moments(
    model: PreTrainedModel, stream: _Stream, tokens: Tensor, batch_size: int
) -> list[_Moments]:
    """The second moments over a text, of a model whose norms have no weights."""
    moments = [_Moments([0.0, 0.0], [0.0] * len(block.writers)) for block in stream.blocks]
    with ExitStack() as hooks, closing(progress_bar(len(tokens), "moments", "seq")) as bar:

        def watch(
            module: nn.Module, sums: list[Any], number: int, heads: int, of_inputs: bool = True
        ) -> None:
            def add(_: nn.Module, given: tuple[Tensor, ...], output: Tensor) -> None:
                x = (given[0] if of_inputs else output).flatten(0, -2)
                by_head = x.view(len(x), heads or 1, -1).transpose(0, 1)
                found = by_head.mT @ by_head if heads else x.square().sum(0)
                sums[number] = sums[number] + (found if of_inputs else found[0])

            hooks.callback(module.register_forward_hook(add).remove)

        for own, block in zip(moments, stream.blocks, strict=True):
            for number, norm in enumerate(block.norms):
                watch(norm, own.stream, number, heads=1, of_inputs=False)
            for number, writer in enumerate(block.writers):
                if writer.inputs is not None:
                    watch(writer.inputs, own.inputs, number, writer.heads)
        for batch in torch.split(tokens, batch_size):
            with enough_memory(lambda: ("rotation", input_device(model)), batch):
                body_of(model)(batch.to(input_device(model)), use_cache=False)
            bar.update(len(batch))
    if not all(
        bool(torch.as_tensor(each).isfinite().all())
        for own in moments
        for each in [*own.stream, *own.inputs]
    ):
        raise _refusal(
            "the second moments of its inputs are not finite, so its weights or its "
            "text are too large"
        )
    return moments


def _no_turns(stream: _Stream) -> tuple[Tensor, list[Tensor | None]]:
    """No turn: I, and an I for each group of heads, shape (groups, dim, dim), of a block whose
    values can be turned.
    """
    q = torch.eye(stream.outside[0].shape[1], device=stream.outside[0].device)
    return q, [
        torch.eye(block.values[0].shape[1], device=block.values[0].device).repeat(
            len(block.values[0]), 1, 1
        )
        if block.values
        else None
        for block in stream.blocks
    ]


def _eigenvectors(
    stream: _Stream, moments: list[_Moments], random: torch.Generator
) -> tuple[Tensor, list[Tensor | None]]:
    """The eigenvectors of the mean second moments of the readers' inputs, and of the heads of
    each group; in a random order.
    """
    q, turns = _no_turns(stream)
    total = sum((each / each.trace()).to(q.device) for own in moments for each in own.stream)
    q = torch.linalg.eigh(total).eigenvectors[
        :, torch.randperm(len(q), generator=random).to(q.device)
    ]
    for number, (block, own, turn) in enumerate(zip(stream.blocks, moments, turns, strict=True)):
        for writer, moment in zip(block.writers, own.inputs, strict=True):
            if writer.heads and turn is not None:
                order = torch.randperm(turn.shape[-1], generator=random).to(turn.device)
                of_groups = moment.view(len(turn), -1, *turn.shape[1:]).sum(1)
                turns[number] = torch.linalg.eigh(of_groups).eigenvectors[..., order]
    return q, turns


def _scores(
    block: _Block,
    own: _Moments,
    q: Tensor,
    turn: Tensor | None,
    rows: int | None = None,
    random: torch.Generator | None = None,
) -> Iterator[tuple[Tensor, int]]:
    """Squared scores (|W| ||X||)^2 of each matrix of a block if it is turned, and its number of
    rows.

    Args:
        rows: of each matrix, drawn at random; None: all.

    Yields:
        shape (rows, inputs), float32.
    """

    def some(length: int) -> Tensor | slice:
        return (
            slice(None)
            if rows is None or rows >= length
            else torch.randperm(length, generator=random)[:rows]
        )

    norms = [(q * (each @ q)).sum(0) for each in own.stream]
    for readers, norm in zip(block.readers, norms, strict=True):
        for weight in readers:
            yield (weight[some(len(weight))] @ q).square() * norm, len(weight)
    if turn is not None:
        values = (turn.mT @ (block.values[0] @ q)).flatten(0, 1)
        yield values[some(len(values))].square() * norms[0], len(values)
    for writer, moment in zip(block.writers, own.inputs, strict=True):
        if not isinstance(moment, Tensor):  # of an expert of a stack, or one that no token reached
            continue
        weight = q[:, some(len(q))].T @ writer.weight
        norm = moment
        if writer.heads:
            assert turn is not None
            by_head = turn.repeat_interleave(writer.heads // len(turn), 0)
            weight = _by_heads(weight, by_head)
            norm = (by_head * (moment @ by_head)).sum(1).flatten()
        yield weight.square() * norm, len(q)


def _n_eff(scores: Tensor) -> Tensor:
    """N_eff/N of rows of squared scores; 0 of a row of zeros."""
    total = scores.sum(1).clamp(min=_TINY)
    return (scores + 1e-12 * total[:, None]).sqrt().sum(1).square() / total / scores.shape[1]


def _mean_n_eff(
    stream: _Stream,
    moments: list[_Moments],
    q: Tensor | None = None,
    turns: list[Tensor | None] | None = None,
) -> float:
    """The mean of N_eff/N over all rows, if the model is turned, or as it is."""
    if q is None or turns is None:
        q, turns = _no_turns(stream)
    total = rows = 0.0
    for block, own, turn in zip(stream.blocks, moments, turns, strict=True):
        for scores, number in _scores(block, own, q.to(own.stream[0].device), turn):
            total = total + float(_n_eff(scores).sum())
            rows = rows + number
    return total / rows


def _search(
    stream: _Stream, moments: list[_Moments], steps: int, random: torch.Generator
) -> tuple[Tensor, list[Tensor | None]]:
    """The turn of least N_eff/N that Adam finds, from no turn."""
    q, turns = _no_turns(stream)
    free = [torch.zeros_like(each) for each in (q, *turns) if each is not None]
    adam = torch.optim.Adam(
        [{"params": [each.requires_grad_()], "lr": _RATE * each.shape[-1] ** -0.5} for each in free]
    )
    rates = torch.optim.lr_scheduler.LambdaLR(adam, lambda step: min(1.0, 2 * (1 - step / steps)))

    def found() -> tuple[Tensor, list[Tensor | None]]:
        rest = iter(free[1:])
        return _cayley(free[0]), [None if turn is None else _cayley(next(rest)) for turn in turns]

    with torch.enable_grad(), closing(progress_bar(steps, "rotate", "step")) as bar:
        rows = sum(len(each) for block in stream.blocks for part in block.readers for each in part)
        for _ in range(steps):
            adam.zero_grad()
            q, now = found()
            leaf = q.detach().requires_grad_()  # so that memory holds the graph of one block
            drawn = torch.randperm(len(now), generator=random)[:_BLOCKS].tolist()
            for block, own, turn in (
                (stream.blocks[number], moments[number], now[number]) for number in drawn
            ):
                there = leaf.to(own.stream[0].device)
                parts = [
                    number * _n_eff(scores).mean()
                    for scores, number in _scores(block, own, there, turn, _ROWS, random)
                ]
                (sum(parts, torch.zeros((), device=there.device)) / rows).backward()  # type: ignore[no-untyped-call]
            q.backward(leaf.grad)  # type: ignore[no-untyped-call]
            adam.step()
            rates.step()
            bar.update(1)
    return found()


def _cayley(free: Tensor) -> Tensor:
    """An orthogonal matrix (I + A)^-1 (I - A), A = (F - F^T) / 2; or one of each matrix of a
    stack.
    """
    skew = (free - free.mT) / 2
    one = torch.eye(free.shape[-1], device=free.device)
    turned: Tensor = torch.linalg.solve(one + skew, one - skew)
    return turned


# The order of the columns, for N:M.


def _in_order(
    stream: _Stream, moments: list[_Moments], pattern: str, random: torch.Generator
) -> tuple[Tensor, list[Tensor | None]]:
    """Put the neurons in an order for a pattern, and return turns that do the same with the
    stream and the values of heads.
    """
    asked = parse_pattern(pattern)
    keep = asked.kept
    of = asked.group
    q, turns = _no_turns(stream)
    rows: list[Tensor] = []
    matrices = sum(len(part) for block in stream.blocks for part in block.readers)
    some = max(1, min(_ROWS, _ROWS_OF_ORDER // matrices))
    for number, (block, own, turn) in enumerate(zip(stream.blocks, moments, turns, strict=True)):
        readers = sum(len(part) for part in block.readers) + len(block.values[:1])
        found = [
            scores
            for scores, _ in _scores(block, own, q.to(own.stream[0].device), turn, some, random)
        ]
        found = [scores / scores.sum(1, keepdim=True).clamp(min=_TINY) for scores in found]
        rows += [scores.to(q.device) for scores in found[:readers]]
        reached = [index for index, moment in enumerate(own.inputs) if isinstance(moment, Tensor)]
        for index, scores in zip(reached, found[readers:], strict=True):
            writer = block.writers[index]
            if writer.heads and turn is not None:
                by_group = (
                    scores.view(len(scores), len(turn), -1, turn.shape[-1])
                    .transpose(0, 1)
                    .flatten(1, 2)
                )
                orders = [_order_of(each, keep, of, random) for each in by_group]
                turns[number] = torch.stack(
                    [each[:, order] for each, order in zip(turn, orders, strict=True)]
                )
            elif writer.mates:
                order = _order_of(scores, keep, of, random)
                own.inputs[index] = own.inputs[index][order]
                writer.weight.copy_(writer.weight[:, order])
                for mate in writer.mates:
                    mate.copy_(mate.view(-1, len(order), *mate.shape[1:])[:, order].flatten(0, 1))
    return q[:, _order_of(torch.cat(rows), keep, of, random)], turns


def _order_of(shares: Tensor, keep: int, of: int, random: torch.Generator) -> Tensor:
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
