"""One request inside the native engine: its tokens so far, how many of them have KV, its row, and when it ends.

Plain numbers only. A sequence is *ready* when just its last token lacks KV: it computes one token and draws one in each
step. Before that it is *prefilling*.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

from headway.engines.base import Request
from headway.types import FinishReason

_MASK = (1 << 64) - 1


class NativeSequence:
    """Made by `generate`, then touched by the engine's thread only."""

    __slots__ = (
        "cached", "continues", "era", "key", "limit", "number", "params", "prefix", "prompt_length",
        "request_id", "row", "session", "stops", "tokens", "unreported", "unreported_logps",
    )  # fmt: skip

    def __init__(
        self, request: Request, actions: Sequence[int], *, number: int = 0, slot_tokens: int, seed: int = 0
    ) -> None:
        prompt = [int(token) for token in request.prompt]
        self.number = number
        """Unique in the engine: a request may come back under the same id before its first attempt is gone."""
        self.request_id = request.request_id
        self.params = request.params
        self.prompt_length = len(prompt)
        self.tokens = [*prompt, *(int(action) for action in actions)]
        """Prompt and actions."""
        self.limit = min(self.prompt_length + self.params.max_new_tokens, slot_tokens)
        """Number of tokens at which it ends by length."""
        self.prefix = tuple(prompt) if request.prefix_key >= 0 else None
        """The prompt, where others may share it."""
        self.session, self.continues = request.session, request.goes_on
        self.era = -1
        """The weights it began under, as counted by `PrefixCache`."""
        self.stops = self.params.stop
        self.key = int.from_bytes(blake2b(f"{seed}/{self.request_id}".encode(), digest_size=8).digest(), "big")
        self.row = -1
        self.cached = 0
        """Tokens whose KV is in the slot."""
        self.unreported: list[int] = []
        """Actions not yet reported."""
        self.unreported_logps: list[float] = []

    @property
    def missing(self) -> int:
        """Tokens without KV."""
        return len(self.tokens) - self.cached

    @property
    def actions(self) -> list[int]:
        """Everything that was generated."""
        return self.tokens[self.prompt_length :]

    def next_uniform(self) -> float:
        """Return the number in [0, 1) that decides the next draw: a hash of seed, request and position only."""
        z = (self.key + (len(self.tokens) - self.prompt_length + 1) * 0x9E3779B97F4A7C15) & _MASK
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
        return ((z ^ (z >> 31)) >> 11) * 2.0**-53

    def append(self, token: int, logp: float) -> None:
        """Add an action."""
        self.tokens.append(token)
        self.unreported.append(token)
        self.unreported_logps.append(logp)

    def extend(self, tokens: list[int], logps: list[float]) -> None:
        """Add several actions."""
        self.tokens += tokens
        self.unreported += tokens
        self.unreported_logps += logps

    def find_finish(self, eos: frozenset[int]) -> FinishReason | None:
        """Return how it has ended by its last action or its length, if it has. Does not look for stop strings."""
        if len(self.tokens) > self.prompt_length and self.tokens[-1] in eos:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.tokens) >= self.limit else None
