"""Environments for tests: a good one, and every way of being a bad one."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headway.environments.text_environment import Reply


class Guess:
    """Guess a digit that depends on the seed."""

    instructions = "Guess a digit."
    max_steps = 4
    max_tokens = 8
    stop = ("\n",)
    reusable = True

    def __init__(self, most: int = 9, base: float = 1.0) -> None:
        self.most, self.base, self.episodes, self.closed = most, base, 0, False
        self.secret = 0

    def reset(self, seed: int, data: Mapping[str, Any]) -> str:
        self.secret, self.episodes = seed % (self.most + 1), self.episodes + 1
        return f"Episode {self.episodes}: a digit up to {self.most}?"

    def step(self, action: str) -> Reply:
        if not action.strip().isdigit():
            return Reply("A digit!", valid=False)
        right = int(action) == self.secret
        return Reply("Right." if right else "No.", reward=self.base * right, done=right, success=right or None)

    def close(self) -> None:
        self.closed = True


class Async:
    """The same protocol with coroutines."""

    async def reset(self, seed: int, data: Mapping[str, Any]) -> Reply:
        return Reply(f"seed {seed} {sorted(data)}")

    async def step(self, action: str) -> Reply:
        return Reply(action, reward=0.5, done=action == "end", success=True)


class Blocking:
    """Blocks its event loop, or waits beside it."""

    async def reset(self, seed: int, data: Mapping[str, Any]) -> Reply:
        return Reply("Go.")

    async def step(self, action: str) -> Reply:
        if action == "block":
            time.sleep(60)  # noqa: ASYNC251
        await asyncio.sleep(60)
        return Reply("")


class Bad:
    """Does `what` in `where`."""

    def __init__(self, what: str, where: str = "step", note: str = "") -> None:
        self.what, self.where, self.note = what, where, note

    def reset(self, seed: int, data: Mapping[str, Any]) -> Any:
        return self._act() if self.where == "reset" else "Go."

    def step(self, action: str) -> Any:
        return self._act()

    def _act(self) -> Any:
        return getattr(self, f"_{self.what}")()

    def _raises(self) -> None:
        raise ValueError("a bad day")

    def _nonsense(self) -> object:
        return {"observation": 3}

    def _infinite(self) -> Reply:
        return Reply("", reward=float("inf"))

    def _unspeakable(self) -> Reply:
        return Reply("x" * 2_000_000)

    def _loops(self) -> None:
        while True:
            pass

    def _hangs(self) -> None:
        Path(self.note).write_text("hangs") if self.note else None
        time.sleep(3600)

    def _leaks(self) -> Reply:
        """A process that outlives its parent and has a session of its own."""
        code = (
            "import os, sys, time, pathlib; os.fork() and os._exit(0); os.setsid(); "
            "pathlib.Path(sys.argv[1]).write_text(str(os.getpid())); time.sleep(3600)"
        )
        subprocess.run([sys.executable, "-I", "-S", "-c", code, self.note], check=True)
        while not (Path(self.note).exists() and Path(self.note).read_text()):
            time.sleep(0.005)
        return Reply("leaked", done=True, success=True)

    def _prints(self) -> Reply:
        line = "x" * 65536
        for _ in range(65536):  # four gigabytes
            print(line)
        return Reply("printed", done=True)

    def _dies(self) -> None:
        print("last words", flush=True)
        os._exit(3)

    def _exits(self) -> None:
        sys.exit("enough")


class Moody:
    """Fails in one way or another, by its seed; most seeds are good."""

    def reset(self, seed: int, data: Mapping[str, Any]) -> str:
        self.mood = seed % 5
        if self.mood == 1:
            raise ValueError("in reset")
        return "Go."

    def step(self, action: str) -> Any:
        if self.mood == 2:
            raise ValueError("in step")
        return 7 if self.mood == 3 else Reply("Well.", reward=float(len(action)), done=True, success=True)


class Stuck(Bad):
    """Hangs, prints without end, or is good, by its seed."""

    def __init__(self) -> None:
        super().__init__("raises")

    def reset(self, seed: int, data: Mapping[str, Any]) -> str:
        self.what = ("hangs", "prints", "good", "good")[seed % 4]
        return "Go."

    def _good(self) -> Reply:
        return Reply("Well.", reward=1.0, done=True, success=True)


class Braces:
    """Says what looks like fields of a template."""

    def reset(self, seed: int, data: Mapping[str, Any]) -> str:
        return "{turn_idx} of {history}"

    def step(self, action: str) -> Reply:
        return Reply("", done=True)
