"""Runs of `headway train`, with their processes and shared memory.

Everything that a run starts, directly or indirectly, inherits a mark in its environment, so leftover processes are
found whoever their parent is by then. Processes that a cluster has started for the run write to the run's logs.
"""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from select import select
from typing import Any
from uuid import uuid4

from tests.runs.template import Forked, Template

from headway.monitor.event_files import read_event_lines, read_event_log
from headway.monitor.event_log import LoggedEvent

RUN_MARK = "HEADWAY_CHAOS"
STEPS, GROUPS, MEMBERS, ALPHA, SAVE = 10, 2, 2, 1, 2
EPOCH = 12
"""Number of tasks; fewer than are trained, so that all of the first epoch must have been."""
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
    "selection_order": "oldest",
    "processes": "true",
    "device": "cpu",
    "track_with": "[]",
    "num_gpus_per_node": 3,
    "actor_train.device_mapping": "[0]",
    "actor_infer.device_mapping": "[1,2]",
    "actor_train.model_args.disable_gradient_checkpointing": "true",
    "actor_train.training_args.per_device_train_batch_size": 4,
    "rewards.arithmetic.reward_fn": "numeric",
    "rewards.arithmetic.tag_included": "addition",
    "reliability.restart_backoff_s": 0,
}
_POLL_S = 0.01


class ForkedProcess:
    """A run that was forked from a process which has imported everything already; it can be waited for like `Popen`."""

    def __init__(self, forked: Forked) -> None:
        self._forked, self.pid = forked, forked.pid
        self._code: int | None = None

    def poll(self) -> int | None:
        if self._code is None and select([self._forked], [], [], 0)[0]:
            self._code = self._forked.wait()
        return self._code

    def wait(self, timeout: float) -> int:
        if self._code is None:
            select([self._forked], [], [], timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired("headway train", timeout)
        return code


@dataclass
class ChaosRun:
    """A run and its restarts. With a `template` its processes are forks, which start in a fraction of the time."""

    directory: Path
    options: list[str]
    template: Template | None = None
    mark: str = field(default_factory=lambda: uuid4().hex)
    process: subprocess.Popen[bytes] | ForkedProcess | None = None
    starts_before: int = 0
    """Number of `run.begin` events that were on disk when the process was started."""

    def start(self, *more: str) -> None:
        """Start `headway train` in a session of its own, as a shell does."""
        self.directory.mkdir(parents=True, exist_ok=True)
        self.starts_before = self.count_events("run.begin")
        if self.template is not None:
            words = ["train", *self.options, *more]
            self.process = ForkedProcess(self.template.command(*words, output=self.directory / "output.txt"))
            return
        environment = {**os.environ, RUN_MARK: self.mark, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
        with (self.directory / "output.txt").open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "headway", "train", *self.options, *more],
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

    def wait(self, timeout_s: float) -> int | None:
        """Wait for the end and return the exit code, or `None` after the timeout."""
        assert self.process is not None
        with suppress(subprocess.TimeoutExpired):
            return self.process.wait(timeout_s)
        return None

    def wait_until(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Wait for a condition; return false if the run ended before or the time is over."""
        assert self.process is not None
        deadline = time.monotonic() + timeout_s
        while not condition():
            if self.process.poll() is not None or time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)
        return True

    @property
    def output(self) -> str:
        """What the run printed."""
        return (self.directory / "output.txt").read_text(encoding="utf-8", errors="replace")

    def is_started(self) -> bool:
        """Return whether the process that runs now has begun its part of the run."""
        return self.count_events("run.begin") > self.starts_before

    def count_steps(self) -> int:
        """Return the newest step that the ledger has; steps that a resume takes back do not count."""
        rows = self.query_ledger("SELECT coalesce(max(trained_at), 0) FROM groups")
        return int(rows[0][0]) if rows else 0

    def query_ledger(self, statement: str) -> list[tuple[Any, ...]]:
        """Return what the ledger answers, without changing it; nothing if there is none yet."""
        path = self.directory / "ledger.sqlite"
        if not path.exists():
            return []
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as db:  # read-only: recovery is left to the run
            try:
                return db.execute(statement).fetchall()
            except sqlite3.OperationalError as error:
                if "no such table" not in str(error):
                    raise
                return []  # the run was killed before it made the tables

    def list_checkpoints(self) -> set[str]:
        """Return the checkpoints on disk and the ones that are being written."""
        return {path.name for path in (self.directory / "checkpoints").glob("step-*") if "removed" not in path.name}

    def count_events(self, kind: str) -> int:
        """Return the number of events of a kind that are on disk."""
        with suppress(FileNotFoundError):
            return sum(f'"{kind}",' in line for line in read_event_lines(self.directory))
        return 0

    def read_events(self) -> Iterator[LoggedEvent]:
        """Yield all events on disk."""
        yield from read_event_log(self.directory)

    def list_components(self) -> dict[str, int]:
        """Return the process ids of the run by the name of the log they write to (`trainer`, `engine-0`)."""
        logs, found = str(self.directory / "logs"), dict[str, int]()
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                output = str((entry / "fd" / "1").readlink())
                if output.startswith(logs):
                    found.setdefault(Path(output).stem, int(entry.name))
        return found

    def list_processes(self) -> list[int]:
        """Return the processes of the run that are alive."""
        return sorted({*find_marked_processes(self.mark), *self.list_components().values()})


def find_marked_processes(mark: str, name: str = RUN_MARK) -> list[int]:
    """Return the live processes that carry this mark in their environment."""
    wanted, found = f"{name}={mark}".encode(), []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return sorted(found)


def find_parent(pid: int) -> int:
    """Return the parent of a process, or 0 if the process is gone."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def find_descendants(pid: int) -> list[int]:
    """Return the children of a process, and theirs."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        children.setdefault(find_parent(int(entry.name)), []).append(int(entry.name))
    found = [pid]
    for one in found:  # the list grows during the loop
        found += children.get(one, [])
    return found[1:]


def list_shared_segments() -> set[str]:
    """Return the names of all shared memory segments."""
    return {path.name for path in Path("/dev/shm").rglob("*") if path.is_file()}


def is_segment_in_use(name: str) -> bool:
    """Return whether a process has the segment open or mapped; such a segment is not abandoned, or not ours."""
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if name in (entry / "maps").read_text(errors="replace"):
                return True
        with suppress(OSError):
            if any(name in str(link.readlink()) for link in (entry / "fd").iterdir()):
                return True
    return False
