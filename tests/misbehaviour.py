"""Code of users that does whatever it is told to: as rewards and as environments, with and without coroutines."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy

from headway.environments.text_environment import Reply
from headway.types import Episode


def act(what: str) -> Any:
    """Do `what`, and return 1 if that is possible afterwards."""
    action = globals().get(f"do_{what}")
    return 1.0 if action is None else action()


def do_raise() -> None:
    raise ValueError("a bad day")


def do_nan() -> float:
    return float("nan")


def do_none() -> None:
    return None


def do_str() -> str:
    return "1.0"


def do_sleep() -> None:
    time.sleep(3600)


def do_spin() -> None:
    while True:
        pass


def do_exit() -> None:
    print("last words", flush=True)
    os._exit(3)


def do_system_exit() -> None:
    sys.exit(1)


def do_keyboard_interrupt() -> None:
    raise KeyboardInterrupt


def do_stop_iteration() -> None:
    raise StopIteration


def do_segfault() -> None:
    ctypes.string_at(0)


def do_memory() -> None:
    taken = []
    while True:
        taken.append(b"x" * (64 << 20))


def do_fork() -> float:
    os.fork()
    return 1.0


def do_orphans() -> None:
    """Take memory in a process that has left this one."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            do_memory()
        os._exit(0)
    os.wait()
    time.sleep(3600)


def do_print() -> None:
    line = "x" * 65536
    while True:
        print(line)


def do_chdir() -> float:
    os.chdir("/")
    return 1.0


def do_relative() -> float:
    return float(Path("here.txt").read_text())


def do_close_files() -> None:
    os.closerange(0, 256)


def do_kill_group() -> None:
    os.killpg(0, signal.SIGKILL)


class NoText:
    """An object that cannot even be shown."""

    def __repr__(self) -> str:
        raise RuntimeError("no words")


WRONG_RESULTS: dict[str, Any] = {
    "wrong_number": 7,
    "wrong_bool": True,
    "wrong_bytes": b"You see a box.",
    "wrong_list": ["You see a box."],
    "wrong_dict": {"text": "You see a box.", "reward": 1.0},
    "wrong_tuple": ("You see a box.", 1.0, True, {}),
    "wrong_five": ("You see a box.", 1.0, True, False, {}),
    "wrong_class": Reply,
    "wrong_object": NoText(),
    "text_none": Reply(None, 1.0),  # type: ignore[arg-type]
    "text_number": Reply(3, 1.0),  # type: ignore[arg-type]
    "text_list": Reply(["a"], 1.0),  # type: ignore[arg-type]
    "text_bytes": Reply(b"a", 1.0),  # type: ignore[arg-type]
    "text_long": Reply("x" * 1_000_001, 1.0),
    "reward_text": Reply("a", "1.0"),  # type: ignore[arg-type]
    "reward_none": Reply("a", None),  # type: ignore[arg-type]
    "reward_list": Reply("a", [1.0]),  # type: ignore[arg-type]
    "reward_infinite": Reply("a", float("inf")),
    "reward_huge": Reply("a", 10**400),
    "reward_complex": Reply("a", 1j),  # type: ignore[arg-type]
    "done_text": Reply("a", 1.0, "False"),  # type: ignore[arg-type]
    "done_none": Reply("a", 1.0, None),  # type: ignore[arg-type]
    "done_number": Reply("a", 1.0, 2),  # type: ignore[arg-type]
    "done_array": Reply("a", 1.0, numpy.array([True, False])),  # type: ignore[arg-type]
    "reward_array": Reply("a", numpy.array([1.0, 2.0])),  # type: ignore[arg-type]
    "done_list": Reply("a", 1.0, []),  # type: ignore[arg-type]
    "valid_text": Reply("a", 1.0, valid="no"),  # type: ignore[arg-type]
    "success_text": Reply("a", 1.0, True, success="no"),  # type: ignore[arg-type]
    "info_list": Reply("a", 1.0, True, info=["a"]),  # type: ignore[arg-type]
    "info_text": Reply("a", 1.0, True, info="a"),  # type: ignore[arg-type]
    "info_none": Reply("a", 1.0, True, info=None),  # type: ignore[arg-type]
}
"""Results of `reset` and `step` that are no replies, and replies with a field of a wrong type."""


def misbehave(text: str, data: dict[str, Any]) -> Any:
    return act(text)


async def misbehave_async(text: str, data: dict[str, Any]) -> Any:
    await asyncio.sleep(0)
    return act(text)


class MisbehavingClass:
    async def score(self, episode: Episode) -> Any:
        await asyncio.sleep(0)
        return act(episode.turns[-1].generation.text)


class MisbehavingWorld:
    """Does what its data say: `what`, in `where`."""

    def reset(self, seed: int, data: dict[str, Any]) -> Any:
        self.what = data["what"] if data["where"] == "step" else ""
        return "Go." if self.what or data["what"] == "good" else make_reply(data["what"])

    def step(self, action: str) -> Any:
        return make_reply(self.what)


class MisbehavingAsyncWorld(MisbehavingWorld):
    async def reset(self, seed: int, data: dict[str, Any]) -> Any:
        await asyncio.sleep(0)
        return super().reset(seed, data)

    async def step(self, action: str) -> Any:
        await asyncio.sleep(0)
        return super().step(action)


def make_reply(what: str) -> Any:
    """Return what the code has made, as the reward of a reply if it is a number."""
    if what in WRONG_RESULTS:
        return WRONG_RESULTS[what]
    made = act(what)
    return Reply("Well.", reward=made, done=True) if isinstance(made, float) else made
