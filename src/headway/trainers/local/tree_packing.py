"""Packing without padding: a group is a tree, its common prompt once and its members after it.

Each member sees the prompt and itself, at the positions it would have alone; so log-probabilities and gradients are
those of the members one by one, and a prompt shared by eight costs once. Trees are laid end to end until a pack holds
`budget` tokens. A group that is larger than that becomes several trees; a sample is never cut. A sample of several
strands has a member for each; strands that follow one prompt often enough have a tree of their own in the same pack, as
those of agents do who see only the newest state and are often in the same one.

Guarantees: every row is in exactly one pack; the same rows give the same packs. Does not pad and does not reorder
the actions of a row. Legend: L tokens of a pack, N actions in it.
"""

# ruff: noqa: N815

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headway.trainers.local.token_batch import TokenRow


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptTree:
    """One prompt and those that follow it, in a pack."""

    start: int
    """Its first token in the pack."""
    prefix: int
    """Tokens that all members share."""
    members: tuple[int, ...]
    """Tokens of each beyond the prefix."""

    @property
    def size(self) -> int:
        return self.prefix + sum(self.members)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttentionSpans:
    """Trees as independent sequences: stretches of queries, and for each the keys that end with it.

    A prompt is one, with itself as keys; a member is one, with the prompt and itself. Legend: K keys of all of them.
    """

    query_ends: Tensor
    """Where each begins among the tokens of the pack, and the last one's end; int32."""
    key_ends: Tensor
    longest_query: int
    longest_key: int
    key_K: Tensor | None
    """The token of each key; None: every token once, in order."""

    @classmethod
    def of(cls, trees: Sequence[PromptTree], device: torch.device) -> AttentionSpans:
        queries: list[int] = []
        keys: list[int] = []
        tokens: list[np.ndarray[Any, Any]] = []
        shared = False
        for tree in trees:
            start, prefix = tree.start, tree.prefix
            if len(tree.members) == 1:
                queries.append(tree.size)
                keys.append(tree.size)
                tokens.append(np.arange(start, start + tree.size))
                continue
            prompt = np.arange(start, start + prefix)
            if prefix:
                shared = True
                queries.append(prefix)
                keys.append(prefix)
                tokens.append(prompt)
            own = start + prefix
            for length in tree.members:
                queries.append(length)
                keys.append(prefix + length)
                tokens += [prompt, np.arange(own, own + length)]
                own += length
        return cls.between(queries, keys, torch.from_numpy(np.concatenate(tokens)) if shared else None, device)

    @classmethod
    def between(
        cls, queries: Sequence[int], keys: Sequence[int], key_K: Tensor | None, device: torch.device
    ) -> AttentionSpans:
        """Of numbers of queries and of the keys that end with them."""
        return cls(
            query_ends=_ends(queries, device),
            key_ends=_ends(keys, device),
            longest_query=max(queries),
            longest_key=max(keys),
            key_K=None if key_K is None else key_K.to(device),
        )


def _ends(lengths: Sequence[int], device: torch.device) -> Tensor:
    return torch.from_numpy(np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)).to(device)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenPack:
    """What one forward pass sees."""

    token_L: Tensor
    position_L: Tensor
    trees: tuple[PromptTree, ...]
    before_N: Tensor
    """For each action the token in the pack that it follows."""
    chosen_N: Tensor
    """The action itself."""
    action_N: Tensor
    """Its number in the batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bundle:
    """Rows that stay together."""

    trees: tuple[tuple[int, tuple[TokenRow, ...]], ...]
    """Tokens that are shared, and the strands that share them."""
    size: int

    @classmethod
    def of(cls, rows: Sequence[TokenRow], prefix: int) -> _Bundle:
        """All of `rows`, whose strands have their first `prefix` tokens in common."""
        by_prompt: dict[tuple[int, ...], list[TokenRow]] = {}
        for row in rows:
            for strand in row.strands:
                by_prompt.setdefault(strand.tokens[: strand.prompt], []).append(strand)
        own = {prompt for prompt, found in by_prompt.items() if len(found) * (len(prompt) - prefix) > len(prompt)}
        others = [strand for prompt, found in by_prompt.items() if prompt not in own for strand in found]
        trees = [(prefix, tuple(others))] if others else []
        trees += [(len(prompt), tuple(found)) for prompt, found in by_prompt.items() if prompt in own]
        size = sum(shared + sum(len(strand.tokens) - shared for strand in found) for shared, found in trees)
        return cls(trees=tuple(trees), size=size)


def pack_rows(rows: Sequence[TokenRow], *, budget: int, share: bool = True, device: str = "cpu") -> list[TokenPack]:
    """All rows, in packs of at most `budget` tokens where that is possible."""
    bundles = [
        bundle
        for _, members in groupby(rows, key=lambda row: row.group)
        for bundle in _bundles(list(members), budget, share)
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
    return [_pack(inside, device) for _, inside in packs]


def _bundles(rows: list[TokenRow], budget: int, share: bool) -> list[_Bundle]:
    """One group, cut where it would be larger than the budget."""
    if not share:
        return [_Bundle.of([row], _shared([row])) for row in rows]
    prefix = _shared(rows)
    found: list[_Bundle] = []
    inside: list[TokenRow] = []
    size = prefix
    for row in rows:
        more = _beyond(row, prefix)
        if inside and size + more > budget:
            found.append(_Bundle.of(inside, prefix))
            inside, size = [], prefix
        inside.append(row)
        size += more
    return [*found, _Bundle.of(inside, prefix)]


def _shared(rows: Sequence[TokenRow]) -> int:
    return common_prefix_length([strand.tokens[: strand.prompt] for row in rows for strand in row.strands])


def _beyond(row: TokenRow, prefix: int) -> int:
    return sum(len(strand.tokens) - prefix for strand in row.strands)


def common_prefix_length(prompts: Sequence[tuple[int, ...]]) -> int:
    """Tokens that all of `prompts` begin with."""
    low, high = min(prompts), max(prompts)  # the furthest apart in the order of dictionaries
    for index, (one, other) in enumerate(zip(low, high, strict=False)):
        if one != other:
            return index
    return min(len(low), len(high))


def _pack(bundles: Sequence[_Bundle], device: str) -> TokenPack:
    tokens: list[int] = []
    positions: list[int] = []
    trees: list[PromptTree] = []
    before: list[int] = []
    chosen: list[int] = []
    numbers: list[int] = []
    for prefix, strands in (tree for bundle in bundles for tree in bundle.trees):
        start = len(tokens)
        tokens += strands[0].tokens[:prefix]
        positions += range(prefix)
        for row in strands:
            shift = len(tokens) - prefix  # where the row would begin if its prefix were here
            tokens += row.tokens[prefix:]
            positions += range(prefix, len(row.tokens))
            before += [(start if place <= prefix else shift) + place - 1 for place in row.actions]
            chosen += [row.tokens[place] for place in row.actions]
            numbers += range(row.first, row.first + len(row.actions))
        members = tuple(len(row.tokens) - prefix for row in strands)
        trees.append(PromptTree(start=start, prefix=prefix, members=members))
    arrays = [
        torch.tensor(values, dtype=torch.long, device=device) for values in (tokens, positions, before, chosen, numbers)
    ]
    return TokenPack(
        token_L=arrays[0],
        position_L=arrays[1],
        trees=tuple(trees),
        before_N=arrays[2],
        chosen_N=arrays[3],
        action_N=arrays[4],
    )
