"""Tokens around turns: what was sampled stays, what stands between is the template's."""

from __future__ import annotations

from typing import Any

import pytest

from headway.environments.chat_turns import ChatTurnEncoder
from headway.errors import ConfigError
from tests.environments.letter_tokenizer import END, LetterTokenizer, plain

SAID = "<assistant>"


def test_turns_put_together_one_by_one_are_what_the_template_makes_of_the_whole() -> None:
    tokenizer = LetterTokenizer()
    chat = ChatTurnEncoder(tokenizer)
    tokens = chat.encode_opening("be good", "one")
    for answer, following in (("two", "three"), ("four", "five")):
        said = [*tokenizer.encode(answer), END]
        tokens += said + chat.encode_following(following, said)
    messages = [{"role": "system", "content": "be good"}]
    for role, word in zip(["user", "assistant"] * 3, ["one", "two", "three", "four", "five"], strict=False):
        messages.append({"role": role, "content": word})
    assert tokenizer.decode(tokens) == plain(messages) + SAID


def test_a_turn_is_ended_once_also_where_it_was_cut_off() -> None:
    tokenizer = LetterTokenizer()
    chat = ChatTurnEncoder(tokenizer)
    ended, cut, nothing = [*tokenizer.encode("x"), END], tokenizer.encode("x"), []
    for said in (ended, cut, nothing):
        text = tokenizer.decode([*said, *chat.encode_following("y", said)])
        assert text == f"{'x' if said else ''}</s>\n<user>y</s>\n<assistant>"


def test_a_policy_without_system_messages_is_told_in_the_first_message() -> None:
    def strict(messages: list[dict[str, Any]]) -> str:
        if messages[0]["role"] == "system":
            raise ValueError("no system messages here")
        return plain(messages)

    def deaf(messages: list[dict[str, Any]]) -> str:
        return plain([message for message in messages if message["role"] != "system"])

    for template in (strict, deaf):
        tokenizer = LetterTokenizer(template)
        assert (
            tokenizer.decode(ChatTurnEncoder(tokenizer).encode_opening("rules", "go"))
            == "<s><user>rules\n\ngo</s>\n<assistant>"
        )


def test_variables_reach_the_template_in_every_turn() -> None:
    tokenizer = LetterTokenizer()
    chat = ChatTurnEncoder(tokenizer, variables={"polite": True, "unheard_of": 1})
    assert tokenizer.decode(chat.encode_opening("", "go")) == "<s><user>go please</s>\n<assistant>"
    assert tokenizer.decode(chat.encode_following("on", [])) == "</s>\n<user>on please</s>\n<assistant>"


def test_control_tokens_in_what_an_environment_says_are_taken_out() -> None:
    tokenizer = LetterTokenizer()
    chat = ChatTurnEncoder(tokenizer)
    text = tokenizer.decode(chat.encode_following("a</s></<s>s><user>b", []))
    assert text == "</s>\n<user>ab</s>\n<assistant>"


def with_tool_messages(messages: list[dict[str, Any]]) -> str:
    """Shows answers of tools as Qwen does: in tags, those of one turn in one message of the user."""
    text, before = "<s>", ""
    for message, following in zip(messages, [*messages[1:], {"role": ""}], strict=True):
        is_tool = message["role"] == "tool"
        text += "" if is_tool and before == "tool" else f"<{'user' if is_tool else message['role']}>"
        text += f"[{message['content']}]" if is_tool else message["content"]
        text += "" if is_tool and following["role"] == "tool" else "</s>\n"
        before = message["role"]
    return text


def test_answers_of_tools_are_what_the_template_makes_of_tool_messages() -> None:
    tokenizer = LetterTokenizer(with_tool_messages)
    chat = ChatTurnEncoder(tokenizer)
    said = [*tokenizer.encode("call"), END]
    text = tokenizer.decode([*said, *chat.encode_following("all", said, ["7", "8</s>"])])
    assert text == "call</s>\n<user>[7][8]</s>\n<assistant>"

    def strict(messages: list[dict[str, Any]]) -> str:
        if any(message["role"] == "tool" for message in messages):
            raise ValueError("no tools here")
        return plain(messages)

    tokenizer = LetterTokenizer(strict)
    text = tokenizer.decode(ChatTurnEncoder(tokenizer).encode_following("all", said, ["7", "8"]))
    assert text == "\n<user>all</s>\n<assistant>"


def test_signatures_of_tools_are_told_by_the_template_or_behind_the_system_message() -> None:
    tool = {"type": "function", "function": {"name": "add"}}
    for shows, expected in ((True, "{add}<s><system>rules</s>"), (False, "<s><system>rules\n\n# Tools")):
        tokenizer = LetterTokenizer(shows_tools=shows)
        text = tokenizer.decode(ChatTurnEncoder(tokenizer).encode_opening("rules", "go", [tool]))
        assert text.startswith(expected)
        assert text.count("add") == 1


def forgetful(messages: list[dict[str, Any]]) -> str:
    """Leaves out all answers but the last."""
    answers = [message for message in messages if message["role"] == "assistant"]
    return plain([message for message in messages if message["role"] != "assistant" or message is answers[-1]])


def thinking(messages: list[dict[str, Any]]) -> str:
    """Writes something into the newest answer that it leaves out of older ones."""
    last = max((place for place, one in enumerate(messages) if one["role"] == "assistant"), default=-1)
    return plain(
        [{**one, "content": f"hm, {one['content']}"} if place == last else one for place, one in enumerate(messages)]
    )


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        (forgetful, "rewrites earlier turns"),
        (thinking, "rewrites earlier turns"),
        (lambda messages: plain(messages * 2), "2 times where a message says it once"),
        (lambda messages: "".join(message["content"] for message in messages), "nothing between an answer"),
        (lambda messages: 1 / 0, "fails for user, assistant, user"),
    ],
)
def test_a_template_with_which_an_episode_cannot_grow_is_refused(template: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        ChatTurnEncoder(LetterTokenizer(template), name="odd")


def test_a_beginning_of_the_answer_that_is_not_kept_in_the_history_is_refused() -> None:
    with pytest.raises(ConfigError, match="rewrites earlier turns"):
        ChatTurnEncoder(LetterTokenizer(answer="<assistant>hm, "))


def test_a_template_that_cannot_grow_with_its_variables_is_refused_by_their_names() -> None:
    class Hesitant(LetterTokenizer):
        def apply_chat_template(self, conversation: Any, *, thinks: bool = True, **options: Any) -> str:
            return super().apply_chat_template(conversation, **options) + ("" if thinks else "(no thoughts)")

    ChatTurnEncoder(Hesitant())
    with pytest.raises(ConfigError, match=r"rewrites earlier turns.*without thinks"):
        ChatTurnEncoder(Hesitant(), variables={"thinks": False})
