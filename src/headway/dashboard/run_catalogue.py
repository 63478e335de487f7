"""The runs below a directory, and the views of those that somebody looks at.

All reading is done by one thread, piece by piece, so that a request never waits long behind a large log. Only the runs
that were looked at last are kept whole; of the others what the overview shows is kept.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from headway.dashboard.run_view import RunView
from headway.monitor.event_files import LOG_FILE, STRETCHES
from headway.runs.run_condition import STATUS_FILE

_MOST_WHOLE = 12
_DEPTH = 3
_REFRESH_S = 0.3
_LIST_EVERY_S = 3.0
_NOT_RUNS = frozenset({"checkpoints", "events", "event_index", "logs", "tensorboard"})

T = TypeVar("T")


class RunCatalogue:
    """Finds runs, reads them and answers questions about them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.revision = 0
        """Grows when a run was found or a glance at one has changed."""
        self.heads: dict[str, dict[str, Any]] = {}
        self._views: OrderedDict[str, RunView] = OrderedDict()
        self._refreshed: dict[str, float] = {}
        self._written: dict[str, float] = {}
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="dashboard")

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)
        for view in self._views.values():
            view.close()

    def find_runs(self) -> dict[str, Path]:
        """Return the directories of runs by name, those that were written last first."""
        found = {_name_run(path, self.root): path for path in _walk(self.root, _DEPTH)}
        return dict(sorted(found.items(), key=lambda item: -_get_written_s(item[1])))

    async def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function on the thread that reads."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)

    def open_view(self, run_id: str) -> RunView | None:
        """Return the view of a run, None if there is none of this name. Called on the thread that reads."""
        view = self._views.get(run_id)
        if view is None:
            path = self.find_runs().get(run_id)
            if path is None:
                return None
            view = self._views[run_id] = RunView(run_id, path)
            while len(self._views) > _MOST_WHOLE:
                self._views.popitem(last=False)[1].close()
        self._views.move_to_end(run_id)
        return view

    def refresh_run(self, run_id: str) -> bool:
        """Read a run on, unless that was done a moment ago. Return whether there is more to read at once."""
        view = self.open_view(run_id)
        if view is None or time.monotonic() - self._refreshed.get(run_id, 0.0) < _REFRESH_S:
            return False
        before, more = view.revision, view.refresh()
        self._refreshed[run_id] = 0.0 if more else time.monotonic()
        if before != view.revision or run_id not in self.heads:
            self.heads[run_id] = view.make_head()
            self.revision += 1
        return more

    def list_changed(self) -> list[str]:
        """Return the runs whose log has changed since it was read last."""
        runs = self.find_runs()
        for gone in self.heads.keys() - runs.keys():
            del self.heads[gone]
            self.revision += 1
        changed = []
        for run_id, path in runs.items():
            written_s = _get_written_s(path)
            if self._written.get(run_id) != written_s:
                self._written[run_id] = written_s
                changed.append(run_id)
        return changed

    async def watch(self) -> None:
        """Read every run that changes, until cancelled: first those that were written last."""
        while True:
            for run_id in await self.call(self.list_changed):
                more = True
                while more:  # other questions are answered between two pieces
                    more = await self.call(self.refresh_run, run_id)
            await asyncio.sleep(_LIST_EVERY_S)


def _walk(root: Path, depth: int) -> Iterator[Path]:
    """Yield the directories of runs at most `depth` levels below `root`."""
    if any((root / name).exists() for name in (LOG_FILE, STRETCHES, STATUS_FILE)):
        yield root
    if depth:
        yield from (run for path in _list_directories(root) for run in _walk(path, depth - 1))


def _list_directories(path: Path) -> Iterable[Path]:
    try:
        return sorted(one for one in path.iterdir() if one.is_dir() and _may_hold_runs(one))
    except OSError:
        return ()


def _may_hold_runs(path: Path) -> bool:
    return path.name not in _NOT_RUNS and not path.name.startswith(".") and not path.is_symlink()


def _name_run(path: Path, root: Path) -> str:
    return path.resolve().name if path == root else path.relative_to(root).as_posix()


def _get_written_s(path: Path) -> float:
    """Return when a run was last written to, by the files that change most."""
    found = 0.0
    for name in (LOG_FILE, STRETCHES, STATUS_FILE):
        try:
            found = max(found, (path / name).stat().st_mtime)
        except OSError:
            continue
    return found
