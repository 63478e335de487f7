"""Packing without padding: a group becomes a tree, its common prompt once and its members after it.

Each member sees the prompt and itself, at the positions it would have alone. Log-probabilities and gradients are
therefore those of the members one by one, and a prompt shared by eight members costs once. Trees are laid end to end
until a pack holds `budget` tokens. A group that is larger than that becomes several trees; a sample is never cut. A
sample of several context segments has a member for each. Segments that follow one prompt often enough get a tree of
their own in the same pack, as those of agents who see only the newest state and are often in the same one.

Guarantees: every row is in exactly one pack; the same rows give the same packs; the actions of a row keep their order.
Legend: L tokens of a pack, N actions in it.
"""

# ruff: noqa: N815

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway.trainers.local.token_batch import TokenRow


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptTree:
    """One prompt and the members that follow it, in a pack."""

    start: int
    """Index of its first token in the pack."""
    prefix: int
    """Number of tokens that all members share."""
    members: tuple[int, ...]
    """Number of tokens of each member beyond the prefix."""

    @property
    def size(self) -> int:
        return self.prefix + sum(self.members)

    def sequences(self) -> Iterator[tuple[range, range]]:
        """Yield, for the prompt and each member, the tokens seen before it and its own; one member is all in one."""
        if len(self.members) == 1:
            yield range(0), range(self.start, self.start + self.size)
            return
        prompt = range(self.start, self.start + self.prefix)
        if prompt:
            yield range(0), prompt
        start = prompt.stop
        for length in self.members:
            yield prompt, range(start, start + length)
            start += length


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttentionSpans:
    """Trees as independent sequences for flash attention: spans of queries, each with the keys that end with it.

    A prompt is one span whose keys are the prompt; a member is one whose keys are the prompt and itself.
    Legend: K keys of all spans, L tokens that the keys are taken from.
    """

    query_ends: Tensor
    """Start of each span among the tokens of the pack, and the end of the last; int32."""
    key_ends: Tensor
    longest_query: int
    longest_key: int
    key_K: Tensor | None
    """The token of each key; None means every token once, in order."""
    starts_L: Tensor | None
    """Where the uses of each token begin in `uses_K`, and the end of the last."""
    uses_K: Tensor | None
    """Where each token is among the keys, token after token."""
    trees: tuple[PromptTree, ...] = ()

    @classmethod
    def of_trees(cls, trees: Sequence[PromptTree], device: torch.device) -> AttentionSpans:
        sequences = [pair for tree in trees for pair in tree.sequences()]
        queries, keys = [len(own) for _, own in sequences], [len(prompt) + len(own) for prompt, own in sequences]
        key_K = None
        if any(prompt for prompt, _ in sequences):
            key_K = np.concatenate([np.arange(one.start, one.stop) for pair in sequences for one in pair])
        spans = cls.of_lengths(queries, keys, key_K, sum(queries), device)
        return replace(spans, trees=tuple(trees))

    @classmethod
    def of_lengths(
        cls,
        queries: Sequence[int],
        keys: Sequence[int],
        key_K: NDArray[np.int64] | None,
        tokens: int,
        device: torch.device,
    ) -> AttentionSpans:
        """Make spans from the numbers of queries and of the keys that end with them, which are of so many tokens."""
        starts = None if key_K is None else _cumulate(np.bincount(key_K, minlength=tokens))
        uses = None if key_K is None else key_K.argsort(kind="stable").astype(np.int32)
        return cls(
            query_ends=to_device(_cumulate(queries), device),
            key_ends=to_device(_cumulate(keys), device),
            longest_query=max(queries),
            longest_key=max(keys),
            key_K=None if key_K is None else to_device(key_K, device),
            starts_L=None if starts is None else to_device(starts, device),
            uses_K=None if uses is None else to_device(uses, device),
        )


def _cumulate(lengths: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int32]:
    return np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)


