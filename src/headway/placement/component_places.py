"""Give the components of a run their devices: one engine and one trainer rank a device, roles beside or on top of them.

Names are `trainer` (or `trainer/0`, `trainer/1`, … for several ranks), `engine/0`, …, `logp`, `reference`, `critic` and
`reward/<domain>`; `logp`, `reference` and rewards with several devices have a number too. A role without devices of its
own is no component: the trainer does its work.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from headway.config import ResolvedConfig
from headway.config.reward_model_choice import list_served_rewards
from headway.config.strategies import uses_server
from headway.errors import ConfigError
from headway.placement.machine import Machine

Sharing = Literal["alone", "turns", "overlap"]
SCORERS = ("logp", "reference", "critic")
"""Roles that are processes only where they have devices of their own."""


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
    kv_cache_bytes: int | None = None
    """The part of it that is the KV cache of an engine of ours."""
    weight_sets: int | None = None
    """Copies of the weights of an engine of ours; `None`: its memory was not planned."""


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


def make_reward_names(resolved: ResolvedConfig, name: str, devices: int) -> list[str]:
    """Return the names of the processes of a reward's model: one for each of its devices, or group of devices."""
    sizes = resolved.config.rewards[name].strategy_args.strategy_config
    copies = devices // sizes.tensor_model_parallel_size
    return [f"reward/{name}"] if copies <= 1 else [f"reward/{name}/{number}" for number in range(copies)]


def make_scorer_names(resolved: ResolvedConfig, role: str) -> list[str]:
    """Return the names of the processes of `logp` or `reference`: one for each of its devices."""
    count = len(resolved.derived.devices[role])
    return [role] if count == 1 else [f"{role}/{number}" for number in range(count)]


def count_engine_devices(resolved: ResolvedConfig) -> int:
    """Return the devices of one engine: several for servers that share a model, one for engines of our own."""
    sizes = resolved.config.actor_infer.strategy_args.strategy_config
    return sizes.tensor_model_parallel_size * sizes.pipeline_model_parallel_size if uses_server(sizes) else 1


def assign_devices(
    resolved: ResolvedConfig, devices: Mapping[str, tuple[int, ...]], ranks: int, replicas: int
) -> dict[str, tuple[int, ...]]:
    """Return the devices of each component, of those that `devices` gives each role: equal shares, in order.

    A reward model without devices is beside the first engine.
    """
    engines = [f"engine/{number}" for number in range(replicas)]
    most = count_engine_devices(resolved)
    assigned = _share_out(devices["actor_train"], make_rank_names(ranks))
    assigned |= _share_out(devices["actor_infer"], engines, most if most > 1 else None)
    for role in list_scorer_replicas(resolved):
        names = make_scorer_names(resolved, role)[: len(devices[role])]
        assigned |= _share_out(devices[role], names, 1)
    if has_own_critic(resolved):
        assigned["critic"] = tuple(devices["critic"])
    for name in list_served_rewards(resolved.config):
        where = devices.get(f"rewards.{name}", devices["actor_infer"][:1])
        assigned |= _share_out(where, make_reward_names(resolved, name, len(where)))
    return assigned


def _share_out(devices: tuple[int, ...], names: Sequence[str], most: int | None = None) -> dict[str, tuple[int, ...]]:
    """Return equal shares of at most `most` devices; where there are fewer devices than names, names share them."""
    share = min(max(len(devices) // len(names), 1), most or len(devices))
    firsts = [number * share % len(devices) for number in range(len(names))]
    return {name: tuple(devices[first : first + share]) for name, first in zip(names, firsts, strict=True)}


def make_places(
    assigned: Mapping[str, tuple[int, ...]], machine: Machine, threads: Mapping[str, int], *, takes_turns: bool
) -> dict[str, ComponentPlace]:
    """Return the place of every component; those that share a device take turns, or overlap."""
    places = {}
    for name, devices in assigned.items():
        partners = tuple(other for other in assigned if other != name and set(assigned[other]) & set(devices))
        is_reward = name.startswith("reward/")  # it judges at any time
        places[name] = ComponentPlace(
            name=name,
            devices=devices,
            cards=tuple(dict.fromkeys(machine.locate(device) for device in devices)),
            node=devices[0] // machine.devices if devices else 0,
            sharing="alone" if not partners else "turns" if takes_turns and not is_reward else "overlap",
            partners=partners,
            threads=threads.get(name, 1),
        )
    return places


def find_weight_sources(places: Mapping[str, ComponentPlace], ranks: int) -> dict[str, int]:
    """Return the trainer rank that each engine reads versions from; nothing if no engine is on a device of a rank.

    It is the rank on the engine's own device, else one on its card, else rank 0.
    """
    names = make_rank_names(ranks)
    by_device = {device: rank for rank, name in enumerate(names) for device in places[name].devices}
    by_card = {card: rank for rank, name in reversed(list(enumerate(names))) for card in places[name].cards}
    engines = {name: place for name, place in places.items() if name.startswith("engine/") and place.devices}
    if not any(place.devices[0] in by_device for place in engines.values()):
        return {}
    return {name: by_device.get(place.devices[0], by_card.get(place.cards[0], 0)) for name, place in engines.items()}


def count_memory_share(places: Mapping[str, ComponentPlace], machine: Machine, name: str) -> float:
    """Return the share of a GPU that a component may take: all of it, but on a virtual device an equal part.

    It is more than that where the plan of the memory needs more.
    """
    place, on_card = places.get(name), -(-machine.devices // max(machine.gpus, 1))
    if place is None or on_card == 1:
        return 1.0
    equal = 1.0 / (on_card * (1 + len(place.partners)))
    planned = (place.memory_gib or 0.0) / machine.gpu_memory_gib if machine.gpu_memory_gib else 0.0
    return min(max(equal, planned), 1.0)


def share_a_card(places: Mapping[str, ComponentPlace], names: Sequence[str]) -> bool:
    """Return whether two of the components are on one card."""
    cards = [card for name in names if name in places for card in places[name].cards]
    return len(set(cards)) < len(cards)


def let_engines_sleep(places: Mapping[str, ComponentPlace]) -> bool:
    """Return whether engines free their memory while the trainer has its turn."""
    return any(place.sleeps and name.startswith("engine/") for name, place in places.items())


def find_idle_cards(places: Mapping[str, ComponentPlace], machine: Machine) -> tuple[int, ...]:
    """Return the cards that no component uses."""
    used = {card for place in places.values() for card in place.cards}
    return tuple(card for card in range(machine.nodes * machine.gpus) if card not in used)


def format_numbers(numbers: Sequence[int]) -> str:
    """Return numbers in order as text, such as `0–3, 6`."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs)


def check_8_bits(resolved: ResolvedConfig, device: str) -> None:
    """Raise `ConfigError` where engines are to compute in 8 bits on a CPU."""
    served = resolved.config.actor_infer.model_args
    for name in ("dtype", "kv_cache_dtype"):
        if device == "cpu" and getattr(served, name) == "fp8":
            problem = "torch sees no GPU here, and CPUs do not multiply it"
            raise ConfigError(problem, key=f"actor_infer.model_args.{name}", value="fp8", hint="leave it out")
