"""Settings of a local trainer, validated when they are made; `make_local_settings` reads them from a configuration."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import cos, pi
from typing import Literal

from headway.algorithm_traits import ADVANTAGE_TRAITS
from headway.algorithms.advantages import AdvantageSettings, make_advantage_settings
from headway.algorithms.objective import PolicyObjective, make_objective
from headway.algorithms.sample_weights import TRAIN_EVERYTHING, SampleSelection
from headway.config import Config, OptimizerArgs, ResolvedConfig, TrainedModelArgs
from headway.errors import ConfigError

Precision = Literal["fp32", "bf16", "fp64"]
"""Precision of computation. Under bf16 the optimizer keeps weights and accumulates gradients in fp32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSettings:
    """AdamW with its schedule and gradient clipping."""

    learning_rate: float = 1e-6
    weight_decay: float = 0.0
    """Applied to matrices only, not to norms and biases."""
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8
    max_grad_norm: float = 1.0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = 0
    max_steps: int = 1
    """Step at which `linear` and `cosine` end."""
    lowest: float = 0.0
    """Share of the learning rate at which they end."""
    first_step: int = 0
    """Step at which the schedule begins."""
    offload: bool = False
    """Keep moments and masters in host memory and move them to the device for each step."""
    eight_bit: bool = False
    """Keep moments in 8 bits."""
    stochastic_rounding: bool = False
    """Train bf16 weights without masters, rounded by chance."""

    def rate_at(self, version: int) -> float:
        """Return the learning rate of the step that makes `version + 1`; the same after a restart."""
        version = max(version - self.first_step, 0)
        if version < self.warmup_steps:
            return self.learning_rate * (version + 1) / self.warmup_steps
        decay_steps = self.max_steps - self.warmup_steps
        done = min((version - self.warmup_steps) / decay_steps, 1.0) if decay_steps > 0 else 0.0
        if self.schedule == "constant":
            return self.learning_rate
        shape = 1.0 - done if self.schedule == "linear" else 0.5 * (1.0 + cos(pi * done))
        return self.learning_rate * (self.lowest + (1.0 - self.lowest) * shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSettings:
    """Low-rank adapters on linear layers; all other weights are frozen."""

    rank: int = 16
    alpha: float = 32.0
    targets: tuple[str, ...] = ()
    """Last parts of the names of layers. Empty means all linear layers but the head."""
    seed: int = 0
    """Seed of the initial adapters."""
    separate: bool = False
    """Publish adapters alone, for engines that have the base; otherwise they are merged into whole weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalSettings:
    """Settings of one local trainer."""

    objective: PolicyObjective = field(default_factory=lambda: PolicyObjective(pg_variant="ppo"))
    advantages: AdvantageSettings | None = None
    """How advantages are computed from scores; None broadcasts each sample's own `advantage`."""
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    critic: OptimizerSettings | None = None
    """Optimizer of the critic; None means that there is no critic here."""
    critic_elsewhere: bool = False
    """Whether a critic in another process computes values and learns from the returns of this trainer."""
    value_clip: float | None = None
    critic_warmup: int = 0
    """Steps at the beginning in which the critic is trained alone."""
    selection: SampleSelection = TRAIN_EVERYTHING
    """Which samples are trained, and how much each counts."""
    temperature: float = 1.0
    """Sampling temperature of the engines; log-probabilities are computed after it."""
    epochs: int = 1
    mini_batch_samples: int | None = None
    """Samples of one optimizer step; None means all of a batch."""
    micro_batch_tokens: int = 4096
    """Packed tokens of one forward pass; a longer sample has a pass to itself."""
    gradient_checkpointing: bool = True
    """Compute activations again in the backward pass; fused layers keep those of attention."""
    activation_offload: bool = False
    """Keep activations in host memory between forward and backward pass."""
    fused_layers: bool = True
    """Compute decoder layers by fused kernels, on a GPU in half precision."""
    precision: Precision = "fp32"
    device: str = "cpu"
    threads: int = 1
    """Number of torch threads of this trainer."""
    lora: LoraSettings | None = None
    reference: bool = False
    """Hold the initial policy: a frozen copy, or with LoRA the model without its adapters."""
    proximal: bool = False
    """Compute ℓ_p at the start of a step for samples that do not bring it."""
    share_prompts: bool = True
    """Encode the common prompt of a group once."""
    gradient_norms: bool = False
    """Compute how far each action moves the logits at the start of a step, for the estimator."""
    routing_replay: bool = True
    """Let mixtures of experts compute with the experts that the engine has chosen, where samples bring them."""

    def __post_init__(self) -> None:
        for key in ("epochs", "micro_batch_tokens", "threads"):
            if getattr(self, key) < 1:
                raise ConfigError("must be at least 1", key=key, value=getattr(self, key))
        if self.temperature <= 0:
            raise ConfigError("greedy answers have no log-probabilities", key="temperature", value=self.temperature)
        estimator = None if self.advantages is None else self.advantages.adv_estimator
        has_critic = self.critic is not None or self.critic_elsewhere
        if estimator is not None and not has_critic and ADVANTAGE_TRAITS.get(estimator).needs_critic:
            raise ConfigError(f"{estimator} needs a critic", key="critic", value=None)


def make_local_settings(
    resolved: ResolvedConfig,
    *,
    precision: Precision = "fp32",
    device: str = "cpu",
    threads: int = 1,
) -> LocalSettings:
    """Read the settings from a configuration. The caller chooses precision, device and threads."""
    config, derived = resolved.config, resolved.derived
    train, sampling = config.actor_train, config.actor_infer.generating_args
    warmup = config.critic_warmup if derived.needs_critic else 0
    optimizer = _make_optimizer_settings(train.training_args, config.max_steps, derived.optimizer_steps)
    return LocalSettings(
        objective=make_objective(resolved),
        advantages=make_advantage_settings(resolved),
        optimizer=replace(optimizer, first_step=warmup),
        critic=_make_optimizer_settings(config.critic.training_args, config.max_steps, derived.optimizer_steps)
        if derived.needs_critic
        else None,
        value_clip=config.value_clip,
        critic_warmup=warmup,
        selection=_make_selection(config),
        temperature=sampling.temperature or 1.0,
        epochs=config.ppo_epochs,
        mini_batch_samples=derived.mini_batch_samples,
        micro_batch_tokens=train.training_args.per_device_train_batch_size * derived.sequence_length,
        gradient_checkpointing=not train.model_args.disable_gradient_checkpointing,
        activation_offload=train.model_args.activation_offload,
        fused_layers=train.model_args.fused_layers,
        precision=precision,
        device=device,
        threads=threads,
        lora=make_lora_settings(train.model_args, config.seed),
        reference=derived.needs_reference,
        proximal=derived.needs_proximal,
        gradient_norms=ADVANTAGE_TRAITS.get(config.adv_estimator).needs_gradient_norms,
        routing_replay=config.routing_replay,
    )


def _make_selection(config: Config) -> SampleSelection:
    thresholds = config.difficulty_low_threshold, config.difficulty_high_threshold
    return SampleSelection(
        mask_truncated=config.mask_truncated_samples,
        score_range=thresholds if config.difficulty_mask else None,
        by_difficulty=config.difficulty_loss_weight,
        by_length=config.length_loss_weight,
        by_turn="turn" in config.list_sample_kinds(),
    )


def make_lora_settings(args: TrainedModelArgs, seed: int) -> LoraSettings | None:
    """Read the adapters of a role that is trained; None where it has none."""
    if args.lora_rank is None:
        return None
    alpha = args.lora_alpha or 2.0 * args.lora_rank
    return LoraSettings(rank=args.lora_rank, alpha=alpha, targets=args.lora_target, seed=seed)


def _make_optimizer_settings(args: OptimizerArgs, max_steps: int, optimizer_steps: int) -> OptimizerSettings:
    per_step = optimizer_steps if args.warmup_unit == "optimizer_steps" else 1
    warmup = -(-args.warmup_steps // per_step) if args.warmup_ratio is None else int(args.warmup_ratio * max_steps)
    return OptimizerSettings(
        learning_rate=args.learning_rate,
        weight_decay=args.weight_decay,
        betas=(args.adam_beta1, args.adam_beta2),
        epsilon=args.adam_epsilon,
        max_grad_norm=args.max_grad_norm,
        schedule=args.lr_scheduler_type,
        warmup_steps=warmup,
        max_steps=max_steps,
        lowest=args.min_lr_ratio,
        offload=args.offload_optimizer,
        eight_bit=args.optim == "adamw_8bit",
        stochastic_rounding=args.stochastic_rounding,
    )
