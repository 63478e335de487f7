"""Distance to the reference model: estimators per action, the token penalty, and who steers its coefficient.

The same four estimators serve as a term of the loss (with gradient through ℓ) and inside the rewards of actions
(constants). k3's log-ratio is clamped to ±20 whole, so that it is never infinite; beyond, its gradient is 0.

Does not aggregate (`aggregate.py`) and does not hold the reference model. Legend: N packed actions.
"""

from __future__ import annotations

from typing import Literal, Protocol

import torch
from torch import Tensor

from headway.algorithms.packed_sequences import clamp_log_ratio
from headway.config import Config

KlEstimator = Literal["k1", "k2", "k3", "abs"]

_LARGEST_ERROR = 0.2
"""Where the relative error of the adaptive controller is cut off."""


def estimate_kl(kind: KlEstimator, logp_N: Tensor, reference_N: Tensor) -> Tensor:
    """k1 = ℓ − ℓ_ref; k2 = ½(ℓ − ℓ_ref)²; k3 = e^{ℓ_ref − ℓ} − (ℓ_ref − ℓ) − 1; abs = |ℓ − ℓ_ref|."""
    difference_N = logp_N - reference_N
    if kind == "k1":
        return difference_N
    if kind == "k2":
        return 0.5 * difference_N.square()
    if kind == "k3":
        back_N = clamp_log_ratio(-difference_N)
        return torch.expm1(back_N) - back_N
    return difference_N.abs()


class KlController(Protocol):
    """Who says what the token penalty costs."""

    @property
    def coef(self) -> float:
        """The coefficient now."""
        ...

    def update(self, kl: float, samples: int) -> None:
        """A step was trained on `samples` samples whose mean KL was `kl`."""
        ...

    def state(self) -> dict[str, float]:
        """For a checkpoint."""
        ...

    def restore(self, state: dict[str, float]) -> None:
        """Become what `state` gave."""
        ...


class FixedKlController:
    """The coefficient of the start, for ever."""

    def __init__(self, coef: float) -> None:
        self.coef = coef

    def update(self, kl: float, samples: int) -> None:
        """Nothing to learn."""

    def state(self) -> dict[str, float]:
        return {"coef": self.coef}

    def restore(self, state: dict[str, float]) -> None:
        """The configuration decides, not the checkpoint."""


class AdaptiveKlController:
    """Multiplied by 1 + clip(kl/target − 1, ±0.2)·min(samples/horizon, 1) after each step."""

    def __init__(self, coef: float, *, target: float, horizon: int) -> None:
        self.coef = coef
        self._target = target
        self._horizon = horizon

    def update(self, kl: float, samples: int) -> None:
        error = min(max(kl / self._target - 1, -_LARGEST_ERROR), _LARGEST_ERROR)
        self.coef *= 1 + error * min(samples / self._horizon, 1.0)

    def state(self) -> dict[str, float]:
        return {"coef": self.coef}

    def restore(self, state: dict[str, float]) -> None:
        self.coef = state["coef"]


def make_kl_controller(config: Config) -> KlController:
    """From `init_kl_coef`, `target_kl`, `kl_horizon`; without `add_token_level_kl` the coefficient is 0."""
    if not config.add_token_level_kl:
        return FixedKlController(0.0)
    if config.target_kl is None:
        return FixedKlController(config.init_kl_coef)
    return AdaptiveKlController(config.init_kl_coef, target=config.target_kl, horizon=config.kl_horizon)
