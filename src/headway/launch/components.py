"""The components of a run behind the protocols that the scheduler drives, whatever kind of model they hold.

A `ModelFamily` makes the components of one kind of model. Each component is described by plain JSON (`ComponentArgs`),
so that the same function makes it in this process and in a child. Children import this module: what only the
controller needs is imported where it is used.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from headway.cluster.ray.ray_cluster import RayCluster
from headway.config import ResolvedConfig, load_config
from headway.engines.base import Engine
from headway.engines.remote_engine import RemoteEngine
from headway.errors import BackendError
from headway.launch.inference_servers import TORCH_DTYPES
from headway.models.policy_info import PolicyInfo
from headway.placement.adapter_serving import count_version_parameters
from headway.placement.component_places import count_memory_share, let_engines_sleep
from headway.placement.memory_budget import choose_weight_sets
from headway.placement.memory_model import WEIGHT_SETS, count_engine_slots
from headway.placement.placement import LENT_ENGINE, Placement, make_visible_devices_env
from headway.placement.server_requirements import uses_external_engines
from headway.processes.base import ChildSpec
from headway.trainers.base import Scorer, Trainer
from headway.weights.base import PublishingStore, WeightReceiver, WeightTransport
from headway.weights.transports import (
    Device,
    ReceiverEnd,
    TransportPlan,
    make_local_store,
    make_published_store,
    make_receiver_end,
    make_transport,
    make_weight_store,
)

if TYPE_CHECKING:
    from headway.data import DataSources
    from headway.environments.base import EnvironmentFactory
    from headway.flow.backends import Backends, EngineReserve
    from headway.rewards.base import Reward
    from headway.trainers.local.local_trainer import ThreadedTrainer
    from headway.weights.weight_store import WeightStore

MAX_ENGINES_ON_CPU = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ComponentArgs:
    """Everything that a trainer, engine or scorer depends on."""

    config: Mapping[str, Any]
    """The configuration, as `ResolvedConfig.changed` gives it."""
    model: str
    """Directory of the initial policy."""
    critic: str | None
    """Directory of the critic's decoder; `None`: the same as the policy."""
    device: Device
    threads: int
    kv_cache_bytes: int | None = None
    """Memory of an engine's KV cache; `None`: the engine decides."""
    weight_sets: int = WEIGHT_SETS
    """Copies of an engine's weights; with one, a version replaces what is served."""
    adapters: bool = False
    """Whether a version is adapters alone."""
    micro_batch: int = 0
    """Samples of a forward and backward pass of the trainer; 0: as configured."""

    def load_config(self) -> ResolvedConfig:
        """Resolve the configuration again."""
        return load_config(dict(self.config))

    def select_engine_dtype(self, resolved: ResolvedConfig) -> Literal["float32", "bfloat16", "float16"]:
        """Return the type that an engine computes with, where it does so in one."""
        return "float32" if self.device == "cpu" else TORCH_DTYPES[resolved.config.actor_infer.model_args.dtype]

    def select_precision(self, resolved: ResolvedConfig) -> Literal["bf16", "fp32"]:
        """Return the precision that a trainer computes with."""
        half = self.device == "cuda" and resolved.config.actor_train.model_args.dtype == "bf16"
        return "bf16" if half else "fp32"


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchContext:
    """What all components of one run are made from."""

    resolved: ResolvedConfig
    policy: PolicyInfo
    placement: Placement
    logs: Path | None = None
    """Directory for the output of child processes; `None`: it goes nowhere."""

    def make_args(self, threads: int, name: str = "") -> ComponentArgs:
        """Return the arguments of a component with this number of CPU threads."""
        critic, place, config = self.policy.critic, self.placement.places.get(name), self.resolved.changed()
        if place is not None and place.sleeps and name.startswith("trainer"):
            config["actor_train.training_args.offload_optimizer"] = True
        return ComponentArgs(
            config=config,
            model=str(self.policy.path),
            critic=None if critic is None else str(critic),
            device=self.placement.device,
            threads=threads,
            kv_cache_bytes=None if place is None else place.kv_cache_bytes,
            weight_sets=choose_weight_sets(self.resolved, place),
            adapters=self.placement.transport.adapters,
            micro_batch=self.placement.micro_batch,
        )

    def make_child_spec(self, name: str, target: Callable[..., Any], threads: int) -> ChildSpec:
        """Describe a child process, in which `target` makes the component called `name`."""
        return ChildSpec(
            name=name,
            target=f"{target.__module__}:{target.__name__}",
            args={
                "component": asdict(self.make_args(threads, name)),
                "name": name,
                "transport": self.placement.transport.to_json(),
                "memory_share": count_memory_share(self.placement.places, self.placement.machine, name),
            },
            threads=threads,
            env=make_visible_devices_env(self.placement, name),
            log=None if self.logs is None else self.logs / f"{name.replace('/', '-')}.log",
        )

    def make_local_store(self) -> WeightStore:
        """Make the store for a trainer and engines that are threads of this process."""
        size = count_version_parameters(self.resolved, self.placement.transport, self.policy.path)
        return make_local_store(self.resolved, self.placement.device, size or self.policy.parameters)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingComponents:
    """Trainer, engines and scorers of a run, and the transport between them."""

    trainer: Trainer
    engines: list[Engine]
    transport: WeightTransport
    ref_logp: Scorer | None = None
    logp: Scorer | None = None
    critic: Scorer | None = None
    lent: list[Engine] = field(default_factory=list)
    """Engines on the trainer's devices."""
    reserve: EngineReserve | None = None
    """Source of engines that may join later; `None`: none may."""
    cluster: RayCluster | None = None
    """Closed after the components that run on it."""
    engines_sleep: bool = False
    """Whether engines free their memory while the trainer uses devices that they share."""

    async def start(self, on_pending: Callable[[Sequence[str]], None] = lambda names: None) -> None:
        """Start every component at once. Raise the error of the first that does not come up.

        `on_pending` gets the names of those that are not up yet, each time that one of them is.
        """
        starts = [("trainer", start_with_retry(self.trainer))]
        starts += [(engine.name, start_with_retry(engine)) for engine in (*self.engines, *self.lent)]
        scorers = (("ref_logp", self.ref_logp), ("logp", self.logp))
        starts += [(name, scorer.start()) for name, scorer in scorers if scorer is not None]
        await start_together(starts, on_pending)

    async def close(self) -> None:
        """Release every component; no process is left behind."""
        for engine in (*self.engines, *self.lent):
            await engine.close()
        for scorer in (self.ref_logp, self.logp):
            if scorer is not None:
                await scorer.close()
        await self.trainer.close()
        self.transport.close()
        if self.cluster is not None:
            await self.cluster.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceComponents:
    """Engines without a trainer, and a store that holds the policy as version 0."""

    engines: list[Engine]
    transport: WeightTransport
    store: PublishingStore
    cluster: RayCluster | None = None
    """Closed after the engines that run on it."""

    async def load_policy(self, receiver: WeightReceiver) -> None:
        """Send the policy to one engine, the way that a trainer's weights would go. Raises `BackendError`."""
        manifest, buckets = await self.store.gather(0)
        await receiver.begin(manifest)
        async for bucket in buckets:
            await receiver.load(await self.transport.send(bucket, receiver))
        await receiver.flip()

    async def close(self) -> None:
        """Release every engine and the weights; no process is left behind."""
        for engine in self.engines:
            await engine.close()
        self.transport.close()
        self.store.close()
        if self.cluster is not None:
            await self.cluster.close()


