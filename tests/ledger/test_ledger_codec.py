"""The codec: exact numbers, compact sequences, and no surprise on reading."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.errors import LedgerError
from headway.ledger.ledger_records import (
    decode_episode,
    decode_generation,
    encode_episode,
    encode_generation,
)
from headway.types import (
    DenoisingStep,
    Episode,
    ExpertRouting,
    FinishReason,
    Generation,
    Image,
    PartialGeneration,
    RepeatedValue,
    Task,
    Turn,
    VersionRun,
)

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
integers = st.lists(st.integers(-(2**70), 2**70) | st.integers(0, 150_000), max_size=8).map(tuple)
repeated = st.builds(RepeatedValue, st.integers(-9, 9) | st.floats(allow_nan=False), st.integers(0, 10**9))
images = st.builds(Image, height=st.integers(1, 9), width=st.integers(1, 9), pixels=st.binary(max_size=9))
steps = st.builds(
    DenoisingStep,
    trained=st.booleans(),
    before=st.binary(max_size=8),
    after=st.binary(max_size=8),
    image=st.none() | images,
)
generations = st.builds(
    Generation,
    actions=integers | repeated | st.lists(json_values, max_size=4).map(tuple) | st.lists(steps, max_size=4).map(tuple),
    logps=st.lists(st.floats(allow_nan=False), max_size=8).map(tuple) | repeated,
    runs=st.lists(st.builds(VersionRun, version=st.integers(-9, 99), count=st.integers(1, 9)), max_size=3).map(tuple),
    finish=st.sampled_from(FinishReason),
    text=st.text(),
)
mappings = st.dictionaries(st.text(), json_values, max_size=3)
turns = st.builds(
    Turn,
    observation=integers,
    generation=generations,
    reward=st.floats(allow_nan=False),
    starts_new_context=st.booleans(),
    state=st.text(max_size=4),
)
tasks = st.builds(Task, position=st.integers(0), domain=st.text(), prompt=integers, data=mappings)
episodes = st.builds(
    Episode,
    sample_id=st.text(min_size=1),
    task=tasks,
    turns=st.lists(turns, max_size=3).map(tuple),
    truncated=st.booleans(),
    info=mappings,
)


@given(episodes)
def test_an_episode_comes_back_as_it_was(episode: Episode) -> None:
    assert decode_episode(encode_episode(episode)) == episode


@given(generations)
def test_a_generation_comes_back_as_it_was(generation: Generation) -> None:
    assert decode_generation(encode_generation(generation)) == generation


def make_generation(actions: Sequence[Any], logps: Sequence[float]) -> Generation:
    return Generation(actions=actions, logps=logps, runs=(), finish=FinishReason.LENGTH)


def test_repeated_and_range_stay_compact() -> None:
    blob = encode_generation(make_generation(range(10**9), RepeatedValue(-0.1, 10**9)))
    assert len(blob) < 100
    assert decode_generation(blob).actions == range(10**9)
    assert decode_generation(blob).logps == RepeatedValue(-0.1, 10**9)


def test_tokens_take_four_bytes_and_log_probabilities_eight() -> None:
    assert len(encode_generation(make_generation(tuple(range(1000)), (-0.1,) * 1000))) < 12_100


def test_arrays_lists_and_log_probabilities_that_are_whole_come_back_as_numbers() -> None:
    back = decode_generation(encode_generation(make_generation(array("q", [1, 2**40]), [0, -1])))
    assert back.actions == (1, 2**40)
    assert back.logps == (0.0, -1.0)
    assert all(type(logp) is float for logp in back.logps)


def test_actions_that_are_vectors_fall_back_to_json() -> None:
    assert decode_generation(encode_generation(make_generation(([0.1, 0.2], [0.3, 0.4]), (-1.0, -2.0)))).actions == (
        [0.1, 0.2],
        [0.3, 0.4],
    )


def test_half_a_character_and_a_read_only_mapping_are_stored() -> None:
    task = Task(position=0, data=MappingProxyType({"answer": "\ud83d"}))
    back = decode_episode(encode_episode(Episode(sample_id="a", task=task, turns=())))
    assert back.task.data == {"answer": "\ud83d"}


@pytest.mark.parametrize("value", [object(), {1, 2}, b"bytes"])
def test_what_is_not_json_is_refused_with_the_sample(value: object) -> None:
    episode = Episode(sample_id="7/0/0", task=Task(position=0), turns=(), info={"x": value})
    with pytest.raises(LedgerError, match="7/0/0 cannot be stored"):
        encode_episode(episode)


def test_a_mapping_that_holds_itself_is_refused() -> None:
    info: dict[str, Any] = {}
    info["self"] = info
    with pytest.raises(LedgerError, match="cannot be stored"):
        encode_episode(Episode(sample_id="a", task=Task(position=0), turns=(), info=info))


def test_a_blob_cut_short_or_foreign_is_refused() -> None:
    blob = encode_generation(make_generation((1, 2, 3), (-0.1,) * 3))
    for damaged in (blob[:-1], blob[:40] + b"\0" + blob[41:], blob[:5]):
        with pytest.raises(LedgerError, match="its checksum differs"):
            decode_generation(damaged)
    old = b"HW1" + blob[7:]  # of an older run: it has no checksum
    assert decode_generation(old) == decode_generation(blob)
    with pytest.raises(LedgerError, match="cut short"):
        decode_generation(old[:-1])
    with pytest.raises(LedgerError, match="begins with"):
        decode_generation(b"\x80\x04" + blob)


@pytest.mark.parametrize("known", [False, True])
def test_experts_come_back_with_their_generation_its_turns_and_what_was_before_it(known: bool) -> None:
    routing = ExpertRouting(start=3, layers=2, experts=1, width=2, data=bytes(range(8))) if known else None
    made = Generation(
        actions=(1, 2), logps=(-0.5, -0.25), runs=(), finish=FinishReason.ABORTED, text="x", routing=routing
    )
    turn = Turn(observation=(7, 8), generation=made, starts_new_context=True)
    partial = PartialGeneration.of(made, before=(turn, turn), observation=(1, 2, 3))
    episode = Episode(sample_id="a", task=Task(position=0), turns=(turn, turn))
    assert decode_generation(encode_generation(made)) == made
    assert decode_generation(encode_generation(partial)) == partial
    assert decode_episode(encode_episode(episode)) == episode
