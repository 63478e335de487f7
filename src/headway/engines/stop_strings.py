"""Stop strings: looked for in the text of what was generated, never in the prompt.

A stop string may begin and end inside tokens. The token that completes it is the last one and stays, as the model has
drawn it; cutting the text is the reader's affair.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from headway.engines.native.native_sequence import NativeSequence

DecodeTokens = Callable[[list[int]], str]
"""Token ids to text."""
_TOKENS_PER_CHARACTER = 4
"""A character may be spread over this many byte tokens."""


class StopStrings:
    """Tells whether the last action has completed a stop string."""

    def __init__(self, decode: DecodeTokens) -> None:
        self._decode = decode

    def __call__(self, sequence: NativeSequence) -> bool:
        reach = _TOKENS_PER_CHARACTER * (max(map(len, sequence.stops)) + 1)
        tail = sequence.tokens[max(sequence.prompt_length, len(sequence.tokens) - reach) :]
        text = self._decode(tail)
        return any(stop in text for stop in sequence.stops)


"""A character may be spread over this many byte tokens."""


class StopStringSearch:
    """Of one request. Without strings or a tokenizer it finds nothing."""

    def __init__(self, strings: Sequence[str], decode: Callable[[list[int]], str] | None) -> None:
        self._strings, self._decode = strings, decode
        self._reach = _TOKENS_PER_CHARACTER * (max(map(len, strings), default=0) + 1)

    def completed(self, actions: Sequence[int]) -> bool:
        """Whether a stop string stands at the end of `actions`."""
        if not self._strings or self._decode is None:
            return False
        text = self._decode(list(actions[max(0, len(actions) - self._reach) :]))
        return any(stop in text for stop in self._strings)

    def cut(self, before: Sequence[int], tokens: Sequence[int]) -> int:
        """How many of `tokens` there are up to the one that completes a stop string; that one stays."""
        if self._strings and self._decode is not None:
            for place in range(len(tokens)):
                if self.completed([*before[max(0, len(before) - self._reach) :], *tokens[: place + 1]]):
                    return place + 1
        return len(tokens)
