"""One calibration per model, and one per table where the paper made a separate experiment.

Every number here was fitted once, over all cells of the tables that use it, never for a single cell. A decode step
costs `step_s + step_per_request_s · batch + step_per_context_token_s · context`; training and reference pass cost
GPU-seconds per token plus a fixed part; a weight update is everything between a step and the next version served.
"""

from __future__ import annotations

from benchmarks.scaling.setups import ResponseLengths, Workload

from headway.config.simulation_config import (
    DistributionConfig,
    SimulatedEngineConfig,
    SimulatedEnvironmentConfig,
    SimulatedRewardConfig,
    SimulatedScorerConfig,
    SimulatedTrainerConfig,
    SimulatedWeightsConfig,
    SimulationConfig,
)

PROMPT = DistributionConfig(mean=512)
FREE_TRAINER = SimulatedTrainerConfig()
"""Trainer without costs, for tables about generation alone."""
INSTANT_WEIGHTS = SimulatedWeightsConfig(buckets=1)

THINK = Workload(
    name="Qwen3-8B Think",
    lengths=ResponseLengths(mean=11_030, prompt_spread=0.45, spread=0.12),
    simulation=SimulationConfig(
        prompt_tokens=PROMPT,
        engine=SimulatedEngineConfig(
            slots=72, step_s=0.0136, step_per_request_s=0.000475, step_per_context_token_s=1.82e-9
        ),
        ref_logp=SimulatedScorerConfig(gpu_s_per_token=0.00013),
        trainer=SimulatedTrainerConfig(gpu_s_per_token=0.00018, fixed_s=22.0),
        weights=SimulatedWeightsConfig(send_s=110.0),
    ),
)

BASE = Workload(
    name="Qwen3-8B Base",
    lengths=ResponseLengths(mean=2_000, prompt_spread=0.17, spread=0.65),
    simulation=SimulationConfig(
        prompt_tokens=PROMPT,
        engine=SimulatedEngineConfig(
            slots=200, step_s=0.0103, step_per_request_s=0.000378, step_per_context_token_s=1.73e-9
        ),
        ref_logp=SimulatedScorerConfig(gpu_s_per_token=0.0000437),
        trainer=SimulatedTrainerConfig(gpu_s_per_token=0.0000603, fixed_s=12.0),
        weights=SimulatedWeightsConfig(send_s=180.0),
    ),
)

MODELS = {"think": THINK, "base": BASE}

QUEUE_GPUS = 12
QUEUE = Workload(
    name="queue scheduling",
    lengths=ResponseLengths(mean=1_633, prompt_spread=0.62, spread=0.226, longest=3374, easy_is_short=True),
    simulation=SimulationConfig(
        prompt_tokens=DistributionConfig(mean=0),
        engine=SimulatedEngineConfig(slots=83, step_s=0.01704, step_per_request_s=0.00041),
        trainer=FREE_TRAINER,
        weights=INSTANT_WEIGHTS,
        reward=SimulatedRewardConfig(zero_variance_share=0.07),
    ),
)

REPLICATION_GPUS = 15
REPLICATION = Workload(
    name="prompt replication",
    lengths=ResponseLengths(mean=3_940, prompt_spread=2.24, spread=0.16, longest=4900),
    simulation=SimulationConfig(
        prompt_tokens=DistributionConfig(mean=0),
        engine=SimulatedEngineConfig(slots=164, step_s=0.01056, step_per_request_s=0.000477),
        trainer=FREE_TRAINER,
        weights=INSTANT_WEIGHTS,
    ),
)

TURNS = 21
"""Turns of an episode in the environment tables, with no time for generation; fits 892 → 362 s."""


def make_environment_workload(mean_s: float, std_s: float, *, turns: int = TURNS, hang: float = 0.0) -> Workload:
    """Return a workload of environments whose steps take N(mean, std) seconds, never less than 0."""
    return Workload(
        name=f"N({mean_s:g}, {std_s:g})",
        lengths=None,
        simulation=SimulationConfig(
            prompt_tokens=DistributionConfig(mean=0),
            response_tokens=DistributionConfig(mean=1),
            engine=SimulatedEngineConfig(slots=1024, step_s=1e-6, step_per_request_s=0.0),
            trainer=FREE_TRAINER,
            weights=INSTANT_WEIGHTS,
            environment=SimulatedEnvironmentConfig(
                turns=DistributionConfig(mean=turns),
                step_s=DistributionConfig(kind="gaussian", mean=mean_s, std=std_s),
                hang_probability=hang,
            ),
        ),
    )


def make_agentic_workload(
    *, turns: float, latency_s: float, spread_s: float, tokens: float, train_gpu_s: float
) -> Workload:
    """Return a workload of many turns, each of which costs some tokens and a step of the environment."""
    return Workload(
        name="agentic",
        lengths=None,
        simulation=SimulationConfig(
            prompt_tokens=DistributionConfig(mean=0),
            response_tokens=DistributionConfig(kind="lognormal", mean=tokens, std=tokens / 2, min=1),
            engine=SimulatedEngineConfig(slots=64, step_s=0.0135, step_per_request_s=0.0004),
            trainer=SimulatedTrainerConfig(gpu_s_per_sample=train_gpu_s, fixed_s=10.0),
            weights=SimulatedWeightsConfig(send_s=10.0),
            environment=SimulatedEnvironmentConfig(
                turns=DistributionConfig(kind="gaussian", mean=turns, std=turns / 5, min=1),
                step_s=DistributionConfig(kind="lognormal", mean=latency_s, std=spread_s),
            ),
        ),
    )


AGENTIC = {
    "SWE": make_agentic_workload(turns=30, latency_s=1.7, spread_s=1.0, tokens=150, train_gpu_s=106.0),
    "ALFWorld": make_agentic_workload(turns=30, latency_s=4.6, spread_s=2.0, tokens=100, train_gpu_s=84.0),
    "ShopSimulator": make_agentic_workload(turns=10, latency_s=0.8, spread_s=1.2, tokens=100, train_gpu_s=33.0),
}

LOSING = Workload(
    name="training-bound 30B",
    lengths=ResponseLengths(mean=2_000, prompt_spread=0.3, spread=0.3, longest=8192),
    simulation=SimulationConfig(
        prompt_tokens=PROMPT,
        engine=SimulatedEngineConfig(slots=128, step_s=0.01, step_per_request_s=0.00005),
        trainer=SimulatedTrainerConfig(gpu_s_per_sample=2.3, fixed_s=4.0),
        weights=SimulatedWeightsConfig(send_s=5.0),
    ),
)
"""Training is four fifths of the GPU time, so that giving half of the GPUs to generation costs more than it hides."""
