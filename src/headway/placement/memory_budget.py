"""Divide the memory of each card among the components on it, before anything is started.

The trainer gets what a step needs; its moments live in the memory of the host where a step would not fit otherwise.
Engines get their weights, and the KV cache gets what is left: at most what all requests in flight can fill, at least
the longest sequence. Engines have two sets of weights, or one where two leave little room: then decoding stops while a
version arrives.
`gpu_memory_utilization` bounds cache and served weights together, as in vLLM.

Components that take turns keep everything on the card if that leaves room for the cache; else engines sleep during a
step, and if that is not enough the trainer's moments leave the card. What does not fit is refused in one line.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from headway.config import ResolvedConfig
from headway.errors import ConfigError
from headway.placement.component_places import ComponentPlace
from headway.placement.machine import Machine
from headway.placement.memory_model import (
    GIB,
    HOST,
    MAX_SLOTS,
    WEIGHT_SETS,
    MemoryModel,
    divide_rest_among_judges,
)

_USABLE_SHARE = 0.95
"""Share of a card that is planned with; the rest is for fragments, and for what an estimate misses."""
_ROOMY_SHARE = 0.3
"""Share of a card that is room enough for a cache, so that nobody needs to sleep."""
_MOST_RANKS = 4096
_OFFLOAD_KEY = "actor_train.training_args.offload_optimizer"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBudget:
    """Who may take how much memory."""

    places: Mapping[str, ComponentPlace]
    """The same components, with their memory."""
    peaks_gib: Mapping[int, float]
    """Most memory that is in use at once, by card."""
    needs: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Bytes of each component on a card of its own, by purpose."""
    sequences: int = 0
    """Sequences of full length that run at once on one engine; 0: not known."""
    wanted_sequences: int = 0
    """Requests in flight that each engine has at most."""
    engines_sleep: bool = False
    offloads: bool = False
    """Whether the moments of the trainer live in the memory of the host."""
    notes: tuple[str, ...] = ()
    """What was given up for want of memory, a sentence each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sharing:
    """How components get by with the memory of a device."""

    weight_sets: int = WEIGHT_SETS
    engines_sleep: bool = False
    offloads: bool = False
    """Whether the moments of the trainer live in the memory of the host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _DeviceNeeds:
    """Bytes on one device: what stays, and what a step, the moments and an engine need beside it."""

    stays: int
    step: int
    moments: int
    libraries: int
    """Bytes of the libraries of the engine, or all of a server."""
    weights: int
    """Bytes of one set of the engine's weights."""

    def count_training(self, how: _Sharing) -> int:
        """Return the bytes during a step, without the engine."""
        return self.stays + self.step + (0 if how.offloads else self.moments)

    def count_engine(self, how: _Sharing) -> int:
        """Return the bytes of the engine, without its cache."""
        return self.libraries + how.weight_sets * self.weights

    def count_without_cache(self, how: _Sharing) -> int:
        """Return the most bytes that are in use while the engine has its cache."""
        idle = self.stays + (0 if how.offloads else self.moments)
        return (idle if how.engines_sleep else self.count_training(how)) + self.count_engine(how)


def choose_weight_sets(resolved: ResolvedConfig, place: ComponentPlace | None) -> int:
    """Return the copies of its weights that an engine of ours has: as planned, or as `enable_dual_buffer` says."""
    planned = None if place is None else place.weight_sets
    return planned or (WEIGHT_SETS if resolved.config.enable_dual_buffer else 1)


