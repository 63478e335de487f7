"""Estimate the memory of each component from the shapes of model and configuration, before anything is started.

Counted: weights with their spare set, master weights, gradients, moments, versions in transfer, reference, critic, KV
cache. Not counted: activations, which depend on the samples, and the memory of libraries. So a run that does not fit by
this estimate will not run, and one that barely fits may not either. Servers (vLLM, SGLang) manage their own memory.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from headway.cluster.ray.ray_cluster import RayCluster
from headway.config import ResolvedConfig
from headway.errors import ConfigError
from headway.launch.component_places import (
    assign_devices,
    has_own_replica,
    list_scorer_replicas,
    make_rank_names,
    make_scorer_names,
)
from headway.launch.components import PolicyInfo, count_engine_slots, count_prefix_tokens
from headway.launch.inference_servers import uses_external_engines
from headway.launch.placement import LENT_ENGINE, Placement
from headway.launch.transports import count_device_version_bytes
from headway.trainers.sharded.rank_layout import RankCoordinates

HOST = "host"
_SHARED_VERSIONS, _HEAP_VERSIONS = 3, 2
_BROADCAST_VERSIONS = 2
"""Versions that an engine holds when they are broadcast; a delta transfer keeps one more."""
_WEIGHT_SETS = 2
"""Copies of an engine's weights: those that are served, and those that arrive."""


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
    model = None if policy is None else _make_memory_model(resolved, placement, policy)
    devices = assign_devices(resolved, placement.ranks)
    found = []
    for number, name in enumerate(make_rank_names(placement.ranks)):
        trainer = _make_needs(name, placement, placement.train_threads, model.estimate_rank(number) if model else {})
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
        needs = model.estimate_engine() if model else {}
        found += [_make_needs(name, placement, placement.infer_threads, needs) for name in engines]
    for role in list_scorer_replicas(resolved) if placement.processes else []:
        scorer_needs = model.estimate_scorer(role) if model else {}
        names = make_scorer_names(resolved, role)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _MemoryModel:
    """Numbers from which the memory of components is computed."""

    resolved: ResolvedConfig
    placement: Placement
    parameters: int
    trained: int
    """Parameters that have gradients: all of them, or those of the adapters."""
    critic: int
    """Parameters of the critic."""
    kv_bytes_per_token: int
    train_bytes: int
    """Bytes of an element in training."""
    infer_bytes: int
    """Bytes of an element in an engine."""

    def estimate_trainer(self) -> dict[str, int]:
        """Return the needs of a trainer that is one process."""
        offloads = self.placement.device == "cuda" and self.resolved.config.actor_train.training_args.offload_optimizer
        masters = 4 * self.trained if self.train_bytes < 4 else 0
        found = {
            "weights": self.train_bytes * self.parameters + masters,
            "gradients": 4 * self.trained,
            f"{HOST}:optimizer" if offloads else "optimizer": 8 * self.trained,
        }
        derived = self.resolved.derived
        separate = self.placement.processes and has_own_replica(self.resolved, "reference")
        if derived.needs_reference and self.trained == self.parameters and not separate:
            found["reference"] = self.train_bytes * self.parameters
        if self.critic:
            found["critic"] = (self.train_bytes + 12) * self.critic
        return found | self._estimate_versions()

    def estimate_rank(self, number: int) -> dict[str, int]:
        """Return the needs of one rank: its share of everything, and for rank 0 the versions."""
        ranks, whole = self.placement.ranks, self.estimate_trainer()
        if ranks == 1:
            return whole
        whole["weights"] = 4 * self.parameters
        versions = {purpose: size for purpose, size in whole.items() if purpose.endswith("versions")}
        shared = {purpose: -(-size // ranks) for purpose, size in whole.items() if purpose not in versions}
        return shared | versions if number == 0 else shared

    def estimate_engine(self) -> dict[str, int]:
        """Return the needs of one engine."""
        found = {"weights": _WEIGHT_SETS * self.infer_bytes * self.parameters}
        if self.kv_bytes_per_token:
            slots = count_engine_slots(self.resolved, self.placement.device)
            prefixes = count_prefix_tokens(self.resolved, self.placement.device)
            found["KV"] = self.kv_bytes_per_token * (slots * self.resolved.derived.sequence_length + prefixes)
        transport = self.placement.transport
        copies = _BROADCAST_VERSIONS * (transport.kind == "broadcast") + transport.delta
        if copies:
            found[f"{HOST}:versions"] = copies * self.infer_bytes * self.parameters
        return found

    def estimate_scorer(self, role: str) -> dict[str, int]:
        """Return the needs of a scorer with a replica of its own; `logp` takes new weights beside its own."""
        return {"weights": (_WEIGHT_SETS if role == "logp" else 1) * 4 * self.parameters}

    def _estimate_versions(self) -> dict[str, int]:
        """Return the memory of versions that are kept for engines."""
        on_gpu, processes = self.placement.device == "cuda", self.placement.processes
        if on_gpu and not processes and (size := count_device_version_bytes(self.parameters)):
            return {"versions": size}
        if self.placement.transport.kind == "cuda_ipc":
            return {"versions": _SHARED_VERSIONS * self.infer_bytes * self.parameters}
        count = _SHARED_VERSIONS if processes else _HEAP_VERSIONS
        return {f"{HOST}:versions": count * self.infer_bytes * self.parameters}


def _make_memory_model(resolved: ResolvedConfig, placement: Placement, policy: PolicyInfo) -> _MemoryModel:
    config, on_gpu = resolved.config, placement.device == "cuda"
    sizes = {"fp32": 4, "bf16": 2, "fp16": 2}
    infer_bytes = sizes[config.actor_infer.model_args.dtype] if on_gpu else 4
    language = resolved.derived.pipeline != "denoising"
    return _MemoryModel(
        resolved=resolved,
        placement=placement,
        parameters=policy.parameters,
        trained=_count_trained_parameters(resolved, policy) if language else policy.parameters,
        critic=_count_critic_parameters(resolved, policy),
        kv_bytes_per_token=_count_kv_per_token(resolved, policy) * infer_bytes if language else 0,
        train_bytes=sizes[config.actor_train.model_args.dtype] if on_gpu else 4,
        infer_bytes=infer_bytes,
    )


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


def _count_kv_per_token(resolved: ResolvedConfig, policy: PolicyInfo) -> int:
    """Count the KV cache elements of one token in a native engine; 0 for a model that it cannot hold."""
    from transformers import AutoConfig

    from headway.engines.native.kv_cache import read_kv_shape

    config = AutoConfig.from_pretrained(policy.path, local_files_only=True).get_text_config()
    try:
        shape = read_kv_shape(config, resolved.derived.sequence_length)
    except ConfigError:
        return 0
    return 2 * shape["layers"] * shape["heads"] * shape["head_size"]
