"""The cursor: re-queued positions first, then unread ones, and a state that a new cursor goes on from."""

from __future__ import annotations

import random

import pytest

from headway.data import ListSource, TaskCursor
from headway.errors import InvariantBroken
from headway.types import Task


def make_source(count: int) -> ListSource:
    return ListSource([Task(position=0) for _ in range(count)], shuffle=False)


def next_position(cursor: TaskCursor) -> int | None:
    task = cursor.next()
    return None if task is None else task.position


def test_requeued_positions_come_first_and_in_order() -> None:
    cursor = TaskCursor(make_source(6))
    assert [next_position(cursor) for _ in range(4)] == [0, 1, 2, 3]
    cursor.requeue(3)
    cursor.requeue(1)
    assert cursor.state() == (4, (1, 3))
    assert [next_position(cursor) for _ in range(5)] == [1, 3, 4, 5, None]


def test_the_end_is_not_final_while_a_task_may_come_back() -> None:
    cursor = TaskCursor(make_source(1))
    assert next_position(cursor) == 0
    assert next_position(cursor) is None
    cursor.requeue(0)
    assert next_position(cursor) == 0
    assert cursor.state() == (1, ())


def test_a_position_never_given_out_or_already_waiting_is_refused() -> None:
    cursor = TaskCursor(make_source(3))
    cursor.next()
    with pytest.raises(InvariantBroken, match="position 1 was never given out"):
        cursor.requeue(1)
    cursor.requeue(0)
    with pytest.raises(InvariantBroken, match="position 0 waits already"):
        cursor.requeue(0)


@pytest.mark.parametrize("seed", range(20))
def test_a_cursor_made_from_a_state_goes_on_as_the_old_one_would_have(seed: int) -> None:
    rng = random.Random(seed)
    cursor = TaskCursor(make_source(30))
    given_out: list[int] = []
    for _ in range(60):
        if given_out and rng.random() < 0.4:
            cursor.requeue(given_out.pop(rng.randrange(len(given_out))))
        else:
            position = next_position(cursor)
            given_out += [] if position is None else [position]
        if rng.random() < 0.1:
            cursor = TaskCursor(make_source(30), *cursor.state())
    place, pending = cursor.state()
    assert sorted([*given_out, *pending]) == list(range(place))
