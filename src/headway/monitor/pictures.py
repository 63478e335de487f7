"""What the policy drew, before and after: the same prompts from the same noise, from `images.jsonl`.

One object a line: `step`, `prompt`, `reward` and `png` (base64). Whoever validates writes a line for each of its first
pictures (`PictureLog`); the page shows the first and the last of each prompt side by side. Lines that are torn, or
hold no PNG, are passed over. However long the file, a few prompts are kept, each with two pictures.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_PROMPTS = 48
_MOST_BYTES = 1 << 20
_SIGNATURE = b"\x89PNG\r\n\x1a\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """One picture of the policy."""

    prompt: str
    step: int
    reward: float | None
    png: str
    """In base64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pictures:
    """The pictures to look at."""

    pairs: tuple[tuple[Picture, Picture], ...] = ()
    """The same prompt, first and last."""


class PictureLog:
    """Adds to `images.jsonl`. A disk that is full stops this log, not the run."""

    def __init__(self, path: Path, *, prompts: int = _PROMPTS) -> None:
        self._path, self._prompts = path, prompts

    def __call__(self, step: int, drawn: Iterable[tuple[str, str, float | None]]) -> None:
        """Prompt, PNG in base64 and reward of each picture of a validation; those beyond the first few are let go."""
        rows = [{"step": step, "prompt": p, "reward": r, "png": png} for p, png, r in drawn][: self._prompts]
        try:
            with self._path.open("a", encoding="utf-8") as log:
                log.write("".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows))
        except OSError:
            return  # the ledger and the event log say what is wrong with the disk


def read_pictures(path: Path) -> Pictures:
    """The pictures of a file; none where it is not there."""
    try:
        with path.open(encoding="utf-8", errors="replace") as lines:
            return first_and_last(lines)
    except OSError:
        return Pictures()


def first_and_last(lines: Iterable[str]) -> Pictures:
    """Of each prompt the picture of the lowest and of the highest step; of steps that came again, the later line."""
    found: dict[str, tuple[Picture, Picture]] = {}
    for line in lines:
        picture = _picture(line)
        if picture is None:
            continue
        if picture.prompt not in found:
            if len(found) < _PROMPTS:
                found[picture.prompt] = (picture, picture)
            continue
        first, last = found[picture.prompt]
        first = picture if picture.step <= first.step else first
        last = picture if picture.step >= last.step else last
        found[picture.prompt] = (first, last)
    return Pictures(pairs=tuple(found.values()))


def _picture(line: str) -> Picture | None:
    try:
        row: Any = json.loads(line)
        png = row["png"]
        if len(png) > _MOST_BYTES or not base64.b64decode(png, validate=True).startswith(_SIGNATURE):
            return None
        reward = row.get("reward")
        return Picture(
            prompt=str(row["prompt"]),
            step=int(row["step"]),
            reward=float(reward) if isinstance(reward, int | float) else None,
            png=png,
        )
    except (ValueError, TypeError, KeyError, AttributeError, binascii.Error):
        return None
