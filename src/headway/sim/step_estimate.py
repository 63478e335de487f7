"""Estimates seconds per step roughly, which is good enough to choose what is worth simulating.

Generation and training of one step are work divided by devices; on top comes the tail, the time that the longest
answer needs by itself. A synchronous run pays for the whole tail, an asynchronous one for 1/(α + 1) of it, by the
published bound T ≤ (N/K)(μ_gen + E·μ_train) + L_gen/(α + 1), with the two kinds of work on pools of their own.

Dropped samples, queues and faults are not estimated; the simulation covers them.
"""

from dataclasses import dataclass

from headway.config.simulation_config import SimulationConfig
from headway.seeding import make_rng
from headway.sim.distributions import make_count_sampler, make_sampler
from headway.sim.simulated_run import Scenario

_DRAWS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWorkload:
    """One training step's worth of samples, as drawn from a scenario's distributions."""

    samples: int
    groups: int
    actions_mean: float
    """Actions of one sample."""
    actions_most: int
    """Actions of the longest sample of a step."""
    prompt_mean: float
    environment_mean_s: float
    environment_most_s: float
    kept_share: float
    """Share of groups that are not dropped because their rewards are equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEstimate:
    """Estimated parts of a step, each as if it were alone."""

    generate_s: float
    """Generating all samples, with every engine full."""
    tail_s: float
    """Generating the longest sample, alone on its engine."""
    train_s: float
    """The step and the scoring that shares its devices."""
    update_s: float
    """Time from a trained to a served version."""
    step_s: float
    """The whole step."""


def draw_workload(scenario: Scenario) -> StepWorkload:
    """Draw the samples of one step of a scenario."""
    costs, settings = scenario.simulation, scenario.settings
    rng = make_rng(scenario.seed, "plan")
    turns, response = make_count_sampler(costs.environment.turns), make_count_sampler(costs.response_tokens)
    step_s, prompt = make_sampler(costs.environment.step_s), make_count_sampler(costs.prompt_tokens, least=0)
    samples = settings.groups_per_step * settings.group_size
    actions, waits, prompts = [], [], []
    for _ in range(min(samples, _DRAWS)):
        episode = range(turns(rng))
        actions.append(sum(min(response(rng), settings.sampling.max_new_tokens) for _ in episode))
        waits.append(sum(step_s(rng) for _ in episode))
        prompts.append(prompt(rng))
    dropped = costs.reward.zero_variance_share if settings.filter_zero_variance else 0.0
    return StepWorkload(
        samples=samples,
        groups=settings.groups_per_step,
        actions_mean=sum(actions) / len(actions),
        actions_most=max(actions),
        prompt_mean=sum(prompts) / len(prompts),
        environment_mean_s=sum(waits) / len(waits),
        environment_most_s=max(waits),
        kept_share=max(1.0 - dropped, 1.0 / (settings.max_num_gen_batches or 100)),
    )


def estimate_step(scenario: Scenario, work: StepWorkload) -> StepEstimate:
    """Estimate the seconds per step of a scenario with this workload."""
    settings, costs = scenario.settings, scenario.costs
    generate_s = _estimate_generate_s(scenario, work)
    tail_s = work.actions_most * (costs.engine.step_s + costs.engine.step_per_request_s) + work.environment_most_s
    train_s = estimate_train_s(scenario, work.actions_mean * work.samples, work.samples, work.groups)
    update_s = estimate_update_s(costs)
    if scenario.shares_devices:
        step_s = generate_s + tail_s / (settings.async_generation_ratio + 1) + train_s + update_s
    else:
        load_s = 0.0 if settings.enable_dual_buffer else costs.weights.send_s + costs.weights.load_s
        halted_s = costs.weights.flip_s + load_s
        step_s = max(generate_s + halted_s + tail_s / (settings.async_generation_ratio + 1), train_s)
        serial = max(0.0, 1.0 - settings.async_generation_ratio)  # the share of a batch that overlaps with nothing
        step_s = serial * (generate_s + tail_s + train_s + update_s) + (1.0 - serial) * step_s
        if settings.staleness_policy == "wait":  # the longest answer must be done before its deadline
            step_s = max(step_s, (tail_s + train_s + update_s) / (settings.bound + 1))
    return StepEstimate(generate_s=generate_s, tail_s=tail_s, train_s=train_s, update_s=update_s, step_s=step_s)


def _estimate_generate_s(scenario: Scenario, work: StepWorkload) -> float:
    engine = scenario.simulation.engine
    context = work.prompt_mean + work.actions_mean / 2
    started = (1 + scenario.settings.depth) * work.samples / scenario.engines
    together = min(started, float(engine.slots))
    if engine.kv_tokens is not None:
        together = min(together, engine.kv_tokens / max(context, 1.0))
    together = max(together, 1.0)
    decode_s = engine.step_s + together * (engine.step_per_request_s + engine.step_per_context_token_s * context)
    prefill_s = work.groups * work.prompt_mean / engine.prefill_tokens_per_s
    per_engine = work.samples * work.actions_mean / (scenario.engines * together)
    return (per_engine * decode_s + prefill_s / scenario.engines) / work.kept_share


def estimate_train_s(scenario: Scenario, actions: float, samples: float, groups: float) -> float:
    """Return how long one step, and the scoring of its groups, hold the trainer's devices."""
    costs, gpus = scenario.costs, len(scenario.train_devices)
    trainer = costs.trainer
    seconds = (trainer.gpu_s_per_token * actions + trainer.gpu_s_per_sample * samples) / gpus + trainer.fixed_s
    for scorer in (costs.logp, costs.ref_logp, costs.critic):
        if scorer.with_trainer:
            seconds += scorer.gpu_s_per_token * actions / gpus + scorer.fixed_s * groups
    return seconds


def estimate_update_s(costs: SimulationConfig) -> float:
    """Return the time from a trained to a served version: three parts that overlap by bucket, then the flip."""
    parts = (costs.weights.gather_s, costs.weights.send_s, costs.weights.load_s)
    longest = max(parts)
    return longest + (sum(parts) - longest) / costs.weights.buckets + costs.weights.flip_s
