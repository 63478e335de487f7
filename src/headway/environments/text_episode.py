"""One episode of a text environment as the scheduler sees it: observations in tokens, actions as the engine made them.

Guarantees: an episode ends, as truncated, before its tokens exceed `max_episode_tokens` or after `max_steps` turns; the
reward of a reply belongs to its turn; at the end, `info` holds the number of `turns`, how many of them were `invalid`,
and whether the episode was a `success`. The episode does not know where the environment runs: its slot does.
"""

import asyncio
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Protocol

from headway.environments.base import Observation
from headway.environments.chat_turns import ChatTurnEncoder
from headway.environments.response_parsing import extract_answer
from headway.environments.text_environment import EnvironmentTraits, Reply, truncate_at_stop
from headway.errors import EnvironmentFailed, EpisodeTooLong
from headway.types import Generation, Task

SEED_KEY, HELD_OUT_KEY = "seed", "held_out"
"""Keys in a task's data: the seed of its episodes, and whether they are held out from training. The environment gets
all other keys."""


TEMPLATE_FIELDS = (
    *("observation", "current_observation", "suffix", "turn_idx", "current_step", "step_count", "actions_left"),
    *("max_response_length", "env_instruction", "history", "history_length"),
)
"""Fields of a template: the observation (`suffix` is empty), the turn from 1, turns before it, turns that are left, the
longest answer in tokens, the environment's instructions, and what happened in the last turns."""
_FIELD = re.compile(rf"\{{({'|'.join(TEMPLATE_FIELDS)})\}}")


class EpisodeSlot(Protocol):
    """The place where one environment plays one episode: a thread of this process, or a worker process."""

    async def enter(self) -> None:
        """Wait until the host has a free slot."""

    async def open(self) -> EnvironmentTraits:
        """Obtain an environment, new or reused, and return its traits."""

    async def reset(self, seed: int, data: Mapping[str, Any]) -> Reply: ...

    async def step(self, action: str) -> Reply: ...

    async def locate(self) -> str:
        """Return ` in function at file:line` for a call that takes long, or nothing."""
        ...

    async def leave(self) -> None:
        """Free the slot, whatever the state of the episode. Called exactly once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeRules:
    """The run's settings for the episodes of one environment. `None` means: use the environment's traits."""

    max_episode_tokens: int
    max_steps: int | None = None
    max_tokens: int | None = None
    max_invalid: int | None = None
    """Invalid actions after which an episode is truncated; `None`: unlimited."""
    invalid_penalty: float = 0.0
    """Subtracted from the reward of a turn whose action was invalid."""
    instructions: str | None = None
    """System message, in which `{env_instruction}` stands for the environment's own."""
    template: str | None = None
    """Format of every observation; `TEMPLATE_FIELDS` lists what may stand in it."""
    history: bool = True
    """The policy sees the whole episode; otherwise it sees only the instructions and the newest observation."""
    remembered_turns: int = 0
    """Earlier turns that `{history}` in the template tells."""