def to_device(array: NDArray[Any], device: torch.device | str) -> Tensor:
    """Copy an array without waiting for what the device computes."""
    found = torch.from_numpy(array)
    if torch.device(device).type != "cuda":
        return found.to(device)
    return found.pin_memory().to(device, non_blocking=True)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenPack:
    """The input of one forward pass."""

    token_L: Tensor
    position_L: Tensor
    trees: tuple[PromptTree, ...]
    before_N: Tensor
    """Index in the pack of the token before each action, whose hidden state predicts it."""
    chosen_N: Tensor
    """The action itself."""
    action_N: Tensor
    """Number of the action in the batch."""
    routing_L: Tensor | None = None
    """Experts of each token, [L, layers, experts of a token], −1 where not known; None lets the model route."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bundle:
    """Rows that stay in one pack."""

    trees: tuple[tuple[int, tuple[TokenRow, ...]], ...]
    """Number of shared tokens, and the context segments that share them."""
    size: int

    @classmethod
    def of(cls, rows: Sequence[TokenRow], prefix: int) -> _Bundle:
        """Bundle `rows`, whose segments have their first `prefix` tokens in common."""
        by_prompt: dict[tuple[int, ...], list[TokenRow]] = {}
        for row in rows:
            for segment in row.context_segments:
                by_prompt.setdefault(segment.tokens[: segment.prompt_length], []).append(segment)
        frequent = {prompt for prompt, found in by_prompt.items() if len(found) * (len(prompt) - prefix) > len(prompt)}
        others = [segment for prompt, found in by_prompt.items() if prompt not in frequent for segment in found]
        trees = [(prefix, tuple(others))] if others else []
        trees += [(len(prompt), tuple(found)) for prompt, found in by_prompt.items() if prompt in frequent]
        size = sum(shared + sum(len(segment.tokens) - shared for segment in found) for shared, found in trees)
        return cls(trees=tuple(trees), size=size)


def pack_rows(rows: Sequence[TokenRow], *, budget: int, share: bool = True, device: str = "cpu") -> list[TokenPack]:
    """Pack all rows into packs of at most `budget` tokens where that is possible."""
    return list(iterate_packs(rows, budget=budget, share=share, device=device))


def pack_rows_evenly(
    rows: Sequence[TokenRow], ways: int, *, budget: int, share: bool = True, device: str = "cpu"
) -> list[TokenPack]:
    """Pack rows for `ways` ranks, which compute a pack each at the same time.

    Where fewer packs than ranks would do, all ranks get a part: packs are as small as they can be without being more
    than the ranks, because every further one would be another round for all of them.
    """
    packs = pack_rows(rows, budget=budget, share=share, device=device)
    if not 0 < len(packs) < ways:
        return packs
    tokens = sum(pack.token_L.numel() for pack in packs)
    low, high = -(-tokens // ways), min(budget, tokens)
    while high - low > tokens // 64:
        middle = (low + high) // 2
        tried = pack_rows(rows, budget=middle, share=share, device=device)
        if len(tried) > ways:
            low = middle + 1
        else:
            packs, high = tried, middle
    return packs


def iterate_packs(rows: Sequence[TokenRow], *, budget: int, share: bool, device: str) -> Iterator[TokenPack]:
    """Yield the packs of `pack_rows` one by one, so that a GPU can compute one while the next is made."""
    bundles = [
        bundle
        for _, members in groupby(rows, key=lambda row: row.group)
        for bundle in _bundle_group(list(members), budget, share)
    ]
    packs: list[tuple[int, list[_Bundle]]] = []
    for bundle in sorted(bundles, key=lambda one: -one.size):  # first fit, largest first
        for index, (used, inside) in enumerate(packs):
            if used + bundle.size <= budget:
                inside.append(bundle)
                packs[index] = (used + bundle.size, inside)
                break
        else:
            packs.append((bundle.size, [bundle]))
    for _, inside in packs:
        yield _make_pack(inside, device)


def _bundle_group(rows: list[TokenRow], budget: int, share: bool) -> list[_Bundle]:
    """Bundle one group, cut where it would be larger than the budget."""
    if not share:
        return [_Bundle.of([row], _shared_prefix([row])) for row in rows]
    prefix = _shared_prefix(rows)
    found: list[_Bundle] = []
    inside: list[TokenRow] = []
    size = prefix
    for row in rows:
        more = sum(len(segment.tokens) - prefix for segment in row.context_segments)
        if inside and size + more > budget:
            found.append(_Bundle.of(inside, prefix))
            inside, size = [], prefix
        inside.append(row)
        size += more
    return [*found, _Bundle.of(inside, prefix)]


def _shared_prefix(rows: Sequence[TokenRow]) -> int:
    segments = [segment for row in rows for segment in row.context_segments]
    return common_prefix_length([segment.tokens[: segment.prompt_length] for segment in segments])


def common_prefix_length(prompts: Sequence[tuple[int, ...]]) -> int:
    """Return the number of tokens that all of `prompts` begin with."""
    low, high = min(prompts), max(prompts)  # furthest apart in lexicographic order
    for index, (one, other) in enumerate(zip(low, high, strict=False)):
        if one != other:
            return index
    return min(len(low), len(high))


def _make_pack(bundles: Sequence[_Bundle], device: str) -> TokenPack:
    trees: list[PromptTree] = []
    columns: tuple[list[NDArray[np.int64]], ...] = ([], [], [], [], [])
    tokens, positions, before, chosen, numbers = columns
    end = 0
    for prefix, segments in (tree for bundle in bundles for tree in bundle.trees):
        start = end
        tokens.append(np.asarray(segments[0].tokens[:prefix], dtype=np.int64))
        positions.append(np.arange(prefix))
        end += prefix
        for row in segments:
            shift = end - prefix  # index at which the row would begin if its prefix were repeated here
            own, places = np.asarray(row.tokens, dtype=np.int64), np.asarray(row.actions, dtype=np.int64)
            tokens.append(own[prefix:])
            positions.append(np.arange(prefix, len(own)))
            before.append(np.where(places <= prefix, start, shift) + places - 1)
            chosen.append(own[places])
            numbers.append(np.arange(row.first, row.first + len(places)))
            end += len(own) - prefix
        members = tuple(len(row.tokens) - prefix for row in segments)
        trees.append(PromptTree(start=start, prefix=prefix, members=members))
    token_L, position_L, before_N, chosen_N, action_N = (to_device(np.concatenate(parts), device) for parts in columns)
    return TokenPack(
        token_L=token_L,
        position_L=position_L,
        trees=tuple(trees),
        before_N=before_N,
        chosen_N=chosen_N,
        action_N=action_N,
        routing_L=_pack_routing(bundles, device),
    )


def _pack_routing(bundles: Sequence[_Bundle], device: str) -> Tensor | None:
    """Return the experts of the tokens of a pack; members share those of their prompt that one of them knows."""
    trees = [tree for bundle in bundles for tree in bundle.trees]
    shape = next((row.routing.shape[1:] for _, rows in trees for row in rows if row.routing is not None), None)
    if shape is None:
        return None
    parts = []
    for prefix, rows in trees:
        known = [np.full((len(row.tokens), *shape), -1) if row.routing is None else row.routing for row in rows]
        first = next((one for row, one in zip(rows, known, strict=True) if row.routing is not None), known[0])
        parts += [first[:prefix], *(one[prefix:] for one in known)]
    return torch.from_numpy(np.concatenate(parts)).to(device)
