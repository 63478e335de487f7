"""Ways to hurt a run, each one entry: what the run is made of, and whom the signal hits.

A new way is a `FaultKind` in `FAULT_KINDS`. `victim` is asked at the moment of the kill; `None` there means that nobody of that
kind is alive right now (it is being restarted), and the kill waits for one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from random import Random

from benchmarks.chaos.fault_runs import Run, children, parent
from benchmarks.chaos.fault_stages import Stage, nothing, ray_nodes

Victim = Callable[[Run, Random, Stage], tuple[str, list[int]] | None]
"""Name and processes of whom to kill."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultKind:
    """One way."""

    name: str
    victim: Victim
    options: Mapping[str, object] = field(default_factory=dict)
    """Of the run, beyond the usual ones."""
    resumes: bool = False
    """The run ends with the victim and is begun again with `--resume`."""
    scales_to: int = 0
    """Engines that `headway scale` is asked for at the first step; 0: it is not asked."""
    stage: Callable[[], AbstractContextManager[Stage]] = nothing
    needs: str = ""
    """A module without which the kind is left out."""


def part(*prefixes: str) -> Victim:
    """One of the run's own processes whose log is called so."""

    def choose(run: Run, dice: Random, stage: Stage) -> tuple[str, list[int]] | None:
        there = sorted((name, pid) for name, pid in run.parts().items() if name.startswith(prefixes))
        if not there:
            return None
        name, pid = dice.choice(there)
        return name, [pid]

    return choose


def controller(run: Run, dice: Random, stage: Stage) -> tuple[str, list[int]] | None:
    """`headway train` itself."""
    return "controller", [run.pid]


def node(run: Run, dice: Random, stage: Stage) -> tuple[str, list[int]] | None:
    """A node of the cluster with a part of the run on it, all its processes; the head is not replaced: it is spared."""
    there = sorted((name, parent(pid)) for name, pid in run.parts().items() if parent(pid) in stage.raylets)
    if not there:
        return None
    name, raylet = dice.choice(there)
    return f"node of {name}", [raylet, *children(raylet)]


ONE_ENGINE = {"num_gpus_per_node": 2, "actor_infer.device_mapping": "[1]"}
TWO_RANKS = {
    "actor_train.device_mapping": "[0,1]",
    "actor_infer.device_mapping": "[2]",
    "actor_train.training_args.per_device_train_batch_size": 2,
}
FAULT_KINDS = (
    FaultKind(name="engine", victim=part("engine-")),
    FaultKind(name="trainer", victim=part("trainer")),
    FaultKind(name="controller", victim=controller, resumes=True),
    FaultKind(name="newcomer", victim=part("engine-2", "engine-3"), scales_to=4),
    FaultKind(name="lent engine", victim=part("engine-lent"), options={**ONE_ENGINE, "lend_idle_trainer": "true"}),
    FaultKind(name="rank", victim=part("trainer-"), options=TWO_RANKS, needs="headway.launch.placement"),
    FaultKind(name="node", victim=node, stage=ray_nodes, needs="ray"),
    FaultKind(name="node with ranks", victim=node, options=TWO_RANKS, stage=ray_nodes, needs="ray"),
    FaultKind(name="driver", victim=controller, resumes=True, stage=ray_nodes, needs="ray"),
)
