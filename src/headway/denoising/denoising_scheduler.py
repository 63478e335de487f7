"""Admission of requests to denoising steps, shared prefixes, and the updates that each step gives.

Guarantees: a free slot takes the next request at the next step, a finished request leaves at once, and every request is
at a step of its own, so no request waits for a batch. Requests start first in, first out. Members of a group that start
from one noise share the steps before their window: one of them leads, each of its steps is reported for all, and they
separate where noise begins. A later member joins as long as the current weights made all steps of the prefix. The
scheduler never sees a tensor.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Protocol

from headway.algorithms.denoising import StepWindow
from headway.engines.base import Request
from headway.engines.engine_thread import RequestUpdate
from headway.types import DenoisingStep, FinishReason


class DenoisingRequest:
    """One request inside the engine: its position on the path, its reported steps, and the slot of its latent.

    It holds plain numbers and bytes only. A request that was interrupted continues from the last latent in its actions,
    or from its first noise. The steps after that latent were not trained and follow from it, so they are computed again
    but not reported twice. They keep the version that first made them, which is the older one.
    """

    def __init__(
        self,
        request: Request,
        actions: Sequence[DenoisingStep],
        *,
        number: int,
        prompt: str,
        window: StepWindow | None,
        seed: int,
        share_prefix: bool = False,
        trains_end: bool = False,
    ) -> None:
        self.number = number
        """Unique in the engine: a request may come back under the same id before its first attempt is gone."""
        self.request_id = request.request_id
        self.prompt = prompt
        self.steps = request.params.max_new_tokens
        self.guidance = request.params.guidance
        self.window = window
        """Steps that draw noise; None: no step does."""
        self.trains_end = trains_end
        """Whether the last step is trained, by the latent it ends with."""
        self.reported = len(actions)
        """Steps that the caller knows of."""
        self.next_step, self.start_latent = _find_restart(actions)
        """Number of steps behind the latent in its slot; and that latent, if the request brought it."""
        self.knows_start = bool(self.start_latent) and self.next_step == self.reported
        """Whether the previous action has already reported the latent that the next step starts from."""
        self._key = f"{seed}/{request.request_id}"
        shares = share_prefix and window is not None and request.prefix_key >= 0
        self.noise_key = f"{seed}/{prompt}/{request.prefix_key}" if shares else self._key
        """Key that the first noise is derived from."""
        self.prefix_key = (
            (self.noise_key, self.steps, self.guidance, window.start)
            if shares and window is not None and window.start > 0 and not self.start_latent
            else None
        )
        """Equal for all requests that share the steps before the window; None: it shares none."""
        self.slot = -1
        self.followers: list[DenoisingRequest] = []
        """Requests of its group that wait for the prefix this one computes."""

    @property
    def is_noisy(self) -> bool:
        """Whether its next step draws noise."""
        return self.window is not None and self.next_step in self.window

    @property
    def is_last(self) -> bool:
        """Whether its next step is the last one."""
        return self.next_step + 1 == self.steps

    @property
    def is_trained(self) -> bool:
        """Whether its next step is trained."""
        return self.is_noisy or (self.trains_end and self.is_last)

    def first_seed(self) -> int:
        """Return the seed of the noise it starts from."""
        return _hash(f"{self.noise_key}/start")

    def step_seed(self) -> int:
        """Return the seed of the noise of its next step: a function of seed, request and step alone."""
        return _hash(f"{self._key}/{self.next_step}")

    def find_finish(self) -> FinishReason | None:
        """Return how it has ended, or None if it has not."""
        return FinishReason.STOP if self.reported >= self.steps else None


def _find_restart(actions: Sequence[DenoisingStep]) -> tuple[int, bytes]:
    """Return the number of steps behind the last latent among `actions`, and that latent."""
    for number in range(len(actions) - 1, -1, -1):
        if actions[number].after:
            return number + 1, actions[number].after
    return 0, b""


def _hash(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=7).digest(), "big")


class LatentSlots(Protocol):
    """The memory of latents, by slots."""

    def begin(self, request: DenoisingRequest) -> None:
        """Write the first latent of the request into its slot."""

    def copy(self, source: int, target: int) -> None:
        """Copy the latent of one slot into another."""


@dataclass(frozen=True, slots=True)
class DenoisingStepResult:
    """What a step computed for one request."""

    logp: float
    action: DenoisingStep


@dataclass(slots=True)
class _SharedPrefix:
    """Steps that several requests have in common, in progress or done."""

    leader: DenoisingRequest | None
    steps: int = 0
    slot: int = -1
    """Slot that keeps the latent at the window, once the prefix is done."""
    joinable: bool = True
    """Whether the current weights made all its steps."""


class DenoisingScheduler:
    """Queue, slots and shared prefixes of one replica. `prefix_slots` more slots keep prefixes for later members."""

    def __init__(self, slots: int, prefix_slots: int, latents: LatentSlots) -> None:
        self._latents = latents
        self._free = list(range(slots - 1, -1, -1))
        self._free_prefix_slots = list(range(slots + prefix_slots - 1, slots - 1, -1))
        self._waiting: list[DenoisingRequest] = []
        self._running: dict[int, DenoisingRequest] = {}
        self._following: dict[int, DenoisingRequest] = {}
        """Requests whose steps a leader computes, by number."""
        self._prefixes: dict[Any, _SharedPrefix] = {}
        self.saved = 0
        """Steps that a leader computed for other requests."""

    @property
    def busy(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._waiting or self._running)

    def add(self, request: DenoisingRequest) -> None:
        """Queue a new request, or one that continues."""
        self._waiting.append(request)

    def remove(self, number: int) -> RequestUpdate | None:
        """Abort a request; return None if there is no such request."""
        request = self._running.get(number) or self._following.get(number)
        if request is None:
            request = next((one for one in self._waiting if one.number == number), None)
            if request is None:
                return None
            self._waiting.remove(request)
        else:
            self._release(request)
        return RequestUpdate(number, [], [], FinishReason.ABORTED)

    def flush(self) -> list[RequestUpdate]:
        """Return nothing: each step is reported when it is made."""
        return []

    def forget_shared_prefixes(self) -> None:
        """Close all prefixes to later members, since the next step uses other weights."""
        for key, prefix in list(self._prefixes.items()):
            prefix.joinable = False
            if prefix.leader is None:
                self._forget_prefix(key)

    def plan(self) -> tuple[list[DenoisingRequest], list[RequestUpdate]]:
        """Admit waiting requests; return those of the next step, and updates of requests that joined a prefix."""
        updates: list[RequestUpdate] = []
        while self._waiting and self._free:
            request = self._waiting.pop(0)
            request.slot = self._free.pop()
            updates += self._admit(request)
        return list(self._running.values()), updates

    def commit(
        self, requests: Sequence[DenoisingRequest], results: Sequence[DenoisingStepResult]
    ) -> list[RequestUpdate]:
        """Record the results of a step; return the updates they give."""
        updates: list[RequestUpdate] = []
        for request, result in zip(requests, results, strict=True):
            request.next_step += 1
            updates += self._report(request, result)
            prefix = self._find_prefix(request)
            if prefix is not None and prefix.leader is request:
                updates += self._advance_followers(request, prefix, result)
            if request.next_step == request.steps:
                self._release(request)
        return updates

    def _find_prefix(self, request: DenoisingRequest) -> _SharedPrefix | None:
        return None if request.prefix_key is None else self._prefixes.get(request.prefix_key)

    def _admit(self, request: DenoisingRequest) -> list[RequestUpdate]:
        """Start a request that has a slot: alone, as the leader of a prefix, or on an existing prefix."""
        prefix = self._find_prefix(request)
        if prefix is None or not prefix.joinable:
            self._latents.begin(request)
            self._running[request.number] = request
            if request.prefix_key is not None and prefix is None:
                self._prefixes[request.prefix_key] = _SharedPrefix(leader=request)
            return []
        self.saved += prefix.steps
        if prefix.leader is None:
            self._latents.copy(prefix.slot, request.slot)
            self._running[request.number] = request
        else:
            prefix.leader.followers.append(request)
            self._following[request.number] = request
        request.next_step = prefix.steps
        return _report_prefix(request, prefix.steps)

    def _advance_followers(
        self, leader: DenoisingRequest, prefix: _SharedPrefix, result: DenoisingStepResult
    ) -> list[RequestUpdate]:
        """Report the leader's step for all its followers; separate them where the window begins."""
        prefix.steps += 1
        updates: list[RequestUpdate] = []
        for request in leader.followers:
            request.next_step += 1
            self.saved += 1
            updates += self._report(request, result)
        assert leader.window is not None
        if leader.next_step == leader.window.start:
            self._separate(leader, prefix)
        return updates

    def _separate(self, leader: DenoisingRequest, prefix: _SharedPrefix) -> None:
        """Give every follower its own latent, and keep the prefix for later members if a slot is free."""
        for request in leader.followers:
            self._latents.copy(leader.slot, request.slot)
            self._running[request.number] = self._following.pop(request.number)
        leader.followers = []
        prefix.leader = None
        if not self._free_prefix_slots and prefix.joinable:
            oldest = next((key for key, one in self._prefixes.items() if one.slot >= 0), None)
            if oldest is not None:
                self._forget_prefix(oldest)
        if self._free_prefix_slots and prefix.joinable:
            prefix.slot = self._free_prefix_slots.pop()
            self._latents.copy(leader.slot, prefix.slot)
        else:
            self._forget_prefix(leader.prefix_key)

    def _forget_prefix(self, key: Any) -> None:
        prefix = self._prefixes.pop(key)
        if prefix.slot >= 0:
            self._free_prefix_slots.append(prefix.slot)

    def _release(self, request: DenoisingRequest) -> None:
        """Free the slot of a request; if it leads a prefix, its first follower becomes the leader."""
        if self._running.pop(request.number, None) is None:
            del self._following[request.number]
            prefix = self._prefixes[request.prefix_key]
            assert prefix.leader is not None
            prefix.leader.followers.remove(request)
        else:
            self._replace_leader(request)
        self._free.append(request.slot)

    def _replace_leader(self, request: DenoisingRequest) -> None:
        """Hand the prefix of a leader to its first follower, or forget it if there is none."""
        prefix = self._find_prefix(request)
        if prefix is None or prefix.leader is not request:
            return
        if not request.followers:
            self._forget_prefix(request.prefix_key)
            return
        successor, *others = request.followers
        self._latents.copy(request.slot, successor.slot)
        self._running[successor.number] = self._following.pop(successor.number)
        successor.followers, prefix.leader = others, successor

    def _report(self, request: DenoisingRequest, result: DenoisingStepResult) -> list[RequestUpdate]:
        """Return the update of the request's last step, unless the caller knows of the step."""
        if request.next_step <= request.reported:
            return []
        request.reported = request.next_step
        request.knows_start = bool(result.action.after)
        finish = FinishReason.STOP if request.next_step == request.steps else None
        return [RequestUpdate(request.number, [result.action], [result.logp], finish)]


def _report_prefix(request: DenoisingRequest, steps: int) -> list[RequestUpdate]:
    """Report the steps that were made before `request` joined."""
    unknown = steps - request.reported
    if unknown <= 0:
        return []
    request.reported = steps
    return [RequestUpdate(request.number, [DenoisingStep()] * unknown, [0.0] * unknown)]
