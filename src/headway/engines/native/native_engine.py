"""A replica of our own, as the hub sees it. All torch work is done by its worker's thread; nothing here blocks.

Guarantees: actions are entered into a `Progress` in order, in stretches of one version; nothing is entered after
`generate` has returned or raised; an abort keeps what was made; an error in the model is `EngineCrashed` for
everybody, an unserviceable request is `EngineError` for itself only. A flip keeps the KV of running sequences. Whoever
ran out of memory comes back with half the slots.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from headway.engines.base import Progress, Request, check_request
from headway.engines.engine_thread import EngineThread
from headway.engines.native import native_core
from headway.engines.native.native_core import EngineCore, StepCore
from headway.engines.native.native_receiver import NativeReceiver, OpenPayload
from headway.engines.native.native_scheduler import NativeScheduler, RequestUpdate
from headway.engines.native.native_sequence import NativeSequence
from headway.engines.native.served_linear import choose_fastest_layout
from headway.engines.native.served_parameters import ServedParameters, ServedValues
from headway.engines.native.settings import NativeSettings
from headway.engines.native.step_runner import DecodeRunner, StepRunner, choose_compute_dtype
from headway.engines.stop_strings import DecodeTokens, StopStrings
from headway.errors import EngineCrashed, EngineError
from headway.models.model_checks import check_attention, check_rotation
from headway.types import FinishReason
from headway.weights.base import WeightReceiver

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_END_S = 10.0
"""How long a worker may take to end before it is left behind."""

HasStopped = Callable[[NativeSequence], bool]
MakeCore = Callable[
    ["PreTrainedModel", NativeSettings, frozenset[int], HasStopped], tuple[ServedParameters, EngineCore]
]
"""From a model, its ends and a search for stop strings to everything a worker needs."""
MakeRunner = Callable[["PreTrainedModel", ServedParameters, NativeSettings], DecodeRunner]
SwitchWeights = Callable[[int, Mapping[str, Tensor]], Awaitable[None]]
"""Serve these tensors, in any dtype, as this version, between two tokens."""


class ResettableReceiver(WeightReceiver, Protocol):
    """A receiver that can be told what became of its engine."""

    def reset(self, *, gone: bool) -> None:
        """Forget everything: the engine crashed (`gone`) or came back empty."""
        ...


MakeReceiver = Callable[[SwitchWeights], ResettableReceiver]


class _Ticket:
    """One call of `generate`."""

    __slots__ = ("end", "number", "progress", "request_id")

    def __init__(self, request_id: str, number: int, progress: Progress) -> None:
        self.request_id = request_id
        self.number = number
        self.progress = progress
        self.end: asyncio.Future[FinishReason] = asyncio.get_running_loop().create_future()

    def fail(self, error: BaseException) -> None:
        if not self.end.done():
            self.end.set_exception(error)
            self.end.exception()

    def finish(self, finish: FinishReason) -> None:
        if not self.end.done():
            self.end.set_result(finish)


class NativeEngine:
    """`model` makes the architecture, its weights do not matter; `decode` is needed for stop strings only.

    `read` opens payloads that are not buffers themselves. `receiver` puts another receiver in the place of our own,
    `around` something before it.
    On the CPU `runner` computes, one step at a time; on a GPU blocks of steps do. `assembly` says otherwise.
    """

    def __init__(
        self,
        name: str,
        model: Callable[[], PreTrainedModel],
        settings: NativeSettings | None = None,
        *,
        decode: DecodeTokens | None = None,
        eos: Iterable[int] | None = None,
        runner: MakeRunner = StepRunner,
        assembly: MakeCore | None = None,
        receiver: MakeReceiver | None = None,
        read: OpenPayload = memoryview,
        around: Callable[[WeightReceiver], WeightReceiver] = lambda receiver: receiver,
    ) -> None:
        self.name = name
        self._model = model
        self._settings = settings or NativeSettings()
        self._decode = decode
        self._eos = None if eos is None else frozenset(eos)
        self._ends: frozenset[int] = self._eos or frozenset()
        """Tokens that end a sequence; the model's own where none were given."""
        self._assemble = assembly or (make_block_core if self._settings.device != "cpu" else make_step_core(runner))
        self._receiver: ResettableReceiver = (
            NativeReceiver(self._parameters, self._switch, threads=self._settings.threads, read=read)
            if receiver is None
            else receiver(self.switch)
        )
        self._entrance = around(self._receiver)
        self._tickets: dict[int, _Ticket] = {}
        self._by_id: dict[str, _Ticket] = {}
        self._numbers = count()
        self._worker: EngineThread | None = None
        self._built: asyncio.Future[ServedParameters] | None = None
        self._down = False
        self._closed = False

    @property
    def slots(self) -> int:
        return self._settings.slots

    @property
    def receiver(self) -> WeightReceiver:
        return self._entrance

    # What the hub calls.

    async def generate(self, request: Request, progress: Progress) -> FinishReason:
        sequence = self._accepted(request, progress)
        finish = sequence.finish(self._ends)
        if finish is not None:
            return finish
        ticket = _Ticket(request.request_id, sequence.number, progress)
        self._tickets[ticket.number] = self._by_id[ticket.request_id] = ticket
        try:
            self._running().ask(lambda core: core.add(sequence))
            return await ticket.end
        finally:
            if self._forget(ticket) and not (self._down or self._closed):  # cancelled
                self._running().ask(lambda core: core.abort(ticket.number))

    async def abort(self, request_id: str) -> None:
        ticket = self._by_id.get(request_id)
        if ticket is not None and not (self._down or self._closed):
            await self._running().ask(lambda core: core.abort(ticket.number))

    async def pause(self) -> None:
        await self._running().ask(lambda core: core.pause())

    async def resume(self) -> None:
        if not (self._down or self._closed):
            await self._running().ask(lambda core: core.resume())

    async def start(self) -> None:
        """Do nothing: the first weights or the first request start the worker thread."""

    async def restart(self) -> None:
        if self._closed:
            raise EngineCrashed(f"{self.name} is closed")
        worker = self._worker
        self._die(EngineCrashed(f"{self.name} is restarted"))
        if worker is not None and self._settings.device != "cpu":  # its memory is needed again
            await worker.ended(_END_S)
        self._down = False
        self._receiver.reset(gone=False)
        try:
            await self._parameters()
        except Exception as error:
            self._die(EngineCrashed(f"{self.name} does not come up: {error}"))
            raise EngineCrashed(f"{self.name} does not come up: {error}") from error

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        worker, self._worker = self._worker, None
        if worker is not None:
            await asyncio.wait([worker.ask(lambda core: core.pause())], timeout=_END_S)
            worker.stop(EngineCrashed(f"{self.name} is closed"))
        for ticket in list(self._tickets.values()):
            self._forget(ticket)
            ticket.finish(FinishReason.ABORTED)
        self._receiver.reset(gone=True)
        if worker is not None:
            await worker.ended(_END_S)

    # What the worker tells.

    def delivered(self, news: list[RequestUpdate], version: int) -> None:
        for delivery in news:
            ticket = self._tickets.get(delivery.number)
            if ticket is None:
                continue
            ticket.progress.extend(delivery.actions, delivery.logps, version)
            if delivery.finish is not None:
                self._forget(ticket)
                ticket.finish(delivery.finish)

    def crashed(self, worker: EngineThread, error: BaseException) -> None:
        if worker is self._worker:
            if isinstance(error, torch.OutOfMemoryError):
                self._settings = halve_batch(self._settings)
            crash = EngineCrashed(f"{self.name}: {type(error).__name__}: {error}")
            crash.__cause__ = error
            self._die(crash)

    # Inside.

    def _accepted(self, request: Request, progress: Progress) -> NativeSequence:
        """The request as a sequence of this replica's, or why not."""
        self._check_up()
        where = f"{self.name}: {request.request_id}"
        check_request(
            request,
            where,
            version=self._receiver.version,
            running=request.request_id in self._by_id,
            decodes=self._decode is not None,
        )
        length, room = len(request.prompt) + len(progress.actions), self._settings.slot_tokens
        if length >= room:
            parts = f"{len(request.prompt)} of the prompt and {len(progress.actions)} generated"
            raise EngineError(f"{where}: {length} tokens ({parts}) leave no room in a slot of {room}")
        return NativeSequence(
            request, progress.actions, number=next(self._numbers), slot_tokens=room, seed=self._settings.seed
        )

    async def _parameters(self) -> ServedParameters:
        self._running()
        assert self._built is not None
        return await asyncio.shield(self._built)

    async def switch(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """For receivers that are not our own: lay `tensors` out for serving beside the running steps, then flip."""
        parameters = await self._parameters()
        await self._switch(await asyncio.to_thread(parameters.prepared, tensors), version)

    async def _switch(self, values: ServedValues, version: int) -> None:
        await self._running().ask(lambda core: core.flip(values, version))

    def _running(self) -> EngineThread:
        self._check_up()
        if self._worker is None:
            built = self._built = asyncio.get_running_loop().create_future()
            loop = asyncio.get_running_loop()
            self._worker = EngineThread(
                self.name, lambda: self._build(lambda made: loop.call_soon_threadsafe(_fulfil, built, made)), self
            )
        return self._worker

    def _build(self, announce: Callable[[ServedParameters], object]) -> EngineCore:
        """In the worker's thread: model, runner and scheduler, all new."""
        torch.set_num_threads(self._settings.threads)
        model = self._model()
        self._ends = self._eos if self._eos is not None else _ends_of(model)
        stopped = StopStrings(self._decode) if self._decode is not None else lambda sequence: False
        parameters, core = self._assemble(model, self._settings, self._ends, stopped)
        announce(parameters)
        return core

    def _forget(self, ticket: _Ticket) -> bool:
        """Whether it was still known."""
        if self._by_id.get(ticket.request_id) is ticket:
            del self._by_id[ticket.request_id]
        return self._tickets.pop(ticket.number, None) is not None

    def _die(self, error: EngineCrashed) -> None:
        """Lose everything."""
        self._down = True
        worker, self._worker = self._worker, None
        built, self._built = self._built, None
        self._receiver.reset(gone=True)
        if worker is not None:
            worker.stop(error)
        if built is not None and not built.done():
            built.set_exception(error)
            built.exception()
        for ticket in list(self._tickets.values()):
            self._forget(ticket)
            ticket.fail(error)

    def _check_up(self) -> None:
        if self._down or self._closed:
            raise EngineCrashed(f"{self.name} is {'closed' if self._closed else 'down'}")


def halve_batch(settings: NativeSettings) -> NativeSettings:
    """For an engine that ran out of memory: half as much at once."""
    return replace(settings, slots=max(1, settings.slots // 2), prefill_tokens=max(16, settings.fill_tokens // 2))


def make_step_core(runner: MakeRunner) -> MakeCore:
    """Every step is looked at: on a CPU a look costs nothing beside it."""

    def assemble(
        model: PreTrainedModel, settings: NativeSettings, eos: frozenset[int], stopped: HasStopped
    ) -> tuple[ServedParameters, EngineCore]:
        _check(model, settings)
        dtype = choose_compute_dtype(settings)
        parameters = ServedParameters(model, choose_fastest_layout(dtype), dtype)
        made = runner(model, parameters, settings)
        return parameters, StepCore(NativeScheduler(settings, made.moves, eos=eos, stopped=stopped), made)

    return assemble


def make_block_core(
    model: PreTrainedModel, settings: NativeSettings, eos: frozenset[int], stopped: HasStopped
) -> tuple[ServedParameters, EngineCore]:
    """Several steps between two looks."""
    _check(model, settings)
    parameters, runner = native_core.make_block_runner(model, settings, eos)
    scheduler = NativeScheduler(
        settings, runner.moves, eos=eos, stopped=stopped, held_back=native_core.HELD_BACK_TOKENS
    )
    return parameters, native_core.BlockCore(scheduler, runner)


def _check(model: PreTrainedModel, settings: NativeSettings) -> None:
    """Both of ours put their own attention into the model; an assembly of others knows what it does."""
    check_attention(model)
    check_rotation(model.config, settings.slot_tokens)


def _fulfil(future: asyncio.Future[ServedParameters], value: ServedParameters) -> None:
    if not future.done():
        future.set_result(value)


def _ends_of(model: PreTrainedModel) -> frozenset[int]:
    """The tokens that a model's configuration calls the end."""
    found: set[int] = set()
    for config in (model.generation_config, model.config):
        ends = getattr(config, "eos_token_id", None)
        found.update([ends] if isinstance(ends, int) else ends or [])
    return frozenset(found)
