"""What a policy meant: the action inside what it said.

The last `<answer>…</answer>` counts where there is one, after any thinking; otherwise all of the text. Nothing is
guessed: an action that cannot be told is none.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_ANSWER = re.compile(r"<answer>(.*?)(?:</answer>|\Z)", re.DOTALL | re.IGNORECASE)
_THINKING = re.compile(r"\A.*?</think>", re.DOTALL | re.IGNORECASE)

_LONGEST_COMMAND = 300


def answer_in(text: str) -> str:
    """The answer without thinking and tags."""
    spoken = _THINKING.sub("", text)
    found = _ANSWER.findall(spoken)
    return str(found[-1] if found else spoken).strip()


def choice_in(text: str, options: Sequence[str]) -> str | None:
    """The one of `options` that the answer is, or the only one that it names as a word of its own."""
    answer = answer_in(text)
    for option in options:
        if answer.casefold() == option.casefold():
            return option
    named = [one for one in options if re.search(rf"(?<!\w){re.escape(one)}(?!\w)", answer, re.IGNORECASE)]
    return named[0] if len(named) == 1 else None


def line_in(text: str) -> str:
    """The first line of the answer that is not empty, without a leading prompt sign: a command for a text world."""
    lines = [line.strip().lstrip(">").strip() for line in answer_in(text).splitlines()]
    return next((" ".join(line.split())[:_LONGEST_COMMAND] for line in lines if line), "")
