"""Context parallelism: a pack whose tokens are divided over ranks, for sequences that one device cannot hold.

Each rank has two stretches of the pack, one from the front and one from the back, so that all have about as much to
attend to. Everything but attention is done token by token and needs nobody else; attention gathers the keys and values
of a layer from all ranks and lets the rank's own queries look at them. So activations are divided, keys and values of
one layer at a time are not.

Guarantees: numbers and gradients are those of the undivided pack, up to rounding; every rank ends up with the numbers
of all actions. Registered with `transformers` under `CONTEXT_ATTENTION`; outside of a divided pack it is the attention over trees.

Legend: L tokens of the pack with filling, l those of this rank, N actions, n those that follow a token of this rank.
"""

# ruff: noqa: N815

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from headway.trainers.local import tree_attention
from headway.trainers.local.tree_packing import AttentionSpans, PromptTree, TokenPack

CONTEXT_ATTENTION = "headway_context"


@dataclass(frozen=True, slots=True, kw_only=True)
class QuerySpan:
    """Queries of this rank that follow one another, and the keys that they may look at; the last query sees all."""

    queries: range
    """Among the rank's tokens."""
    keys: tuple[range, ...]
    """Among the tokens of the pack: a prompt, and the sequence up to the last query."""

    @property
    def seen(self) -> int:
        return sum(len(one) for one in self.keys)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ContextShard:
    """What one rank has of a pack."""

    token_l: Tensor
    position_l: Tensor
    before_n: Tensor
    """For each action of this rank the token of this rank that it follows."""
    mine_n: Tensor
    """Its number among the actions of the pack."""
    stretches: tuple[QuerySpan, ...]
    order_L: Tensor
    """Where each token of the pack lies among those of all ranks, one rank after the other."""
    group: Any


def enable_context_attention(backbone: Any) -> None:
    """Let `backbone` attend over divided packs."""
    from transformers import AttentionInterface

    AttentionInterface.register(CONTEXT_ATTENTION, context_attention)
    backbone.set_attn_implementation(CONTEXT_ATTENTION)


def make_context_shard(pack: TokenPack, group: Any) -> ContextShard:
    """This rank's share of `pack`."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    tokens, device = pack.token_L.numel(), pack.token_L.device
    filling = -tokens % (2 * size)
    trees = pack.trees
    if filling:
        trees = (*trees, PromptTree(start=tokens, prefix=0, members=(filling,)))
    owned = [_owned(tokens + filling, other, size) for other in range(size)]
    all_L = torch.cat([torch.arange(one.start, one.stop) for two in owned for one in two])
    order_L = torch.empty_like(all_L)
    order_L[all_L] = torch.arange(all_L.numel())
    each = (tokens + filling) // size
    mine_l = all_L[rank * each : (rank + 1) * each].to(device)
    here_N = order_L.to(device)[pack.before_N] - rank * each
    mine_n = ((here_N >= 0) & (here_N < each)).nonzero().flatten()
    return ContextShard(
        token_l=torch.nn.functional.pad(pack.token_L, (0, filling))[mine_l],
        position_l=torch.nn.functional.pad(pack.position_L, (0, filling))[mine_l],
        before_n=here_N[mine_n],
        mine_n=mine_n,
        stretches=tuple(_stretches(trees, owned[rank])),
        order_L=order_L.to(device),
        group=group,
    )


def _owned(tokens: int, rank: int, size: int) -> tuple[range, range]:
    """One stretch from the front and one from the back."""
    each = tokens // (2 * size)
    last = 2 * size - 1 - rank
    return range(rank * each, (rank + 1) * each), range(last * each, (last + 1) * each)


def _stretches(trees: tuple[PromptTree, ...], owned: tuple[range, range]) -> Iterator[QuerySpan]:
    """In the order of the rank's tokens."""
    done = 0
    for mine in owned:
        for prompt, sequence in (pair for tree in trees for pair in _sequences(tree)):
            first, end = max(sequence.start, mine.start), min(sequence.stop, mine.stop)
            if first < end:
                queries = range(done + first - mine.start, done + end - mine.start)
                keys = tuple(one for one in (prompt, range(sequence.start, end)) if one)
                yield QuerySpan(queries=queries, keys=keys)
        done += len(mine)


