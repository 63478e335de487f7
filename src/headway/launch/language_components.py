"""Everything a flow drives, made of real parts: in this process or in children, behind the same protocols."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from headway.cluster.ray.ray_cluster import RayCluster
from headway.config import ResolvedConfig
from headway.data import DataSources
from headway.engines.base import Engine
from headway.engines.remote_engine import RemoteEngine
from headway.environments.base import EnvironmentFactory, SingleTurnEnvironment
from headway.errors import BackendError
from headway.flow.backends import Backends, EngineReserve
from headway.launch.components import (
    ComponentArgs,
    count_engine_slots,
    make_component_args,
    make_native_engine_core,
)
from headway.launch.inference_servers import (
    ServerOptions,
    make_in_process_engines,
    make_server_engines,
    uses_external_engines,
    uses_in_process_vllm,
)
from headway.launch.placement import Placement, has_own_replica, make_visible_devices_env
from headway.launch.transports import make_published_store, make_transport
from headway.processes.base import ChildSpec
from headway.rewards.reward_registry import make_rewards
from headway.trainers.base import Scorer, Trainer
from headway.trainers.remote_trainer import RemoteScorer, RemoteTrainer, ReplicaScorer, ScoreKind
from headway.trainers.sharded.ranked_trainer import MultiRankTrainer
from headway.types import Task
from headway.weights.base import WeightSource, WeightTransport


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyInfo:
    """The model of a run, found and read as far as the controller needs it."""

    path: Path
    critic: Path | None
    tokenizer: Any
    parameters: int
    positions: int | None
    """The longest sequence that it can read; `None`: it does not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingComponents:
    """The heavy parts of a run, and the way between them."""

    trainer: Trainer
    engines: list[Engine]
    transport: WeightTransport
    ref_logp: Scorer | None = None
    logp: Scorer | None = None
    critic: Scorer | None = None
    lent: list[Engine] = field(default_factory=list)
    """Engines on the trainer's devices."""
    reserve: EngineReserve | None = None
    """Engines that may join; `None`: none may."""
    cluster: RayCluster | None = None
    """Closed when the parts on it are."""

    async def start(self) -> None:
        """Start every component at once. Raise the error of the first that does not come up."""
        backends: list[Engine | Trainer] = [self.trainer, *self.engines, *self.lent]
        starts = [_start_with_retry(backend) for backend in backends]
        starts += [scorer.start() for scorer in (self.ref_logp, self.logp) if scorer is not None]
        for outcome in await asyncio.gather(*starts, return_exceptions=True):
            if isinstance(outcome, BaseException):
                raise outcome

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


async def _start_with_retry(backend: Engine | Trainer) -> None:
    """Start a back end; restart it once if its process was lost while it started.

    A `ConfigError` is no `BackendError`, so a process that rejects its arguments is not started again.
    """
    try:
        await backend.start()
    except BackendError:
        await backend.restart()


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceComponents:
    """Engines without a trainer."""

    engines: list[Engine]
    transport: WeightTransport
    source: WeightSource
    release: Callable[[], None]
    cluster: RayCluster | None = None
    """Closed when the engines on it are."""

    async def close(self) -> None:
        """Release everything; no process is left behind."""
        for engine in self.engines:
            await engine.close()
        self.release()
        if self.cluster is not None:
            await self.cluster.close()


def find_policy(resolved: ResolvedConfig) -> PolicyInfo:
    """Find, and where needed fetch and convert, the model. Raises `ConfigError`; also if our engine cannot hold it."""
    from headway.models import load_tokenizer, make_architecture_factory, max_sequence_length, resolve_model
    from headway.models.model_checks import check_attention

    _disable_progress_bars()
    config = resolved.config
    wanted = config.actor_train.model_args.model_name_or_path or config.pretrain
    path = resolve_model(wanted or "")
    shape = make_architecture_factory(path)()
    if not uses_external_engines(resolved):
        check_attention(shape)
    critic = config.critic.model_args.model_name_or_path or config.reward_pretrain
    return PolicyInfo(
        path=path,
        critic=resolve_model(critic) if critic and resolved.derived.needs_critic else None,
        tokenizer=load_tokenizer(path),
        parameters=sum(one.numel() for one in shape.parameters()),
        positions=max_sequence_length(path),
    )


