"""Foreign agents turned inside out: the endpoint they ask, and `verifiers` for real where it is installed."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from headway.environments.library.verifiers_environment import (
    ModelCallEndpoint,
    VerifiersEnvironment,
    format_new_messages,
    make_completion_body,
)
from headway.errors import ConfigError, EnvironmentFailed

TOOL = {"type": "function", "function": {"name": "look", "description": "", "parameters": {"type": "object"}}}
Ask = Callable[[dict[str, Any]], Awaitable[Any]]


async def with_endpoint(scene: Callable[[ModelCallEndpoint, Ask], Awaitable[None]]) -> None:
    aiohttp = pytest.importorskip("aiohttp")
    calls = ModelCallEndpoint()
    url = await calls.start()
    assert url.startswith("http://127.0.0.1:")
    try:
        async with aiohttp.ClientSession() as session:

            async def ask(body: dict[str, Any]) -> Any:
                async with session.post(f"{url}/chat/completions", json=body) as response:
                    return await response.json() if response.content_type.endswith("json") else await response.text()

            await scene(calls, ask)
    finally:
        await calls.close()
        await calls.close()


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_calls_of_a_foreign_agent_are_turns() -> None:
    async def scene(calls: ModelCallEndpoint, ask: Ask) -> None:
        async def agent() -> str:
            messages: list[Any] = [{"role": "system", "content": "Be kind."}, user("Hello")]
            first = (await ask({"messages": messages, "tools": [TOOL]}))["choices"][0]
            assert first["finish_reason"] == "tool_calls" and first["message"]["content"] == "I look."
            (call,) = first["message"]["tool_calls"]
            assert json.loads(call["function"]["arguments"]) == {"at": "it"}
            messages += [first["message"], {"role": "tool", "tool_call_id": call["id"], "content": "A door."}]
            second = (await ask({"messages": messages, "tools": [TOOL]}))["choices"][0]
            return str(second["message"]["content"])

        rollout = asyncio.create_task(agent())
        asked = await calls.next_request(rollout)
        assert asked is not None
        text = format_new_messages(asked, first=True)
        assert '"name": "look"' in text and text.endswith("Be kind.\n\nHello")
        calls.answer('I look. <tool_call>{"name": "look", "arguments": {"at": "it"}}</tool_call>')
        asked = await calls.next_request(rollout)
        assert (
            asked is not None
            and format_new_messages(asked, first=False) == "<tool_response>\nA door.\n</tool_response>"
        )
        calls.answer("Done.")
        assert await calls.next_request(rollout) is None and rollout.result() == "Done."

    asyncio.run(with_endpoint(scene))


def test_streams_and_nonsense_are_answered_and_abandoned_calls_end() -> None:
    async def scene(calls: ModelCallEndpoint, ask: Ask) -> None:
        assert "error" in await ask({"message": "?"})
        streamed = asyncio.create_task(ask({"messages": [user("Hi")], "stream": True}))
        assert await calls.next_request(streamed) is not None
        calls.answer("Yes.")
        chunk, end = (await streamed).strip().split("\n\n")
        assert json.loads(chunk.removeprefix("data: "))["choices"][0]["delta"]["content"] == "Yes."
        assert end == "data: [DONE]"
        waiting = asyncio.create_task(ask({"messages": [user("Hi")]}))
        assert await calls.next_request(waiting) is not None
        calls.cancel_requests()
        with pytest.raises(pytest.importorskip("aiohttp").ClientError):
            await waiting

    asyncio.run(with_endpoint(scene))


def test_calls_are_passed_on_only_where_all_of_them_can_be_read() -> None:
    broken = "<tool_call>{</tool_call>"
    for body, text in (({}, '{"name": "f", "arguments": {}}'), ({"tools": [TOOL]}, broken), ({"tools": [TOOL]}, "hm")):
        message = make_completion_body(body, text)["choices"][0]["message"]
        assert message == {"role": "assistant", "content": text}
    parts = [{"type": "text", "text": "Hello "}, {"type": "text", "text": "there"}]
    assert format_new_messages({"messages": [{"role": "user", "content": parts}]}, first=True) == "Hello there"


def test_verifiers_is_asked_for_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "verifiers", None)
    with pytest.raises(ConfigError, match=r"pip install 'verifiers"):
        VerifiersEnvironment(taskset="x")


def test_an_episode_of_verifiers_is_played_turn_by_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("verifiers.v1")
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    with pytest.raises(ConfigError, match="no_such_taskset"):
        VerifiersEnvironment(taskset="no-such-taskset")

    async def scene() -> None:
        agent = {"runtime": {"type": "subprocess"}, "harness": {"id": "toy-guess"}}
        world = VerifiersEnvironment(taskset="toy-guess", config={"agent": agent})
        for seed in (0, 3, 8):
            assert await world.reset(seed, {}) == "Guess my number."
            wrong = await world.step("9")
            assert wrong.text == "Not 9." and not wrong.done
            right = await world.step(str(seed % 5))
            assert right.done and right.success and right.reward == 1.0
        await world.reset(0, {"task": 4})
        replies = [await world.step("x") for _ in range(3)]
        assert [reply.done for reply in replies] == [False, False, True] and replies[-1].reward == 0.0
        await world.reset(0, {})
        with pytest.raises(EnvironmentFailed, match="broken on purpose"):
            await world.step("break")
        await world.reset(1, {})
        await world.close()
        assert asyncio.all_tasks() == {asyncio.current_task()}, "nothing is left behind"

    asyncio.run(scene())
