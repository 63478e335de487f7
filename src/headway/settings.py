"""The plan of a run that the scheduler follows: sizes, staleness, order, deadlines.

A setting that is a configuration key has the name of that key, and its default is the default of the key. Real and
simulated runs make their settings from a configuration with `make_run_settings`; tests may make them directly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from statistics import fmean, stdev
from typing import Literal

from headway.algorithm_traits import ADVANTAGE_TRAITS
from headway.config import Config, GeneratingArgs, ReliabilityConfig, ResolvedConfig, RewardConfig
from headway.config.derivation import compute_bound, count_slots
from headway.config.roles import EVERY_TASK
from headway.errors import ConfigError
from headway.types import SamplingParams, Task

__all__ = ["GroupFilter", "RunSettings", "make_run_settings", "make_sampling_params"]

_DEFAULTS = Config()
_AT_LEAST_ONE = ("groups_per_step", "group_size", "max_steps", "updates_per_sync")
_NOT_NEGATIVE = (
    *("async_generation_ratio", "staleness_window", "additional_groups", "redundant_members", "max_num_gen_batches"),
    *("save_steps", "save_total_limit", "eval_steps"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFilter:
    """Rejects groups by the rewards of their members."""

    labels: frozenset[str]
    """Domains or tags of the tasks that it judges."""
    lowest_mean: float = -inf
    highest_mean: float = inf
    smallest_std: float = -1.0

    def rejects(self, task: Task, rewards: Sequence[float]) -> bool:
        """Return whether a group is to be replaced. Groups of one never are."""
        if len(rewards) < 2 or self.labels.isdisjoint({EVERY_TASK, task.domain, task.data.get("tag")}):
            return False
        return not self.lowest_mean < fmean(rewards) < self.highest_mean or stdev(rewards) <= self.smallest_std


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """Everything the scheduler needs to know about one run. Values are checked when an instance is made."""

    groups_per_step: int
    """B: groups that one training step consumes."""
    group_size: int = 1
    """Members of a group."""
    max_steps: int = _DEFAULTS.max_steps
    """Training steps of the run."""
    async_generation_ratio: float = _DEFAULTS.async_generation_ratio
    """α: batches that rollout runs ahead. A sample is trained only while `trained − oldest ≤ ⌈α⌉`."""
    pipeline_depth: float | None = _DEFAULTS.pipeline_depth
    """Steps' worth of groups that rollout starts ahead. `None`: α."""
    updates_per_sync: int = _DEFAULTS.updates_per_sync
    """Training steps between two weight syncs."""
    staleness_policy: str = _DEFAULTS.staleness_policy
    """Name of the policy that decides which groups start, which are trained and which are dropped."""
    staleness_window: int = 0
    """Groups, in the order they started, that the `window` policy may choose a batch from. Other policies ignore it."""
    selection_order: Literal["freshest", "oldest"] = _DEFAULTS.selection_order
    """Which of the ready groups are trained first."""
    additional_groups: int = 0
    """Redundant prompts in flight; the surplus is cancelled once a batch is full."""
    redundant_members: int = 0
    """Redundant members of a group; the surplus is cancelled once the group is full."""
    has_greedy_member: bool = False
    """One member of each group answers greedily."""
    with_reward: bool = _DEFAULTS.with_reward
    """Score a sample when it ends instead of when its group reaches the reward stage."""
    filter_zero_variance: bool = True
    """Replace groups whose rewards are all equal."""
    group_filters: tuple[GroupFilter, ...] = ()
    """Which other groups are replaced, by domain."""
    max_num_gen_batches: int = _DEFAULTS.max_num_gen_batches
    """Batches' worth of groups that one step may cost where such groups are replaced. 0: any number."""
    rollout_scheduling: Literal["queue", "batch"] = _DEFAULTS.rollout_scheduling
    """`batch` starts a whole batch of groups at a time and waits for all of it, as naive systems do."""
    is_num_return_sequences_expand: bool = _DEFAULTS.is_num_return_sequences_expand
    """Place the members of a group independently; otherwise they all go to one replica."""
    env_scheduling: Literal["async", "barrier"] = _DEFAULTS.env_scheduling
    """`barrier` makes all episodes wait for each other after every turn, as naive systems do."""
    enable_dual_buffer: bool = _DEFAULTS.enable_dual_buffer
    """Load the next version while generating; otherwise pause, load, resume."""
    hybrid_engine: bool = False
    """Trainer and engines share devices and take turns."""
    save_steps: int = _DEFAULTS.save_steps
    """Steps between checkpoints. 0: only at the end and at a clean stop."""
    save_total_limit: int = _DEFAULTS.save_total_limit
    """Whole checkpoints that are kept, the newest ones. 0: all."""
    eval_steps: int = _DEFAULTS.eval_steps
    """Steps between validations. 0: never."""
    val_batch_size: int = 0
    """Tasks of one validation."""
    eval_answers: int = 1
    """Answers to each task of a validation."""
    eval_at_start: bool = _DEFAULTS.eval_at_start
    """Validate the initial policy before anything is trained."""
    eval_sampling: SamplingParams | None = None
    """Sampling of validation. `None`: the sampling of training."""
    pause_generation_for_validation: bool = _DEFAULTS.pause_generation_for_validation
    """Pause training rollouts while a validation runs."""
    mixed_version_validation: bool = False
    """Let weights change while a validation runs."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    """Sampling of training rollouts."""
    reliability: ReliabilityConfig = field(default_factory=ReliabilityConfig)
    """Deadlines and retries."""
    rescores_restored: bool = False
    """Score finished samples of an earlier process anew, because their reward was another one."""
    seed: int = _DEFAULTS.seed
    """Seed of every random choice of the run."""

    def __post_init__(self) -> None:
        for key in _AT_LEAST_ONE:
            if getattr(self, key) < 1:
                raise ConfigError("must be at least 1", key=key, value=getattr(self, key))
        for key in _NOT_NEGATIVE:
            if getattr(self, key) < 0:
                raise ConfigError("must not be negative", key=key, value=getattr(self, key))
        if self.pipeline_depth is not None and not 0 <= self.pipeline_depth <= self.async_generation_ratio:
            problem = f"must lie in [0, async_generation_ratio = {self.async_generation_ratio}]"
            raise ConfigError(problem, key="pipeline_depth", value=self.pipeline_depth)
        if self.updates_per_sync - 1 > self.depth:
            problem = f"needs a depth of {self.updates_per_sync - 1}: groups keep their slots until the sync"
            raise ConfigError(f"{problem}, it is {self.depth:g}", key="updates_per_sync", value=self.updates_per_sync)
        if self.staleness_policy == "window" and self.staleness_window < self.groups_per_step:
            problem = f"smaller than one batch of {self.groups_per_step}"
            raise ConfigError(problem, key="staleness_window", value=self.staleness_window)

    @property
    def bound(self) -> int:
        """Return ⌈α⌉, the largest lag that is allowed."""
        return compute_bound(self.async_generation_ratio)

    @property
    def depth(self) -> float:
        """Return `pipeline_depth`, or α where it is not given."""
        return self.async_generation_ratio if self.pipeline_depth is None else self.pipeline_depth

    @property
    def slots(self) -> int:
        """Return the number of groups that may be outstanding, `additional_groups` not counted."""
        return count_slots(self.depth, self.groups_per_step)

    def is_sync_due(self, trained: int) -> bool:
        """Return whether the engines get the version `trained`: every so-manieth, a validated one, and the last."""
        validated = self.eval_steps and self.val_batch_size and trained % self.eval_steps == 0
        return trained % self.updates_per_sync == 0 or bool(validated) or trained == self.max_steps


def make_run_settings(resolved: ResolvedConfig, *, held_out: int = 0) -> RunSettings:
    """Make the settings of a configuration for which `held_out` validation tasks exist."""
    config, derived = resolved.config, resolved.derived
    return RunSettings(
        groups_per_step=derived.groups_per_step,
        group_size=derived.group_size,
        max_steps=config.max_steps,
        async_generation_ratio=config.async_generation_ratio,
        pipeline_depth=config.pipeline_depth,
        updates_per_sync=config.updates_per_sync,
        staleness_policy=config.staleness_policy,
        staleness_window=derived.staleness_window,
        selection_order=config.selection_order,
        additional_groups=derived.additional_groups,
        redundant_members=derived.members_started - derived.group_size,
        has_greedy_member=ADVANTAGE_TRAITS.get(config.adv_estimator).needs_greedy_member,
        with_reward=config.with_reward,
        filter_zero_variance=derived.filter_zero_variance,
        group_filters=_make_group_filters(config.rewards),
        max_num_gen_batches=config.max_num_gen_batches,
        rollout_scheduling=config.rollout_scheduling,
        is_num_return_sequences_expand=config.is_num_return_sequences_expand,
        env_scheduling=config.env_scheduling,
        enable_dual_buffer=config.enable_dual_buffer,
        hybrid_engine=derived.hybrid_engine,
        save_steps=config.save_steps,
        save_total_limit=config.save_total_limit,
        eval_steps=config.eval_steps,
        val_batch_size=config.val_batch_size or held_out,
        eval_answers=config.validation.generating_args.num_return_sequences or 1,
        eval_at_start=config.eval_at_start,
        eval_sampling=make_sampling_params(config.validation.generating_args, derived.max_new_tokens),
        pause_generation_for_validation=config.pause_generation_for_validation,
        mixed_version_validation=config.validation.mixed_versions,
        rescores_restored=config.accept_changed_reward,
        sampling=make_sampling_params(config.actor_infer.generating_args, derived.max_new_tokens),
        reliability=config.reliability,
        seed=config.seed,
    )


def _make_group_filters(rewards: Mapping[str, RewardConfig]) -> tuple[GroupFilter, ...]:
    filters = []
    for name, reward in rewards.items():
        chosen, labels = reward.query_filter_config, frozenset(reward.tag_included or (name,))
        if chosen.type == "mean_filter":
            low, high = chosen.filter_args.get("threshold_down", -inf), chosen.filter_args.get("threshold_up", inf)
            filters.append(GroupFilter(labels=labels, lowest_mean=low, highest_mean=high))
        elif chosen.type == "std_filter":
            filters.append(GroupFilter(labels=labels, smallest_std=chosen.filter_args.get("std_threshold", -1.0)))
    return tuple(filters)


def make_sampling_params(generating: GeneratingArgs, max_new_tokens: int) -> SamplingParams:
    """Make what engines are told about sampling; `max_new_tokens` applies where the arguments give no limit."""
    return SamplingParams(
        max_new_tokens=generating.max_new_tokens or max_new_tokens,
        temperature=generating.temperature,
        top_p=generating.top_p,
        top_k=generating.top_k,
        min_p=generating.min_p,
        stop=generating.stop,
        guidance=generating.guidance_scale,
    )
