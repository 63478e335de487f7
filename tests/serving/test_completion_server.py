"""The official client against a real engine: answers, streams, refusals, limits, and clients that go away."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from headway.errors import ConfigError
from headway.serving.completion_server import CompletionServer, ServedModel, check_address, is_loopback
from tests.serving.factory import ADD, Stage, World, served

HELLO: list[Any] = [{"role": "user", "content": "3+5="}]


def test_a_chat_is_answered_with_what_the_engine_makes_of_the_rendered_conversation(stage: Stage) -> None:
    async def main() -> None:
        async with served(stage) as world:
            found = await world.client().chat.completions.create(
                model="tiny",
                messages=HELLO,
                temperature=0,
                max_tokens=12,
                logprobs=True,
                extra_body={"return_token_ids": True},
            )
            prompt = stage.made.context.policy.tokenizer.apply_chat_template(HELLO, add_generation_prompt=True)[
                "input_ids"
            ]
            wanted = await world.sampled(prompt, 12)
            choice = found.choices[0]
            assert choice.token_ids == list(wanted.actions)  # type: ignore[attr-defined]
            assert choice.message.content == stage.made.template.decode(wanted.actions)
            assert choice.logprobs is not None and choice.logprobs.content is not None
            assert [one.logprob for one in choice.logprobs.content] == pytest.approx(list(wanted.logps), abs=1e-5)
            assert found.usage is not None
            assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (len(prompt), len(wanted.actions))
            assert choice.finish_reason == ("length" if len(wanted.actions) == 12 else "stop")

    stage.run(main())


def test_a_stream_says_the_same_in_pieces(stage: Stage) -> None:
    async def main() -> None:
        async with served(stage) as world:
            ask: dict[str, Any] = {"model": "tiny", "messages": HELLO, "seed": 7, "max_tokens": 40, "n": 2}
            whole = await world.client().chat.completions.create(**ask)
            texts, ends, used = ["", ""], ["", ""], 0
            stream = await world.client().chat.completions.create(
                **ask, stream=True, stream_options={"include_usage": True}
            )
            pieces = 0
            async for chunk in stream:
                for choice in chunk.choices:
                    texts[choice.index] += choice.delta.content or ""
                    ends[choice.index] = choice.finish_reason or ends[choice.index]
                    pieces += 1
                used = chunk.usage.completion_tokens if chunk.usage else used
            assert texts == [choice.message.content for choice in whole.choices]
            assert ends == [choice.finish_reason for choice in whole.choices]
            assert texts[0] != texts[1] and pieces > 4
            assert whole.usage is not None and used == whole.usage.completion_tokens

    stage.run(main())


def test_completions_take_text_and_tokens_and_stop_where_they_are_told(stage: Stage) -> None:
    async def main() -> None:
        async with served(stage) as world:
            client = world.client()
            tokens = stage.made.template.encode("3+5=", add_special_tokens=True)
            ask: dict[str, Any] = {"model": "tiny", "seed": 1, "max_tokens": 30, "logprobs": 0}
            by_text = await client.completions.create(prompt="3+5=", **ask)
            by_tokens = await client.completions.create(prompt=tokens, **ask)
            text = by_text.choices[0].text
            assert text == by_tokens.choices[0].text and len(text) > 3
            assert by_text.choices[0].logprobs is not None
            assert len(by_text.choices[0].logprobs.token_logprobs or []) == by_text.usage.completion_tokens  # type: ignore[union-attr]
            stop = text[2]
            cut = await client.completions.create(prompt="3+5=", stop=stop, **ask)
            assert cut.choices[0].finish_reason == "stop"
            assert stop not in cut.choices[0].text
            shown = ""
            async for chunk in await client.completions.create(prompt="3+5=", stop=[stop, "zzzz"], stream=True, **ask):
                shown += chunk.choices[0].text if chunk.choices else ""
            assert shown == cut.choices[0].text

    stage.run(main())


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"temperature": "hot"}, "temperature"),
    ({"temprature": 1}, "temprature"),
    ({"presence_penalty": 1.0}, "presence_penalty"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": "x" * 300}]}, "messages"),
    ({"n": 0}, "n"),
    ({"stop": [""]}, "stop"),
]


def test_what_cannot_be_done_is_refused_by_name_before_the_engine_sees_it(stage: Stage) -> None:
    async def main() -> None:
        async with served(stage) as world:
            client = world.client()
            for changes, param in REFUSED:
                body = {"model": "tiny", "messages": HELLO, "user": "me", "store": False, **changes}
                with pytest.raises(openai.BadRequestError) as caught:
                    await client.post("/chat/completions", body=body, cast_to=object)
                assert caught.value.param == param and caught.value.type == "invalid_request_error"
            assert not world.started.is_set()

    stage.run(main())


def test_other_refusals_have_the_types_that_the_client_knows(stage: Stage) -> None:
    async def main() -> None:
        async with served(stage, body_mb=0.01) as world:
            client = world.client()
            with pytest.raises(openai.NotFoundError, match="only 'tiny'"):
                await client.chat.completions.create(model="gpt-4", messages=HELLO)
            with pytest.raises(openai.BadRequestError, match="echo"):
                await client.completions.create(model="tiny", prompt="a", echo=True)
            with pytest.raises(openai.BadRequestError, match="there is no token 99999"):
                await client.completions.create(model="tiny", prompt=[1, 99999])
            with pytest.raises(openai.APIStatusError) as caught:
                await client.completions.create(model="tiny", prompt="a" * 20_000)
            assert caught.value.status_code == 413
            with pytest.raises(openai.NotFoundError):
                await client.post("/embeddings", body={}, cast_to=object)
            assert [one.id async for one in await client.models.list()] == ["tiny"]  # type: ignore[misc]
            assert (await client.models.retrieve("tiny")).owned_by == "headway"

    stage.run(main())


def test_a_client_that_goes_away_stops_what_is_made_for_it(stage: Stage) -> None:
    async def main() -> None:
        async with served(stage) as world:
            await world.hub.halt_engines()  # nothing ends by itself
            asked = asyncio.ensure_future(_long(world))
            await world.started.wait()
            asked.cancel()
            await world.ended.wait()
            assert world.hub.replicas[0].load == 0
            await world.hub.continue_engines()

    stage.run(main())


def test_more_requests_than_allowed_are_told_to_come_back(stage: Stage) -> None:
    async def main() -> None:
        async with served(stage, requests=1) as world:
            await world.hub.halt_engines()
            asked = asyncio.ensure_future(_long(world))
            await world.started.wait()
            with pytest.raises(openai.RateLimitError) as caught:
                await _long(world)
            assert caught.value.response.headers["Retry-After"] == "1"
            await world.hub.continue_engines()
            assert (await asked).choices[0].message.content

    stage.run(main())


def test_a_server_that_is_closed_finishes_what_it_has_begun(stage: Stage) -> None:
    async def main() -> None:
        async with served(stage) as world:
            await world.hub.halt_engines()
            asked = asyncio.ensure_future(_long(world))
            await world.started.wait()
            assert world.server is not None
            closing = asyncio.ensure_future(world.server.close())
            with pytest.raises(openai.APIConnectionError):
                while True:
                    await world.client().models.list()
            await world.hub.continue_engines()
            assert (await asked).choices[0].message.content
            await closing

    stage.run(main())


def test_a_token_is_asked_for_and_other_machines_only_with_one(stage: Stage) -> None:
    async def main() -> None:
        async with served(stage, token="s3cret") as world:
            with pytest.raises(openai.AuthenticationError):
                await world.client("wrong").models.list()
            assert (await world.client("s3cret").models.list()).data[0].id == "tiny"
            with pytest.raises(ConfigError, match="there is no token"):
                await CompletionServer(ServedModel(model="m", template=stage.made.template)).start("0.0.0.0")

    stage.run(main())
    with pytest.raises(ConfigError, match="is no port"):
        check_address("127.0.0.1", 70_000, None)
    assert is_loopback("::1") and is_loopback("localhost") and not is_loopback("10.0.0.1")


def test_tools_reach_the_template(stage: Stage) -> None:
    async def main() -> None:
        async with served(stage) as world:
            ask: dict[str, Any] = {"model": "tiny", "messages": HELLO, "max_tokens": 4, "temperature": 0}
            without = await world.client().chat.completions.create(**ask)
            with_tools = await world.client().chat.completions.create(**ask, tools=[ADD])
            rendered = stage.made.context.policy.tokenizer.apply_chat_template(
                HELLO, tools=[ADD], add_generation_prompt=True
            )["input_ids"]
            assert without.usage is not None and with_tools.usage is not None
            assert with_tools.usage.prompt_tokens == len(rendered) > without.usage.prompt_tokens

    stage.run(main())


async def _long(world: World) -> Any:
    return await world.client().chat.completions.create(model="tiny", messages=HELLO, max_tokens=60)
