"""Blocks of the tree that are neither roles nor top-level options: environments, denoising, correction, reliability."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from headway.config.field_types import Amount, Count, NodeSize, Positive, Real, Seconds, Signed


@dataclass(frozen=True, slots=True, kw_only=True)
class StageConfig:
    """A stage of the user's own between two stages of the pipeline."""

    name: str = ""
    """Name under which a plugin registered it."""
    after: str = "rollout"
    """Stage that it stands behind: a built-in one, or one of this list."""
    args: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of its constructor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvManagerConfig:
    """How many environments run, and which."""

    num_env_groups: Count | None = None
    """Groups of environments that run at once. null: as many as there are slots. Those beyond the slots are redundant:
    the first groups to end are trained, the others are dropped."""
    group_size: Count = 1
    """Members of a group: episodes that start from the same state."""
    group_size_redundancy: Amount = 0
    """Members started beyond `group_size`; the first `group_size` to end are kept."""
    max_env_num_per_worker: Amount = 0
    """Environments in one worker process; if given, environments run in as many processes as that takes."""
    tags: tuple[str, ...] = ()
    """Keys of `custom_envs` to draw environments from."""
    num_groups_partition: tuple[Count, ...] = ()
    """Groups of each tag, in the order of `tags`; adds up to `num_env_groups`. Empty: equal parts."""
    format_penalty: Signed = 0.0
    """Subtracted from the reward of a turn whose action could not be parsed; its sign does not matter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CustomEnvConfig:
    """One kind of environment."""

    env_type: str = ""
    """Registered name or `module:class`. Empty: the tag."""
    max_steps: Count | None = None
    """Turns after which an episode is cut off. null: the environment decides."""
    max_invalid: Count | None = None
    """Actions that could not be parsed after which it is cut off. null: any number."""
    max_tokens_per_step: Count | None = None
    """Longest answer of one turn. null: `actor_infer.generating_args.max_new_tokens`."""
    env_config: Mapping[str, Any] = field(default_factory=dict)
    """Passed to the environment by keyword."""
    workers: Amount | None = None
    """Worker processes that run it; 0: the process of the run. null: as many as `max_env_num_per_worker` needs, else as
    many as the environment suggests."""
    concurrency: Count | None = None
    """Episodes at once, over all groups. null: what the environment suggests."""
    format_penalty: Signed | None = None
    """Subtracted from the reward of a turn whose action could not be parsed. null: that of the environment manager."""
    history: bool = True
    """The policy sees the whole episode; false: the system message and the newest observation alone."""
    history_length: Count | None = None
    """Newest observations that a template with `{history}` tells, the current one included. null: the current one."""
    sample: Literal["episode", "turn"] = "episode"
    """What counts as one sample in the loss: an episode, or each of its turns for itself. One for all trained tags."""
    agent_system_template: str | None = None
    """System message of the agent; `{env_instruction}` in it is the environment's own. null: the environment's own."""
    agent_template: str | None = None
    """Template of each message, with `{observation}` or `{current_observation}` in it. null: the observation alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DenoisingConfig:
    """How images are denoised, and which of the steps are trained."""

    algorithm: Literal["flow_grpo", "diffusion_nft"] = "flow_grpo"
    """A policy loss (`pg_variant`) on denoising steps; or DiffusionNFT, which needs no log-probabilities."""
    sampler: Literal["cps", "sde"] = "cps"
    """How noise comes into a step: coefficients-preserving, or Flow-SDE."""
    noise_level: Real | None = None
    """a of the sampler. null: 0.8 for cps, 0.7 for sde."""
    timestep_shift: Positive | None = None
    """k of the grid of noise levels; 1 is even. null: the grid that the model comes with, else 3."""
    window: Literal["random", "sliding", "full"] = "random"
    """Steps that get noise and are trained: some in the first half, the same for a group (Flow-GRPO-Fast); some that
    move on with training (MixGRPO); all but the last (Flow-GRPO)."""
    window_size: Count = 2
    """Steps of a window that is not full."""
    window_range: tuple[Amount, ...] = ()
    """Denoising steps that a random window is drawn from: the first, and the one behind the last. Empty: the first
    half."""
    window_interval: Count = 25
    """Training steps between two moves of a sliding window."""
    window_stride: Count = 1
    """Denoising steps that it moves by."""
    share_prefix: bool = True
    """The members of a group start from one noise and share the steps before their window."""
    kl_mode: Literal["exact", "compatible"] = "exact"
    """`use_kl_loss`: the KL of two Gaussians, or |dt| times that, as published code has it."""
    nft_beta: Positive = 1.0
    """diffusion_nft: β, share of the new policy in the mixture that is trained."""
    nft_levels: Count = 2
    """diffusion_nft: noise levels at which each image is trained."""
    height: Count | None = None
    """Pixels, for models that draw several sizes. null: the model's own."""
    width: Count | None = None
    """Pixels, for models that draw several sizes. null: the model's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportanceWeightConfig:
    """A weight min(exp(ℓ_p − ℓ_b), upper_bound) on the loss."""

    enabled: bool = False
    """Multiply the loss by it."""
    weight_type: Literal["token", "segment", "sequence", "geometric"] = "token"
    """Per action, per turn (geometric mean), per sample (product), or per sample (geometric mean)."""
    upper_bound: Positive = 1.2
    """Where the weight is cut off."""
    batch_normalize: bool = False
    """Divide the weights by their mean over the batch: of actions, or of turns or samples where these have weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RatioFilterConfig:
    """A mask that drops actions or samples on which trainer and engine disagree."""

    enabled: bool = True
    """Apply this filter."""
    agg_type: Literal["token", "segment", "sequence", "geometric", "largest"] = "token"
    """Drop single actions, turns by geometric mean, or whole samples by product, geometric mean or largest value."""
    measure: Literal["ratio", "k2", "k3"] = "ratio"
    """What is bounded: ρ = exp(ℓ_p − ℓ_b), or the distance ½·log²ρ or ρ − 1 − log ρ, of samples by sum or mean."""
    ratio_low: Real = 0.8
    """Smallest ratio kept."""
    ratio_high: Positive = 1.2
    """Largest ratio or distance kept."""
    diff_low: Signed | None = None
    """Smallest exp(ℓ_p) − exp(ℓ_b) kept; its mean for turns and `geometric`, its sum for `sequence`. null: any."""
    diff_high: Signed | None = None
    """Largest exp(ℓ_p) − exp(ℓ_b) kept. null: any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainInferCorrectionConfig:
    """Correction of the mismatch between trainer and engine, on top of any `pg_variant`."""

    is_weight: ImportanceWeightConfig = field(default_factory=ImportanceWeightConfig)
    """A truncated importance weight."""
    filters: tuple[RatioFilterConfig, ...] = ()
    """Masks, applied in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicesConfig:
    """Logical devices of a node, of which several may share one card or the cores of the CPU."""

    kind: Literal["auto", "cuda", "cpu"] = "auto"
    """What models run on. `device` is the short form. `auto`: GPUs if there are any."""
    count: NodeSize | None = None
    """Logical devices of a node, numbered from 0; `device_mapping` names them. null: one for each card."""
    physical: NodeSize | None = None
    """Cards that they share: logical device d is on card ⌊d · physical / count⌋. On a CPU: cores that all share. null:
    as many as there are, of cards at most `count`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """Which machines a run uses."""

    kind: Literal["local", "ray"] = "local"
    """Trainer and engines are processes of this machine, or actors of a Ray cluster."""
    address: str | None = None
    """ray: `host:port` of its head, `auto` for the one that this machine is a node of, `local` to start one here. null:
    as the variable `RAY_ADDRESS` says, which is set inside a submitted job, else `local`."""
    runtime_env: Mapping[str, Any] = field(default_factory=dict)
    """ray: passed on to it: `working_dir`, `py_modules`, `env_vars`, `pip`, ..."""
    start_timeout_s: Seconds = 300.0
    """ray: how long the run, or a part that is started again, waits for its place and comes up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightTransferConfig:
    """How new weights travel from the trainer to engines in other processes."""

    transport: Literal["auto", "shared_memory", "disk", "broadcast", "cuda_ipc", "object_store"] = "auto"
    """Shared memory; files; sockets to all engines at once; from GPU to GPU of this machine; or Ray's object store.
    `auto`: the object store on Ray, GPU to GPU where trainer and engines share devices, else shared memory between
    processes, and no copy inside one process."""
    delta: bool = False
    """Only buckets that changed travel; each engine keeps a copy of those that it serves."""
    bucket_mb: Positive | None = None
    """Size of a bucket. null: `param_update_consume_bucket_mb`, with `delta` at most 16."""
    directory: str | None = None
    """disk: where versions are written, seen by trainer and engines. null: `<output_dir>/weights`."""
    address: str | None = None
    """broadcast: where engines reach this machine. null: engines on this machine, 127.0.0.1."""
    backend: Literal["gloo", "nccl"] | None = None
    """broadcast: through the memory of the hosts, or from GPU to GPU. null: gloo."""
    timeout_s: Seconds | None = None
    """broadcast: one bucket to all engines, from forming the group to their answers. null: 60, or less where
    `reliability.transfer_timeout_s` has no time for that."""
    adapters: Literal["auto", "merged"] = "auto"
    """LoRA: `auto` sends adapters alone to our own engines, which add them to a base that never changes; where that is
    not possible, and with `merged`, whole weights travel."""
    compare_served: bool = False
    """Every native engine computes a checksum of the tensors that it serves after each update. One that serves others
    than the rest is restarted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReliabilityConfig:
    """Deadlines and retries. Every wait of the system has one of these."""

    request_timeout_s: Seconds = 3600.0
    """One request on one replica, queueing not counted. A late request moves to another replica with
    the tokens it has; a replica on which no request ended meanwhile is restarted."""
    abort_timeout_s: Seconds = 10.0
    """How long a healthy engine may take to answer an abort, a pause or a resume, and how often it is checked."""
    episode_timeout_s: Seconds = 7200.0
    """One whole episode, time in queues not counted; checked after every turn."""
    environment_timeout_s: Seconds = 600.0
    """One reset or step of an environment."""
    reward_timeout_s: Seconds = 600.0
    """One verdict, time in queues not counted."""
    worker_memory_mb: Count | None = None
    """Memory of a process that runs rewards or environments of users; one that uses more is killed. null: half of the
    machine's."""
    train_timeout_s: Seconds = 7200.0
    """One training step; a trainer that takes longer is restarted."""
    rank_timeout_s: Seconds = 1800.0
    """How long ranks of the trainer wait for one that is late, in a collective call or at a checkpoint. Then all are
    restarted. Rank 0 joins the files of a checkpoint alone: it needs less than this."""
    transfer_timeout_s: Seconds = 600.0
    """One weight update of one replica, from gather to flip, or one restart."""
    lock_timeout_s: Seconds = 28_800.0
    """Longest wait for devices that roles share."""
    stall_timeout_s: Seconds = 900.0
    """Time without progress after which a run prints its wait-for graph; without engines it stops cleanly."""
    sample_retries: Amount = 2
    """Retries of a failed episode or verdict before its group is given up."""
    step_retries: Amount = 3
    """Retries of a failed training step or scoring."""
    transfer_retries: Amount = 3
    """Retries of a failed bucket before the replica is restarted."""
    replica_restarts: Amount = 3
    """Restarts of a replica, or of the trainer, that fail in a row before it is given up."""
    restart_backoff_s: Real = 1.0
    """Wait before the second try in a row; doubles with each further one."""
    probe_s: Seconds = 60.0
    """How often a replica that was given up is tried again."""
    quiet_s: Seconds = 300.0
    """Time without a failure after which a degraded run is restored."""
