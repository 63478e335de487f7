"""A trainer of flow models: the local trainer's face, thread and checkpoints around a learner of denoising steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from headway.algorithms.kl import KlController
from headway.generative.learner import FlowLearner
from headway.generative.training import FlowTraining
from headway.trainers.local import LocalTrainer
from headway.trainers.local.trainer import Store


class FlowTrainer(LocalTrainer):
    """Trains what `make_model` gives: a `Denoiser`, the same at every call. The store stays the caller's to close."""

    def __init__(
        self,
        make_model: Callable[[], Any],
        training: FlowTraining,
        store: Store,
        *,
        make_kl: Callable[[], KlController] | None = None,
    ) -> None:
        self._training = training
        super().__init__(make_model, training.local, store, make_kl=make_kl)

    def _made(self) -> FlowLearner:  # type: ignore[override]
        return FlowLearner(self._make_model(), self._training, kl=self._make_kl() if self._make_kl else None)
