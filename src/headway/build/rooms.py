"""What each part of a run is given on a cluster, from `device_mapping`, `use_nodes_ratios` and `num_gpus_per_node`.

A device is a GPU where models run on GPUs, else a CPU slot. Parts that share a GPU have equal shares of it. The number
of a part's first device says on which node of the run it is; ranks of a trainer are parts, and may be on several.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

from headway.build.sharding import rank_devices
from headway.cluster.ray.rooms import Node, Room
from headway.config import Resolved
from headway.errors import ConfigError

_SCORERS = ("logp", "reference")


def own_replica(resolved: Resolved, role: str) -> bool:
    """Whether `logp` or `reference` was given devices that the trainer does not have."""
    devices: Mapping[str, tuple[int, ...]] = resolved.derived.devices
    return not set(devices[role]) & set(devices["actor_train"])


def device_of(resolved: Resolved, nodes: Sequence[Node]) -> Literal["cpu", "cuda"]:
    """What models run on there. Raises `ConfigError`."""
    wanted, gpus = resolved.config.device, sum(node.gpus for node in nodes)
    if wanted == "cuda" and not gpus:
        raise ConfigError("the Ray cluster has no GPU", key="device", value=wanted, hint="cpu, or auto")
    return "cuda" if gpus and wanted != "cpu" else "cpu"


def rooms_of(resolved: Resolved, device: Literal["cpu", "cuda"], ranks: int) -> dict[str, Room]:
    """By the name of the part. Raises `ConfigError` for parts that would need several GPUs."""
    held = devices_of_parts(resolved, ranks)
    if device == "cuda":
        _check_single(resolved, held)
    sharing = Counter(devices[0] for devices in held.values())
    per_node = resolved.derived.num_gpus_per_node
    rooms = {}
    for name, devices in held.items():
        room = Room(node=devices[0] // per_node, cpus=threads_of(resolved, name, len(devices), device))
        rooms[name] = replace(room, gpus=round(1 / sharing[devices[0]], 4)) if device == "cuda" else room
    return rooms


def threads_of(resolved: Resolved, name: str, devices: int, device: Literal["cpu", "cuda"]) -> int:
    """CPU threads of a part: as many as it was told, else as it has slots."""
    role = resolved.config.actor_infer if name.startswith("engine/") else resolved.config.actor_train
    return role.strategy_args.strategy_config.num_threads or (devices if device == "cpu" else 1)


def devices_of_parts(resolved: Resolved, ranks: int) -> dict[str, tuple[int, ...]]:
    """Numbers of the run's devices, by the name of the part."""
    devices, derived = resolved.derived.devices, resolved.derived
    found = rank_devices(resolved, ranks)
    each = len(devices["actor_infer"]) // derived.replicas
    for number in range(derived.replicas):
        found[f"engine/{number}"] = tuple(devices["actor_infer"][number * each : (number + 1) * each])
    if derived.pipeline == "generative":
        return found
    needed = {"logp": derived.needs_proximal, "reference": derived.needs_reference}
    return found | {role: tuple(devices[role]) for role in _SCORERS if needed[role] and own_replica(resolved, role)}


def _check_single(resolved: Resolved, held: Mapping[str, tuple[int, ...]]) -> None:
    if len(held["engine/0"]) > 1:
        raise ConfigError(
            "an engine of this build is on one GPU",
            key="actor_infer.device_mapping",
            value=list(resolved.derived.devices["actor_infer"]),
            hint="as many GPUs as engines, without tensor parallelism",
        )
