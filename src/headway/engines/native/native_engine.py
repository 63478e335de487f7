"""The native engine as the hub sees it. All torch work is done by its thread (`ThreadedEngine`).

A weight update keeps the KV of running sequences: they continue with what the old weights have computed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from headway.engines.base import DecodeTokens, Progress, Request, check_request, ends_with_stop_string
from headway.engines.engine_thread import EngineCore
from headway.engines.native.kv_slots import NativeSequence
from headway.engines.native.native_core import MakeCore, MakeRunner, make_block_core, make_step_core
from headway.engines.native.native_receiver import NativeReceiver
from headway.engines.native.served_parameters import ServedParameters
from headway.engines.native.settings import NativeSettings
from headway.engines.native.step_runner import StepRunner
from headway.engines.threaded_engine import MakeReceiver, ThreadedEngine
from headway.errors import EngineError
from headway.types import FinishReason
from headway.weights.base import OpenPayload, WeightReceiver

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_UNWATCHED_TOKENS = 32
"""Actions between two reports on a GPU where nobody watches the answer grow: every report costs the host some work."""


class NativeEngine(ThreadedEngine[ServedParameters]):
    """`model` makes the architecture, its weights do not matter; `decode` is needed for stop strings only.

    `open_payload` opens payloads that are not buffers themselves, and `release_payloads` closes what a version was read
    from. `make_receiver` makes another receiver than the engine's own, `wrap_receiver` puts one in front of it;
    `checks` lets it compute checksums of what is served. `make_core` makes what runs the model: by default a `StepCore`
    with `make_runner` on the CPU and a `BlockCore` on a GPU.
    """

    def __init__(
        self,
        name: str,
        model: Callable[[], PreTrainedModel],
        settings: NativeSettings | None = None,
        *,
        decode: DecodeTokens | None = None,
        eos: Iterable[int] | None = None,
        make_runner: MakeRunner = StepRunner,
        make_core: MakeCore | None = None,
        make_receiver: MakeReceiver | None = None,
        open_payload: OpenPayload = memoryview,
        release_payloads: Callable[[], object] | None = None,
        wrap_receiver: Callable[[WeightReceiver], WeightReceiver] = lambda receiver: receiver,
        checks: bool = False,
    ) -> None:
        super().__init__(name, settings or NativeSettings())
        self._model = model
        self._decode = decode
        self._configured_eos = None if eos is None else frozenset(eos)
        self._eos: frozenset[int] = self._configured_eos or frozenset()
        """Tokens that end a sequence; the model's own where none were given."""
        self._vocabulary = 0
        """Rows of the model's embedding, once there is a model."""
        self._make_core = make_core or (
            make_block_core if self._settings.device != "cpu" else make_step_core(make_runner)
        )
        self._receiver = (
            NativeReceiver(
                self._wait_until_built,
                self._flip,
                threads=self._settings.threads,
                open_payload=open_payload,
                checks=checks,
                release_payloads=release_payloads,
                hold=None if self._settings.spare_weights else self._hold,
            )
            if make_receiver is None
            else make_receiver(self.switch)
        )
        self._wrapped_receiver = wrap_receiver(self._receiver)

    @property
    def receiver(self) -> WeightReceiver:
        return self._wrapped_receiver

    async def switch(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Lay `tensors` out for serving beside the running steps, then serve them as `version`."""
        parameters = await self._wait_until_built()
        await self._flip(await asyncio.to_thread(parameters.prepare, tensors), version)

    def _accept(self, request: Request, progress: Progress) -> tuple[NativeSequence, FinishReason | None]:
        self._check_up()
        slot_tokens = self._settings.slot_tokens
        check_request(
            request,
            progress,
            f"{self.name}: {request.request_id}",
            version=self._receiver.version,
            running=request.request_id in self._by_id,
            decodes=self._decode is not None,
            most_tokens=slot_tokens,
        )
        if not 0 <= min(request.prompt) <= max(request.prompt) < self._vocabulary:  # a GPU would not survive it
            outside = next(token for token in request.prompt if not 0 <= token < self._vocabulary)
            raise EngineError(
                f"{self.name}: {request.request_id}: the prompt has token {outside}, and the model knows 0 to "
                f"{self._vocabulary - 1}: does the tokenizer belong to it?"
            )
        number, seed = next(self._numbers), self._settings.seed
        sequence = NativeSequence(request, progress.actions, number=number, slot_tokens=slot_tokens, seed=seed)
        sequence.routed = progress.routed_tokens
        if self._settings.device != "cpu" and progress.on_chunk is None:
            sequence.least_report = _UNWATCHED_TOKENS
        return sequence, sequence.find_finish(self._eos)

    def _build(self) -> tuple[ServedParameters, EngineCore[Any, Any]]:
        model = self._model()
        self._vocabulary = model.get_input_embeddings().weight.shape[0]
        self._eos = self._configured_eos if self._configured_eos is not None else _read_end_tokens(model)
        return self._make_core(model, self._settings, self._eos, self._has_stopped)

    def _has_stopped(self, sequence: NativeSequence) -> bool:
        """Return whether the last action completes a stop string."""
        return ends_with_stop_string(sequence.tokens, sequence.stops, self._decode, sequence.prompt_length)


def _read_end_tokens(model: PreTrainedModel) -> frozenset[int]:
    """Return the tokens that a model's configuration calls the end."""
    found: set[int] = set()
    for config in (model.generation_config, model.config):
        ends = getattr(config, "eos_token_id", None)
        found.update([ends] if isinstance(ends, int) else ends or [])
    return frozenset(found)
