"""One step of the model: a flat batch forward, then a draw for every sequence that is due.

Guarantees: what it computes for one sequence depends on no other, up to rounding. Weights change only between two
steps, by pointers. Knows rows and positions, never a queue; other devices bring another runner with the same methods.
"""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from headway.engines.native import attention, sampler
from headway.engines.native.attention import Piece, StepView, own_config
from headway.engines.native.kv import kv_memory
from headway.engines.native.parameters import Parameters, Values
from headway.engines.native.scheduler import Plan
from headway.engines.native.settings import NativeSettings
from headway.engines.native.slots import KvMoves
from headway.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Runner(Protocol):
    """What the core asks of a device."""

    @property
    def moves(self) -> KvMoves:
        """The memory that slots are moved in."""
        ...

    def step(self, plan: Plan) -> tuple[list[int], list[float]]:
        """Tokens and log-probabilities of `plan.drawn`."""
        ...

    def install(self, values: Values) -> None:
        """Serve other weights from the next step on."""
        ...


class ModelRunner:
    """A `transformers` decoder on the CPU. Lives in one thread; `parameters` may be read by another."""

    def __init__(self, model: PreTrainedModel, parameters: Parameters, settings: NativeSettings) -> None:
        attention.register()
        own_config(model)
        model.set_attn_implementation(attention.NAME)
        config = model.config.get_text_config()
        dtype = compute_dtype(settings)
        self._model = model
        model.train(False)
        self._parameters = parameters
        self._kv = kv_memory(config, slots=settings.slots, slot_tokens=settings.slot_tokens, dtype=dtype)
        self._changes = -1
        self._ends: list[int] = []

    @property
    def moves(self) -> KvMoves:
        return self._kv

    def install(self, values: Values) -> None:
        self._parameters.install(values)

    @torch.inference_mode()
    def step(self, plan: Plan) -> tuple[list[int], list[float]]:
        tokens, rows, positions, last = _flat(plan)
        pieces = self._pieces(plan)
        view = StepView(self._kv, torch.tensor(rows), torch.tensor(positions), self._segments(plan), pieces)
        logits_NV = self._forward(torch.tensor([tokens]), view, last)
        drawn = plan.drawn
        if not drawn:
            return [], []
        return sampler.draw(logits_NV, [s.params for s in drawn], [s.uniform() for s in drawn])

    def _forward(self, tokens_1T: Tensor, view: StepView, last: list[int]) -> Tensor:
        output = self._model(
            input_ids=tokens_1T,
            position_ids=view.positions_T[None],
            use_cache=False,
            logits_to_keep=torch.tensor(last or [0]),  # the head wants a row even where nothing is drawn
            view=view,
        )
        logits_NV: Tensor = output.logits[0].float()
        return logits_NV

    def _segments(self, plan: Plan) -> list[Piece]:
        """Ready rows of similar length; cut anew only when others have joined or left, as all grow together."""
        lengths = [sequence.cached + 1 for sequence in plan.ready]
        if self._changes != plan.changes:
            self._changes, self._ends = plan.changes, attention.cuts(lengths)
        return [Piece(first, last, first, max(lengths[first:last])) for first, last in pairwise([0, *self._ends])]

    def _pieces(self, plan: Plan) -> list[Piece]:
        starts = accumulate((fill.count for fill in plan.fills), initial=len(plan.ready))
        return [
            Piece(start, start + fill.count, fill.sequence.row, fill.sequence.cached + fill.count)
            for start, fill in zip(starts, plan.fills, strict=False)
        ]


def _flat(plan: Plan) -> tuple[list[int], list[int], list[int], list[int]]:
    """Tokens, rows and positions of a step, and which of them are drawn after."""
    tokens = [sequence.tokens[sequence.cached] for sequence in plan.ready]
    rows = list(range(len(tokens)))
    positions = [sequence.cached for sequence in plan.ready]
    last = list(rows)
    for fill in plan.fills:
        sequence, start = fill.sequence, fill.sequence.cached
        tokens += sequence.tokens[start : start + fill.count]
        rows += [sequence.row] * fill.count
        positions += range(start, start + fill.count)
        if fill.draws:
            last.append(len(tokens) - 1)
    return tokens, rows, positions, last


def compute_dtype(settings: NativeSettings) -> torch.dtype:
    """What is multiplied in. CPUs without the instructions are hundreds of times slower in bfloat16: refused."""
    if settings.dtype == "float32":
        return torch.float32
    if settings.device != "cpu":
        return torch.float16 if settings.dtype == "float16" else torch.bfloat16
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        raise ConfigError("this CPU has no bfloat16 instructions", key="dtype", value="bfloat16", hint="float32")
    return torch.bfloat16
