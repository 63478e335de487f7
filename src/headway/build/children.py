"""Targets of child processes: what runs in the processes of a trainer and of an engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from headway.build.parts import PartArgs, make_engine, make_replica, make_trainer, shared_store

if TYPE_CHECKING:
    from headway.engines.base import Engine
    from headway.trainers.base import Scorer, Trainer


def trainer(args: Mapping[str, Any]) -> Trainer:
    """The trainer; versions are published into shared memory."""
    part = PartArgs.from_json(args["part"])
    return make_trainer(part, shared_store(part.resolved(), part.device))


async def engine(args: Mapping[str, Any]) -> Engine:
    """One replica, reading weights from shared memory; its model is built before the parent goes on."""
    from headway.weights.segment import SharedReader

    made = make_engine(PartArgs.from_json(args["part"]), args["name"], read=SharedReader().buffer)
    await made.restart()
    return made


def reference(args: Mapping[str, Any]) -> Scorer:
    """The policy of the start, which only scores."""
    return make_replica(PartArgs.from_json(args["part"]))


def logp(args: Mapping[str, Any]) -> Scorer:
    """A copy of the policy that follows the trainer, and only scores."""
    return make_replica(PartArgs.from_json(args["part"]), follows=True)
