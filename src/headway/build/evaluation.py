"""A policy on held-out tasks, without a trainer: what `headway eval` does.

The weights go to the engines the way a trainer's would: manifest, buckets, flip. An engine that fails ends it; there
is nothing to lose.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from itertools import takewhile
from pathlib import Path

from headway.build.agents import Worlds, worlds_of
from headway.build.backends import Served, decoder
from headway.build.kinds import kind_of
from headway.build.settings import settings_of
from headway.build.training import Prepared
from headway.errors import BackendError, ConfigError
from headway.monitor.events import EventLog, Sink
from headway.rewards.registry import make_rewards
from headway.rollout.evaluation import Examiner, Judged
from headway.rollout.hub import InferenceHub
from headway.rollout.replica import Replica
from headway.types import Task


def held_out(prepared: Prepared, limit: int | None) -> list[Task]:
    """The tasks to judge by: held-out ones where there are any, else those of training. Raises `ConfigError`."""
    source = prepared.sources.validation or prepared.sources.train
    found = takewhile(lambda task: task is not None, map(source.task, range(limit or len(source))))
    tasks = [task for task in found if task is not None]
    if not tasks:
        raise ConfigError("has no tasks to judge by", key="validation.data_args.file_name")
    return tasks


async def evaluate(
    prepared: Prepared, tasks: Sequence[Task], *, answers: int = 1, logs: Path | None = None, sinks: Sequence[Sink] = ()
) -> list[Judged]:
    """`answers` to each task from the policy of `prepared`, judged. Raises `BackendError`."""
    resolved = prepared.resolved
    async with AsyncExitStack() as stack:
        worlds = worlds_of(resolved, prepared.policy)
        stack.push_async_callback(worlds.close)
        served = kind_of(resolved).make_served(resolved, prepared.policy, prepared.place, logs)
        stack.push_async_callback(served.close)
        events = EventLog(asyncio.get_running_loop().time, *sinks)
        return await _examined(prepared, tasks, answers, served, worlds, events)


async def _examined(
    prepared: Prepared, tasks: Sequence[Task], answers: int, served: Served, worlds: Worlds, events: EventLog
) -> list[Judged]:
    resolved, loop = prepared.resolved, asyncio.get_running_loop()
    settings = settings_of(resolved)
    settings = replace(
        settings, group_size=answers, spare_members=0, sampling=settings.eval_sampling or settings.sampling
    )
    hub = InferenceHub(served.engines, events=events, reliability=settings.reliability, clock=loop.time)
    failed: asyncio.Future[None] = loop.create_future()

    def fail(replica: Replica, error: BaseException) -> None:
        if not failed.done():
            failed.set_exception(error)

    hub.on_failure = fail
    try:
        await serve_policy(hub, served)
        examiner = Examiner(
            hub=hub,
            environments=worlds,
            reward=make_rewards(resolved.config.rewards, answer=resolved.config.actor_train.data_args.answer),
            settings=settings,
            events=events,
            decode=decoder(prepared.policy.tokenizer),
        )
        work = asyncio.ensure_future(examiner.examine(tasks))
        await asyncio.wait([work, failed], return_when=asyncio.FIRST_COMPLETED)  # type: ignore[type-var]
        if failed.done():
            work.cancel()
            await asyncio.wait({work})
            failed.result()
        return work.result()
    finally:
        failed.cancel()


async def serve_policy(hub: InferenceHub, served: Served) -> None:
    """Every replica gets the weights."""
    for replica in hub.replicas:
        await seed(replica, served)
        hub.version_changed(replica)
    if hub.served < 0:
        raise BackendError("no engine serves the policy")


async def seed(replica: Replica, served: Served) -> None:
    """One replica gets the weights."""
    manifest, buckets = await served.source.gather(0)
    await replica.engine.receiver.begin(manifest)
    async for bucket in buckets:
        await replica.engine.receiver.load(await served.transport.send(bucket, replica.engine.receiver))
    await replica.engine.receiver.flip()
