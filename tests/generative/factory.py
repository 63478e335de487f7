"""Small flow models, engines that serve them, and groups of what they made."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from headway.engines.base import Engine, Progress, Request
from headway.engines.native import NativeSettings
from headway.generative.engine import FlowEngine
from headway.generative.models import MmditConfig, SmallMmdit
from headway.generative.row import Row
from headway.generative.runner import Denoising
from headway.generative.scheduler import Made
from headway.generative.settings import FlowSettings
from headway.types import FinishReason, SamplingParams

from ..engines.factory import HandOver, run, version_of

__all__ = ["HandOver", "run", "version_of"]

SHAPE = MmditConfig(height=8, width=8, patch=4, characters=4, dim=16, depth=1, heads=2, mlp_ratio=2.0)


def make_model(seed: int = 0, config: MmditConfig = SHAPE) -> SmallMmdit:
    """Random, and with a velocity that is not zero."""
    model = SmallMmdit(config, seed=seed)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        for one in (model.last_modulation, model.velocity):
            nn.init.normal_(one.weight, std=0.3)
    return model


class SlowDenoising(Denoising):
    """Takes its time for each step, counts them, and breaks when told to."""

    def __init__(self, *parts: Any, **options: Any) -> None:
        super().__init__(*parts, **options)
        self.steps = 0
        self.step_s = 0.005
        self.broken = False
        self.midway = threading.Event()
        """Set after a dozen steps."""

    def step(self, rows: Sequence[Row]) -> list[Made]:
        time.sleep(self.step_s)
        if self.broken:
            raise RuntimeError("the model broke")
        self.steps += 1
        if self.steps == 12:
            self.midway.set()
        return super().step(rows)


def make_engine(name: str = "engine/0", *, slots: int = 4, runner: Any = Denoising, **flow: Any) -> FlowEngine:
    return FlowEngine(name, make_model, FlowSettings(**flow), NativeSettings(slots=slots), runner=runner)


async def serve(engine: Engine, model: SmallMmdit, version: int = 0) -> None:
    """Load and flip."""
    manifest, buckets = version_of(model, version)  # type: ignore[arg-type]
    await engine.receiver.begin(manifest)
    for bucket in buckets:
        await engine.receiver.load(bucket)
    await engine.receiver.flip()


def request(
    name: str = "a", prompt: str = "17", *, group: int = -1, steps: int = 8, temperature: float = 1.0, **params: Any
) -> Request:
    return Request(
        request_id=name,
        session=name,
        prompt=tuple(prompt.encode()),
        params=SamplingParams(max_new_tokens=steps, temperature=temperature, **params),
        prefix_key=group,
    )


async def together(engine: Engine, requests: Sequence[Request]) -> list[Progress]:
    """All at once, to their ends."""
    parts = [Progress() for _ in requests]
    ends = await asyncio.gather(*(engine.generate(each, part) for each, part in zip(requests, parts, strict=True)))
    assert all(end is FinishReason.STOP for end in ends)
    return parts


def latent(data: bytes, config: MmditConfig = SHAPE) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.float32).view(config.channels, config.height, config.width)
