"""Stop strings that begin in one stream and end in the next: a server looks only at what it has made in this one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_TOKENS_PER_CHARACTER = 4
"""A character may be spread over this many byte tokens."""


class Stops:
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
