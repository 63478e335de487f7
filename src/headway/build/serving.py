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

from headway.build.backends import Policy, Served, check_lengths, find_policy, make_served
from headway.build.evaluation import seed, serve_policy
from headway.build.foreign import dialect_of
from headway.build.placement import Placement, place
from headway.config import Resolved, load
from headway.errors import BackendError
from headway.monitor.events import EventLog, Sink
from headway.rollout.hub import InferenceHub
from headway.rollout.replica import Health, Replica
from headway.serving.chat import Dialect
from headway.serving.endpoint import check_installed
from headway.settings import Reliability

_LONGEST = 4096
"""Tokens of a prompt and its answer together, where nothing says otherwise and the model can read them."""
_LOOK_S = 1.0
_SLOTS = 16
_SLOTS_KEY = "actor_infer.strategy_args.strategy_config.max_num_seqs"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """A policy that has been found and can be served."""

    resolved: Resolved
    policy: Policy
    place: Placement
    dialect: Dialect

    @property
    def context_tokens(self) -> int:
        """Most tokens of a prompt and its answer together."""
        return self.resolved.derived.sequence_length


def prepare_serving(model: str, overrides: Sequence[str] = ()) -> Ready:
    """Find the model and check what is said about serving it. Raises `ConfigError`."""
    check_installed()
    given = {word.partition("=")[0] for word in overrides}
    words = [f"pretrain={model}", *([] if _SLOTS_KEY in given else [f"{_SLOTS_KEY}={_SLOTS}"]), *overrides]
    resolved = load(None, words)
    policy = find_policy(resolved)
    if not given & {"sequence_length", "prompt_length", "response_length"}:
        longest = min(policy.positions or _LONGEST, _LONGEST)
        resolved = load(None, [*words, f"sequence_length={longest}"])
    check_lengths(resolved, policy)
    return Ready(resolved=resolved, policy=policy, place=place(resolved), dialect=dialect_of(policy))


@asynccontextmanager
async def serving_hub(
    ready: Ready, *, logs: Path | None = None, sinks: Sequence[Sink] = ()
) -> AsyncIterator[InferenceHub]:
    """A hub whose engines serve the policy; gone at the end, with every process. Raises `BackendError`."""
    clock = asyncio.get_running_loop().time
    served = make_served(ready.resolved, ready.policy, ready.place, logs)
    reliability = ready.resolved.config.reliability
    hub = InferenceHub(served.engines, events=EventLog(clock, *sinks), reliability=reliability, clock=clock)
    tasks: set[asyncio.Task[None]] = set()
    hub.on_failure = lambda replica, error: tasks.add(
        asyncio.create_task(_revive(hub, served, replica, reliability), name=f"revive/{replica.name}")
    )
    try:
        await serve_policy(hub, served)
        tasks.add(asyncio.create_task(_look(hub), name="look"))
        yield hub
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await served.close()


async def _look(hub: InferenceHub) -> None:
    """Ask now and then whether a replica died while it had nothing to do: no request would ever tell."""
    while True:
        await asyncio.sleep(_LOOK_S)
        hub.check()


async def _revive(hub: InferenceHub, served: Served, replica: Replica, reliability: Reliability) -> None:
    """Restart a replica until it serves again, more patiently each time."""
    pause_s = reliability.restart_backoff_s
    while replica.health is not Health.UP:
        try:
            await replica.engine.restart()
            await seed(replica, served)
            hub.revive(replica)
        except BackendError:
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, reliability.probe_s)
