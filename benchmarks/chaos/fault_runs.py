"""Runs of `headway train` and everything that belongs to one: its processes and its shared memory.

Whatever a run starts, and whatever that starts, inherits a mark in its environment. So nothing can hide from the count
of what is left, whoever its parent is by then. What a cluster has started for it writes to the run's logs.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

from headway.monitor.event_log import LoggedEvent, read_events

MARK = "HEADWAY_CHAOS"
STEPS, GROUPS, MEMBERS, ALPHA, SAVE = 10, 2, 2, 1, 2
OPTIONS = {
    "exp_name": "chaos",
    "async_generation_ratio": ALPHA,
    "rollout_batch_size": GROUPS,
    "num_return_sequences_in_group": MEMBERS,
    "prompt_length": 48,
    "response_length": 24,
    "max_steps": STEPS,
    "save_steps": SAVE,
    "eval_steps": 0,
    "filter_zero_variance": "false",
    "processes": "true",
    "device": "cpu",
    "track_with": "[]",
    "num_gpus_per_node": 3,
    "actor_train.device_mapping": "[0]",
    "actor_infer.device_mapping": "[1,2]",
    "actor_train.model_args.disable_gradient_checkpointing": "true",
    "actor_train.training_args.per_device_train_batch_size": 4,
    "actor_train.data_args.file_name": "addition",
    "rewards.arithmetic.reward_fn": "numeric",
    "rewards.arithmetic.tag_included": "addition",
    "reliability.restart_backoff_s": 0,
}
_POLL_S = 0.01


@dataclass
class Run:
    """One run over all its lives."""

    directory: Path
    words: list[str]
    mark: str = field(default_factory=lambda: uuid4().hex)
    lives: int = 0
    process: subprocess.Popen[bytes] | None = None

    def start(self, *more: str) -> None:
        """`headway train`, in a session of its own, as from a shell."""
        self.lives += 1
        self.directory.mkdir(parents=True, exist_ok=True)
        environment = {**os.environ, MARK: self.mark, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
        with (self.directory / "output.txt").open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "headway", "train", *self.words, *more],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def end(self, timeout_s: float) -> int | None:
        """Its exit code, or nothing where it does not end."""
        assert self.process is not None
        with suppress(subprocess.TimeoutExpired):
            return self.process.wait(timeout_s)
        return None

    def until(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Wait for something about the run; false if it ended before, or it takes too long."""
        assert self.process is not None
        deadline = time.monotonic() + timeout_s
        while not condition():
            if self.process.poll() is not None or time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)
        return True

    @property
    def text(self) -> str:
        """What it printed."""
        return (self.directory / "output.txt").read_text(encoding="utf-8", errors="replace")

    def count(self, kind: str) -> int:
        """Events of a kind so far, as far as they are on the disk."""
        path = self.directory / "events.jsonl"
        return path.read_bytes().count(f'"{kind}",'.encode()) if path.exists() else 0

    def events(self) -> Iterator[LoggedEvent]:
        """Everything that was written down."""
        with (self.directory / "events.jsonl").open(encoding="utf-8") as lines:
            yield from read_events(lines)

    def parts(self) -> dict[str, int]:
        """Processes of the run by the name of their log (`trainer`, `engine-0`): those that write to it."""
        logs, found = str(self.directory / "logs"), dict[str, int]()
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                output = str((entry / "fd" / "1").readlink())
                if output.startswith(logs):
                    found.setdefault(Path(output).stem, int(entry.name))
        return found

    def left(self) -> list[int]:
        """Processes of the run that are alive."""
        return sorted({*marked(self.mark), *self.parts().values()})


def marked(mark: str, name: str = MARK) -> list[int]:
    """Processes alive that were started by what has this mark, however far down."""
    wanted, found = f"{name}={mark}".encode(), []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return sorted(found)


def parent(pid: int) -> int:
    """0 where there is none any more."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def children(pid: int) -> list[int]:
    """And theirs."""
    of: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        of.setdefault(parent(int(entry.name)), []).append(int(entry.name))
    found = [pid]
    for one in found:  # grows as it goes
        found += of.get(one, [])
    return found[1:]


def segments() -> set[str]:
    """Shared memory that has a name."""
    return {path.name for path in Path("/dev/shm").rglob("*") if path.is_file()}


def in_use(name: str) -> bool:
    """Whether any process has a segment open or mapped: then it is not a left one, or not ours."""
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if name in (entry / "maps").read_text(errors="replace"):
                return True
        with suppress(OSError):
            if any(name in str(link.readlink()) for link in (entry / "fd").iterdir()):
                return True
    return False
