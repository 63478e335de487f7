"""The cores of the native engine: scheduler and runner together.

`StepCore` runs one step at a time and reads each. `BlockCore` runs several decode steps per host synchronisation, and
launches one block while it reads the one before. Between a launch and its read the scheduler knows less than the
device: a sequence that has ended there keeps its lane for one more block and draws nothing in it. Other weights are
queued behind the block in flight and the next block behind them, so that the device never waits; each block carries
the version that makes it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from headway.engines.engine_thread import EngineCore, RequestUpdate
from headway.engines.native.block_ops import BlockOps
from headway.engines.native.block_runner import BlockInFlight, BlockRunner
from headway.engines.native.kv_cache import PagedKvCache, read_kv_shape
from headway.engines.native.kv_slots import RowSlots, SequenceSlots
from headway.engines.native.model_cache_runner import ModelCacheRunner
from headway.engines.native.model_decoders import BlockDecoder, GenericDecoder, make_decoder
from headway.engines.native.native_scheduler import HasStopped, NativeScheduler
from headway.engines.native.paged_slots import PagedSlots
from headway.engines.native.quantized_products import FP8, check_quantized_device
from headway.engines.native.recorded_routing import ReadRouting, RecordedPageMoves, RoutingScheduler, make_page_recorder
from headway.engines.native.served_adapters import add_adapters
from headway.engines.native.served_linear import choose_fastest_layout
from headway.engines.native.served_parameters import DeviceParameters, ServedParameters, ServedValues
from headway.engines.native.settings import NativeSettings
from headway.engines.native.step_runner import StepRunner, choose_compute_dtype
from headway.errors import ConfigError
from headway.models.model_checks import check_rotation, find_attention_problem, print_once

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NativeCore = EngineCore[NativeScheduler, ServedValues]
MakeCore = Callable[
    ["PreTrainedModel", NativeSettings, frozenset[int], HasStopped], tuple[ServedParameters, NativeCore]
]
"""Makes everything that the thread needs from a model, its end tokens and a search for stop strings."""
AnyStepRunner = StepRunner | ModelCacheRunner
MakeRunner = Callable[["PreTrainedModel", ServedParameters, NativeSettings], AnyStepRunner]
HELD_BACK_TOKENS = 1
"""The last token of a prompt is decoded, not prefilled, because only decode steps draw."""


class StepCore(NativeCore):
    """Runs one step per host synchronisation: on a CPU reading the result costs nothing beside the step."""

    def __init__(self, scheduler: NativeScheduler, runner: AnyStepRunner) -> None:
        super().__init__(scheduler, runner.install)
        self._runner = runner

    def step(self) -> list[RequestUpdate]:
        """Draw one token for every sequence that is due."""
        plan = self.scheduler.plan()
        tokens, logps = self._runner.step(plan)
        self.made_by = self.version
        return self.scheduler.commit(plan, tokens, logps)


class BlockCore(NativeCore):
    """Runs several decode steps per host synchronisation."""

    def __init__(self, scheduler: NativeScheduler, runner: BlockRunner) -> None:
        super().__init__(scheduler, runner.install)
        self._runner = runner
        self._in_flight: tuple[BlockInFlight, int] | None = None
        """The block that was launched last, with the version that makes it."""

    @property
    def runnable(self) -> bool:
        return super().runnable or self._in_flight is not None

    def _settle(self) -> list[RequestUpdate]:
        """Return everything made so far, the block in flight included."""
        return [*self._read_block(None), *super()._settle()]

    def hold(self) -> list[RequestUpdate]:
        updates = super().hold()
        self._runner.wait()
        return updates

    def step(self) -> list[RequestUpdate]:
        """Launch a block, then read the one before it."""
        plan = self.scheduler.plan()
        launched = self._runner.launch(plan)
        self.scheduler.commit_prefill(plan)
        return self._read_block(launched)

    def _read_block(self, launched: BlockInFlight | None) -> list[RequestUpdate]:
        """Enter what the block in flight has drawn; `launched` takes its place."""
        before, self._in_flight = self._in_flight, None if launched is None else (launched, self.version)
        if before is None:
            return []
        block, self.made_by = before
        updates = self.scheduler.commit_block(block.ready, self._runner.read(block))
        return updates if self.made_by == self.version else [*updates, *self.scheduler.flush()]


def make_step_core(make_runner: MakeRunner) -> MakeCore:
    """Return what makes a `StepCore` with this runner."""

    def make_core(
        model: PreTrainedModel, settings: NativeSettings, eos: frozenset[int], has_stopped: HasStopped
    ) -> tuple[ServedParameters, NativeCore]:
        check_rotation(model.config, settings.slot_tokens)
        if "fp8" in (settings.dtype, settings.kv_dtype):
            raise ConfigError("CPUs do not multiply it", key="dtype", value="fp8", hint="float32")
        if (reason := find_attention_problem(model, shorter_values=True)) is not None:
            return make_slow_core(model, settings, eos, has_stopped, reason)
        dtype = choose_compute_dtype(settings)
        layout, on_host = choose_fastest_layout(dtype), torch.device("cpu")
        parameters = add_adapters(model, partial(ServedParameters, model, layout, dtype), settings.adapters, on_host)
        runner = make_runner(model, parameters, settings)
        slots = RowSlots(settings, runner.kv_moves)
        return parameters, StepCore(_make_scheduler(settings, slots, eos, has_stopped, runner.read_routing), runner)

    return make_core


def make_block_core(
    model: PreTrainedModel, settings: NativeSettings, eos: frozenset[int], has_stopped: HasStopped
) -> tuple[ServedParameters, NativeCore]:
    """Make a `BlockCore` on the device that the settings name."""
    check_rotation(model.config, settings.slot_tokens)
    if (reason := find_attention_problem(model, shorter_values=True)) is not None:
        return make_slow_core(model, settings, eos, has_stopped, reason)
    parameters, runner = make_block_runner(model, settings, eos)
    return parameters, BlockCore(make_block_scheduler(settings, runner, eos, has_stopped), runner)


def make_block_scheduler(
    settings: NativeSettings, runner: BlockRunner, eos: frozenset[int], has_stopped: HasStopped
) -> NativeScheduler:
    """Return a scheduler of the pages that a runner has."""
    recorder = runner.recorder
    moves = runner.kv if recorder is None else RecordedPageMoves(runner.kv, recorder)
    slots = PagedSlots(settings, moves, held_back_tokens=HELD_BACK_TOKENS)
    read = None if recorder is None else recorder.read
    return _make_scheduler(settings, slots, eos, has_stopped, read, HELD_BACK_TOKENS)


def make_slow_core(
    model: PreTrainedModel,
    settings: NativeSettings,
    eos: frozenset[int],
    has_stopped: HasStopped,
    reason: str,
    make_runner: MakeRunner = ModelCacheRunner,
) -> tuple[ServedParameters, NativeCore]:
    """Make a `StepCore` that computes one sequence after the other, on any device, and say why in one line."""
    print_once(f"{type(model).__name__} is served slowly, one sequence after the other: {reason}")
    if "fp8" in (settings.dtype, settings.kv_dtype):
        print_once(f"{type(model).__name__} is served in bfloat16: fp8 has no effect on the slow path")
    device, dtype = _find_device(settings), choose_compute_dtype(settings)
    on_host = device.type == "cpu"
    parameters = ServedParameters(model, None, dtype) if on_host else DeviceParameters(model, dtype, device, None)
    model.to(device=device)
    settings = replace(settings, prefix_tokens=0)
    runner = make_runner(model, parameters, settings)
    slots = RowSlots(settings, runner.kv_moves)
    return parameters, StepCore(_make_scheduler(settings, slots, eos, has_stopped, runner.read_routing), runner)


def _make_scheduler(
    settings: NativeSettings,
    slots: SequenceSlots,
    eos: frozenset[int],
    has_stopped: HasStopped,
    read_routing: ReadRouting | None,
    held_back_tokens: int = 0,
) -> NativeScheduler:
    """Return a scheduler, which reports the experts of sequences where there is something that reads them."""
    kind = NativeScheduler if read_routing is None else RoutingScheduler
    scheduler = kind(settings, slots, eos=eos, has_stopped=has_stopped, held_back_tokens=held_back_tokens)
    if isinstance(scheduler, RoutingScheduler) and read_routing is not None:
        scheduler.read_routing = read_routing
    return scheduler


def make_block_runner(
    model: PreTrainedModel,
    settings: NativeSettings,
    eos: frozenset[int],
    make_block_decoder: Callable[[PreTrainedModel, BlockOps, int], BlockDecoder] = make_decoder,
) -> tuple[DeviceParameters, BlockRunner]:
    """Return a model's parameters and its runner on the device that the settings name."""
    device, dtype, quantized = _find_device(settings), choose_compute_dtype(settings), settings.dtype == "fp8"
    if quantized or settings.kv_dtype == "fp8":
        check_quantized_device(device)
    make_parameters = partial(DeviceParameters, model, dtype, device, quantized=quantized)
    parameters = add_adapters(model, make_parameters, settings.adapters, device)
    assert isinstance(parameters, DeviceParameters)
    model.to(device=device)
    shape = read_kv_shape(model.config.get_text_config(), settings.slot_tokens)
    kv = _make_kv_cache(settings, shape, FP8 if settings.kv_dtype == "fp8" else dtype, parameters, device)
    ops = _make_ops(device)
    decoder = make_block_decoder(model, ops, settings.slot_tokens)
    runner = BlockRunner(decoder, ops, kv, parameters, settings, kv_heads=shape["heads"], eos=eos)
    if isinstance(decoder, GenericDecoder):
        runner.recorder = decoder.recorder = make_page_recorder(model, kv)
    return parameters, runner


