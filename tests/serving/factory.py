"""A small model with tools in its template, served by a real engine and asked by the official client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from headway.engines.base import Progress, Request
from headway.launch.inference_session import PreparedServing, open_serving_hub, prepare_serving
from headway.monitor.event_log import LoggedEvent
from headway.rollout.environment_agent import EnvironmentAgent
from headway.serving.agent_environment import AgentEndpoint, AgentEnvironmentFactory, AgentLauncher
from headway.serving.completion_server import CompletionServer, ServedModel, ServerLimits
from headway.serving.direct_completions import DirectCompletions
from headway.settings import RunSettings
from headway.types import Episode, SamplingParams, Task

TEMPLATE = (
    "{{ bos_token }}{% if tools %}{{ '<system>' + (tools | tojson) + eos_token }}{% endif %}"
    "{% for message in messages %}{{ '<' + message['role'] + '>' + message['content'] }}"
    "{% for call in message['tool_calls'] %}{{ '<tool_call>' + (call['function'] | tojson) + '</tool_call>' }}"
    "{% endfor %}{{ eos_token }}{% endfor %}{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
ADD: dict[str, Any] = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}


def make_model(directory: Path) -> Path:
    """Random weights; its template knows tools and writes what it is given."""
    from headway.models.tiny_model import make_tiny_model

    make_tiny_model(directory, steps=0)
    (directory / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return directory


def ready(model: Path, *overrides: str) -> PreparedServing:
    words = ["processes=false", "sequence_length=256", "actor_infer.strategy_args.strategy_config.max_num_seqs=4"]
    return prepare_serving(str(model), [*words, *overrides])


class Stage:
    """One engine with one model for all tests, on one event loop. `hear` is told of its requests."""

    def __init__(self, made: PreparedServing) -> None:
        self.made = made
        self.hear: Callable[[LoggedEvent], None] = lambda event: None
        self._runner = asyncio.Runner()
        self._stack = AsyncExitStack()
        self.hub = self._runner.run(
            self._stack.enter_async_context(open_serving_hub(made, sinks=[lambda event: self.hear(event)]))
        )

    def run(self, scenario: Coroutine[Any, Any, None], timeout_s: float = 300.0) -> None:
        """Never forever."""

        async def bounded() -> None:
            async with asyncio.timeout(timeout_s):
                await scenario

        self._runner.run(bounded())
        self.hear = lambda event: None

    def close(self) -> None:
        self._runner.run(self._stack.aclose())
        self._runner.close()


class World:
    """What a test sees of the engine and of a server in front of it."""

    def __init__(self, stage: Stage) -> None:
        self.made, self.hub = stage.made, stage.hub
        self.address = ""
        self.server: CompletionServer | None = None
        self.started, self.ended = asyncio.Event(), asyncio.Event()
        """A request has come to the engine, or left it."""
        stage.hear = self._hear

    def _hear(self, event: LoggedEvent) -> None:
        if event.kind == "request.start":
            self.started.set()
        if event.kind == "request.end":
            self.ended.set()

    def client(self, key: str = "none") -> AsyncOpenAI:
        return client(f"{self.address}/v1", key)

    async def sampled(self, prompt: list[int], count: int) -> Progress:
        """What the engine makes of a prompt when it is asked directly."""
        progress = Progress()
        params = SamplingParams(max_new_tokens=count, temperature=0.0)
        await self.hub.generate(Request(request_id="direct", session="d", prompt=prompt, params=params), progress)
        return progress


def client(base_url: str, key: str) -> AsyncOpenAI:
    """The official client; without certificates, which take longer to load than a small model to answer."""
    http = DefaultAsyncHttpxClient(verify=False)
    return AsyncOpenAI(base_url=base_url, api_key=key, max_retries=0, timeout=30, http_client=http)


@asynccontextmanager
async def served(stage: Stage, *, token: str | None = None, **limits: Any) -> AsyncIterator[World]:
    """A server in front of the hub, on a port of its own."""
    world, template = World(stage), stage.made.template
    direct = DirectCompletions(stage.hub, template, context_tokens=stage.made.context_tokens)
    service = ServedModel(model="tiny", template=template, direct=direct)
    world.server = CompletionServer(service, token=token, limits=ServerLimits(shutdown_s=5, **limits))
    world.address = await world.server.start()
    try:
        yield world
    finally:
        await world.server.close()


class Episodes(World):
    """Plays episodes of foreign agents."""

    def __init__(self, stage: Stage) -> None:
        super().__init__(stage)
        self.endpoint = AgentEndpoint(stage.made.template)
        self._numbers = count()

    async def play(self, launch: AgentLauncher, *, data: dict[str, Any] | None = None, **options: Any) -> Episode:
        """One episode; the run draws eight tokens a turn at most."""
        number = next(self._numbers)
        settings = RunSettings(groups_per_step=1, sampling=SamplingParams(max_new_tokens=8))
        task = Task(position=number, data=data or {})
        chosen = {"context_tokens": self.made.context_tokens, **options}
        agents = AgentEnvironmentFactory(launch=launch, endpoint=self.endpoint, **chosen)
        agent = EnvironmentAgent(sample_id=f"{number}.0", task=task, hub=self.hub, settings=settings)
        return await agent.run(agents(task))


@asynccontextmanager
async def episodes(stage: Stage) -> AsyncIterator[Episodes]:
    world = Episodes(stage)
    try:
        yield world
    finally:
        await world.endpoint.close()
