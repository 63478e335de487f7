"""What the scheduler of the native engine costs a token, without a GPU: the part `host` of `engine_gpu.py`."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch

from headway.engines.base import Progress, Request
from headway.engines.native.kv_cache import PagedKvCache
from headway.engines.native.kv_slots import NativeSequence
from headway.engines.native.native_core import BlockCore, make_block_scheduler
from headway.engines.native.native_scheduler import StepPlan
from headway.engines.native.settings import NativeSettings


class FakeBlocks:
    """Draws the same token for everyone, at once."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self.recorder = None
        self.kv = PagedKvCache(
            layers=1, slots=512, heads=1, slot_tokens=600, page_tokens=64, pages=6000, host_pages=0, head_size=1,
            dtype=torch.float32, device=torch.device("cpu"),
        )  # fmt: skip

    def install(self, values: Any) -> None: ...

    def launch(self, plan: StepPlan) -> Any:
        self.kv.settle()
        return plan if plan.ready else None

    def read(self, plan: StepPlan) -> list[Any]:
        block = np.zeros((len(plan.ready), 2 * self._steps), dtype=np.int32)
        tokens, logps = block[:, : self._steps].tolist(), block[:, self._steps :].view(np.float32).tolist()
        left = [sequence.limit - len(sequence.tokens) for sequence in plan.ready]
        return [(t[:n], p[:n]) for t, p, n in zip(tokens, logps, left, strict=True)]


def measure_host(asked: list[Request]) -> None:
    """Scheduler and core alone, then with the entering of deliveries."""
    settings = NativeSettings(slots=512, slot_tokens=600, prefill_tokens=8192, prefix_tokens=9000)
    fake: Any = FakeBlocks(settings.steps_per_sync)
    core = BlockCore(make_block_scheduler(settings, fake, frozenset(), lambda sequence: False), fake)
    begin = time.process_time()
    parts = {}
    for number, each in enumerate(asked):
        core.add(NativeSequence(each, (), number=number, slot_tokens=600))
        parts[number] = Progress()
    entering = time.process_time()
    entered, core_s, enter_s = 0, 0.0, 0.0
    while core.runnable:
        start = time.process_time()
        news = core.step()
        middle = time.process_time()
        for delivery in news:
            parts[delivery.number].extend(delivery.actions, delivery.logps, 0)
            entered += len(delivery.actions)
        enter_s += time.process_time() - middle
        core_s += middle - start
    print("\n## the host's share, 512 rows of 512 tokens")
    print(f"taking in {(entering - begin) / 512 * 1e6:.0f} µs a request")
    print(f"core {core_s / entered * 1e6:.3f} µs a token, entering {enter_s / entered * 1e6:.3f} µs a token")
