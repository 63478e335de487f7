"""A rank of a trainer is lost in one phase of its work, by SIGKILL or by SIGSTOP, and all ranks come back.

Shared by the tests, which lose ranks in some phases, and by `benchmarks/lost_ranks.py`, which does it in all of them.
"""

from __future__ import annotations

import asyncio
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from headway.errors import TrainerCrashed
from headway.processes.base import ChildSpec, StartPeer
from headway.trainers.sharded.ranked_trainer import MultiRankTrainer

from . import factory

JOIN_S = 8.0
"""How long ranks may take to meet."""
RANK_S = 2.0
"""How long ranks wait for one that is late."""
_FSDP = "torch.distributed.fsdp._fully_shard._fsdp_param_group"
_CHECKPOINT = "headway.trainers.sharded.sharded_checkpoint"
Call = Literal["start", "train", "score", "gather", "save", "load"]


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Where a rank is lost: before it calls a function, while the controller waits for a call."""

    call: Call
    where: str
    """`module:function`; empty: as soon as the process runs."""
    ranks: tuple[int, ...] = (0, 1)


PHASES = {
    "start of the process": Phase(call="start", where=""),
    "rendezvous": Phase(call="start", where="headway.trainers.sharded.rank_host:TCPStore"),
    "process group": Phase(call="start", where="torch.distributed:init_process_group"),
    "making the trainer": Phase(call="start", where="headway.trainers.sharded.sharded_trainer:init_device_mesh"),
    "publishing weights": Phase(call="start", where="headway.trainers.sharded.sharded_model:gather_full_tensor"),
    "all-gather of a layer": Phase(call="train", where=f"{_FSDP}:foreach_all_gather"),
    "reduce of gradients": Phase(call="train", where=f"{_FSDP}:foreach_reduce"),
    "gradient norm": Phase(call="train", where="torch.distributed:all_reduce"),
    "scoring": Phase(call="score", where=f"{_FSDP}:foreach_all_gather"),
    "handing out weights": Phase(call="gather", where="headway.weights.weight_store:WeightStore.gather", ranks=(0,)),
    "barrier of a checkpoint": Phase(call="save", where=f"{_CHECKPOINT}:_agree"),
    "shards of a checkpoint": Phase(call="save", where=f"{_CHECKPOINT}:write_shards"),
    "loading a checkpoint": Phase(call="load", where=f"{_CHECKPOINT}:load_shards"),
}


@dataclass(frozen=True, kw_only=True)
class LostRank:
    """How the loss of a rank ended."""

    error: str
    error_s: float
    """Seconds from the call to its error."""
    back_s: float
    """Seconds of the restart, with the checkpoint loaded where there is one."""
    version: int
    """Version of the trainer after the step that followed."""


async def lose_rank(
    phase: Phase, number: signal.Signals, victim: int, directory: Path, start: StartPeer, name: str = "trainer"
) -> LostRank:
    """Lose rank `victim` of two in a phase, restart all ranks, and train the step after the newest checkpoint."""
    mark, checkpoint = directory / "signalled", directory / "checkpoint"
    args = {"where": phase.where, "victim": victim, "signal": int(number), "mark": str(mark)}
    spec = ChildSpec(name=name, target="tests.trainers.sharded_targets:signalled", args=args)
    trainer = MultiRankTrainer(spec, start, ranks=2, join_s=JOIN_S, rank_s=RANK_S, grace_s=1.0)
    try:
        if phase.call in ("save", "load"):
            await trainer.train(factory.batch(0))
        if phase.call == "load":
            await trainer.save(checkpoint)
        elif phase.call != "start":
            await trainer.start()
        began_s = time.monotonic()
        error = await _expect_crash(trainer, phase.call, checkpoint)
        error_s = time.monotonic() - began_s
        assert mark.exists(), "the rank never came there"
        began_s = time.monotonic()
        await trainer.restart()
        if phase.call == "load":
            await trainer.load(checkpoint)
        back_s = time.monotonic() - began_s
        await trainer.train(factory.batch(trainer.version))
        await trainer.save(directory / "after")
        return LostRank(error=error, error_s=error_s, back_s=back_s, version=trainer.version)
    finally:
        await trainer.close()


async def _expect_crash(trainer: MultiRankTrainer, call: Call, checkpoint: Path) -> str:
    try:
        async with asyncio.timeout(60):
            if call == "start":
                await trainer.start()
            elif call == "train":
                await trainer.train(factory.batch(0))
            elif call == "score":
                await trainer.score("policy", factory.group(1))
            elif call == "gather":
                await trainer.call("gather", 0)
            elif call == "save":
                await trainer.save(checkpoint)
            else:
                await trainer.load(checkpoint)
    except TrainerCrashed as error:
        return str(error)
    raise AssertionError(f"{call} came to an end without the rank")


def longest_s(phase: Phase) -> float:
    """Return the seconds within which the loss has to be known, on a machine with other work."""
    return (JOIN_S if phase.call == "start" else RANK_S) + 4.0