def check_sequence_length(resolved: ResolvedConfig, policy: PolicyInfo) -> None:
    """That sequences may be as long as they may get where our own engine serves them. Raises `ConfigError`."""
    from transformers import AutoConfig

    from headway.models.model_checks import check_rotation

    if not uses_external_engines(resolved):
        config = AutoConfig.from_pretrained(policy.path, local_files_only=True)
        check_rotation(config, resolved.derived.sequence_length)


def _disable_progress_bars() -> None:
    """A run has its own display; how far weights are read is no part of it."""
    from transformers.utils import logging

    logging.disable_progress_bar()


def make_backends(
    resolved: ResolvedConfig,
    policy: PolicyInfo,
    machinery: TrainingComponents,
    sources: DataSources,
    environments: EnvironmentFactory,
) -> Backends:
    """The parts of a run together with what they work on."""
    answer = resolved.config.actor_train.data_args.answer
    own = resolved.derived.hybrid
    return Backends(
        trainer=machinery.trainer,
        engines=tuple(machinery.engines),
        lent=machinery.lent,
        reserve=machinery.reserve,
        transport=machinery.transport,
        tasks=sources.train,
        validation_tasks=sources.validation,
        environments=environments,
        reward=make_rewards(resolved.config.rewards, answer=answer),
        logp=machinery.logp,
        ref_logp=machinery.ref_logp,
        critic=machinery.critic,
        decode=make_decoder(policy.tokenizer),
        devices={"train": (0,), "generate": (0,) if own else (1,)},
    )


def single_turn(task: Task) -> SingleTurnEnvironment:
    """Verifiable tasks are answered once."""
    return _SINGLE_TURN


_SINGLE_TURN = SingleTurnEnvironment()


def make_decoder(tokenizer: Any) -> Any:
    """Actions as text, without the tokens that only mark beginnings and ends."""
    return lambda actions: tokenizer.decode(list(actions), skip_special_tokens=True)


def make_training_components(
    resolved: ResolvedConfig, policy: PolicyInfo, place: Placement, logs: Path | None
) -> TrainingComponents:
    """Trainer and engines, where the placement wants them."""
    train = _make_component_args(resolved, policy, place, place.train_threads)
    engines = _make_engines(resolved, policy, place, logs)
    derived = resolved.derived
    if place.processes:
        return _make_child_components(resolved, place, train, engines, logs)

    from headway.launch.components import make_local_store, make_local_trainer
    from headway.trainers.local.local_scorers import LogpScorer, ReferenceScorer, ValueScorer
    from headway.weights.shared_memory import InProcessTransport

    trainer = make_local_trainer(train, make_local_store(resolved, place.device, policy.parameters))
    return TrainingComponents(
        trainer=trainer,
        engines=engines,
        transport=InProcessTransport(),
        ref_logp=ReferenceScorer(trainer) if derived.needs_reference else None,
        logp=LogpScorer(trainer) if derived.needs_proximal and has_own_replica(resolved, "logp") else None,
        critic=ValueScorer(trainer) if derived.needs_critic else None,
    )


def _make_child_components(
    resolved: ResolvedConfig, place: Placement, train: ComponentArgs, engines: list[Engine], logs: Path | None
) -> TrainingComponents:
    trainer, derived = _make_remote_trainer(resolved, train, place, logs), resolved.derived

    def scorer(role: str, kind: ScoreKind, needed: bool) -> Scorer | None:
        if not needed:
            return None
        if has_own_replica(resolved, role):
            return ReplicaScorer(
                _make_child_spec(role, role, train, place, logs),
                place.start,
                follows=trainer if kind == "policy" else None,
            )
        return RemoteScorer(trainer, kind)

    return TrainingComponents(
        trainer=trainer,
        engines=engines,
        transport=make_transport(resolved, place.route),
        ref_logp=scorer("reference", "reference", derived.needs_reference),
        logp=scorer("logp", "policy", derived.needs_proximal and has_own_replica(resolved, "logp")),
        critic=RemoteScorer(trainer, "value") if derived.needs_critic else None,
        cluster=place.cluster,
    )


