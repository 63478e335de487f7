"""Says which line of whose code keeps a process busy: in this process by its frames, in a child by a signal.

`faulthandler` answers the signal, so that a child answers even while C code holds its interpreter.
"""

import faulthandler
import re
import signal
import sys
import sysconfig
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_PACKAGE = Path(__file__).parents[1]
_FRAME = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+) in (?P<function>.+)$', re.MULTILINE)
_STANDARD = sysconfig.get_path("stdlib")
_INSTALLED = re.compile(r"[/\\](?:site|dist)-packages[/\\]")

Frame = tuple[str, int, str]
"""File, line and function, as a stack has them."""


def write_stacks_on_request() -> None:
    """Let this process write the stacks of its threads to its output when it gets SIGUSR1, one when it crashes."""
    faulthandler.enable(all_threads=False)
    faulthandler.register(signal.SIGUSR1, all_threads=True)


def find_busy_line(dump: str) -> str:
    """Return ` in function at file:line` for a user's code in what `faulthandler` wrote, or nothing.

    The stack of the current thread comes last and is looked at first.
    """
    blocks = re.split(r"(?m)^(?:Current thread|Thread) .*$", dump)
    for block in reversed(blocks):
        frames = [(match["file"], int(match["line"]), match["function"]) for match in _FRAME.finditer(block)]
        if found := describe_users_frame(frames):
            return found
    return ""


def summarise_end(text: str) -> str:
    """Return in one line how a child ended, and where it was or what it last wrote, from the text of `PeerLost`."""
    how, *written = text.splitlines()
    lines = [line.removeprefix("  | ") for line in written]
    where = find_busy_line("\n".join(lines))
    return how + (where or (f": {lines[-1].strip()}" if lines else ""))


def describe_thread(ident: int | None, *, libraries: bool = False) -> str:
    """Return ` in function at file:line` for what a thread of this process does now, or nothing.

    Where no code of a user is at work, `libraries` names the innermost line of whatever is.
    """
    frame = sys._current_frames().get(ident or -1)
    stack = [] if frame is None else traceback.extract_stack(frame)
    frames = [(one.filename, one.lineno or 0, one.name) for one in reversed(stack)]
    inner = "".join(f" in {function} at {file}:{line}" for file, line, function in frames[:1])
    return describe_users_frame(frames) or (inner if libraries else "")


def describe_coroutine(awaited: Any) -> str:
    """Return ` in function at file:line` for where a suspended coroutine waits, or nothing."""
    frames: list[Frame] = []
    while awaited is not None:
        frame = getattr(awaited, "cr_frame", None)
        if frame is not None:
            frames.insert(0, (frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        awaited = getattr(awaited, "cr_await", None)
    return describe_users_frame(frames)


def describe_users_frame(frames: Sequence[Frame]) -> str:
    """Return the innermost frame of a user's own, else that of a library, or nothing. The innermost comes first."""
    libraries = [frame for frame in frames if _INSTALLED.search(frame[0])]
    own = [frame for frame in frames if not frame[0].startswith((str(_PACKAGE), _STANDARD, "<"))]
    own = [frame for frame in own if frame not in libraries]
    for file, line, function in (own or libraries)[:1]:
        return f" in {function} at {file}:{line}"
    return ""
