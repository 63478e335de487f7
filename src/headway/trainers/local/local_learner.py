"""The learner of language models: policy, reference, critic, optimizers, updates and scores.

Guarantees: `learn` is all or nothing, as `optimizer_steps` describes. Where memory runs out, the same step is computed
in smaller micro-batches, which changes no gradient.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from copy import copy, deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from headway.algorithms.actions import require_input
from headway.algorithms.advantages import Advantages
from headway.algorithms.kl import KlController
from headway.errors import ConfigError, TrainerError
from headway.models.model_checks import print_once
from headway.trainers.base import ScoreKind
from headway.trainers.local.local_optimizer import Optimizer
from headway.trainers.local.optimizer_steps import StepLearner, retry_on_oom
from headway.trainers.local.policy_model import COMPUTE_DTYPES, PolicyModel, count_token_operations, peak_tflops
from headway.trainers.local.policy_update import TrainableState, compute_advantages, update_policy
from headway.trainers.local.rank_group import SINGLE_RANK, RankGroup
from headway.trainers.local.settings import LocalSettings
from headway.trainers.local.token_batch import TokenBatch, TokenRow, make_token_batch, make_token_rows
from headway.trainers.local.training_thread import CommitGate
from headway.trainers.local.tree_packing import TokenPack
from headway.types import Batch, SampleGroup

T = TypeVar("T")


class LocalLearner(StepLearner):
    """The policy, with its initial weights as reference and with a critic where the settings ask for them."""

    def __init__(
        self,
        model: Any,
        settings: LocalSettings,
        *,
        critic_model: Any = None,
        kl: KlController | None = None,
        ranks: RankGroup = SINGLE_RANK,
    ) -> None:
        super().__init__(settings, kl)
        if kl is None and settings.advantages is not None and settings.advantages.kl_penalty is not None:
            raise ConfigError("a token penalty needs a controller that says what it costs", key="make_kl", value=None)
        self.ranks = ranks
        frozen = deepcopy(model) if settings.reference and settings.lora is None else None
        decoder = None if settings.critic is None else critic_model or deepcopy(model)
        self.policy = ranks.make_policy(model, settings)
        self.reference = None if frozen is None else _make_reference(frozen, settings, ranks)
        self.critic = None if decoder is None else ranks.make_critic(decoder, settings)
        self._prepared: tuple[Any, TokenBatch, Advantages] | None = None
        """What `compute_returns` made of a batch that has not been learnt yet, with the identity of the batch."""
        self._token_operations = count_token_operations(self.policy.causal)
        self._peak_tflops = peak_tflops(settings.device)
        self.state = TrainableState(
            policy=self.policy,
            optimizer=ranks.make_optimizer(self.policy.trainable(), settings.optimizer),
            critic=self.critic,
            critic_optimizer=self._make_critic_optimizer(),
            ranks=ranks,
        )

    def _make_critic_optimizer(self) -> Optimizer | None:
        if self.critic is None or self.settings.critic is None:
            return None
        parameters = {f"critic.{name}": one for name, one in self.critic.named_parameters()}
        return self.ranks.make_optimizer(parameters, self.settings.critic)

    @property
    def optimizers(self) -> list[Optimizer]:
        return self.state.optimizers

    def weights(self) -> dict[str, Tensor]:
        return self.policy.weights()

    def published_weights(self) -> dict[str, Tensor]:
        return self.policy.published_weights()

    def save_model_config(self, directory: Path) -> None:
        causal = self.policy.causal
        causal.config.dtype = COMPUTE_DTYPES[self.settings.precision]
        config = copy(causal.config)
        if hasattr(config, "quantization_config"):
            del config.quantization_config  # what is saved has no 4 bits
        config.save_pretrained(directory)
        if getattr(causal, "generation_config", None) is not None:
            # `save_pretrained` refuses what many published models have, such as a temperature without sampling.
            causal.generation_config.to_json_file(directory / "generation_config.json")

    def compute_returns(self, batch: Batch, gate: CommitGate) -> tuple[list[float], list[bool]]:
        """Return what a critic elsewhere learns from `batch`: returns of all actions, and which of them count."""
        if batch.trained != self.version:
            raise TrainerError(f"a batch for version {batch.trained}, the trainer is at {self.version}")
        tokens, advantages = self._prepare(batch, gate)
        self._prepared = _identify_batch(batch), tokens, advantages
        return require_input(advantages.return_N, "returns", "the critic").tolist(), advantages.mask_N.tolist()

    def _learn(self, batch: Batch, gate: CommitGate) -> dict[str, float]:
        prepared, self._prepared = self._prepared, None
        if prepared is not None and prepared[0] == _identify_batch(batch):
            _, tokens, advantages = prepared
        else:
            tokens, advantages = self._prepare(batch, gate)
        report = self._retry_on_oom(
            tokens.rows, lambda: update_policy(self.state, tokens, advantages, self.settings, self.version, gate)
        )
        self.kl.update(advantages.kl, len(tokens.rows))
        self.version += 1
        return {
            **report.metrics(tokens),
            "kl_coef": float(self.kl.coef),
            "kl": float(advantages.kl),
            "micro_batch_tokens": float(self.settings.micro_batch_tokens),
            **measure_allocator(self.settings.device),
            "tflop": 1e-12 * self._token_operations * report.packed_tokens,
            **({} if self._peak_tflops is None else {"peak_tflops": self._peak_tflops * self.ranks.size}),
        }

    def _prepare(self, batch: Batch, gate: CommitGate) -> tuple[TokenBatch, Advantages]:
        """Return the tokens of a batch with all scores that the objective reads, and the advantages."""
        settings = self.settings
        tokens = make_token_batch(
            batch.groups,
            trained=batch.trained,
            vocabulary=self.policy.vocabulary,
            dtype=accumulation_dtype(settings),
            device=settings.device,
            selection=settings.selection,
            parts=() if settings.advantages is None else tuple(settings.advantages.gdpo_parts),
            accuracy=None if settings.advantages is None else settings.advantages.accuracy_key,
        )
        if not tokens.rows:
            raise TrainerError(f"step {batch.trained + 1}: a batch without a single action")
        if self.policy.replays_routing and any(row.routing is None for row in tokens.rows):
            print_once("samples came without the experts of their tokens, so the trainer routes these tokens by itself")
        tokens = self._add_missing_scores(tokens, gate)
        advantages = compute_advantages(
            tokens,
            settings.advantages,
            self.kl.coef,
            logp_N=tokens.behaviour_N if tokens.proximal_N is None else tokens.proximal_N,
            reference_N=tokens.reference_N,
            value_N=tokens.value_N,
            steps=tokens.steps,
            greedy_S=tokens.greedy_S,
            domain_S=tokens.domain_S,
            part_PS=tokens.part_PS,
            correct_S=tokens.correct_S,
            behaviour_N=tokens.behaviour_N,
            gradient_norm_N=self._compute_gradient_norms(tokens.rows, gate) if settings.gradient_norms else None,
        )
        if tokens.weight_S is not None:  # every policy loss is proportional to the advantage
            weighted_N = advantages.advantage_N * tokens.weight_S[tokens.sequence_N]
            advantages = replace(advantages, advantage_N=weighted_N)
        return tokens, advantages

    def _retry_on_oom(self, rows: Sequence[TokenRow], work: Callable[[], T]) -> T:
        """Return the result of `work`; where memory runs out, use smaller micro-batches from then on."""
        return retry_on_oom(work, partial(self._shrink_micro_batches, rows), self.settings.device)

    def _shrink_micro_batches(self, rows: Sequence[TokenRow], failure: str) -> None:
        """Use half the tokens in a pack; where a single sample is too long, recompute or offload activations."""
        self.ranks.on_out_of_memory(failure)
        longest, tokens = max(len(row.tokens) for row in rows), self.settings.micro_batch_tokens
        if tokens > longest:
            self.settings = replace(self.settings, micro_batch_tokens=max(tokens // 2, longest))
            return
        if torch.is_grad_enabled() and (change := self.policy.save_memory()):
            print_once(f"a single sample of {longest} tokens does not fit into memory: {change} from now on")
            return
        raise TrainerError(f"a single sample of {longest} tokens does not fit into memory: {failure}")

    def _add_missing_scores(self, tokens: TokenBatch, gate: CommitGate) -> TokenBatch:
        """Compute, with the current weights, what the objective reads and no scoring stage has filled in."""
        if tokens.unscored:
            tokens = replace(tokens, proximal_N=self._proximal(tokens, gate) if self.settings.proximal else None)
        if self.settings.reference and tokens.reference_N is None:
            tokens = replace(tokens, reference_N=self._score_rows("reference", tokens.rows, gate))
        if self.critic is not None and tokens.value_N is None:
            tokens = replace(tokens, value_N=self._score_rows("value", tokens.rows, gate))
        return tokens

    def _proximal(self, tokens: TokenBatch, gate: CommitGate) -> Tensor:
        """Return ℓ_p of all actions; rows scored with other weights, or not at all, are computed here."""
        found_N = self._score_rows("policy", tokens.unscored, gate, actions=tokens.sequence_N.numel())
        return found_N if tokens.proximal_N is None else found_N + tokens.proximal_N

    def _compute_gradient_norms(self, rows: Sequence[TokenRow], gate: CommitGate) -> Tensor:
        return self._retry_on_oom(
            rows, lambda: score_rows(self.policy.gradient_norms, rows, self.settings, gate, self.ranks)
        )

    def _score(self, kind: ScoreKind, group: SampleGroup, gate: CommitGate) -> list[list[float]]:
        rows = make_token_rows([group], self.policy.vocabulary)
        return split_by_sample(group, iter(self._score_rows(kind, rows, gate).tolist()))

    def _score_rows(
        self, kind: ScoreKind, rows: Sequence[TokenRow], gate: CommitGate, actions: int | None = None
    ) -> Tensor:
        """Return numbers in the order of actions, without gradients, [N]; 0 for those of `actions` not in `rows`."""
        forward, context = self._forward(kind)
        with context:
            return self._retry_on_oom(rows, lambda: score_rows(forward, rows, self.settings, gate, self.ranks, actions))

    def _forward(self, kind: ScoreKind) -> tuple[Callable[[TokenPack], Tensor], Any]:
        """Return the function that computes numbers of `kind`, and the context to call it in."""
        if kind == "policy":
            return lambda pack: self.policy.logps(pack).logp_N, nullcontext()
        if kind == "value":
            if self.critic is None:
                raise TrainerError("values were asked for, and there is no critic")
            return self.critic.values, nullcontext()
        if not self.settings.reference:
            raise TrainerError("reference log-probabilities were asked for, and no reference is held")
        if self.reference is None:
            policy, context = self.policy, self.policy.without_adapters()
            return lambda pack: policy.logps(replace(pack, routing_L=None)).logp_N, context
        reference = self.reference
        return lambda pack: reference.logps(pack).logp_N, nullcontext()


def _identify_batch(batch: Batch) -> tuple[Any, ...]:
    return batch.trained, *(sample.sample_id for group in batch.groups for sample in group.samples)


def score_rows(
    forward: Callable[[TokenPack], Tensor],
    rows: Sequence[TokenRow],
    settings: LocalSettings,
    gate: CommitGate,
    ranks: RankGroup = SINGLE_RANK,
    actions: int | None = None,
) -> Tensor:
    """Return the numbers of `forward` in the order of actions, without gradients, [N].

    `actions` counts those of the batch that `rows` are a part of; None means that `rows` are all of it.
    """
    dtype, device = accumulation_dtype(settings), settings.device
    count = sum(len(row.actions) for row in rows) if actions is None else actions
    found_N = torch.zeros(count, dtype=dtype, device=device)
    with torch.no_grad():
        for pack in ranks.make_packs(rows, settings):
            gate.check()
            found_N[pack.action_N] = forward(pack).to(dtype)
        return ranks.all_reduce(found_N, found_N[:0])[0]


def split_by_sample(group: SampleGroup, numbers: Iterator[float]) -> list[list[float]]:
    """Split numbers in the order of actions into one list for each sample."""
    return [[next(numbers) for _ in range(sample.actions)] for sample in group.samples]


def accumulation_dtype(settings: LocalSettings) -> torch.dtype:
    """Return the type of log-probabilities, values and advantages."""
    return torch.float64 if settings.precision == "fp64" else torch.float32


def _make_reference(model: Any, settings: LocalSettings, ranks: RankGroup) -> PolicyModel:
    model.requires_grad_(False)
    return ranks.make_policy(
        model, replace(settings, gradient_checkpointing=False, routing_replay=False), adapters=False
    )


def measure_allocator(device: torch.device | str) -> dict[str, float]:
    """Return how much of a GPU torch has allocated at most and holds now, in GB; nothing for a CPU."""
    if torch.device(device).type != "cuda":
        return {}
    peak, reserved = torch.cuda.max_memory_allocated(device), torch.cuda.memory_reserved(device)
    return {"peak_allocated_gb": peak / 1e9, "reserved_gb": reserved / 1e9}
