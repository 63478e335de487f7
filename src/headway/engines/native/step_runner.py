"""Runs one step of the model on the CPU: a forward pass of a flat batch, then a draw for every sequence that is due.

Guarantees: what it computes for one sequence depends on no other, up to rounding. Weights change only between two
steps, by pointers. Knows rows and positions, never a queue.
"""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headway.engines.native import token_sampler
from headway.engines.native.kv_cache import RowKvCache, read_kv_shape
from headway.engines.native.kv_slots import KvCacheMoves
from headway.engines.native.native_scheduler import StepPlan
from headway.engines.native.recorded_routing import ReadRouting, RecordedKvMoves, make_slot_recorder
from headway.engines.native.served_parameters import ServedParameters, ServedValues
from headway.engines.native.settings import NativeSettings
from headway.engines.native.slot_attention import AttentionSpan, StepAttention, cut_into_segments, install_attention
from headway.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class StepRunner:
    """A `transformers` decoder on the CPU. Used by one thread; `parameters` may be read by another."""

    def __init__(self, model: PreTrainedModel, parameters: ServedParameters, settings: NativeSettings) -> None:
        install_attention(model)
        config = model.config.get_text_config()
        dtype = choose_compute_dtype(settings)
        self._model = model
        self._parameters = parameters
        slots, slot_tokens = settings.slots, settings.slot_tokens
        self._kv = RowKvCache(**read_kv_shape(config, slot_tokens), slots=slots, slot_tokens=slot_tokens, dtype=dtype)
        self._recorder = make_slot_recorder(model, slots, slot_tokens)
        self.kv_moves: KvCacheMoves = self._kv if self._recorder is None else RecordedKvMoves(self._kv, self._recorder)
        self._changes = -1
        self._ends: list[int] = []

    def install(self, values: ServedValues) -> None:
        """Serve other weights from the next step on."""
        self._parameters.install(values)

    @torch.inference_mode()
    def step(self, plan: StepPlan) -> tuple[list[int], list[float]]:
        """Return tokens and log-probabilities of `plan.drawing`."""
        tokens, rows, positions, last = _flatten(plan)
        prompts = _list_prompt_spans(plan)
        view = StepAttention(self._kv, torch.tensor(rows), torch.tensor(positions), self._list_segments(plan), prompts)
        if self._recorder is not None:
            self._recorder.rows = self._recorder.first_rows[view.rows_T] + view.positions_T
        logits_NV = self._forward(torch.tensor([tokens]), view, last)
        drawing = plan.drawing
        if not drawing:
            return [], []
        return token_sampler.sample_tokens(logits_NV, [s.params for s in drawing], [s.next_uniform() for s in drawing])

    @property
    def read_routing(self) -> ReadRouting | None:
        """What reads the experts of a sequence; None where the model has none."""
        return None if self._recorder is None else self._recorder.read

    def _forward(self, tokens_1T: Tensor, view: StepAttention, last: list[int]) -> Tensor:
        output = self._model(
            input_ids=tokens_1T,
            position_ids=view.positions_T[None],
            use_cache=False,
            logits_to_keep=torch.tensor(last or [0]),  # the head wants a row even where nothing is drawn
            view=view,
        )
        logits_NV: Tensor = output.logits[0].float()
        return logits_NV

    def _list_segments(self, plan: StepPlan) -> list[AttentionSpan]:
        """Return ready rows of similar length; cut again only when others have joined or left, as all grow together."""
        lengths = [sequence.cached + 1 for sequence in plan.ready]
        if self._changes != plan.changes:
            self._changes, self._ends = plan.changes, cut_into_segments(lengths)
        return [
            AttentionSpan(first, last, first, max(lengths[first:last])) for first, last in pairwise([0, *self._ends])
        ]


def _list_prompt_spans(plan: StepPlan) -> list[AttentionSpan]:
    starts = accumulate((chunk.count for chunk in plan.prefills), initial=len(plan.ready))
    return [
        AttentionSpan(start, start + chunk.count, chunk.sequence.row, chunk.sequence.cached + chunk.count)
        for start, chunk in zip(starts, plan.prefills, strict=False)
    ]


def _flatten(plan: StepPlan) -> tuple[list[int], list[int], list[int], list[int]]:
    """Return tokens, rows and positions of a step, and after which of them a token is drawn."""
    tokens = [sequence.tokens[sequence.cached] for sequence in plan.ready]
    rows = list(range(len(tokens)))
    positions = [sequence.cached for sequence in plan.ready]
    last = list(rows)
    for chunk in plan.prefills:
        sequence, start = chunk.sequence, chunk.sequence.cached
        tokens += sequence.tokens[start : start + chunk.count]
        rows += [sequence.row] * chunk.count
        positions += range(start, start + chunk.count)
        if chunk.draws:
            last.append(len(tokens) - 1)
    return tokens, rows, positions, last


def choose_compute_dtype(settings: NativeSettings) -> torch.dtype:
    """Return the type of products, for fp8 of all others. Raises `ConfigError` for what a CPU would do very slowly."""
    if settings.dtype == "float32" or (settings.dtype == "fp8" and settings.device == "cpu"):
        return torch.float32
    if settings.device != "cpu":
        return torch.float16 if settings.dtype == "float16" else torch.bfloat16
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        raise ConfigError("this CPU has no bfloat16 instructions", key="dtype", value="bfloat16", hint="float32")
    return torch.bfloat16
