"""The measured runs: their configurations, and what they cost according to their events."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from headway.config import ResolvedConfig, load_config
from headway.errors import ConfigError
from headway.launch.training_session import open_run_directory, prepare_run, run_training
from headway.monitor.event_log import LoggedEvent


@dataclass(frozen=True, slots=True, kw_only=True)
class AgenticScenario:
    """The sizes of one scenario, the same for all its runs."""

    groups: int = 4
    members: int = 8
    turns: int = 5
    tokens: int = 2
    """Longest answer of a turn."""
    mean_s: float = 0.6
    std_s: float = 0.6
    hang: float = 0.0
    """Probability that a step never returns."""
    timeout_s: float = 6.0
    """Time after which such a step is abandoned; unused if `hang` is 0."""
    spare_groups: int = 1
    spare_members: int = 2
    policy: str = "wait"
    """Staleness policy at α = 1. With `wait`, training waits for stragglers, and no episode is wasted."""
    steps: int = 5
    """Measured steps of the first row; the others measure more, because theirs are shorter."""
    warmup: int = 1
    seed: int = 1

    def __post_init__(self) -> None:
        for key in ("groups", "members", "turns", "tokens", "steps", "warmup"):
            if getattr(self, key) < 1:
                raise ConfigError("must be at least 1", key=key, value=getattr(self, key))
        for key in ("mean_s", "std_s", "spare_groups", "spare_members"):
            if getattr(self, key) < 0:
                raise ConfigError("must not be negative", key=key, value=getattr(self, key))
        if not 0 <= self.hang < 1:
            raise ConfigError("is no chance below 1", key="hang", value=self.hang)

    @property
    def samples(self) -> int:
        """Episodes that one training step consumes."""
        return self.groups * self.members


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRow:
    """One run of the table."""

    name: str
    barrier: bool = False
    alpha: int = 0
    redundant: bool = False
    times: float = 1.0
    """Measured steps relative to the first row, so that all rows take about the same time."""

    def window(self, sizes: AgenticScenario) -> tuple[int, int]:
        """Return the first and the last measured step."""
        first = sizes.warmup + self.alpha
        return first + 1, first + round(sizes.steps * self.times)

    def episodes(self, sizes: AgenticScenario) -> int:
        """Return the largest number of episodes at once."""
        groups = sizes.groups * (1 + self.alpha) + self.redundant * sizes.spare_groups
        return groups * (sizes.members + self.redundant * sizes.spare_members)


MEASURED_ROWS = (
    MeasuredRow(name="barrier between turns", barrier=True),
    MeasuredRow(name="environment-level async", times=1.6),
    MeasuredRow(name="+ async training, α = 1", alpha=1, times=2.4),
    MeasuredRow(name="+ redundancy", alpha=1, redundant=True, times=2.8),
)
CALIBRATION_ROW = MEASURED_ROWS[1]
"""The row that calibrates the simulator: episodes do not wait for each other, so the costs can be separated."""


def make_config(
    sizes: AgenticScenario, row: MeasuredRow, model: str, run_dir: Path, *, processes: bool | None = None
) -> ResolvedConfig:
    """Return the configuration of a row. Rows differ only in what waits for what; trainer and engine are separate."""
    lake = {"size": 4, "p": 1.0, "is_slippery": False, "action_lookup": ["1", "2", "3", "4"], "env_instruction": "Go."}
    slow = {"mean_s": sizes.mean_s, "std_s": sizes.std_s, "hang": sizes.hang, "seed": sizes.seed, "env_config": lake}
    return load_config(
        {
            "exp_name": "agentic",
            "output_dir": str(run_dir),
            "pretrain": model,
            "seed": sizes.seed,
            "device": "cpu",
            "processes": processes,
            "hybrid_engine": False,
            "num_gpus_per_node": 2,
            "async_generation_ratio": row.alpha,
            "staleness_policy": sizes.policy,
            "env_scheduling": "barrier" if row.barrier else "async",
            "max_additional_running_prompts": sizes.spare_groups * row.redundant,
            "filter_zero_variance": False,
            "rollout_batch_size": sizes.samples,
            "sequence_length": 96,
            "response_length": sizes.tokens,
            "max_steps": row.window(sizes)[1] + row.alpha,
            "save_steps": 0,
            "eval_steps": 0,
            "track_with": [],
            "reliability": {"environment_timeout_s": sizes.timeout_s if sizes.hang else 60.0},
            "train_env_manager": {
                "tags": ["lake"],
                "group_size": sizes.members,
                "group_size_redundancy": sizes.spare_members * row.redundant,
            },
            "custom_envs": {
                "lake": {
                    "env_type": "benchmarks.agentic.delayed_environment:DelayedEnvironment",
                    "env_config": slow,
                    "max_steps": sizes.turns,
                    "max_tokens_per_step": sizes.tokens,
                    "history": False,
                }
            },
            "actor_infer.strategy_args.strategy_config.max_num_seqs": row.episodes(sizes),
            "actor_infer.strategy_args.strategy_config.num_threads": 1,
            "actor_train.model_args.disable_gradient_checkpointing": True,
            "actor_train.training_args.learning_rate": 1e-6,
            "actor_train.training_args.per_device_train_batch_size": sizes.samples,
        }
    )


def measure_row(
    sizes: AgenticScenario, row: MeasuredRow, resolved: ResolvedConfig
) -> tuple[StepCosts, list[LoggedEvent]]:
    """Run once on the wall clock; return the costs of the measured steps, and all events."""
    events: list[LoggedEvent] = []
    prepared = prepare_run(resolved)
    with open_run_directory(prepared) as directory:
        summary = asyncio.run(run_training(prepared, directory, sinks=[events.append]))
    if not summary.finished:
        raise RuntimeError(f"{row.name} ended early: {summary.reason}")
    return compute_costs(sizes, row, events), events


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCosts:
    """Costs of the measured steps of a run, real or simulated."""

    step_s: float
    samples_per_s: float
    train_s: float
    """Duration of a training step."""
    update_s: float
    """Duration of a weight update."""
    lag: float
    turn_s: float
    """Duration of a request to the engine."""
    between_s: float
    """Time between two requests of an episode: the environment, other work, and waiting for other episodes."""
    dropped: float
    """Dropped groups per trained group."""


def compute_costs(sizes: AgenticScenario, row: MeasuredRow, events: list[LoggedEvent]) -> StepCosts:
    """Compute the costs of the measured steps, without the last α steps, whose samples were made earlier."""
    begins = {event.data["trained"] + 1: event.time_s for event in events if event.kind == "step.begin"}
    ends = {event.data["trained"]: event for event in events if event.kind == "step.end"}
    first, last = row.window(sizes)
    steps = range(first, last + 1)
    span_s = ends[last].time_s - ends[first - 1].time_s
    lags = [event.data["trained"] - event.data["oldest"] for event in events if event.kind == "group.train"]
    asked, kinds = find_requests(events), Counter(event.kind for event in events)
    return StepCosts(
        step_s=span_s / len(steps),
        samples_per_s=sum(ends[step].data["samples"] for step in steps) / span_s,
        train_s=sum(ends[step].time_s - begins[step] for step in steps) / len(steps),
        update_s=_mean_span_s(events, "load"),
        lag=sum(lags) / len(lags),
        turn_s=sum(end_s - begin_s for begin_s, end_s, _ in asked) / len(asked),
        between_s=_mean_pause_s(events),
        dropped=kinds["group.drop"] / kinds["group.train"],
    )


def find_requests(events: list[LoggedEvent]) -> list[tuple[float, float, int]]:
    """Return begin, end and number of tokens of every finished request."""
    begun: dict[str, float] = {}
    found = []
    for event in events:
        if event.kind == "request.start":
            begun[event.data["request"]] = event.time_s
        elif event.kind == "request.end" and event.data["finish"] not in ("aborted", "failed"):
            found.append((begun[event.data["request"]], event.time_s, event.data["actions"]))
    return found


def _mean_pause_s(events: list[LoggedEvent]) -> float:
    ended, found = {}, []
    for event in events:
        if event.kind == "request.end":
            ended[event.data["request"]] = event.time_s
        elif event.kind == "request.start":
            sample, _, turn = event.data["request"].rpartition("/")
            before_s = ended.get(f"{sample}/{int(turn) - 1}")
            if before_s is not None:
                found.append(event.time_s - before_s)
    return sum(found) / max(len(found), 1)


def count_turns(events: list[LoggedEvent]) -> list[int]:
    """Return the number of turns of every finished episode."""
    return [int(event.data["turns"]) for event in events if event.kind == "sample.finish"]


def _mean_span_s(events: list[LoggedEvent], name: str) -> float:
    begun: dict[tuple[str, int], float] = {}  # every part of a run numbers its own spans
    found = []
    for event in events:
        if event.kind == "span.begin" and event.data["name"].startswith(name):
            begun[event.who, event.data["span"]] = event.time_s
        elif event.kind == "span.end" and (at := (event.who, event.data["span"])) in begun:
            found.append(event.time_s - begun.pop(at))
    return sum(found) / max(len(found), 1)
