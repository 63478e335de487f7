"""Watches the ranks of a trainer while they answer calls, and names the rank that the others wait for.

Every rank is asked now and then where it is: the function that it works in, and how many collective calls it has begun
in each of its process groups. A rank that is stopped does not answer. A rank that is late has begun fewer collective
calls than the others of a group. A process that has ended needs no watch: its parent knows at once.

Guarantees: ranks are stuck when one has not answered for `timeout_s`, or none has begun another collective call for
that long. Nothing is asked of a rank that has not answered the question before.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from headway.errors import BackendError
from headway.processes.base import Peer
from headway.processes.process_output import read_process_state

_QUESTIONS = 10
"""Questions to a rank within the time that it may be late."""
_LONGEST_PAUSE_S = 15.0
_MOST_WAITING = 3
"""Ranks of which the message says where they wait."""


@dataclass(slots=True, kw_only=True)
class RankTrack:
    """What is known of one rank."""

    position: str = ""
    """The function that it was last seen in, such as `all_reduce in clip_gradients`."""
    begun: Mapping[str, int] = field(default_factory=dict)
    """Collective calls that it has begun, by the name of the group."""
    answered_s: float = 0.0
    """When it last answered."""
    moved_s: float = 0.0
    """When it last had begun another collective call, or was first asked."""
    halted: str = ""
    """Why its process does not run, in words. Empty: it runs, or is on another machine."""


def find_late_ranks(tracks: Sequence[RankTrack], now_s: float, silent_s: float) -> list[int]:
    """Return the ranks that do not run, or have not answered for `silent_s`; else those that are behind in a group."""
    silent = [rank for rank, one in enumerate(tracks) if one.halted or now_s - one.answered_s > silent_s]
    if silent:
        return silent
    furthest: dict[str, int] = {}
    for track in tracks:
        for group, number in track.begun.items():
            furthest[group] = max(furthest.get(group, 0), number)
    return [
        rank
        for rank, track in enumerate(tracks)
        if any(number < furthest[group] for group, number in track.begun.items())
    ]


class RankWatch:
    """Asks the ranks where they are. `describe_call` says which call a rank has not answered yet."""

    def __init__(self, name: str, peers: Sequence[Peer], timeout_s: float, describe_call: Callable[[int], str]) -> None:
        self._name, self._peers, self._timeout_s, self._describe_call = name, peers, timeout_s, describe_call
        self._pause_s = min(timeout_s / _QUESTIONS, _LONGEST_PAUSE_S)
        self._clock = asyncio.get_running_loop().time
        self._began_s = self._clock()
        self._tracks = [RankTrack(answered_s=self._began_s, moved_s=self._began_s) for _ in peers]
        self._questions: dict[int, asyncio.Future[Any]] = {}

    async def run_until_stuck(self) -> str:
        """Return which rank is late and where, once the ranks have not moved for the time that they may be late."""
        return await self._ask_until(self._is_stuck)

    async def run_until_deadline(self) -> str:
        """Return which rank is late and where, once the time is over, whatever the ranks do."""
        return await self._ask_until(lambda now_s: now_s - self._began_s >= self._timeout_s)

    def _is_stuck(self, now_s: float) -> bool:
        silent_s = max(now_s - track.answered_s for track in self._tracks)
        still_s = min(now_s - track.moved_s for track in self._tracks)
        return max(silent_s, still_s) >= self._timeout_s

    async def _ask_until(self, is_over: Callable[[float], bool]) -> str:
        try:
            while not is_over(self._clock()):
                for rank, peer in enumerate(self._peers):
                    if rank not in self._questions:
                        question: asyncio.Future[Any] = asyncio.ensure_future(peer.call("locate"))
                        self._questions[rank] = question
                        question.add_done_callback(partial(self._take_answer, rank))
                await asyncio.sleep(self._pause_s)
            return self.describe()
        finally:
            for question in list(self._questions.values()):
                question.cancel()

    def _take_answer(self, rank: int, question: asyncio.Future[Any]) -> None:
        self._questions.pop(rank, None)
        if question.cancelled():
            return
        with suppress(BackendError):  # a rank that has ended is reported by its parent
            position, begun = question.result()
            track = self._tracks[rank]
            track.answered_s = self._clock()
            if begun != track.begun:
                track.moved_s = track.answered_s
            track.position, track.begun = position, begun

    def describe(self) -> str:
        """Name the ranks that are late, with where they were last seen, and then some of those that wait for them."""
        ranks, now_s = range(len(self._peers)), self._clock()
        for peer, track in zip(self._peers, self._tracks, strict=True):
            process = getattr(peer, "pid", None)
            track.halted = read_process_state(process) if process else ""
        late = find_late_ranks(self._tracks, now_s, 2 * self._pause_s)
        if not late:
            return "no rank is behind: " + "; ".join(self._describe_rank(rank, now_s) for rank in ranks)
        waiting = [rank for rank in ranks if rank not in late][:_MOST_WAITING]
        others = "".join(f"; {self._describe_rank(rank, now_s)}, waits" for rank in waiting)
        return " and ".join(self._describe_rank(rank, now_s) for rank in late) + " did not come" + others

    def _describe_rank(self, rank: int, now_s: float) -> str:
        track, process = self._tracks[rank], getattr(self._peers[rank], "pid", None)  # one elsewhere has none
        where = f" (process {process}{track.halted})" if process else ""
        position, silent_s = f", in {track.position}" if track.position else "", now_s - track.answered_s
        silence = f", no answer for {silent_s:.1f} s" if silent_s > 2 * self._pause_s else ""
        return f"{self._name}/{rank}{where} in phase {self._describe_call(rank)}{position}{silence}"
