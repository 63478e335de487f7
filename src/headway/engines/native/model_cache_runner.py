"""Runs one step of any `transformers` decoder, one sequence after the other, through the model's own cache.

This is the slow path, for models whose tokens interact elsewhere than in an attention that can be replaced. What a
sequence has computed (keys and values, recurrent states) is its `SequenceCache`. A prompt is computed in one forward
pass, because many recurrent layers cannot continue a prompt in the middle.

Guarantees: sequences never meet in a forward pass. Before the first draw the cache is compared with a plain forward
pass under the served weights: where they differ, or where there is no cache, each token computes its whole sequence
again, which one line says.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from headway.engines.native import token_sampler
from headway.engines.native.kv_slots import KvCacheMoves, NativeSequence
from headway.engines.native.native_scheduler import StepPlan
from headway.engines.native.recorded_routing import ReadRouting
from headway.engines.native.served_parameters import ServedParameters, ServedValues
from headway.engines.native.settings import NativeSettings
from headway.errors import ConfigError
from headway.models.expert_routing import RoutingRecorder, find_mixture
from headway.models.model_checks import print_once
from headway.types import ExpertRouting, FinishReason

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_CACHE_NAMES = ("past_key_values", "cache_params", "state")
"""Names under which models return their cache, and take it back."""
_PROBE_TOKENS, _PROBE_STEPS = 24, 8
_PROBE_DIFFERENCE = {torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.3}
"""Largest accepted difference between log-probabilities with and without the cache, by the type of the computation."""


@dataclass(slots=True)
class SequenceCache:
    """What a model has computed of the first `length` tokens of one sequence, under the name it is passed by."""

    name: str
    value: Any
    length: int


class NoKvMoves:
    """A `KvCacheMoves` of caches that belong to sequences and not to rows: there is nothing to move."""

    def copy(self, source: int, target: int, length: int) -> None: ...

    def exchange(self, one: int, one_length: int, other: int, other_length: int) -> None: ...

    def save(self, prefix: int, row: int, length: int) -> None: ...

    def restore(self, prefix: int, row: int, length: int) -> None: ...

    def drop(self, prefix: int) -> None: ...


class ModelCacheRunner:
    """Any `transformers` decoder on one device. Used by one thread; `parameters` may be read by another."""

    def __init__(self, model: PreTrainedModel, parameters: ServedParameters, settings: NativeSettings) -> None:
        limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        if limit is not None and settings.slot_tokens > limit:
            raise ConfigError(f"the model knows {limit} positions", key="slot_tokens", value=settings.slot_tokens)
        self._model = model.eval()
        self._parameters = parameters
        self._device = torch.device(settings.device)
        self._known = inspect.signature(model.forward).parameters
        self._caches: dict[int, SequenceCache] = {}
        """Caches of the sequences that decode, by the number of the sequence."""
        self._cached: bool | None = None
        """Whether the cache of the model is used; not known before the first draw."""
        self.kv_moves: KvCacheMoves = NoKvMoves()
        mixture = find_mixture(model)
        self._recorder = None if mixture is None else RoutingRecorder(mixture)
        self._routing: dict[int, Tensor] = {}
        """Experts of all tokens of each sequence that decodes, by the number of the sequence."""
        self._slot_tokens = settings.slot_tokens

    def install(self, values: ServedValues) -> None:
        """Serve other weights from the next step on; running sequences keep what the old ones have computed."""
        self._parameters.install(values)

    @torch.inference_mode()
    def step(self, plan: StepPlan) -> tuple[list[int], list[float]]:
        """Return tokens and log-probabilities of `plan.drawing`."""
        drawing = plan.drawing
        running = {sequence.number for sequence in plan.ready}
        self._caches = {number: kept for number, kept in self._caches.items() if number in running}
        self._routing = {number: kept for number, kept in self._routing.items() if number in running}
        if not drawing:
            return [], []
        if self._cached is None:
            self._cached = self._try_cache(drawing[0].tokens)
        logits_NV = torch.stack([self._compute_logits(sequence) for sequence in drawing])
        return token_sampler.sample_tokens(logits_NV, [s.params for s in drawing], [s.next_uniform() for s in drawing])

    def _compute_logits(self, sequence: NativeSequence) -> Tensor:
        """Return the logits after the last token of a sequence, on the host, float32."""
        kept = self._caches.pop(sequence.number, None)
        if kept is not None and kept.length + 1 != len(sequence.tokens):
            kept = None
        if self._recorder is not None:
            if sequence.number not in self._routing:
                self._routing[sequence.number] = self._recorder.make_store(self._slot_tokens, self._device)
            self._recorder.store = self._routing[sequence.number]
        logits_V, found = self._forward(sequence.tokens, kept, use_cache=bool(self._cached))
        if found is not None:
            self._caches[sequence.number] = found
        return logits_V

    @property
    def read_routing(self) -> ReadRouting | None:
        """What reads the experts of a sequence; None where the model has none."""
        return None if self._recorder is None else self._read_routing

    def _read_routing(self, sequence: NativeSequence, finish: FinishReason) -> ExpertRouting | None:
        store, last = self._routing.get(sequence.number), len(sequence.tokens) - 1
        if store is None or self._recorder is None:
            return None
        return self._recorder.pack(store[sequence.routed : last], sequence.routed)

    def _forward(
        self, tokens: list[int], kept: SequenceCache | None, *, use_cache: bool
    ) -> tuple[Tensor, SequenceCache | None]:
        """Compute the tokens that are not in `kept`; returns the logits after the last one, and the longer cache."""
        first = 0 if kept is None else kept.length
        inputs: dict[str, Any] = {"input_ids": torch.tensor([tokens[first:]], device=self._device)}
        if "position_ids" in self._known:
            inputs["position_ids"] = torch.arange(first, len(tokens), device=self._device)[None]
        if "logits_to_keep" in self._known:
            inputs["logits_to_keep"] = 1
        if kept is not None:
            inputs[kept.name] = kept.value
        if self._recorder is not None:
            self._recorder.rows = torch.arange(first, len(tokens), device=self._device)
        output = self._model(**inputs, use_cache=use_cache)
        logits_V = output.logits[0, -1].float().cpu()
        name = next((name for name in _CACHE_NAMES if output.get(name) is not None), None) if use_cache else None
        return logits_V, None if name is None else SequenceCache(name, output[name], len(tokens))

    def _try_cache(self, tokens: list[int]) -> bool:
        """Return whether the model computes the same with its cache as without, on the first tokens it is asked for."""
        probe = (tokens * _PROBE_TOKENS)[:_PROBE_TOKENS]
        worst, kept = 0.0, None
        try:
            for length in range(_PROBE_TOKENS - _PROBE_STEPS, _PROBE_TOKENS + 1):
                logits_V, kept = self._forward(probe[:length], kept, use_cache=True)
                plain_V, _ = self._forward(probe[:length], None, use_cache=False)
                worst = max(worst, float((logits_V.log_softmax(-1) - plain_V.log_softmax(-1)).abs().max()))
                problem = "it has no cache" if kept is None else ""
        except (RuntimeError, ValueError, TypeError, IndexError, AttributeError) as error:
            problem = f"its cache fails: {error}"
        dtype = next((p.dtype for p in self._model.parameters()), torch.float32)
        if not problem and not worst <= _PROBE_DIFFERENCE.get(dtype, 0.3):
            problem = f"its cache changes log-probabilities by {worst:.2g}"
        if problem:
            name = type(self._model).__name__
            print_once(f"{name} is very slow here: every token computes its whole sequence again, because {problem}")
        return not problem
