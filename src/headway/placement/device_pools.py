"""Give the roles of a run devices of the machine that it starts on, whatever number its configuration was written for.

Where a configuration says nothing about devices, all are used: in turns at α = 0, else split as `headway plan`
estimates it. One that only says how many there are gets the same of so many. One that was written for more devices than
there are keeps its roles apart or together, on fewer devices each; the number of ranks divides the one before, so that
batches and parallel sizes still divide. One that names fewer leaves the others idle. Nothing here depends on anything
but configuration and machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations
from math import floor

from headway.config import ResolvedConfig
from headway.config.device_layout import divide_by_ratio
from headway.config.resolved_config import get_at_key
from headway.placement.machine import Machine

DeviceSets = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleDevices:
    """The logical devices of each role: actor_train, actor_infer, logp, reference, critic, and of rewards.<domain>."""

    devices: DeviceSets
    notes: tuple[str, ...] = ()
    """Where they differ from what the configuration says, one line."""


def fit_device_pools(resolved: ResolvedConfig, machine: Machine) -> RoleDevices:
    """Return the devices of each role on this machine."""
    devices, there = resolved.derived.devices, machine.devices * machine.nodes
    said = resolved.provenance.get("num_gpus_per_node", "default")
    if said.startswith("derived: ") and not names_devices(resolved):
        return _use_whole_machine(resolved, there, silent="nothing is said" in said)
    wanted = 1 + max(device for pool in devices.values() for device in pool)
    if not names_devices(resolved) and not resolved.derived.hybrid_engine and resolved.config.use_nodes_ratios is None:
        there = min(there, wanted)
        if set(devices["actor_train"]) & set(devices["actor_infer"]):  # rollout runs ahead: it gets devices of its own
            return _use_whole_machine(resolved, there, silent=True)
    if wanted <= there:
        return RoleDevices(devices=devices)
    fitted = shrink_pools(devices, there)
    pools = f"actor_train {len(devices['actor_train'])} → {len(fitted['actor_train'])}"
    pools += f", actor_infer {len(devices['actor_infer'])} → {len(fitted['actor_infer'])}"
    if there == 1:
        pools = "all roles share it"
    note = f"the configuration is for {wanted} devices and there {'is' if there == 1 else 'are'} {there} here: {pools}"
    return RoleDevices(devices=fitted, notes=(note,))


def names_devices(resolved: ResolvedConfig) -> bool:
    """Return whether any role was given devices by number."""
    roles = [role for role in resolved.derived.devices if role != "logp"]
    return any(get_at_key(resolved.config, f"{role}.device_mapping") is not None for role in roles)


def _use_whole_machine(resolved: ResolvedConfig, there: int, *, silent: bool) -> RoleDevices:
    """Place the roles of a configuration that names no device and no number of devices."""
    config, derived, every = resolved.config, resolved.derived, tuple(range(there))
    if there == 1:
        return RoleDevices(devices=dict.fromkeys(derived.devices, every))
    if config.use_nodes_ratios is not None:
        shares = divide_by_ratio(config.use_nodes_ratios, there)
        if all(shares.values()):
            return RoleDevices(devices={"critic": shares["actor_train"], **shares})
        return RoleDevices(devices=shrink_pools(derived.devices, there))  # too few devices for these shares
    if derived.hybrid_engine:
        note = f"no devices are named: trainer and engines take turns on all {there}"
        return RoleDevices(devices=dict.fromkeys(derived.devices, every), notes=(note,) if silent else ())
    train = there - _choose_generating(resolved, there) if silent else max(1, there // 2)
    note = f"no devices are named: {train} of {there} train and {there - train} generate, as headway plan estimates it"
    devices = dict.fromkeys(derived.devices, every[:train]) | {"actor_infer": every[train:]}
    return RoleDevices(devices=devices, notes=(note,) if silent else ())


def _choose_generating(resolved: ResolvedConfig, there: int) -> int:
    """Return the devices that generate in the split of which `headway plan` expects the shortest step."""
    from headway.sim.planner import choose_split
    from headway.sim.simulated_run import make_scenario

    return choose_split(make_scenario(resolved), there)


def shrink_pools(devices: DeviceSets, there: int) -> dict[str, tuple[int, ...]]:
    """Return pools on `there` devices: roles that share devices still do, and others do not while there are enough.

    Devices with the same roles are a segment. Segments keep their order and their share of the devices, and have at
    least one each. Where there are more segments than devices, scorers move to the trainer, then the smallest merge.
    """
    segments: dict[frozenset[str], int] = {}
    for device in range(1 + max(device for pool in devices.values() for device in pool)):
        if roles := frozenset(role for role, pool in devices.items() if device in pool):
            segments[roles] = segments.get(roles, 0) + 1
    while len(segments) > there:
        _merge_two(segments)
    counts = _round_ranks(segments, _divide(list(segments.values()), there))
    fitted: dict[str, tuple[int, ...]] = dict.fromkeys(devices, ())
    first = 0
    for roles, count in zip(segments, counts, strict=True):
        for role in roles:
            fitted[role] += tuple(range(first, first + count))
        first += count
    return fitted


def _round_ranks(segments: Mapping[frozenset[str], int], counts: list[int]) -> list[int]:
    """Lower the trainer's share to a divisor of what it was, if engines have a segment that takes the rest."""
    roles = list(segments)
    train = [place for place, names in enumerate(roles) if "actor_train" in names]
    takers = [place for place, names in enumerate(roles) if "actor_infer" in names and "actor_train" not in names]
    if len(train) != 1 or not takers:
        return counts
    before, given = segments[roles[train[0]]], counts[train[0]]
    ranks = max(number for number in range(1, given + 1) if before % number == 0)
    rounded = list(counts)
    rounded[train[0]], rounded[takers[0]] = ranks, counts[takers[0]] + given - ranks
    return rounded


def _merge_two(segments: dict[frozenset[str], int]) -> None:
    """Merge the two segments that are missed least: none that keep trainer and engines apart, if there are others."""
    actors = {"actor_train", "actor_infer"}
    order = list(segments)

    def rank_pair(pair: tuple[frozenset[str], frozenset[str]]) -> tuple[bool, bool, int, int]:
        one, other = (roles & actors for roles in pair)
        joins_actors = bool(one and other and one != other)
        return (
            joins_actors,
            "actor_train" not in one | other,
            sum(map(segments.__getitem__, pair)),
            order.index(pair[0]),
        )

    one, other = min(combinations(segments, 2), key=rank_pair)
    merged = {(one | other if roles == one else roles): count for roles, count in segments.items() if roles != other}
    merged[one | other] = segments[one] + segments[other]
    segments.clear()
    segments.update(merged)


def _divide(counts: list[int], total: int) -> list[int]:
    """Divide `total` in proportion to `counts`, at least 1 each; what is left goes to those that miss most."""
    whole = sum(counts)
    given = [max(1, floor(count * total / whole)) for count in counts]
    while sum(given) > total:
        given[given.index(max(given))] -= 1
    rests = sorted(range(len(counts)), key=lambda place: (given[place] - counts[place] * total / whole, place))
    for place in rests[: total - sum(given)]:
        given[place] += 1
    return given
