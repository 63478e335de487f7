"""Estimate the memory of each component from the shapes of model and configuration, before anything is started.

Counted: weights with their spare set, master weights, gradients, moments, versions in transfer, reference, critic, KV
cache. Not counted: activations, which depend on the samples, and the memory of libraries. So a run that does not fit by
this estimate will not run, and one that barely fits may not either. Servers (vLLM, SGLang) manage their own memory.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from headway.cluster.ray.ray_cluster import RayCluster
from headway.config import ResolvedConfig
from headway.models.model_shapes import ModelShape, find_model_shape
from headway.models.policy_info import PolicyInfo
from headway.placement.component_places import SCORERS, make_rank_names
from headway.placement.memory_budget import choose_weight_sets
from headway.placement.memory_model import HOST, MemoryModel, count_engine_slots, count_prefix_tokens
from headway.placement.placement import LENT_ENGINE, Placement, make_memory_model
from headway.placement.server_requirements import uses_external_engines
from headway.trainers.sharded.rank_layout import RankCoordinates


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlacement:
    """The devices of a trainer rank, by their numbers in the run, and its share of a step."""

    devices: tuple[int, ...]
    coordinates: RankCoordinates

    @property
    def summary(self) -> str:
        """One line for people: `device 5: data 1, context 0, tensor 0`."""
        noun = "device" if len(self.devices) == 1 else "devices"
        share = ", ".join(f"{name} {number}" for name, number in self.coordinates._asdict().items())
        return f"{noun} {', '.join(map(str, self.devices))}: {share}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ComponentNeeds:
    """One component of a run, where it lives and how much memory it needs."""

    name: str
    lives: str
    """`process`, `thread`, `actor` or `server`."""
    memory: str
    """Memory in which it lives: `host`, a GPU, or a node of a cluster."""
    threads: int
    needs: Mapping[str, int]
    """Bytes by purpose; names that begin with `host:` are in the memory of the host."""
    rank: RankPlacement | None = None
    """Set for a trainer with several ranks."""

    @property
    def total(self) -> int:
        """Bytes for all purposes."""
        return sum(self.needs.values())


def estimate_component_needs(
    resolved: ResolvedConfig, placement: Placement, policy: PolicyInfo | None = None
) -> list[ComponentNeeds]:
    """Return every component in the order of their start. Without a policy no shapes are known, and needs are empty."""
    model = None if policy is None else _make_policy_model(resolved, placement, policy)
    devices = {name: place.devices for name, place in placement.places.items()}
    found = []
    for number, name in enumerate(make_rank_names(placement.ranks)):
        step = {**model.estimate_rank(number), **model.estimate_activations()} if model else {}
        if name in placement.places and placement.places[name].sleeps and "optimizer" in step:
            step[f"{HOST}:optimizer"] = step.pop("optimizer")
        trainer = _make_needs(name, placement, placement.train_threads, step)
        if placement.ranks > 1:
            rank = RankPlacement(devices=devices[name], coordinates=placement.layout.coordinates(number))
            trainer = replace(trainer, rank=rank)
        found.append(trainer)
    engines = [f"engine/{number}" for number in range(placement.replicas)]
    if uses_external_engines(resolved):
        urls = resolved.config.actor_infer.strategy_args.strategy_config.url or ["its own GPUs"] * len(engines)
        for name, url in zip(engines, urls, strict=True):
            found.append(ComponentNeeds(name=name, lives="server", memory=url, threads=0, needs={}))
    else:
        engines += [LENT_ENGINE] if resolved.config.lend_idle_trainer else []
        sets = choose_weight_sets(resolved, placement.places.get("engine/0"))
        needs = model.estimate_engine(_count_kv_bytes(resolved, placement, model), sets) if model else {}
        found += [_make_needs(name, placement, placement.infer_threads, needs) for name in engines]
    for role in SCORERS if placement.processes else ():
        scorer_needs = model.estimate_scorer(role) if model else {}
        names = placement.list_components(role)
        found += [_make_needs(name, placement, placement.train_threads, scorer_needs) for name in names]
    if placement.cluster is None:
        return found
    return [_add_cluster_gpu(component, placement.cluster, devices) for component in found]


def sum_by_memory(components: list[ComponentNeeds]) -> dict[str, int]:
    """Return the bytes that are needed in each memory: that of the host, and of each GPU."""
    total: dict[str, int] = {}
    for component in components:
        for purpose, size in component.needs.items():
            memory = HOST if purpose.startswith(f"{HOST}:") else component.memory
            total[memory] = total.get(memory, 0) + size
    return total


def _make_needs(name: str, placement: Placement, threads: int, needs: Mapping[str, int]) -> ComponentNeeds:
    if placement.cluster is None:
        lives = "process" if placement.processes else "thread"
        memory = HOST if placement.device == "cpu" else f"GPU {placement.gpus.get(name, 0)}"
    else:  # the memory of the host is that of the component's own node
        lives, memory = "actor", f"node {placement.cluster.get_request(name).node}"
        needs = {purpose.removeprefix(f"{HOST}:"): size for purpose, size in needs.items()}
    return ComponentNeeds(name=name, lives=lives, memory=memory, threads=threads, needs=needs)


def _add_cluster_gpu(
    component: ComponentNeeds, cluster: RayCluster, devices: Mapping[str, tuple[int, ...]]
) -> ComponentNeeds:
    """Name the GPU by its number in the run; components of one number share it."""
    if not cluster.get_request(component.name).gpus:
        return component
    return replace(component, memory=f"GPU {devices[component.name][0]}, {component.memory}")


def _make_policy_model(resolved: ResolvedConfig, placement: Placement, policy: PolicyInfo) -> MemoryModel:
    """Return the memory model of a policy that is here, with its parameters counted."""
    language = resolved.derived.pipeline != "denoising"
    shape = find_model_shape(policy.path) if language else None
    known = shape or ModelShape(layers=0, hidden=0, intermediate=0, heads=0, kv_heads=0, head_size=0, vocabulary=0)
    model = make_memory_model(resolved, placement, replace(known, given_parameters=policy.parameters))
    return replace(
        model,
        shape=shape,
        trained=_count_trained_parameters(resolved, policy) if language else policy.parameters,
        critic=_count_critic_parameters(resolved, policy),
    )


def _count_kv_bytes(resolved: ResolvedConfig, placement: Placement, model: MemoryModel) -> int:
    """Return the memory of an engine's KV cache: as planned, or all slots and prefixes."""
    planned = placement.places["engine/0"].kv_cache_bytes if "engine/0" in placement.places else None
    if planned is not None:
        return planned
    slots, prefixes = (count(resolved, placement.device) for count in (count_engine_slots, count_prefix_tokens))
    return model.kv_bytes_per_token * (slots * resolved.derived.sequence_length + prefixes)


def _count_trained_parameters(resolved: ResolvedConfig, policy: PolicyInfo) -> int:
    """Count the parameters that are trained; those of adapters are counted on an empty model."""
    args = resolved.config.actor_train.model_args
    if args.lora_rank is None:
        return policy.parameters
    from torch import nn

    from headway.models.model_loading import make_architecture_factory

    model, targets = make_architecture_factory(policy.path)(), frozenset(args.lora_target)
    head, rows_and_columns = model.get_output_embeddings(), 0
    for name, layer in model.named_modules():
        adapted = name.rpartition(".")[2] in targets if targets else layer is not head
        if isinstance(layer, nn.Linear) and adapted:
            rows_and_columns += layer.in_features + layer.out_features
    return args.lora_rank * rows_and_columns


def _count_critic_parameters(resolved: ResolvedConfig, policy: PolicyInfo) -> int:
    if not resolved.derived.needs_critic:
        return 0
    if policy.critic is None:
        return policy.parameters
    from headway.models.model_loading import count_parameters

    return count_parameters(policy.critic)