class ModelFamily(ABC):
    """One kind of model, and how the components of a run are made for it."""

    @abstractmethod
    def find_policy(self, resolved: ResolvedConfig) -> PolicyInfo:
        """Find the model and read as much of it as the controller needs. Raises `ConfigError`."""

    def check_policy(self, resolved: ResolvedConfig, policy: PolicyInfo, placement: Placement) -> None:
        """Check that the model can be trained and served as configured. Raises `ConfigError`."""

    def find_adapter_problem(self, policy: PolicyInfo) -> str | None:
        """Return why adapters of this model cannot be served apart from their base; None if they can."""
        return None

    def check_sources(self, policy: PolicyInfo, sources: DataSources) -> None:
        """Check that the model can read the data. Raises `ConfigError`."""

    @abstractmethod
    def read_weights(self, policy: PolicyInfo) -> Mapping[str, Any]:
        """Return the tensors of the policy by name."""

    @abstractmethod
    def make_training_components(self, context: LaunchContext) -> TrainingComponents:
        """Make trainer, engines and scorers where the placement puts them; nothing is started yet."""

    @abstractmethod
    def make_engine(self, context: LaunchContext, name: str) -> Engine:
        """Make one engine of our own where the placement puts it; it is not started yet."""

    def make_engines(self, context: LaunchContext) -> list[Engine]:
        """Make all engines that a run begins with."""
        return [self.make_engine(context, f"engine/{number}") for number in range(context.placement.replicas)]

    def make_inference_components(self, context: LaunchContext) -> InferenceComponents:
        """Make engines, and put the weights of the policy where they can load them."""
        resolved, placement = context.resolved, context.placement.without_trainer()
        engines = self.make_engines(replace(context, placement=placement))
        if placement.cluster is not None:
            store: PublishingStore = make_weight_store(resolved, placement.device)
        elif placement.processes:
            store = make_published_store(resolved, placement.device, placement.transport)
        else:
            store = context.make_local_store()
        store.publish(0, self.read_weights(context.policy))
        transport = make_transport(resolved, placement.transport)
        return InferenceComponents(engines=engines, transport=transport, store=store, cluster=placement.cluster)


