"""What the parts of a run need, by the shapes of model and configuration, before any of them is started.

Counted: weights with their spare set, masters, gradients, moments, versions on their way, reference, critic, KV cache.
Not counted: activations, which depend on the samples, and what libraries take for themselves. So a sum that does not
fit will not run, and one that barely fits may not either. Servers (vLLM, SGLang) see to their own memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from headway.cluster.ray.ray_cluster import RayCluster
from headway.config import ResolvedConfig
from headway.errors import ConfigError
from headway.launch.components import count_device_version_bytes, count_engine_slots, count_prefix_tokens
from headway.launch.inference_servers import uses_external_engines
from headway.launch.language_components import PolicyInfo
from headway.launch.placement import LENT_ENGINE, Placement, assign_devices, has_own_replica, make_rank_names
from headway.trainers.sharded.rank_layout import RankCoordinates

HOST = "host"
_SHARED_VERSIONS, _HEAP_VERSIONS = 3, 2
_BROADCAST_VERSIONS = 2
"""Versions that an engine holds where they were broadcast to; one more where it keeps what it serves, for a delta."""
_WEIGHT_SETS = 2
"""Of an engine's weights: those that are served, and those that arrive."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlacement:
    """One rank of a trainer: its devices, by their numbers in the run, and its share of a step."""

    devices: tuple[int, ...]
    seat: RankCoordinates

    @property
    def text(self) -> str:
        """`device 5: data 1, context 0, tensor 0`."""
        noun = "device" if len(self.devices) == 1 else "devices"
        share = ", ".join(f"{name} {number}" for name, number in self.seat._asdict().items())
        return f"{noun} {', '.join(map(str, self.devices))}: {share}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ComponentNeeds:
    """One part of a run, where it lives and what it takes."""

    name: str
    lives: str
    """`process`, `thread`, `actor` or `server`."""
    memory: str
    """`host`, the GPU that it is on, or the node of a cluster."""
    threads: int
    needs: Mapping[str, int]
    """Bytes, by what they are for; in the memory of the host whatever begins with `host:`."""
    rank: RankPlacement | None = None
    """Of a trainer that has several."""

    @property
    def total(self) -> int:
        return sum(self.needs.values())


def estimate_component_needs(
    resolved: ResolvedConfig, place: Placement, policy: PolicyInfo | None = None
) -> list[ComponentNeeds]:
    """Every part, in the order in which they start. Without a policy there are no shapes, and so no needs."""
    shape = None if policy is None else _MemoryModel.of(resolved, place, policy)
    held = assign_devices(resolved, place.ranks)
    found = []
    for number, name in enumerate(make_rank_names(place.ranks)):
        part = _make_needs(name, place, place.train_threads, {} if shape is None else shape.rank(number))
        rank = RankPlacement(devices=held[name], seat=place.layout.seat(number)) if place.ranks > 1 else None
        found.append(replace(part, rank=rank))
    for number in range(place.replicas):
        if uses_external_engines(resolved):
            where = resolved.config.actor_infer.strategy_args.strategy_config.url
            at = where[number] if number < len(where) else "its own GPUs"
            found.append(ComponentNeeds(name=f"engine/{number}", lives="server", memory=at, threads=0, needs={}))
        else:
            needs = {} if shape is None else shape.engine()
            found.append(_make_needs(f"engine/{number}", place, place.infer_threads, needs))
    if resolved.config.lend_idle_trainer:
        found.append(_make_needs(LENT_ENGINE, place, place.infer_threads, {} if shape is None else shape.engine()))
    for role, wanted in _list_own_scorers(resolved, place).items():
        if wanted:
            found.append(_make_needs(role, place, place.train_threads, {} if shape is None else shape.scorer(role)))
    return found if place.cluster is None else [_add_cluster_gpu(part, place.cluster, held) for part in found]


def sum_by_memory(parts: list[ComponentNeeds]) -> dict[str, int]:
    """Bytes by memory: of the host, and of each GPU."""
    found: dict[str, int] = {}
    for part in parts:
        for what, size in part.needs.items():
            where = HOST if what.startswith(f"{HOST}:") else part.memory
            found[where] = found.get(where, 0) + size
    return found


def _make_needs(name: str, place: Placement, threads: int, needs: Mapping[str, int]) -> ComponentNeeds:
    if place.cluster is not None:
        return _make_actor_needs(name, place.cluster, threads, needs)
    memory = HOST if place.device == "cpu" else f"GPU {place.cards.get(name, 0)}"
    return ComponentNeeds(
        name=name, lives="process" if place.processes else "thread", memory=memory, threads=threads, needs=needs
    )


def _make_actor_needs(name: str, cluster: RayCluster, threads: int, needs: Mapping[str, int]) -> ComponentNeeds:
    """On a node of the run; what is in the memory of a host is in that of its own."""
    found = {what.removeprefix(f"{HOST}:"): size for what, size in needs.items()}
    return ComponentNeeds(
        name=name, lives="actor", memory=f"node {cluster.room(name).node}", threads=threads, needs=found
    )


def _add_cluster_gpu(part: ComponentNeeds, cluster: RayCluster, held: Mapping[str, tuple[int, ...]]) -> ComponentNeeds:
    """By the number that it has in the run: parts of one number share one."""
    return replace(part, memory=f"GPU {held[part.name][0]}, {part.memory}") if cluster.room(part.name).gpus else part


