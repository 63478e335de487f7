"""Every change of state there could be: what is legal, what is not, and the way from anywhere to anywhere."""

from __future__ import annotations

from itertools import pairwise, product
from types import SimpleNamespace
from typing import Any

import pytest

from headway.errors import IllegalTransition
from headway.flow.stage import LEGAL_TRANSITIONS, TRANSITION_PATHS, Stage
from headway.flow.stage import StageState as S
from headway.monitor.event_log import EventLog, LoggedEvent
from headway.monitor.wait_graph import WaitGraph
from headway.types import Task

ALLOWED = {
    (S.IDLE, S.WAITING),
    (S.WAITING, S.RUNNING),
    (S.WAITING, S.IDLE),
    (S.RUNNING, S.EMITTING),
    (S.RUNNING, S.IDLE),
    (S.RUNNING, S.RECOVERING),
    (S.RUNNING, S.DEGRADED),
    (S.EMITTING, S.IDLE),
    (S.EMITTING, S.RUNNING),
    (S.RECOVERING, S.RUNNING),
    (S.RECOVERING, S.DEGRADED),
    (S.DEGRADED, S.RUNNING),
    (S.DEGRADED, S.EMITTING),
    (S.DEGRADED, S.IDLE),
    (S.DEGRADED, S.RECOVERING),
}
ENDS = {S.STOPPED, S.FAILED}
EVERY_CHANGE = [(old, new) for old, new in product(S, S) if old is not new]


class Plain(Stage[Task, Task]):
    role = "any"
    consumes = produces = Task


def make_stage(state: S = S.IDLE) -> tuple[Stage[Any, Any], list[LoggedEvent]]:
    events: list[LoggedEvent] = []
    log, recovery = EventLog(lambda: 0.0, events.append), SimpleNamespace(degraded_roles=set())
    stage = Plain(SimpleNamespace(events=log, waits=WaitGraph(lambda: 0.0), recovery=recovery))  # type: ignore[arg-type]
    stage.state = state
    return stage, events


def may(old: S, new: S) -> bool:
    """The table of the design, said once more: any state but an end may end."""
    return (old, new) in ALLOWED or (new in ENDS and old not in ENDS)


@pytest.mark.parametrize(("old", "new"), [change for change in EVERY_CHANGE if may(*change)], ids=str)
def test_a_legal_change_is_made_and_reported(old: S, new: S) -> None:
    stage, events = make_stage(old)
    stage.change_state(new)
    assert stage.state is new
    assert [(event.kind, event.who, event.data) for event in events] == [
        ("state", "any", {"old": str(old), "new": str(new)})
    ]


@pytest.mark.parametrize(("old", "new"), [change for change in EVERY_CHANGE if not may(*change)], ids=str)
def test_an_illegal_change_is_refused_and_changes_nothing(old: S, new: S) -> None:
    stage, events = make_stage(old)
    with pytest.raises(IllegalTransition, match=f"any: {old} → {new}"):
        stage.change_state(new)
    assert stage.state is old
    assert events == []


@pytest.mark.parametrize("state", S, ids=str)
def test_staying_where_one_is_says_nothing(state: S) -> None:
    stage, events = make_stage(state)
    stage.change_state(state)
    assert stage.state is state and events == []


@pytest.mark.parametrize(("start", "goal"), EVERY_CHANGE, ids=str)
def test_a_path_is_legal_shortest_and_passes_no_end(start: S, goal: S) -> None:
    path = TRANSITION_PATHS[start, goal]
    if start in ENDS:
        assert path == ()
        return
    assert path[-1] is goal
    assert all(may(old, new) for old, new in pairwise((start, *path)))
    assert not set(path[:-1]) & ENDS
    assert len(path) == distance(start, goal)


def distance(start: S, goal: S) -> int:
    """Found by widening circles, independently of the path."""
    reached, steps = {start}, 0
    while goal not in reached:
        reached |= {new for old in reached - ENDS for new in LEGAL_TRANSITIONS[old]}
        steps += 1
    return steps


def test_settling_takes_legal_steps_only_and_reports_each() -> None:
    stage, events = make_stage()
    stage.settle(running=1)
    assert [event.data["new"] for event in events] == ["waiting", "running"]
    stage.settle(running=-1, emitting=1)
    stage.settle(emitting=-1)
    assert [event.data["new"] for event in events[2:]] == ["emitting", "idle"]


def test_the_state_is_that_of_the_busiest_item() -> None:
    stage, _ = make_stage()
    stage.settle(listening=1)
    assert stage.state is S.WAITING
    stage.settle(running=2)
    stage.settle(running=-1, emitting=1)
    assert stage.state is S.RUNNING
    stage.settle(recovering=1)
    assert stage.state is S.RECOVERING
    stage.settle(recovering=-1, running=-1)
    assert stage.state is S.EMITTING
    stage.settle(emitting=-1)
    assert stage.state is S.WAITING


def test_a_stage_whose_retries_are_used_up_is_degraded_while_it_works_until_the_run_is_restored() -> None:
    stage, events = make_stage()
    stage.pipeline.recovery.degraded_roles.add("any")
    stage.settle(running=1)
    assert stage.state is S.DEGRADED
    stage.settle(recovering=1)
    stage.settle(recovering=-1)
    stage.settle(running=-1, listening=1)
    assert stage.state is S.WAITING
    stage.pipeline.recovery.degraded_roles.clear()
    stage.settle(running=1)
    assert stage.state is S.RUNNING
    assert "degraded" in {event.data["new"] for event in events}