def _make_ops(device: torch.device) -> BlockOps:
    if device.type == "cpu":
        return BlockOps()
    from headway.engines.native.triton_ops import TritonBlockOps

    return TritonBlockOps()


def _find_device(settings: NativeSettings) -> torch.device:
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


def _make_kv_cache(
    settings: NativeSettings, shape: dict[str, int], dtype: torch.dtype, parameters: Any, device: torch.device
) -> PagedKvCache:
    """Return pages for all slots and prefixes, or as many as there is memory for: the longest sequence at least."""
    page = 2 * shape["layers"] * shape["heads"] * shape["head_size"] * dtype.itemsize * settings.page_tokens
    longest = -(-settings.slot_tokens // settings.page_tokens)
    wanted = 1 + settings.slots * longest + -(-settings.prefix_cache_tokens // settings.page_tokens)
    sets = 1 + settings.spare_weights
    memory, budget = _find_free_memory(sets * parameters.bytes, device), settings.kv_cache_bytes
    if budget is None:
        budget = wanted * page if memory is None else memory * 9 // 10
    pages = min(wanted, 1 + -(-budget // page))  # page 0 is nobody's, and a budget for a whole sequence is enough
    if pages < 1 + longest or (memory is not None and pages * page > memory):
        free = "" if memory is None else f", {max(0, memory) / 2**30:.1f} GiB are free beside {sets} × the weights"
        raise ConfigError(
            f"a sequence of {settings.slot_tokens} tokens needs {(1 + longest) * page / 2**30:.2f} GiB of KV{free}",
            key="kv_cache_bytes",
            value=settings.kv_cache_bytes,
        )
    host_bytes = settings.host_cache_bytes
    if host_bytes is None:
        host_bytes = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4
    return PagedKvCache(
        **shape,
        slots=settings.slots,
        slot_tokens=settings.slot_tokens,
        page_tokens=settings.page_tokens,
        pages=pages,
        host_pages=host_bytes // page,
        dtype=dtype,
        device=device,
    )


def _find_free_memory(weights: int, device: torch.device) -> int | None:
    """Return the bytes of a GPU that are free beside those of the weights; None on a CPU."""
    if device.type != "cuda":
        return None
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0] + unused - weights)
