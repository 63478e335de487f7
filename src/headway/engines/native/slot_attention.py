"""Attention of a flat batch over KV slots, through the attention interface of `transformers`.

A step is one sequence of T tokens in a batch of 1: first the ready sequences, one token each, by row; then pieces of
prompts. Linear layers see T rows, no matter which sequence they belong to; only attention tells them apart. A
`StepAttention` writes the new keys and values to their slots, then attends by *segments* (ready rows from a to b,
padded to the longest) and by pieces of prompts. It travels as a keyword through the model: there is no global state.
No mask is registered under `ATTENTION_NAME`, so that `transformers` builds none.

Shapes: H heads, K key-value heads, D head size, T tokens, L tokens of a slot.
Handles grouped heads, sliding windows, soft caps, sinks, and values that are shorter than keys.
"""

from __future__ import annotations

from copy import deepcopy
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface

from headway.engines.native.kv_cache import RowKvCache
from headway.models.attention_scores import ScoreExtras, attend_with_extras

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ATTENTION_NAME = "headway_engine"
_CALL_TOKENS = 140
"""Cost of one more call, in padded tokens: measured on a CPU, 42 µs against 0.3 µs for a token."""


class AttentionSpan(NamedTuple):
    """Tokens `first` to `last` of a step, which see up to `length` tokens of KV, from row `row` on."""

    first: int
    last: int
    row: int
    length: int


class AttentionView(Protocol):
    """One forward pass as its attention sees it: where its tokens stand, and the KV that they attend over."""

    def attend_layer(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float | None,
        window: int | None,
        extras: ScoreExtras,
    ) -> Tensor:
        """Store keys and values of a layer, then attend: (1, H, T, D) → (T, H, D)."""


class StepAttention:
    """An `AttentionView`: the rows and positions of the tokens of one step."""

    def __init__(
        self,
        kv: RowKvCache,
        rows_T: Tensor,
        positions_T: Tensor,
        segments: list[AttentionSpan],
        prompts: list[AttentionSpan],
    ) -> None:
        self.kv = kv
        self.rows_T = rows_T
        self.positions_T = positions_T
        self.segments = segments
        """Spans of ready sequences: token number and row are the same."""
        self.prompts = prompts
        self._masks: dict[int | None, tuple[list[Tensor | None], list[Tensor | None]]] = {}

    def attend_layer(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float | None,
        window: int | None,
        extras: ScoreExtras,
    ) -> Tensor:
        keys, values = self.kv.keys[layer], self.kv.values[layer]
        keys[self.rows_T, :, self.positions_T] = key[0].transpose(0, 1)
        values[self.rows_T, :, self.positions_T] = widen_values(value, query.shape[-1])[0].transpose(0, 1)
        attend = partial(scaled_dot_product_attention, scale=scaling, enable_gqa=query.shape[1] != key.shape[1])
        if extras.needed:
            attend = partial(attend_with_extras, scale=scaling, extras=extras)
        query_THD = query[0].transpose(0, 1)
        out_THD = torch.empty(query_THD.shape, dtype=query.dtype)
        segment_masks, prompt_masks = self._get_masks(window, query.dtype)
        for (first, last, _, length), mask in zip(self.segments, segment_masks, strict=True):
            out_THD[first:last] = attend(
                query_THD[first:last, :, None],
                keys[first:last, :, :length],
                values[first:last, :, :length],
                attn_mask=mask,
            )[:, :, 0]
        for (first, last, row, length), mask in zip(self.prompts, prompt_masks, strict=True):
            out_THD[first:last] = attend(
                query[:, :, first:last],
                keys[row : row + 1, :, :length],
                values[row : row + 1, :, :length],
                attn_mask=mask,
            )[0].transpose(0, 1)
        return out_THD[..., : value.shape[-1]]

    def _get_masks(self, window: int | None, dtype: torch.dtype) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """Return the masks of segments and of prompts; all layers with one window share them."""
        if window not in self._masks:
            segments = [_mask(self.positions_T[s.first : s.last], s.length, window, dtype) for s in self.segments]
            self._masks[window] = (
                [None if mask is None else mask[:, None, None] for mask in segments],
                [_mask(self.positions_T[p.first : p.last], p.length, window, dtype) for p in self.prompts],
            )
        return self._masks[window]


def widen_values(value: Tensor, size: int) -> Tensor:
    """Return values as long as keys, with zeros behind them, where they are shorter (latent attention)."""
    return value if value.shape[-1] == size else pad(value, (0, size - value.shape[-1]))


def _mask(positions_Q: Tensor, length: int, window: int | None, dtype: torch.dtype) -> Tensor | None:
    """Return what is added to scores: 0 where a query may look, −∞ elsewhere; None where it may look everywhere."""
    sees_all = window is None or window >= length
    if sees_all and len(positions_Q) == 1:
        return None
    at_L = torch.arange(length)
    hidden_QL = at_L[None, :] > positions_Q[:, None]
    if not sees_all and window is not None:
        hidden_QL |= at_L[None, :] <= positions_Q[:, None] - window
    return torch.zeros(hidden_QL.shape, dtype=dtype).masked_fill_(hidden_QL, float("-inf"))


def install_attention(model: PreTrainedModel) -> None:
    """Compute the attention of every layer of this model by the `view` that is passed to its forward pass.

    The model gets a copy of its configuration, so that others made from the same one do not get our attention.
    """
    AttentionInterface.register(ATTENTION_NAME, _attend)
    shared, copied = model.config, deepcopy(model.config)
    for module in model.modules():
        if getattr(module, "config", None) is shared:
            module.config = copied
    model.set_attn_implementation(ATTENTION_NAME)
    model.train(False)


def _attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    view: AttentionView,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    extras = ScoreExtras(softcap or 0.0, s_aux)
    return view.attend_layer(layer, query, key, value, scaling, sliding_window, extras)[None], None


def cut_into_segments(lengths: list[int]) -> list[int]:
    """Return the ends of segments of rows that cost least, padding and calls together."""
    count = len(lengths)
    best, before = [0.0] + [float("inf")] * count, [0] * (count + 1)
    for end in range(1, count + 1):
        longest = 0
        for start in range(end - 1, -1, -1):
            longest = max(longest, lengths[start])
            cost = best[start] + (end - start) * longest + _CALL_TOKENS
            if cost < best[end]:
                best[end], before[end] = cost, start
    ends = []
    while count:
        ends.append(count)
        count = before[count]
    return ends[::-1]
