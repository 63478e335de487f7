"""One episode of a text environment, seen from the scheduler: observations in tokens, answers as the engine made them.

Guarantees: an episode ends, as truncated, before its tokens exceed `longest`, or after `max_steps` turns; the reward of
a reply is that of its turn; at the end `info` says how many `turns` there were, how many of them `invalid`, and whether
it was a `success`. Does not know where the environment runs: that is its seat's affair.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Protocol

from headway.environments.base import Observation
from headway.environments.chat_turns import ChatTurnEncoder
from headway.environments.text_environment import EnvironmentTraits, Reply
from headway.errors import EnvironmentFailed
from headway.types import Generation, Task

SEED_KEY, HELD_OUT_KEY = "seed", "held_out"
"""In a task's data: the seed of its episodes, and that they are not for training. The rest is the environment's."""


class EpisodeSlot(Protocol):
    """Where one environment plays one episode: a thread here, or a worker process."""

    async def enter(self) -> None:
        """Wait for a place."""
        ...

    async def open(self) -> EnvironmentTraits:
        """Have an environment, new or as good as new."""
        ...

    async def reset(self, seed: int, data: Mapping[str, Any]) -> Reply: ...

    async def step(self, action: str) -> Reply: ...

    async def leave(self) -> None:
        """Give the place back, in whatever state the episode is. Called exactly once."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeRules:
    """What a run asks of the episodes of one kind. `None`: what the environment's traits say."""

    longest: int
    """Tokens of a whole episode."""
    max_steps: int | None = None
    max_tokens: int | None = None
    max_invalid: int | None = None
    """Actions not understood after which an episode is cut off; `None`: any number."""
    invalid_penalty: float = 0.0
    """Taken from the reward of a turn whose action was not understood."""
    instructions: str | None = None
    template: str | None = None
    """Around every observation: `{observation}`, `{turn_idx}` from 1, `{actions_left}`, `{max_response_length}`."""
    history: bool = True
    """The policy sees the whole episode; otherwise instructions and the newest observation alone."""


class TextEpisode:
    """An `Environment` of the scheduler, made of a text environment."""

    __slots__ = ("_chat", "_gate", "_inside", "_invalid", "_length", "_rules", "_seat", "_traits", "_turns", "_won")

    def __init__(
        self, seat: EpisodeSlot, chat: ChatTurnEncoder, rules: EpisodeRules, gate: asyncio.Semaphore | None = None
    ) -> None:
        self._seat, self._chat, self._rules = seat, chat, rules
        self._gate, self._inside = gate, False
        self._traits = EnvironmentTraits()
        self._length = self._turns = self._invalid = 0
        self._won = False

    async def enter(self) -> None:
        if self._gate is not None:
            await self._gate.acquire()
            self._inside = True
        await self._seat.enter()

    async def reset(self, task: Task) -> Observation:
        self._traits = await self._seat.open()
        data = {key: value for key, value in task.data.items() if key not in (SEED_KEY, HELD_OUT_KEY)}
        reply = await self._seat.reset(int(task.data.get(SEED_KEY, task.position)), data)
        if reply.done:
            raise EnvironmentFailed("the episode is over before it began")
        tokens = self._first(reply.text)
        if len(tokens) >= self._rules.longest:
            raise EnvironmentFailed(
                f"begins with {len(tokens)} tokens, and an episode has at most {self._rules.longest}"
            )
        return self._seen(tokens, reply.text, fresh=not self._rules.history)

    async def step(self, generation: Generation) -> Observation:
        self._length += len(generation.actions)
        reply = await self._seat.step(truncate_at_stop(generation.text, self._traits.stop))
        self._turns += 1
        reward = reply.reward
        if not reply.valid:
            self._invalid += 1
            reward -= self._rules.invalid_penalty
        if reply.success is not None:
            self._won = reply.success
        if reply.done:
            return self._over(reply, reward)
        tokens = self._following(reply.text, generation.actions)
        room = self._rules.longest - (self._length if self._rules.history else 0) - len(tokens)
        if room < 1 or self._used_up():
            return self._over(reply, reward, truncated=True)
        return self._seen(tokens, reply.text, reward=reward, fresh=not self._rules.history)

    async def close(self) -> None:
        try:
            await self._seat.leave()
        finally:
            if self._gate is not None and self._inside:
                self._gate.release()
                self._inside = False

    def _used_up(self) -> bool:
        turns, invalid = self._rules.max_steps or self._traits.max_steps, self._rules.max_invalid
        return (turns is not None and self._turns >= turns) or (invalid is not None and self._invalid >= invalid)

    def _first(self, text: str) -> list[int]:
        given = self._rules.instructions
        return self._chat.first(self._traits.instructions if given is None else given, self._framed(text))

    def _following(self, text: str, said: Sequence[int]) -> list[int]:
        return self._chat.next(self._framed(text), said) if self._rules.history else self._first(text)

    def _framed(self, text: str) -> str:
        frame, rules, traits = self._rules.template, self._rules, self._traits
        if frame is None:
            return text
        steps = rules.max_steps or traits.max_steps
        frame = frame.replace("{turn_idx}", str(self._turns + 1))
        frame = frame.replace("{actions_left}", "any number of" if steps is None else str(steps - self._turns))
        frame = frame.replace("{max_response_length}", str(rules.max_tokens or traits.max_tokens or rules.longest))
        return frame.replace("{observation}", text)

    def _seen(self, tokens: list[int], text: str, *, reward: float = 0.0, fresh: bool) -> Observation:
        self._length = len(tokens) if fresh else self._length + len(tokens)
        room = self._rules.longest - self._length
        wanted = self._rules.max_tokens or self._traits.max_tokens
        return Observation(
            tokens=tokens,
            reward=reward,
            fresh=fresh,
            goes_on=self._rules.history and self._turns + 1 != (self._rules.max_steps or self._traits.max_steps),
            state=blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest(),
            most_tokens=room if wanted is None else min(room, wanted),
            stop=self._traits.stop,
        )

    def _over(self, reply: Reply, reward: float, *, truncated: bool = False) -> Observation:
        info = {**reply.info, "turns": self._turns, "invalid": self._invalid, "success": self._won}
        return Observation(reward=reward, done=True, truncated=truncated, info=info)


def truncate_at_stop(text: str, stops: Sequence[str]) -> str:
    """What stands before the first stop string."""
    ends = [place for stop in stops if (place := text.find(stop)) >= 0]
    return text[: min(ends)] if ends else text
