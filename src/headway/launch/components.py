"""Trainer, engine and scorer, made in the process that they live in.

A part is described by plain JSON (`ComponentArgs`), so that the same function makes it in this process and in a child.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from headway.config import ResolvedConfig, load_config
from headway.launch.placement import Device
from headway.launch.transports import make_weight_store, select_wire_dtype

if TYPE_CHECKING:
    from headway.engines.native import NativeEngine
    from headway.trainers.local import LocalSettings, LocalTrainer
    from headway.trainers.local.local_scorers import PolicyScorer
    from headway.trainers.sharded.sharded_trainer import RankTrainer
    from headway.weights.base import WeightReceiver
    from headway.weights.weight_store import WeightStore

MAX_SLOTS: Mapping[Device, int] = {"cpu": 64, "cuda": 512}
"""Requests that an engine works on together: beyond this a step gets slower as fast as it gets wider."""

_VERSIONS_ON_DEVICE = 4
"""Two that are held, one on its way in, one that takes its place."""
_SHARE_FOR_VERSIONS = 0.15
"""Of a GPU's memory; beyond it versions go through the memory of the host."""

_GPU_DTYPES: Mapping[str, Literal["float32", "bfloat16", "float16"]] = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp32": "float32",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ComponentArgs:
    """Everything that a part depends on."""

    config: Mapping[str, Any]
    """The configuration, as `ResolvedConfig.changed` gives it."""
    model: str
    """Directory of the policy at the start."""
    critic: str | None
    """Directory of the critic's decoder; `None`: as the policy."""
    device: Device
    threads: int

    def to_json(self) -> dict[str, Any]:
        """For a child process."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ComponentArgs:
        """What `to_json` gave."""
        return cls(**data)

    def resolved(self) -> ResolvedConfig:
        """The configuration again."""
        return load_config(dict(self.config))


def make_component_args(
    resolved: ResolvedConfig, *, model: str, critic: str | None, device: Device, threads: int
) -> ComponentArgs:
    """A part of this run."""
    return ComponentArgs(config=resolved.changed(), model=model, critic=critic, device=device, threads=threads)


def make_local_trainer(args: ComponentArgs, store: WeightStore) -> LocalTrainer:
    """The policy being trained, publishing into `store`."""
    from headway.trainers.local import LocalTrainer

    return LocalTrainer(
        _make_model_loader(args.model), _make_local_settings(args), store, **_make_trainer_options(args)
    )


def make_rank_trainer(args: ComponentArgs, store: WeightStore | None, ranks: int) -> RankTrainer:
    """One of many processes that hold the policy together, and have met; rank 0 publishes into `store`."""
    from headway.launch.placement import make_rank_layout
    from headway.trainers.sharded.sharded_ranks import ShardedRankGroup
    from headway.trainers.sharded.sharded_trainer import RankTrainer
    from headway.weights.weight_store import NonPublishingStore

    team = ShardedRankGroup(make_rank_layout(args.resolved(), ranks), args.device)
    kept = NonPublishingStore(select_wire_dtype(args.resolved(), args.device)) if store is None else store
    return RankTrainer(
        _make_model_loader(args.model), _make_local_settings(args), kept, team, **_make_trainer_options(args)
    )


def _make_model_loader(directory: str) -> Callable[[], Any]:
    import torch

    from headway.models import load_model

    return partial(load_model, directory, torch.float32)


def _make_trainer_options(args: ComponentArgs) -> dict[str, Any]:
    """What a trainer has beside its model."""
    from headway.algorithms import make_kl_controller
    from headway.models import load_tokenizer

    config = args.resolved().config
    return {
        "make_critic": _make_model_loader(args.critic) if args.critic else None,
        "make_kl": lambda: make_kl_controller(config),
        "tokenizer": load_tokenizer(args.model),
    }


def make_policy_replica(args: ComponentArgs, *, follows: Callable[[Any], Any] | None = None) -> PolicyScorer:
    """The policy of the start as a scorer; where `follows` opens payloads, one that takes the trainer's weights."""
    import torch

    from headway.models import load_model
    from headway.trainers.local.local_scorers import PolicyScorer
    from headway.weights.weight_receiver import DoubleBufferedReceiver

    settings = _make_local_settings(args)
    model = load_model(args.model, torch.float32)
    if follows is None:
        return PolicyScorer(model, settings)
    return PolicyScorer(
        model,
        settings,
        lambda switch: DoubleBufferedReceiver(switch, dtype=torch.float32, threads=args.threads, read=follows),
    )


