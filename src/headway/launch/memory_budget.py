"""Divide the memory of each card among the components on it, before anything is started.

The trainer gets what a step needs, engines get two sets of weights, and the KV cache gets what is left: at most what
all requests in flight can fill, at least the longest sequence. `gpu_memory_utilization` bounds cache and served weights
together, as in vLLM; the set of weights that arrives is beside it. Components that
take turns keep everything on the card if that leaves room for the cache; else engines sleep during a step, and if that
is not enough the trainer's moments leave the card while engines generate. What does not fit is refused in one line.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from headway.errors import ConfigError
from headway.launch.component_places import ComponentPlace
from headway.launch.machine import Machine
from headway.launch.memory_model import GIB, HOST, MemoryModel
from headway.models.model_shapes import find_model_shape

MOST_SLOTS = 512
"""Most requests that an engine decodes together on a GPU: beyond this a step gets slower as fast as it gets wider."""
_USABLE_SHARE = 0.95
"""Share of a card that is planned with; the rest is for fragments, and for what an estimate misses."""
_ROOMY_SHARE = 0.3
"""Share of a card that is room enough for a cache, so that nobody needs to sleep."""
_MOST_RANKS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBudget:
    """Who may take how much memory."""

    places: Mapping[str, ComponentPlace]
    """The same components, with their memory."""
    peaks_gib: Mapping[int, float]
    """Most memory that is in use at once, by card."""
    sequences: int = 0
    """Sequences of full length that run at once on one engine; 0: not known."""
    wanted_sequences: int = 0
    """Requests in flight that each engine has at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Phases:
    """Bytes on one device: what stays, and what a step, the moments and an engine need beside it."""

    stays: int
    step: int
    moments: int
    engine: int

    @property
    def training(self) -> int:
        """Bytes during a step, without the engine."""
        return self.stays + self.step + self.moments


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
    engines = [plan.kv_bytes for plan in plans.values() if plan.kv_bytes is not None]
    kv_bytes = min(engines, default=0)  # all engines are equal, and the fullest card decides
    engines_sleep = any(plan.engines_sleep for plan in plans.values())
    trainer_sleeps = any(plan.trainer_sleeps for plan in plans.values())
    budgeted, peaks = {}, dict.fromkeys((card for place in places.values() for card in place.cards), 0.0)
    for name, place in places.items():
        is_engine = name.startswith("engine/")
        need = _count_gpu_bytes(_estimate(model, place, kv_bytes, served=served, memory=memory))
        budgeted[name] = replace(
            place,
            memory_gib=need / GIB if place.devices else None,
            kv_cache_bytes=kv_bytes if is_engine and kv_bytes and not served else None,
            sleeps=engines_sleep if is_engine else trainer_sleeps and name.startswith("trainer"),
        )
    for device, plan in plans.items():
        used = max(plan.phases.training, plan.count_generating(kv_bytes, trainer_sleeps=trainer_sleeps))
        if not engines_sleep:
            used = plan.phases.training + plan.phases.engine + (kv_bytes if plan.kv_bytes is not None else 0)
        peaks[machine.locate(device)] += used / GIB
    tokens = kv_bytes // model.kv_bytes_per_token if model.kv_bytes_per_token else 0
    longest = model.resolved.derived.sequence_length
    return MemoryBudget(
        places=budgeted, peaks_gib=peaks, sequences=min(tokens // longest, wanted), wanted_sequences=wanted
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _DevicePlan:
    phases: _Phases
    kv_bytes: int | None = None
    """Memory of the KV cache; `None`: no engine of ours is here."""
    engines_sleep: bool = False
    trainer_sleeps: bool = False

    def count_generating(self, kv_bytes: int, *, trainer_sleeps: bool) -> int:
        """Return the bytes while engines generate and the trainer does not compute."""
        cache = kv_bytes if self.kv_bytes is not None else 0
        return self.phases.stays + (0 if trainer_sleeps else self.phases.moments) + self.phases.engine + cache


def _plan_device(
    model: MemoryModel, memory: int, here: list[ComponentPlace], wanted: int, *, served: bool
) -> _DevicePlan:
    """Decide who sleeps, and what is left for the KV cache. Raises `ConfigError`."""
    phases, engine = _measure(model, here, served=served, memory=memory), _find_engine(here)
    if phases.training > memory:
        raise _make_training_error(model, memory, here, phases)
    if engine is None:
        return _DevicePlan(phases=phases)
    if served:
        if phases.training + phases.engine > memory / _USABLE_SHARE:
            raise _make_share_error(model, memory, phases)
        return _DevicePlan(phases=phases)
    longest = model.resolved.derived.sequence_length * model.kv_bytes_per_token
    most = min(_count_share(model, memory) - phases.engine // 2, (wanted + max(wanted // 8, 1)) * longest)
    beside = memory - phases.engine
    options = [(beside - phases.training, False, False)]
    if engine.sharing == "turns":
        options.append((beside - phases.stays - phases.moments, True, False))
        if model.ranks == 1:
            options.append((beside - phases.stays, True, True))
    for room, engines_sleep, trainer_sleeps in options:
        cache = min(room, most)
        if cache >= min(most, int(_ROOMY_SHARE * memory)) and cache >= longest:
            return _DevicePlan(
                phases=phases, kv_bytes=cache, engines_sleep=engines_sleep, trainer_sleeps=trainer_sleeps
            )
    room, engines_sleep, trainer_sleeps = max(options)
    cache = min(room, most)
    if cache < longest or cache <= 0:
        raise _make_engine_error(model, memory, here, phases, longest)
    return _DevicePlan(phases=phases, kv_bytes=cache, engines_sleep=engines_sleep, trainer_sleeps=trainer_sleeps)


def _measure(model: MemoryModel, here: list[ComponentPlace], *, served: bool, memory: int) -> _Phases:
    """Return the bytes of all components of one device."""
    stays = step = moments = engine = 0
    for place in here:
        needs = _estimate(model, place, 0, served=served, memory=memory)
        whole = _count_gpu_bytes(needs)
        if place.name.startswith("engine/"):
            engine += whole
        elif place.name.startswith("trainer"):
            moments += needs.get("optimizer", 0)
            step += needs.get("gradients", 0) + needs.get("activations", 0)
            stays += whole - needs.get("optimizer", 0) - needs.get("gradients", 0) - needs.get("activations", 0)
        else:
            stays += whole
    return _Phases(stays=stays, step=step, moments=moments, engine=engine)


def _estimate(model: MemoryModel, place: ComponentPlace, kv_bytes: int, *, served: bool, memory: int) -> dict[str, int]:
    """Return the needs of one component on one of its devices."""
    libraries = model.estimate_libraries()
    if place.name.startswith("trainer"):
        number = int(place.name.partition("/")[2] or 0)
        return {**model.estimate_rank(number), **model.estimate_activations(), **libraries}
    if place.name.startswith("engine/"):
        if served:
            return {"share of the card": _count_share(model, memory)}
        return {**model.estimate_engine(kv_bytes), **(libraries if model.processes else {})}
    if place.name.startswith("reward/"):
        reward = model.resolved.config.rewards[place.name.split("/")[1]]
        judge = find_model_shape(reward.model_args.model_name_or_path)
        return libraries if judge is None else {"weights": 4 * judge.parameters // len(place.devices), **libraries}
    return {**model.estimate_scorer(place.name.partition("/")[0]), **libraries}


def _count_share(model: MemoryModel, memory: int) -> int:
    """Return the bytes that `gpu_memory_utilization` gives to an engine."""
    share = model.resolved.config.actor_infer.strategy_args.strategy_config.gpu_memory_utilization
    return int(share * memory / _USABLE_SHARE)


def _count_gpu_bytes(needs: Mapping[str, int]) -> int:
    return sum(size for purpose, size in needs.items() if not purpose.startswith(f"{HOST}:"))


def _find_engine(here: list[ComponentPlace]) -> ComponentPlace | None:
    return next((place for place in here if place.name.startswith("engine/")), None)


def _count_wanted_sequences(places: Mapping[str, ComponentPlace], model: MemoryModel) -> int:
    """Return the requests that each engine has at most: its share of all that can be in flight."""
    derived, engines = model.resolved.derived, sum(name.startswith("engine/") for name in places)
    in_flight = (derived.slots + derived.additional_groups) * derived.members_started
    given = model.resolved.config.actor_infer.strategy_args.strategy_config.max_num_seqs
    return max(1, min(given or MOST_SLOTS, -(-in_flight // max(engines, 1))))


# -- what does not fit, and what would


def _make_training_error(model: MemoryModel, memory: int, here: list[ComponentPlace], phases: _Phases) -> ConfigError:
    fitting = next((ranks for ranks in _list_more_ranks(model.ranks) if _fits_ranks(model, memory, ranks)), None)
    hints = [] if fitting is None else [f"{fitting} devices for actor_train"]
    if model.ranks == 1 and phases.training - phases.moments <= memory:
        hints.append("actor_train.training_args.offload_optimizer: true")
    names = " and ".join(place.name for place in here if not place.name.startswith("engine/"))
    problem = f"a step of {names} needs {_show(phases.training)} of a device that has {_show(memory)} to use"
    return _make_error(model, problem, [*hints, "adapters (lora_rank), a smaller model or shorter sequences"])


def _list_more_ranks(ranks: int) -> list[int]:
    return [number for number in range(ranks + 1, min(ranks * 64, _MOST_RANKS) + 1) if number <= 8 or number % 8 == 0]


def _fits_ranks(model: MemoryModel, memory: int, ranks: int) -> bool:
    larger = replace(model, ranks=ranks, processes=True)
    needs = {**larger.estimate_rank(0), **larger.estimate_activations(), **larger.estimate_libraries()}
    return _count_gpu_bytes(needs) <= memory


def _make_engine_error(
    model: MemoryModel, memory: int, here: list[ComponentPlace], phases: _Phases, longest: int
) -> ConfigError:
    derived, need = model.resolved.derived, phases.engine + longest
    others = [place.name for place in here if not place.name.startswith("engine/")]
    problem = f"two sets of weights and one sequence of {derived.sequence_length} tokens need {_show(need)} "
    problem += f"of a device that has {_show(memory)} to use"
    problem += f" beside {' and '.join(others)} with {_show(phases.training)}" if others else ""
    hints = []
    if others and need <= memory:
        hints.append("devices of their own for actor_infer")
        if not derived.hybrid_engine and max(phases.training, phases.stays + need) <= memory:
            hints.append("hybrid_engine: true")
        if model.ranks == 1 and phases.training - phases.moments + need <= memory:
            hints.append("actor_train.training_args.offload_optimizer: true")
    if phases.engine // 2 + longest > _count_share(model, memory) and need <= memory:
        hints.append("a larger gpu_memory_utilization")
    ways = next((n for n in (2, 4, 8, 16) if (phases.engine // 2 + longest) / n <= _count_share(model, memory)), None)
    if ways is not None and need > memory:
        hints.append(f"vllm or sglang with launch: true and tensor_model_parallel_size: {ways}")
    return _make_error(model, problem, [*hints, "a smaller model or shorter sequences"])


def _make_share_error(model: MemoryModel, memory: int, phases: _Phases) -> ConfigError:
    share = phases.engine / memory * _USABLE_SHARE
    left = int(100 * _USABLE_SHARE * (memory - phases.training) / memory) / 100
    problem = f"gpu_memory_utilization {share:g} and a step of the trainer with {_show(phases.training)} are more than "
    problem += f"a device has to use, {_show(memory)}"
    return _make_error(model, problem, [f"at most {left:g}, or devices of their own for actor_infer"])


def _make_error(model: MemoryModel, problem: str, hints: list[str]) -> ConfigError:
    config = model.resolved.config
    name = config.actor_train.model_args.model_name_or_path or config.pretrain
    return ConfigError(problem, key="pretrain", value=name, hint=", or ".join(hints))


def _show(size: int) -> str:
    return f"{size / GIB:.1f} GiB"
