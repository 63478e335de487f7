"""Context parallelism: the tokens of a pack are divided over ranks, for sequences that one device cannot hold.

Each rank has two ranges of the pack, one from the front and one from the back, so that all have about the same
attention to compute. Everything but attention works token by token and needs no other rank. Attention gathers the keys
and values of a layer from all ranks for the rank's own queries. Activations are therefore divided; keys and values of
one layer at a time are not.

Guarantees: numbers and gradients are those of the undivided pack, up to rounding, and every rank gets the numbers of
all actions. The attention is registered with `transformers` under `CONTEXT_ATTENTION`; outside of a divided pack it is
`tree_attention`.

Legend: L tokens of the padded pack, l those of this rank, N actions, n those that follow a token of this rank.
"""

# ruff: noqa: N815

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from headway.models.attention_scores import ScoreExtras
from headway.models.expert_routing import replay_routing
from headway.trainers.local import tree_attention
from headway.trainers.local.tree_packing import AttentionSpans, PromptTree, TokenPack

CONTEXT_ATTENTION = "headway_context"


@dataclass(frozen=True, slots=True, kw_only=True)
class QuerySpan:
    """Consecutive queries of this rank and the keys that they may see; the last query sees all of them."""

    queries: range
    """Range among the rank's tokens."""
    keys: tuple[range, ...]
    """Ranges among the tokens of the pack: a prompt, and the sequence up to the last query."""

    @property
    def key_count(self) -> int:
        return sum(len(one) for one in self.keys)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ContextShard:
    """This rank's part of a pack."""

    token_l: Tensor
    position_l: Tensor
    routing_l: Tensor | None
    """Experts of the rank's tokens, as in the pack."""
    before_n: Tensor
    """Index of the rank's token before each of its actions."""
    number_n: Tensor
    """Numbers of the rank's actions among those of the pack."""
    spans: tuple[QuerySpan, ...]
    order_L: Tensor
    """Index of each token of the pack in the concatenation of all ranks' tokens."""
    group: Any


def enable_context_attention(backbone: Any) -> None:
    """Make `backbone` use the attention over divided packs."""
    from transformers import AttentionInterface

    AttentionInterface.register(CONTEXT_ATTENTION, context_attention)
    backbone.set_attn_implementation(CONTEXT_ATTENTION)


def make_context_shard(pack: TokenPack, group: Any) -> ContextShard:
    """Return this rank's part of `pack`."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    tokens, device = pack.token_L.numel(), pack.token_L.device
    padding = -tokens % (2 * size)
    trees = pack.trees
    if padding:
        trees = (*trees, PromptTree(start=tokens, prefix=0, members=(padding,)))
    owned = [_owned_ranges(tokens + padding, other, size) for other in range(size)]
    all_L = torch.cat([torch.arange(one.start, one.stop) for ranges in owned for one in ranges])
    order_L = torch.empty_like(all_L)
    order_L[all_L] = torch.arange(all_L.numel())
    share = (tokens + padding) // size
    token_index_l = all_L[rank * share : (rank + 1) * share].to(device)
    local_N = order_L.to(device)[pack.before_N] - rank * share
    number_n = ((local_N >= 0) & (local_N < share)).nonzero().flatten()
    return ContextShard(
        token_l=torch.nn.functional.pad(pack.token_L, (0, padding))[token_index_l],
        position_l=torch.nn.functional.pad(pack.position_L, (0, padding))[token_index_l],
        routing_l=None if pack.routing_L is None else _pad_routing(pack.routing_L, padding)[token_index_l],
        before_n=local_N[number_n],
        number_n=number_n,
        spans=tuple(_query_spans(trees, owned[rank])),
        order_L=order_L.to(device),
        group=group,
    )


def _pad_routing(routing_L: Tensor, padding: int) -> Tensor:
    return torch.nn.functional.pad(routing_L, (0, 0, 0, 0, 0, padding), value=-1)


def _owned_ranges(tokens: int, rank: int, size: int) -> tuple[range, range]:
    """Return a rank's range from the front and its range from the back."""
    share = tokens // (2 * size)
    last = 2 * size - 1 - rank
    return range(rank * share, (rank + 1) * share), range(last * share, (last + 1) * share)