def _make_local_settings(args: ComponentArgs) -> LocalSettings:
    from headway.trainers.local import make_local_settings

    resolved = args.resolved()
    half = args.device == "cuda" and resolved.config.actor_train.model_args.dtype == "bf16"
    return make_local_settings(resolved, precision="bf16" if half else "fp32", device=args.device, threads=args.threads)


def count_engine_slots(resolved: ResolvedConfig, device: Device) -> int:
    """As many as samples can be in flight; `max_num_seqs` says otherwise."""
    derived = resolved.derived
    wanted = resolved.config.actor_infer.strategy_args.strategy_config.max_num_seqs
    return wanted or min((derived.slots + derived.additional_groups) * derived.members_started, MAX_SLOTS[device])


def count_prefix_tokens(resolved: ResolvedConfig, device: Device) -> int:
    """KV beside the slots: of prompts that groups share, and of episodes while their environments are at work."""
    slots, longest = count_engine_slots(resolved, device), resolved.derived.sequence_length
    goes_on = any(custom.history for custom in resolved.config.custom_envs.values())
    return max(slots // 2 if goes_on else slots // 8, 1) * longest


def make_native_engine_core(
    args: ComponentArgs,
    name: str,
    *,
    read: Callable[[Any], Any] = memoryview,
    around: Callable[[WeightReceiver], WeightReceiver] = lambda receiver: receiver,
) -> NativeEngine:
    """One replica; its weights arrive later. `read` opens the payloads of buckets, `around` is put before them."""
    from headway.engines.native import NativeEngine, NativeSettings
    from headway.models import find_end_tokens, load_tokenizer, make_architecture_factory

    resolved = args.resolved()
    tokenizer = load_tokenizer(args.model)
    return NativeEngine(
        name,
        make_architecture_factory(args.model),
        NativeSettings(
            slots=count_engine_slots(resolved, args.device),
            slot_tokens=resolved.derived.sequence_length,
            prefix_tokens=count_prefix_tokens(resolved, args.device),
            threads=args.threads,
            seed=resolved.config.seed,
            device=args.device,
            dtype="float32" if args.device == "cpu" else _GPU_DTYPES[resolved.config.actor_infer.model_args.dtype],
        ),
        decode=tokenizer.decode,
        eos=find_end_tokens(args.model),
        read=read,
        around=around,
    )


def make_heap_store(resolved: ResolvedConfig, device: Device) -> WeightStore:
    """Versions in the memory of this process, from which a transport takes them."""
    return make_weight_store(resolved, device, None)


def make_local_store(resolved: ResolvedConfig, device: Device, parameters: int) -> WeightStore:
    """Where a trainer publishes versions for engines in its own process: on the GPU, where that has room for them."""
    return make_weight_store(resolved, device, _device_arena(parameters) if device == "cuda" else None)


def _device_arena(parameters: int) -> Any:
    from headway.weights.device_memory import DeviceArena

    return DeviceArena("cuda") if count_device_version_bytes(parameters) else None


def count_device_version_bytes(parameters: int) -> int:
    """Bytes that versions take on the GPU; 0 where they go through the memory of the host."""
    import torch

    room, wanted = torch.cuda.get_device_properties(0).total_memory, 2 * parameters * _VERSIONS_ON_DEVICE
    return wanted if wanted < _SHARE_FOR_VERSIONS * room else 0
