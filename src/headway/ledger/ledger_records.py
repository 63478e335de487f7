"""Stores an episode or a partial generation as one blob.

    b"HW2" | CRC-32 of the rest, 4 bytes | what `headway.codec` makes of a header and its arrays

Guarantees: integers and floats come back exactly (int32, int64 or float64), latents and pixels byte for byte,
`RepeatedValue` and `range` stay compact, and decoding never executes anything. Sequences come back as tuples. The type
of a sequence or of a mapping is not kept; `Task.data` and `Episode.info` hold JSON values only.

The layout of the header is part of the file format of the ledger: it must not change, or old runs cannot be resumed.
Records of older runs begin with b"HW1" and have no checksum.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from zlib import crc32

from headway.codec import BlockReader, BlockWriter, open_blocks, put_compact
from headway.errors import LedgerError
from headway.types import (
    DenoisingStep,
    Episode,
    ExpertRouting,
    FinishReason,
    Generation,
    Image,
    PartialGeneration,
    Score,
    Task,
    Turn,
    VersionRun,
)

_MAGIC, _MAGIC_WITHOUT_CHECKSUM = b"HW2", b"HW1"
_CHECKSUM_BYTES = 4
_GENERATION_FIELDS = 5


def encode_episode(episode: Episode) -> bytes:
    """Encode an episode. Raises `LedgerError` if it holds something that is not JSON."""
    blocks = BlockWriter()
    task = episode.task
    header = [
        episode.sample_id,
        [task.position, task.domain, _put(task.prompt, blocks), task.data],
        [_put_turn(turn, blocks) for turn in episode.turns],
        episode.truncated,
        episode.info,
    ]
    return _join(header, blocks, name=episode.sample_id)


def decode_episode(blob: bytes) -> Episode:
    """Return the episode that `encode_episode` was given. Raises `LedgerError` for a damaged blob."""
    header, reader = _open(blob)
    sample_id, (position, domain, prompt, data), turns, truncated, info = header
    return Episode(
        sample_id=sample_id,
        task=Task(position=position, domain=domain, prompt=_take(prompt, reader), data=data),
        turns=tuple(_take_turn(turn, reader) for turn in turns),
        truncated=truncated,
        info=info,
    )


def encode_generation(generation: Generation) -> bytes:
    """Encode a generation, with the turns before it where it is a `PartialGeneration`."""
    blocks = BlockWriter()
    header = _put_generation(generation, blocks)
    if isinstance(generation, PartialGeneration):
        header += ([_put_turn(turn, blocks) for turn in generation.before], _put(generation.observation, blocks))
    header += _put_routing(generation, blocks)
    return _join(header, blocks, name="a partial generation")


def decode_generation(blob: bytes) -> Generation:
    """Return the generation that `encode_generation` was given. Raises `LedgerError` for a damaged blob."""
    header, reader = _open(blob)
    generation, more = _take_generation(header[:_GENERATION_FIELDS], reader), header[_GENERATION_FIELDS:]
    if len(more) < 2:
        return replace(generation, routing=_take_routing(more, reader))
    before = tuple(_take_turn(turn, reader) for turn in more[0])
    partial = PartialGeneration.of(generation, before=before, observation=_take(more[1], reader))
    return replace(partial, routing=_take_routing(more[2:], reader))


def encode_grades(grades: Sequence[tuple[str, Score, float]]) -> str:
    """Encode (sample id, score, advantage) of the members of a group, with a checksum in a line of its own."""
    body = json.dumps([(sample_id, score.value, dict(score.parts), adv) for sample_id, score, adv in grades])
    return f"{body}\n{crc32(body.encode()):08x}"


def decode_grades(text: str) -> dict[str, tuple[Score, float]]:
    """Return score and advantage by sample id. Raises `LedgerError` for a damaged text."""
    body, _, checksum = text.partition("\n")
    if checksum and checksum != f"{crc32(body.encode()):08x}":
        raise LedgerError("a stored grade is damaged: its checksum differs")
    return {
        sample_id: (Score(value=value, parts=parts), advantage)
        for sample_id, value, parts, advantage in json.loads(body)
    }


def _put_turn(turn: Turn, blocks: BlockWriter) -> list[Any]:
    return [
        _put(turn.observation, blocks),
        [*_put_generation(turn.generation, blocks), *_put_routing(turn.generation, blocks)],
        turn.reward,
        *([turn.starts_new_context, turn.state] if turn.starts_new_context or turn.state else []),
    ]


def _take_turn(header: list[Any], reader: BlockReader) -> Turn:
    observation, generation, reward, *more = header
    return Turn(
        observation=_take(observation, reader),
        generation=_take_generation(generation, reader),
        reward=reward,
        starts_new_context=bool(more and more[0]),
        state=more[1] if len(more) > 1 else "",
    )


def _put_generation(generation: Generation, blocks: BlockWriter) -> list[Any]:
    runs = [number for run in generation.runs for number in (run.version, run.count)]
    return [
        _put(generation.actions, blocks),
        _put(generation.logps, blocks, floats=True),
        runs,
        str(generation.finish),
        generation.text,
    ]


def _take_generation(header: list[Any], reader: BlockReader) -> Generation:
    actions, logps, runs, finish, text, *more = header
    return Generation(
        actions=_take(actions, reader),
        logps=_take(logps, reader),
        runs=tuple(VersionRun(version=runs[i], count=runs[i + 1]) for i in range(0, len(runs), 2)),
        finish=FinishReason(finish),
        text=text,
        routing=_take_routing(more, reader),
    )


def _put_routing(generation: Generation, blocks: BlockWriter) -> list[Any]:
    """Return one more word for a generation of a mixture whose experts are known, and nothing for others."""
    found = generation.routing
    if found is None:
        return []
    return [[found.start, found.layers, found.experts, found.width, blocks.put_bytes(found.data)]]


def _take_routing(words: list[Any], reader: BlockReader) -> ExpertRouting | None:
    if not words:
        return None
    start, layers, experts, width, size = words[0]
    return ExpertRouting(start=start, layers=layers, experts=experts, width=width, data=reader.take_bytes(size))


def _put(values: Sequence[Any], blocks: BlockWriter, *, floats: bool = False) -> list[Any]:
    """Return the header's word for a sequence, whose arrays are added to `blocks`."""
    compact = put_compact(values)
    if compact is not None:
        return compact
    if hasattr(values, "tolist"):  # numpy, torch, array: one call instead of one per element
        values = values.tolist()
    if not len(values):
        return ["j", []]
    if isinstance(values[0], DenoisingStep):
        return ["z", [_put_step(step, blocks) for step in values]]
    values = values if isinstance(values, list | tuple) else list(values)
    floats = floats or (type(values[0]) is float and all(type(value) is float for value in values))
    kind = blocks.put_array(values, ("f8",) if floats else ("i4", "i8"))
    return [kind, len(values)] if kind else ["j", list(values)]


