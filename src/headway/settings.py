"""What the scheduler needs to know, and nothing else.

`build` derives it from the configuration; tests and the simulator may also make it directly. Checked when made.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import floor
from typing import Literal

from headway.config.config_blocks import ReliabilityConfig as Reliability
from headway.config.derivation import count_slots
from headway.errors import ConfigError
from headway.types import SamplingParams

__all__ = ["Reliability", "RunSettings"]

_NOT_NEGATIVE = (
    *("alpha", "window", "spare_groups", "spare_members", "max_gen_batches"),
    *("save_steps", "keep_checkpoints", "eval_steps"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """Sizes, staleness and order of one run."""

    groups_per_step: int
    """B: groups that one training step consumes."""
    group_size: int = 1
    """Members of a group."""
    max_steps: int = 1
    alpha: float = 0.0
    """Staleness bound: a sample is trained only while `trained − oldest ≤ alpha`."""
    depth: float | None = None
    """How many steps rollout runs ahead; `None`: as far as the bound allows."""
    policy: Literal["drop", "wait", "window"] = "drop"
    window: int = 0
    """`window` policy: how many groups, in the order they started, a batch may be chosen from. 0: two batches."""
    order: Literal["freshest", "oldest"] = "freshest"
    spare_groups: int = 0
    """Redundant prompts in flight; the surplus is cancelled once a batch is full."""
    spare_members: int = 0
    """Redundant members of a group; the surplus is cancelled once the group is full."""
    with_reward: bool = True
    """Score a sample the moment it ends, not when its group reaches the reward stage."""
    filter_zero_variance: bool = True
    max_gen_batches: int = 0
    """Batches' worth of groups that one step may cost where groups without spread are replaced; 0: any number."""
    scheduling: Literal["queue", "batch"] = "queue"
    """`batch`: start groups a whole batch at a time and wait for all of it, as naive systems do."""
    replicate: bool = True
    """Members of a group are placed independently; otherwise they all go to one replica."""
    turn_barrier: bool = False
    """All episodes wait for each other after every turn, as naive systems do."""
    dual_buffer: bool = True
    """Load the next version while generating; otherwise pause, load, resume."""
    colocated: bool = False
    """Trainer and engines share devices and take turns."""
    save_steps: int = 0
    """Checkpoint every so many steps; 0: only at the end and at a clean stop."""
    keep_checkpoints: int = 0
    """Whole checkpoints that are kept, the newest ones; 0: all."""
    eval_steps: int = 0
    eval_tasks: int = 0
    eval_answers: int = 1
    """To each task of a validation."""
    eval_at_start: bool = False
    """Validate the policy of the start before anything is trained."""
    eval_sampling: SamplingParams | None = None
    """How validation draws; `None`: as training does."""
    pause_generation_for_validation: bool = False
    sampling: SamplingParams = field(default_factory=SamplingParams)
    reliability: Reliability = field(default_factory=Reliability)
    seed: int = 0

    def __post_init__(self) -> None:
        for key in ("groups_per_step", "group_size", "max_steps"):
            if getattr(self, key) < 1:
                raise ConfigError("must be at least 1", key=key, value=getattr(self, key))
        for key in _NOT_NEGATIVE:
            if getattr(self, key) < 0:
                raise ConfigError("must not be negative", key=key, value=getattr(self, key))
        if self.depth is not None and not 0 <= self.depth <= self.alpha:
            raise ConfigError(f"must lie in [0, alpha = {self.alpha}]", key="depth", value=self.depth)
        if 0 < self.window < self.groups_per_step:
            raise ConfigError(f"smaller than one batch of {self.groups_per_step}", key="window", value=self.window)

    @property
    def bound(self) -> int:
        """The largest lag that `alpha` allows; lags are whole."""
        return floor(self.alpha)

    @property
    def pipeline_depth(self) -> float:
        """`depth`, or as deep as the bound."""
        return self.alpha if self.depth is None else self.depth

    @property
    def slots(self) -> int:
        """Groups that may be outstanding, spares not counted."""
        return count_slots(self.pipeline_depth, self.groups_per_step)
