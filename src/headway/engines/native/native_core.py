"""Scheduler and runner together, one step at a time: an engine without threads or a clock.

Everything here runs in one thread. What it returns are deliveries: news of requests, each made by one version.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from headway.engines.native.block_ops import BlockOps, TorchBlockOps
from headway.engines.native.block_runner import BlockInFlight, BlockRunner
from headway.engines.native.kv_cache import LaneKvCache, read_kv_shape
from headway.engines.native.model_decoders import BlockDecoder, make_decoder
from headway.engines.native.native_scheduler import NativeScheduler, RequestUpdate
from headway.engines.native.native_sequence import NativeSequence
from headway.engines.native.served_parameters import DeviceParameters, ServedValues
from headway.engines.native.settings import NativeSettings
from headway.engines.native.step_runner import DecodeRunner, choose_compute_dtype
from headway.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class EngineCore(ABC):
    """One replica's state. `install` serves other weights from the next step on."""

    def __init__(self, scheduler: NativeScheduler, install: Callable[[ServedValues], None]) -> None:
        self.scheduler = scheduler
        self.version = -1
        self.made_by = -1
        """The version behind what was returned last."""
        self.steps = 0
        self._install = install
        self._paused = False

    @property
    def runnable(self) -> bool:
        """Whether `step` would do anything."""
        return not self._paused and self.scheduler.busy

    def add(self, sequence: NativeSequence) -> list[RequestUpdate]:
        """Take a request in."""
        self.scheduler.add(sequence)
        return []

    def abort(self, number: int) -> list[RequestUpdate]:
        """End a sequence here and now."""
        delivery = self.scheduler.remove(number)
        return [] if delivery is None else [delivery]

    def pause(self) -> list[RequestUpdate]:
        """No more steps until `resume`; everything made so far is delivered."""
        self._paused = True
        return self._settled()

    def resume(self) -> list[RequestUpdate]:
        """Steps again."""
        self._paused = False
        return []

    def flip(self, values: ServedValues, version: int) -> list[RequestUpdate]:
        """Serve other weights from the next step on; what is delivered was made by the old ones."""
        self._install(values)
        made = self.scheduler.flush()
        self.scheduler.other_weights()
        self.version = version
        return made

    def _settled(self) -> list[RequestUpdate]:
        """Everything made so far."""
        return self.scheduler.flush()

    @abstractmethod
    def step(self) -> list[RequestUpdate]:
        """Something for everyone who is due."""


class StepCore(EngineCore):
    """One token at a time, each looked at."""

    def __init__(self, scheduler: NativeScheduler, runner: DecodeRunner) -> None:
        super().__init__(scheduler, runner.install)
        self._runner = runner

    def step(self) -> list[RequestUpdate]:
        """One token for everyone who is due."""
        plan = self.scheduler.plan()
        tokens, logps = self._runner.step(plan)
        self.steps += 1
        self.made_by = self.version
        return self.scheduler.commit(plan, tokens, logps)


HELD_BACK_TOKENS = 1
"""Of a prompt's tokens the last is decoded, not filled: only steps draw."""


class BlockCore(EngineCore):
    """One replica's state."""

    def __init__(self, scheduler: NativeScheduler, runner: BlockRunner) -> None:
        super().__init__(scheduler, runner.install)
        self._blocks = runner
        self._flight: tuple[BlockInFlight, int] | None = None
        """With the version that makes it."""

    @property
    def runnable(self) -> bool:
        return super().runnable or self._flight is not None

    def _settled(self) -> list[RequestUpdate]:
        """With the block in flight."""
        return [*self._land(None), *super()._settled()]

    def step(self) -> list[RequestUpdate]:
        plan = self.scheduler.plan()
        flight = self._blocks.launch(plan)
        self.scheduler.filled(plan)
        self.steps += 1
        return self._land(flight)

    def _land(self, following: BlockInFlight | None) -> list[RequestUpdate]:
        flown, self._flight = self._flight, None if following is None else (following, self.version)
        if flown is None:
            return []
        flight, self.made_by = flown
        made = self.scheduler.landed(flight.ready, self._blocks.land(flight))
        return made if self.made_by == self.version else [*made, *self.scheduler.flush()]


def make_block_runner(
    model: PreTrainedModel,
    settings: NativeSettings,
    eos: frozenset[int],
    decoder: Callable[[PreTrainedModel, BlockOps, int], BlockDecoder] = make_decoder,
) -> tuple[DeviceParameters, BlockRunner]:
    """A model's parameters and its runner on the device that the settings name."""
    device, dtype = _device(settings), choose_compute_dtype(settings)
    parameters = DeviceParameters(model, dtype, device)
    model.to(device=device)
    shape = read_kv_shape(model.config.get_text_config(), settings.slot_tokens)
    _check_memory(settings, shape, dtype, parameters, device)
    kv = LaneKvCache(
        **shape,
        slots=settings.slots,
        slot_tokens=settings.slot_tokens,
        kept_tokens=settings.kept_tokens,
        dtype=dtype,
        device=device,
    )
    ops = _ops(device)
    made = decoder(model, ops, settings.slot_tokens)
    return parameters, BlockRunner(made, ops, kv, parameters, settings, kv_heads=shape["heads"], eos=eos)


def _ops(device: torch.device) -> BlockOps:
    if device.type == "cpu":
        return TorchBlockOps()
    from headway.engines.native.triton_ops import TritonBlockOps

    return TritonBlockOps()


def _device(settings: NativeSettings) -> torch.device:
    device = torch.device(settings.device)
    if device.type != "cuda":
        return device
    if not torch.cuda.is_available():
        raise ConfigError("there is no GPU here", key="device", value=settings.device, hint="cpu")
    device = torch.device("cuda", device.index or 0)
    if device.index >= torch.cuda.device_count():
        raise ConfigError(f"there are {torch.cuda.device_count()} GPUs here", key="device", value=settings.device)
    torch.cuda.set_device(device)
    return device


def _check_memory(
    settings: NativeSettings, shape: dict[str, int], dtype: torch.dtype, parameters: Any, device: torch.device
) -> None:
    """Admission by memory is decided here, once: slots that exist have room for their longest sequence."""
    if device.type != "cuda":
        return
    token = 2 * shape["layers"] * shape["heads"] * shape["head_size"] * dtype.itemsize
    asked = (settings.slots * settings.slot_tokens + settings.kept_tokens) * token
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    free = torch.cuda.mem_get_info(device)[0] + unused - 2 * parameters.bytes
    if asked > free:
        fit = max(0, free - settings.kept_tokens * token) // (settings.slot_tokens * token)
        raise ConfigError(
            f"{asked / 2**30:.1f} GiB of KV beside two copies of the weights, {max(0, free) / 2**30:.1f} GiB are free",
            key="slots",
            value=settings.slots,
            hint=f"{fit} slots of {settings.slot_tokens} tokens fit",
        )
