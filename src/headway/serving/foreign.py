"""An environment whose world is somebody else's agent.

The agent is started with a `base_url`, a key and its task, and talks to what it takes for an ordinary endpoint. `reset`
waits for its first call; `step` answers a call with what the policy made and waits for the next one, or for the end.
So every call is a turn of the episode, with the tokens, log-probabilities and versions that the engine gave it.

Sampling is the run's own: a temperature that the agent asks for is passed over, as the trainer's is another. Its stop
strings hold, and its limit on tokens where that is lower. What the agent is not given is said to it in OpenAI's way: a
conversation that no longer fits (`context_length_exceeded`), or a call beyond the last turn (`session_over`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from math import isfinite
from numbers import Real
from typing import Any, Protocol

from headway.environments.base import Observation
from headway.errors import EnvironmentFailed
from headway.serving.answers import Made, answer_of
from headway.serving.chat import Dialect
from headway.serving.history import Context
from headway.serving.refusals import Refused, over, too_long
from headway.serving.sessions import Call, Ended, Session, Sessions
from headway.types import Generation, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Invitation:
    """What an agent is started with."""

    base_url: str
    """Of its own session: whatever it asks there is a turn of this episode."""
    api_key: str
    model: str
    task: Mapping[str, Any]
    """The data of the task."""


Launch = Callable[[Invitation], Awaitable[Any]]
"""Runs an agent to its end and gives its reward: a number, an object with `reward` in it, or `None` where the agent has
reported it. Cancelling ends the agent with everything it has started."""


class Endpoint(Protocol):
    """Where sessions can be reached."""

    sessions: Sessions

    async def url(self, session: Session) -> str:
        """The `base_url` of a session; the first one starts the server."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignAgents:
    """Makes the environments of one kind of agent."""

    launch: Launch
    endpoint: Endpoint
    dialect: Dialect
    context_tokens: int
    """Most tokens of a conversation with its answer."""
    max_turns: int | None = None
    most_tokens: int | None = None
    """Of one answer; `None`: as many as the run's sampling allows."""
    places: asyncio.Semaphore | None = None
    """Episodes that are played at once; `None`: any number."""
    model: str = "policy"
    """What the agent is told that the model is called; it may ask for any name."""

    def __call__(self, task: Task) -> ForeignEnvironment:
        return ForeignEnvironment(self, task)


class ForeignEnvironment:
    """One episode with one agent."""

    def __init__(self, agents: ForeignAgents, task: Task) -> None:
        self._agents, self._task = agents, task
        self._session: Session | None = None
        self._agent: asyncio.Task[None] | None = None
        self._asked: tuple[Call, Context] | None = None
        self._turns = 0
        self._truncated = False
        """Whether the agent was refused something for a limit of ours."""
        self._inside = False

    async def enter(self) -> None:
        if self._agents.places is not None:
            await self._agents.places.acquire()
            self._inside = True

    async def reset(self, task: Task) -> Observation:
        session = self._session = self._agents.endpoint.sessions.open()
        invitation = Invitation(
            base_url=await self._agents.endpoint.url(session),
            api_key=session.key,
            model=self._agents.model,
            task=task.data,
        )
        self._agent = asyncio.create_task(self._live(session, invitation), name=f"agent/{session.session_id}")
        seen = await self._next(session)
        if seen is None:
            raise EnvironmentFailed("the agent ended without asking the model anything")
        return seen

    async def step(self, generation: Generation) -> Observation:
        assert self._session is not None and self._asked is not None
        session, (call, context) = self._session, self._asked
        self._turns += 1
        made = Made(tokens=generation.actions, logps=generation.logps, finish=generation.finish)
        session.deliver(call, context, answer_of(self._agents.dialect, call.ask, made, call.name))
        seen = await self._next(session)
        earned = session.earned()
        if seen is not None:
            return replace(seen, reward=earned)
        info = {**session.info, "turns": self._turns}
        return Observation(done=True, reward=earned, truncated=self._truncated, info=info)

    async def close(self) -> None:
        if self._session is not None:
            self._agents.endpoint.sessions.close(self._session)
        try:
            if self._agent is not None:
                self._agent.cancel()
                await asyncio.wait([self._agent])
        finally:
            if self._agents.places is not None and self._inside:
                self._agents.places.release()
                self._inside = False

    async def _next(self, session: Session) -> Observation | None:
        """What the policy sees next; `None` at the end. Raises `EnvironmentFailed` where the end is no good one."""
        while True:
            news = await session.next()
            if isinstance(news, Ended):
                self._check_end(session, news)
                return None
            call, context = news
            why = self._refusal(session, context)
            if why is None:
                self._asked, ask = news, call.ask
                limits = [limit for limit in (ask.limit, self._agents.most_tokens) if limit is not None]
                return Observation(
                    tokens=context.new,
                    fresh=context.fresh,
                    goes_on=self._turns + 1 != self._agents.max_turns,
                    most_tokens=min(limits, default=None),
                    stop=ask.sampling.stop,
                )
            self._truncated = True
            call.refuse(why)

    def _refusal(self, session: Session, context: Context) -> Refused | None:
        agents = self._agents
        if agents.max_turns is not None and self._turns >= agents.max_turns:
            return over(session.session_id)
        if len(context.tokens) >= agents.context_tokens:
            return too_long(len(context.tokens), agents.context_tokens, "messages")
        return None

    def _check_end(self, session: Session, end: Ended) -> None:
        """An agent that dies of what it was refused has been cut off; any other death is a failed episode."""
        if session.reported or (self._truncated and self._turns):
            return
        if end.error is not None:
            raise EnvironmentFailed(f"the agent raised {type(end.error).__name__}: {end.error}") from end.error
        raise EnvironmentFailed(
            "the agent ended and nobody said what it has earned; return a number, or post it to its session"
        )

    async def _live(self, session: Session, invitation: Invitation) -> None:
        """The agent, from its start to its end; how it ends is told to the session."""
        try:
            found = await self._agents.launch(invitation)
            if found is not None:
                session.reward(_reward(found, session.info), done=True)
            session.end()
        except Exception as error:
            session.end(error)


def _reward(found: Any, info: dict[str, Any]) -> float:
    if isinstance(found, Mapping):
        info.update({str(key): value for key, value in found.items() if key != "reward"})
        found = found.get("reward")
    if isinstance(found, bool) or not (isinstance(found, Real) or type(found).__module__ == "numpy"):
        raise EnvironmentFailed(f"the agent returned {found!r}, which is no reward")
    value = float(found)
    if not isfinite(value):
        raise EnvironmentFailed(f"the agent returned {value}, which is no reward")
    return value
