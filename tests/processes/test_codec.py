"""Records come back as they were, and nothing else gets through."""

from __future__ import annotations

import asyncio
import math
import random
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headway.codec import decode, encode
from headway.engines.base import Request
from headway.processes.peer_messages import MessageProtocol, encode_frame
from headway.types import (
    Batch,
    DenoisingStep,
    Episode,
    FinishReason,
    Generation,
    Image,
    RepeatedValue,
    Sample,
    SampleGroup,
    SamplingParams,
    Score,
    Task,
    Turn,
    VersionRun,
)
from headway.weights.base import Bucket, Manifest, SharedSlice, TensorEntry


def through(value: Any) -> Any:
    return decode(encode(value))


def group(seed: int) -> SampleGroup:
    dice = random.Random(seed)
    task = Task(position=seed, domain="ünïcode", prompt=tuple(range(9)), data={"answer": "½", "n": [1, 2.5, None]})

    def sample(member: int) -> Sample:
        length = dice.randint(0, 40)
        made = Generation(
            actions=tuple(dice.randrange(2**17) for _ in range(length)),
            logps=tuple(-dice.expovariate(1.0) for _ in range(length)),
            runs=(VersionRun(version=-3, count=length),),
            finish=dice.choice(list(FinishReason)),
            text="half a character \ud83d",
        )
        turn = Turn(observation=range(3, 90, 2), generation=made, reward=0.1)
        return Sample(
            sample_id=f"{seed}.{member}.0",
            episode=Episode(sample_id=f"{seed}.{member}.0", task=task, turns=(turn, turn), truncated=True, info={}),
            oldest=-3,
            newest=2,
            actions=2 * length,
            logps=RepeatedValue(-0.5, length),
            score=Score(value=math.inf, parts={"a": 1e-300}),
            values=tuple(dice.random() for _ in range(length)) or None,
        )

    return SampleGroup(group_id=seed, task=replace(task, data={"n": (1, 2.5, None)}), samples=(sample(0), sample(1)))


@pytest.mark.parametrize("seed", range(20))
def test_batches_come_back_equal(seed: int) -> None:
    batch = Batch(trained=seed, groups=(group(seed), group(seed + 100)))
    found = through(batch)
    again = through(found)
    assert again == found, "what has crossed once crosses unchanged"
    for sent, got in zip(batch.groups, found.groups, strict=True):
        for ours, theirs in zip(sent.samples, got.samples, strict=True):
            assert [turn.generation for turn in ours.episode.turns] == [
                turn.generation for turn in theirs.episode.turns
            ]
            assert theirs.episode.turns[0].generation.finish in FinishReason
            assert (ours.logps, ours.score, ours.values) == (theirs.logps, theirs.score, theirs.values)
            assert list(ours.episode.turns[0].observation) == list(theirs.episode.turns[0].observation)


def test_requests_and_weights_come_back_equal() -> None:
    request = Request(
        request_id="a", session="s", prompt=(1, 2**40, 3, 4, 5, 6), params=SamplingParams(stop=("\n",)), hint={"n": 3}
    )
    manifest = Manifest(
        version=2, tensors=(TensorEntry(name="a", shape=(3, 4), dtype="bfloat16"),), checksums=("x",), total_bytes=24
    )
    bucket = Bucket(version=2, index=0, checksum="x", payload=SharedSlice(segment="s", start=0, size=24))
    for one in (request, manifest, bucket, Path("/a/b"), FinishReason.STOP, None, True, (True, 1, 2, 3, 4, 5)):
        assert through(one) == one and type(through(one)) is type(one)


def test_latents_and_pictures_cross_as_their_bytes() -> None:
    image = Image(height=2, width=1, pixels=bytes(range(6)))
    steps = (
        DenoisingStep(),
        DenoisingStep(trained=True, before=bytes(1000), after=bytes([255] * 1000)),
        DenoisingStep(trained=True, after=b"\0\1", image=image),
    )
    assert through(steps) == steps
    assert len(encode(steps)) < 2008 + 250, "beside their bytes they need little"


def test_numbers_keep_their_kind() -> None:
    mixed = (1, 2.0, True, None, "x", 6)
    assert [type(one) for one in through(mixed)] == [type(one) for one in mixed]
    large = tuple(2**100 for _ in range(9))
    assert through(large) == large


@pytest.mark.parametrize("value", [object(), {1: 2}, bytearray(b"bytes"), {3}, lambda: 0])
def test_what_has_no_form_is_refused_where_it_is_sent(value: Any) -> None:
    with pytest.raises(TypeError):
        encode([1, value])


def test_what_is_sent_to_a_lost_peer_is_dropped_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        here, there = socket.socketpair()
        loop = asyncio.get_running_loop()
        _, wire = await loop.create_connection(lambda: MessageProtocol(print, lambda: None), sock=here)
        there.close()
        for number in range(20):  # the loop learns of the loss only after these
            wire.send(number)

    asyncio.run(scenario())
    assert caplog.records == []


def test_frames_are_found_however_they_are_cut() -> None:
    async def scenario() -> None:
        got: list[Any] = []
        wire = MessageProtocol(got.append, lambda: None)
        messages = [list(range(number)) for number in (0, 3, 9, 100)]
        data = b"".join(map(encode_frame, messages))
        for size in (1, 7, 50, len(data)):
            got.clear()
            for at in range(0, len(data), size):
                wire.data_received(data[at : at + size])
            assert [list(one) for one in got] == messages

    asyncio.run(scenario())
