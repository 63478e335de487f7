"""Ranks that are killed or stopped are named in time, with the phase that they did not come to, and come back."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from headway.trainers.sharded.rank_watch import RankTrack, find_late_ranks

from ..processes.template_pool import Pool
from .lost_ranks import JOIN_S, PHASES, longest_s, lose_rank

SOME = [
    ("process group", signal.SIGSTOP, 1),
    ("gradient norm", signal.SIGKILL, 1),
    ("reduce of gradients", signal.SIGSTOP, 1),
    ("barrier of a checkpoint", signal.SIGSTOP, 0),
]
"""All of them: `make lost-ranks`."""


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    made = Pool("tests.trainers.sharded_targets")
    yield made
    made.close()


@pytest.mark.parametrize(("name", "number", "victim"), SOME)
def test_a_lost_rank_is_named_in_time_and_all_ranks_come_back(
    pool: Pool, tmp_path: Path, name: str, number: signal.Signals, victim: int
) -> None:
    async def scenario() -> None:
        phase = PHASES[name]
        lost = await lose_rank(phase, number, victim, tmp_path, lambda spec: pool.start(spec, JOIN_S))
        how = "was killed by SIGKILL" if number == signal.SIGKILL else "which is stopped"
        assert f"trainer/{victim} (process" in lost.error and how in lost.error
        assert f"in phase {'join' if phase.call == 'start' else phase.call}" in lost.error
        assert lost.error_s < longest_s(phase)
        assert lost.version == 1

    pool.run(scenario())


def track(answered_s: float, **begun: int) -> RankTrack:
    return RankTrack(answered_s=answered_s, begun=begun)


def test_a_silent_rank_is_late_and_else_the_one_with_fewer_collective_calls() -> None:
    assert find_late_ranks([track(9, all=4), track(5, all=4)], now_s=10, silent_s=2) == [1]
    assert find_late_ranks([track(9, all=4), track(9, all=3)], now_s=10, silent_s=2) == [1]
    halves = [track(9, all=4, left=7), track(9, all=4, left=6), track(9, all=4, right=2), track(9, all=4, right=2)]
    assert find_late_ranks(halves, now_s=10, silent_s=2) == [1], "groups are compared with themselves"
    assert find_late_ranks([track(9, all=4), track(9, all=4)], now_s=10, silent_s=2) == []
