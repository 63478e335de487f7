"""Searches stop strings in the text of what was generated, never in the prompt.

A stop string may begin and end inside tokens. The token that completes one is the last token of the answer and stays,
because the model has drawn it; cutting the text is up to the reader.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

DecodeTokens = Callable[[list[int]], str]
"""Turns token ids into text."""
_TOKENS_PER_CHARACTER = 4
"""A character may be spread over this many byte tokens."""


def ends_with_stop_string(
    tokens: Sequence[int], strings: Sequence[str], decode: DecodeTokens | None, start: int = 0
) -> bool:
    """Return whether the last of `tokens` completes a stop string that begins at token `start` or later."""
    if not strings or decode is None:
        return False
    text = decode(list(tokens[max(start, len(tokens) - _count_searched_tokens(strings)) :]))
    return any(stop in text for stop in strings)


def count_until_stop(
    before: Sequence[int], tokens: Sequence[int], strings: Sequence[str], decode: DecodeTokens | None
) -> int:
    """Return how many of `tokens`, which follow `before`, come up to the one that completes a stop string."""
    if strings:
        context = before[max(0, len(before) - _count_searched_tokens(strings)) :]
        for count in range(1, len(tokens) + 1):
            if ends_with_stop_string([*context, *tokens[:count]], strings, decode):
                return count
    return len(tokens)


def _count_searched_tokens(strings: Sequence[str]) -> int:
    return _TOKENS_PER_CHARACTER * (max(map(len, strings)) + 1)
