"""Records as bytes: what the ledger keeps of an episode or of a partial generation.

One blob is a JSON header followed by raw little-endian arrays:

    b"HW1" | header length, 4 bytes | header (UTF-8 JSON) | arrays, in the order the header names them

Guarantees: integers and floats come back exactly (int32, int64 or float64), latents and pixels byte for byte,
`RepeatedValue` and `range` stay compact, and nothing is ever executed on reading, as it would be with pickle. Sequences come
back as tuples. Does not keep the type of a sequence, nor of a mapping; `Task.data` and `Episode.info` hold JSON values
only.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any

from headway.errors import LedgerError
from headway.types import (
    DenoisingStep,
    Episode,
    FinishReason,
    Generation,
    Image,
    PartialGeneration,
    RepeatedValue,
    Task,
    Turn,
    VersionRun,
)

_MAGIC = b"HW1"
_HEADER_AT = len(_MAGIC) + 4
_FORMATS = {"i4": "i", "i8": "q", "f8": "d"}
_WORDS_OF_A_GENERATION = 5


def encode_episode(episode: Episode) -> bytes:
    """`episode` as one blob."""
    blocks: list[bytes] = []
    task = episode.task
    header = [
        episode.sample_id,
        [task.position, task.domain, _put(task.prompt, blocks), task.data],
        [_put_turn(turn, blocks) for turn in episode.turns],
        episode.truncated,
        episode.info,
    ]
    return _pack(header, blocks, what=episode.sample_id)


def decode_episode(blob: bytes) -> Episode:
    """The episode `encode_episode` was given."""
    header, reader = _unpack(blob)
    sample_id, (position, domain, prompt, data), turns, truncated, info = header
    return Episode(
        sample_id=sample_id,
        task=Task(position=position, domain=domain, prompt=reader.take(prompt), data=data),
        turns=tuple(_take_turn(turn, reader) for turn in turns),
        truncated=truncated,
        info=info,
    )


def encode_generation(generation: Generation) -> bytes:
    """`generation` as one blob, with the turns before it where it is a `PartialGeneration`."""
    blocks: list[bytes] = []
    header = _put_generation(generation, blocks)
    if isinstance(generation, PartialGeneration):
        header += ([_put_turn(turn, blocks) for turn in generation.before], _put(generation.observation, blocks))
    return _pack(header, blocks, what="a partial generation")


def decode_generation(blob: bytes) -> Generation:
    """The generation `encode_generation` was given."""
    header, reader = _unpack(blob)
    made = _take_generation(header[:_WORDS_OF_A_GENERATION], reader)
    if len(header) == _WORDS_OF_A_GENERATION:
        return made
    turns, observation = header[_WORDS_OF_A_GENERATION:]
    before = tuple(_take_turn(turn, reader) for turn in turns)
    return PartialGeneration.of(made, before=before, observation=reader.take(observation))


def _put_turn(turn: Turn, blocks: list[bytes]) -> list[Any]:
    return [
        _put(turn.observation, blocks),
        _put_generation(turn.generation, blocks),
        turn.reward,
        *([turn.fresh, turn.state] if turn.fresh or turn.state else []),
    ]


def _take_turn(header: list[Any], reader: _Reader) -> Turn:
    observation, generation, reward, *more = header
    return Turn(
        observation=reader.take(observation),
        generation=_take_generation(generation, reader),
        reward=reward,
        fresh=bool(more and more[0]),
        state=more[1] if len(more) > 1 else "",
    )


def _put_generation(generation: Generation, blocks: list[bytes]) -> list[Any]:
    runs = [number for run in generation.runs for number in (run.version, run.count)]
    return [
        _put(generation.actions, blocks),
        _put(generation.logps, blocks, floats=True),
        runs,
        str(generation.finish),
        generation.text,
    ]


def _take_generation(header: list[Any], reader: _Reader) -> Generation:
    actions, logps, runs, finish, text = header
    return Generation(
        actions=reader.take(actions),
        logps=reader.take(logps),
        runs=tuple(VersionRun(version=runs[i], count=runs[i + 1]) for i in range(0, len(runs), 2)),
        finish=FinishReason(finish),
        text=text,
    )


def _put(values: Sequence[Any], blocks: list[bytes], *, floats: bool = False) -> list[Any]:
    """The header's word for `values`; their bytes, where they have any, go to `blocks`."""
    if isinstance(values, RepeatedValue):
        return ["r", values.value, values.length]
    if isinstance(values, range):
        return ["s", values.start, values.stop, values.step]
    if hasattr(values, "tolist"):  # numpy, torch, array: one call instead of one per element
        values = values.tolist()
    if not len(values):
        return ["j", []]
    if isinstance(values[0], DenoisingStep):
        return ["z", [_put_step(step, blocks) for step in values]]
    floats = floats or (type(values[0]) is float and all(type(value) is float for value in values))
    for code in ("f8",) if floats else ("i4", "i8"):
        packed = _packed(values, code)
        if packed is not None:
            blocks.append(packed)
            return [code, len(values)]
    return ["j", list(values)]


