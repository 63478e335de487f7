"""Attention over trees: a prompt sees itself, a member sees the prompt and itself, and no tree sees another.

On a GPU in half precision a whole pack is one call of flash attention, in which a member is a sequence whose keys are
the prompt and itself. Elsewhere a small tree is one call with a mask, and a large one is a call for the prompt and one
for each member. The cost therefore grows with what is seen and not with the square of the pack, and a long sequence
has no mask.

The function is registered with `transformers` under `TREE_ATTENTION`. It works for every decoder that calls its
attention through that interface and passes unknown keywords on. Without a tree it is plain causal attention. Soft caps
and sinks have no flash attention.

Legend: H heads, L tokens of the pack, D size of a head.
"""

import inspect
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from headway.models.attention_scores import NO_EXTRAS, ScoreExtras, attend_with_extras
from headway.trainers.local import long_attention
from headway.trainers.local.layer_functions import select_rows
from headway.trainers.local.tree_packing import AttentionSpans, PromptTree, TokenPack

TREE_ATTENTION = "headway_tree"
SMALL_TREE_TOKENS = 512
"""Size up to which a tree is one call with a mask."""
LARGEST_MASK = 2**22
"""Number of pairs of query and key up to which a mask is made for them."""


def make_attention_spans(pack: TokenPack, dtype: torch.dtype) -> AttentionSpans | None:
    """Return the spans for `tree_attention`, made once for all layers; None if flash attention is not available."""
    if not has_flash(pack.token_L.device, dtype):
        return None
    return AttentionSpans.of_trees(pack.trees, pack.token_L.device)


def has_flash(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether `flash_attention` can be used for queries of this kind."""
    return device.type == "cuda" and dtype in (torch.bfloat16, torch.float16) and _load_flash() is not None


@cache
def _load_flash() -> Callable[..., Any] | None:
    """Return torch's attention over sequences of different lengths, causal from their ends; None before torch 2.11.

    It is the operator that `varlen_attn` calls, whose own wrapper costs the host as much as all else in a layer.
    """
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    has_windows = "window_size" in inspect.signature(varlen_attn).parameters
    return torch.ops.aten._flash_attention_forward if has_windows else None


def register_tree_attention() -> None:
    """Register `TREE_ATTENTION` with `transformers`. Idempotent."""
    from transformers import AttentionInterface

    AttentionInterface.register(TREE_ATTENTION, tree_attention)


def tree_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    headway_trees: tuple[PromptTree, ...] | None = None,
    headway_spans: AttentionSpans | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend with the signature of the interface: tensors are [1, H, L, D], the result is [1, L, H, D]."""
    extras = ScoreExtras(softcap or 0.0, s_aux)
    if headway_spans is not None and not extras.needed:
        return flash_attention(query[0], key[0], value[0], headway_spans, sliding_window, scaling)[None], None
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    if headway_trees is None:
        out = causal_attention(query, key, value, 0, sliding_window, scaling, extras)
    else:
        parts = [_attend_tree(query, key, value, tree, sliding_window, scaling, extras) for tree in headway_trees]
        out = torch.cat(parts, dim=2) if len(parts) > 1 else parts[0]
    return out.transpose(1, 2).contiguous(), None


def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, spans: AttentionSpans, window: int | None, scaling: float | None
) -> Tensor:
    """Attend over all spans at once: [H, L, D] → [L, H, D]."""
    return attend_spans(q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), spans, window, scaling)


def attend_spans(
    q: Tensor, k: Tensor, v: Tensor, spans: AttentionSpans, window: int | None, scaling: float | None
) -> Tensor:
    """Attend over all spans at once: [L, H, D] → [L, H, D]."""
    if window is None and spans.trees and long_attention.is_long(spans.trees) and long_attention.is_faster(q, k):
        return long_attention.attend_trees(q, k, v, spans.trees, scaling)
    flash = _load_flash()
    if flash is None or not has_flash(q.device, q.dtype):
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        found, _ = tree_attention(None, q, k, v, None, scaling, headway_trees=spans.trees, sliding_window=window)
        return found[0]
    if spans.key_K is not None and spans.starts_L is not None and spans.uses_K is not None:
        k, v = (select_rows(x, spans.key_K, spans.starts_L, spans.uses_K) for x in (k, v))
    out, *_ = flash(
        q,
        k,
        v,
        spans.query_ends,
        spans.key_ends,
        spans.longest_query,
        spans.longest_key,
        0.0,
        window is None,
        False,
        scale=scaling,
        window_size_left=-1 if window is None else window - 1,
        window_size_right=0,
    )
    return cast(Tensor, out)


