"""Stop strings: looked for in the text of what was generated, never in the prompt.

A stop string may begin and end inside tokens. The token that completes it is the last one and stays, as the model has
drawn it; cutting the text is the reader's affair.
"""

from __future__ import annotations

from collections.abc import Callable

from headway.engines.native.sequence import Sequence

Decode = Callable[[list[int]], str]
"""Token ids to text."""
_TOKENS_PER_CHARACTER = 4
"""A character may be spread over this many byte tokens."""


class StopStrings:
    """Tells whether the last action has completed a stop string."""

    def __init__(self, decode: Decode) -> None:
        self._decode = decode

    def __call__(self, sequence: Sequence) -> bool:
        reach = _TOKENS_PER_CHARACTER * (max(map(len, sequence.stops)) + 1)
        tail = sequence.tokens[max(sequence.prompt_length, len(sequence.tokens) - reach) :]
        text = self._decode(tail)
        return any(stop in text for stop in sequence.stops)
