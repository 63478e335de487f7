"""An engine replica that denoises: requests for pictures instead of token sequences.

A request asks for `max_new_tokens` denoising steps. Its prompt is the text in UTF-8. Temperature 0 is the ODE; any
other temperature draws noise inside the window. Guarantees beyond those of `ThreadedEngine`: every step is an action of
the version that made it and is reported when it is made. Steps outside the window carry no latents and have a
log-probability of 0.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from headway.denoising.denoising_runner import DenoisingRunner
from headway.denoising.denoising_scheduler import DenoisingRequest, DenoisingScheduler
from headway.denoising.settings import DenoisingSettings
from headway.engines.base import Progress, Request
from headway.engines.engine_thread import EngineCore, RequestUpdate
from headway.engines.native.settings import NativeSettings
from headway.engines.threaded_engine import MakeReceiver, ThreadedEngine
from headway.errors import ConfigError, EngineError
from headway.types import FinishReason
from headway.weights.weight_receiver import DoubleBufferedReceiver

DenoisingRunnerFactory = Callable[..., DenoisingRunner]


class DenoisingCore(EngineCore[DenoisingScheduler, Mapping[str, Tensor]]):
    """Runs one denoising step of all requests at a time."""

    def __init__(self, scheduler: DenoisingScheduler, runner: DenoisingRunner) -> None:
        super().__init__(scheduler, runner.install)
        self.runner = runner

    def step(self) -> list[RequestUpdate]:
        requests, updates = self.scheduler.plan()
        results = self.runner.step(requests)
        self.made_by = self.version
        return updates + self.scheduler.commit(requests, results)


class DenoisingEngine(ThreadedEngine[None]):
    """`model` makes a `Denoiser` with any weights; `check` raises for prompts that the model cannot read.

    `open_payload` opens the payloads of buckets; `make_receiver` makes another receiver than the engine's own. The
    engine uses `slots`, `threads`, `seed`, `dtype` and `device` of `settings`.
    """

    def __init__(
        self,
        name: str,
        model: Callable[[], Any],
        denoising: DenoisingSettings,
        settings: NativeSettings | None = None,
        *,
        check: Callable[[str], object] = lambda prompt: None,
        make_runner: DenoisingRunnerFactory = DenoisingRunner,
        make_receiver: MakeReceiver | None = None,
        open_payload: Callable[[Any], Any] | None = None,
    ) -> None:
        super().__init__(name, settings or NativeSettings())
        self._model = model
        self._denoising = denoising
        self._check = check
        self._make_runner = make_runner
        make_receiver = make_receiver or partial(
            DoubleBufferedReceiver,
            dtype=getattr(torch, self._settings.dtype),
            device=self._settings.device,
            threads=self._settings.threads,
            open_payload=open_payload,
        )
        self._receiver = make_receiver(self.switch)
        self.core: DenoisingCore | None = None
        """The running core; tests and benchmarks read its counters."""

    async def switch(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Serve `tensors` from the next step on, without copying them."""
        await self._flip(tensors, version)

    def _build(self) -> tuple[None, DenoisingCore]:
        settings = self._settings
        prefix_slots = max(settings.slots // 4, 1)
        runner = self._make_runner(
            self._model(),
            self._denoising,
            slots=settings.slots + prefix_slots,
            device=settings.device,
            dtype=getattr(torch, settings.dtype),
        )
        self.core = DenoisingCore(DenoisingScheduler(settings.slots, prefix_slots, runner), runner)
        return None, self.core

    def _accept(self, request: Request, progress: Progress) -> tuple[DenoisingRequest, FinishReason | None]:
        self._check_up()
        where = f"{self.name}: {request.request_id}"
        if self._receiver.version < 0:
            raise EngineError(f"{where}: no weights to serve it with")
        if request.request_id in self._by_id:
            raise EngineError(f"{where} is already running")
        version = progress.runs[0].version if progress.runs else self._receiver.version
        params = request.params
        try:
            prompt = bytes(request.prompt).decode()
            self._check(prompt)
            draws_noise = params.temperature > 0
            window = (
                self._denoising.make_window(params.max_new_tokens, request.prefix_key, version) if draws_noise else None
            )
        except (ValueError, ConfigError) as error:
            raise EngineError(f"{where}: {error}") from error
        denoised = DenoisingRequest(
            request,
            progress.actions,
            number=next(self._numbers),
            prompt=prompt,
            window=window,
            seed=self._settings.seed,
            share_prefix=self._denoising.share_prefix,
            trains_end=draws_noise and self._denoising.window == "last",
        )
        return denoised, denoised.find_finish()
