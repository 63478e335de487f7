"""One request inside the engine: where on its path it is, what of it was reported, where its latent lives.

Plain numbers and bytes only. A row that was cut off goes on from the last latent in its actions, or from its noise:
the steps between were not trained and follow from there, so they are made again and not reported twice. They keep the
version they were first made by, which is the older one.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

from headway.algorithms.denoising import StepWindow
from headway.engines.base import Request
from headway.types import DenoisingStep, FinishReason


class DenoisingRequest:
    """Made by `generate`, then touched by the worker's thread only."""

    __slots__ = (
        "_key",
        "at",
        "chained",
        "followers",
        "guidance",
        "held",
        "keeps_end",
        "number",
        "prefix",
        "prompt",
        "reported",
        "request_id",
        "slot",
        "start_key",
        "steps",
        "window",
    )

    def __init__(
        self,
        request: Request,
        actions: Sequence[DenoisingStep],
        *,
        number: int,
        prompt: str,
        window: StepWindow | None,
        seed: int,
        shared: bool = False,
        keeps_end: bool = False,
    ) -> None:
        self.number = number
        """Unique in the engine: a request may come back under the same id before its first attempt is gone."""
        self.request_id = request.request_id
        self.prompt = prompt
        self.steps = request.params.max_new_tokens
        self.guidance = request.params.guidance
        self.window = window
        """Where noise is drawn; none: nowhere."""
        self.keeps_end = keeps_end
        """Its last step is trained on, by where it ended."""
        self.reported = len(actions)
        """Steps that the caller knows of."""
        self.at, self.held = _restart(actions)
        """Steps behind the latent in its slot; and that latent, where it comes with the request."""
        self.chained = bool(self.held) and self.at == self.reported
        """The action before has told where it ended."""
        self._key = f"{seed}/{request.request_id}"
        shares = shared and window is not None and request.prefix_key >= 0
        self.start_key = f"{seed}/{prompt}/{request.prefix_key}" if shares else self._key
        """What its first noise comes from."""
        self.prefix = (
            (self.start_key, self.steps, self.guidance, window.start)
            if shares and window is not None and window.start > 0 and not self.held
            else None
        )
        """What those that share the steps before the window have in common."""
        self.slot = -1
        self.followers: list[DenoisingRequest] = []
        """Members that wait for its prefix."""

    @property
    def noisy(self) -> bool:
        """Whether its next step is drawn."""
        return self.window is not None and self.at in self.window

    @property
    def last(self) -> bool:
        """Whether its next step is the last one."""
        return self.at + 1 == self.steps

    @property
    def trained(self) -> bool:
        """Whether its next step is trained."""
        return self.noisy or (self.keeps_end and self.last)

    def first_seed(self) -> int:
        """Of the noise it starts from."""
        return _hash(f"{self.start_key}/start")

    def step_seed(self) -> int:
        """Of the noise of its next step: of seed, request and step, and of nothing else."""
        return _hash(f"{self._key}/{self.at}")

    def finish(self, ends: frozenset[int]) -> FinishReason | None:
        """How it has ended, if it has."""
        return FinishReason.STOP if self.reported >= self.steps else None


def _restart(actions: Sequence[DenoisingStep]) -> tuple[int, bytes]:
    """The last latent among `actions`, and how many steps are behind it."""
    for place in range(len(actions) - 1, -1, -1):
        if actions[place].after:
            return place + 1, actions[place].after
    return 0, b""


def _hash(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=7).digest(), "big")