def _take(word: list[Any], reader: BlockReader) -> Sequence[Any]:
    try:
        if word[0] == "z":
            return tuple(_take_step(reader, *sizes) for sizes in word[1])
        values: Sequence[Any] = reader.take(word)
    except ValueError as error:
        raise LedgerError(f"a stored record of {error}") from error
    return tuple(values) if word[0] == "j" else values


def _put_step(step: DenoisingStep, blocks: BlockWriter) -> list[int]:
    """Return whether the step is trained, and the sizes of what is added, in the order of adding."""
    image = step.image
    sizes = [int(step.trained), blocks.put_bytes(step.before), blocks.put_bytes(step.after)]
    if image is None:
        return sizes
    return [*sizes, image.height, image.width, blocks.put_bytes(image.pixels)]


def _take_step(
    reader: BlockReader, trained: int, before: int, after: int, height: int = 0, width: int = 0, pixels: int = 0
) -> DenoisingStep:
    start, end = reader.take_bytes(before), reader.take_bytes(after)
    image = Image(height=height, width=width, pixels=reader.take_bytes(pixels)) if height else None
    return DenoisingStep(trained=bool(trained), before=start, after=end, image=image)


def _join(header: list[Any], blocks: BlockWriter, *, name: str) -> bytes:
    try:
        body = blocks.join(header)
    except (TypeError, ValueError, RecursionError) as error:
        raise LedgerError(f"{name} cannot be stored, it holds something that is not JSON: {error}") from error
    return b"".join((_MAGIC, crc32(body).to_bytes(_CHECKSUM_BYTES, "little"), body))


def _open(blob: bytes) -> tuple[Any, BlockReader]:
    """Return header and arrays. Raise `LedgerError` if the blob is not as it was written."""
    magic, rest = blob[: len(_MAGIC)], memoryview(blob)[len(_MAGIC) :]
    if magic == _MAGIC:
        checksum, rest = int.from_bytes(rest[:_CHECKSUM_BYTES], "little"), rest[_CHECKSUM_BYTES:]
        if checksum != crc32(rest):
            raise LedgerError("a stored record is damaged: its checksum differs")
    elif magic != _MAGIC_WITHOUT_CHECKSUM:
        raise LedgerError(f"a stored record begins with {bytes(magic)!r} instead of {_MAGIC!r}")
    return open_blocks(rest)
