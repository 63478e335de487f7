"""The states of a stage and the changes between them that are legal."""

from __future__ import annotations

from collections import deque
from enum import StrEnum


class StageState(StrEnum):
    """What a stage is doing."""

    IDLE = "idle"
    WAITING = "waiting"
    """For something to consume, or for leave to go on."""
    RUNNING = "running"
    EMITTING = "emitting"
    """Done with its item, waiting for room behind it."""
    RECOVERING = "recovering"
    """Something failed and is being tried again."""
    DEGRADED = "degraded"
    """Tried as often as it may be; the run goes on smaller."""
    STOPPED = "stopped"
    FAILED = "failed"


S = StageState
_ENDS = {S.STOPPED, S.FAILED}
LEGAL: dict[StageState, frozenset[StageState]] = {
    S.IDLE: frozenset({S.WAITING} | _ENDS),
    S.WAITING: frozenset({S.RUNNING, S.IDLE} | _ENDS),
    S.RUNNING: frozenset({S.EMITTING, S.IDLE, S.RECOVERING} | _ENDS),
    S.EMITTING: frozenset({S.IDLE, S.RUNNING} | _ENDS),
    S.RECOVERING: frozenset({S.RUNNING, S.DEGRADED} | _ENDS),
    S.DEGRADED: frozenset({S.RUNNING} | _ENDS),
    S.STOPPED: frozenset(),
    S.FAILED: frozenset(),
}


def _path(start: StageState, goal: StageState) -> tuple[StageState, ...]:
    """The shortest way of legal changes from one state to another, without passing an end."""
    ways: deque[tuple[StageState, ...]] = deque([(start,)])
    seen = {start}
    while ways:
        way = ways.popleft()
        if way[-1] is goal:
            return way[1:]
        for state in S:
            if state in LEGAL[way[-1]] and state not in seen and (state is goal or state not in _ENDS):
                seen.add(state)
                ways.append((*way, state))
    return ()


PATHS = {(start, goal): _path(start, goal) for start in S for goal in S if start is not goal}
"""How a stage gets from any state to any other; empty where it cannot."""
