"""Text from tokens: what is streamed is what is said, whatever the tokens and wherever they are cut."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.serving.chat_template import ChatTemplate
from headway.serving.completion_requests import parse_chat_request
from headway.serving.completions import GeneratedTokens, StreamingDetokenizer, make_choice
from headway.types import FinishReason
from tests.serving.factory import ADD

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
BROKEN = '<tool_call>{"name": "add", "argum</tool_call>'


@cache
def by_bytes() -> ChatTemplate:
    """One token a byte: characters come in parts."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: n for n, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)
    return ChatTemplate(fast, end_tokens=frozenset())


def ask(**options: Any) -> Any:
    return parse_chat_request({"model": "m", "messages": [{"role": "user", "content": "?"}], **options})


def said(text: str) -> GeneratedTokens:
    tokens = by_bytes().encode(text)
    return GeneratedTokens(tokens=tokens, logps=[0.0] * len(tokens), finish=FinishReason.STOP)


texts = st.lists(st.sampled_from(["a", "é", "🎉", "\n", "<", "<tool", CALL, BROKEN, "stop", "st", " "]), max_size=8)


@settings(max_examples=60, deadline=None)
@given(texts.map("".join), st.booleans(), st.booleans(), st.integers(1, 7))
def test_pieces_add_up_to_the_answer(text: str, tools: bool, stops: bool, size: int) -> None:
    asked = ask(**({"tools": [ADD]} if tools else {}), **({"stop": ["stop", "\n\n"]} if stops else {}))
    made = said(text)
    answer = make_choice(by_bytes(), asked, made, "x")
    stream = StreamingDetokenizer(by_bytes(), asked)
    shown = "".join(stream.add(made.tokens[at : at + size]) for at in range(0, len(made.tokens), size))
    assert "\ufffd" not in shown
    if answer.tool_calls:
        assert answer.text.strip().startswith(shown.strip())
    else:
        assert shown + stream.remaining(answer.text) == answer.text
    if stops:
        assert "stop" not in answer.text


def test_calls_are_taken_out_and_what_is_none_stays() -> None:
    asked = ask(tools=[ADD])
    answer = make_choice(by_bytes(), asked, said(f"Well.{CALL} {BROKEN}{CALL}"), "x")
    assert answer.text == f"Well. {BROKEN}" and answer.finish_reason == "tool_calls"
    assert [(call.call_id, call.name, call.arguments) for call in answer.tool_calls] == [
        ("call_x_0", "add", '{"a": 1}'),
        ("call_x_1", "add", '{"a": 1}'),
    ]
    plain = make_choice(by_bytes(), ask(), said(CALL), "x")
    assert plain.text == CALL and not plain.tool_calls and plain.finish_reason == "stop"


@pytest.mark.parametrize("text", ["[1]", '{"name": 3}', '{"name": "f", "arguments": "x"}', "[" * 5_000])
def test_what_is_no_call_stays_text(text: str) -> None:
    block = f"<tool_call>{text}</tool_call>"
    assert make_choice(by_bytes(), ask(tools=[ADD]), said(block), "x").text == block
