"""The event log: typed records in memory, the same lines on disk, and logs of other versions."""

from __future__ import annotations

import io
import json
from dataclasses import fields
from typing import Any

import pytest

from headway.monitor.event_log import EventLog, JsonlSink, LoggedEvent, decode_event, encode_event, read_events
from headway.monitor.event_record import EVENT_TYPES, Event, GenericEvent
from headway.monitor.events import GroupReady, RequestEnd, SampleEnd, StepEnd
from tests.monitor.factory import toy_run


def filled(event_type: type[Event]) -> Event:
    """An event with something in every field."""
    values: dict[str, Any] = {name: number for number, name in enumerate(event_type.field_names, start=1)}
    if event_type is StepEnd:
        values["metrics"] = {"train/loss": 0.5}
    return event_type(who="x", **values)


@pytest.mark.parametrize("event_type", EVENT_TYPES.values(), ids=EVENT_TYPES)
def test_every_kind_comes_back_from_the_log_as_it_was(event_type: type[Event]) -> None:
    logged = LoggedEvent(1.5, filled(event_type))
    assert decode_event(encode_event(logged)) == logged
    names = [field.name for field in fields(event_type) if field.name not in ("who", "metrics")]  # type: ignore[arg-type]
    assert list(logged.data)[: len(names)] == names, "in the order of the class"


def test_a_line_has_microseconds_kind_who_and_the_fields_that_are_not_none() -> None:
    stream = io.StringIO()
    log = EventLog(lambda: 2.0000005, JsonlSink(stream))
    log.emit(RequestEnd(who="engine/0", request="1.0/0", actions=7, finish="stop"))
    log.emit(SampleEnd(who="train", sample="1.0", end="trained"))
    log.emit(GroupReady(who="reward", group=1, reward=0.5, equal=True))
    log.emit(StepEnd(who="train", trained=1, groups=2, reward=0.5, metrics={"train/loss": 0.25}))
    assert stream.getvalue().splitlines() == [
        '[2000000,"request.end","engine/0",{"request":"1.0/0","actions":7,"finish":"stop"}]',
        '[2000000,"sample.end","train",{"sample":"1.0","end":"trained"}]',
        '[2000000,"group.ready","reward",{"group":1,"reward":0.5,"equal":true}]',
        '[2000000,"step.end","train",{"trained":1,"groups":2,"reward":0.5,"train/loss":0.25}]',
    ]


@pytest.mark.parametrize(
    "line", ['[1,"moon.rise","sky",{"height":3}]', '[1,"group.train","train",{"group":1}]'], ids=["kind", "fields"]
)
def test_what_this_version_does_not_know_is_kept_as_it_is(line: str) -> None:
    (logged,) = read_events([line])
    assert isinstance(logged.event, GenericEvent)
    assert encode_event(logged) == line


def test_keys_that_a_kind_does_not_have_are_ignored() -> None:
    (logged,) = read_events(['[1,"request.end","engine/0",{"request":"a","moon":3,"who":"nobody"}]'])
    assert logged.event == RequestEnd(who="engine/0", request="a")


def test_a_log_reads_back_whole_and_a_torn_last_line_ends_it() -> None:
    events = toy_run(steps=4)
    lines = [encode_event(event) for event in events]
    assert [encode_event(event) for event in read_events([*lines, '[12,"sta'])] == lines
    damaged = [json.dumps([1, "state", "train", 5]), json.dumps([10**400, "state", "train", {}]), "[" * 9999, "\ufffd"]
    for line in damaged:
        kinds = [event.kind for event in read_events([lines[0], line, lines[1]])]
        assert kinds == [events[0].kind, "error", events[1].kind]
