"""A policy behind the OpenAI-compatible endpoint, without a trainer: what `headway serve` does.

The weights go to the engines the way a trainer's would. An engine that dies is restarted and given them again; requests
that it held go on with the tokens they have.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from headway.config import ReliabilityConfig, ResolvedConfig, load_config
from headway.errors import BackendError
from headway.launch.agent_serving import make_chat_template
from headway.launch.evaluation_session import load_policy_into_engines, load_policy_into_replica
from headway.launch.language_components import (
    InferenceComponents,
    PolicyInfo,
    check_sequence_length,
    find_policy,
    make_inference_components,
)
from headway.launch.placement import Placement, plan_placement
from headway.monitor.event_log import EventLog, EventSink
from headway.rollout.inference_hub import InferenceHub
from headway.rollout.replica import Replica, ReplicaHealth
from headway.serving.agent_environment import require_aiohttp
from headway.serving.chat_template import ChatTemplate

_DEFAULT_CONTEXT_TOKENS = 4096
"""Tokens of a prompt and its answer together, where nothing says otherwise and the model can read them."""
_WATCH_INTERVAL_S = 1.0
_DEFAULT_SLOTS = 16
_SLOTS_KEY = "actor_infer.strategy_args.strategy_config.max_num_seqs"


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedServing:
    """A policy that has been found and can be served."""

    resolved: ResolvedConfig
    policy: PolicyInfo
    place: Placement
    template: ChatTemplate

    @property
    def context_tokens(self) -> int:
        """Most tokens of a prompt and its answer together."""
        return self.resolved.derived.sequence_length


def prepare_serving(model: str, overrides: Sequence[str] = ()) -> PreparedServing:
    """Find the model and check what is said about serving it. Raises `ConfigError`."""
    require_aiohttp()
    given = {word.partition("=")[0] for word in overrides}
    words = [f"pretrain={model}", *([] if _SLOTS_KEY in given else [f"{_SLOTS_KEY}={_DEFAULT_SLOTS}"]), *overrides]
    resolved = load_config(None, words)
    policy = find_policy(resolved)
    if not given & {"sequence_length", "prompt_length", "response_length"}:
        longest = min(policy.positions or _DEFAULT_CONTEXT_TOKENS, _DEFAULT_CONTEXT_TOKENS)
        resolved = load_config(None, [*words, f"sequence_length={longest}"])
    check_sequence_length(resolved, policy)
    return PreparedServing(
        resolved=resolved, policy=policy, place=plan_placement(resolved), template=make_chat_template(policy)
    )


@asynccontextmanager
async def open_serving_hub(
    ready: PreparedServing, *, logs: Path | None = None, sinks: Sequence[EventSink] = ()
) -> AsyncIterator[InferenceHub]:
    """A hub whose engines serve the policy; gone at the end, with every process. Raises `BackendError`."""
    clock = asyncio.get_running_loop().time
    served = make_inference_components(ready.resolved, ready.policy, ready.place, logs)
    reliability = ready.resolved.config.reliability
    tasks: set[asyncio.Task[None]] = set()

    def revive(replica: Replica, error: BaseException) -> None:
        work = _revive_replica(hub, served, replica, reliability)
        tasks.add(asyncio.create_task(work, name=f"revive/{replica.name}"))

    hub = InferenceHub(
        served.engines, events=EventLog(clock, *sinks), reliability=reliability, clock=clock, on_failure=revive
    )
    try:
        await load_policy_into_engines(hub, served)
        tasks.add(asyncio.create_task(_watch_replicas(hub), name="look"))
        yield hub
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await served.close()


async def _watch_replicas(hub: InferenceHub) -> None:
    """Ask now and then whether a replica died while it had nothing to do: no request would ever tell."""
    while True:
        await asyncio.sleep(_WATCH_INTERVAL_S)
        hub.check()


async def _revive_replica(
    hub: InferenceHub, served: InferenceComponents, replica: Replica, reliability: ReliabilityConfig
) -> None:
    """Restart a replica until it serves again, more patiently each time."""
    pause_s = reliability.restart_backoff_s
    while replica.health is not ReplicaHealth.UP:
        try:
            await replica.engine.restart()
            await load_policy_into_replica(replica, served)
            hub.revive(replica)
        except BackendError:
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, reliability.probe_s)
