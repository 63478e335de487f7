"""A few samples to look at: what the policy answered (`samples.jsonl`) and drew (`images.jsonl`), early and late.

A prompt that came at different steps shows best what was learned, so answers are shown as pairs of one prompt; a run
without such a prompt shows its first and its last answers. Early and late answers are of the same kind: first answers
to held-out tasks, or if there are none, first members of trained groups, never a best one beside a worst. Images always
come in pairs: validation draws the same
prompts from the same noise, and `ImageLog` writes a line with `step`, `prompt`, `reward` and `png` (base64) for each of
its first images. Lines that are torn or incomplete are skipped. Only a few samples are kept, however long the file is.
"""

import base64
import binascii
import json
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_SHOWN_ANSWERS = 4
_MOST_ANSWERED_PROMPTS = 256
_MOST_CHARACTERS = 2400
_MOST_IMAGE_PROMPTS = 48
_MOST_IMAGE_BYTES = 1 << 20
_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


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
    """Answers to the same prompt, early and late."""
    early: tuple[AnswerExcerpt, ...] = ()
    late: tuple[AnswerExcerpt, ...] = ()
    """First and last answers, if no prompt was answered at two steps."""
    kind: str = "first"
    """How they were chosen: `held_out` or `first`."""


def read_answers(path: Path) -> AnswerExcerpts:
    """Return the answers of a file to show; none if the file does not exist."""
    return select_answers(_read_lines(path))


def select_answers(lines: Iterable[str]) -> AnswerExcerpts:
    """Return answers to held-out tasks where a prompt has two of them, else first members of trained groups."""
    choices = {kind: _AnswerChoice() for kind in ("held_out", "first")}
    for line in lines:
        kind, answer = _parse_answer(line)
        if answer is not None and kind in choices:
            choices[kind].add(answer)
    kind = "held_out" if choices["held_out"].pairs or not choices["first"].first else "first"
    return choices[kind].make_excerpts(kind)


class _AnswerChoice:
    """Keeps a few answers of one kind, however many come."""

    def __init__(self) -> None:
        self.first: list[AnswerExcerpt] = []
        self._last: deque[AnswerExcerpt] = deque(maxlen=_SHOWN_ANSWERS)
        self._by_prompt: dict[str, tuple[AnswerExcerpt, AnswerExcerpt]] = {}

    def add(self, answer: AnswerExcerpt) -> None:
        if len(self.first) < _SHOWN_ANSWERS:
            self.first.append(answer)
        self._last.append(answer)
        if answer.prompt not in self._by_prompt and len(self._by_prompt) < _MOST_ANSWERED_PROMPTS:
            self._by_prompt[answer.prompt] = (answer, answer)
        elif answer.prompt in self._by_prompt and answer.step > self._by_prompt[answer.prompt][1].step:
            self._by_prompt[answer.prompt] = (self._by_prompt[answer.prompt][0], answer)

    @property
    def pairs(self) -> list[tuple[AnswerExcerpt, AnswerExcerpt]]:
        """Answers to one prompt at two steps: the latest first, of those the one with the earliest beginning."""
        pairs = [pair for pair in self._by_prompt.values() if pair[0].step < pair[1].step]
        return sorted(pairs, key=lambda pair: (-pair[1].step, pair[0].step))

    def make_excerpts(self, kind: str) -> AnswerExcerpts:
        if self.pairs:
            return AnswerExcerpts(pairs=tuple(self.pairs[:_SHOWN_ANSWERS]), kind=kind)
        late = tuple(answer for answer in self._last if answer not in self.first)
        return AnswerExcerpts(early=tuple(self.first), late=late, kind=kind)


def _parse_answer(line: str) -> tuple[str, AnswerExcerpt | None]:
    """Return the kind of an answer and the answer; lines without a kind count as first members."""
    try:
        row = json.loads(line)
        prompt, step = _shorten(row.get("prompt", "")), int(row.get("step", 0))
        answer = _join_turns(row["turns"]) if row.get("turns") else _shorten(row["answer"])
        return str(row.get("kind", "first")), AnswerExcerpt(
            prompt=prompt, answer=answer, reward=_parse_reward(row), step=step
        )
    except (ValueError, TypeError, KeyError, AttributeError):
        return "", None


def _join_turns(turns: list[dict[str, Any]]) -> str:
    """Return a conversation as text: what the policy saw, what it said and what that earned, turn by turn."""
    most = _MOST_CHARACTERS // 4
    texts = [(_shorten(turn["observation"], most), _shorten(turn["answer"]), turn["reward"]) for turn in turns]
    return "\n".join(f"◂ {seen}\n▸ {said}\n[reward {earned:g}]" for seen, said, earned in texts)


def _shorten(value: Any, most: int = _MOST_CHARACTERS) -> str:
    """Return a text, or a conversation turn by turn, without the middle of a very long one."""
    if isinstance(value, list):
        value = "\n".join(f"{turn.get('role', '')}: {turn.get('content', '')}" for turn in value)
    text, half = str(value), most // 2
    return text if len(text) <= most else f"{text[:half]}\n […]\n{text[-half:]}"


def _parse_reward(row: dict[str, Any]) -> float | None:
    reward = row.get("reward")
    return float(reward) if isinstance(reward, int | float) else None


def _read_lines(path: Path) -> Iterator[str]:
    try:
        with path.open(encoding="utf-8", errors="replace") as lines:
            yield from lines
    except OSError:
        return


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageExcerpt:
    """One image of the policy."""

    prompt: str
    step: int
    reward: float | None
    png: str
    """PNG file in base64."""


ImagePair = tuple[ImageExcerpt, ImageExcerpt]


class ImageLog:
    """Adds images to `images.jsonl`. A full disk stops this log, not the run."""

    def __init__(self, path: Path, *, prompts: int = _MOST_IMAGE_PROMPTS) -> None:
        self._path, self._prompts = path, prompts

    def __call__(self, step: int, images: Iterable[tuple[str, str, float | None]]) -> None:
        """Write prompt, PNG in base64 and reward of the first images of a validation."""
        rows = [{"step": step, "prompt": p, "reward": r, "png": png} for p, png, r in images][: self._prompts]
        try:
            with self._path.open("a", encoding="utf-8") as log:
                log.write("".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows))
        except OSError:
            return  # the ledger and the event log report what is wrong with the disk


def read_images(path: Path) -> tuple[ImagePair, ...]:
    """Return the first and the last image of each prompt in a file; none if the file does not exist."""
    return select_images(_read_lines(path))


def select_images(lines: Iterable[str]) -> tuple[ImagePair, ...]:
    """Return the images of the lowest and highest step of each prompt; the later line wins if a step came again."""
    found: dict[str, ImagePair] = {}
    for line in lines:
        image = _parse_image(line)
        if image is None or (image.prompt not in found and len(found) >= _MOST_IMAGE_PROMPTS):
            continue
        first, last = found.get(image.prompt, (image, image))
        first = image if image.step <= first.step else first
        last = image if image.step >= last.step else last
        found[image.prompt] = (first, last)
    return tuple(found.values())


def _parse_image(line: str) -> ImageExcerpt | None:
    try:
        row: Any = json.loads(line)
        png = row["png"]
        if len(png) > _MOST_IMAGE_BYTES or not base64.b64decode(png, validate=True).startswith(_PNG_SIGNATURE):
            return None
        return ImageExcerpt(prompt=str(row["prompt"]), step=int(row["step"]), reward=_parse_reward(row), png=png)
    except (ValueError, TypeError, KeyError, AttributeError, binascii.Error):
        return None
