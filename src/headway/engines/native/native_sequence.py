"""One request inside the engine: its tokens so far, how many of them have KV, where it lives, when it ends.

Plain numbers only. A sequence is *ready* when just its last token lacks KV: one token a step, one draw a step.
Before that it is *filling*.
"""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from hashlib import blake2b

from headway.engines.base import Request
from headway.types import FinishReason

_MASK = (1 << 64) - 1


class NativeSequence:
    """Made by `generate`, then touched by the worker's thread only."""

    __slots__ = (
        "cached",
        "era",
        "fresh",
        "fresh_logps",
        "goes_on",
        "key",
        "limit",
        "number",
        "params",
        "prefix",
        "prompt_length",
        "request_id",
        "row",
        "session",
        "stops",
        "tokens",
    )

    def __init__(
        self, request: Request, actions: Tokens[int], *, number: int = 0, slot_tokens: int, seed: int = 0
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
        """Tokens at which it ends by length."""
        self.prefix = tuple(prompt) if request.prefix_key >= 0 else None
        """What others may share with it."""
        self.session, self.goes_on = request.session, request.goes_on
        self.era = -1
        """Under which weights it began; `Prefixes` counts."""
        self.stops = self.params.stop
        self.key = int.from_bytes(blake2b(f"{seed}/{self.request_id}".encode(), digest_size=8).digest(), "big")
        self.row = -1
        self.cached = 0
        """Tokens whose KV is in the slot."""
        self.fresh: list[int] = []
        """Actions not yet reported."""
        self.fresh_logps: list[float] = []

    @property
    def missing(self) -> int:
        """Tokens without KV."""
        return len(self.tokens) - self.cached

    @property
    def actions(self) -> list[int]:
        """What was generated, from the beginning."""
        return self.tokens[self.prompt_length :]

    def uniform(self) -> float:
        """The number in [0, 1) that decides the next draw: a hash of seed, request and position, of nothing else."""
        z = (self.key + (len(self.tokens) - self.prompt_length + 1) * 0x9E3779B97F4A7C15) & _MASK
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
        return ((z ^ (z >> 31)) >> 11) * 2.0**-53

    def append(self, token: int, logp: float) -> None:
        """One more action."""
        self.tokens.append(token)
        self.fresh.append(token)
        self.fresh_logps.append(logp)

    def extend(self, tokens: list[int], logps: list[float]) -> None:
        """Some more actions."""
        self.tokens += tokens
        self.fresh += tokens
        self.fresh_logps += logps

    def finish(self, eos: frozenset[int]) -> FinishReason | None:
        """How it has ended by its last action or its length, if it has. Stop strings are looked for elsewhere."""
        if len(self.tokens) > self.prompt_length and self.tokens[-1] in eos:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.tokens) >= self.limit else None
