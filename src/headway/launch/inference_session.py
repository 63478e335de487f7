"""Use a policy without a trainer: evaluate it on held-out tasks, or serve it behind an OpenAI-compatible endpoint.

The weights go to the engines the way that a trainer's would: manifest, buckets, flip. An engine that fails ends an
evaluation, because nothing is lost with it. Under `open_serving_hub` a failed engine is restarted and given the weights
again, and its requests go on with the tokens that they have.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import TYPE_CHECKING

from headway.config import ReliabilityConfig, load_config
from headway.environments.base import Environment
from headway.errors import BackendError, ConfigError
from headway.launch.components import InferenceComponents, LaunchContext, make_decoder
from headway.launch.environment_pool import make_chat_template, make_environment_pool
from headway.launch.language_components import LanguageModelFamily
from headway.launch.reward_components import connect_reward_models
from headway.launch.training_session import PreparedRun
from headway.ledger.checkpoint_hold import release_checkpoint
from headway.models.model_shapes import find_model_shape
from headway.monitor.event_log import EventLog, EventSink
from headway.placement.placement import plan_placement
from headway.rewards.reward_registry import make_run_rewards, open_reward_workers
from headway.rollout.inference_hub import InferenceHub
from headway.rollout.replica import Replica, ReplicaHealth
from headway.rollout.sample_evaluation import EvaluatedSample, SampleEvaluator
from headway.serving.agent_environment import require_aiohttp
from headway.serving.chat_template import ChatTemplate
from headway.serving.request_errors import RequestRefused
from headway.settings import make_run_settings
from headway.types import Task

if TYPE_CHECKING:
    from headway.serving.completion_server import ServerLimits


_DEFAULT_CONTEXT_TOKENS = 4096
"""Most tokens of a prompt and its answer together, unless the overrides or the model say otherwise."""
_WATCH_INTERVAL_S = 1.0
_DEFAULT_SLOTS = 16
_SLOTS_KEY = "actor_infer.strategy_args.strategy_config.max_num_seqs"


def select_evaluation_tasks(prepared: PreparedRun, limit: int | None) -> list[Task]:
    """Return held-out tasks where there are any, else those of training. Raises `ConfigError`."""
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
    watch: Callable[[Environment], Environment] | None = None,
) -> list[EvaluatedSample]:
    """Generate and score `answers` to each task with the policy of `prepared`. Raises `BackendError`.

    `watch` wraps the environment of every episode.
    """
    reward, loop = make_run_rewards(prepared.resolved.config), asyncio.get_running_loop()
    events, settings = EventLog(loop.time), make_run_settings(prepared.resolved)
    sampling = settings.eval_sampling or settings.sampling
    settings = replace(settings, group_size=answers, redundant_members=0, has_greedy_member=False, sampling=sampling)
    failed: asyncio.Future[None] = loop.create_future()

    def fail(replica: Replica, error: BaseException) -> None:
        if not failed.done():
            failed.set_exception(error)

    connect_reward_models(reward, prepared.make_context(None), lambda name, reason: None)
    async with AsyncExitStack() as stack:
        stack.callback(release_checkpoint, prepared.policy.path)
        await stack.enter_async_context(open_reward_workers(reward))
        environments = make_environment_pool(prepared.resolved, prepared.policy)
        stack.push_async_callback(environments.close)
        components = prepared.family.make_inference_components(prepared.make_context(None))
        stack.push_async_callback(components.close)
        stack.callback(failed.cancel)
        hub = InferenceHub(
            components.engines, events=events, reliability=settings.reliability, clock=loop.time, on_failure=fail
        )
        await _load_policy_into_engines(hub, components)
        evaluator = SampleEvaluator(
            hub=hub,
            environments=environments if watch is None else lambda task: watch(environments(task)),
            reward=reward,
            settings=settings,
            events=events,
            decode=make_decoder(prepared.policy.tokenizer),
        )
        work = asyncio.ensure_future(evaluator.evaluate(tasks))
        await asyncio.wait([work, failed], return_when=asyncio.FIRST_COMPLETED)  # type: ignore[type-var]
        if failed.done():
            work.cancel()
            await asyncio.wait({work})
            failed.result()
        return work.result()


async def _load_policy_into_engines(hub: InferenceHub, components: InferenceComponents) -> None:
    for replica in hub.replicas:
        await components.load_policy(replica.engine.receiver)
        hub.version_changed(replica)
    if hub.served < 0:
        raise BackendError("no engine serves the policy")


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedServing:
    """A policy that has been found and can be served."""

    context: LaunchContext
    template: ChatTemplate

    @property
    def context_tokens(self) -> int:
        """Most tokens of a prompt and its answer together."""
        return self.context.resolved.derived.sequence_length


def prepare_serving(model: str, overrides: Sequence[str] = ()) -> PreparedServing:
    """Find the model and check the options for serving it. Raises `ConfigError`."""
    require_aiohttp()
    family, keys = LanguageModelFamily(), {override.partition("=")[0] for override in overrides}
    slots = [] if _SLOTS_KEY in keys else [f"{_SLOTS_KEY}={_DEFAULT_SLOTS}"]
    options = [f"pretrain={model}", *slots, *overrides]
    resolved = load_config(None, options)
    policy = family.find_policy(resolved)
    if not keys & {"sequence_length", "prompt_length", "response_length"}:
        longest = min(policy.positions or _DEFAULT_CONTEXT_TOKENS, _DEFAULT_CONTEXT_TOKENS)
        resolved = load_config(None, [*options, f"sequence_length={longest}"])
    placement = plan_placement(resolved, shape=find_model_shape(policy.path), trains=False)
    family.check_policy(resolved, policy, placement)
    context = LaunchContext(resolved=resolved, policy=policy, placement=placement)
    return PreparedServing(context=context, template=make_chat_template(policy))


@asynccontextmanager
async def open_serving_hub(
    prepared: PreparedServing, *, sinks: Sequence[EventSink] = ()
) -> AsyncIterator[InferenceHub]:
    """Yield a hub whose engines serve the policy; end every process afterwards. Raises `BackendError`."""
    clock, reliability = asyncio.get_running_loop().time, prepared.context.resolved.config.reliability
    components = LanguageModelFamily().make_inference_components(prepared.context)
    tasks: set[asyncio.Task[None]] = set()

    def revive(replica: Replica, error: BaseException) -> None:
        work = _revive_replica(hub, components, replica, reliability)
        tasks.add(asyncio.create_task(work, name=f"revive/{replica.name}"))

    hub = InferenceHub(
        components.engines, events=EventLog(clock, *sinks), reliability=reliability, clock=clock, on_failure=revive
    )
    try:
        await _load_policy_into_engines(hub, components)
        tasks.add(asyncio.create_task(_watch_replicas(hub), name="watch replicas"))
        yield hub
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await components.close()
        release_checkpoint(prepared.context.policy.path)


@asynccontextmanager
async def open_completion_server(
    prepared: PreparedServing, name: str, *, host: str, port: int, token: str | None, limits: ServerLimits | None = None
) -> AsyncIterator[str]:
    """Serve the policy over HTTP; the block gets the address. Raises `BackendError` and `ConfigError`."""
    from headway.serving.completion_server import CompletionServer, ServedModel, ServerLimits, check_address
    from headway.serving.direct_completions import DirectCompletions

    check_address(host, port, token)
    async with open_serving_hub(prepared) as hub:
        service = ServedModel(
            model=name,
            template=prepared.template,
            direct=DirectCompletions(hub, prepared.template, context_tokens=prepared.context_tokens),
            health=lambda: _report_health(hub),
        )
        server = CompletionServer(service, token=token, limits=limits or ServerLimits())
        try:
            yield await server.start(host, port)
        finally:
            await server.close()


def _report_health(hub: InferenceHub) -> dict[str, int]:
    if hub.served < 0:
        raise RequestRefused("no engine is up", status=503, kind="server_error")
    return {"engines": hub.up}


async def _watch_replicas(hub: InferenceHub) -> None:
    """Check regularly for replicas that died while idle, which no request would notice."""
    while True:
        await asyncio.sleep(_WATCH_INTERVAL_S)
        hub.check()


async def _revive_replica(
    hub: InferenceHub, components: InferenceComponents, replica: Replica, reliability: ReliabilityConfig
) -> None:
    """Restart a replica until it serves again; wait longer after each failure."""
    pause_s = reliability.restart_backoff_s
    while replica.health is not ReplicaHealth.UP:
        try:
            await replica.engine.restart()
            await components.load_policy(replica.engine.receiver)
            hub.revive(replica)
        except BackendError:
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, reliability.probe_s)
