"""The slow truth about continuous batching: one step after the other, in plain loops.

What `headway.sim.simulated_engine` computes in closed form must come out the same here.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from headway.config.simulation_config import SimulatedEngineConfig

_SAME_INSTANT_S = 1e-9


@dataclass
class Job:
    """One request; what is known of it, then what became of it."""

    at_s: float
    prompt: int
    length: int
    key: int = -1
    made: int = 0
    versions: list[int] = field(default_factory=list)
    """Of each action."""
    ended_s: float = -1.0
    prefix: tuple[int, int] = (-1, -1)


@dataclass
class Pause:
    """Decoding stops at the first boundary from `at_s` on, until `until_s`."""

    at_s: float
    until_s: float


def simulate(cost: SimulatedEngineConfig, jobs: list[Job], pauses: list[Pause], flips: list[float]) -> None:
    """Fill in what becomes of `jobs`. Version n + 1 is flipped to at `flips[n]`, at no cost."""
    arrivals = sorted(jobs, key=lambda job: job.at_s)
    queue: list[Job] = []
    running: list[Job] = []
    now = 0.0
    while arrivals or queue or running:
        for job in [job for job in running if job.made >= job.length]:
            running.remove(job)
            job.ended_s = now
        version = sum(1 for flip in flips if flip <= now + _SAME_INSTANT_S)
        while arrivals and arrivals[0].at_s <= now + _SAME_INSTANT_S:
            queue.append(arrivals.pop(0))
        held = [pause for pause in pauses if pause.at_s <= now + _SAME_INSTANT_S and now < pause.until_s]
        if held:
            now = held[0].until_s
            continue
        _preempt(cost, queue, running)
        tokens = _admit(cost, queue, running, version)
        if tokens:
            now += tokens / cost.prefill_tokens_per_s
        elif running:
            context = sum(job.prompt + job.made for job in running)
            now += cost.step_s + cost.step_per_request_s * len(running) + cost.step_per_context_token_s * context
            for job in running:
                job.made += 1
                job.versions.append(version)
        elif arrivals:
            now = max(now, arrivals[0].at_s)


def _preempt(cost: SimulatedEngineConfig, queue: list[Job], running: list[Job]) -> None:
    while cost.kv_tokens is not None and sum(job.prompt + job.made + 1 for job in running) > cost.kv_tokens:
        queue.insert(0, running.pop())


def _admit(cost: SimulatedEngineConfig, queue: list[Job], running: list[Job], version: int) -> int:
    tokens = 0
    while queue and len(running) < cost.slots:
        job = queue[0]
        needed = sum(other.prompt + other.made + 1 for other in [*running, job])
        if cost.kv_tokens is not None and needed > cost.kv_tokens:
            break
        queue.pop(0)
        job.prefix = (job.key, version)
        cached = [other.prompt for other in running if job.key >= 0 and other.prefix == job.prefix]
        tokens += job.prompt + job.made - min(max(cached, default=0), job.prompt)
        running.append(job)
    return tokens