def _put_step(step: DenoisingStep, blocks: list[bytes]) -> list[int]:
    """Mask and sizes; bytes in the order of the sizes."""
    image = step.image
    blocks += (step.before, step.after)
    sizes = [int(step.trained), len(step.before), len(step.after)]
    if image is None:
        return sizes
    blocks.append(image.pixels)
    return [*sizes, image.height, image.width, len(image.pixels)]


def _packed(values: Sequence[Any], code: str) -> bytes | None:
    """`values` as raw little-endian numbers, or `None` where they are not all of that kind."""
    try:
        return struct.pack(f"<{len(values)}{_FORMATS[code]}", *values)
    except struct.error:
        return None


class _Reader:
    """Takes sequences out of a blob in the order they were put in."""

    __slots__ = ("_at", "_blob")

    def __init__(self, blob: bytes, at: int) -> None:
        self._blob = blob
        self._at = at

    def take(self, word: list[Any]) -> Sequence[Any]:
        kind = word[0]
        if kind == "r":
            return RepeatedValue(word[1], word[2])
        if kind == "s":
            return range(word[1], word[2], word[3])
        if kind == "j":
            return tuple(word[1])
        if kind == "z":
            return tuple(self._step(*sizes) for sizes in word[1])
        layout = f"<{word[1]}{_FORMATS[kind]}"
        try:
            numbers = struct.unpack_from(layout, self._blob, self._at)
        except struct.error as error:
            raise LedgerError(f"a stored record of {len(self._blob)} bytes is cut short: {error}") from error
        self._at += struct.calcsize(layout)
        return numbers

    def _step(
        self, trained: int, before: int, after: int, height: int = 0, width: int = 0, pixels: int = 0
    ) -> DenoisingStep:
        start, end = self._bytes(before), self._bytes(after)
        image = Image(height=height, width=width, pixels=self._bytes(pixels)) if height else None
        return DenoisingStep(trained=bool(trained), before=start, after=end, image=image)

    def _bytes(self, length: int) -> bytes:
        found = self._blob[self._at : self._at + length]
        if len(found) != length:
            raise LedgerError(f"a stored record of {len(self._blob)} bytes is cut short")
        self._at += length
        return found


def _pack(header: list[Any], blocks: list[bytes], *, what: str) -> bytes:
    try:
        text = _JSON.encode(header)
    except (TypeError, ValueError, RecursionError) as error:
        raise LedgerError(f"{what} cannot be stored, it holds something that is not JSON: {error}") from error
    encoded = text.encode("utf-8", "surrogatepass")  # half a character cut off by a length limit is still text
    return b"".join((_MAGIC, len(encoded).to_bytes(4, "little"), encoded, *blocks))


def _unpack(blob: bytes) -> tuple[Any, _Reader]:
    if blob[: len(_MAGIC)] != _MAGIC:
        raise LedgerError(f"a stored record begins with {bytes(blob[: len(_MAGIC)])!r} instead of {_MAGIC!r}")
    end = _HEADER_AT + int.from_bytes(blob[len(_MAGIC) : _HEADER_AT], "little")
    return json.loads(blob[_HEADER_AT:end]), _Reader(blob, end)


def _plain(value: object) -> object:
    """Read-only mappings and numpy values as what JSON has for them."""
    if isinstance(value, Mapping):
        return dict(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} {value!r}")


_JSON = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False, check_circular=False, default=_plain)
