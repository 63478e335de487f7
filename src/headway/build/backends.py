"""Everything a flow drives, made of real parts: in this process or in children, behind the same protocols."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from headway.build.inside import make_inside
from headway.build.parts import PartArgs, args_of, engine_slots, make_engine
from headway.build.placement import Placement, seen_by
from headway.build.rooms import own_replica
from headway.build.servers import Servers, make_servers, serves, serves_inside
from headway.build.transfer import make_store, make_transport
from headway.cluster.base import ChildSpec
from headway.cluster.ray.cluster import RayCluster
from headway.config import Resolved
from headway.data import Sources
from headway.engines.base import Engine
from headway.engines.remote import RemoteEngine
from headway.environments.base import EnvironmentFactory, SingleTurn
from headway.errors import BackendError
from headway.flow.backends import Backends, Reserve
from headway.rewards.registry import make_rewards
from headway.trainers.base import Scorer, Trainer
from headway.trainers.remote import Kind, RemoteScorer, RemoteTrainer, ReplicaScorer
from headway.trainers.sharded.remote import RankedTrainer
from headway.types import Task
from headway.weights.base import WeightSource, WeightTransport


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The model of a run, found and read as far as the controller needs it."""

    path: Path
    critic: Path | None
    tokenizer: Any
    parameters: int
    positions: int | None
    """The longest sequence that it can read; `None`: it does not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machinery:
    """The heavy parts of a run, and the way between them."""

    trainer: Trainer
    engines: list[Engine]
    transport: WeightTransport
    ref_logp: Scorer | None = None
    logp: Scorer | None = None
    critic: Scorer | None = None
    lent: list[Engine] = field(default_factory=list)
    """Engines on the trainer's devices."""
    reserve: Reserve | None = None
    """Engines that may join; `None`: none may."""
    cluster: RayCluster | None = None
    """Closed when the parts on it are."""

    async def start(self) -> None:
        """Have every process ready, all at once. Raises what keeps one of them from coming up, twice."""
        parts = (self.trainer, *self.engines, *self.lent, self.ref_logp, self.logp)
        starts = [_started(part) for part in parts if hasattr(part, "start")]
        for outcome in await asyncio.gather(*starts, return_exceptions=True):
            if isinstance(outcome, BaseException):
                raise outcome

    async def close(self) -> None:
        """Release everything; no process is left behind."""
        for engine in (*self.engines, *self.lent):
            await engine.close()
        for scorer in (self.ref_logp, self.logp):
            close = getattr(scorer, "close", None)
            if close is not None:
                await close()
        await self.trainer.close()
        close = getattr(self.transport, "close", None)
        if close is not None:
            close()
        if self.cluster is not None:
            await self.cluster.close()


async def _started(part: Any) -> None:
    """A process that is killed while it starts gets another try; one that refuses what it was given does not."""
    try:
        await part.start()
    except BackendError:
        if not hasattr(part, "restart"):
            raise
        await part.restart()


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
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


def find_policy(resolved: Resolved) -> Policy:
    """Find, and where needed fetch and convert, the model. Raises `ConfigError`; also if our engine cannot hold it."""
    from headway.models import architecture, load_tokenizer, longest_sequence, resolve
    from headway.models.suitability import check_attention

    _without_progress_bars()
    config = resolved.config
    wanted = config.actor_train.model_args.model_name_or_path or config.pretrain
    path = resolve(wanted or "")
    shape = architecture(path)()
    if not serves(resolved):
        check_attention(shape)
    critic = config.critic.model_args.model_name_or_path or config.reward_pretrain
    return Policy(
        path=path,
        critic=resolve(critic) if critic and resolved.derived.needs_critic else None,
        tokenizer=load_tokenizer(path),
        parameters=sum(one.numel() for one in shape.parameters()),
        positions=longest_sequence(path),
    )


def check_lengths(resolved: Resolved, policy: Policy) -> None:
    """That sequences may be as long as they may get where our own engine serves them. Raises `ConfigError`."""
    from transformers import AutoConfig

    from headway.models.suitability import check_rotation

    if not serves(resolved):
        config = AutoConfig.from_pretrained(policy.path, local_files_only=True)
        check_rotation(config, resolved.derived.sequence_length)


def _without_progress_bars() -> None:
    """A run has its own display; how far weights are read is no part of it."""
    from transformers.utils import logging

    logging.disable_progress_bar()


def make_backends(
    resolved: Resolved, policy: Policy, machinery: Machinery, sources: Sources, environments: EnvironmentFactory
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
        decode=decoder(policy.tokenizer),
        devices={"train": (0,), "generate": (0,) if own else (1,)},
    )


def single_turn(task: Task) -> SingleTurn:
    """Verifiable tasks are answered once."""
    return _SINGLE_TURN


_SINGLE_TURN = SingleTurn()


def decoder(tokenizer: Any) -> Any:
    """Actions as text, without the tokens that only mark beginnings and ends."""
    return lambda actions: tokenizer.decode(list(actions), skip_special_tokens=True)


