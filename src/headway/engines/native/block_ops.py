"""The operations that a block of decode steps consists of, and their reference in plain torch.

The reference runs anywhere; `triton_ops` does the same on a GPU. Both get the same tensors from the same code, so that
a block can be tested where there is no GPU.

A *lane* is a place in the batch of a step, a *slot* the memory of one sequence; `lanes_B` says which slot is in which
lane. A row of `state` (the columns below) says what a slot draws next. A row of `block` holds what was drawn since the
last host synchronisation: a count, then tokens, then the bits of their log-probabilities.

Shapes: B lanes, T tokens, E width of the model, H heads, K key-value heads, D head size, V vocabulary, R rows of KV:
token p of slot s is row `tables[s, p // page_tokens] · page_tokens + p % page_tokens`.
"""

import struct
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from headway.engines.native import token_sampler
from headway.engines.native.quantized_products import (
    FP8,
    Matrix,
    QuantizedRows,
    multiply_quantized,
    quantize,
    quantize_rows,
    read_kv_rows,
    write_kv_rows,
)
from headway.models.attention_scores import ScoreExtras, attend_with_extras
from headway.types import SamplingParams

KeysValues = tuple[Tensor, Tensor]
"""Keys and values of one layer, (R, K, D) each."""
TOKEN, POSITION, LIMIT, ACTIVE, KEY, TEMPERATURE, TOP_K, TOP_P, MIN_P, COLUMNS = range(10)
"""Columns of `state`, int64. TOKEN at POSITION is next; LIMIT tokens end a sequence; fractions are float32 bits."""
GOLDEN_GAMMA = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class HeadShape:
    """The shape of one layer's attention."""

    query: int
    kv: int
    size: int
    scale: float
    window: int = 0
    """Tokens that a token sees, itself included; 0: all."""
    softcap: float = 0.0
    """Bound of the scores; 0: none."""


class PageTable(NamedTuple):
    """Where the KV of each slot lies."""

    tables: Tensor
    """The pages of each slot, (S, pages), int32."""
    page_tokens: int


class RotaryTable(NamedTuple):
    """What is applied to queries and keys before their product."""

    cos: Tensor
    """(positions, D/2), float32."""
    sin: Tensor
    query_norm: Tensor | None
    key_norm: Tensor | None
    eps: float


TILE_TOKENS = 64
"""Most tokens that are prefilled together: a tile is a stretch of one prompt."""


class PrefillBatch(NamedTuple):
    """Pieces of prompts whose KV is computed in one forward pass, in two forms: kernels take the one they need."""

    tiles: Tensor
    """The first token in the flat batch, their number, their slot, the position of the first; for every tile."""
    context_rows: Tensor
    """The KV rows of everything that the pieces see, one piece after the other."""
    query_ends: Tensor
    """Where pieces begin and end in the flat batch, int32, from 0."""
    context_ends: Tensor
    """Where they begin and end in `context_rows`, int32, from 0."""
    longest_query: int
    longest_context: int
    pieces: int


