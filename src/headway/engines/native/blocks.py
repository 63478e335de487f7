"""An engine's core that works in blocks of steps, one launched while the one before it is read.

Guarantees are those of `Core`. Between a launch and its landing the scheduler knows less than the device: a sequence
that has ended there keeps its lane for one more block and draws nothing in it. Other weights are queued behind the
block in flight and the next block behind them, so that the device waits for nobody; each block carries its version.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from headway.engines.native.block_kv import BlockKv
from headway.engines.native.block_runner import BlockRunner, Flight
from headway.engines.native.core import Core
from headway.engines.native.decoders import Decoder, decoder_of
from headway.engines.native.device_parameters import DeviceParameters
from headway.engines.native.kv import kv_shape
from headway.engines.native.ops import Ops, TorchOps
from headway.engines.native.runner import compute_dtype
from headway.engines.native.scheduler import Delivery, Scheduler
from headway.engines.native.settings import NativeSettings
from headway.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

HELD_BACK = 1
"""Of a prompt's tokens the last is decoded, not filled: only steps draw."""


class BlockCore(Core):
    """One replica's state."""

    def __init__(self, scheduler: Scheduler, runner: BlockRunner) -> None:
        super().__init__(scheduler, runner.install)
        self._blocks = runner
        self._flight: tuple[Flight, int] | None = None
        """With the version that makes it."""

    @property
    def runnable(self) -> bool:
        return super().runnable or self._flight is not None

    def _settled(self) -> list[Delivery]:
        """With the block in flight."""
        return [*self._land(None), *super()._settled()]

    def step(self) -> list[Delivery]:
        plan = self.scheduler.plan()
        flight = self._blocks.launch(plan)
        self.scheduler.filled(plan)
        self.steps += 1
        return self._land(flight)

    def _land(self, following: Flight | None) -> list[Delivery]:
        flown, self._flight = self._flight, None if following is None else (following, self.version)
        if flown is None:
            return []
        flight, self.made_by = flown
        made = self.scheduler.landed(flight.ready, self._blocks.land(flight))
        return made if self.made_by == self.version else [*made, *self.scheduler.flush()]


def assemble(
    model: PreTrainedModel,
    settings: NativeSettings,
    eos: frozenset[int],
    decoder: Callable[[PreTrainedModel, Ops, int], Decoder] = decoder_of,
) -> tuple[DeviceParameters, BlockRunner]:
    """A model's parameters and its runner on the device that the settings name."""
    device, dtype = _device(settings), compute_dtype(settings)
    parameters = DeviceParameters(model, dtype, device)
    model.to(device=device)
    shape = kv_shape(model.config.get_text_config(), settings.slot_tokens)
    _check_memory(settings, shape, dtype, parameters, device)
    kv = BlockKv(
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


def _ops(device: torch.device) -> Ops:
    if device.type == "cpu":
        return TorchOps()
    from headway.engines.native.triton_ops import TritonOps

    return TritonOps()


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
