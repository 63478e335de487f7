"""Who takes part in the next denoising step, and what became of them after it.

Guarantees: a free slot takes the next request at the next step, a finished row leaves at once, and every row is at a
step of its own: there is no batch to wait for. Requests start first in, first out. Members of a group with one start
share the steps before their window: one of them leads, each of its steps is reported for all, and they part where noise
begins. Whoever comes later joins as long as all steps behind the latent were made by the weights of now. Never sees a
tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from headway.denoising.denoising_request import DenoisingRequest
from headway.engines.native.native_scheduler import RequestUpdate
from headway.types import DenoisingStep, FinishReason


class LatentSlots(Protocol):
    """The memory that latents live in, by slots."""

    def begin(self, row: DenoisingRequest) -> None:
        """Put what the row starts from into its slot."""
        ...

    def copy(self, source: int, target: int) -> None:
        """The latent of one slot into another."""
        ...


@dataclass(frozen=True, slots=True)
class DenoisingStepResult:
    """What a step made for one row."""

    logp: float
    action: DenoisingStep


@dataclass(slots=True)
class _Prefix:
    """Steps that several rows have in common, on their way or done."""

    leader: DenoisingRequest | None
    steps: int = 0
    kept: int = -1
    """Slot with the latent at the window, once it is done."""
    joinable: bool = True
    """All steps were made by the weights of now."""


class DenoisingScheduler:
    """Queue, slots and shared prefixes of one replica. `kept` more slots hold prefixes for those who come later."""

    def __init__(self, slots: int, kept: int, moves: LatentSlots) -> None:
        self._moves = moves
        self._free = list(range(slots - 1, -1, -1))
        self._shelves = list(range(slots + kept - 1, slots - 1, -1))
        self._waiting: list[DenoisingRequest] = []
        self._running: dict[int, DenoisingRequest] = {}
        self._following: dict[int, DenoisingRequest] = {}
        """By number: whose leader."""
        self._prefixes: dict[Any, _Prefix] = {}
        self.saved = 0
        """Steps of rows that a sibling made for them."""

    @property
    def busy(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._waiting or self._running)

    def add(self, row: DenoisingRequest) -> None:
        """A new request, or one that goes on."""
        self._waiting.append(row)

    def remove(self, number: int) -> RequestUpdate | None:
        """Take a row out."""
        row = self._running.get(number) or self._following.get(number)
        if row is None:
            row = next((one for one in self._waiting if one.number == number), None)
            if row is None:
                return None
            self._waiting.remove(row)
        else:
            self._leave(row)
        return RequestUpdate(number, [], [], FinishReason.ABORTED)

    def flush(self) -> list[RequestUpdate]:
        """Everything not yet reported: nothing, since each step is reported when it is made."""
        return []

    def other_weights(self) -> None:
        """From the next step on other weights are served: whoever shares a prefix keeps it, nobody else joins."""
        for key, prefix in list(self._prefixes.items()):
            prefix.joinable = False
            if prefix.leader is None:
                self._forget(key)

    def plan(self) -> tuple[list[DenoisingRequest], list[RequestUpdate]]:
        """Let in who fits; who takes part in the next step, and what joining has given to others."""
        news: list[RequestUpdate] = []
        while self._waiting and self._free:
            row = self._waiting.pop(0)
            row.slot = self._free.pop()
            news += self._placed(row)
        return list(self._running.values()), news

    def commit(self, rows: Sequence[DenoisingRequest], made: Sequence[DenoisingStepResult]) -> list[RequestUpdate]:
        """Enter what a step has made."""
        news: list[RequestUpdate] = []
        for row, one in zip(rows, made, strict=True):
            row.at += 1
            news += self._reported(row, one)
            prefix = self._prefixes.get(row.prefix) if row.prefix is not None else None
            if prefix is not None and prefix.leader is row:
                news += self._led(row, prefix, one)
            if row.at == row.steps:
                self._leave(row)
        return news

    # Inside.

    def _placed(self, row: DenoisingRequest) -> list[RequestUpdate]:
        """A row with a slot: on its own, as a leader, or with one."""
        prefix = self._prefixes.get(row.prefix) if row.prefix is not None else None
        if prefix is None or not prefix.joinable:
            self._moves.begin(row)
            self._running[row.number] = row
            if row.prefix is not None and prefix is None:
                self._prefixes[row.prefix] = _Prefix(leader=row)
            return []
        self.saved += prefix.steps
        if prefix.leader is None:
            self._moves.copy(prefix.kept, row.slot)
            self._running[row.number] = row
        else:
            prefix.leader.followers.append(row)
            self._following[row.number] = row
        row.at = prefix.steps
        return _told(row, prefix.steps)

    def _led(self, leader: DenoisingRequest, prefix: _Prefix, made: DenoisingStepResult) -> list[RequestUpdate]:
        """A step of a prefix is everybody's."""
        prefix.steps += 1
        news: list[RequestUpdate] = []
        for row in leader.followers:
            row.at += 1
            self.saved += 1
            news += self._reported(row, made)
        assert leader.window is not None
        if leader.at == leader.window.start:
            self._parted(leader, prefix)
        return news

    def _parted(self, leader: DenoisingRequest, prefix: _Prefix) -> None:
        """The window begins: from here on everybody goes alone."""
        for row in leader.followers:
            self._moves.copy(leader.slot, row.slot)
            self._running[row.number] = self._following.pop(row.number)
        leader.followers = []
        prefix.leader = None
        if not self._shelves and prefix.joinable:
            oldest = next((key for key, one in self._prefixes.items() if one.kept >= 0), None)
            if oldest is not None:
                self._forget(oldest)
        if self._shelves and prefix.joinable:
            prefix.kept = self._shelves.pop()
            self._moves.copy(leader.slot, prefix.kept)
        else:
            self._forget(leader.prefix)

    def _forget(self, key: Any) -> None:
        prefix = self._prefixes.pop(key)
        if prefix.kept >= 0:
            self._shelves.append(prefix.kept)

    def _leave(self, row: DenoisingRequest) -> None:
        """Give the slot back; a leader's place goes to the first of its followers."""
        if self._running.pop(row.number, None) is None:
            del self._following[row.number]
            prefix = self._prefixes[row.prefix]
            assert prefix.leader is not None
            prefix.leader.followers.remove(row)
        else:
            self._succeed(row)
        self._free.append(row.slot)

    def _succeed(self, row: DenoisingRequest) -> None:
        prefix = self._prefixes.get(row.prefix) if row.prefix is not None else None
        if prefix is None or prefix.leader is not row:
            return
        if not row.followers:
            self._forget(row.prefix)
            return
        heir, *others = row.followers
        self._moves.copy(row.slot, heir.slot)
        self._running[heir.number] = self._following.pop(heir.number)
        heir.followers, prefix.leader = others, heir

    def _reported(self, row: DenoisingRequest, made: DenoisingStepResult) -> list[RequestUpdate]:
        """The step that has brought `row` to where it is, unless the caller knows of it."""
        if row.at <= row.reported:
            return []
        row.reported = row.at
        row.chained = bool(made.action.after)
        finish = FinishReason.STOP if row.at == row.steps else None
        return [RequestUpdate(row.number, [made.action], [made.logp], finish)]  # type: ignore[list-item]


def _told(row: DenoisingRequest, steps: int) -> list[RequestUpdate]:
    """Steps that were made before `row` came."""
    unknown = steps - row.reported
    if unknown <= 0:
        return []
    row.reported = steps
    return [RequestUpdate(row.number, [DenoisingStep()] * unknown, [0.0] * unknown)]  # type: ignore[list-item]
