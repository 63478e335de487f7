"""What children of these tests run: nothing heavy, so that they start in a blink."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway import codec
from headway.errors import ConfigError, ConfigErrors, TrainerError
from headway.weights.base import Bucket, compute_checksum
from headway.weights.shared_memory import PayloadReader, SharedSegment


@dataclass
class Stranger:
    """A record that nobody has heard of, until this process is told."""

    number: int = 7

    @classmethod
    def known(cls) -> Stranger:
        codec.register_records(cls)
        return cls()

    @staticmethod
    def forgotten() -> None:
        del codec._records["Stranger"], codec._fields["Stranger"]


class Service:
    """Answers itself: no host is needed."""

    def __init__(self, args: dict[str, Any]) -> None:
        self.args = args
        self.cancelled: list[str] = []

    async def echo(self, value: Any) -> Any:
        return value

    async def spec(self) -> Any:
        names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "COLOUR")
        return {
            "args": self.args,
            "environment": {name: os.environ.get(name, "") for name in names},
            "session": os.getsid(0) == os.getpid(),
            "torch": "torch" in sys.modules,
            "main": getattr(sys.modules["__main__"].__spec__, "name", ""),
        }

    async def fail(self, kind: str) -> None:
        failures: dict[str, Callable[[], Exception]] = {
            "ours": lambda: TrainerError("step 3 failed"),
            "own subclass": lambda: type("Special", (TrainerError,), {})("special"),
            "theirs": lambda: ZeroDivisionError("by nothing"),
            "configuration": lambda: ConfigError("too large", key="a.b", value=Path("x"), hint="be modest"),
            "configurations": lambda: ConfigErrors([ConfigError("one", key="a", value=1), ConfigError("two")]),
        }
        raise failures[kind]()

    async def listen(self, host: str) -> int:
        """The port of a listener there."""
        self.listening = socket.create_server((host, 0))
        return int(self.listening.getsockname()[1])

    async def variable(self, name: str) -> str:
        return os.environ.get(name, "")

    async def unsendable(self) -> object:
        return object()

    async def stranger(self) -> object:
        """A record that only this process knows."""
        return Stranger.known()

    async def wait(self, name: str) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled.append(name)
            raise

    async def who_was_cancelled(self) -> list[str]:
        return self.cancelled

    async def die(self, code: int) -> None:
        print("last words")
        os._exit(code)

    async def block(self) -> None:
        """Holds the event loop for good."""
        time.sleep(1000)  # noqa: ASYNC251

    async def escaped(self) -> int:
        return subprocess.Popen(["sleep", "1000"], start_new_session=True).pid  # noqa: ASYNC220

    async def signal(self, number: int) -> None:
        os.kill(os.getpid(), number)
        await asyncio.sleep(10)

    async def chatter(self) -> None:
        while True:
            print("x" * 1000)

    async def first_argument(self) -> str:
        return type(next(iter(self.args.values()))).__name__

    async def grandchild(self) -> int:
        return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"]).pid  # noqa: ASYNC220

    async def hold(self, size: int) -> str:
        """Owns shared memory until it ends."""
        self.held = SharedSegment.create(size)
        return self.held.name

    async def close(self) -> None:
        print("closed in order")


class Telling:
    """A host that tells numbers before it answers."""

    def __init__(self, made: Service, tell: Callable[[Any], None]) -> None:
        self._tell = tell

    async def stranger(self) -> None:
        self._tell(Stranger.known())
        await asyncio.Event().wait()

    async def count(self, number: int) -> str:
        for one in range(number):
            self._tell(one)
        return "done"

    async def tell(self, number: int) -> None:
        self._tell(number)

    async def close(self) -> None: ...


def service(args: dict[str, Any]) -> Service:
    return Service(args)


async def later(args: dict[str, Any]) -> Service:
    await asyncio.sleep(0)
    return Service(args)


def broken(args: dict[str, Any]) -> Service:
    raise ConfigError("no such model", key="model", value=args.get("model"))


def silent(args: dict[str, Any]) -> Service:
    print("still busy")
    threading.Event().wait()
    return Service(args)


class Reader:
    """Opens what buckets stand for."""

    async def sums(self, buckets: Sequence[Bucket]) -> list[str]:
        reader = PayloadReader()
        return [await asyncio.to_thread(lambda one=one: compute_checksum(reader.open(one.payload))) for one in buckets]

    async def back(self, buckets: Sequence[Bucket]) -> Sequence[Bucket]:
        return buckets

    async def close(self) -> None: ...


def reader(args: dict[str, Any]) -> Reader:
    return Reader()
