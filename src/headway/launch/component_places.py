"""Give the components of a run their devices: one engine and one trainer rank a device, roles beside or on top of them.

Names are `trainer` (or `trainer/0`, `trainer/1`, … for several ranks), `engine/0`, …, `logp`, `reference`, `critic` and
`reward/<domain>`; `logp`, `reference` and rewards with several devices have a number too. A role without devices of its
own is no component: the trainer does its work.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from headway.config import ResolvedConfig
from headway.config.reward_model_choice import list_served_rewards
from headway.launch.machine import Machine

Sharing = Literal["alone", "turns", "overlap"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ComponentPlace:
    """Where one component lives."""

    name: str
    devices: tuple[int, ...]
    """Logical devices, numbered through all nodes."""
    cards: tuple[int, ...]
    """Physical cards of those devices; on a CPU the number of the node."""
    node: int = 0
    sharing: Sharing = "alone"
    """`turns`: it shares its devices and works only while the others wait. `overlap`: it shares them at any time."""
    partners: tuple[str, ...] = ()
    """Components that have one of its devices too."""
    sleeps: bool = False
    """Whether its memory leaves the card while a partner has its turn."""
    threads: int = 1
    memory_gib: float | None = None
    """Memory that it may take on each of its devices; `None`: nothing is known about the card or the model."""


def make_rank_names(ranks: int) -> list[str]:
    """Return the names of the trainer's processes."""
    return ["trainer"] if ranks == 1 else [f"trainer/{rank}" for rank in range(ranks)]


def has_own_replica(resolved: ResolvedConfig, role: str) -> bool:
    """Return whether `logp`, `reference` or `critic` was given devices that the trainer does not have."""
    devices: Mapping[str, tuple[int, ...]] = resolved.derived.devices
    return not set(devices[role]) & set(devices["actor_train"])


def list_scorer_replicas(resolved: ResolvedConfig) -> list[str]:
    """Return the scorers that the run needs and that have devices of their own: `logp`, `reference`."""
    derived = resolved.derived
    if derived.pipeline == "denoising":
        return []
    needed = {"logp": derived.needs_proximal, "reference": derived.needs_reference}
    return [role for role, wanted in needed.items() if wanted and has_own_replica(resolved, role)]


def has_own_critic(resolved: ResolvedConfig) -> bool:
    """Return whether the critic of the run has devices, and so a process, of its own."""
    derived = resolved.derived
    return derived.needs_critic and derived.pipeline != "denoising" and has_own_replica(resolved, "critic")


def make_reward_names(resolved: ResolvedConfig, name: str) -> list[str]:
    """Return the names of the processes of a reward's model: one for each device, or group of devices, it has."""
    sizes = resolved.config.rewards[name].strategy_args.strategy_config
    copies = len(resolved.derived.devices.get(f"rewards.{name}", (0,))) // sizes.tensor_model_parallel_size
    return [f"reward/{name}"] if copies <= 1 else [f"reward/{name}/{number}" for number in range(copies)]


def make_scorer_names(resolved: ResolvedConfig, role: str) -> list[str]:
    """Return the names of the processes of `logp` or `reference`: one for each of its devices."""
    count = len(resolved.derived.devices[role])
    return [role] if count == 1 else [f"{role}/{number}" for number in range(count)]


def _assign_rewards(resolved: ResolvedConfig) -> dict[str, tuple[int, ...]]:
    """Return the devices of reward models; one without any is beside the first engine."""
    assigned: dict[str, tuple[int, ...]] = {}
    devices = resolved.derived.devices
    for name in list_served_rewards(resolved.config):
        own, names = devices.get(f"rewards.{name}", devices["actor_infer"][:1]), make_reward_names(resolved, name)
        share = max(len(own) // len(names), 1)
        assigned |= {one: tuple(own[number * share : (number + 1) * share]) for number, one in enumerate(names)}
    return assigned


def assign_devices(resolved: ResolvedConfig, ranks: int, replicas: int | None = None) -> dict[str, tuple[int, ...]]:
    """Return the devices of each component by their numbers in the run: equal shares, in order.

    `replicas` are the engines, by default those of the configuration.
    """
    derived, devices = resolved.derived, resolved.derived.devices
    engines = [f"engine/{number}" for number in range(replicas or derived.replicas)]
    assigned: dict[str, tuple[int, ...]] = {}
    for role, names in (("actor_train", make_rank_names(ranks)), ("actor_infer", engines)):
        share = max(len(devices[role]) // len(names), 1)
        for number, name in enumerate(names):
            assigned[name] = tuple(devices[role][number * share : (number + 1) * share])
    for role in list_scorer_replicas(resolved):
        assigned |= {name: (one,) for name, one in zip(make_scorer_names(resolved, role), devices[role], strict=True)}
    if has_own_critic(resolved):
        assigned["critic"] = tuple(devices["critic"])
    return assigned | _assign_rewards(resolved)


def make_places(
    assigned: Mapping[str, tuple[int, ...]], machine: Machine, threads: Mapping[str, int], *, takes_turns: bool
) -> dict[str, ComponentPlace]:
    """Return the place of every component; those that share a device take turns, or overlap."""
    places = {}
    for name, devices in assigned.items():
        partners = tuple(other for other in assigned if other != name and set(assigned[other]) & set(devices))
        places[name] = ComponentPlace(
            name=name,
            devices=devices,
            cards=tuple(dict.fromkeys(machine.locate(device) for device in devices)),
            node=devices[0] // machine.devices if devices else 0,
            sharing="alone" if not partners else "turns" if takes_turns else "overlap",
            partners=partners,
            threads=threads.get(name, 1),
        )
    return places


def find_idle_cards(places: Mapping[str, ComponentPlace], machine: Machine) -> tuple[int, ...]:
    """Return the cards that no component uses."""
    used = {card for place in places.values() for card in place.cards}
    return tuple(card for card in range(machine.nodes * machine.gpus) if card not in used)
