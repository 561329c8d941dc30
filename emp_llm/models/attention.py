"""Causal attention on CPUs with AVX512-BF16, in half the time that
`torch.nn.functional.scaled_dot_product_attention` takes there, forward and backward. With AMX,
torch has products of its own for it; no other processor was measured.

The queries come in blocks, and each block meets only the keys before its end. The scores of a
block stay in the processor's cache, in float32: products of bfloat16 numbers are exact, and their
sums are of float32, as in torch's own attention.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.amp import custom_bwd, custom_fwd
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from emp_llm.common.machine import cpu_fields, float32_products

_BLOCK = 128  # queries
_SHORT = 256  # tokens: up to so many, torch is as fast
_CACHE = 1 << 20  # bytes of scores at a time, of each thread


class FastAttention(TorchFunctionMode):
    """Inside this context, torch's causal attention is this module's wherever that is faster:
    bfloat16 on such a processor, as many keys as queries, no mask and no dropout.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is scaled_dot_product_attention:
            return _attention(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def fast_attention(device: torch.device, dtype: torch.dtype) -> AbstractContextManager[Any]:
    """`FastAttention` for features on a device, of a dtype, if it may be faster there: it inspects
    every call of torch.
    """
    used = device.type == "cpu" and _in_bfloat16(dtype) and _is_slow_in_torch()
    return FastAttention() if used else nullcontext()


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The attention, with torch's arguments."""
    fast = (
        is_causal
        and attn_mask is None
        and dropout_p == 0
        and all(x.dim() == 4 and x.is_cpu and _in_bfloat16(x.dtype) for x in (query, key, value))
        and query.shape[2] == key.shape[2] > _SHORT
        and (enable_gqa or query.shape[1] == key.shape[1])
        and _is_slow_in_torch()
    )
    if not fast:
        return scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask,
            dropout_p,
            is_causal,
            scale=scale,
            enable_gqa=enable_gqa,
        )
    sequences, heads, length, features = query.shape
    # Heads that share their keys and values lie side by side.
    shared = sequences * key.shape[1]
    result: Tensor = _CausalAttention.apply(  # type: ignore[no-untyped-call]
        query.reshape(shared, -1, length, features),
        key.reshape(shared, length, features),
        value.reshape(shared, length, -1),
        features**-0.5 if scale is None else scale,
    )
    return result.view(sequences, heads, length, -1)


def _is_slow_in_torch() -> bool:
    """Whether this processor is of the kind that this module was measured on."""
    flags = cpu_fields().get("flags", "").split()
    return "avx512_bf16" in flags and "amx_bf16" not in flags


def _in_bfloat16(dtype: torch.dtype) -> bool:
    """Whether torch's attention on a CPU would compute in bfloat16, for features of a dtype."""
    if torch.is_autocast_enabled("cpu"):
        return torch.get_autocast_dtype("cpu") == torch.bfloat16
    return dtype == torch.bfloat16


class _CausalAttention(torch.autograd.Function):
    """softmax(scale q k^T) v over the keys up to each query. The gradients compute the
    probabilities anew, so that memory holds none of them.

    Queries have the shape (shared, heads, length, features), keys and values (shared, length,
    features).
    """

    @staticmethod
    @custom_fwd(device_type="cpu", cast_inputs=torch.bfloat16)  # type: ignore[untyped-decorator]
    def forward(context: Any, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        context.save_for_backward(query, key, value)
        context.scale = scale
        output = query.new_empty(*query.shape[:-1], value.shape[-1])
        for part in _parts(query):
            for rows, probabilities in _probabilities(query[part], key[part], scale):
                values = value[part, : rows.stop]
                output[part, :, rows] = torch.bmm(probabilities.bfloat16(), values).view(
                    output[part, :, rows].shape
                )
        return output

    @staticmethod
    @custom_bwd(device_type="cpu")  # type: ignore[untyped-decorator]
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        query, key, value = context.saved_tensors
        of_query, of_key, of_value = map(torch.empty_like, context.saved_tensors)
        for part in _parts(query):
            keys = key[part]
            values = value[part].float().transpose(1, 2)
            sum_of_key, sum_of_value = (
                torch.zeros_like(x[part], dtype=torch.float32) for x in (key, value)
            )
            for rows, probabilities in _probabilities(query[part], keys, context.scale):
                seen = slice(rows.stop)
                given = gradient[part, :, rows].flatten(1, 2)
                sum_of_value[:, seen] += torch.bmm(probabilities.bfloat16().transpose(1, 2), given)
                with float32_products("medium"):
                    change = torch.bmm(given.float(), values[..., seen])
                change.mul_(probabilities)
                change.addcmul_(probabilities, change.sum(-1, keepdim=True), value=-1)
                scores = change.mul_(context.scale).bfloat16()
                of_query[part, :, rows] = torch.bmm(scores, keys[:, seen]).view(
                    of_query[part, :, rows].shape
                )
                sum_of_key[:, seen] += torch.bmm(
                    scores.transpose(1, 2), query[part, :, rows].flatten(1, 2)
                )
            of_key[part] = sum_of_key
            of_value[part] = sum_of_value
        return of_query, of_key, of_value, None


def _parts(query: Tensor) -> list[slice]:
    """Heads whose scores fit in the cache together."""
    shared, heads, length, _ = query.shape
    size = max(1, torch.get_num_threads() * _CACHE // (4 * heads * _BLOCK * length))
    return [slice(first, first + size) for first in range(0, shared, size)]


def _probabilities(query: Tensor, key: Tensor, scale: float) -> Iterator[tuple[slice, Tensor]]:
    """The probabilities of blocks of queries, float32, shape (shared, heads * queries, keys), where
    keys are those up to the end of the block.
    """
    shared, heads, length, _ = query.shape
    query = query.float()
    key = key.float().transpose(1, 2)
    later = key.new_full((_BLOCK, _BLOCK), -torch.inf).triu_(1)
    for first in range(0, length, _BLOCK):
        rows = slice(first, min(first + _BLOCK, length))
        with float32_products("medium"):
            scores = torch.bmm(query[:, :, rows].flatten(1, 2), key[..., : rows.stop])
        size = rows.stop - first
        scores.mul_(scale).view(shared, heads, size, -1)[..., first:].add_(later[:size, :size])
        yield rows, scores.softmax(-1)
