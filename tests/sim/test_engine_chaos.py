"""Whatever happens to an engine, no request is lost track of and no action is made twice."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from headway.config.simulation_config import FaultConfig
from headway.config.simulation_config import SimulatedEngineConfig as Cost
from headway.engines.base import Progress
from headway.errors import BackendError
from headway.seeding import Rng, make_rng
from headway.sim.fault_injection import FaultInjector
from headway.sim.simulated_engine import SimulatedEngine
from headway.sim.virtual_clock import run_on_virtual_clock
from headway.types import FinishReason

from .factory import FREE, request, serve

NAME = "engine/0"
HORIZON_S = 20.0
COST = Cost(slots=3, step_s=0.05, step_per_context_token_s=1e-5, kv_tokens=150, prefill_tokens_per_s=300.0, restart_s=1)


@dataclass
class Call:
    """One request and everything that was heard of it."""

    length: int
    progress: Progress = field(default_factory=Progress)
    ends: list[object] = field(default_factory=list)


class Chaos:
    """One engine with clients, an operator and faults, all from one seed."""

    def __init__(self, seed: int) -> None:
        self.rng = make_rng(seed, "chaos")
        kinds = ("crash", "hang", "slowdown", "lost_message", "late_message")
        faults = [
            FaultConfig(kind=kinds[self.rng.randrange(0, 5)], target=NAME, at_s=self.some_s(), for_s=self.some_s() / 10)  # type: ignore[arg-type]
            for _ in range(self.rng.randrange(0, 4))
        ]
        self.injector = FaultInjector(faults, engines=1)
        self.engine = SimulatedEngine(NAME, COST, FREE, health=self.injector.health(NAME))
        self.calls: list[Call] = []
        self.version = 0

    def some_s(self) -> float:
        return self.rng.random() * HORIZON_S

    async def client(self, name: str, rng: Rng) -> None:
        """Ask, sometimes give up, and go on until the request has ended."""
        await asyncio.sleep(rng.random() * HORIZON_S)
        call = Call(length=rng.randrange(1, 60))
        self.calls.append(call)
        wanted = request(name, call.length, prompt=rng.randrange(0, 80), key=rng.randrange(-1, 2))
        while call.ends[-1:] != [FinishReason.STOP]:
            try:
                async with asyncio.timeout(rng.random() * 30.0):
                    call.ends.append(await self.engine.generate(wanted, call.progress))
            except TimeoutError:
                call.ends.append("timeout")
            except BackendError as error:
                call.ends.append(type(error).__name__)
                await asyncio.sleep(0.5)

    async def operator(self, rng: Rng) -> None:
        """Restart, flip, pause and abort, at random."""
        for _ in range(30):
            await asyncio.sleep(rng.random() * HORIZON_S / 15)
            try:
                async with asyncio.timeout(3.0):
                    await self.act(rng.randrange(0, 5), rng)
            except (TimeoutError, BackendError):
                pass
        await self.mend()

    async def act(self, choice: int, rng: Rng) -> None:
        if choice == 0:
            await self.engine.pause()
            await asyncio.sleep(rng.random())
            await self.engine.resume()
        elif choice == 1:
            await self.engine.abort(str(rng.randrange(0, 8)))
        elif choice == 2 and rng.random() < 0.3:
            await self.engine.restart()
        elif self.engine.receiver.version < 0:
            await self.engine.restart()
            await self.flip()
        else:
            await self.flip()

    async def flip(self) -> None:
        self.version += 1
        await serve(self.engine, self.version)

    async def mend(self) -> None:
        await asyncio.sleep(2 * HORIZON_S)
        await self.engine.restart()
        await self.flip()

    async def play(self) -> None:
        await serve(self.engine, 0)
        async with self.injector, asyncio.TaskGroup() as tasks:
            tasks.create_task(self.operator(make_rng(self.rng.randrange(0, 10**9))))
            for index in range(8):
                tasks.create_task(self.client(str(index), make_rng(self.rng.randrange(0, 10**9))))
        await asyncio.sleep(10.0)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**6))
def test_every_request_ends_once_with_every_action_once(seed: int) -> None:
    chaos = Chaos(seed)
    run_on_virtual_clock(chaos.play(), max_events=200_000)
    assert len(chaos.calls) == 8
    for call in chaos.calls:
        assert call.ends.count(FinishReason.STOP) == 1
        assert len(call.progress.actions) == len(call.progress.logps) == call.length
        assert sum(run.count for run in call.progress.runs) == call.length
        versions = [run.version for run in call.progress.runs]
        assert versions == sorted(set(versions))
    batch = chaos.engine._batch
    assert not batch.sequences and not batch.running and not batch._context and not batch._prefixes
    assert not any(sequence for sequence in batch.queue), "nothing is left behind"


def test_the_same_chaos_happens_twice() -> None:
    def ends(seed: int) -> list[list[object]]:
        chaos = Chaos(seed)
        run_on_virtual_clock(chaos.play(), max_events=200_000)
        return [[*call.ends, *call.progress.runs] for call in chaos.calls]

    assert ends(7) == ends(7)