def make_machinery(resolved: Resolved, policy: Policy, place: Placement, logs: Path | None) -> Machinery:
    """Trainer and engines, where the placement wants them."""
    train = _part(resolved, policy, place, place.train_threads)
    engines = _engines(resolved, policy, place, logs)
    derived = resolved.derived
    if place.processes:
        return _with_child(resolved, place, train, engines, logs)

    from headway.build.parts import make_trainer, own_store
    from headway.trainers.local.scorers import LogpScorer, ReferenceScorer, ValueScorer
    from headway.weights.transport import InProcessTransport

    trainer = make_trainer(train, own_store(resolved, place.device, policy.parameters))
    return Machinery(
        trainer=trainer,
        engines=engines,
        transport=InProcessTransport(),
        ref_logp=ReferenceScorer(trainer) if derived.needs_reference else None,
        logp=LogpScorer(trainer) if derived.needs_proximal and own_replica(resolved, "logp") else None,
        critic=ValueScorer(trainer) if derived.needs_critic else None,
    )


def _with_child(
    resolved: Resolved, place: Placement, train: PartArgs, engines: list[Engine], logs: Path | None
) -> Machinery:
    trainer, derived = _trainer(resolved, train, place, logs), resolved.derived

    def scorer(role: str, kind: Kind, needed: bool) -> Scorer | None:
        if not needed:
            return None
        if own_replica(resolved, role):
            return ReplicaScorer(
                _spec(role, role, train, place, logs), place.start, follows=trainer if kind == "policy" else None
            )
        return RemoteScorer(trainer, kind)

    return Machinery(
        trainer=trainer,
        engines=engines,
        transport=make_transport(resolved, place.route),
        ref_logp=scorer("reference", "reference", derived.needs_reference),
        logp=scorer("logp", "policy", derived.needs_proximal and own_replica(resolved, "logp")),
        critic=RemoteScorer(trainer, "value") if derived.needs_critic else None,
        cluster=place.cluster,
    )


def _trainer(resolved: Resolved, train: PartArgs, place: Placement, logs: Path | None) -> RemoteTrainer:
    """One process, or ranks."""
    if place.ranks == 1:
        return RemoteTrainer(_spec("trainer", "trainer", train, place, logs), place.start)

    def each(spec: ChildSpec, rank: int) -> ChildSpec:
        here = _spec(spec.name, "rank", train, place, logs)
        return replace(spec, env=here.env, log=here.log)

    return RankedTrainer(
        _spec("trainer", "rank", train, place, logs),
        place.start,
        ranks=place.ranks,
        each=each,
        meet_s=resolved.config.cluster.start_timeout_s,
    )


def make_served(resolved: Resolved, policy: Policy, place: Placement, logs: Path | None) -> Served:
    """Engines, and the policy's weights as something to load from."""
    import torch

    from headway.build.parts import heap_store, own_store
    from headway.models import load_model

    place = place.without_trainer()
    if place.cluster is not None:
        store = heap_store(resolved, place.device)
    elif place.processes:
        store = make_store(resolved, place.device, place.route)
    else:
        store = own_store(resolved, place.device, policy.parameters)
    model = load_model(policy.path, torch.float32)
    store.publish(0, dict(model.named_parameters()))
    return Served(
        engines=_engines(resolved, policy, place, logs),
        transport=make_transport(resolved, place.route),
        source=store,
        release=store.close,
        cluster=place.cluster,
    )


def _engines(resolved: Resolved, policy: Policy, place: Placement, logs: Path | None) -> list[Engine]:
    if serves(resolved):
        slots = engine_slots(resolved, place.device)
        common = Servers(
            resolved=resolved,
            model=policy.path,
            device=place.device,
            replicas=place.replicas,
            slots=slots,
            threads=place.infer_threads,
            logs=logs,
        )
        return make_inside(common, place.route) if serves_inside(resolved) else make_servers(common)
    return [make_own_engine(resolved, policy, place, logs, f"engine/{n}") for n in range(place.replicas)]


def make_own_engine(resolved: Resolved, policy: Policy, place: Placement, logs: Path | None, name: str) -> Engine:
    """One engine of ours, where the placement wants it."""
    part = _part(resolved, policy, place, place.infer_threads)
    if not place.processes:
        return make_engine(part, name)
    return RemoteEngine(_spec(name, "engine", part, place, logs), engine_slots(resolved, place.device), place.start)


def _part(resolved: Resolved, policy: Policy, place: Placement, threads: int) -> PartArgs:
    critic = None if policy.critic is None else str(policy.critic)
    return args_of(resolved, model=str(policy.path), critic=critic, device=place.device, threads=threads)


def _spec(name: str, target: str, part: PartArgs, place: Placement, logs: Path | None) -> ChildSpec:
    return ChildSpec(
        name=name,
        target=f"headway.build.children:{target}",
        args={"part": part.to_json(), "name": name, "route": place.route.to_json()},
        threads=part.threads,
        env=seen_by(place, name),
        log=None if logs is None else logs / f"{name.replace('/', '-')}.log",
    )
