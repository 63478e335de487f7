"""What text rewards look at: the text of the last turn, a part of it, and the expected answer of the task."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from headway.errors import ConfigError, RewardError
from headway.types import Episode

Extractor = Callable[[str], str | None]
"""Returns the part of a text that counts, or `None` if the text has no such part."""


def final_text(episode: Episode) -> str:
    """Return the text of the last turn. Raises `RewardError` for an episode without turns."""
    if not episode.turns:
        raise RewardError(f"{episode.sample_id}: the episode has no turn to judge")
    return episode.turns[-1].generation.text


def get_expected_answer(data: Mapping[str, Any], key: str) -> Any:
    """Return the task's answer. Raises `RewardError` if the task has none, since it cannot be judged then."""
    if key not in data or data[key] is None:
        raise RewardError(f"the task has no {key!r} to compare with, only {sorted(data)}")
    return data[key]


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
