"""What the policy answered, early and late, from `samples.jsonl`: `prompt`, `answer`, `reward`, `step` a line.

A prompt that was answered at different steps shows best what was learned, so those come first, as pairs; without any,
the first and the last answers are shown. Lines that are torn or lack an answer are passed over. However long the
file, only a few answers are kept.
"""

from __future__ import annotations

import base64
import binascii
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
class AnswerExcerpt:
    """One answer of the policy."""

    prompt: str
    answer: str
    reward: float | None
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerExcerpts:
    """A few answers to look at."""

    pairs: tuple[tuple[AnswerExcerpt, AnswerExcerpt], ...] = ()
    """The same prompt, early and late."""
    early: tuple[AnswerExcerpt, ...] = ()
    late: tuple[AnswerExcerpt, ...] = ()
    """Where no prompt was answered twice."""


def read_answers(path: Path) -> AnswerExcerpts:
    """The answers of a file; nothing where it is not there."""
    try:
        with path.open(encoding="utf-8", errors="replace") as lines:
            return select_answers(lines)
    except OSError:
        return AnswerExcerpts()


def select_answers(lines: Iterable[str]) -> AnswerExcerpts:
    """The few that are shown."""
    first: list[AnswerExcerpt] = []
    last: deque[AnswerExcerpt] = deque(maxlen=_SHOWN)
    twice: dict[str, tuple[AnswerExcerpt, AnswerExcerpt]] = {}
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
        return AnswerExcerpts(pairs=tuple(pairs[:_SHOWN]))
    return AnswerExcerpts(early=tuple(first), late=tuple(one for one in last if one not in first))


def _answer(line: str) -> AnswerExcerpt | None:
    try:
        row = json.loads(line)
        reward = row.get("reward")
        return AnswerExcerpt(
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


_PICTURES_PROMPTS = 48
_MOST_BYTES = 1 << 20
_SIGNATURE = b"\x89PNG\r\n\x1a\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageExcerpt:
    """One picture of the policy."""

    prompt: str
    step: int
    reward: float | None
    png: str
    """In base64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageExcerpts:
    """The pictures to look at."""

    pairs: tuple[tuple[ImageExcerpt, ImageExcerpt], ...] = ()
    """The same prompt, first and last."""


class ImageLog:
    """Adds to `images.jsonl`. A disk that is full stops this log, not the run."""

    def __init__(self, path: Path, *, prompts: int = _PICTURES_PROMPTS) -> None:
        self._path, self._prompts = path, prompts

    def __call__(self, step: int, drawn: Iterable[tuple[str, str, float | None]]) -> None:
        """Prompt, PNG in base64 and reward of each picture of a validation; those beyond the first few are let go."""
        rows = [{"step": step, "prompt": p, "reward": r, "png": png} for p, png, r in drawn][: self._prompts]
        try:
            with self._path.open("a", encoding="utf-8") as log:
                log.write("".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows))
        except OSError:
            return  # the ledger and the event log say what is wrong with the disk


def read_images(path: Path) -> ImageExcerpts:
    """The pictures of a file; none where it is not there."""
    try:
        with path.open(encoding="utf-8", errors="replace") as lines:
            return select_images(lines)
    except OSError:
        return ImageExcerpts()


def select_images(lines: Iterable[str]) -> ImageExcerpts:
    """Of each prompt the picture of the lowest and of the highest step; of steps that came again, the later line."""
    found: dict[str, tuple[ImageExcerpt, ImageExcerpt]] = {}
    for line in lines:
        picture = _picture(line)
        if picture is None:
            continue
        if picture.prompt not in found:
            if len(found) < _PICTURES_PROMPTS:
                found[picture.prompt] = (picture, picture)
            continue
        first, last = found[picture.prompt]
        first = picture if picture.step <= first.step else first
        last = picture if picture.step >= last.step else last
        found[picture.prompt] = (first, last)
    return ImageExcerpts(pairs=tuple(found.values()))


def _picture(line: str) -> ImageExcerpt | None:
    try:
        row: Any = json.loads(line)
        png = row["png"]
        if len(png) > _MOST_BYTES or not base64.b64decode(png, validate=True).startswith(_SIGNATURE):
            return None
        reward = row.get("reward")
        return ImageExcerpt(
            prompt=str(row["prompt"]),
            step=int(row["step"]),
            reward=float(reward) if isinstance(reward, int | float) else None,
            png=png,
        )
    except (ValueError, TypeError, KeyError, AttributeError, binascii.Error):
        return None
