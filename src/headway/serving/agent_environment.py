"""Environments in which an external agent acts, and the endpoint that serves such agents during a training run.

The agent is started with a `base_url`, a key and its task, and uses them like any OpenAI endpoint. `reset` waits for
its first request; `step` answers a request with the policy's turn and waits for the next request, or for the end of
the agent. Every request is therefore a turn of the episode, with the tokens, log-probabilities and weight versions
that the engine reported.

The run decides the sampling: a temperature that the agent asks for is ignored, because the trainer uses the run's. The
agent's stop strings hold, and its token limit if that is lower. The agent is told about limits in OpenAI's way: a
conversation that no longer fits (`context_length_exceeded`), or a request beyond the last turn (`session_over`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from headway.environments.base import Observation
from headway.environments.text_environment import to_finite_float
from headway.errors import ConfigError, EnvironmentFailed
from headway.extras import suggest_install
from headway.serving.agent_sessions import AgentEnded, AgentSession, AgentSessions, PendingRequest, TurnContext
from headway.serving.chat_template import ChatTemplate
from headway.serving.completions import GeneratedTokens, make_choice
from headway.serving.request_errors import RequestRefused, context_length_exceeded, session_over
from headway.types import Generation, Task

if TYPE_CHECKING:
    from headway.serving.completion_server import CompletionServer

_MAX_REQUESTS = 1 << 20
"""Practically unlimited: every session has its own limit, and the run limits the number of sessions."""


def require_aiohttp() -> None:
    """Raise `ConfigError` if aiohttp, which the endpoint needs, is not installed."""
    if find_spec("aiohttp") is None:
        raise ConfigError("serving needs aiohttp", hint=suggest_install("serve"))


class AgentEndpoint:
    """The endpoint of a training run. The first session starts the server; every session has a key of its own."""

    def __init__(self, template: ChatTemplate, *, model: str = "policy") -> None:
        self.sessions, self.template, self.model = AgentSessions(template), template, model
        self._server: CompletionServer | None = None
        self._address = ""
        self._starting = asyncio.Lock()

    async def start_session_url(self, session: AgentSession) -> str:
        """Start the server if necessary and return the session's `base_url`. Raises `ConfigError` without a port."""
        async with self._starting:
            if self._server is None:
                self._server, self._address = await self._start()
        return f"{self._address}/sessions/{session.session_id}/v1"

    async def close(self) -> None:
        """Close the sessions, so that no client waits, then the server. Further calls do nothing."""
        self.sessions.close_all()
        server, self._server = self._server, None
        if server is not None:
            await server.close()

    async def _start(self) -> tuple[CompletionServer, str]:
        from headway.serving.completion_server import CompletionServer, ServedModel, ServerLimits

        served = ServedModel(model=self.model, template=self.template, sessions=self.sessions)
        server = CompletionServer(served, limits=ServerLimits(requests=_MAX_REQUESTS, shutdown_s=1.0))
        return server, await server.start()


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentConnection:
    """What an agent is started with."""

    base_url: str
    """Address of the agent's session: every request to it is a turn of this episode."""
    api_key: str
    model: str
    task: Mapping[str, Any]
    """The data of the task."""


AgentLauncher = Callable[[AgentConnection], Awaitable[Any]]
"""Runs an agent to its end and returns its reward: a number, an object with the key `reward`, or `None` if the agent
has reported its reward itself. Cancelling ends the agent and everything that it has started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentEnvironmentFactory:
    """Makes the environments of one kind of agent."""

    launch: AgentLauncher
    endpoint: AgentEndpoint
    context_tokens: int
    """Largest number of tokens of a conversation and its answer."""
    max_turns: int | None = None
    max_new_tokens: int | None = None
    """Largest number of tokens of one answer; `None`: the limit of the run's sampling."""
    admission: asyncio.Semaphore | None = None
    """Limits the episodes at once; `None`: no limit."""

    def __call__(self, task: Task) -> AgentEnvironment:
        return AgentEnvironment(self)


