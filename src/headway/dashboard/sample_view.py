"""The samples of a run to look through: `groups.jsonl`, `samples.jsonl` and `images.jsonl`.

Only places and a few numbers of each sample are kept in memory (about fifty bytes); texts are read when they are shown
or searched. Lines that are torn or damaged are left out. Texts of models and environments are handed on as they are:
whoever shows them shows them as text.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import time
import zlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.monitor.run_record import IMAGES_FILE, SAMPLES_FILE
from headway.runs.group_log import GROUPS_FILE

_KINDS = ("group", "held_out", "first", "best", "worst", "image", "dropped")
_SEARCH_S = 1.5
_EXCERPT = 160
_MOST_SIBLINGS = 6
_UNKNOWN = -(1 << 30)
_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleFilter:
    """Which samples are asked for; None leaves a side open."""

    text: str = ""
    kind: str = ""
    steps: tuple[float | None, float | None] = (None, None)
    rewards: tuple[float | None, float | None] = (None, None)
    lags: tuple[float | None, float | None] = (None, None)
    task: int | None = None
    group: int | None = None


class SampleFile:
    """A file of samples that grows, with numbers of each of them in columns."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._read = 0
        self.offset, self.member = array("q"), array("i")
        self.step, self.task, self.group = array("q"), array("q"), array("q")
        self.lag, self.kind, self.prompt = array("i"), array("b"), array("q")
        self.reward, self.length = array("d"), array("i")

    def __len__(self) -> int:
        return len(self.offset)

    def refresh(self) -> None:
        """Read lines that were added."""
        try:
            size = self.path.stat().st_size
            if size < self._read:
                self.__init__(self.path)  # type: ignore[misc]  # another file has taken its place
            if size == self._read:
                return
            with self.path.open("rb") as log:
                log.seek(self._read)
                for line in log:
                    if not line.endswith(b"\n"):
                        break
                    row = _parse_line(line)
                    if row is not None:
                        self._add(row, self._read)
                    self._read += len(line)
        except OSError:
            return

    def _add(self, row: Mapping[str, Any], offset: int) -> None:
        members = row.get("members")
        if isinstance(members, list):
            for place, member in enumerate(members):
                if isinstance(member, Mapping):
                    kind = "dropped" if row.get("dropped") else "group"
                    self._append({**row, **member, "kind": kind}, offset, place)
        else:
            self._append({"kind": "image", **row} if "png" in row else row, offset, -1)

    def _append(self, row: Mapping[str, Any], offset: int, member: int) -> None:
        kind = str(row.get("kind", "first"))
        self.offset.append(offset)
        self.member.append(member)
        self.step.append(_get_integer(row, "step"))
        self.task.append(_get_integer(row, "task"))
        self.group.append(_get_integer(row, "group"))
        self.lag.append(_get_integer(row, "lag"))
        self.kind.append(_KINDS.index(kind) if kind in _KINDS else 2)
        self.prompt.append(zlib.crc32(str(row.get("prompt", "")).encode("utf-8", "replace")))
        reward = row.get("reward")
        self.reward.append(float(reward) if isinstance(reward, int | float) else math.nan)
        self.length.append(_get_integer(row, "length"))

    def read_row(self, place: int) -> dict[str, Any]:
        """Return the line of a sample; an empty one if it cannot be read any more."""
        try:
            with self.path.open("rb") as log:
                log.seek(self.offset[place])
                return _parse_line(log.readline()) or {}
        except OSError:
            return {}

    def find(self, wanted: SampleFilter) -> Iterator[int]:
        """Yield the places of samples that fit, newest first; the text is not looked at."""
        kind = _KINDS.index(wanted.kind) if wanted.kind in _KINDS else None
        for place in range(len(self) - 1, -1, -1):
            if (
                (kind is None or self.kind[place] == kind)
                and (wanted.task is None or self.task[place] == wanted.task)
                and (wanted.group is None or self.group[place] == wanted.group)
                and _is_between(self.step[place], wanted.steps)
                and _is_between(self.reward[place], wanted.rewards)
                and _is_between(self.lag[place], wanted.lags)
            ):
                yield place


