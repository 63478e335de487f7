"""Targets of child processes: what runs in the processes of a trainer and of an engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from headway.build.parts import PartArgs, make_engine, make_rank, make_replica, make_trainer
from headway.build.transfer import EngineEnd, make_store, source_of
from headway.build.ways import Route

if TYPE_CHECKING:
    from headway.engines.base import Engine
    from headway.trainers.base import Scorer, Trainer
    from headway.trainers.sharded.host import Rank


def trainer(args: Mapping[str, Any]) -> Trainer:
    """The trainer; versions are published for other processes."""
    part, route = PartArgs.from_json(args["part"]), Route(**args["route"])
    resolved = part.resolved()
    made = make_trainer(part, make_store(resolved, part.device, route))
    made.source = source_of(made.source, resolved, route)
    return made


def rank(args: Mapping[str, Any]) -> Rank:
    """One rank of the trainer; the first publishes versions for other processes."""
    from headway.trainers.sharded.host import Rank

    part, route = PartArgs.from_json(args["part"]), Route(**args["route"])
    resolved, number, ranks = part.resolved(), args["rank"], args["ranks"]

    def make() -> Trainer:
        if number:
            return make_rank(part, None, ranks)
        made = make_rank(part, make_store(resolved, part.device, route), ranks)
        made.source = source_of(made.source, resolved, route)
        return made

    return Rank(number=number, ranks=ranks, device=part.device, make=make)


async def engine(args: Mapping[str, Any]) -> Engine:
    """One replica; its model is built before the parent goes on."""
    part = PartArgs.from_json(args["part"])
    end = EngineEnd.of(Route(**args["route"]), args["name"], part.device)
    made = make_engine(part, args["name"], read=end.read, around=end.around)
    await made.restart()
    return made


def reference(args: Mapping[str, Any]) -> Scorer:
    """The policy of the start, which only scores."""
    return make_replica(PartArgs.from_json(args["part"]))


def logp(args: Mapping[str, Any]) -> Scorer:
    """A copy of the policy that follows the trainer, and only scores."""
    part = PartArgs.from_json(args["part"])
    return make_replica(part, follows=EngineEnd.of(Route(**args["route"]), "", part.device).read)
