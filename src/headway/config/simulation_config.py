"""The `simulation:` block: what simulated back ends cost, in seconds of one replica or one GPU.

Only `headway simulate` and `headway plan` read it; a training run ignores it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from headway.config.field_types import Amount, Count, Factor, Positive, Probability, Real


@dataclass(frozen=True, slots=True, kw_only=True)
class DistributionConfig:
    """A latency or a length. Draws are clipped to [min, max]."""

    kind: Literal["fixed", "gaussian", "lognormal", "empirical"] = "fixed"
    """Shape of the distribution."""
    mean: Real = 0.0
    """Mean before clipping, in every kind but `empirical`."""
    std: Real = 0.0
    """Standard deviation of the value itself (not of its logarithm), in `gaussian` and `lognormal`."""
    min: Real = 0.0
    """Smallest value drawn."""
    max: Real | None = None
    """Largest value drawn. null: no limit."""
    file: str | None = None
    """`empirical`: a text file of numbers, drawn uniformly: one a line, or those of one prompt a line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedEngineConfig:
    """Continuous batching: a step advances every running request by one action."""

    gpus: Count = 1
    """Devices of one replica; `actor_infer.device_mapping` divided by this is the number of replicas."""
    slots: Count = 64
    """Requests that decode together; more wait in the replica's queue."""
    step_s: Real = 0.016
    """Cost of a decode step however small the batch: reading the weights."""
    step_per_request_s: Real = 0.0005
    """Added for each request in the batch."""
    step_per_context_token_s: Real = 0.0
    """Added for each token of context held by the batch: reading the KV cache."""
    prefill_tokens_per_s: Positive = 20_000.0
    """Prompt (and resumed) tokens processed a second; decoding of the replica stops meanwhile."""
    kv_tokens: Count | None = None
    """Tokens of context that fit; the youngest request is preempted and recomputed when they do not."""
    restart_s: Real = 30.0
    """Time from a crash to an empty replica."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedTrainerConfig:
    """A step costs its GPU-seconds divided by the GPUs of the role, plus what does not scale."""

    gpu_s_per_token: Real = 0.0
    """GPU-seconds for each token of the batch."""
    gpu_s_per_sample: Real = 0.0
    """GPU-seconds for each sample of the batch."""
    fixed_s: Real = 0.0
    """What more GPUs do not make faster: communication, the optimizer, the host."""
    save_s: Real = 1.0
    """Time of one checkpoint."""
    restart_s: Real = 60.0
    """Time from a crash to an empty trainer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedScorerConfig:
    """logp, ref_logp or critic: a forward pass. All zero: the stage passes groups through."""

    gpu_s_per_token: Real = 0.0
    """GPU-seconds for each token of the group."""
    fixed_s: Real = 0.0
    """Seconds for each group, however short."""
    with_trainer: bool = True
    """Runs on the trainer's devices, so that it and a training step exclude each other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedWeightsConfig:
    """One update: gather once, then send and load for each replica, then flip."""

    buckets: Count = 4
    """Parts that a version is sent in."""
    gather_s: Real = 0.0
    """Time for the whole version."""
    send_s: Real = 0.0
    """Time for the whole version, to one replica."""
    load_s: Real = 0.0
    """Time for the whole version, into the spare buffer."""
    flip_s: Real = 0.0
    """Decoding stands still for this long."""
    recompute_cache: bool | None = None
    """Whether a flip throws the KV cache away, so that every running request is prefilled again. null: as the engine
    of `actor_infer` does; vLLM and SGLang recompute, Headway's own engine keeps it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ColocatedCostsConfig:
    """Costs that a run pays only where trainer and engines take turns on the same devices."""

    switch_s: Real = 0.0
    """Seconds to hand the devices from generation to training and back, once a step."""
    trainer_factor: Positive = 1.0
    """How many times as long a training step takes there as on as many devices of its own."""
    logp: SimulatedScorerConfig | None = None
    """The `logp` stage there. null: `simulation.logp`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedEnvironmentConfig:
    """Turns of an episode. One turn with no latency is a verifiable task."""

    turns: DistributionConfig = field(default_factory=lambda: DistributionConfig(mean=1))
    """How many an episode has."""
    reset_s: DistributionConfig = field(default_factory=DistributionConfig)
    """Latency of a reset."""
    step_s: DistributionConfig = field(default_factory=DistributionConfig)
    """Latency of a step."""
    hang_probability: Probability = 0.0
    """Probability that a step never returns; the agent's timeout ends it."""
    slow_probability: Probability = 0.0
    """Probability of an environment whose every step takes `slow_factor` times as long."""
    slow_factor: Factor = 1.0
    """How many times slower a slow environment is."""
    failure_probability: Probability = 0.0
    """Probability that a step raises."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRewardConfig:
    """Verdicts: 0 or 1, with a difficulty drawn per prompt."""

    latency_s: DistributionConfig = field(default_factory=DistributionConfig)
    """Time from the request to the verdict."""
    zero_variance_share: Probability = 0.0
    """Share of prompts whose members all get the same reward."""
    failure_probability: Probability = 0.0
    """Probability that a verdict fails."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultConfig:
    """Something that breaks at a given time, and for how long."""

    kind: Literal["crash", "hang", "slowdown", "lost_message", "late_message", "corrupted_bucket", "lost_node"]
    """What goes wrong."""
    target: str
    """`engine/<n>`, `trainer`, `weights`, `environment`, `reward`, `ref_logp`; `node/<n>` for `lost_node`."""
    at_s: Real = 0.0
    """When, from the start of the run."""
    for_s: Real = 0.0
    """How long the cause lasts; restarts fail meanwhile. 0: a single failure."""
    factor: Real = 4.0
    """`slowdown`: how many times slower. `late_message`: seconds of delay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineChangeConfig:
    """An engine that comes or goes on purpose."""

    kind: Literal["join", "leave"]
    """A new engine serves after `engine.restart_s` and a weight update."""
    at_s: Real = 0.0
    """When, from the start of the run."""
    engine: str | None = None
    """`leave`: which engine, such as `engine/0`. null: the newest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationConfig:
    """A scenario: what the simulated world costs and what goes wrong in it."""

    steps: Count = 6
    """Training steps to simulate."""
    warmup_steps: Amount = 2
    """First steps, left out of the averages because the pipeline is still filling."""
    response_tokens: DistributionConfig = field(
        default_factory=lambda: DistributionConfig(kind="lognormal", mean=2000, std=2000, min=1, max=32_768)
    )
    """Tokens of one turn."""
    response_correlation: Probability = 0.0
    """How much alike the lengths of one prompt's answers are: 0 not at all, 1 all the same. It is the correlation of
    the normal scores behind the draws (for a lognormal, of the logarithms)."""
    prompt_tokens: DistributionConfig = field(default_factory=lambda: DistributionConfig(mean=512))
    """Tokens of one prompt."""
    engine: SimulatedEngineConfig = field(default_factory=SimulatedEngineConfig)
    """One replica."""
    trainer: SimulatedTrainerConfig = field(default_factory=lambda: SimulatedTrainerConfig(gpu_s_per_token=0.0003))
    """The trainer."""
    logp: SimulatedScorerConfig = field(default_factory=SimulatedScorerConfig)
    """The `logp` stage."""
    ref_logp: SimulatedScorerConfig = field(default_factory=SimulatedScorerConfig)
    """The `ref_logp` stage."""
    critic: SimulatedScorerConfig = field(default_factory=SimulatedScorerConfig)
    """The `critic` stage."""
    weights: SimulatedWeightsConfig = field(default_factory=lambda: SimulatedWeightsConfig(send_s=1.0))
    """Weight updates."""
    colocated: ColocatedCostsConfig = field(default_factory=ColocatedCostsConfig)
    """What only a run on shared devices pays."""
    environment: SimulatedEnvironmentConfig = field(default_factory=SimulatedEnvironmentConfig)
    """Environments."""
    reward: SimulatedRewardConfig = field(default_factory=SimulatedRewardConfig)
    """Rewards."""
    gpus_per_node: Count = 8
    """Devices that a lost node takes with it."""
    faults: tuple[FaultConfig, ...] = ()
    """What goes wrong, in any order."""
    changes: tuple[EngineChangeConfig, ...] = ()
    """Engines that join and leave, in any order."""
