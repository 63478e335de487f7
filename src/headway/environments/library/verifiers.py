"""Environments of the `verifiers` library (0.4 and later), played turn by turn.

The library plays an episode itself and asks a model over HTTP; here the model is whoever calls `step`. A call is a
turn; the reward that the library gives the finished episode is that of the last turn. The seed chooses a task. Where an
agent rewrites its history, the policy reads what is new only. An episode that the library calls failed is lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from itertools import islice
from typing import Any

from headway.environments.library.inverted import ModelCalls, new_text
from headway.environments.text import Reply
from headway.environments.tools.calls import read_calls
from headway.environments.tools.extras import library
from headway.errors import ConfigError, EnvironmentFailed

_MOST_TASKS = 100_000
"""Of a taskset that never ends, as many tasks are told apart."""


class Verifiers:
    """`taskset`: id of an installed one; `config`: the rest of what the library calls `[env]`, such as `agent`."""

    reusable = True

    def __init__(self, *, taskset: str, config: Mapping[str, Any] | None = None, concurrency: int = 16) -> None:
        self._vf = library("verifiers.v1", extra="verifiers", wanted_by="verifiers")
        asked = dict(config or {})
        asked["taskset"] = {**asked.get("taskset", {}), "id": taskset}
        try:
            self._world = self._vf.load_environment(self._vf.resolve_env_config(asked))
        except Exception as error:
            problem = f"verifiers cannot make it: {type(error).__name__}: {error}"
            raise ConfigError(problem, key="taskset", value=taskset) from error
        self.concurrency = concurrency
        self._calls = ModelCalls()
        self._serving: asyncio.Task[None] | None = None
        self._rollout: asyncio.Task[Any] | None = None
        self._stop = asyncio.Event()
        self._tasks: list[Any] = []
        self._url = ""

    async def reset(self, seed: int, data: Mapping[str, Any]) -> str:
        await self._end_rollout()
        if self._serving is None:
            await self._serve()
        task = self._task(int(data.get("task", seed)))
        client = self._vf.EvalClientConfig(base_url=self._url, api_key_var="HEADWAY_NEEDS_NO_KEY")
        context = self._vf.ModelContext(model="headway", client=client)
        self._rollout = asyncio.create_task(self._world.run_episode(task, context), name="verifiers episode")
        asked = await self._calls.following(self._rollout)
        if asked is None:
            self._finished()  # says why
            raise EnvironmentFailed("verifiers ended the episode without asking the model")
        self._asked = asked
        return new_text(asked, first=True)

    async def step(self, action: str) -> Reply:
        assert self._rollout is not None
        offered = bool(self._asked.get("tools"))
        valid = not offered or not any(isinstance(call, str) for call in read_calls(action).calls)
        self._calls.answer(action)
        asked = await self._calls.following(self._rollout)
        if asked is not None:
            self._asked = asked
            return Reply(new_text(asked, first=False), valid=valid)
        reward, info = self._finished()
        return Reply("", reward, done=True, valid=valid, success=reward >= 1.0, info=info)

    async def close(self) -> None:
        await self._end_rollout()
        serving, self._serving = self._serving, None
        if serving is not None:
            self._stop.set()
            await asyncio.wait({serving})
        await self._calls.close()

    def _finished(self) -> tuple[float, dict[str, Any]]:
        """Reward and metrics of the episode that has ended. Raises `EnvironmentFailed`."""
        assert self._rollout is not None
        rollout, self._rollout = self._rollout, None
        if rollout.cancelled() or rollout.exception() is not None:
            raise EnvironmentFailed(f"verifiers failed: {rollout.exception()!r}")
        episode = rollout.result()
        if not episode.ok:
            errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
            raise EnvironmentFailed(
                f"verifiers lost the episode: {'; '.join(f'{e.type}: {e.message}' for e in errors)}"
            )
        played = [trace for trace in episode.traces if trace.agent.trainable]
        metrics = {name: value for trace in played for name, value in trace.metrics.items()}
        return float(sum(trace.reward for trace in played)), {"metrics": metrics}

    def _task(self, number: int) -> Any:
        if not self._tasks:
            self._tasks = list(islice(self._world.taskset, _MOST_TASKS))
        if not self._tasks:
            raise EnvironmentFailed("the taskset is empty")
        return self._tasks[number % len(self._tasks)]

    async def _serve(self) -> None:
        """Have the endpoint and the library's own servers, which must be left by the task that entered them."""
        self._url = await self._calls.start()
        self._stop = asyncio.Event()
        ready = asyncio.Event()

        async def serve() -> None:
            async with self._world.serving():
                ready.set()
                await self._stop.wait()

        self._serving = asyncio.create_task(serve(), name="verifiers")
        waiting = asyncio.ensure_future(ready.wait())
        await asyncio.wait({waiting, self._serving}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if not ready.is_set():
            raise EnvironmentFailed(f"verifiers does not serve: {self._serving.exception()!r}")

    async def _end_rollout(self) -> None:
        rollout, self._rollout = self._rollout, None
        self._calls.forget()
        if rollout is not None:
            rollout.cancel()
            await asyncio.wait({rollout})
