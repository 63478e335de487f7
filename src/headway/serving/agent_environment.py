"""The endpoint of a training run: sessions on a port of this machine, from the first episode to the end of the run."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from math import isfinite
from numbers import Real
from typing import TYPE_CHECKING, Any, Protocol

from headway.environments.base import Observation
from headway.errors import ConfigError, EnvironmentFailed
from headway.serving.agent_sessions import AgentEnded, AgentSession, AgentSessions, PendingRequest
from headway.serving.chat_template import ChatTemplate
from headway.serving.completions import GeneratedTokens, make_choice
from headway.serving.conversation_history import TurnContext
from headway.serving.request_errors import RequestRefused, context_length_exceeded, session_over
from headway.types import Generation, Task

if TYPE_CHECKING:
    from headway.serving.completion_server import CompletionServer


_MAX_REQUESTS = 1 << 20
"""Sessions have limits of their own, and there are as many as the run has episodes."""


def require_aiohttp() -> None:
    """Raises `ConfigError` where HTTP cannot be spoken."""
    if find_spec("aiohttp") is None:
        raise ConfigError("serving needs aiohttp", hint="pip install 'headway[serve]'")


class AgentEndpoint:
    """Started by the first session that asks for its address. Every session has a key of its own."""

    def __init__(self, dialect: ChatTemplate, *, model: str = "policy") -> None:
        self.sessions, self.dialect, self.model = AgentSessions(dialect), dialect, model
        self._server: CompletionServer | None = None
        self._address = ""
        self._starting = asyncio.Lock()

    async def url(self, session: AgentSession) -> str:
        """The `base_url` of a session. Raises `ConfigError` where no port can be had."""
        async with self._starting:
            if self._server is None:
                self._server, self._address = await self._start()
        return f"{self._address}/sessions/{session.session_id}/v1"

    async def close(self) -> None:
        """Idempotent. Sessions that are still open are closed first, so that nobody waits."""
        self.sessions.close_all()
        server, self._server = self._server, None
        if server is not None:
            await server.close()

    async def _start(self) -> tuple[CompletionServer, str]:
        from headway.serving.completion_server import CompletionServer, ServedModel, ServerLimits

        service = ServedModel(model=self.model, dialect=self.dialect, sessions=self.sessions)
        server = CompletionServer(service, limits=ServerLimits(requests=_MAX_REQUESTS, shutdown_s=1.0))
        return server, await server.start()


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentConnection:
    """What an agent is started with."""

    base_url: str
    """Of its own session: whatever it asks there is a turn of this episode."""
    api_key: str
    model: str
    task: Mapping[str, Any]
    """The data of the task."""


AgentLauncher = Callable[[AgentConnection], Awaitable[Any]]
"""Runs an agent to its end and gives its reward: a number, an object with `reward` in it, or `None` where the agent has
reported it. Cancelling ends the agent with everything it has started."""


class SessionEndpoint(Protocol):
    """Where sessions can be reached."""

    sessions: AgentSessions

    async def url(self, session: AgentSession) -> str:
        """The `base_url` of a session; the first one starts the server."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentEnvironmentFactory:
    """Makes the environments of one kind of agent."""

    launch: AgentLauncher
    endpoint: SessionEndpoint
    dialect: ChatTemplate
    context_tokens: int
    """Most tokens of a conversation with its answer."""
    max_turns: int | None = None
    most_tokens: int | None = None
    """Of one answer; `None`: as many as the run's sampling allows."""
    places: asyncio.Semaphore | None = None
    """Episodes that are played at once; `None`: any number."""
    model: str = "policy"
    """What the agent is told that the model is called; it may ask for any name."""

    def __call__(self, task: Task) -> AgentEnvironment:
        return AgentEnvironment(self, task)


class AgentEnvironment:
    """One episode with one agent."""

    def __init__(self, agents: AgentEnvironmentFactory, task: Task) -> None:
        self._agents, self._task = agents, task
        self._session: AgentSession | None = None
        self._agent: asyncio.Task[None] | None = None
        self._asked: tuple[PendingRequest, TurnContext] | None = None
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
        invitation = AgentConnection(
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
        made = GeneratedTokens(tokens=generation.actions, logps=generation.logps, finish=generation.finish)
        session.deliver(call, context, make_choice(self._agents.dialect, call.ask, made, call.name))
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

    async def _next(self, session: AgentSession) -> Observation | None:
        """What the policy sees next; `None` at the end. Raises `EnvironmentFailed` where the end is no good one."""
        while True:
            news = await session.next()
            if isinstance(news, AgentEnded):
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

    def _refusal(self, session: AgentSession, context: TurnContext) -> RequestRefused | None:
        agents = self._agents
        if agents.max_turns is not None and self._turns >= agents.max_turns:
            return session_over(session.session_id)
        if len(context.tokens) >= agents.context_tokens:
            return context_length_exceeded(len(context.tokens), agents.context_tokens, "messages")
        return None

    def _check_end(self, session: AgentSession, end: AgentEnded) -> None:
        """An agent that dies of what it was refused has been cut off; any other death is a failed episode."""
        if session.reported or (self._truncated and self._turns):
            return
        if end.error is not None:
            raise EnvironmentFailed(f"the agent raised {type(end.error).__name__}: {end.error}") from end.error
        raise EnvironmentFailed(
            "the agent ended and nobody said what it has earned; return a number, or post it to its session"
        )

    async def _live(self, session: AgentSession, invitation: AgentConnection) -> None:
        """The agent, from its start to its end; how it ends is told to the session."""
        try:
            found = await self._agents.launch(invitation)
            if found is not None:
                session.reward(_parse_reward(found, session.info), done=True)
            session.end()
        except Exception as error:
            session.end(error)


def _parse_reward(found: Any, info: dict[str, Any]) -> float:
    if isinstance(found, Mapping):
        info.update({str(key): value for key, value in found.items() if key != "reward"})
        found = found.get("reward")
    if isinstance(found, bool) or not (isinstance(found, Real) or type(found).__module__ == "numpy"):
        raise EnvironmentFailed(f"the agent returned {found!r}, which is no reward")
    value = float(found)
    if not isfinite(value):
        raise EnvironmentFailed(f"the agent returned {value}, which is no reward")
    return value
