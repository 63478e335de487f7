"""Everything a trainer's thread does: models, optimizers, updates, scores. Knows no event loop and no thread.

Guarantees: `learn` is all or nothing, as `steps` says. Where memory runs out, the same step is computed in smaller
micro-batches, which changes no gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from headway.algorithms.kl import KlController
from headway.errors import ConfigError, ScoringError, TrainerError
from headway.trainers.local.local_optimizer import Optimizer
from headway.trainers.local.optimizer_steps import StepLearner, retry_on_oom
from headway.trainers.local.policy_model import PolicyModel, count_active_weights, peak_tflops
from headway.trainers.local.policy_update import (
    TrainableState,
    compute_advantages,
    make_estimator_inputs,
    update_policy,
)
from headway.trainers.local.rank_group import SINGLE_RANK, RankGroup
from headway.trainers.local.settings import LocalSettings
from headway.trainers.local.token_batch import TokenBatch, TokenRow, make_token_batch, make_token_rows
from headway.trainers.local.training_thread import CommitGate, JobAbandoned
from headway.trainers.local.tree_packing import TokenPack
from headway.types import Batch, SampleGroup

T = TypeVar("T")
ScoreKind = Literal["policy", "reference", "value"]
"""Log-probabilities now, log-probabilities at the start, or values."""


class LocalLearner(StepLearner):
    """The policy, what it was at the start, and the critic; as far as each is asked for."""

    def __init__(
        self,
        model: Any,
        settings: LocalSettings,
        *,
        critic_model: Any = None,
        kl: KlController | None = None,
        team: RankGroup = SINGLE_RANK,
    ) -> None:
        super().__init__()
        self.settings = settings
        if kl is None and settings.advantages is not None and settings.advantages.kl_penalty is not None:
            raise ConfigError("a token penalty needs a controller that says what it costs", key="make_kl", value=None)
        self.kl = kl or KlController(0.0)
        self.team = team
        frozen = deepcopy(model) if settings.reference and settings.lora is None else None
        judge = None if settings.critic is None else critic_model or deepcopy(model)
        self.policy = team.policy(model, settings)
        self.reference = None if frozen is None else _frozen(frozen, settings, team)
        self.critic = None if judge is None else team.critic(judge, settings)
        self._weights = count_active_weights(self.policy.causal)
        self._peak = peak_tflops(settings.device)
        self.trained = TrainableState(
            policy=self.policy,
            optimizer=team.optimizer(self.policy.trainable(), settings.optimizer),
            critic=self.critic,
            critic_optimizer=self._critic_optimizer(),
            team=team,
        )

    def _critic_optimizer(self) -> Optimizer | None:
        if self.critic is None or self.settings.critic is None:
            return None
        named = {f"critic.{name}": one for name, one in self.critic.named_parameters()}
        return self.team.optimizer(named, self.settings.critic)

    @property
    def dtype(self) -> torch.dtype:
        return accumulation_dtype(self.settings)

    def _learn(self, batch: Batch, gate: CommitGate) -> dict[str, float]:
        settings = self.settings
        tokens = make_token_batch(
            batch.groups,
            trained=batch.trained,
            vocabulary=self.policy.vocabulary,
            dtype=self.dtype,
            device=settings.device,
            mask_truncated=settings.mask_truncated,
        )
        if not tokens.rows:
            raise TrainerError(f"step {batch.trained + 1}: a batch without a single action")
        tokens = self._completed(tokens, gate)
        made = compute_advantages(tokens, settings.advantages, self.kl.coef, make_estimator_inputs(tokens))
        report = self._fitting(
            tokens.rows, lambda: update_policy(self.trained, tokens, made, self.settings, self.version, gate)
        )
        self.kl.update(made.kl, len(tokens.rows))
        self.version += 1
        return {
            **report.metrics(tokens),
            "kl_coef": float(self.kl.coef),
            "kl": float(made.kl),
            "micro_batch_tokens": float(self.settings.micro_batch_tokens),
            "tflop": 6e-12 * self._weights * report.packed_tokens,
            **({} if self._peak is None else {"peak_tflops": self._peak * self.team.size}),
        }

    def _fitting(self, rows: Sequence[TokenRow], work: Callable[[], T]) -> T:
        """What `work` gives; where memory runs out, with smaller micro-batches, from then on."""
        return retry_on_oom(work, partial(self._shrink, rows), self.settings.device)

    def _shrink(self, rows: Sequence[TokenRow], failure: str) -> None:
        self.team.out_of_memory(failure)
        longest, tokens = max(len(row.tokens) for row in rows), self.settings.micro_batch_tokens
        if tokens <= longest:
            raise TrainerError(f"a single sample of {longest} tokens does not fit into memory: {failure}")
        self.settings = replace(self.settings, micro_batch_tokens=max(tokens // 2, longest))

    def _completed(self, tokens: TokenBatch, gate: CommitGate) -> TokenBatch:
        """With what the objective reads and no stage has filled, under the weights of now."""
        if tokens.unscored:
            tokens = replace(tokens, proximal_N=self._proximal(tokens, gate) if self.settings.proximal else None)
        if self.settings.reference and tokens.reference_N is None:
            tokens = replace(tokens, reference_N=self._packed("reference", tokens.rows, gate))
        if self.critic is not None and tokens.value_N is None:
            tokens = replace(tokens, value_N=self._packed("value", tokens.rows, gate))
        return tokens

    def _proximal(self, tokens: TokenBatch, gate: CommitGate) -> Tensor:
        """ℓ_p of all actions: what was scored with other weights, or not at all, is computed here."""
        found_N = self._packed("policy", tokens.unscored, gate, actions=tokens.sequence_N.numel())
        return found_N if tokens.proximal_N is None else found_N + tokens.proximal_N

    def score(self, kind: ScoreKind, group: SampleGroup, gate: CommitGate) -> list[list[float]]:
        """One number per action of each sample."""
        try:
            rows = make_token_rows([group], self.policy.vocabulary)
            numbers = iter(self._packed(kind, rows, gate).tolist())
        except JobAbandoned:
            raise
        except Exception as error:
            raise ScoringError(f"group {group.group_id}: {error}") from error
        return split_by_sample(group, numbers)

    def _packed(
        self, kind: ScoreKind, rows: Sequence[TokenRow], gate: CommitGate, actions: int | None = None
    ) -> Tensor:
        """In the order of actions, without gradients, [N]; 0 for those of `actions` that are not in `rows`."""
        forward, inside = self._forward(kind)
        with inside:
            return self._fitting(rows, lambda: score_rows(forward, rows, self.settings, gate, self.team, actions))

    def _forward(self, kind: ScoreKind) -> tuple[Callable[[TokenPack], Tensor], Any]:
        if kind == "policy":
            return lambda pack: self.policy.logps(pack).logp_N, nullcontext()
        if kind == "value":
            if self.critic is None:
                raise TrainerError("values were asked for, and there is no critic")
            return self.critic.values, nullcontext()
        if not self.settings.reference:
            raise TrainerError("reference log-probabilities were asked for, and no reference is held")
        if self.reference is None:
            return lambda pack: self.policy.logps(pack).logp_N, self.policy.without_adapters()
        reference = self.reference
        return lambda pack: reference.logps(pack).logp_N, nullcontext()


def score_rows(
    forward: Callable[[TokenPack], Tensor],
    rows: Sequence[TokenRow],
    settings: LocalSettings,
    gate: CommitGate,
    team: RankGroup = SINGLE_RANK,
    actions: int | None = None,
) -> Tensor:
    """What `forward` says about every action, in the order of actions, without gradients, [N].

    `actions` counts those of the batch that `rows` are a part of; None: they are all of it.
    """
    dtype, device = accumulation_dtype(settings), settings.device
    count = sum(len(row.actions) for row in rows) if actions is None else actions
    found_N = torch.zeros(count, dtype=dtype, device=device)
    with torch.no_grad():
        for pack in team.packs(rows, settings):
            gate.check()
            found_N[pack.action_N] = forward(pack).to(dtype)
        return team.joined(found_N, found_N[:0])[0]


def split_by_sample(group: SampleGroup, numbers: Iterator[float]) -> list[list[float]]:
    """Numbers in the order of actions, one list for each sample."""
    return [[next(numbers) for _ in range(sample.actions)] for sample in group.samples]


def accumulation_dtype(settings: LocalSettings) -> torch.dtype:
    """What numbers are kept in."""
    return torch.float64 if settings.precision == "fp64" else torch.float32


def _frozen(model: Any, settings: LocalSettings, team: RankGroup) -> PolicyModel:
    for one in model.parameters():
        one.requires_grad_(False)
    return team.policy(model, replace(settings, gradient_checkpointing=False), adapters=False)
