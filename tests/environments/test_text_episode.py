"""Episodes in tokens: limits, counters, penalties, stop strings, and the contract of every environment."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from headway.environments.base import Observation
from headway.environments.chat_turns import ChatTurnEncoder
from headway.environments.environment_registry import make_environment
from headway.environments.local_host import LocalEnvironmentHost
from headway.environments.text_environment import truncate_at_stop
from headway.environments.text_episode import EpisodeRules, TextEpisode
from headway.errors import EnvironmentFailed
from headway.types import FinishReason, Generation, Task, VersionRun
from tests.contracts.environment_contract import EnvironmentContract
from tests.environments.letter_tokenizer import END, LetterTokenizer

TOKENIZER = LetterTokenizer()
TASK = Task(position=3, data={"seed": 7, "held_out": True, "more": 1})


def said(text: str, *, ended: bool = True) -> Generation:
    actions = [*TOKENIZER.encode(text), *([END] if ended else [])]
    return Generation(
        actions=actions,
        logps=[-1.0] * len(actions),
        runs=(VersionRun(version=0, count=len(actions)),),
        finish=FinishReason.STOP if ended else FinishReason.LENGTH,
        text=text,
    )


def episode(name: str = "Guess", options: dict[str, Any] | None = None, **rules: Any) -> TextEpisode:
    path = f"tests.environments.sample_environments:{name}"
    host = LocalEnvironmentHost(path, lambda: make_environment(path, **(options or {})))
    return TextEpisode(
        host.make_slot(), ChatTurnEncoder(TOKENIZER), EpisodeRules(**{"max_episode_tokens": 500, **rules})
    )


async def play(one: TextEpisode, *texts: str) -> list[Observation]:
    seen = [await one.reset(TASK)]
    for text in texts:
        seen.append(await one.step(said(text)))
    await one.close()
    return seen


def test_what_the_policy_sees_and_what_is_known_at_the_end() -> None:
    first, wrong, right = asyncio.run(play(episode(invalid_penalty=0.25), "hm\n7", "7"))
    assert TOKENIZER.decode(first.tokens) == (
        "<s><system>Guess a digit.</s>\n<user>Episode 1: a digit up to 9?</s>\n<assistant>"
    )
    assert (first.max_new_tokens, first.stop, first.starts_new_context) == (8, ("\n",), False)
    assert TOKENIZER.decode(wrong.tokens) == "\n<user>A digit!</s>\n<assistant>" and wrong.reward == -0.25
    assert right.done and not right.truncated and right.reward == 1.0
    assert right.info == {"turns": 2, "invalid": 1, "success": True}


def test_an_episode_is_cut_off_after_its_turns_and_after_too_many_malformed_ones() -> None:
    *_, last = asyncio.run(play(episode(), "1", "2", "3", "4"))
    assert (last.done, last.truncated) == (True, True) and last.info == {"turns": 4, "invalid": 0, "success": False}
    *_, last = asyncio.run(play(episode(max_steps=2), "1", "2"))
    assert last.truncated and last.info["turns"] == 2
    *_, last = asyncio.run(play(episode(max_invalid=2), "x", "1", "y"))
    assert last.truncated and last.info == {"turns": 3, "invalid": 2, "success": False}


def test_an_episode_ends_before_its_tokens_exceed_the_limit() -> None:
    async def lengths(longest: int) -> tuple[int, Observation]:
        one = episode(max_episode_tokens=longest)
        seen = await one.reset(TASK)
        length = len(seen.tokens)
        while not seen.done:
            assert seen.max_new_tokens is not None and 1 <= seen.max_new_tokens <= longest - length
            made = said("1" * (seen.max_new_tokens - 1))
            length += len(made.actions)
            seen = await one.step(made)
            length += len(seen.tokens)
            assert length <= longest
        await one.close()
        return length, seen

    for longest in range(70, 100, 3):
        _, last = asyncio.run(lengths(longest))
        assert last.truncated and last.info["turns"] < 4
    with pytest.raises(EnvironmentFailed, match=r"begins with .*, and an episode has at most 40 \(sequence_length, "):
        asyncio.run(lengths(40))


def test_without_history_every_turn_begins_anew() -> None:
    first, second, third = asyncio.run(play(episode(history=False, template="{turn_idx}: {observation}"), "1", "2"))
    assert first.starts_new_context and second.starts_new_context and third.starts_new_context
    start = "<s><system>Guess a digit.</s>\n<user>"
    assert TOKENIZER.decode(second.tokens) == f"{start}2: No.</s>\n<assistant>"
    assert TOKENIZER.decode(third.tokens) == f"{start}3: No.</s>\n<assistant>"


def test_engines_are_told_which_turns_another_one_follows_on() -> None:
    seen = asyncio.run(play(episode(max_steps=3), "1", "2"))
    assert [one.expects_next_turn for one in seen] == [True, True, False]
    seen = asyncio.run(play(episode(history=False, max_steps=3), "1", "2"))
    assert [one.expects_next_turn for one in seen] == [False, False, False]


def test_the_run_may_say_it_in_its_own_words() -> None:
    frame = "{observation} ({actions_left} left, {max_response_length} tokens)"
    first, second = asyncio.run(play(episode(instructions="", template=frame, max_tokens=5), "1"))
    assert TOKENIZER.decode(first.tokens) == "<s><user>Episode 1: a digit up to 9? (4 left, 5 tokens)</s>\n<assistant>"
    assert "No. (3 left, 5 tokens)" in TOKENIZER.decode(second.tokens) and second.max_new_tokens == 5


def test_equal_texts_are_equal_states_whatever_stands_around_them() -> None:
    async def scenario() -> list[str]:
        one = episode(max_steps=9)
        seen = [await one.reset(TASK)]
        for text, ended in (("x", True), ("y", False), ("1", True), ("2", False)):
            seen.append(await one.step(said(text, ended=ended)))
        await one.close()
        assert len({tuple(view.tokens) for view in seen}) == 5
        return [view.state for view in seen]

    start, *states = asyncio.run(scenario())
    assert states[0] == states[1] != states[2] == states[3] and start not in states


def test_seed_and_data_of_the_task_reach_the_environment() -> None:
    first, last = asyncio.run(play(episode("Async"), "end"))
    assert "seed 7 ['more']" in TOKENIZER.decode(first.tokens) and last.info["success"] is True


def test_text_is_cut_at_the_first_stop_string() -> None:
    assert truncate_at_stop("a\nb</x>", ("</x>", "\n")) == "a" and truncate_at_stop("ab", ("\n",)) == "ab"


class TestTextEpisode(EnvironmentContract):
    def run(self, scenario: Coroutine[Any, Any, None]) -> None:
        asyncio.run(scenario)

    def make(self, task: Task) -> TextEpisode:
        return episode()

    def task(self) -> Task:
        return TASK

    def generation(self) -> Generation:
        return said("1")

    def failing(self, task: Task) -> TextEpisode:
        return episode("Bad", {"what": "nonsense"})


def test_a_template_tells_the_last_turns_and_the_instructions() -> None:
    template = (
        "{env_instruction} After {step_count}, the last {history_length}: [{history}] "
        "Step {current_step}: {current_observation}{suffix}"
    )
    rules = {"history": False, "template": template, "instructions": "Play. {env_instruction}", "remembered_turns": 2}
    seen = [TOKENIZER.decode(one.tokens) for one in asyncio.run(play(episode(max_steps=9, **rules), "1", "2", "3"))]
    start = "<s><system>Play. Guess a digit.</s>\n<user>Guess a digit. "
    assert seen[0] == f"{start}After 0, the last 0: [] Step 1: Episode 1: a digit up to 9?</s>\n<assistant>"
    told = "(step 2, observation: No., action: 2), (step 3, observation: No., action: 3)"
    assert seen[3] == f"{start}After 3, the last 2: [{told}] Step 4: No.</s>\n<assistant>"


def test_nothing_inside_an_observation_is_a_field() -> None:
    template = "{observation}|{turn_idx}|{answer}"
    (first,) = asyncio.run(play(episode("Braces", template=template)))
    assert "{turn_idx} of {history}|1|{answer}" in TOKENIZER.decode(first.tokens)
