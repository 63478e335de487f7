"""What whoever starts parts of a run must do, wherever they live."""

from __future__ import annotations

import asyncio
import socket
from abc import ABC, abstractmethod
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from headway.errors import ConfigError, ConfigErrors, EngineCrashed, TrainerError
from headway.processes.base import ChildSpec, Peer, PeerFailed, PeerLost, RestartablePeer

TARGETS = "tests.processes.targets"


class ClusterContract(ABC):
    """Subclass with a `Start`. Targets are those of the tests of processes."""

    UP_S = 1.0
    """By then a process has begun to run its target, unless the machine is busy."""

    @abstractmethod
    def run(self, scenario: Coroutine[Any, Any, None]) -> None: ...

    @abstractmethod
    async def start(self, spec: ChildSpec) -> Peer:
        """As a `Start`."""

    @abstractmethod
    async def start_within(self, spec: ChildSpec, timeout_s: float) -> Peer:
        """The same with a deadline."""

    @abstractmethod
    def end(self, peer: Peer) -> None:
        """Kill its process from outside."""

    def spec(self, target: str = "service", **options: Any) -> ChildSpec:
        return ChildSpec(name="child/0", target=f"{TARGETS}:{target}", **options)

    async def service(self, **options: Any) -> Peer:
        return await self.start(self.spec(**options))

    def test_a_part_has_arguments_threads_environment_and_address_and_is_closed_in_order(self, tmp_path: Path) -> None:
        async def scenario() -> None:
            log = tmp_path / "logs" / "child.log"
            peer = await self.service(args={"a": [1, {"b": None}]}, threads=3, env={"COLOUR": "blue"}, log=log)
            found = await peer.call("spec")
            assert found["args"] == {"a": (1, {"b": None})} and not found["torch"]
            wanted = {f"{name}_NUM_THREADS": "3" for name in ("OMP", "MKL", "OPENBLAS")} | {"COLOUR": "blue"}
            assert found["environment"] == wanted
            assert peer.alive
            socket.create_connection((peer.host, await peer.call("listen", peer.host)), timeout=5).close()
            await asyncio.gather(peer.close(), peer.close())
            await peer.close()
            peer.kill()
            assert not peer.alive
            assert log.read_text(encoding="utf-8").count("closed in order") == 1
            with pytest.raises(PeerLost):
                await peer.call("echo", 1)

        self.run(scenario())

    def test_errors_travel_by_name_and_the_part_goes_on(self) -> None:
        async def scenario() -> None:
            peer = await self.start(self.spec("later"))
            with pytest.raises(TrainerError, match="step 3 failed"):
                await peer.call("fail", "ours")
            with pytest.raises(PeerFailed, match="ZeroDivisionError: by nothing"):
                await peer.call("fail", "theirs")
            with pytest.raises(ConfigError) as refused:
                await peer.call("fail", "configuration")
            assert (refused.value.key, refused.value.value, refused.value.hint) == ("a.b", Path("x"), "be modest")
            with pytest.raises(ConfigErrors) as several:
                await peer.call("fail", "configurations")
            assert [one.key for one in several.value.problems] == ["a", ""]
            for method, problem in (("unsendable", "object has no form"), ("nothing", "nothing"), ("_host", "_host")):
                with pytest.raises(PeerFailed, match=problem):
                    await peer.call(method)
            with pytest.raises(PeerFailed, match=r"cannot be asked.*has no form"):
                await peer.call("echo", object())
            assert await peer.call("echo", {"a": b"\0\xff", "b": [0.5] * 9}) == {"a": b"\0\xff", "b": (0.5,) * 9}
            await peer.close()

        self.run(scenario())

    def test_calls_begin_and_notes_arrive_in_the_order_in_which_they_were_sent(self) -> None:
        async def scenario() -> None:
            problems: list[Any] = []
            loop = asyncio.get_running_loop()
            loop.set_exception_handler(lambda _, context: problems.append(context["exception"]))
            peer = await self.service(host=f"{TARGETS}:Telling")
            told: list[int] = []
            peer.subscribe(on_note=told.append)
            assert await peer.call("count", 1000) == "done"
            assert told == list(range(1000))
            told.clear()
            for number in range(300):  # some of them travel together, some alone
                call = asyncio.ensure_future(peer.call("tell", number))
                await asyncio.sleep(0.001 if number % 7 == 0 else 0)
            await call
            assert told == list(range(300))
            peer.subscribe(on_note=lambda note: print(1 // note))
            assert await peer.call("count", 2) == "done"
            assert [type(one) for one in problems] == [ZeroDivisionError], (
                "what a note breaks here breaks nothing there"
            )
            await peer.close()

        self.run(scenario())

    def test_cancelling_a_call_cancels_it_there(self) -> None:
        async def scenario() -> None:
            peer = await self.service()
            calls = [asyncio.create_task(peer.call("wait", name)) for name in "ab"]
            await peer.call("echo", 0)  # both have begun
            calls[0].cancel()
            with pytest.raises(asyncio.CancelledError):
                await calls[0]
            while await peer.call("who_was_cancelled") != ("a",):  # noqa: ASYNC110 - it hears of it in its own time
                await asyncio.sleep(0.01)
            blocked = asyncio.create_task(peer.call("block"))
            await asyncio.sleep(0.05)
            await peer.close(grace_s=0.2)
            for call in (calls[1], blocked):
                with pytest.raises(PeerLost):
                    await call

        self.run(scenario())

    def test_a_part_that_ends_by_itself_is_lost_with_its_last_words(self) -> None:
        async def scenario() -> None:
            peer = await self.service()
            ends: list[str] = []
            waiting = asyncio.create_task(peer.call("wait", "a"))
            peer.subscribe(on_end=lambda how: ends.append(how) if not waiting.done() else None)
            with pytest.raises(PeerLost, match=r"child/0 [^\n]*ended[^\n]*\n  \| last words"):
                await peer.call("die", 3)
            with pytest.raises(PeerLost):
                await waiting
            with pytest.raises(PeerLost, match="last words"):
                await peer.call("echo", 1)
            assert len(ends) == 1 and "last words" in ends[0]
            assert not peer.alive
            peer.kill()
            await peer.close()

        self.run(scenario())

    def test_a_part_that_was_killed_is_noticed_and_another_takes_its_place(self) -> None:
        async def scenario() -> None:
            started: list[Peer] = []

            async def start(spec: ChildSpec) -> Peer:
                started.append(await self.start(spec))
                return started[-1]

            kept = RestartablePeer(self.spec(), start, crashed=EngineCrashed, on_note=lambda note: None)
            waiting = asyncio.create_task(kept.call("wait", "a", failure=TrainerError))
            assert await kept.call("echo", 1, failure=TrainerError) == 1
            self.end(started[0])
            with pytest.raises(EngineCrashed, match="child/0"):
                await waiting
            with pytest.raises(EngineCrashed):
                await kept.call("echo", 1, failure=TrainerError)
            await kept.restart()
            assert len(started) == 2
            assert await kept.call("echo", 2, failure=TrainerError) == 2
            await kept.close()

        self.run(scenario())

    def test_what_does_not_come_up_says_why(self) -> None:
        async def scenario() -> None:
            with pytest.raises(ConfigError, match="not JSON"):
                await self.start(self.spec(args={"a": object()}))
            with pytest.raises(ConfigError, match="no such model"):
                await self.start(self.spec("broken", args={"model": "x"}))
            with pytest.raises(ConfigError, match="No module named 'nowhere'"):
                await self.start(ChildSpec(name="child/0", target="nowhere:at_all"))
            for longer in (1, 4, 16):
                with pytest.raises(PeerLost, match=r"child/0 was not [^\n]* after \d+ s") as late:
                    await self.start_within(self.spec("silent"), self.UP_S * longer)
                if "\n  | still busy" in str(late.value):
                    return
            raise AssertionError(f"its last words are missing: {late.value}")

        self.run(scenario())