def _query_spans(trees: tuple[PromptTree, ...], owned: tuple[range, range]) -> Iterator[QuerySpan]:
    """Yield the spans of queries in the order of the rank's tokens."""
    done = 0
    for owned_range in owned:
        for prompt, sequence in (pair for tree in trees for pair in tree.sequences()):
            first, end = max(sequence.start, owned_range.start), min(sequence.stop, owned_range.stop)
            if first < end:
                queries = range(done + first - owned_range.start, done + end - owned_range.start)
                keys = tuple(one for one in (prompt, range(sequence.start, end)) if one)
                yield QuerySpan(queries=queries, keys=keys)
        done += len(owned_range)


def compute_shard_hidden_states(backbone: Any, shard: ContextShard) -> Tensor:
    """Return the last hidden states of this rank's tokens, [l, H]."""
    replay_routing(backbone, shard.routing_l)
    out = backbone(
        input_ids=shard.token_l[None], position_ids=shard.position_l[None], use_cache=False, headway_shard=shard
    )
    hidden: Tensor = out.last_hidden_state[0]
    return hidden


def context_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    headway_shard: ContextShard | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend with the signature of the interface: tensors are [1, H, l, D], the result is [1, l, H, D]."""
    if headway_shard is None:
        return tree_attention.tree_attention(
            module, query, key, value, attention_mask, scaling, sliding_window=sliding_window, **kwargs
        )
    extras = ScoreExtras(kwargs.get("softcap") or 0.0, kwargs.get("s_aux"))
    shard = headway_shard
    both = _AllGather.apply(torch.stack([key[0], value[0]]).transpose(0, 2), shard.group)  # type: ignore[no-untyped-call]
    key, value = both.index_select(0, shard.order_L).transpose(0, 2)
    if tree_attention.has_flash(query.device, query.dtype) and not extras.needed:
        spans = _make_flash_spans(shard)
        return tree_attention.flash_attention(query[0], key, value, spans, sliding_window, scaling)[None], None
    groups = query.shape[1] // key.shape[0]
    if groups > 1:
        key, value = (x.repeat_interleave(groups, dim=0) for x in (key, value))
    outs = []
    for one in shard.spans:
        q = query[:, :, one.queries.start : one.queries.stop]
        k, v = (torch.cat([x[None, :, r.start : r.stop] for r in one.keys], dim=2) for x in (key, value))
        before = one.key_count - len(one.queries)
        outs.append(tree_attention.causal_attention(q, k, v, before, sliding_window, scaling, extras))
    return torch.cat(outs, dim=2).transpose(1, 2).contiguous(), None


def _make_flash_spans(shard: ContextShard) -> AttentionSpans:
    """Return the query spans for flash attention."""
    keys = np.concatenate([np.arange(one.start, one.stop) for span in shard.spans for one in span.keys])
    queries, seen = [len(one.queries) for one in shard.spans], [one.key_count for one in shard.spans]
    return AttentionSpans.of_lengths(queries, seen, keys, shard.order_L.numel(), shard.order_L.device)


def scatter_to_all_ranks(value_n: Tensor, shard: ContextShard, actions: int) -> Tensor:
    """Return, on every rank, the numbers of all actions of the pack, [N], given those of this rank's actions."""
    found: Tensor = _ScatterToAllRanks.apply(value_n, shard.number_n, actions, shard.group)  # type: ignore[no-untyped-call]
    return found


class _AllGather(torch.autograd.Function):
    """Gathers [l, …] of all ranks in order; backward adds up the gradients that all ranks have for this rank's part."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, group: Any) -> Tensor:
        ctx.group = group
        local = local.contiguous()
        everything = local.new_empty(dist.get_world_size(group) * local.shape[0], *local.shape[1:])
        dist.all_gather_into_tensor(everything, local, group=group)
        return everything

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.contiguous()
        local = grad.new_empty(grad.shape[0] // dist.get_world_size(ctx.group), *grad.shape[1:])
        dist.reduce_scatter_tensor(local, grad, group=ctx.group)
        return local, None


class _ScatterToAllRanks(torch.autograd.Function):
    """Scatters numbers to all ranks; each takes the gradients of its own, since all compute the same with them."""

    @staticmethod
    def forward(ctx: Any, value_n: Tensor, number_n: Tensor, actions: int, group: Any) -> Tensor:
        ctx.save_for_backward(number_n)
        found_N = value_n.new_zeros(actions)
        found_N[number_n] = value_n
        if actions:
            dist.all_reduce(found_N, group=group)
        return found_N

    @staticmethod
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Tensor, None, None, None]:
        (number_n,) = ctx.saved_tensors
        return grad_N[number_n], None, None, None
