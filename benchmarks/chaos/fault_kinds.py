"""Kinds of faults: the configuration of the run, and the process that is killed.

A new kind is a `FaultKind` in `FAULT_KINDS`. `select_victim` is called at the moment of the kill. It returns `None` if
no such process is alive right now, because it is being restarted; the kill then waits for one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from random import Random
from typing import Any

from benchmarks.chaos.fault_moments import AwaitMoment, await_checkpoint, await_random_step, await_resumption
from benchmarks.chaos.fault_platforms import RunPlatform, start_ray_cluster, use_local_machine
from benchmarks.chaos.fault_runs import ChaosRun, find_descendants, find_parent

SelectVictim = Callable[[ChaosRun, Random, RunPlatform], tuple[str, list[int]] | None]
"""Returns the name and the process ids of the victim."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultKind:
    """One kind of fault."""

    name: str
    select_victim: SelectVictim
    moments: tuple[AwaitMoment, ...] = (await_random_step,)
    """When to kill, one after the other."""
    options: Mapping[str, object] = field(default_factory=dict)
    """Configuration of the run, besides the usual one."""
    resumes: bool = False
    """Whether the run ends with each victim and is started again with `--resume`."""
    scales_to: int = 0
    """Number of engines to scale to at the first step; 0: do not scale."""
    make_platform: Callable[[], AbstractContextManager[RunPlatform]] = use_local_machine
    needs: str = ""
    """Module without which the kind is skipped."""


def select_component(*prefixes: str) -> SelectVictim:
    """Select one of the run's processes by the name of its log."""

    def choose(run: ChaosRun, dice: Random, platform: RunPlatform) -> tuple[str, list[int]] | None:
        alive = sorted((name, pid) for name, pid in run.list_components().items() if name.startswith(prefixes))
        if not alive:
            return None
        name, pid = dice.choice(alive)
        return name, [pid]

    return choose


def select_controller(run: ChaosRun, dice: Random, platform: RunPlatform) -> tuple[str, list[int]] | None:
    """Select `headway train` itself."""
    return "controller", [run.pid]


def select_controller_and_trainer(run: ChaosRun, dice: Random, platform: RunPlatform) -> tuple[str, list[int]] | None:
    """Select `headway train` and its trainer, if that has started."""
    trainer = run.list_components().get("trainer")
    return "controller and trainer", [run.pid, *([] if trainer is None else [trainer])]


def select_node(run: ChaosRun, dice: Random, platform: RunPlatform) -> tuple[str, list[int]] | None:
    """Select all processes of a cluster node that runs a component, but not the head node."""
    alive = sorted(
        (name, find_parent(pid)) for name, pid in run.list_components().items() if find_parent(pid) in platform.raylets
    )
    if not alive:
        return None
    name, raylet = dice.choice(alive)
    return f"node of {name}", [raylet, *find_descendants(raylet)]


ONE_ENGINE = {"num_gpus_per_node": 2, "actor_infer.device_mapping": "[1]"}
TWO_RANKS = {
    "actor_train.device_mapping": "[0,1]",
    "actor_infer.device_mapping": "[2]",
    "actor_train.training_args.per_device_train_batch_size": 2,
}
RESUMED: dict[str, Any] = {"resumes": True, "options": {**ONE_ENGINE, "async_generation_ratio": 2}}
IN_ONE_PROCESS: dict[str, Any] = {"resumes": True, "options": {**RESUMED["options"], "processes": "false"}}
FAULT_KINDS = (
    FaultKind(name="engine", select_victim=select_component("engine-")),
    FaultKind(name="trainer", select_victim=select_component("trainer")),
    FaultKind(name="controller", select_victim=select_controller, resumes=True),
    FaultKind(name="twice", select_victim=select_controller, moments=(await_random_step,) * 2, **IN_ONE_PROCESS),
    FaultKind(name="checkpoint", select_victim=select_controller, moments=(await_checkpoint,) * 2, **RESUMED),
    FaultKind(
        name="resume",
        select_victim=select_controller,
        moments=(await_random_step, await_resumption, await_resumption),
        **IN_ONE_PROCESS,
    ),
    FaultKind(
        name="together",
        select_victim=select_controller_and_trainer,
        moments=(await_random_step, await_checkpoint, await_resumption),
        **RESUMED,
    ),
    FaultKind(name="newcomer", select_victim=select_component("engine-2", "engine-3"), scales_to=4),
    FaultKind(
        name="lent engine",
        select_victim=select_component("engine-lent"),
        options={**ONE_ENGINE, "lend_idle_trainer": "true"},
    ),
    FaultKind(name="rank", select_victim=select_component("trainer-"), options=TWO_RANKS),
    FaultKind(name="node", select_victim=select_node, make_platform=start_ray_cluster, needs="ray"),
    FaultKind(
        name="node with ranks",
        select_victim=select_node,
        options=TWO_RANKS,
        make_platform=start_ray_cluster,
        needs="ray",
    ),
    FaultKind(
        name="driver", select_victim=select_controller, resumes=True, make_platform=start_ray_cluster, needs="ray"
    ),
)
