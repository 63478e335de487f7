"""Tool calls, from a model that always makes one, to an agent that answers it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headway.serving.agent_launch import make_function_launcher
from tests.serving.factory import ADD, TEMPLATE, Stage, client, episodes, ready, served

CALL = '{"name": "add", "arguments": {"a": 1}}'
WORDS = ["<assistant>", "Well. ", "<tool_call>", CALL, "</tool_call>", "<end>", "<begin>", "<unknown>"]
"""After each the model says the next."""


def make_parrot(directory: Path) -> Path:
    """A model that says n + 1 after n, whatever came before, with words for numbers."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from tests.engines.factory import counting_model

    words = Tokenizer(models.WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="<unknown>"))
    words.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    words.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words,
        bos_token="<begin>",
        eos_token="<end>",
        unk_token="<unknown>",
        additional_special_tokens=["<assistant>"],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(directory)
    counting_model().save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def parrot(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    made = Stage(ready(make_parrot(tmp_path_factory.mktemp("parrot")), "sequence_length=512"))
    yield made
    made.close()


QUESTION: dict[str, Any] = {"role": "user", "content": "1+?"}


def test_a_call_is_answered_whole_and_in_pieces(parrot: Stage) -> None:
    async def main() -> None:
        async with served(parrot) as world:
            ask: dict[str, Any] = {"model": "tiny", "messages": [QUESTION], "tools": [ADD]}
            found = (await world.client().chat.completions.create(**ask)).choices[0]
            assert found.finish_reason == "tool_calls" and found.message.content == "Well."
            assert found.message.tool_calls is not None
            (call,) = found.message.tool_calls
            assert call.type == "function" and call.function.name == "add"
            assert json.loads(call.function.arguments) == {"a": 1}
            text, name, arguments, end = "", "", "", None
            async for chunk in await world.client().chat.completions.create(**ask, stream=True):
                delta = chunk.choices[0].delta
                text += delta.content or ""
                for part in delta.tool_calls or []:
                    assert part.function is not None
                    name, arguments = name + (part.function.name or ""), arguments + (part.function.arguments or "")
                end = chunk.choices[0].finish_reason or end
            assert (text.strip(), name, json.loads(arguments), end) == ("Well.", "add", {"a": 1}, "tool_calls")
            plain = (await world.client().chat.completions.create(model="tiny", messages=[QUESTION])).choices[0]
            assert plain.message.content == f"Well. <tool_call>{CALL}</tool_call>"

    parrot.run(main())


def test_an_agent_with_tools_is_one_growing_conversation(parrot: Stage) -> None:
    async def calculating(base_url: str, api_key: str, model: str, task: dict[str, Any]) -> float:
        talk, messages = client(base_url, api_key), [QUESTION]
        for _ in range(3):
            found = await talk.chat.completions.create(model=model, messages=messages, tools=[ADD])  # type: ignore[arg-type, call-overload]
            message = found.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            messages += [{"role": "tool", "tool_call_id": call.id, "content": "2"} for call in message.tool_calls]
        return 1.0

    async def main() -> None:
        async with episodes(parrot) as world:
            episode = await world.play(make_function_launcher(calculating))
            assert [turn.starts_new_context for turn in episode.turns] == [False] * 3
            assert [list(turn.generation.actions) for turn in episode.turns] == [[1, 2, 3, 4, 5]] * 3
            said = parrot.made.template.encode("<tool>2<end><assistant>")
            assert [list(turn.observation) for turn in episode.turns[1:]] == [said] * 2

    parrot.run(main())
