"""One request inside the engine: its position on the path, its reported steps, and the slot of its latent.

It holds plain numbers and bytes only. A request that was interrupted continues from the last latent in its actions, or
from its first noise. The steps after that latent were not trained and follow from it, so they are computed again but
not reported twice. They keep the version that first made them, which is the older one.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

from headway.algorithms.denoising import StepWindow
from headway.engines.base import Request
from headway.types import DenoisingStep, FinishReason


class DenoisingRequest:
    """Made by `generate`; from then on only the engine's thread touches it."""

    __slots__ = (
        "_key",
        "followers",
        "guidance",
        "knows_start",
        "next_step",
        "noise_key",
        "number",
        "prefix_key",
        "prompt",
        "reported",
        "request_id",
        "slot",
        "start_latent",
        "steps",
        "trains_end",
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

    def finish(self, ends: frozenset[int]) -> FinishReason | None:
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
