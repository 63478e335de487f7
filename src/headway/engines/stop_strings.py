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


def ends_with_stop_string(tokens: Sequence[int], start: int, strings: Sequence[str], decode: DecodeTokens) -> bool:
    """Return whether the last of `tokens` completes a stop string that begins at token `start` or later."""
    text = decode(list(tokens[max(start, len(tokens) - _count_searched_tokens(strings)) :]))
    return any(stop in text for stop in strings)


class StopStringSearch:
    """The stop strings of one request. Finds nothing where there are none, or no tokenizer."""

    def __init__(self, strings: Sequence[str], decode: DecodeTokens | None) -> None:
        self._strings, self._decode = strings, decode

    def is_complete(self, actions: Sequence[int]) -> bool:
        """Return whether the last of `actions` completes a stop string."""
        if not self._strings or self._decode is None:
            return False
        return ends_with_stop_string(actions, 0, self._strings, self._decode)

    def count_until_stop(self, before: Sequence[int], tokens: Sequence[int]) -> int:
        """Return how many of `tokens` come up to the one that completes a stop string, that one included."""
        if self._strings and self._decode is not None:
            context = before[max(0, len(before) - _count_searched_tokens(self._strings)) :]
            for count in range(1, len(tokens) + 1):
                if self.is_complete([*context, *tokens[:count]]):
                    return count
        return len(tokens)


def _count_searched_tokens(strings: Sequence[str]) -> int:
    return _TOKENS_PER_CHARACTER * (max(map(len, strings)) + 1)
