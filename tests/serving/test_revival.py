"""Engines that die under `headway serve` come back with the weights."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from headway.engines.base import Progress, Request
from headway.errors import EngineCrashed
from headway.launch import inference_session
from headway.launch.inference_session import PreparedServing, open_serving_hub
from headway.rollout.inference_hub import InferenceHub
from headway.types import SamplingParams
from tests.serving.factory import ready


async def answer(hub: InferenceHub, made: PreparedServing, name: str) -> list[int]:
    progress = Progress()
    params = SamplingParams(max_new_tokens=5, temperature=0.0)
    prompt = made.template.encode("1+2=")
    await hub.generate(Request(request_id=name, session=name, prompt=prompt, params=params), progress)
    return list(progress.actions)


def test_an_engine_that_dies_is_restarted_with_its_weights(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inference_session, "_WATCH_INTERVAL_S", 0.01)

    async def main() -> None:
        made = ready(model)
        async with asyncio.timeout(60), open_serving_hub(made) as hub:
            (replica,) = hub.replicas
            before = await answer(hub, made, "a")
            hub.fail(replica, EngineCrashed("found dead by a request"))
            assert await answer(hub, made, "b") == before
            replica.engine.receiver.reset(gone=True)  # type: ignore[attr-defined]
            assert replica.version == -1, "without weights, and no request to show for it"
            assert await answer(hub, made, "c") == before

    asyncio.run(main())
