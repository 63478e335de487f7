"""What the hub needs of a rollout engine, and what engines share: checks of requests and the search for stop strings.

An engine serves single requests concurrently, with continuous batching where it can. It stamps every action with the
policy version that made it, and can be interrupted between two actions. It records actions in a `Progress` that the
caller owns, so that what was made before a crash, an abort or a pause is never lost.

Stop strings are searched in the text of what was generated, never in the prompt. They may begin and end inside tokens.
The token that completes one is the last token of the answer and stays, because the model has drawn it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

from headway.codec import register_records
from headway.errors import EngineError
from headway.types import (
    ExpertRouting,
    FinishReason,
    Generation,
    RepeatedValue,
    SamplingParams,
    VersionRun,
    concatenate_actions,
    extend_runs,
)
from headway.weights.base import WeightReceiver


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One answer to generate."""

    request_id: str
    session: str
    """Name of the episode: the hub keeps requests of one session on one replica while it can."""
    prompt: Sequence[int]
    """Tokens to condition on, without those that `Progress` already has."""
    params: SamplingParams
    prefix_key: int = -1
    """Requests with the same key share a prompt, as members of a group do, so that prefill may be shared; −1: none."""
    continues: bool = False
    """Whether the next request of the session begins with all of this one, so that its KV may be saved until then."""
    hint: Any = None
    """Opaque to the hub; a simulated engine reads the length to produce from it."""


register_records(Request)


class _OwnedList(list[Any]):
    """A list that belongs to one `Progress`, which extends it in place."""

    __slots__ = ()


def _append_actions(known: Sequence[Any], new: Sequence[Any]) -> Sequence[Any]:
    """Append to what is known, in place if the list is owned: an answer of 32k tokens is not copied at every report."""
    if type(known) is not _OwnedList:
        if isinstance(known, RepeatedValue) or not len(known):
            return concatenate_actions(known, new)
        known = _OwnedList(known)
    known.extend(new)
    return known


def _freeze(actions: Sequence[Any]) -> Sequence[Any]:
    return list(actions) if type(actions) is _OwnedList else actions


class Progress:
    """What has been generated so far for one request. It grows by whole actions and survives the engine.

    A resumed request starts from what is here: the engine conditions on `prompt + actions` and appends.
    """

    __slots__ = ("_routing", "actions", "logps", "on_chunk", "routing_start", "runs", "spent_s", "started")

    def __init__(self, on_chunk: Callable[[Sequence[Any]], None] | None = None) -> None:
        self.actions: Sequence[Any] = ()
        """Grows in place; `generation` returns a copy that does not."""
        self.logps: Sequence[float] = ()
        self.runs: tuple[VersionRun, ...] = ()
        self._routing: list[ExpertRouting] = []
        """Consecutive stretches, joined when somebody asks for them."""
        self.routing_start = 0
        """First token of prompt and actions whose experts are wanted: those before it came with an earlier turn."""
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
        self.actions = _append_actions(self.actions, actions)
        self.logps = _append_actions(self.logps, logps)
        self.runs = extend_runs(self.runs, version, len(actions))
        if self.on_chunk is not None:
            self.on_chunk(actions)

    @property
    def routing(self) -> ExpertRouting | None:
        """Experts of prompt and actions, as far as an engine has reported them."""
        if len(self._routing) > 1:
            data = b"".join(stretch.data for stretch in self._routing)
            self._routing = [replace(self._routing[0], data=data)]
        return self._routing[0] if self._routing else None

    @routing.setter
    def routing(self, routing: ExpertRouting | None) -> None:
        self._routing = [] if routing is None else [routing]

    @property
    def routed_tokens(self) -> int:
        """Number of tokens of prompt and actions whose experts are known, or not wanted."""
        return self._routing[-1].start + len(self._routing[-1]) if self._routing else self.routing_start

    def add_routing(self, routing: ExpertRouting) -> None:
        """Append the experts of the next tokens; those of other tokens take the place of what was known."""
        if self._routing and self.routed_tokens != routing.start:
            self._routing = []
        self._routing.append(routing)

    def generation(self, finish: FinishReason, text: str = "") -> Generation:
        """Return everything so far as a record."""
        return Generation(
            actions=_freeze(self.actions),
            logps=_freeze(self.logps),
            runs=self.runs,
            finish=finish,
            text=text,
            routing=self.routing,
        )


class ResettableReceiver(WeightReceiver, Protocol):
    """A receiver that learns what became of its engine."""

    def reset(self, *, gone: bool) -> None:
        """Forget everything: the engine crashed (`gone`) or came back empty."""


class Engine(Protocol):
    """One replica; weights arrive through `receiver`."""

    name: str
    """Unique in the run, `engine/<n>`; shown in events."""

    @property
    def slots(self) -> int:
        """Requests it works on together; the hub sends no more and queues the rest."""

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
        """Continue after `pause`."""

    async def start(self) -> None:
        """Bring the replica up before its first request; a no-op where the first request does that.

        Raises `ConfigError` when it cannot run as configured, `EngineCrashed` when it does not come up; `restart`
        then tries once more.
        """

    async def restart(self) -> None:
        """Bring a crashed or hung replica back, empty, with no weights (`receiver.version` = −1).

        Calls of `generate` that wait raise `EngineCrashed`. Raises `EngineCrashed` when it does not come up.
        """

    async def close(self) -> None:
        """Release everything. Idempotent."""


@runtime_checkable
class SleepingEngine(Protocol):
    """An engine that can free the memory of its device."""

    async def sleep(self) -> None:
        """Free weights, KV cache and model. The next version that arrives brings them back.

        No request may be running. `receiver.version` is −1 afterwards.
        """


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


DecodeTokens = Callable[[list[int]], str]
"""Turns token ids into text."""
_TOKENS_PER_CHARACTER = 4
"""A character may be spread over this many byte tokens."""


def ends_with_stop_string(
    tokens: Sequence[int], strings: Sequence[str], decode: DecodeTokens | None, start: int = 0
) -> bool:
    """Return whether the last of `tokens` completes a stop string that begins at token `start` or later."""
    if not strings or decode is None:
        return False
    text = decode(list(tokens[max(start, len(tokens) - _count_searched_tokens(strings)) :]))
    return any(stop in text for stop in strings)


def count_until_stop(
    before: Sequence[int], tokens: Sequence[int], strings: Sequence[str], decode: DecodeTokens | None
) -> int:
    """Return how many of `tokens`, which follow `before`, come up to the one that completes a stop string."""
    if strings:
        context = before[max(0, len(before) - _count_searched_tokens(strings)) :]
        for count in range(1, len(tokens) + 1):
            if ends_with_stop_string([*context, *tokens[:count]], strings, decode):
                return count
    return len(tokens)


def _count_searched_tokens(strings: Sequence[str]) -> int:
    return _TOKENS_PER_CHARACTER * (max(map(len, strings)) + 1)
