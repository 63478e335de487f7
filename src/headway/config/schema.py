"""The configuration tree: every option, with its type, range, default and meaning.

The shape is that of the YAML files users have: scheduler and algorithm options at the top, roles below them.
Defaults are here and nowhere else; null means "derived", and `headway.config.derivation` says from what. A `Config`
made by `headway.config.load_config` is complete and checked; one made by hand is neither.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from headway.config.config_blocks import (
    ClusterConfig,
    CustomEnvConfig,
    DenoisingConfig,
    DevicesConfig,
    EnvManagerConfig,
    ReliabilityConfig,
    StageConfig,
    TrainInferCorrectionConfig,
    WeightTransferConfig,
)
from headway.config.field_types import (
    AdvantageEstimatorName,
    Amount,
    Count,
    Discount,
    Factor,
    Nodes,
    NodeSize,
    PolicyLossName,
    Port,
    Positive,
    Probability,
    Real,
    Share,
    Signed,
    StalenessPolicyName,
    Steps,
)
from headway.config.roles import (
    CriticRoleConfig,
    RewardConfig,
    RolloutRoleConfig,
    ScoringRoleConfig,
    TrainingRoleConfig,
    ValidationConfig,
)
from headway.config.simulation_config import SimulationConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The configuration of one run."""

    # The run.
    exp_name: str = "headway"
    """Name of the run in displays and trackers."""
    strict: bool = False
    """Refuse a configuration in which another back end would stand in for one that is not installed."""
    seed: Amount = 42
    """Seed of all randomness."""
    output_dir: str = "./output"
    """Directory of the run: ledger, events, logs."""
    checkpoint_dir: str | None = None
    """Directory of checkpoints. null: `<output_dir>/checkpoints`."""
    resume: str = "auto"
    """`auto`: start from the newest checkpoint if there is one; `never`; or the path of a checkpoint."""
    accept_changed_reward: bool = False
    """Go on with a run although its reward is another one. It holds for one start and is not written down."""
    max_steps: Count = 500
    """Training steps of the run."""
    max_epochs: Count | None = None
    """Passes over the training data that end the run; `max_steps` counts beside it only if it is given. null: none."""
    save_steps: Amount = 50
    """Steps between checkpoints. 0: only at the end."""
    save_total_limit: Amount = 5
    """Number of newest checkpoints that are kept; older ones are removed when the next is complete. 0: all."""
    track_with: tuple[Literal["tensorboard", "wandb", "trackio", "mlflow", "swanlab", "jsonl"], ...] = ("tensorboard",)
    """Trackers that get the metrics of the run. An empty list: none."""
    track_project: str | None = None
    """Project of the run at trackers that have projects. null: `exp_name`."""
    prometheus_port: Port | None = None
    """Port of this machine's loopback interface where Prometheus finds the newest metrics. null: none."""
    opentelemetry_endpoint: str | None = None
    """Address of a collector that gets steps and pieces of work as spans, such as `http://127.0.0.1:4318/v1/traces`.
    null: none."""
    push_to_hub: str | None = None
    """Repository `owner/name` of a model hub that gets the last checkpoint of a finished run. null: none."""
    eval_steps: Amount = 10
    """Steps between validations. 0: never."""
    val_batch_size: Count | None = None
    """Prompts (agentic: trajectories) of one validation. null (or −1): all of the held-out data."""
    eval_at_start: bool = True
    """Validate before the first step too, where `eval_steps` is not 0."""

    # Code of the user's own.
    plugins: tuple[str, ...] = ()
    """Modules (`package.module` or `path/to/file.py`) that register names; see docs/extending.md."""
    stages: tuple[StageConfig, ...] = ()
    """Stages of plugins, inserted into the pipeline of real and simulated runs."""

    # Models and lengths, in actions.
    pretrain: str | None = None
    """The initial policy: directory, hub name, GGUF file or built-in name."""
    reward_pretrain: str | None = None
    """The same for critic and learned rewards."""
    prompt_length: Count | None = None
    """Longest prompt. null: what `sequence_length` leaves, at most 1024."""
    response_length: Count | None = None
    """Longest response, all turns together. null: what `sequence_length` leaves, else 1024."""
    sequence_length: Count | None = None
    """Longest sample. null: `prompt_length + response_length`."""
    model_max_length: Count | None = None
    """Longest sequence the model can hold; lengths are checked against it. null: not checked here."""

    # Headway: how far rollout runs ahead.
    async_generation_ratio: Steps = 0.0
    """α: batches that rollout runs ahead, any number. 0: synchronous. Trained samples are at most ⌈α⌉ versions old."""
    pipeline_depth: Steps | None = None
    """Steps' worth of groups started ahead, at most α. null: α."""
    updates_per_sync: Count = 1
    """Training steps between two weight syncs, so that engines get every so-manieth version. Between two syncs the
    engines make that many batches with the same weights, and training begins with the first of them. It needs
    `pipeline_depth` of at least `updates_per_sync − 1`."""
    staleness_policy: StalenessPolicyName = "wait"
    """`wait`: all that starts is trained; training waits for a straggler at its deadline. `drop`: a sample that would
    break the bound is dropped and made again, which favours short answers. `window`: training waits for those among the
    next `staleness_window` groups. Plugins may register others."""
    staleness_window: Count | None = None
    """Groups that the `window` policy may choose a batch from. null: groups of one step."""
    selection_order: Literal["freshest", "oldest"] = "oldest"
    """Which of the ready groups are trained first."""
    allow_uncorrected_async: bool = False
    """Allow α > 0 with a loss that does not correct for old samples."""

    # Rollout.
    rollout_batch_size: Count = 128
    """Prompts of one training step; with `train_env_manager`, trajectories."""
    num_return_sequences_in_group: Count = 1
    """Members of a group. With `train_env_manager` its `group_size` is used."""
    num_return_sequences_redundancy: Amount = 0
    """Members started beyond the group; the first to end are kept."""
    is_num_return_sequences_expand: bool = True
    """Each member is a request of its own, placed independently; false keeps a group on one replica."""
    is_use_additional_prompts: bool | None = None
    """Start redundant prompts. null: when `max_additional_running_prompts` is not 0; true alone means 16."""
    max_additional_running_prompts: Amount = 0
    """Groups started beyond the slots; the surplus of a step is cancelled."""
    rollout_scheduling: Literal["queue", "batch"] = "queue"
    """`queue`: a free slot takes the next prompt at once. `batch`: a whole batch starts together."""
    env_scheduling: Literal["async", "barrier"] = "async"
    """`async`: episodes step independently. `barrier`: all episodes of a batch step together."""
    with_reward: bool = True
    """Score a sample when it ends. false: score when the whole batch was drawn, the synchronous baseline."""
    filter_zero_variance: bool | None = None
    """Drop and replace groups whose rewards are all equal. null: true where members are compared only with each other,
    so that such groups have no gradient."""
    max_num_gen_batches: Amount = 10
    """Most batches' worth of groups generated for one step; then groups with equal rewards fill it. 0: any number."""
    pause_generation_for_validation: bool = False
    """Pause training rollouts while validation runs."""

    # Weights.
    inflight_update: Literal["keep", "recompute"] = "keep"
    """What happens to the KV cache of requests in flight at a weight update. The native engine keeps it and refuses
    `recompute`; vllm and sglang always recompute it."""
    enable_dual_buffer: bool = True
    """Load new weights into a spare buffer while generation goes on; false pauses, loads, resumes."""
    param_update_produce_bucket_mb: Count = 512
    """Bucket in which the trainer gathers weights; the size of a file where the transport is `disk`."""
    param_update_consume_bucket_mb: Count = 128
    """Bucket in which an engine loads weights; bounds its extra memory."""
    weight_transfer: WeightTransferConfig = field(default_factory=WeightTransferConfig)
    """How weights travel between them."""

    # Devices.
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    """Machines of the run."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the models. `auto`: a GPU if there is one."""
    devices: DevicesConfig = field(default_factory=DevicesConfig)
    """The same in full: how many logical devices a node has, and how many cards they share."""
    processes: bool | None = None
    """Run trainer and engines in separate processes. null: true on the CPU, false on a GPU that they share."""
    num_gpus_per_node: NodeSize | None = None
    """Devices of a node. null: 8, or 1 if no option is about devices."""
    num_nodes: Nodes | None = None
    """Number of nodes. null: as many as the device numbers need."""
    use_nodes_ratios: tuple[Probability, ...] | None = None
    """Shares of all devices for [train, logp, ref_logp, generate], for roles without a `device_mapping`."""
    hybrid_engine: bool | None = None
    """actor_train and actor_infer share devices. null: true unless they have different ones."""
    lend_idle_trainer: bool = False
    """Engines on actor_train's devices generate while training waits, and release them before each step."""

    # Policy loss.
    pg_variant: PolicyLossName = "ppo"
    """Policy loss."""
    ppo_epochs: Count = 1
    """Passes over a batch."""
    pg_clip: Positive = 0.2
    """ε of the clipped losses, both sides."""
    pg_clip_low: Positive | None = None
    """ε below 1. null: `pg_clip` (gspo: 3e-4, gmpo: 0.4, dppo_tv and cppo: 0.15, dppo_kl: 0.05)."""
    pg_clip_high: Positive | None = None
    """ε above 1. null: `pg_clip` (gspo: 4e-4, gmpo: 0.4, dppo_tv and cppo: 0.15, dppo_kl: 0.05)."""
    dual_clip_loss: bool = False
    """Bound the loss of negative advantages too."""
    dual_clip_c: Factor = 3.0
    """Where the dual clip is."""
    decoupled_weight_cap: Positive = 5.0
    """decoupled_ppo: largest behaviour weight exp(ℓ_p − ℓ_b)."""
    decoupled_weight_type: Literal["token", "sequence", "geometric", "none"] = "token"
    """decoupled_ppo: a weight for each action, for each sample (product or geometric mean), or none."""
    tis_lower_bound: Real = 0.0
    """tis: smallest weight."""
    tis_upper_bound: Positive = 1.0
    """tis: largest weight."""
    cispo_epsilon_low: Real = 0.1
    """cispo: clip of the weight below 1."""
    cispo_epsilon_high: Real = 0.1
    """cispo: clip of the weight above 1."""
    cispo_use_unified_mask: bool = False
    """cispo: drop actions that PPO would have clipped."""
    sao_epsilon_low: Real = 0.3
    """sao: actions whose ratio is below 1 by more than this are left out."""
    sao_epsilon_high: Real = 5.0
    """sao: actions whose ratio is above 1 by more than this are left out."""
    topr_positive_weight: Real = 1.0
    """topr: weight of samples with a positive reward."""
    topr_negative_weight: Real = 1.0
    """topr: weight of the others."""
    kimi15_tau: Real = 0.1
    """kimi15: τ of the squared log-ratio."""
    sapo_tau_positive: Positive = 1.0
    """sapo: how steep the gate is for positive advantages."""
    sapo_tau_negative: Positive = 1.05
    """sapo: how steep it is for the others."""
    clip_cov_ratio: Share = 2e-4
    """clip_cov: share of the actions of a micro-batch that is left out, and at least one."""
    clip_cov_low: Signed = 1.0
    """clip_cov: they are drawn among actions whose covariance of advantage and log-probability is above this …"""
    clip_cov_high: Signed = 5.0
    """clip_cov: … and below this."""
    cppo_weight_min: Share = 0.8
    """cppo: weight of the last actions, where the first has 1."""
    cppo_budget: Real = 0.02
    """cppo: divergence that the actions of a sequence may use, each; up to five times this by the quantile."""
    cppo_budget_quantile: Probability = 0.9
    """cppo: quantile of a sequence's divergences that its budget is taken from."""
    cppo_budget_scale: Real = 1.0
    """cppo: scale of that quantile."""
    kl_cov_ratio: Share = 2e-4
    """kl_cov: share of the actions of a micro-batch that is pulled back, and at least one."""
    kl_cov_coef: Real = 0.1
    """kl_cov: coefficient of the pull."""
    loss_agg_mode: Literal[
        "token-mean", "token-sum", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"
    ] = "token-mean"
    """How the losses of actions are aggregated; `-norm` divides by `loss_norm_length`."""
    loss_norm_length: Count | None = None
    """What `seq-mean-token-sum-norm` divides by. null: `response_length`."""
    entropy_loss_coef: Real = 0.0
    """Entropy bonus."""
    mask_truncated_samples: bool = False
    """Do not train answers and episodes that a length limit cut off; their rewards still count for their group."""
    difficulty_mask: bool = False
    """Do not train groups whose mean score is outside the two thresholds; they still fill the batch."""
    difficulty_low_threshold: Signed = 0.1
    """difficulty_mask: groups with a mean score at or below it are left out."""
    difficulty_high_threshold: Signed = 0.95
    """difficulty_mask: groups with a mean score at or above it are left out."""
    difficulty_loss_weight: bool = False
    """Weigh samples by 0.5 + 1.5 · the field `difficulty` (0 to 1) of their task."""
    length_loss_weight: bool = False
    """Weigh samples from 1.5 for the shortest answer of a batch to 0.5 for the longest."""
    routing_replay: bool = True
    """Train mixtures of experts with the experts that the engine has chosen. Other models are not concerned."""
    value_clip: Positive | None = None
    """Clip of the critic's change. null: off."""
    critic_warmup: Amount = 0
    """Steps at the beginning in which the critic is trained alone."""
    train_infer_correction: TrainInferCorrectionConfig = field(default_factory=TrainInferCorrectionConfig)
    """Correction of the mismatch between trainer and engine, on top of `pg_variant`."""

    # Distance to the reference model.
    use_kl_loss: bool = False
    """Add the KL as a term of the loss."""
    kl_loss_coef: Real = 0.001
    """Its coefficient."""
    kl_loss_type: Literal["k1", "k2", "k3", "abs", "k1+", "k3+", "abs+"] = "k3"
    """Its estimator (`kl`, `mse`, `low_var_kl` are k1, k2, k3); a plus keeps its value and has the gradient of k2."""
    add_token_level_kl: bool = False
    """Subtract the KL from the reward of each action."""
    kl_penalty: Literal["k1", "k2", "k3", "abs"] = "k1"
    """Its estimator."""
    init_kl_coef: Real = 0.2
    """Its coefficient at the start."""
    target_kl: Positive | None = None
    """Adapt the coefficient towards this KL. null: keep it."""
    kl_horizon: Count = 10_000
    """Samples over which it adapts."""

    # Advantages.
    adv_estimator: AdvantageEstimatorName = "grpo"
    """Advantage estimator; `gae` needs the critic."""
    gamma: Discount = 1.0
    """Discount of later rewards."""
    lambd: Discount = 0.95
    """λ of gae."""
    step_reward_gamma: Discount = 0.95
    """Discount per step in step_reinforce and gigpo."""
    episode_reward_weight: Real = 1.0
    """gigpo: weight of the episode's advantage."""
    step_reward_weight: Real = 1.0
    """gigpo: weight of the step's advantage."""
    norm_mean_type: Literal["group", "batch", "domain", "none"] | None = None
    """Scope of the mean that is subtracted from rewards. null: by estimator; the batch for groups of one."""
    norm_std_type: Literal["group", "batch", "domain", "none"] | None = None
    """Scope of the standard deviation that divides rewards; `none` with grpo is Dr.GRPO. null: by estimator."""
    unbiased_std: bool = False
    """Divide the squares of that standard deviation by n − 1 instead of n."""
    gdpo_parts: Mapping[str, Real] = field(default_factory=dict)
    """gdpo: parts of the reward, by name, with their weights. Empty: the reward is one part."""
    codapo_weight_offset: Real = 0.1
    """codapo: added to the value of a question, by which its advantages are multiplied."""
    codapo_accuracy_key: str = "acc"
    """codapo: part of the reward that is 1 for a right answer; the whole reward where it has no such part."""
    normalized_reward_low: Signed | None = None
    """Normalised rewards are not below this. null: any."""
    normalized_reward_high: Signed | None = None
    """Normalised rewards are not above this. null: any."""
    reward_clip: Positive | None = None
    """Rewards are clipped to ± this. null: off."""
    whiten_advantages: bool = False
    """Whiten advantages over the trained actions of the batch."""
    whiten_by_domain: bool = False
    """whiten_advantages: over the actions of each domain (reward or environment), not of the batch."""
    advantage_clip: Positive | None = None
    """Advantages are clipped to ± this. null: off."""

    # Roles.
    actor_train: TrainingRoleConfig = field(default_factory=TrainingRoleConfig)
    """Trains the policy."""
    actor_infer: RolloutRoleConfig = field(default_factory=RolloutRoleConfig)
    """Generates with it."""
    reference: ScoringRoleConfig = field(default_factory=ScoringRoleConfig)
    """Holds the initial policy, where a KL needs it."""
    critic: CriticRoleConfig = field(default_factory=CriticRoleConfig)
    """Estimates values, for gae."""
    rewards: Mapping[str, RewardConfig] = field(default_factory=dict)
    """Judges by domain."""
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    """Held-out prompts and the sampling of validation."""

    # Environments.
    train_env_manager: EnvManagerConfig | None = None
    """Environments of training; makes the run agentic."""
    val_env_manager: EnvManagerConfig | None = None
    """Environments of validation. null: as in training."""
    custom_envs: Mapping[str, CustomEnvConfig] = field(default_factory=dict)
    """Environments by tag."""

    # Images.
    denoising: DenoisingConfig | None = None
    """How images are denoised; makes the run train a denoising model. null: `pretrain` is a language model."""

    # Everything else.
    reliability: ReliabilityConfig = field(default_factory=ReliabilityConfig)
    """Deadlines and retries."""
    simulation: SimulationConfig = field(default_factory=SimulationConfig)
    """Costs of the simulated back ends; only `headway simulate` and `headway plan` read them."""

    def list_sample_kinds(self) -> frozenset[str]:
        """Return what the trained environments call a sample: `episode`, `turn`, or both."""
        manager = self.train_env_manager
        tags = () if manager is None else manager.tags or tuple(self.custom_envs)
        return frozenset(self.custom_envs[tag].sample for tag in tags if tag in self.custom_envs)
