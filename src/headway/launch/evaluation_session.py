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

from headway.errors import BackendError, ConfigError
from headway.launch.environment_pool import EnvironmentPool, make_environment_pool
from headway.launch.language_components import InferenceComponents, make_decoder
from headway.launch.model_families import select_model_family
from headway.launch.training_session import PreparedRun
from headway.monitor.event_log import EventLog, EventSink
from headway.rewards.reward_registry import make_rewards
from headway.rollout.inference_hub import InferenceHub
from headway.rollout.replica import Replica
from headway.rollout.sample_evaluation import EvaluatedSample, SampleEvaluator
from headway.settings import make_run_settings
from headway.types import Task


def select_evaluation_tasks(prepared: PreparedRun, limit: int | None) -> list[Task]:
    """The tasks to judge by: held-out ones where there are any, else those of training. Raises `ConfigError`."""
    source = prepared.sources.validation or prepared.sources.train
    found = takewhile(lambda task: task is not None, map(source.task, range(limit or len(source))))
    tasks = [task for task in found if task is not None]
    if not tasks:
        raise ConfigError("has no tasks to judge by", key="validation.data_args.file_name")
    return tasks


async def evaluate_policy(
    prepared: PreparedRun,
    tasks: Sequence[Task],
    *,
    answers: int = 1,
    logs: Path | None = None,
    sinks: Sequence[EventSink] = (),
) -> list[EvaluatedSample]:
    """`answers` to each task from the policy of `prepared`, judged. Raises `BackendError`."""
    resolved = prepared.resolved
    async with AsyncExitStack() as stack:
        worlds = make_environment_pool(resolved, prepared.policy)
        stack.push_async_callback(worlds.close)
        served = select_model_family(resolved).make_served(resolved, prepared.policy, prepared.place, logs)
        stack.push_async_callback(served.close)
        events = EventLog(asyncio.get_running_loop().time, *sinks)
        return await _run_evaluation(prepared, tasks, answers, served, worlds, events)


async def _run_evaluation(
    prepared: PreparedRun,
    tasks: Sequence[Task],
    answers: int,
    served: InferenceComponents,
    worlds: EnvironmentPool,
    events: EventLog,
) -> list[EvaluatedSample]:
    resolved, loop = prepared.resolved, asyncio.get_running_loop()
    settings = make_run_settings(resolved)
    settings = replace(
        settings, group_size=answers, redundant_members=0, sampling=settings.eval_sampling or settings.sampling
    )
    failed: asyncio.Future[None] = loop.create_future()

    def fail(replica: Replica, error: BaseException) -> None:
        if not failed.done():
            failed.set_exception(error)

    hub = InferenceHub(
        served.engines, events=events, reliability=settings.reliability, clock=loop.time, on_failure=fail
    )
    try:
        await load_policy_into_engines(hub, served)
        examiner = SampleEvaluator(
            hub=hub,
            environments=worlds,
            reward=make_rewards(resolved.config.rewards, answer=resolved.config.actor_train.data_args.answer),
            settings=settings,
            events=events,
            decode=make_decoder(prepared.policy.tokenizer),
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


async def load_policy_into_engines(hub: InferenceHub, served: InferenceComponents) -> None:
    """Every replica gets the weights."""
    for replica in hub.replicas:
        await load_policy_into_replica(replica, served)
        hub.version_changed(replica)
    if hub.served < 0:
        raise BackendError("no engine serves the policy")


async def load_policy_into_replica(replica: Replica, served: InferenceComponents) -> None:
    """One replica gets the weights."""
    manifest, buckets = await served.source.gather(0)
    await replica.engine.receiver.begin(manifest)
    async for bucket in buckets:
        await replica.engine.receiver.load(await served.transport.send(bucket, replica.engine.receiver))
    await replica.engine.receiver.flip()
