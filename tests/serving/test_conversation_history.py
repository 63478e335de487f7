"""Which tokens a call conditions on, for templates that would write them differently."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from headway.models.tiny_model import make_character_tokenizer
from headway.serving.agent_sessions import ConversationHistory, TurnContext
from headway.serving.chat_template import ChatTemplate
from headway.serving.completion_requests import parse_chat_request, parse_text_request
from headway.serving.completions import GeneratedTokens, make_choice
from headway.serving.request_errors import RequestRefused
from headway.types import FinishReason

THINKING = (
    "{% for message in messages %}{{ '<' + message['role'] + '>' }}"
    "{% if message['role'] == 'assistant' %}{{ message['content'].split('</think>')[-1] | trim }}"
    "{% else %}{{ message['content'] }}{% endif %}{{ '<end>' }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""Leaves thoughts out of what was said before, as many templates do."""
STRICT = "{% if messages[-1]['role'] == 'assistant' %}{{ raise_exception('no') }}{% endif %}" + THINKING
SPACED = "{% for message in messages %}{{ message['content'] + ' <end>' }}{% endfor %}{{ '<user>' }}"
TWICE = "{% for message in messages %}{{ message['content'] + message['content'] }}{% endfor %}"


@cache
def chat_template(template: str = THINKING) -> ChatTemplate:
    tokenizer = make_character_tokenizer()
    tokenizer.chat_template = template
    return ChatTemplate(tokenizer, end_tokens=frozenset({tokenizer.eos_token_id}))


def chat(*texts: str) -> Any:
    """A conversation in turns, begun by the user."""
    roles = ("user", "assistant")
    return parse_chat_request(
        {"model": "m", "messages": [{"role": roles[n % 2], "content": text} for n, text in enumerate(texts)]}
    )


def answered(
    history: ConversationHistory, ask: Any, text: str, speech: ChatTemplate, *, ended: bool = True
) -> TurnContext:
    """Have a call answered with a text."""
    context = history.make_context(ask)
    tokens = speech.encode(text + ("<end>" if ended else ""))
    made = GeneratedTokens(tokens=tokens, logps=[0.0] * len(tokens), finish=FinishReason.STOP)
    history.add(ask, context, make_choice(speech, ask, made, "x"))
    return context


def shown(tokens: list[int]) -> str:
    return chat_template().decode(tokens, keep_special_tokens=True)


@pytest.mark.parametrize("ended", [True, False])
def test_thoughts_stay_where_they_were_sampled(ended: bool) -> None:
    history = ConversationHistory(chat_template())
    first = answered(history, chat("a"), "hm</think>b", chat_template(), ended=ended)
    second = history.make_context(chat("a", "hm</think>b", "c"))
    assert not second.starts_new_context and first.tokens == second.tokens[: len(first.tokens)]
    assert shown(second.tokens) == "<user>a<end><assistant>hm</think>b<end><user>c<end><assistant>"


def test_the_longest_conversation_that_fits_is_gone_on_with() -> None:
    history, speech = ConversationHistory(chat_template()), chat_template()
    answered(history, chat("a"), "b", speech)
    answered(history, chat("a", "b", "c"), "d", speech)
    answered(history, chat("x"), "y", speech)
    again = history.make_context(chat("a", "b", "c", " d\n", "e"))
    assert again.starts_new_context and again.new_tokens == again.tokens
    assert shown(again.tokens).endswith("<assistant>d<end><user>e<end><assistant>")
    last = history.make_context(chat("x", "y", "z"))
    assert not last.starts_new_context and shown(last.new_tokens) == "<user>z<end><assistant>"
    rewritten = history.make_context(chat("a", "B", "c"))
    assert (
        rewritten.starts_new_context
        and shown(rewritten.tokens) == "<user>a<end><assistant>B<end><user>c<end><assistant>"
    )


def test_an_answer_ends_once() -> None:
    speech = chat_template(SPACED)
    history = ConversationHistory(speech)
    answered(history, chat("a"), "b", speech)
    assert shown(history.make_context(chat("a", "b", "c")).tokens) == "a <end><user>b<end>c <end><user>"


def test_where_the_template_gives_no_way_the_context_begins_anew() -> None:
    speech = chat_template(TWICE)
    history = ConversationHistory(speech)
    answered(history, chat("a"), "b", speech, ended=False)
    found = history.make_context(chat("a", "b", "c"))
    assert found.starts_new_context and shown(found.tokens) == "aabbcc"


def test_a_template_that_refuses_says_so() -> None:
    with pytest.raises(RequestRefused, match="refuses these messages: no"):
        ConversationHistory(chat_template(STRICT)).make_context(chat("a", "b"))


def test_texts_and_tokens_go_on_too() -> None:
    history, speech = ConversationHistory(chat_template()), chat_template()
    answered(history, parse_text_request({"model": "m", "prompt": "1+"}), "2=", speech, ended=False)
    more = history.make_context(parse_text_request({"model": "m", "prompt": "1+2=3"}))
    assert not more.starts_new_context and shown(more.new_tokens) == "3"
    tokens = speech.encode("1+2=")
    by_tokens = history.make_context(parse_text_request({"model": "m", "prompt": [*tokens, 9, 8]}))
    assert not by_tokens.starts_new_context and by_tokens.new_tokens == [9, 8]
    assert history.make_context(parse_text_request({"model": "m", "prompt": "1-"})).starts_new_context
    assert history.make_context(chat("1+")).starts_new_context