class BlockOps:
    """The operations on one device; this is the reference in plain torch, which is slow.

    `product` may return float32 planes (P, T, out) that are still to be summed. Where a product is an input, its planes
    may be.
    """

    def product(self, x_TE: Matrix, weight: Matrix, bias: Tensor | None) -> Tensor:
        """Return x · weightᵀ + bias."""
        if isinstance(weight, QuantizedRows):
            return self._multiply_scaled(quantize(x_TE), weight, bias)
        return self._multiply(x_TE, weight, bias)  # type: ignore[arg-type]

    def gated(self, x_TE: Matrix, weight: Matrix, bias: Tensor | None) -> Matrix:
        """Return silu(first half of the product) · second half, quantized as the weight is."""
        if isinstance(weight, QuantizedRows):
            return self._multiply_gated_scaled(quantize(x_TE), weight, bias)
        return self._multiply_gated(x_TE, weight, bias)  # type: ignore[arg-type]

    def gate(self, gate_up: Tensor, dtype: torch.dtype) -> Tensor:
        """Return silu(first half of a product) · second half."""
        return _gate(sum_planes(gate_up)).to(dtype)

    def _multiply(self, x_TE: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return linear(x_TE, weight, bias)

    def _multiply_gated(self, x_TE: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return _gate(linear(x_TE, weight, bias)).to(x_TE.dtype)

    def _multiply_scaled(self, x: QuantizedRows, weight: QuantizedRows, bias: Tensor | None) -> Tensor:
        return multiply_quantized(x, weight, bias)

    def _multiply_gated_scaled(self, x: QuantizedRows, weight: QuantizedRows, bias: Tensor | None) -> QuantizedRows:
        return quantize_rows(_gate(multiply_quantized(x, weight, bias)))

    def add_norm(self, x_TE: Tensor, delta_TE: Tensor | None, weight_E: Tensor, eps: float) -> Tensor:
        """Add `delta` to the float32 stream `x` in place; returns its RMS norm in the type of the weight."""
        if delta_TE is not None:
            x_TE += sum_planes(delta_TE)
        normed = x_TE * torch.rsqrt(x_TE.square().mean(-1, keepdim=True) + eps)
        return (normed * weight_E.float()).to(weight_E.dtype)

    def add_norm_quantized(self, x_TE: Tensor, delta_TE: Tensor | None, weight_E: Tensor, eps: float) -> QuantizedRows:
        """Do what `add_norm` does, and return the norm in 8 bits."""
        return quantize_rows(self.add_norm(x_TE, delta_TE, weight_E, eps))

    def rotate_store(
        self, qkv: Tensor, heads: HeadShape, rotary: RotaryTable, positions_T: Tensor, rows_T: Tensor, kv: KeysValues
    ) -> Tensor:
        """Normalize and rotate, write keys and values to their rows; returns queries (T, H, D)."""
        parts = sum_planes(qkv).float().view(qkv.shape[-2], -1, heads.size)
        dtype = choose_query_dtype(kv)
        q, k, v = torch.split(parts, [heads.query, heads.kv, heads.kv], dim=1)
        if rotary.query_norm is not None and rotary.key_norm is not None:
            q, k = _normalize(q, rotary.query_norm, rotary.eps), _normalize(k, rotary.key_norm, rotary.eps)
        cos, sin = rotary.cos[positions_T][:, None], rotary.sin[positions_T][:, None]
        write_kv_rows(kv[0], rows_T, _rotate(k, cos, sin))
        write_kv_rows(kv[1], rows_T, v)
        return _rotate(q, cos, sin).to(dtype)

    def locate(self, state: Tensor, lanes_B: Tensor, pages: PageTable) -> tuple[Tensor, Tensor, Tensor]:
        """Return the next token of each lane, its position, and its row of KV."""
        rows = state.index_select(0, lanes_B)
        positions_B = rows[:, POSITION].contiguous()
        page_B = pages.tables[lanes_B, positions_B // pages.page_tokens].long()
        return rows[:, TOKEN], positions_B, page_B * pages.page_tokens + positions_B % pages.page_tokens

    def decode(
        self,
        q_BHD: Tensor,
        kv: KeysValues,
        heads: HeadShape,
        pages: PageTable,
        lanes_B: Tensor,
        positions_B: Tensor,
        splits: int,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        """Attend with one token for each lane to its slot up to its position; long slots are read in `splits`."""
        out = torch.empty_like(q_BHD)
        for lane, (slot, position) in enumerate(zip(lanes_B.tolist(), positions_B.tolist(), strict=True)):
            one = slice(lane, lane + 1)
            out[one] = _attend_slot(q_BHD[one], kv, heads, pages, slot, position, sinks_H)
        return out

    def prefill(
        self,
        q_THD: Tensor,
        kv: KeysValues,
        heads: HeadShape,
        pages: PageTable,
        batch: PrefillBatch,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        """Attend with tokens of prompts to their slots up to themselves."""
        out = torch.empty_like(q_THD)
        for first, count, slot, start in batch.tiles.tolist():
            tile = slice(first, first + count)
            out[tile] = _attend_slot(q_THD[tile], kv, heads, pages, slot, start, sinks_H)
        return out

    def draw(
        self, logits_BV: Tensor, lanes_B: Tensor, state: Tensor, block: Tensor, ends: Tensor, *, truncates: bool
    ) -> None:
        """Draw a token for every active lane into `block`, and into `state` as the next one.

        `truncates`: some sequences truncate the distribution by top-k, top-p or min-p.
        """
        rows = state[lanes_B].tolist()
        uniforms = [draw_uniform(row[KEY], row[POSITION]) for row in rows]
        tokens, logps = token_sampler.sample_tokens(
            logits_BV.float().cpu().clone(), [_read_params(row) for row in rows], uniforms
        )
        steps, stops = (block.shape[1] - 1) // 2, set(ends.tolist())
        for slot, row, token, logp in zip(lanes_B.tolist(), rows, tokens, logps, strict=True):
            if row[ACTIVE]:
                count = int(block[slot, 0])
                block[slot, 0] = count + 1
                block[slot, 1 + count] = token
                block[slot, 1 + steps + count] = float_to_bits(logp)
                state[slot, TOKEN], state[slot, POSITION] = token, row[POSITION] + 1
                state[slot, ACTIVE] = int(token not in stops and row[POSITION] + 2 < row[LIMIT])


def _gate(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.float().chunk(2, dim=-1)
    return silu(gate) * up


def sum_planes(product: Tensor) -> Tensor:
    """Return a product, summed where it came in planes."""
    return product.sum(0) if product.dim() == 3 else product


def float_to_bits(value: float) -> int:
    """Return the bits of a float32 as an int32."""
    return int(struct.unpack("i", struct.pack("f", value))[0])


def make_draw_key(key: int, prompt_length: int) -> int:
    """Return what `draw_uniform` needs of a sequence: its key, moved back by its prompt, as a signed number."""
    moved = (key - prompt_length * GOLDEN_GAMMA) & _MASK
    return moved - (1 << 64) if moved >> 63 else moved


def draw_uniform(key: int, position: int) -> float:
    """Return `NativeSequence.next_uniform` of the token after `position`, from the result of `make_draw_key`."""
    z = (key + (position + 2) * GOLDEN_GAMMA) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return float(((z ^ (z >> 31)) >> 11) * 2.0**-53)


def _read_params(row: list[int]) -> SamplingParams:
    temperature, top_p, min_p = (struct.unpack("f", struct.pack("i", row[c]))[0] for c in (TEMPERATURE, TOP_P, MIN_P))
    return SamplingParams(temperature=temperature, top_p=top_p, min_p=min_p, top_k=row[TOP_K])


def _normalize(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def choose_query_dtype(kv: KeysValues) -> torch.dtype:
    """Return the type of queries over this KV: its own, or one that is multiplied where it has 8 bits."""
    if kv[0].dtype != FP8:
        return kv[0].dtype
    return torch.bfloat16 if kv[0].is_cuda else torch.float32


def _attend_slot(
    q_QHD: Tensor,
    kv: KeysValues,
    heads: HeadShape,
    pages: PageTable,
    slot: int,
    start: int,
    sinks_H: Tensor | None,
) -> Tensor:
    """Attend with queries at `start` and after to one slot."""
    length = start + len(q_QHD)
    at = torch.arange(length, device=q_QHD.device)
    rows = pages.tables[slot, at // pages.page_tokens].long() * pages.page_tokens + at % pages.page_tokens
    at_Q, at_L = torch.arange(start, length)[:, None], torch.arange(length)[None]
    seen_QL = at_L <= at_Q
    if heads.window:
        seen_QL &= at_L > at_Q - heads.window
    k, v = (read_kv_rows(part, rows, q_QHD.dtype).transpose(0, 1)[None] for part in kv)
    attended = attend_with_extras(
        q_QHD.transpose(0, 1)[None],
        k,
        v,
        attn_mask=seen_QL.to(q_QHD.device),
        scale=heads.scale,
        extras=ScoreExtras(heads.softcap, sinks_H),
    )
    return attended[0].transpose(0, 1)
