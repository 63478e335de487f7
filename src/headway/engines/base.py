"""What the hub asks of a rollout engine.

An engine serves single requests concurrently (continuous batching is its own affair), stamps every action with
the policy version that made it, and can be interrupted between two actions. It reports actions into a
`Progress` that the caller owns, so that what was made before a crash, an abort or a pause is never lost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from headway.codec import register_records
from headway.errors import EngineError
from headway.types import (
    FinishReason,
    Generation,
    SamplingParams,
    VersionRun,
    concatenate_actions,
    extend_runs,
)
from headway.weights.base import WeightReceiver


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One thing to generate."""

    request_id: str
    session: str
    """Requests of one episode share it: the hub keeps them on one replica while it can."""
    prompt: Sequence[int]
    """Everything to condition on, without what `Progress` already holds."""
    params: SamplingParams
    prefix_key: int = -1
    """Requests with the same key share a prompt (members of a group): prefill may be shared. −1: none."""
    goes_on: bool = False
    """The next request of the session begins with all of this one: what was computed for it may be kept until then."""
    hint: Any = None
    """Opaque to the hub; a simulated engine reads the length to produce from it."""


register_records(Request)


class Progress:
    """What has been generated so far for one request; grows by whole actions, survives the engine.

    A resumed request starts from what is here: the engine conditions on `prompt + actions` and appends.
    """

    __slots__ = ("actions", "logps", "on_chunk", "runs", "spent_s", "started")

    def __init__(self, on_chunk: Callable[[Sequence[Any]], None] | None = None) -> None:
        self.actions: Sequence[Any] = ()
        self.logps: Sequence[float] = ()
        self.runs: tuple[VersionRun, ...] = ()
        self.started: int | None = None
        """Version of the replica that first took the request: no action is older. Set by the hub."""
        self.spent_s = 0.0
        """Time on replicas, queues not counted. Set by the hub."""
        self.on_chunk = on_chunk
        """Called with every new stretch of actions: streaming."""

    def extend(self, actions: Sequence[Any], logps: Sequence[float], version: int) -> None:
        """Append actions made by `version`."""
        if len(actions) != len(logps):
            raise ValueError(f"{len(actions)} actions with {len(logps)} log-probabilities")
        if not len(actions):
            return
        self.actions = concatenate_actions(self.actions, actions)
        self.logps = concatenate_actions(self.logps, logps)
        self.runs = extend_runs(self.runs, version, len(actions))
        if self.on_chunk is not None:
            self.on_chunk(actions)

    def generation(self, finish: FinishReason, text: str = "") -> Generation:
        """Everything so far as a record."""
        return Generation(actions=self.actions, logps=self.logps, runs=self.runs, finish=finish, text=text)


class ResettableReceiver(WeightReceiver, Protocol):
    """A receiver that can be told what became of its engine."""

    def reset(self, *, gone: bool) -> None:
        """Forget everything: the engine crashed (`gone`) or came back empty."""


class Engine(Protocol):
    """One replica; weights arrive through `receiver`."""

    name: str
    """Unique in the run, `engine/<n>`; shown in events."""

    @property
    def slots(self) -> int:
        """Requests it works on together; the hub sends no more and queues the rest, so that work is bound late."""

    @property
    def receiver(self) -> WeightReceiver:
        """Where new weights are loaded and flipped; `receiver.version` is what this replica serves."""

    async def generate(self, request: Request, progress: Progress) -> FinishReason:
        """Generate until the end and return how it ended; `ABORTED` after `abort`.

        Raises `EngineError` when only this request failed, `EngineCrashed` when the replica is gone.
        Cancelling the awaiting task aborts the request.
        """

    async def abort(self, request_id: str) -> None:
        """Stop the request at the next action boundary; unknown ids are ignored."""

    async def pause(self) -> None:
        """Stop at an action boundary, keeping every request; returns when decoding has stopped."""

    async def resume(self) -> None:
        """Go on after `pause`."""

    async def start(self) -> None:
        """Bring the replica up before its first request; a no-op where the first request does that.

        Raises `ConfigError` when it cannot run as configured, `EngineCrashed` when it does not come up; `restart`
        then tries once more.
        """

    async def restart(self) -> None:
        """Bring a crashed or hung replica back, empty, with no weights (`receiver.version` = −1).

        Calls of `generate` still out raise `EngineCrashed`. Raises `EngineCrashed` when it does not come up.
        """

    async def close(self) -> None:
        """Release everything. Idempotent."""


def check_request(
    request: Request, progress: Progress, where: str, *, version: int, running: bool, decodes: bool, most_tokens: int
) -> None:
    """Raise `EngineError` unless an engine that serves `version` can take the request."""
    if version < 0:
        raise EngineError(f"{where}: no weights to serve it with")
    if running:
        raise EngineError(f"{where} is already running")
    if not len(request.prompt):
        raise EngineError(f"{where}: the prompt is empty")
    if request.params.stop and not decodes:
        raise EngineError(f"{where}: stop strings need a tokenizer, and there is none")
    length = len(request.prompt) + len(progress.actions)
    if length >= most_tokens:
        parts = f"{len(request.prompt)} of the prompt and {len(progress.actions)} generated"
        raise EngineError(f"{where}: {length} tokens ({parts}) leave no room in a context of {most_tokens}")