def _sequences(tree: PromptTree) -> Iterator[tuple[range, range]]:
    """Each with the prompt that it follows: the prompt itself and the members, or all at once where there is one."""
    start, nothing = tree.start, range(0)
    if len(tree.members) == 1:
        yield nothing, range(start, start + tree.size)
        return
    prompt = range(start, start + tree.prefix)
    if prompt:
        yield nothing, prompt
    own = prompt.stop
    for length in tree.members:
        yield prompt, range(own, own + length)
        own += length


def compute_shard_hidden_states(backbone: Any, part: ContextShard) -> Tensor:
    """Last hidden states of this rank's tokens, [l, H]."""
    out = backbone(input_ids=part.token_l[None], position_ids=part.position_l[None], use_cache=False, headway_part=part)
    hidden: Tensor = out.last_hidden_state[0]
    return hidden


def context_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    headway_part: ContextShard | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The signature is that of the interface; tensors are [1, H, l, D], the result [1, l, H, D]."""
    if headway_part is None:
        return tree_attention.tree_attention(
            module, query, key, value, attention_mask, scaling, sliding_window=sliding_window, **kwargs
        )
    tree_attention.check_attention_options(kwargs)
    part = headway_part
    both = _AllGather.apply(torch.stack([key[0], value[0]]).transpose(0, 2), part.group)  # type: ignore[no-untyped-call]
    key, value = both.index_select(0, part.order_L).transpose(0, 2)
    if tree_attention.can_use_flash(query):
        return tree_attention.flash_attention(query[0], key, value, _spans(part), sliding_window, scaling)[None], None
    groups = query.shape[1] // key.shape[0]
    if groups > 1:
        key, value = (x.repeat_interleave(groups, dim=0) for x in (key, value))
    outs = []
    for one in part.stretches:
        q = query[:, :, one.queries.start : one.queries.stop]
        k, v = (torch.cat([x[None, :, r.start : r.stop] for r in one.keys], dim=2) for x in (key, value))
        outs.append(tree_attention.causal_attention(q, k, v, one.seen - len(one.queries), sliding_window, scaling))
    return torch.cat(outs, dim=2).transpose(1, 2).contiguous(), None


def _spans(part: ContextShard) -> AttentionSpans:
    """The stretches, for flash attention."""
    keys = [torch.arange(one.start, one.stop) for stretch in part.stretches for one in stretch.keys]
    queries, seen = [len(one.queries) for one in part.stretches], [one.seen for one in part.stretches]
    return AttentionSpans.between(queries, seen, torch.cat(keys), part.order_L.device)


def scatter_to_all_ranks(mine_n: Tensor, part: ContextShard, actions: int) -> Tensor:
    """Numbers of this rank's actions → of all actions of the pack, on every rank, [N]."""
    found: Tensor = _ScatterToAllRanks.apply(mine_n, part.mine_n, actions, part.group)  # type: ignore[no-untyped-call]
    return found


class _AllGather(torch.autograd.Function):
    """[l, …] of all ranks, one after the other; what others make of mine comes back added up."""

    @staticmethod
    def forward(ctx: Any, mine: Tensor, group: Any) -> Tensor:
        ctx.group = group
        mine = mine.contiguous()
        everything = mine.new_empty(dist.get_world_size(group) * mine.shape[0], *mine.shape[1:])
        dist.all_gather_into_tensor(everything, mine, group=group)
        return everything

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.contiguous()
        mine = grad.new_empty(grad.shape[0] // dist.get_world_size(ctx.group), *grad.shape[1:])
        dist.reduce_scatter_tensor(mine, grad, group=ctx.group)
        return mine, None


class _ScatterToAllRanks(torch.autograd.Function):
    """Every rank computes the same with the result, so each takes the gradients of its own numbers alone."""

    @staticmethod
    def forward(ctx: Any, mine_n: Tensor, number_n: Tensor, actions: int, group: Any) -> Tensor:
        ctx.save_for_backward(number_n)
        found_N = mine_n.new_zeros(actions)
        found_N[number_n] = mine_n
        if actions:
            dist.all_reduce(found_N, group=group)
        return found_N

    @staticmethod
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Tensor, None, None, None]:
        (number_n,) = ctx.saved_tensors
        return grad_N[number_n], None, None, None