def _list_own_scorers(resolved: ResolvedConfig, place: Placement) -> dict[str, bool]:
    """Which of them have a replica of their own."""
    derived = resolved.derived
    if derived.pipeline == "denoising" or not place.processes:
        return {}
    return {
        "logp": derived.needs_proximal and has_own_replica(resolved, "logp"),
        "reference": derived.needs_reference and has_own_replica(resolved, "reference"),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class _MemoryModel:
    """Numbers that bytes are made of."""

    resolved: ResolvedConfig
    place: Placement
    parameters: int
    trained: int
    """Parameters that have gradients: all of them, or those of the adapters."""
    critic: int
    kv_per_token: int
    """Bytes; 0 where nothing is kept."""
    computed: int
    """Bytes of an element in training."""
    served: int
    """Bytes of an element in an engine."""

    @classmethod
    def of(cls, resolved: ResolvedConfig, place: Placement, policy: PolicyInfo) -> _MemoryModel:
        config, cuda = resolved.config, place.device == "cuda"
        half = {"fp32": 4, "bf16": 2, "fp16": 2}
        computed = half[config.actor_train.model_args.dtype] if cuda else 4
        served = half[config.actor_infer.model_args.dtype] if cuda else 4
        language = resolved.derived.pipeline != "denoising"
        return cls(
            resolved=resolved,
            place=place,
            parameters=policy.parameters,
            trained=_count_trained_parameters(resolved, policy) if language else policy.parameters,
            critic=_count_critic_parameters(resolved, policy),
            kv_per_token=_count_kv_per_token(resolved, policy) * served if language else 0,
            computed=computed,
            served=served,
        )

    def trainer(self) -> dict[str, int]:
        masters = 4 * self.trained if self.computed < 4 else 0
        found = {
            "weights": self.computed * self.parameters + masters,
            "gradients": 4 * self.trained,
            f"{HOST}:optimizer" if self._offloads else "optimizer": 8 * self.trained,
        }
        derived = self.resolved.derived
        if derived.needs_reference and self.trained == self.parameters and not self._own("reference"):
            found["reference"] = self.computed * self.parameters
        if self.critic:
            found["critic"] = (self.computed + 12) * self.critic
        found |= self._versions()
        return found

    def rank(self, number: int) -> dict[str, int]:
        """One of the trainer's processes: its share of everything, and for the first the versions."""
        ranks, whole = self.place.ranks, self.trainer()
        if ranks == 1:
            return whole
        whole["weights"] = 4 * self.parameters
        versions = {what: size for what, size in whole.items() if what.endswith("versions")}
        shared = {what: -(-size // ranks) for what, size in whole.items() if what not in versions}
        return shared | versions if number == 0 else shared

    def engine(self) -> dict[str, int]:
        found = {"weights": _WEIGHT_SETS * self.served * self.parameters}
        if self.kv_per_token:
            slots, kept = (of(self.resolved, self.place.device) for of in (count_engine_slots, count_prefix_tokens))
            found["KV"] = self.kv_per_token * (slots * self.resolved.derived.sequence_length + kept)
        copies = _BROADCAST_VERSIONS * (self.place.route.way == "broadcast") + self.place.route.delta
        if copies:
            found[f"{HOST}:versions"] = copies * self.served * self.parameters
        return found

    def scorer(self, role: str) -> dict[str, int]:
        return {"weights": (_WEIGHT_SETS if role == "logp" else 1) * 4 * self.parameters}

    @property
    def _offloads(self) -> bool:
        return self.place.device == "cuda" and self.resolved.config.actor_train.training_args.offload_optimizer

    def _own(self, role: str) -> bool:
        return self.place.processes and has_own_replica(self.resolved, role)

    def _versions(self) -> dict[str, int]:
        """Where they are kept for engines."""
        if (
            self.place.device == "cuda"
            and not self.place.processes
            and (size := count_device_version_bytes(self.parameters))
        ):
            return {"versions": size}
        if self.place.route.way == "cuda_ipc":
            return {"versions": _SHARED_VERSIONS * self.served * self.parameters}
        count = _SHARED_VERSIONS if self.place.processes else _HEAP_VERSIONS
        return {f"{HOST}:versions": count * self.served * self.parameters}


def _count_trained_parameters(resolved: ResolvedConfig, policy: PolicyInfo) -> int:
    """Parameters that are trained, counted on an empty model."""
    args = resolved.config.actor_train.model_args
    if args.lora_rank is None:
        return policy.parameters
    return args.lora_rank * sum(_iter_adapter_sizes(policy, frozenset(args.lora_target)))


def _iter_adapter_sizes(policy: PolicyInfo, targets: frozenset[str]) -> Iterator[int]:
    """Rows and columns of each layer that gets an adapter."""
    from torch import nn

    from headway.models import make_architecture_factory

    model = make_architecture_factory(policy.path)()
    head = model.get_output_embeddings()
    for name, layer in model.named_modules():
        chosen = name.rpartition(".")[2] in targets if targets else layer is not head
        if isinstance(layer, nn.Linear) and chosen:
            yield layer.in_features + layer.out_features


def _count_critic_parameters(resolved: ResolvedConfig, policy: PolicyInfo) -> int:
    if not resolved.derived.needs_critic:
        return 0
    if policy.critic is None:
        return policy.parameters
    from headway.models import parameter_count

    return parameter_count(policy.critic)


def _count_kv_per_token(resolved: ResolvedConfig, policy: PolicyInfo) -> int:
    """Elements that one token of one request takes in an engine of our own."""
    from transformers import AutoConfig

    from headway.engines.native.kv_cache import read_kv_shape

    config = AutoConfig.from_pretrained(policy.path, local_files_only=True).get_text_config()
    try:
        shape = read_kv_shape(config, resolved.derived.sequence_length)
    except ConfigError:
        return 0  # not a model of the native engine
    return 2 * shape["layers"] * shape["heads"] * shape["head_size"]
