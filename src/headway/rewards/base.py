"""The reward protocol, what text rewards look at, and group-relative advantages without a tensor library.

A reward that fails raises an error; it never returns zero for an unknown score.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from math import sqrt
from typing import Any, Protocol, runtime_checkable

from headway.errors import ConfigError, RewardError
from headway.types import Episode, Score

Extractor = Callable[[str], str | None]
"""Returns the part of a text that counts, or `None` if the text has no such part."""


class Reward(Protocol):
    """Scores episodes concurrently. Blocking work belongs on a thread or in a process."""

    async def score(self, episode: Episode) -> Score:
        """Score one episode. Raises `RewardError` if there is no score."""


@runtime_checkable
class RewardWithTerms(Protocol):
    """A reward of several functions, which knows which of them have not answered yet."""

    def unfinished_terms(self, sample_id: str) -> Sequence[str]:
        """Return the names of the functions that still work on a sample."""
        ...


def find_unfinished_terms(reward: Reward, sample_id: str) -> Sequence[str]:
    """Return the names of the reward functions that still work on a sample."""
    terms = reward.unfinished_terms(sample_id) if isinstance(reward, RewardWithTerms) else ()
    return terms or (f"reward {type(reward).__name__}",)


class EpisodeReturn:
    """The sum of the environment's own rewards, for agentic tasks that need no other reward."""

    async def score(self, episode: Episode) -> Score:
        return Score(value=sum(turn.reward for turn in episode.turns))


def group_relative_advantages(rewards: Sequence[float]) -> list[float]:
    """Return (R − mean) / (std + 1e-6) over the members of one group."""
    mean = sum(rewards) / len(rewards)
    std = sqrt(sum((reward - mean) ** 2 for reward in rewards) / len(rewards))
    return [(reward - mean) / (std + 1e-6) for reward in rewards]


def has_zero_variance(rewards: Sequence[float]) -> bool:
    """Return whether all members of a group have the same reward, so that the group teaches nothing."""
    return all(reward == rewards[0] for reward in rewards)


def final_text(episode: Episode) -> str:
    """Return the text of the last turn. Raises `RewardError` for an episode without turns."""
    if not episode.turns:
        raise RewardError(f"{episode.sample_id}: the episode has no turn to judge")
    return episode.turns[-1].generation.text


def get_task_data(episode: Episode) -> dict[str, Any]:
    """Return the task's data. Where tools gave rewards, `extra_info` has them as reward functions of verl expect."""
    data, info = dict(episode.task.data), episode.info
    if "tool_rewards" in info:
        given = data.get("extra_info")
        extra = dict(given) if isinstance(given, Mapping) else {}
        scores = {name: info[name] for name in ("tool_rewards", "rollout_reward_scores") if name in info}
        data["extra_info"] = {**extra, **scores, "num_turns": 2 * len(episode.turns), "turn_scores": []}
    return data


def get_expected_answer(data: Mapping[str, Any], key: str) -> Any:
    """Return the task's answer; `a.b` is a column of that name, else `b` inside of `a`.

    Raises `RewardError` if the task has none, since it cannot be judged then.
    """
    found: Any = data.get(key, data)
    for part in key.split(".") if found is data else ():
        found = found.get(part) if isinstance(found, Mapping) else None
    if found is None:
        raise RewardError(f"the task has no {key!r} to compare with, only {sorted(data)}")
    return found


def read_question(column: Any) -> str:
    """Return the text of a column with a prompt, which may be a list of messages, also as JSON text."""
    if isinstance(column, str) and column.startswith("[{"):
        try:
            return read_question(json.loads(column)) or column
        except (ValueError, RecursionError):
            return column
    messages = column if isinstance(column, list | tuple) else [column]
    parts = (message.get("content") if isinstance(message, Mapping) else message for message in messages)
    return "\n".join(part for part in parts if isinstance(part, str))


def make_extractor(part: str) -> Extractor:
    """Return the extractor of `part`: all, first_line, last_line, boxed, tag:NAME or after:TEXT."""
    kind, _, name = part.partition(":")
    if part in _FIXED_PARTS:
        return _FIXED_PARTS[part]
    if kind == "tag" and name:
        return lambda text: extract_tag(text, name)
    if kind == "after" and name:
        return lambda text: text.rpartition(name)[2] if name in text else None
    hint = "all, first_line, last_line, boxed, tag:NAME or after:TEXT"
    raise ConfigError("is no part of a text", key="part", value=part, hint=hint)


def extract_tag(text: str, name: str) -> str | None:
    """Return the content of the last closed `<name>…</name>`."""
    end = text.rfind(f"</{name}>")
    start = text.rfind(f"<{name}>", 0, max(end, 0))
    return text[start + len(name) + 2 : end] if 0 <= start < end else None


def extract_boxed(text: str) -> str | None:
    """Return the content of the last `\\boxed{…}`, with balanced braces."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    begin, depth = start + len("\\boxed{"), 1
    for position in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if not depth:
            return text[begin:position]
    return None


def _extract_line(text: str, index: int) -> str | None:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[index] if lines else None


_FIXED_PARTS: Mapping[str, Extractor] = {
    "all": lambda text: text,
    "first_line": lambda text: _extract_line(text, 0),
    "last_line": lambda text: _extract_line(text, -1),
    "boxed": extract_boxed,
}
