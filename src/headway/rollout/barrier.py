"""A barrier whose members come and go: how naive systems step environments, kept here as the baseline."""

from __future__ import annotations

from headway.rollout.signal import Signal


class TurnBarrier:
    """`arrive` returns once every present member has arrived."""

    def __init__(self) -> None:
        self._present = 0
        self._arrived = 0
        self._round = 0
        self._open = Signal()

    def enter(self) -> None:
        """Become a member."""
        self._present += 1

    def leave(self) -> None:
        """Stop being one; the others no longer wait for you."""
        self._present -= 1
        self._open_if_full()

    async def arrive(self) -> None:
        """Wait for everybody else."""
        this_round = self._round
        self._arrived += 1
        self._open_if_full()
        try:
            await self._open.until(lambda: self._round != this_round)
        finally:
            if self._round == this_round:
                self._arrived -= 1

    def _open_if_full(self) -> None:
        if self._present and self._arrived >= self._present:
            self._round += 1
            self._arrived = 0
            self._open.notify()
