"""Distance to the reference model: KL estimators per action, and the controller of the token penalty's coefficient.

The same estimators serve as a term of the loss (with gradient through ℓ) and inside the rewards of actions (as
constants). The log-ratio of k3 is clamped to ±20 as a whole, so k3 is never infinite; beyond the clamp its gradient
is 0. Legend: N packed actions.
"""

from typing import Literal

import torch
from torch import Tensor

from headway.algorithms.packed_sequences import clamp_log_ratio
from headway.config import Config

KlEstimator = Literal["k1", "k2", "k3", "abs", "k1+", "k3+", "abs+"]

_WITHOUT_PLUS: dict[str, KlEstimator] = {"k1+": "k1", "k3+": "k3", "abs+": "abs"}
_LARGEST_ERROR = 0.2
"""Limit of the relative error that an adaptive controller reacts to."""


def estimate_kl(kind: KlEstimator, logp_N: Tensor, reference_N: Tensor) -> Tensor:
    """Return k1 = ℓ − ℓ_ref, k2 = ½(ℓ − ℓ_ref)², k3 = e^{ℓ_ref − ℓ} − (ℓ_ref − ℓ) − 1 or abs = |ℓ − ℓ_ref|.

    A plus behind the name means that value with the gradient of k2.
    """
    difference_N = logp_N - reference_N
    if kind in ("k1+", "k3+", "abs+"):
        # The expected gradient of k2 is that of the KL, which is not so for the others.
        slope_N = 0.5 * difference_N.square()
        return slope_N - slope_N.detach() + estimate_kl(_WITHOUT_PLUS[kind], logp_N, reference_N).detach()
    if kind == "k1":
        return difference_N
    if kind == "k2":
        return 0.5 * difference_N.square()
    if kind == "k3":
        back_N = clamp_log_ratio(-difference_N)
        return torch.expm1(back_N) - back_N
    return difference_N.abs()


class KlController:
    """The coefficient of the token penalty: constant, or adapted so that the KL stays near `target`.

    With a target, every step multiplies the coefficient by 1 + clip(kl/target − 1, ±0.2)·min(samples/horizon, 1).
    """

    def __init__(self, coef: float, *, target: float | None = None, horizon: int = 1) -> None:
        self.coef = coef
        self._target = target
        self._horizon = horizon

    def update(self, kl: float, samples: int) -> None:
        """Adapt the coefficient after a step that trained `samples` samples whose mean KL was `kl`."""
        if self._target is not None:
            error = min(max(kl / self._target - 1, -_LARGEST_ERROR), _LARGEST_ERROR)
            self.coef *= 1 + error * min(samples / self._horizon, 1.0)

    def state(self) -> dict[str, float]:
        """Return what a checkpoint stores."""
        return {"coef": self.coef}

    def restore(self, state: dict[str, float]) -> None:
        """Take over the `state` of a checkpoint. A constant coefficient stays as configured."""
        if self._target is not None:
            self.coef = state["coef"]


def make_kl_controller(config: Config) -> KlController:
    """Read `init_kl_coef`, `target_kl` and `kl_horizon`; without `add_token_level_kl` the coefficient is 0."""
    if not config.add_token_level_kl:
        return KlController(0.0)
    return KlController(config.init_kl_coef, target=config.target_kl, horizon=config.kl_horizon)