def _attend_tree(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tree: PromptTree,
    window: int | None,
    scaling: float | None,
    extras: ScoreExtras,
) -> Tensor:
    inside = slice(tree.start, tree.start + tree.size)
    q, k, v = query[:, :, inside], key[:, :, inside], value[:, :, inside]
    if len(tree.members) == 1:
        return causal_attention(q, k, v, 0, window, scaling, extras)
    if tree.size <= SMALL_TREE_TOKENS and (window is None or tree.size <= window) and not extras.needed:
        return scaled_dot_product_attention(q, k, v, attn_mask=make_tree_mask(tree).to(q.device), scale=scaling)
    p = tree.prefix
    shared_k, shared_v = k[:, :, :p], v[:, :, :p]
    parts = [causal_attention(q[:, :, :p], shared_k, shared_v, 0, window, scaling, extras)] if p else []
    start = p
    for length in tree.members:
        member = slice(start, start + length)
        seen_k, seen_v = torch.cat([shared_k, k[:, :, member]], dim=2), torch.cat([shared_v, v[:, :, member]], dim=2)
        parts.append(causal_attention(q[:, :, member], seen_k, seen_v, p, window, scaling, extras))
        start += length
    return torch.cat(parts, dim=2)


def causal_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    before: int,
    window: int | None,
    scaling: float | None,
    extras: ScoreExtras = NO_EXTRAS,
) -> Tensor:
    """Attend causally with queries that come `before` keys after the first key."""
    if window is not None and k.shape[2] <= window:
        window = None
    if before == 0 and window is None and not extras.needed:
        return scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling)
    if q.shape[2] * k.shape[2] > LARGEST_MASK and not extras.needed:
        if window is not None:
            return _attend_in_blocks(q, k, v, before, window, scaling)
        every_q = pad(q, (0, 0, before, 0))  # queries that nobody reads make it square, so that it needs no mask
        return scaled_dot_product_attention(every_q, k, v, is_causal=True, scale=scaling)[:, :, before:]
    mask = _make_causal_mask(q, k, before, window)
    if extras.needed:
        return attend_with_extras(q, k, v, attn_mask=mask, scale=scaling, extras=extras)
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling)


def _attend_in_blocks(q: Tensor, k: Tensor, v: Tensor, before: int, window: int, scaling: float | None) -> Tensor:
    """Attend with a window, some queries at a time with the keys that they see."""
    parts, step = [], max(window, 256)
    for start in range(0, q.shape[2], step):
        block = q[:, :, start : start + step]
        low, high = max(0, before + start - window + 1), before + start + block.shape[2]
        mask = _make_causal_mask(block, k[:, :, low:high], before + start - low, window)
        parts.append(
            scaled_dot_product_attention(block, k[:, :, low:high], v[:, :, low:high], attn_mask=mask, scale=scaling)
        )
    return torch.cat(parts, dim=2)


def _make_causal_mask(q: Tensor, k: Tensor, before: int, window: int | None) -> Tensor:
    rows = torch.arange(q.shape[2], device=q.device)[:, None] + before
    columns = torch.arange(k.shape[2], device=q.device)[None, :]
    mask = columns <= rows
    if window is not None:
        mask &= columns > rows - window
    return mask


@lru_cache(maxsize=64)
def make_tree_mask(tree: PromptTree) -> Tensor:
    """Return which query sees which key, [size, size]."""
    owner = torch.cat([torch.full((n,), i) for i, n in enumerate((tree.prefix, *tree.members))])
    causal = torch.ones(tree.size, tree.size, dtype=torch.bool).tril()
    return causal & ((owner[:, None] == owner[None, :]) | (owner[None, :] == 0))
