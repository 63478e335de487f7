"""Targets of child processes: what runs in the processes of a trainer and of an engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from headway.launch.components import (
    ComponentArgs,
    make_local_trainer,
    make_native_engine_core,
    make_policy_replica,
    make_rank_trainer,
)
from headway.launch.transports import ReceiverEnd, TransportPlan, make_published_store, wrap_weight_source

if TYPE_CHECKING:
    from headway.engines.base import Engine
    from headway.trainers.base import Scorer, Trainer
    from headway.trainers.sharded.rank_host import RankSpec


def trainer(args: Mapping[str, Any]) -> Trainer:
    """The trainer; versions are published for other processes."""
    part, route = ComponentArgs.from_json(args["part"]), TransportPlan(**args["route"])
    resolved = part.resolved()
    made = make_local_trainer(part, make_published_store(resolved, part.device, route))
    made.source = wrap_weight_source(made.source, resolved, route)
    return made


def rank(args: Mapping[str, Any]) -> RankSpec:
    """One rank of the trainer; the first publishes versions for other processes."""
    from headway.trainers.sharded.rank_host import RankSpec

    part, route = ComponentArgs.from_json(args["part"]), TransportPlan(**args["route"])
    resolved, number, ranks = part.resolved(), args["rank"], args["ranks"]

    def make() -> Trainer:
        if number:
            return make_rank_trainer(part, None, ranks)
        made = make_rank_trainer(part, make_published_store(resolved, part.device, route), ranks)
        made.source = wrap_weight_source(made.source, resolved, route)
        return made

    return RankSpec(number=number, ranks=ranks, device=part.device, make=make)


async def engine(args: Mapping[str, Any]) -> Engine:
    """One replica; its model is built before the parent goes on."""
    part = ComponentArgs.from_json(args["part"])
    end = ReceiverEnd.of(TransportPlan(**args["route"]), args["name"], part.device)
    made = make_native_engine_core(part, args["name"], read=end.read, around=end.around)
    await made.restart()
    return made


def reference(args: Mapping[str, Any]) -> Scorer:
    """The policy of the start, which only scores."""
    return make_policy_replica(ComponentArgs.from_json(args["part"]))


def logp(args: Mapping[str, Any]) -> Scorer:
    """A copy of the policy that follows the trainer, and only scores."""
    part = ComponentArgs.from_json(args["part"])
    return make_policy_replica(part, follows=ReceiverEnd.of(TransportPlan(**args["route"]), "", part.device).read)
