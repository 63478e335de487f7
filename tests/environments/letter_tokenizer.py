"""A tokenizer of letters with a chat template as Python, for what does not depend on a real one."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

SPECIAL = ["<s>", "</s>", "<user>", "<assistant>", "<system>"]
END = 1

Template = Callable[[list[dict[str, Any]]], str]


def plain(messages: list[dict[str, Any]]) -> str:
    """Every message in its marks, one after the other."""
    return "<s>" + "".join(f"<{message['role']}>{message['content']}</s>\n" for message in messages)


class LetterTokenizer:
    """One token a letter or special token."""

    all_special_tokens = SPECIAL

    def __init__(self, template: Template = plain, answer: str = "<assistant>", shows_tools: bool = False) -> None:
        self._template, self._answer, self._shows_tools = template, answer, shows_tools

    def apply_chat_template(
        self, conversation: list[dict[str, Any]], *, tokenize: bool, add_generation_prompt: bool, **variables: Any
    ) -> str:
        assert not tokenize
        if variables.get("polite"):
            please = {"assistant": "", "system": "", "user": " please", "tool": ""}
            conversation = [{**one, "content": one["content"] + please[one["role"]]} for one in conversation]
        tools = variables.get("tools", ()) if self._shows_tools else ()
        told = "".join(f"{{{tool['function']['name']}}}" for tool in tools)
        return told + self._template(conversation) + (self._answer if add_generation_prompt else "")

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        parts = re.findall("|".join(map(re.escape, SPECIAL)) + r"|[\s\S]", text)
        return [SPECIAL.index(part) if part in SPECIAL else 10 + ord(part) for part in parts]

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = False) -> str:
        words = [SPECIAL[token] if token < 10 else chr(token - 10) for token in tokens]
        return "".join(word for word in words if not (skip_special_tokens and word in SPECIAL))
