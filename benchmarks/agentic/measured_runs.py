"""The runs of the table: what each of them is told, and what its events say it cost."""

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
class Sizes:
    """One scenario: the same for all its runs."""

    groups: int = 4
    members: int = 8
    turns: int = 5
    tokens: int = 2
    """Longest answer of a turn."""
    mean_s: float = 0.6
    std_s: float = 0.6
    hang: float = 0.0
    """Chance of a step never to return."""
    timeout_s: float = 6.0
    """After which such a step is given up; only where there are some."""
    spare_groups: int = 1
    spare_members: int = 2
    policy: str = "wait"
    """Who pays for a straggler where α is 1: with `wait` training does, and no episode is played in vain."""
    steps: int = 5
    """Measured ones of the first row; the others have more, as theirs are shorter."""
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
class Row:
    """One run."""

    name: str
    barrier: bool = False
    alpha: int = 0
    redundant: bool = False
    times: float = 1.0
    """How many times as many steps are measured as of the first row: about as many seconds."""

    def window(self, sizes: Sizes) -> tuple[int, int]:
        """The first and the last of the measured steps."""
        first = sizes.warmup + self.alpha
        return first + 1, first + round(sizes.steps * self.times)

    def episodes(self, sizes: Sizes) -> int:
        """The most that are played at once."""
        groups = sizes.groups * (1 + self.alpha) + self.redundant * sizes.spare_groups
        return groups * (sizes.members + self.redundant * sizes.spare_members)


ROWS = (
    Row(name="barrier between turns", barrier=True),
    Row(name="environment-level async", times=1.6),
    Row(name="+ async training, α = 1", alpha=1, times=2.4),
    Row(name="+ redundancy", alpha=1, redundant=True, times=2.8),
)
CALIBRATES = ROWS[1]
"""The row from which the simulator learns costs: nobody waits for anybody between turns, so they can be told apart."""


def configuration(
    sizes: Sizes, row: Row, model: str, run_dir: Path, *, processes: bool | None = None
) -> ResolvedConfig:
    """The same for every row but for who waits for whom. Trainer and engine are apart in all of them."""
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


def measured(sizes: Sizes, row: Row, resolved: ResolvedConfig) -> tuple[Costs, list[LoggedEvent]]:
    """One run on the wall clock: what its measured steps cost, and all that happened."""
    events: list[LoggedEvent] = []
    prepared = prepare_run(resolved)
    with open_run_directory(prepared) as directory:
        summary = asyncio.run(run_training(prepared, directory, sinks=[events.append]))
    if not summary.finished:
        raise RuntimeError(f"{row.name} ended early: {summary.reason}")
    return costs(sizes, row, events), events


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Of the measured steps of a run, real or simulated. Times in seconds."""

    step_s: float
    samples_per_s: float
    train_s: float
    """From the beginning of a training step to its end."""
    update_s: float
    """Until the engine has the new weights."""
    lag: float
    turn_s: float
    """Of a request to the engine."""
    between_s: float
    """From the end of a request to the beginning of the next one of the same episode: the environment, whatever else
    has to be done there, and waiting for others."""
    dropped: float
    """Groups that were given up, for each one that was trained."""


def costs(sizes: Sizes, row: Row, events: list[LoggedEvent]) -> Costs:
    """What the measured steps cost; the last α, whose samples were paid for before, do not count."""
    begins = {event.data["trained"] + 1: event.time_s for event in events if event.kind == "step.begin"}
    ends = {event.data["trained"]: event for event in events if event.kind == "step.end"}
    first, last = row.window(sizes)
    steps = range(first, last + 1)
    span_s = ends[last].time_s - ends[first - 1].time_s
    lags = [event.data["trained"] - event.data["oldest"] for event in events if event.kind == "group.train"]
    asked, kinds = requests(events), Counter(event.kind for event in events)
    return Costs(
        step_s=span_s / len(steps),
        samples_per_s=sum(ends[step].data["samples"] for step in steps) / span_s,
        train_s=sum(ends[step].time_s - begins[step] for step in steps) / len(steps),
        update_s=_spans(events, "load"),
        lag=sum(lags) / len(lags),
        turn_s=sum(end_s - begin_s for begin_s, end_s, _ in asked) / len(asked),
        between_s=_between(events),
        dropped=kinds["group.drop"] / kinds["group.train"],
    )


def requests(events: list[LoggedEvent]) -> list[tuple[float, float, int]]:
    """Beginning, end and tokens of every request that ran to its end."""
    begun: dict[str, float] = {}
    found = []
    for event in events:
        if event.kind == "request.start":
            begun[event.data["request"]] = event.time_s
        elif event.kind == "request.end" and event.data["finish"] not in ("aborted", "failed"):
            found.append((begun[event.data["request"]], event.time_s, event.data["actions"]))
    return found


def _between(events: list[LoggedEvent]) -> float:
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


def turns(events: list[LoggedEvent]) -> list[int]:
    """Of every episode that ended."""
    return [int(event.data["turns"]) for event in events if event.kind == "sample.finish"]


def _spans(events: list[LoggedEvent], name: str) -> float:
    begun: dict[int, float] = {}
    found = []
    for event in events:
        if event.kind == "span.begin" and event.data["name"].startswith(name):
            begun[event.data["span"]] = event.time_s
        elif event.kind == "span.end" and event.data["span"] in begun:
            found.append(event.time_s - begun[event.data["span"]])
    return sum(found) / max(len(found), 1)
