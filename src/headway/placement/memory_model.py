"""Compute the memory of each component of a run from the shapes of model and configuration.

Counted: weights with their spare set, master weights, gradients, moments, versions in transfer, reference, critic,
activations, KV cache, and the libraries of each process on a GPU. What a needs-table calls `host:…` is memory of the
host. Activations and libraries are estimates; the rest follows from shapes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from headway.config import ResolvedConfig
from headway.config.reward_model_choice import CLASSIFIER, get_reward_function
from headway.models.model_shapes import ModelShape, find_model_shape
from headway.placement.component_places import ComponentPlace
from headway.weights.transports import Device, TransportPlan, count_device_version_bytes

HOST = "host"
GIB = 1 << 30
_HEAP_VERSIONS = 2
_BROADCAST_VERSIONS = 2
"""Versions that an engine holds when they are broadcast; a delta transfer keeps one more."""
MAX_SLOTS: Mapping[Device, int] = {"cpu": 64, "cuda": 512}
"""Most requests that an engine decodes together: beyond this a step gets slower as fast as it gets wider."""
WEIGHT_SETS = 2
"""Copies of an engine's weights: those that are served, and those that arrive."""
JUDGE_PROMPT_TOKENS = 1024
"""Room for the words of a judge's prompt around question and answer."""
_CLASSIFIER_TOKENS = 65536
"""Tokens of one forward pass of a reward model."""
_LIBRARIES = GIB
"""Memory of the CUDA context and of libraries, for each process on a card."""
_LOGIT_CHUNKS = 3 * GIB
"""Most memory of logits: three chunks, whatever the number of tokens."""
_KEPT_PROBABILITIES = 8 * GIB
"""Most memory of probabilities that are kept for the backward pass, on a GPU of 128 GiB."""
_DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 2}
"""Bytes of an element as it travels and is computed with; weights in 8 bits arrive in 16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryModel:
    """Numbers from which the memory of components is computed. All results are bytes by purpose."""

    resolved: ResolvedConfig
    device: Device
    processes: bool
    parameters: int
    trained: int
    """Parameters that have gradients: all of them, or those of the adapters."""
    critic: int = 0
    """Parameters of the critic; 0: there is none."""
    holds_critic: bool = False
    """Whether the trainer holds the critic."""
    shape: ModelShape | None = None
    """`None`: a denoising model, or one whose layers are not known; activations and KV are not counted then."""
    transport: TransportPlan
    ranks: int = 1
    context: int = 1
    card_bytes: int = 0
    """Memory of one card; 0: not known."""
    holds_reference: bool = False
    """Whether the trainer holds the reference."""
    micro_batch: int = 0
    """Samples of a forward and backward pass; 0: `per_device_train_batch_size`."""

    @property
    def train_bytes(self) -> int:
        """Bytes of an element in training."""
        on_gpu = self.device == "cuda"
        return _DTYPE_BYTES[self.resolved.config.actor_train.model_args.dtype] if on_gpu else 4

    @property
    def infer_bytes(self) -> int:
        """Bytes of an element in an engine."""
        on_gpu = self.device == "cuda"
        return _DTYPE_BYTES[self.resolved.config.actor_infer.model_args.dtype] if on_gpu else 4

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of one token in the KV cache; 0 where there is none."""
        small = self.resolved.config.actor_infer.model_args.kv_cache_dtype == "fp8"
        return 0 if self.shape is None else self.shape.kv_per_token * (1 if small else self.infer_bytes)

    @property
    def served_bytes(self) -> int:
        """Bytes of one set of served weights; in 8 bits, head and embedding have 16."""
        if self.shape is None or self.resolved.config.actor_infer.model_args.dtype != "fp8":
            return self.infer_bytes * self.parameters
        return self.parameters + 2 * self.shape.vocabulary * self.shape.hidden

    @property
    def version_parameters(self) -> int:
        """Parameters of one version: all, or those of the adapters."""
        return self.trained if self.transport.adapters else self.parameters

    @property
    def shares_base(self) -> bool:
        """Whether engines compute with the trainer's copy of the base."""
        on_one_gpu = self.device == "cuda" and not self.processes
        return self.transport.adapters and on_one_gpu and self.train_bytes == self.infer_bytes

    def estimate_rank(self, number: int) -> dict[str, int]:
        """Return the needs of one rank: its share of everything, and the versions if it publishes them."""
        args = self.resolved.config.actor_train.training_args
        has_masters = self.train_bytes < 4 and not args.stochastic_rounding
        masters = 4 * self.trained if has_masters and self.ranks == 1 else 0
        moments = (2 if args.optim == "adamw_8bit" else 8) * self.trained
        weights = self.train_bytes * self.parameters if self.ranks == 1 else 4 * self.parameters
        if self.resolved.config.actor_train.model_args.quantization is not None and self.shape is not None:
            wide = 2 * self.shape.vocabulary * self.shape.hidden  # embedding and head keep their type
            weights = self.train_bytes * wide + (self.parameters - wide) * 17 // 32
        offloads = self.device == "cuda" and args.offload_optimizer
        whole = {
            "weights": weights,
            "gradients": 4 * self.trained,
            f"{HOST}:optimizer" if offloads else "optimizer": moments + masters,
        }
        if self.holds_reference and self.trained == self.parameters:
            whole["reference"] = self.train_bytes * self.parameters
        if self.holds_critic:
            whole["critic"] = self._count_critic_bytes()
        shared = {purpose: -(-size // self.ranks) for purpose, size in whole.items()}
        return shared | (self._estimate_versions() if number in self.transport.publishers else {})

    def estimate_activations(self) -> dict[str, int]:
        """Return what one forward and backward pass needs on a GPU beside all that stays."""
        if self.shape is None or self.device == "cpu":
            return {}
        shape, train = self.shape, self.resolved.config.actor_train
        micro = self.micro_batch or train.training_args.per_device_train_batch_size
        tokens = -(-micro * self.resolved.derived.sequence_length // self.context)
        layer = tokens * shape.widest * self.train_bytes
        keeps_all, heads = train.model_args.disable_gradient_checkpointing, shape.heads + shape.kv_heads
        recomputed = tokens * 2 * (shape.hidden + heads * shape.head_size) * self.train_bytes
        every = 0 if train.model_args.activation_offload else shape.layers * (layer if keeps_all else recomputed)
        gathered = self.train_bytes * (2 * shape.layer_parameters + 2 * shape.vocabulary * shape.hidden)
        logits = min(12 * tokens * shape.vocabulary, _LOGIT_CHUNKS)
        if keeps_all:
            logits += min(2 * tokens * shape.vocabulary, _KEPT_PROBABILITIES)
        return {"activations": every + 2 * layer + logits + (gathered if self.ranks > 1 else 0)}

    def estimate_libraries(self) -> dict[str, int]:
        """Return what a process has on its card before it does anything."""
        return {"libraries": _LIBRARIES} if self.device == "cuda" else {}

    def estimate_engine(self, kv_bytes: int | None = None, weight_sets: int = WEIGHT_SETS) -> dict[str, int]:
        """Return the needs of one engine with a KV cache of this size."""
        found = {"weights": weight_sets * self.served_bytes}
        if self.transport.adapters:
            base = 0 if self.shares_base else self.served_bytes
            found = {"weights": base + weight_sets * self.infer_bytes * self.trained}
        if kv_bytes:
            found["KV"] = kv_bytes
        copies = _BROADCAST_VERSIONS * (self.transport.kind == "broadcast") + self.transport.delta
        if copies:
            found[f"{HOST}:versions"] = copies * self.infer_bytes * self.version_parameters
        return found

    def estimate_scorer(self, role: str) -> dict[str, int]:
        """Return the needs of a scorer with a replica of its own; `logp` takes new weights beside its own.

        A critic of its own is one process with all of the critic, also where the trainer has several ranks.
        """
        if role == "critic":
            alone = replace(self, ranks=1, context=1)
            return {"critic": alone._count_critic_bytes(), **alone.estimate_activations()}
        return {"weights": (WEIGHT_SETS if role == "logp" else 1) * 4 * self.parameters}

    def estimate_reward(self, name: str, devices: int) -> dict[str, int]:
        """Return the needs of one process of a reward model that is cut over `devices`; nothing if it is not known.

        A judge needs the KV cache of one request at least: its tokenizer may need twice the tokens of the policy's.
        """
        reward = self.resolved.config.rewards[name]
        shape = find_model_shape(reward.model_args.model_name_or_path)
        if shape is None:
            return {}
        size = _DTYPE_BYTES[reward.model_args.dtype] if self.device == "cuda" else 4
        weights = {"weights": size * shape.parameters // devices}
        if get_reward_function(name, reward) == CLASSIFIER:
            return {**weights, "activations": size * _CLASSIFIER_TOKENS * shape.widest}
        longest = 2 * self.resolved.derived.sequence_length + JUDGE_PROMPT_TOKENS
        return {**weights, "KV": size * shape.kv_per_token * longest // devices}

    def _count_critic_bytes(self) -> int:
        """Return the bytes of the whole critic: weights, gradients, moments, and masters of weights in 16 bits."""
        return (16 if self.ranks > 1 or self.train_bytes == 4 else 18) * self.critic

    def _estimate_versions(self) -> dict[str, int]:
        """Return the memory of versions that are kept for engines."""
        on_gpu, parameters = self.device == "cuda", self.version_parameters
        if on_gpu and not self.processes and (size := count_device_version_bytes(parameters, self.card_bytes)):
            return {"versions": size}
        if self.transport.kind == "cuda_ipc":
            return {"versions": self.transport.buffers * self.infer_bytes * parameters}
        count = self.transport.buffers if self.processes else _HEAP_VERSIONS
        return {f"{HOST}:versions": count * self.infer_bytes * parameters}


def divide_rest_among_judges(
    model: MemoryModel, places: Mapping[str, ComponentPlace], left: Mapping[int, int]
) -> dict[str, int]:
    """Return the bytes that the cache of each judge gets beyond one request, of those `left` on each device."""
    judges = {name: place for name, place in places.items() if count_judge_cache(model, place)}
    sharing = Counter(device for place in judges.values() for device in place.devices)
    found = {}
    for name, place in judges.items():
        options = model.resolved.config.rewards[name.split("/")[1]].strategy_args.strategy_config
        rest = min(left[device] // sharing[device] for device in place.devices)
        needs = model.estimate_reward(name.split("/")[1], len(place.devices))
        found[name] = max(min(rest, int(options.gpu_memory_utilization * model.card_bytes) - sum(needs.values())), 0)
    return found


def count_judge_cache(model: MemoryModel, place: ComponentPlace) -> int:
    """Return the bytes of one request in the cache of a judge; 0 for everybody else."""
    if not place.name.startswith("reward/") or not place.devices:
        return 0
    return model.estimate_reward(place.name.split("/")[1], len(place.devices)).get("KV", 0)


def count_engine_slots(resolved: ResolvedConfig, device: Device) -> int:
    """Return how many requests an engine decodes together: `max_num_seqs`, or every sample that can be in flight."""
    derived = resolved.derived
    wanted = resolved.config.actor_infer.strategy_args.strategy_config.max_num_seqs
    return wanted or min((derived.slots + derived.additional_groups) * derived.members_started, MAX_SLOTS[device])


def count_prefix_tokens(resolved: ResolvedConfig, device: Device) -> int:
    """Return the tokens of KV cache beside the slots.

    They hold prompts that groups share, and episodes that wait for their environments.
    """
    slots, longest = count_engine_slots(resolved, device), resolved.derived.sequence_length
    multi_turn = any(custom.history for custom in resolved.config.custom_envs.values())
    return max(slots // 2 if multi_turn else slots // 8, 1) * longest