class SampleView:
    """All samples of a run. Its files are read when somebody asks for samples."""

    def __init__(self, directory: Path) -> None:
        self._files = [SampleFile(directory / GROUPS_FILE), SampleFile(directory / SAMPLES_FILE)]
        self._images = SampleFile(directory / IMAGES_FILE)

    @property
    def has_any(self) -> bool:
        return any(file.path.exists() for file in self._files)

    @property
    def has_pictures(self) -> bool:
        return self._images.path.exists()

    def search(self, wanted: SampleFilter, *, most: int = 40) -> dict[str, Any]:
        """Return the newest samples that fit, as short rows, and whether all were looked at."""
        for file in self._files:
            file.refresh()
        until_s, rows, is_whole, text = time.monotonic() + _SEARCH_S, list[dict[str, Any]](), True, wanted.text.lower()
        groups, others = self._files
        for number, file in enumerate(self._files):
            for place in file.find(wanted):
                if number and len(groups) and not wanted.kind and file.kind[place] != 1:
                    continue  # members of groups that are in the other file, whole
                if len(rows) >= 2 * most or time.monotonic() > until_s:
                    is_whole = False
                    break
                row = self._make_short_row(number, place)
                if row is not None and (not text or text in row.pop("text").lower()):
                    rows.append(row)
        rows.sort(key=lambda row: -row["step"])
        counts = {"groups": len(set(groups.offset)), "samples": len(groups) + len(others)}
        return {"rows": [_without_text(row) for row in rows[:most]], "whole": is_whole and len(rows) <= most, **counts}

    def _make_short_row(self, number: int, place: int) -> dict[str, Any] | None:
        file = self._files[number]
        row = file.read_row(place)
        prompt, answer = _as_text(row.get("prompt", "")), _as_text(row.get("answer", row.get("response", "")))
        members = row.get("members")
        if isinstance(members, list) and 0 <= file.member[place] < len(members):
            answer = " → ".join(_join_turn(turn) for turn in members[file.member[place]].get("turns", ()))
            prompt = prompt or str((members[0].get("turns") or [{}])[0].get("observation", ""))
        if not row:
            return None
        known = {"step": file.step, "task": file.task, "group": file.group, "lag": file.lag, "length": file.length}
        return {
            "id": f"{number}.{place}",
            "kind": _KINDS[file.kind[place]],
            **{name: None if column[place] == _UNKNOWN else column[place] for name, column in known.items()},
            "reward": None if math.isnan(file.reward[place]) else file.reward[place],
            "dropped": row.get("dropped"),
            "prompt": prompt[:_EXCERPT],
            "answer": answer[:_EXCERPT],
            "text": f"{prompt}\n{answer}",
        }

    def read_group(self, sample: str) -> dict[str, Any]:
        """Return a sample and those beside it: the members of its group, or answers to the same task at other steps."""
        number, _, place_text = sample.partition(".")
        try:
            file, place = self._files[int(number)], int(place_text)
            row = file.read_row(place) if 0 <= place < len(file) else {}
        except (ValueError, IndexError):
            row = {}
        if not row:
            return {"title": "this sample is not there any more", "columns": []}
        if isinstance(row.get("members"), list):
            step, reason = row.get("step"), row.get("dropped")
            fate = f"dropped while step {step} was under way" if reason else f"trained in step {step}"
            return {
                "title": f"group {row.get('group')}, {fate}",
                "dropped": reason,
                "chosen": file.member[place],
                "prompt": _as_text(row.get("prompt", "")),
                "expected": row.get("expected"),
                "step": row.get("step"),
                "columns": row["members"],
                "left_out": max(0, int(row.get("size", 0)) - len(row["members"])),
            }
        places = self._find_siblings(file, place)
        rows = [file.read_row(one) for one in places]
        return {
            "title": "the same task at several steps" if len(places) > 1 else f"step {row.get('step')}",
            "chosen": places.index(place),
            "prompt": _as_text(row.get("prompt", "")),
            "expected": row.get("expected"),
            "columns": [_make_column(one) for one in rows],
        }

    def _find_siblings(self, file: SampleFile, place: int) -> list[int]:
        """Return samples of the same kind and prompt: the first, the last, some between, and the one asked for."""
        found = [
            one
            for one in range(len(file))
            if file.prompt[one] == file.prompt[place] and file.kind[one] == file.kind[place]
        ]
        spacing = max(1, (len(found) - 1) / (_MOST_SIBLINGS - 1)) if len(found) > 1 else 1
        chosen = {found[min(len(found) - 1, round(number * spacing))] for number in range(_MOST_SIBLINGS)}
        return sorted(chosen | {place})

    def list_pictures(self) -> list[dict[str, Any]]:
        """Return the prompts that images were drawn for, each with its images in the order of steps."""
        images = self._images
        images.refresh()
        found: dict[int, list[int]] = {}
        for place in range(len(images)):
            found.setdefault(images.prompt[place], []).append(place)
        rows = []
        for places in found.values():
            shots = sorted(places, key=lambda place: images.step[place])
            prompt = str(images.read_row(shots[0]).get("prompt", ""))
            rewards = [None if math.isnan(images.reward[place]) else images.reward[place] for place in shots]
            named = zip(shots, rewards, strict=True)
            rows.append({"prompt": prompt, "shots": [{"id": p, "step": images.step[p], "reward": r} for p, r in named]})
        return rows

    def read_picture(self, place: int) -> bytes | None:
        """Return a picture as PNG, or None if there is none."""
        if not 0 <= place < len(self._images):
            return None
        try:
            picture = base64.b64decode(str(self._images.read_row(place).get("png", "")), validate=True)
        except (ValueError, binascii.Error):
            return None
        return picture if picture.startswith(_PNG_SIGNATURE) else None


def _make_column(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return an answer of `samples.jsonl` like a member of a group, without tokens."""
    conversation = row.get("turns") if isinstance(row.get("turns"), list) else row.get("messages")
    turns: Sequence[Any] = conversation if isinstance(conversation, list) else ()
    shown = [{"observation": "", "text": _as_text(turn)} for turn in turns]
    answer = _as_text(row.get("answer", row.get("response", "")))
    return {
        "sample": f"step {row.get('step')}",
        "reward": row.get("reward"),
        "finish": row.get("finish"),
        "turns": shown or [{"observation": "", "text": answer}],
    }


def _without_text(row: dict[str, Any]) -> dict[str, Any]:
    row.pop("text", None)
    return row


def _join_turn(turn: Any) -> str:
    return "".join(map(str, turn.get("tokens", ()))) if isinstance(turn, Mapping) else str(turn)


def _as_text(value: Any) -> str:
    """Return a text, or a message or a conversation as one."""
    if isinstance(value, list):
        return "\n".join(_as_text(one) for one in value)
    if isinstance(value, Mapping):
        return ": ".join(str(value[key]) for key in ("role", "content") if value.get(key)) or json.dumps(value)
    return "" if value is None else str(value)


def _get_integer(row: Mapping[str, Any], key: str) -> int:
    value = row.get(key)
    return value if isinstance(value, int) and abs(value) < 1 << 31 else _UNKNOWN


def _is_between(value: float, limits: tuple[float | None, float | None]) -> bool:
    low, high = limits
    if low is None and high is None:
        return True
    return value != _UNKNOWN and (low is None or value >= low) and (high is None or value <= high)


def _parse_line(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None