def make_run_components(context: LaunchContext, family: ModelFamily) -> TrainingComponents:
    """Make the components of a run, with engines that may join later. The number of servers is fixed."""
    components = family.make_training_components(context)
    if uses_external_engines(context.resolved):
        return components
    lent = [family.make_engine(context, LENT_ENGINE)] if context.resolved.config.lend_idle_trainer else []
    reserve = _make_reserve(context, family, components.engines)
    return replace(components, lent=lent, reserve=reserve, engines_sleep=let_engines_sleep(context.placement.places))


def _make_reserve(context: LaunchContext, family: ModelFamily, engines: list[Engine]) -> EngineReserve:
    """Allow many engines on the CPU of this machine; elsewhere those that the run was started with."""
    from headway.flow.backends import EngineReserve

    placement = context.placement

    def make(name: str) -> Engine:
        engines.append(engine := family.make_engine(context, name))  # closed with the others
        return engine

    if placement.cluster is not None:
        why = "each engine has reserved resources in the cluster"
    elif placement.device == "cpu":
        return EngineReserve(make=make, most=MAX_ENGINES_ON_CPU, why=f"at most {MAX_ENGINES_ON_CPU} on one machine")
    else:
        why = "each engine has a GPU of its own" if placement.gpus else "the engines share the memory of one GPU"
    return EngineReserve(make=make, most=placement.replicas, why=f"{why}, and {placement.replicas} were given")


def make_backends(
    resolved: ResolvedConfig,
    policy: PolicyInfo,
    components: TrainingComponents,
    sources: DataSources,
    environments: EnvironmentFactory,
    reward: Reward,
) -> Backends:
    """Join the components of a run with the data, environments and rewards that they work on."""
    from headway.flow.backends import Backends

    return Backends(
        trainer=components.trainer,
        engines=tuple(components.engines),
        lent=components.lent,
        reserve=components.reserve,
        transport=components.transport,
        tasks=sources.train,
        validation_tasks=sources.validation,
        environments=environments,
        reward=reward,
        logp=components.logp,
        ref_logp=components.ref_logp,
        critic=components.critic,
        decode=make_decoder(policy.tokenizer),
        engines_sleep=components.engines_sleep,
        devices={"train": (0,), "generate": (0,) if resolved.derived.hybrid_engine else (1,)},
    )


async def start_together(
    starts: Sequence[tuple[str, Awaitable[None]]], on_pending: Callable[[Sequence[str]], None]
) -> None:
    """Await named starts together and raise the first error; `on_pending` gets the names of those that are not up."""
    pending = [name for name, _ in starts]

    async def await_start(name: str, start: Awaitable[None]) -> None:
        await start
        pending.remove(name)
        on_pending(pending)

    on_pending(pending)
    outcomes = await asyncio.gather(*(await_start(*named) for named in starts), return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome


async def start_with_retry(backend: Engine | Trainer) -> None:
    """Start a back end; restart it once if its process was lost while it started.

    A `ConfigError` is no `BackendError`, so a process that rejects its arguments is not started again.
    """
    try:
        await backend.start()
    except BackendError:
        await backend.restart()


def make_decoder(tokenizer: Any) -> Any:
    """Return a function from actions to text, without the tokens that only mark beginnings and ends."""
    return lambda actions: tokenizer.decode(list(actions), skip_special_tokens=True)


def make_own_engine(
    context: LaunchContext,
    name: str,
    make: Callable[[ComponentArgs, str], Engine],
    target: Callable[[Mapping[str, Any]], Awaitable[Engine]],
) -> Engine:
    """Make an engine in this process by `make`, or in a child by `target`, where the placement puts it."""
    placement = context.placement
    if not placement.processes:
        return make(context.make_args(placement.infer_threads, name), name)
    spec = context.make_child_spec(name, target, placement.infer_threads)
    return RemoteEngine(spec, count_engine_slots(context.resolved, placement.device), placement.start_child)


# -- in child processes


def read_child_args(args: Mapping[str, Any]) -> tuple[ComponentArgs, TransportPlan]:
    """Read the arguments that `LaunchContext.make_child_spec` wrote, and keep to the memory that they allow."""
    component, share = ComponentArgs(**args["component"]), args.get("memory_share", 1.0)
    if component.device == "cuda" and share < 1.0:
        import torch

        torch.cuda.set_per_process_memory_fraction(share, 0)
    return component, TransportPlan(**args["transport"])


async def create_own_engine(
    args: Mapping[str, Any], make: Callable[[ComponentArgs, str, ReceiverEnd], Engine]
) -> Engine:
    """Make an engine, and build its model before the parent goes on."""
    component, transport = read_child_args(args)
    engine = make(component, args["name"], make_receiver_end(transport, args["name"], component.device))
    await engine.restart()
    return engine


def make_publishing_trainer(
    args: Mapping[str, Any], make_trainer: Callable[[ComponentArgs, PublishingStore], ThreadedTrainer[Any]]
) -> ThreadedTrainer[Any]:
    """Make a trainer, or a rank of it, that publishes its versions for other processes."""
    component, transport = read_child_args(args)
    store = make_published_store(component.load_config(), component.device, transport, args.get("rank", 0))
    return make_trainer(component, store)