def _make_remote_trainer(
    resolved: ResolvedConfig, train: ComponentArgs, place: Placement, logs: Path | None
) -> RemoteTrainer:
    """One process, or ranks."""
    if place.ranks == 1:
        return RemoteTrainer(_make_child_spec("trainer", "trainer", train, place, logs), place.start)

    def each(spec: ChildSpec, rank: int) -> ChildSpec:
        here = _make_child_spec(spec.name, "rank", train, place, logs)
        return replace(spec, env=here.env, log=here.log)

    return MultiRankTrainer(
        _make_child_spec("trainer", "rank", train, place, logs),
        place.start,
        ranks=place.ranks,
        each=each,
        meet_s=resolved.config.cluster.start_timeout_s,
    )


def make_inference_components(
    resolved: ResolvedConfig, policy: PolicyInfo, place: Placement, logs: Path | None
) -> InferenceComponents:
    """Engines, and the policy's weights as something to load from."""
    import torch

    from headway.launch.components import make_heap_store, make_local_store
    from headway.models import load_model

    place = place.without_trainer()
    if place.cluster is not None:
        store = make_heap_store(resolved, place.device)
    elif place.processes:
        store = make_published_store(resolved, place.device, place.route)
    else:
        store = make_local_store(resolved, place.device, policy.parameters)
    model = load_model(policy.path, torch.float32)
    store.publish(0, dict(model.named_parameters()))
    return InferenceComponents(
        engines=_make_engines(resolved, policy, place, logs),
        transport=make_transport(resolved, place.route),
        source=store,
        release=store.close,
        cluster=place.cluster,
    )


def _make_engines(resolved: ResolvedConfig, policy: PolicyInfo, place: Placement, logs: Path | None) -> list[Engine]:
    if uses_external_engines(resolved):
        slots = count_engine_slots(resolved, place.device)
        common = ServerOptions(
            resolved=resolved,
            model=policy.path,
            device=place.device,
            replicas=place.replicas,
            slots=slots,
            threads=place.infer_threads,
            logs=logs,
        )
        return (
            make_in_process_engines(common, place.route)
            if uses_in_process_vllm(resolved)
            else make_server_engines(common)
        )
    return [make_native_engine(resolved, policy, place, logs, f"engine/{n}") for n in range(place.replicas)]


def make_native_engine(
    resolved: ResolvedConfig, policy: PolicyInfo, place: Placement, logs: Path | None, name: str
) -> Engine:
    """One engine of ours, where the placement wants it."""
    part = _make_component_args(resolved, policy, place, place.infer_threads)
    if not place.processes:
        return make_native_engine_core(part, name)
    return RemoteEngine(
        _make_child_spec(name, "engine", part, place, logs), count_engine_slots(resolved, place.device), place.start
    )


def _make_component_args(resolved: ResolvedConfig, policy: PolicyInfo, place: Placement, threads: int) -> ComponentArgs:
    critic = None if policy.critic is None else str(policy.critic)
    return make_component_args(resolved, model=str(policy.path), critic=critic, device=place.device, threads=threads)


def _make_child_spec(name: str, target: str, part: ComponentArgs, place: Placement, logs: Path | None) -> ChildSpec:
    return ChildSpec(
        name=name,
        target=f"headway.launch.children:{target}",
        args={"part": part.to_json(), "name": name, "route": place.route.to_json()},
        threads=part.threads,
        env=make_visible_devices_env(place, name),
        log=None if logs is None else logs / f"{name.replace('/', '-')}.log",
    )