def budget_memory(
    places: Mapping[str, ComponentPlace], machine: Machine, model: MemoryModel, *, served: bool = False
) -> MemoryBudget:
    """Return the memory of every component. Raises `ConfigError` where it is not enough.

    `served`: engines are vLLM or SGLang, which take a share of their cards and manage it themselves.
    """
    memory = int(machine.device_memory_gib * GIB * _USABLE_SHARE)
    devices = sorted({device for place in places.values() for device in place.devices})
    on_device = {device: [place for place in places.values() if device in place.devices] for device in devices}
    wanted = _count_wanted_sequences(places, model)
    plans = {device: _plan_device(model, memory, on_device[device], wanted, served=served) for device in devices}
    caches = [plan.kv_bytes for plan in plans.values() if plan.kv_bytes is not None]
    how, kv_bytes = _join_sharing(list(plans.values())), min(caches, default=0)
    used = {device: plan.count_used(how, kv_bytes) for device, plan in plans.items()}
    judges = divide_rest_among_judges(model, places, {device: memory - size for device, size in used.items()})
    budgeted, needs = {}, {}
    for name, place in places.items():
        is_engine = name.startswith("engine/") and not served
        found = _estimate(model, place, how, served=served, memory=memory)
        found["KV"] = found.get("KV", 0) + (kv_bytes if is_engine else judges.get(name, 0))
        needs[name] = {purpose: size for purpose, size in found.items() if size and not purpose.startswith(HOST)}
        budgeted[name] = replace(
            place,
            memory_gib=_count_gpu_bytes(found) / GIB if place.devices else None,
            kv_cache_bytes=found["KV"] or None,
            weight_sets=how.weight_sets if is_engine else None,
            sleeps=how.engines_sleep if name.startswith("engine/") else how.offloads and name.startswith("trainer"),
        )
    peaks = dict.fromkeys((card for place in places.values() for card in place.cards), 0.0)
    for device, size in used.items():
        here = sum(judges.get(place.name, 0) for place in on_device[device])
        peaks[machine.locate(device)] += (size + here) / GIB
    tokens = kv_bytes // model.kv_bytes_per_token if model.kv_bytes_per_token else 0
    sequences = min(tokens // model.resolved.derived.sequence_length, wanted)
    notes = _explain_sharing(model, how, list(plans.values()))
    if caches and 2 * sequences < wanted:
        notes += _explain_small_cache(
            model, memory, [plan.needs for plan in plans.values() if plan.kv_bytes is not None]
        )
    return MemoryBudget(
        places=budgeted,
        peaks_gib=peaks,
        needs=needs,
        sequences=sequences,
        wanted_sequences=wanted,
        engines_sleep=how.engines_sleep,
        offloads=how.offloads,
        notes=tuple(notes),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _DevicePlan:
    needs: _DeviceNeeds
    how: _Sharing
    kv_bytes: int | None = None
    """Memory of the KV cache; `None`: no engine of ours is here."""
    takes_turns: bool = False

    def count_used(self, how: _Sharing, kv_bytes: int) -> int:
        """Return the most bytes that are in use at once."""
        training = self.needs.count_training(how)
        if self.kv_bytes is None and not how.engines_sleep:  # a server is here, or no engine
            return training + self.needs.libraries
        asleep, cache = (0, 0) if self.kv_bytes is None else (self.needs.libraries, kv_bytes)
        return max(training + asleep, self.needs.count_without_cache(how) + cache)


def _join_sharing(plans: list[_DevicePlan]) -> _Sharing:
    """Return one way for all devices: engines are equal and so are ranks, so the fullest device decides."""
    return _Sharing(
        weight_sets=min((plan.how.weight_sets for plan in plans if plan.kv_bytes is not None), default=WEIGHT_SETS),
        engines_sleep=any(plan.how.engines_sleep for plan in plans),
        offloads=any(plan.how.offloads for plan in plans),
    )


def _explain_sharing(model: MemoryModel, how: _Sharing, plans: list[_DevicePlan]) -> list[str]:
    """Return a sentence on each thing that is given up for want of memory."""
    notes = []
    if how.offloads:
        size = model.ranks * model.estimate_rank(0).get("optimizer", 0) / GIB
        notes.append(f"the optimizer's state, {size:.1f} GiB, lives in the memory of the host: the GPUs have no room")
    apart = any(plan.kv_bytes is not None and not plan.takes_turns for plan in plans)
    if apart and how.weight_sets == 1 and model.resolved.config.enable_dual_buffer:
        notes.append("engines stop while a version arrives: there is no room for it beside the one that they serve")
    return notes


def _explain_small_cache(model: MemoryModel, memory: int, needs: list[_DeviceNeeds]) -> list[str]:
    """Return what would let more sequences run at once: a larger share of the card, or weights that are cut."""
    sizes, weights = model.resolved.config.actor_infer.strategy_args.strategy_config, max(one.weights for one in needs)
    free = min(memory - one.stays - one.step - one.moments - WEIGHT_SETS * one.weights for one in needs)
    cache = _count_share(model, memory) - weights
    if 0 < 2 * cache < free:
        return [
            f"gpu_memory_utilization = {sizes.gpu_memory_utilization:g} bounds the KV cache: there is room for more"
        ]
    if 2 * weights > memory:
        return ["the weights fill most of a card: vllm or sglang with launch: true cut them over several"]
    return []


def _plan_device(
    model: MemoryModel, memory: int, here: list[ComponentPlace], wanted: int, *, served: bool
) -> _DevicePlan:
    """Decide who sleeps, and what is left for the KV cache. Raises `ConfigError`."""
    needs, engine, plain = _measure(model, here, served=served, memory=memory), _find_engine(here), _Sharing()
    may_offload = needs.moments > 0 and model.resolved.provenance.get(_OFFLOAD_KEY, "default") == "default"
    room = memory if engine is None or served else memory - needs.libraries  # an engine asleep keeps them
    if needs.count_training(plain) > room and may_offload:
        plain = replace(plain, offloads=True)
    if needs.count_training(plain) > room:
        raise _make_training_error(model, memory, here, needs)
    if engine is None:
        return _DevicePlan(needs=needs, how=plain)
    if served:
        card = memory / _USABLE_SHARE
        fits = needs.count_training(plain) + needs.libraries <= card
        plan = _DevicePlan(needs=needs, how=replace(plain, engines_sleep=not fits))
        if not fits and (engine.sharing != "turns" or plan.count_used(plan.how, 0) > card):
            raise _make_share_error(model, memory, needs)
        return plan
    turns = engine.sharing == "turns"
    longest = model.resolved.derived.sequence_length * model.kv_bytes_per_token
    most = min(
        _count_share(model, memory) - _count_served_weights(model, needs), (wanted + max(wanted // 8, 1)) * longest
    )
    best: tuple[int, _Sharing] | None = None
    ways = _list_ways(model, plain, turns=turns, may_offload=may_offload)
    if most < longest <= memory - needs.count_without_cache(ways[-1]):
        raise _make_small_share_error(model, memory, _count_served_weights(model, needs) + longest)
    for how in ways:
        cache = min(memory - needs.count_without_cache(how), most)
        if cache >= min(most, int(_ROOMY_SHARE * memory)) and cache >= longest:
            best = cache, how
            break
        if best is None or cache >= best[0] + longest or best[0] < longest <= cache:
            best = cache, how  # what costs more time has to give room for one more sequence
    if best is None or best[0] < longest or best[0] <= 0:
        raise _make_engine_error(model, memory, here, needs, longest)
    return _DevicePlan(needs=needs, how=best[1], kv_bytes=best[0], takes_turns=turns)


def _list_ways(model: MemoryModel, plain: _Sharing, *, turns: bool, may_offload: bool) -> list[_Sharing]:
    """Return the ways to share a device, those that cost least time first."""
    sets = range(WEIGHT_SETS, 0, -1) if model.resolved.config.enable_dual_buffer else (1,)
    awake = [replace(plain, weight_sets=number) for number in sets]
    if not turns:
        return awake
    asleep = replace(plain, weight_sets=1, engines_sleep=True)
    return [*awake, asleep, *([replace(asleep, offloads=True)] if may_offload and not plain.offloads else [])]


def _measure(model: MemoryModel, here: list[ComponentPlace], *, served: bool, memory: int) -> _DeviceNeeds:
    """Return the bytes of all components of one device."""
    stays = step = moments = libraries = weights = 0
    for place in here:
        needs = _estimate(model, place, _Sharing(weight_sets=1), served=served, memory=memory)
        whole = _count_gpu_bytes(needs)
        if place.name.startswith("engine/"):
            weights += needs.get("weights", 0)
            libraries += whole - needs.get("weights", 0)
        elif place.name.startswith("trainer"):
            moments += needs.get("optimizer", 0)
            step += needs.get("gradients", 0) + needs.get("activations", 0)
            stays += whole - needs.get("optimizer", 0) - needs.get("gradients", 0) - needs.get("activations", 0)
        else:
            stays += whole
    return _DeviceNeeds(stays=stays, step=step, moments=moments, libraries=libraries, weights=weights)


def _estimate(model: MemoryModel, place: ComponentPlace, how: _Sharing, *, served: bool, memory: int) -> dict[str, int]:
    """Return the needs of one component on one of its devices; those of an engine without its cache."""
    libraries = model.estimate_libraries()
    if place.name.startswith("trainer"):
        number = int(place.name.partition("/")[2] or 0)
        needs = {**model.estimate_rank(number), **model.estimate_activations(), **libraries}
        if how.offloads:
            needs.pop("optimizer", 0)
        return needs
    if place.name.startswith("engine/"):
        if served:
            return {"share of the card": _count_share(model, memory)}
        return {**model.estimate_engine(weight_sets=how.weight_sets), **(libraries if model.processes else {})}
    if place.name.startswith("reward/"):
        return {**model.estimate_reward(place.name.split("/")[1], max(len(place.devices), 1)), **libraries}
    return {**model.estimate_scorer(place.name.partition("/")[0]), **libraries}


def _count_share(model: MemoryModel, memory: int) -> int:
    """Return the bytes that `gpu_memory_utilization` gives to an engine."""
    share = model.resolved.config.actor_infer.strategy_args.strategy_config.gpu_memory_utilization
    return int(share * memory / _USABLE_SHARE)


def _count_served_weights(model: MemoryModel, needs: _DeviceNeeds) -> int:
    """Return the part of an engine's share that its weights were meant to take: cut by a tensor-parallel size."""
    sizes = model.resolved.config.actor_infer.strategy_args.strategy_config
    return needs.weights // (sizes.tensor_model_parallel_size * sizes.pipeline_model_parallel_size)


def _count_gpu_bytes(needs: Mapping[str, int]) -> int:
    return sum(size for purpose, size in needs.items() if not purpose.startswith(f"{HOST}:"))


def _find_engine(here: list[ComponentPlace]) -> ComponentPlace | None:
    return next((place for place in here if place.name.startswith("engine/")), None)


def _count_wanted_sequences(places: Mapping[str, ComponentPlace], model: MemoryModel) -> int:
    """Return the requests that each engine has at most: its share of all that can be in flight."""
    derived, engines = model.resolved.derived, sum(name.startswith("engine/") for name in places)
    in_flight = (derived.slots + derived.additional_groups) * derived.members_started
    given = model.resolved.config.actor_infer.strategy_args.strategy_config.max_num_seqs
    return max(1, min(given or MAX_SLOTS["cuda"], -(-in_flight // max(engines, 1))))


# -- what does not fit, and what would


def _make_training_error(
    model: MemoryModel, memory: int, here: list[ComponentPlace], needs: _DeviceNeeds
) -> ConfigError:
    fitting = next((ranks for ranks in _list_more_ranks(model.ranks) if _fits_ranks(model, memory, ranks)), None)
    hints = [] if fitting is None else [f"{fitting} devices for actor_train"]
    plain = _Sharing()
    if needs.moments and needs.count_training(replace(plain, offloads=True)) <= memory:
        hints.append(f"{_OFFLOAD_KEY}: true")
    names = [place.name for place in here if not place.name.startswith("engine/")]
    whole = _show(needs.count_training(plain))
    problem = f"a step of {' and '.join(names)} needs {whole} of a device that has {_show(memory)} to use"
    if names == ["critic"]:
        hint = "leave it out: the critic is cut over the devices of actor_train then; or a smaller critic"
        return ConfigError(problem, key="critic.device_mapping", value=list(here[0].devices), hint=hint)
    return _make_error(model, problem, [*hints, "adapters (lora_rank), a smaller model or shorter sequences"])


def _list_more_ranks(ranks: int) -> list[int]:
    return [number for number in range(ranks + 1, min(ranks * 64, _MOST_RANKS) + 1) if number <= 8 or number % 8 == 0]


def _fits_ranks(model: MemoryModel, memory: int, ranks: int) -> bool:
    larger = replace(model, ranks=ranks, processes=True)
    needs = {**larger.estimate_rank(0), **larger.estimate_activations(), **larger.estimate_libraries()}
    return _count_gpu_bytes(needs) <= memory


def _make_engine_error(
    model: MemoryModel, memory: int, here: list[ComponentPlace], needs: _DeviceNeeds, longest: int
) -> ConfigError:
    derived, least = model.resolved.derived, _Sharing(weight_sets=1)
    need, training = needs.count_engine(least) + longest, needs.count_training(_Sharing())
    others = [place.name for place in here if not place.name.startswith("engine/")]
    problem = f"the weights and one sequence of {derived.sequence_length} tokens need {_show(need)} "
    problem += f"of a device that has {_show(memory)} to use"
    problem += f" beside {' and '.join(others)} with {_show(training)}" if others else ""
    hints = []
    if others and need <= memory:
        hints.append("devices of their own for actor_infer")
        if not derived.hybrid_engine and max(training, needs.stays + need) <= memory:
            hints.append("hybrid_engine: true")
        if needs.moments and training - needs.moments + need <= memory:
            hints.append(f"{_OFFLOAD_KEY}: true")
    share = _count_share(model, memory)
    ways = next((number for number in (2, 4, 8, 16) if (needs.weights + longest) / number <= share), None)
    if ways is not None and need > memory - needs.stays:
        hints.append(f"vllm or sglang with launch: true and tensor_model_parallel_size: {ways}")
    return _make_error(model, problem, [*hints, "a smaller model or shorter sequences"])


def _make_small_share_error(model: MemoryModel, memory: int, need: int) -> ConfigError:
    given = model.resolved.config.actor_infer.strategy_args.strategy_config.gpu_memory_utilization
    least = -(-need * 100 * _USABLE_SHARE // memory) / 100
    problem = f"gives an engine {_show(_count_share(model, memory))} of a card, and its weights and one sequence of "
    problem += f"{model.resolved.derived.sequence_length} tokens need {_show(need)}"
    key = "actor_infer.strategy_args.strategy_config.gpu_memory_utilization"
    return ConfigError(problem, key=key, value=given, hint=f"at least {least:g}: there is room")


def _make_share_error(model: MemoryModel, memory: int, needs: _DeviceNeeds) -> ConfigError:
    training = needs.count_training(_Sharing())
    share = needs.libraries / memory * _USABLE_SHARE
    left = int(100 * _USABLE_SHARE * (memory - training) / memory) / 100
    problem = f"gpu_memory_utilization {share:g} and a step of the trainer with {_show(training)} are more than "
    problem += f"a device has to use, {_show(memory)}"
    return _make_error(model, problem, [f"at most {left:g}, or devices of their own for actor_infer"])


def _make_error(model: MemoryModel, problem: str, hints: list[str]) -> ConfigError:
    config = model.resolved.config
    name = config.actor_train.model_args.model_name_or_path or config.pretrain
    return ConfigError(problem, key="pretrain", value=name, hint=", or ".join(hints))


def _show(size: int) -> str:
    return f"{size / GIB:.1f} GiB"