class TextEpisode:
    """Adapts a text environment to the scheduler's `Environment` protocol."""

    def __init__(
        self,
        slot: EpisodeSlot,
        encoder: ChatTurnEncoder,
        rules: EpisodeRules,
        admission: asyncio.Semaphore | None = None,
    ) -> None:
        self._slot, self._encoder, self._rules = slot, encoder, rules
        self._admission, self._has_entered = admission, False
        self._traits = EnvironmentTraits()
        self._length = self._turns = self._invalid = 0
        self._success = False
        self._told: list[tuple[str, str]] = []
        """Observations and answers of earlier turns, for templates that tell them."""
        self._newest = ""
        self._instructions: str | None = None
        self._tools: Sequence[Mapping[str, Any]] = ()

    async def enter(self) -> None:
        if self._admission is not None:
            await self._admission.acquire()
            self._has_entered = True
        await self._slot.enter()

    async def reset(self, task: Task) -> Observation:
        self._traits = await self._slot.open()
        data = {key: value for key, value in task.data.items() if key not in (SEED_KEY, HELD_OUT_KEY)}
        reply = await self._slot.reset(int(task.data.get(SEED_KEY, task.position)), data)
        if reply.done:
            raise EnvironmentFailed("the episode is over before it began")
        self._instructions, self._tools = reply.instructions, reply.tools
        tokens, most = self._encode_opening(reply.text), self._rules.max_episode_tokens
        if len(tokens) >= most:
            limit = f"an episode has at most {most} (sequence_length, or what the model can take)"
            raise EpisodeTooLong(f"begins with {len(tokens)} tokens, and {limit}")
        return self._observe(tokens, reply.text)

    async def step(self, generation: Generation) -> Observation:
        self._length += len(generation.actions)
        if self._rules.remembered_turns:
            self._told.append((self._newest, extract_answer(generation.text)))
        reply = await self._slot.step(truncate_at_stop(generation.text, self._traits.stop))
        self._turns += 1
        reward = reply.reward
        if not reply.valid:
            self._invalid += 1
            reward -= self._rules.invalid_penalty
        if reply.success is not None:
            self._success = reply.success
        if reply.done:
            return self._finish(reply, reward)
        tokens = self._encode_following(reply, generation.actions)
        length = (self._length if self._rules.history else 0) + len(tokens)
        if length >= self._rules.max_episode_tokens or self._is_limit_reached():
            return self._finish(reply, reward, truncated=True)
        return self._observe(tokens, reply.text, reward=reward)

    async def locate(self) -> str:
        return await self._slot.locate()

    async def close(self) -> None:
        try:
            await self._slot.leave()
        finally:
            if self._admission is not None and self._has_entered:
                self._admission.release()
                self._has_entered = False

    @property
    def _own_instructions(self) -> str:
        return self._traits.instructions if self._instructions is None else self._instructions

    @property
    def _max_steps(self) -> int | None:
        return self._rules.max_steps or self._traits.max_steps

    @property
    def _max_tokens(self) -> int | None:
        return self._rules.max_tokens or self._traits.max_tokens

    def _is_limit_reached(self) -> bool:
        turns, invalid = self._max_steps, self._rules.max_invalid
        return (turns is not None and self._turns >= turns) or (invalid is not None and self._invalid >= invalid)

    def _encode_opening(self, text: str) -> list[int]:
        given = self._rules.instructions
        instructions = self._own_instructions if given is None else self._fill_fields(given, "").strip()
        return self._encoder.encode_opening(instructions, self._apply_template(text), self._tools)

    def _encode_following(self, reply: Reply, generated: Sequence[int]) -> list[int]:
        if not self._rules.history:
            return self._encode_opening(reply.text)
        answers = reply.tool_answers if self._rules.template is None else ()
        return self._encoder.encode_following(self._apply_template(reply.text), generated, answers)

    def _apply_template(self, text: str) -> str:
        self._newest = text
        return text if self._rules.template is None else self._fill_fields(self._rules.template, text)

    def _fill_fields(self, template: str, text: str) -> str:
        """Replace the fields of a template once: nothing inside an observation is replaced."""
        steps, most = self._max_steps, self._rules.remembered_turns
        told = self._told[-most:] if most else []
        first = self._turns - len(told) + 1
        values = {
            "observation": text,
            "current_observation": text,
            "suffix": "",
            "turn_idx": self._turns + 1,
            "current_step": self._turns + 1,
            "step_count": self._turns,
            "actions_left": "any number of" if steps is None else steps - self._turns,
            "max_response_length": self._max_tokens or self._rules.max_episode_tokens,
            "env_instruction": self._own_instructions,
            "history": ", ".join(
                f"(step {number}, observation: {seen}, action: {action})"
                for number, (seen, action) in enumerate(told, first)
            ),
            "history_length": len(told),
        }
        return _FIELD.sub(lambda found: str(values[found[1]]), template)

    def _observe(self, tokens: list[int], text: str, *, reward: float = 0.0) -> Observation:
        self._length = self._length + len(tokens) if self._rules.history else len(tokens)
        left, most = self._rules.max_episode_tokens - self._length, self._max_tokens
        return Observation(
            tokens=tokens,
            reward=reward,
            starts_new_context=not self._rules.history,
            expects_next_turn=self._rules.history and self._turns + 1 != self._max_steps,
            state=blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest(),
            max_new_tokens=left if most is None else min(left, most),
            stop=self._traits.stop,
        )

    def _finish(self, reply: Reply, reward: float, *, truncated: bool = False) -> Observation:
        info = {**reply.info, "turns": self._turns, "invalid": self._invalid, "success": self._success}
        return Observation(reward=reward, done=True, truncated=truncated, info=info)
