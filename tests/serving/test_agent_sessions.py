"""Foreign agents on a real engine: every call is a turn, token for token."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import openai
import pytest
import torch

from headway.errors import EnvironmentFailed
from headway.launch.inference_session import PreparedServing
from headway.serving.agent_launch import make_function_launcher
from headway.types import Episode
from tests.engines.factory import full_logps
from tests.serving.factory import ADD, Stage, client, episodes


@cache
def _weights(path: Path) -> Any:
    from headway.models.model_loading import load_model

    return load_model(path, torch.float32).eval()


def contexts(episode: Episode) -> list[list[int]]:
    """What each turn saw, by the record."""
    found: list[list[int]] = []
    context: list[int] = []
    for turn in episode.turns:
        context = [*([] if turn.starts_new_context else context), *turn.observation]
        found.append(list(context))
        context += turn.generation.actions
    return found


def check_exact(made: PreparedServing, episode: Episode) -> None:
    """The log-probabilities of the record are those of its tokens behind its contexts, and of nothing else."""
    for context, turn in zip(contexts(episode), episode.turns, strict=True):
        actions = list(turn.generation.actions)
        logps = full_logps(_weights(made.context.policy.path), context, actions)
        exact = logps.gather(1, torch.tensor(actions)[:, None])[:, 0].tolist()
        assert list(turn.generation.logps) == pytest.approx(exact, abs=2e-4)
        assert sum(run.count for run in turn.generation.runs) == len(actions)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def answers(episode: Episode) -> list[list[int]]:
    return [list(turn.generation.actions) for turn in episode.turns]


async def ask(base_url: str, key: str, messages: Sequence[Any], **options: Any) -> Any:
    return await client(base_url, key).chat.completions.create(
        model="gpt-whatever",
        messages=list(messages),
        extra_body={"return_token_ids": True},
        **options,
    )


def test_a_conversation_grows_by_exactly_what_was_sampled(stage: Stage) -> None:
    seen: list[Any] = []

    async def talkative(base_url: str, api_key: str, model: str, task: dict[str, Any]) -> float:
        messages: list[Any] = [{"role": "system", "content": "Add."}, user(task["question"])]
        for number in range(3):
            found = await ask(base_url, api_key, messages, temperature=0.1, logprobs=True)
            seen.append(found)
            messages += [found.choices[0].message, user(f"more {number}")]
        return 0.5

    async def main() -> None:
        async with episodes(stage) as world:
            episode = await world.play(make_function_launcher(talkative), data={"question": "1+1="})
            assert [turn.starts_new_context for turn in episode.turns] == [False, False, False]
            assert [turn.reward for turn in episode.turns] == [0.0, 0.0, 0.5]
            assert answers(episode) == [found.choices[0].token_ids for found in seen]
            for found, turn in zip(seen, episode.turns, strict=True):
                told = [one.logprob for one in found.choices[0].logprobs.content]
                assert told == list(turn.generation.logps)
            assert [found.usage.prompt_tokens for found in seen] == [len(one) for one in contexts(episode)]
            check_exact(stage.made, episode)
            end = stage.made.context.policy.tokenizer.eos_token_id
            for before, turn in zip(episode.turns, episode.turns[1:], strict=False):
                closed = before.generation.actions[-1] == end
                text = stage.made.template.decode(turn.observation, keep_special_tokens=True)
                assert text.startswith("<user>more" if closed else "<end><user>more") and text.endswith("<assistant>")
            assert not len(world.endpoint.sessions)

    stage.run(main())


def test_a_rewritten_history_begins_a_context_of_its_own_and_an_old_one_can_be_taken_up_again(stage: Stage) -> None:
    async def forgetful(base_url: str, api_key: str, model: str, task: dict[str, Any]) -> float:
        first = [user("a")]
        one = await ask(base_url, api_key, first)
        await ask(base_url, api_key, [user("summary: a was said"), user("b")])
        await ask(base_url, api_key, [*first, one.choices[0].message, user("c")])
        return 1.0

    async def main() -> None:
        async with episodes(stage) as world:
            episode = await world.play(make_function_launcher(forgetful))
            assert [turn.starts_new_context for turn in episode.turns] == [False, True, True]
            one, two, three = contexts(episode)
            assert stage.made.template.decode(two, keep_special_tokens=True).endswith("<user>b<end><assistant>")
            known = [*one, *episode.turns[0].generation.actions]
            assert three[: len(known)] == known and len(three) > len(known)
            check_exact(stage.made, episode)

    stage.run(main())


def test_calls_at_the_same_time_are_turns_one_after_the_other(stage: Stage) -> None:
    async def hasty(base_url: str, api_key: str, model: str, task: dict[str, Any]) -> float:
        found = await asyncio.gather(*(ask(base_url, api_key, [user(f"q{number}")]) for number in range(4)))
        assert len({one.id for one in found}) == 4
        return 1.0

    async def main() -> None:
        async with episodes(stage) as world:
            episode = await world.play(make_function_launcher(hasty))
            assert len(episode.turns) == 4 and [turn.starts_new_context for turn in episode.turns[1:]] == [True] * 3
            check_exact(stage.made, episode)

    stage.run(main())


def test_rewards_are_those_of_the_turn_they_follow_and_done_ends_the_episode(stage: Stage) -> None:
    async def paid(base_url: str, api_key: str, model: str, task: dict[str, Any]) -> None:
        talk = client(base_url, api_key)
        messages: list[Any] = [user("a")]
        for reward in (0.25, -1.0):
            found = await talk.chat.completions.create(model="m", messages=messages)
            messages += [found.choices[0].message, user("next")]
            url = base_url.removesuffix("/v1") + "/reward"
            await talk.post(url, body={"reward": reward, "done": reward < 0}, cast_to=object)
        await asyncio.Event().wait()  # it is not waited for

    async def main() -> None:
        async with episodes(stage) as world:
            episode = await world.play(make_function_launcher(paid))
            assert [turn.reward for turn in episode.turns] == [0.25, -1.0]

    stage.run(main())


def test_a_session_is_found_by_header_and_has_a_key_of_its_own(stage: Stage) -> None:
    async def by_header(base_url: str, api_key: str, model: str, task: dict[str, Any]) -> float:
        root, session = base_url.removesuffix("/v1").split("/sessions/")
        talk = client(f"{root}/v1", api_key)
        found = await talk.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "a"}], extra_headers={"X-Headway-Session": session}
        )
        with pytest.raises(openai.BadRequestError, match="which session"):
            await talk.models.list()
        with pytest.raises(openai.AuthenticationError):
            await client(base_url, "another").models.list()
        with pytest.raises(openai.BadRequestError, match="n must be 1"):
            await ask(base_url, api_key, [user("a")], n=2)
        return float(len(found.choices))

    async def main() -> None:
        async with episodes(stage) as world:
            episode = await world.play(make_function_launcher(by_header))
            assert len(episode.turns) == 1 and episode.turns[0].reward == 1.0

    stage.run(main())


def test_text_completions_and_streams_are_turns_too(stage: Stage) -> None:
    async def plain(base_url: str, api_key: str, model: str, task: dict[str, Any]) -> float:
        talk = client(base_url, api_key)
        first = await talk.completions.create(model="m", prompt="1+", max_tokens=3)
        text = ""
        prompt = "1+" + first.choices[0].text + "\n"
        async for chunk in await talk.completions.create(model="m", prompt=prompt, stream=True, max_tokens=5):
            text += chunk.choices[0].text
        return float(len(text))

    async def main() -> None:
        async with episodes(stage) as world:
            episode = await world.play(make_function_launcher(plain))
            assert [turn.starts_new_context for turn in episode.turns] == [False, False]
            assert len(episode.turns[0].generation.actions) <= 3
            assert list(episode.turns[1].observation) == stage.made.template.encode("\n")
            assert episode.turns[1].reward == len(stage.made.template.decode(episode.turns[1].generation.actions))
            check_exact(stage.made, episode)

    stage.run(main())


def test_limits_are_told_to_the_agent_and_cut_the_episode_off(stage: Stage) -> None:
    async def endless(base_url: str, api_key: str, model: str, task: dict[str, Any]) -> float:
        while True:
            await ask(base_url, api_key, [user("a" * task["long"])])

    async def main() -> None:
        async with episodes(stage) as world:
            episode = await world.play(make_function_launcher(endless), data={"long": 1}, max_turns=2)
            assert len(episode.turns) == 2 and episode.truncated
            with pytest.raises(
                EnvironmentFailed, match="maximum context length is 256 tokens, and your prompt has 404"
            ):
                await world.play(make_function_launcher(endless), data={"long": 400})

    stage.run(main())


@pytest.mark.parametrize(
    ("what", "said"),
    [("nothing", "without asking"), ("raise", "RuntimeError: oh"), ("forget", "what it has earned"), ("nan", "nan")],
)
def test_agents_that_fail_are_failed_episodes(stage: Stage, what: str, said: str) -> None:
    async def bad(base_url: str, api_key: str, model: str, task: dict[str, Any]) -> float | None:
        if what == "nothing":
            return 1.0
        await ask(base_url, api_key, [user("a")])
        if what == "raise":
            raise RuntimeError("oh")
        return float("nan") if what == "nan" else None

    async def main() -> None:
        async with episodes(stage) as world:
            with pytest.raises(EnvironmentFailed, match=said):
                await world.play(make_function_launcher(bad))
            assert not len(world.endpoint.sessions)

    stage.run(main())


def test_an_answer_that_got_lost_is_given_again_without_another_turn(stage: Stage) -> None:
    async def main() -> None:
        loop_of_run = asyncio.get_running_loop()
        async with episodes(stage) as world:

            async def ask_the_run(call: Coroutine[Any, Any, Any]) -> None:
                await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(call, loop_of_run))

            async def impatient(base_url: str, api_key: str, model: str, task: dict[str, Any]) -> float:
                first = asyncio.ensure_future(ask(base_url, api_key, [user("a")]))
                await ask_the_run(world.started.wait())
                first.cancel()
                await asyncio.wait([first])
                await ask_the_run(world.hub.continue_engines())
                found = await ask(base_url, api_key, [user("a")])
                return float(found.usage.completion_tokens)

            await world.hub.halt_engines()
            episode = await world.play(make_function_launcher(impatient))
            assert len(episode.turns) == 1
            assert episode.turns[0].reward == len(episode.turns[0].generation.actions)

    stage.run(main())


def test_a_function_that_blocks_has_a_thread_of_its_own(stage: Stage) -> None:
    def blocking(base_url: str, api_key: str, model: str, task: dict[str, Any], times: int) -> dict[str, Any]:
        talk = openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0)
        for _ in range(times):
            talk.chat.completions.create(model=model, messages=[{"role": "user", "content": "a"}])
        return {"reward": 2, "note": model}

    async def main() -> None:
        async with episodes(stage) as world:
            episode = await world.play(make_function_launcher(blocking, {"times": 2}))
            assert episode.turns[-1].reward == 2.0 and episode.info == {"note": "policy", "turns": 2}

    stage.run(main())


def test_a_tool_call_is_read_and_the_conversation_goes_on_behind_it(stage: Stage) -> None:
    """The model is random, so its words are put into its mouth where the session hands them out."""
    from headway.serving.agent_sessions import ConversationHistory
    from headway.serving.completion_requests import parse_chat_request
    from headway.serving.completions import GeneratedTokens, make_choice
    from headway.types import FinishReason

    said = 'Let me see.<tool_call>{"name": "add", "arguments": {"b": 2, "a": 1}}</tool_call>'
    first = parse_chat_request({"model": "m", "messages": [user("1+2?")], "tools": [ADD]})
    history = ConversationHistory(stage.made.template)
    context = history.make_context(first)
    tokens = [*stage.made.template.encode(said), stage.made.context.policy.tokenizer.eos_token_id]
    spoken = GeneratedTokens(tokens=tokens, logps=[0.0] * len(tokens), finish=FinishReason.STOP)
    answer = make_choice(stage.made.template, first, spoken, "x")
    assert answer.text == "Let me see." and answer.finish_reason == "tool_calls"
    (call,) = answer.tool_calls
    assert (call.name, json.loads(call.arguments)) == ("add", {"a": 1, "b": 2})
    history.add(first, context, answer)
    arguments = '{"a": 1,"b":2}'  # as other programs write it
    echoed = {"id": call.call_id, "type": "function", "function": {"name": "add", "arguments": arguments}}
    back = [
        user("1+2?"),
        {"role": "assistant", "content": "Let me see. ", "tool_calls": [echoed], "refusal": None},
        {"role": "tool", "tool_call_id": call.call_id, "content": "3"},
    ]
    following = history.make_context(parse_chat_request({"model": "m", "messages": back, "tools": [ADD]}))
    assert not following.starts_new_context
    assert following.tokens == [*context.tokens, *tokens, *following.new_tokens]
    assert stage.made.template.decode(following.new_tokens, keep_special_tokens=True) == "<tool>3<end><assistant>"
    other = history.make_context(parse_chat_request({"model": "m", "messages": back}))
    assert other.starts_new_context and other.new_tokens == other.tokens