class AgentEnvironment:
    """One episode with one agent."""

    def __init__(self, factory: AgentEnvironmentFactory) -> None:
        self._factory = factory
        self._session: AgentSession | None = None
        self._agent: asyncio.Task[None] | None = None
        self._current: tuple[PendingRequest, TurnContext] | None = None
        self._turns = 0
        self._truncated = False
        """Whether a limit of the run refused a request of the agent."""
        self._has_entered = False

    async def enter(self) -> None:
        if self._factory.admission is not None:
            await self._factory.admission.acquire()
            self._has_entered = True

    async def reset(self, task: Task) -> Observation:
        endpoint = self._factory.endpoint
        session = self._session = endpoint.sessions.open()
        base_url = await endpoint.start_session_url(session)
        connection = AgentConnection(base_url=base_url, api_key=session.key, model=endpoint.model, task=task.data)
        self._agent = asyncio.create_task(self._run_agent(session, connection), name=f"agent/{session.session_id}")
        observation = await self._observe(session)
        if observation is None:
            raise EnvironmentFailed("the agent ended without asking the model anything")
        return observation

    async def step(self, generation: Generation) -> Observation:
        assert self._session is not None and self._current is not None
        session, (pending, context) = self._session, self._current
        self._turns += 1
        generated = GeneratedTokens(tokens=generation.actions, logps=generation.logps, finish=generation.finish)
        choice = make_choice(self._factory.endpoint.template, pending.request, generated, pending.name)
        session.deliver(pending, context, choice)
        observation = await self._observe(session)
        reward = session.take_reward()
        if observation is not None:
            return replace(observation, reward=reward)
        info = {**session.info, "turns": self._turns}
        return Observation(done=True, reward=reward, truncated=self._truncated, info=info)

    async def close(self) -> None:
        if self._session is not None:
            self._factory.endpoint.sessions.close(self._session)
        try:
            if self._agent is not None:
                self._agent.cancel()
                await asyncio.wait([self._agent])
        finally:
            if self._factory.admission is not None and self._has_entered:
                self._factory.admission.release()
                self._has_entered = False

    async def _observe(self, session: AgentSession) -> Observation | None:
        """Return the next observation, or `None` at the end. Raises `EnvironmentFailed` if the agent failed."""
        factory = self._factory
        while True:
            following = await session.next_request()
            if isinstance(following, AgentEnded):
                self._check_end(session, following)
                return None
            pending, context = following
            refusal = self._check_limits(session, context)
            if refusal is None:
                self._current, request = following, pending.request
                limits = [limit for limit in (request.max_tokens, factory.max_new_tokens) if limit is not None]
                return Observation(
                    tokens=context.new_tokens,
                    starts_new_context=context.starts_new_context,
                    expects_next_turn=self._turns + 1 != factory.max_turns,
                    max_new_tokens=min(limits, default=None),
                    stop=request.sampling.stop,
                )
            self._truncated = True
            pending.refuse(refusal)

    def _check_limits(self, session: AgentSession, context: TurnContext) -> RequestRefused | None:
        factory = self._factory
        if factory.max_turns is not None and self._turns >= factory.max_turns:
            return session_over(session.session_id)
        if len(context.tokens) >= factory.context_tokens:
            return context_length_exceeded(len(context.tokens), factory.context_tokens, "messages")
        return None

    def _check_end(self, session: AgentSession, end: AgentEnded) -> None:
        """Accept an agent that ended because of a refusal as truncated; raise for any other end without a reward."""
        if session.has_reward or (self._truncated and self._turns):
            return
        if end.error is not None:
            raise EnvironmentFailed(f"the agent raised {type(end.error).__name__}: {end.error}") from end.error
        raise EnvironmentFailed(
            "the agent ended and nobody said what it has earned; return a number, or post it to its session"
        )

    async def _run_agent(self, session: AgentSession, connection: AgentConnection) -> None:
        """Run the agent to its end and report the end to the session."""
        try:
            result = await self._factory.launch(connection)
            if result is not None:
                session.add_reward(_parse_reward(result, session.info), done=True)
            session.end()
        except Exception as error:
            session.end(error)


def _parse_reward(result: Any, info: dict[str, Any]) -> float:
    """Return the reward in an agent's result; other keys of the result are added to `info`."""
    if isinstance(result, Mapping):
        info.update({str(key): value for key, value in result.items() if key != "reward"})
        result = result.get("reward")
    reward = None if isinstance(result, bool) else to_finite_float(result)
    if reward is None:
        raise EnvironmentFailed(f"the agent returned {result!r}, which is no reward")
    return reward
