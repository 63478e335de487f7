"""Runs several decode steps per host synchronisation, on a GPU.

A block is launched without waiting: copies of pages, pieces of prompts, then decode steps, each a replayed graph. The
device itself decides draws, ends and lengths, so that a sequence that has ended draws nothing more; the host reads a
block when it is done, while the next one runs. Knows lanes and slots, never a queue.

Guarantees: what is computed for one sequence depends on no other, up to rounding; no token after an end is reported;
weights change between two blocks only. On the CPU the same code runs without graphs, for tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway.engines.native import block_ops as columns
from headway.engines.native.block_ops import TILE_TOKENS, BlockOps, HeadShape, KeysValues, PageTable, PrefillBatch
from headway.engines.native.decode_graphs import DecodeGraphs, DecodeShape, choose_splits, round_up_lanes
from headway.engines.native.kv_cache import PagedKvCache, copy_to_device
from headway.engines.native.kv_slots import NativeSequence
from headway.engines.native.model_decoders import BlockDecoder, KvView
from headway.engines.native.native_scheduler import DrawnTokens, PrefillChunk, StepPlan
from headway.engines.native.recorded_routing import PageRecorder
from headway.engines.native.served_parameters import ServedParameters, ServedValues
from headway.engines.native.settings import NativeSettings

if TYPE_CHECKING:
    from torch.cuda import Event


class BlockInFlight(NamedTuple):
    """A block that was launched."""

    ready: Sequence[NativeSequence]
    """The sequence in each lane."""
    slots: NDArray[np.int64]
    report: Tensor
    """A row for each slot, as in `block_ops`; on the host, valid once `done`."""
    done: Event | None


class BlockRunner:
    """One model on one device. Used by one thread; `parameters` may be read by another."""

    def __init__(
        self,
        decoder: BlockDecoder,
        ops: BlockOps,
        kv: PagedKvCache,
        parameters: ServedParameters,
        settings: NativeSettings,
        *,
        kv_heads: int,
        eos: frozenset[int],
    ) -> None:
        self._decoder, self._ops, self.kv, self._parameters = decoder, ops, kv, parameters
        self.recorder: PageRecorder | None = None
        """What records the experts of a mixture."""
        self._pages = PageTable(kv.tables, kv.page_tokens)
        self._kv_heads = kv_heads
        self._slots = settings.slots
        device = kv.device
        self._stream = kv.stream
        empty = torch.full((settings.slots,), settings.slots, device=device)
        self._lanes, self._empty_lanes = empty, empty.clone()
        self._state = torch.zeros(settings.slots + 1, columns.COLUMNS, dtype=torch.int64, device=device)
        self._block = torch.zeros(settings.slots + 1, 1 + 2 * settings.steps_per_sync, dtype=torch.int32, device=device)
        self._ends = torch.tensor(sorted(eos), dtype=torch.int64, device=device)
        self._graphs = None if self._stream is None else DecodeGraphs(self._stream)
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.default_stream(device))
        self._changes = -1
        self._lane_slots = np.empty(0, dtype=np.int64)
        """The slot of each lane."""
        self._truncates = False
        """Whether any sequence truncates the distribution that it draws from."""
        self._stays = np.full(settings.slots, -1, dtype=np.int64)
        """The stay of a sequence that a slot's row of `state` belongs to."""
        self._lengths = np.zeros(settings.slots, dtype=np.int64)
        """Tokens of a slot's sequence after all that was launched, if it does not end before."""
        self._limits = np.zeros(settings.slots, dtype=np.int64)

    def install(self, values: ServedValues) -> None:
        """Serve other weights from the next block on."""
        with self.kv.on_stream():
            if self._stream is not None:  # loaded by another thread, on the default stream
                self._stream.wait_stream(torch.cuda.default_stream(self.kv.device))
            self._parameters.install(values)

    def wait(self) -> None:
        """Wait until everything that was launched is done, prefills without a block too."""
        if self._stream is not None:
            self._stream.synchronize()

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> BlockInFlight | None:
        """Start a block. Returns None where no sequence would draw anything."""
        with self.kv.on_stream():
            self.kv.settle()
            if plan.prefills:
                self._prefill(plan.prefills)
            if not plan.ready:
                return None
            if plan.changes != self._changes:
                self._assign_lanes(plan)
            return self._decode(plan.ready, plan.steps)

    def read(self, block: BlockInFlight) -> list[DrawnTokens]:
        """Wait for a block; returns what each lane has drawn."""
        if block.done is not None:
            block.done.synchronize()
        report = block.report.numpy()[block.slots]
        steps = (report.shape[1] - 1) // 2
        counts, tokens = report[:, 0], report[:, 1 : 1 + steps]
        logps = report[:, 1 + steps :].view(np.float32)
        wrong = ~np.isfinite(logps) & (np.arange(steps) < counts[:, None])
        if wrong.any():
            raise FloatingPointError(f"logits of {int(wrong.any(axis=1).sum())} of {len(counts)} rows are not finite")
        rows = zip(counts.tolist(), tokens.tolist(), logps.tolist(), strict=True)
        return [(drawn, found) if count == steps else (drawn[:count], found[:count]) for count, drawn, found in rows]

    def _assign_lanes(self, plan: StepPlan) -> None:
        """Tell the device which slot is in which lane, and all about sequences that are new."""
        self._changes = plan.changes
        slots, stays = np.array([(sequence.row, sequence.stay) for sequence in plan.ready], dtype=np.int64).T
        new = np.flatnonzero(self._stays[slots] != stays).tolist()
        if new:
            joined = [plan.ready[lane] for lane in new]
            rows = copy_to_device(
                np.array([_make_state_row(sequence) for sequence in joined], dtype=np.int64), self.kv.device
            )
            self._state.index_copy_(0, copy_to_device(slots[new], self.kv.device), rows)
            self._stays[slots[new]] = stays[new]
            self._lengths[slots[new]] = [len(sequence.tokens) for sequence in joined]
            self._limits[slots[new]] = [sequence.limit for sequence in joined]
        lanes = np.full(round_up_lanes(len(slots), self._slots), self._slots, dtype=np.int64)
        lanes[: len(slots)] = slots
        self._lanes[: len(lanes)].copy_(copy_to_device(lanes, self.kv.device))
        self._lane_slots = slots
        self._truncates = any(_truncates_distribution(sequence) for sequence in plan.ready)

    def _decode(self, ready: Sequence[NativeSequence], most_steps: int) -> BlockInFlight | None:
        slots = self._lane_slots
        lengths, limits = self._lengths[slots], self._limits[slots]
        steps = min(most_steps, int((limits - lengths).max()))
        if steps <= 0:
            return None
        longest = int(lengths.max()) + steps
        size = round_up_lanes(len(slots), self._slots)
        shape = DecodeShape(size, choose_splits(size, self._kv_heads, longest), self._truncates)
        self._block[:, 0].zero_()
        for _ in range(steps):
            self._run(shape)
        self._lengths[slots] = np.minimum(lengths + steps, limits)
        if self._stream is None:
            return BlockInFlight(ready, slots, self._block.clone(), None)
        report = torch.empty(self._block.shape, dtype=torch.int32, pin_memory=True)
        report.copy_(self._block, non_blocking=True)
        done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        done.record(self._stream)
        return BlockInFlight(ready, slots, report, done)

    def _run(self, shape: DecodeShape) -> None:
        if self._graphs is None:
            self._step(shape)
        else:
            self._graphs.run(shape, self._step, self._empty_step)

    def _step(self, shape: DecodeShape) -> None:
        self._decode_lanes(self._lanes[: shape.lanes], shape)

    def _empty_step(self, shape: DecodeShape) -> None:
        self._decode_lanes(self._empty_lanes[: shape.lanes], shape)

    def _decode_lanes(self, lanes_B: Tensor, shape: DecodeShape) -> None:
        tokens_B, positions_B, rows_B = self._ops.locate(self._state, lanes_B, self._pages)

        def attend(q_BHD: Tensor, kv: KeysValues, heads: HeadShape, sinks_H: Tensor | None) -> Tensor:
            return self._ops.decode(q_BHD, kv, heads, self._pages, lanes_B, positions_B, shape.splits, sinks_H)

        logits_BV = self._decoder.logits(tokens_B, KvView(self.kv, positions_B, rows_B, attend))
        self._ops.draw(logits_BV, lanes_B, self._state, self._block, self._ends, truncates=shape.truncates)

    def _prefill(self, chunks: Sequence[PrefillChunk]) -> None:
        """Compute the KV of all pieces in one forward pass; nothing is drawn."""
        tokens: list[int] = []
        positions, rows, contexts, tiles = [], [], [], []
        for chunk in chunks:
            slot, start = chunk.sequence.row, chunk.sequence.cached
            end = start + chunk.count
            for first in range(0, chunk.count, TILE_TOKENS):
                tiles.append((len(tokens) + first, min(TILE_TOKENS, chunk.count - first), slot, start + first))
            tokens += chunk.sequence.tokens[start:end]
            positions.append(np.arange(start, end))
            contexts.append(self.kv.list_rows(slot, 0, end))
            rows.append(contexts[-1][start:])
        flat = np.stack((np.array(tokens, dtype=np.int64), np.concatenate(positions), np.concatenate(rows)))
        device = self.kv.device
        tokens_T, positions_T, rows_T = copy_to_device(flat, device)
        sizes = np.array([(0, 0), *((len(part), len(context)) for part, context in zip(rows, contexts, strict=True))])
        query_ends, context_ends = copy_to_device(sizes.cumsum(axis=0).T.astype(np.int32), device)
        batch = PrefillBatch(
            copy_to_device(np.array(tiles), device),
            copy_to_device(np.concatenate(contexts), device),
            query_ends,
            context_ends,
            longest_query=int(sizes[:, 0].max()),
            longest_context=int(sizes[:, 1].max()),
            pieces=len(chunks),
        )

        def attend(q_THD: Tensor, kv: KeysValues, heads: HeadShape, sinks_H: Tensor | None) -> Tensor:
            return self._ops.prefill(q_THD, kv, heads, self._pages, batch, sinks_H)

        self._decoder.prefill(tokens_T, KvView(self.kv, positions_T, rows_T, attend))


def _make_state_row(sequence: NativeSequence) -> list[int]:
    """Return a sequence as a row of `state`, in the order of its columns."""
    params = sequence.params
    fractions = [columns.float_to_bits(value) for value in (params.temperature, params.top_p, params.min_p)]
    key = columns.make_draw_key(sequence.key, sequence.prompt_length)
    position = len(sequence.tokens) - 1
    temperature, top_p, min_p = fractions
    return [sequence.tokens[-1], position, sequence.limit, 1, key, temperature, params.top_k, top_p, min_p]


def _truncates_distribution(sequence: NativeSequence) -> bool:
    params = sequence.params
    return params.temperature > 0 and (params.top_k > 0 or params.top_p < 1 or params.min_p > 0)
