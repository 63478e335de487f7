"""Somebody else's agent keeps the contract of an environment."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from functools import cache
from typing import Any

import aiohttp

from headway.models.tiny_model import make_character_tokenizer
from headway.serving.agent_environment import AgentEndpoint, AgentEnvironment, AgentEnvironmentFactory
from headway.serving.agent_launch import make_function_launcher
from headway.serving.chat_template import ChatTemplate
from headway.types import FinishReason, Generation, Task, VersionRun
from tests.contracts.environment_contract import EnvironmentContract


@cache
def chat_template() -> ChatTemplate:
    tokenizer = make_character_tokenizer()
    return ChatTemplate(tokenizer, end_tokens=frozenset({tokenizer.eos_token_id}))


async def curious(base_url: str, api_key: str, model: str, task: dict[str, Any], calls: int) -> float:
    """So many questions; without any reward where there are none."""
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {api_key}"}) as talk:
        for number in range(abs(calls)):
            body = {"model": model, "messages": [{"role": "user", "content": f"{number}+1="}]}
            async with talk.post(f"{base_url}/chat/completions", json=body) as answer:
                answer.raise_for_status()
    return 1.0 if calls > 0 else float("nan")


class TestForeignAgents(EnvironmentContract):
    def run(self, scenario: Coroutine[Any, Any, None]) -> None:
        async def main() -> None:
            self.endpoint = AgentEndpoint(chat_template())
            try:
                async with asyncio.timeout(30):
                    await scenario
            finally:
                await self.endpoint.close()

        asyncio.run(main())

    def agents(self, calls: int) -> AgentEnvironmentFactory:
        launch = make_function_launcher(curious, {"calls": calls})
        return AgentEnvironmentFactory(launch=launch, endpoint=self.endpoint, context_tokens=100)

    def make(self, task: Task) -> AgentEnvironment:
        return self.agents(3)(task)

    def task(self) -> Task:
        return Task(position=0, data={"seed": 1})

    def generation(self) -> Generation:
        tokens = chat_template().encode("4<end>")
        runs = (VersionRun(version=0, count=2),)
        return Generation(actions=tokens, logps=[-1.0, -1.0], runs=runs, finish=FinishReason.STOP)

    def failing(self, task: Task) -> AgentEnvironment:
        return self.agents(-1)(task)
