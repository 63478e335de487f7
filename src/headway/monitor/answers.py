"""What the policy answered, early and late, from `samples.jsonl`: `prompt`, `answer`, `reward`, `step` a line.

A prompt that was answered at different steps shows best what was learned, so those come first, as pairs; without any,
the first and the last answers are shown. Lines that are torn or lack an answer are passed over. However long the
file, only a few answers are kept.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_SHOWN = 4
_PROMPTS = 256
_LETTERS = 2400


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One answer of the policy."""

    prompt: str
    answer: str
    reward: float | None
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """A few answers to look at."""

    pairs: tuple[tuple[Answer, Answer], ...] = ()
    """The same prompt, early and late."""
    early: tuple[Answer, ...] = ()
    late: tuple[Answer, ...] = ()
    """Where no prompt was answered twice."""


def read_answers(path: Path) -> Answers:
    """The answers of a file; nothing where it is not there."""
    try:
        with path.open(encoding="utf-8", errors="replace") as lines:
            return chosen(lines)
    except OSError:
        return Answers()


def chosen(lines: Iterable[str]) -> Answers:
    """The few that are shown."""
    first: list[Answer] = []
    last: deque[Answer] = deque(maxlen=_SHOWN)
    twice: dict[str, tuple[Answer, Answer]] = {}
    for line in lines:
        answer = _answer(line)
        if answer is None:
            continue
        if len(first) < _SHOWN:
            first.append(answer)
        last.append(answer)
        if answer.prompt in twice:
            twice[answer.prompt] = (twice[answer.prompt][0], answer)
        elif len(twice) < _PROMPTS:
            twice[answer.prompt] = (answer, answer)
    pairs = [pair for pair in twice.values() if pair[0].step < pair[1].step]
    if pairs:
        newest = max(pair[1].step for pair in pairs)
        pairs.sort(key=lambda pair: (newest - pair[1].step, pair[0].step))
        return Answers(pairs=tuple(pairs[:_SHOWN]))
    return Answers(early=tuple(first), late=tuple(one for one in last if one not in first))


def _answer(line: str) -> Answer | None:
    try:
        row = json.loads(line)
        reward = row.get("reward")
        return Answer(
            prompt=_text(row.get("prompt", "")),
            answer=_text(row["answer"]),
            reward=float(reward) if isinstance(reward, int | float) else None,
            step=int(row.get("step", 0)),
        )
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


def _text(value: Any) -> str:
    """Text as it is, a conversation turn by turn; the middle of a very long one is left out."""
    if isinstance(value, list):
        value = "\n".join(f"{turn.get('role', '')}: {turn.get('content', '')}" for turn in value)
    text = str(value)
    half = _LETTERS // 2
    return text if len(text) <= _LETTERS else f"{text[:half]}\n […]\n{text[-half:]}"
