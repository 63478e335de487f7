from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.config.simulation_config import FaultConfig
from headway.config.simulation_config import SimulatedWeightsConfig as Weights
from headway.errors import ConfigError, EngineCrashed, RewardError, TransferError
from headway.seeding import make_rng
from headway.sim.fault_injection import MESSAGE_LOSS_TIMEOUT_S, BackendHealth, FaultInjector
from headway.sim.simulated_engine import SimulatedEngine
from headway.sim.simulated_weights import SimulatedSource, SimulatedTransport
from headway.sim.virtual_clock import run_on_virtual_clock
from tests.sim.factory import draw_random_faults


def now() -> float:
    return asyncio.get_running_loop().time()


async def spent(health: BackendHealth, seconds: float) -> float:
    await health.spend(seconds, RewardError)
    return now()


def test_a_hang_and_a_slowdown_stretch_an_operation_half_way_through() -> None:
    async def main() -> None:
        faults = [
            FaultConfig(kind="hang", target="reward", at_s=2.0, for_s=5.0),
            FaultConfig(kind="slowdown", target="reward", at_s=8.0, for_s=3.0, factor=3.0),
        ]
        async with FaultInjector(faults) as injector:
            assert await spent(injector.health("reward"), 6.0) == pytest.approx(2.0 + 5.0 + 1.0 + 3.0 + 2.0)

    run_on_virtual_clock(main())


def test_a_crash_fails_what_is_under_way_and_lasts() -> None:
    async def main() -> None:
        faults = [FaultConfig(kind="crash", target="reward", at_s=2.0, for_s=5.0)]
        async with FaultInjector(faults) as injector:
            health = injector.health("reward")
            with pytest.raises(RewardError):
                await spent(health, 6.0)
            assert now() == 2.0
            with pytest.raises(RewardError):
                await spent(health, 0.0)
            await asyncio.sleep(5.0)
            assert await spent(health, 1.0) == 8.0

    run_on_virtual_clock(main())


def test_a_single_hang_takes_one_operation() -> None:
    async def main() -> None:
        async with FaultInjector([FaultConfig(kind="hang", target="environment")]) as injector:
            health = injector.health("environment")
            await asyncio.sleep(1)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(100):
                    await spent(health, 1.0)
            assert await spent(health, 1.0) == 102.0

    run_on_virtual_clock(main())


def test_a_hang_over_another_ends_with_the_last() -> None:
    async def main() -> None:
        faults = [FaultConfig(kind="hang", target="weights", at_s=at_s, for_s=4.0) for at_s in (1.0, 3.0)]
        async with FaultInjector(faults) as injector:
            assert await spent(injector.health("weights"), 2.0) == pytest.approx(8.0)

    run_on_virtual_clock(main())


def test_buckets_are_lost_late_and_corrupted() -> None:
    async def main() -> None:
        faults = [
            FaultConfig(kind="lost_message", target="weights", at_s=0.0),
            FaultConfig(kind="late_message", target="weights", at_s=10.0, factor=3.0),
            FaultConfig(kind="corrupted_bucket", target="weights", at_s=20.0, for_s=10.0),
        ]
        injector = FaultInjector(faults)
        source = SimulatedSource()
        source.publish(1)
        transport = SimulatedTransport(Weights(send_s=4.0), health=injector.health("weights"))
        receiver = SimulatedEngine("engine/0").receiver
        manifest, buckets = await source.gather(1)
        bucket = await anext(buckets)
        async with injector:
            await receiver.begin(manifest)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            with pytest.raises(TransferError):
                await transport.send(bucket, receiver)
            assert now() == MESSAGE_LOSS_TIMEOUT_S
            await asyncio.sleep(10.0)
            start = now()
            await receiver.load(await transport.send(bucket, receiver))
            assert now() == start + 3.0 + 1.0
            await asyncio.sleep(10.0)
            for _ in range(2):
                with pytest.raises(TransferError, match="checksum"):
                    await receiver.load(await transport.send(bucket, receiver))

    run_on_virtual_clock(main())


def test_a_lost_node_takes_its_engines() -> None:
    async def main() -> None:
        faults = [FaultConfig(kind="lost_node", target="node/1", at_s=5.0, for_s=50.0)]
        injector = FaultInjector(faults, engines=6, engine_gpus=3, gpus_per_node=8, first_gpu=1)
        engines = [SimulatedEngine(f"engine/{n}", health=injector.health(f"engine/{n}")) for n in range(6)]
        async with injector:
            await asyncio.sleep(6.0)
            down = []
            for engine in engines:
                try:
                    await engine.pause()
                except EngineCrashed:
                    down.append(engine.name)
            assert down == ["engine/2", "engine/3", "engine/4"]
            with pytest.raises(EngineCrashed):
                await engines[2].restart()
            await asyncio.sleep(20.0)
            await engines[2].restart()

    run_on_virtual_clock(main())


def test_nothing_happens_after_the_injector_has_stopped() -> None:
    async def main() -> None:
        injector = FaultInjector([FaultConfig(kind="crash", target="trainer", at_s=5.0)])
        async with injector:
            await asyncio.sleep(1.0)
        await asyncio.sleep(10.0)
        assert injector.health("trainer").crashes == 0

    run_on_virtual_clock(main())


@pytest.mark.parametrize(
    "fault",
    [
        FaultConfig(kind="crash", target="enginee/0"),
        FaultConfig(kind="crash", target="engine/4"),
        FaultConfig(kind="lost_node", target="engine/0"),
        FaultConfig(kind="crash", target="node/0"),
        FaultConfig(kind="corrupted_bucket", target="engine/0"),
        FaultConfig(kind="crash", target="trainer", at_s=-1.0),
    ],
)
def test_a_fault_that_cannot_be_is_refused(fault: FaultConfig) -> None:
    with pytest.raises(ConfigError, match=r"simulation.faults\[0\]"):
        FaultInjector([fault], engines=4)


@given(st.integers(0, 1000), st.integers(1, 8), st.floats(0.0, 20.0))
def test_random_faults_are_valid_ordered_and_repeatable(seed: int, engines: int, intensity: float) -> None:
    faults = draw_random_faults(make_rng(seed), 100.0, engines, intensity)
    assert faults == draw_random_faults(make_rng(seed), 100.0, engines, intensity)
    assert int(intensity) <= len(faults) <= int(intensity) + 1
    assert list(faults) == sorted(faults, key=lambda fault: fault.at_s)
    assert all(fault.at_s <= 100.0 and fault.for_s <= 10.0 for fault in faults)
    FaultInjector(faults, engines=engines)
