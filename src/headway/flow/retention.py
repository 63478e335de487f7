"""Which checkpoints stay: the newest few that are whole, and everything that is not this run's to remove.

A checkpoint carries a list of its files with their lengths, and whose run wrote it. By that list one that lost a file
or the end of one does not count as kept, and one in which somebody has put a file of their own is never removed.

Guarantees: nothing goes before `limit` newer ones are whole and recorded. What goes is renamed first, then forgotten
by the ledger, then removed file by file: a kill at any point leaves whole checkpoints under their names, names in the
ledger without a directory, which a resume passes over, and leftovers that the next removal sweeps. Removed is only
what this run's ledger names and this run wrote.

Does not read the files: a bit that has flipped is found when a checkpoint is loaded.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from headway.ledger import Ledger
from headway.monitor.events import EventLog

FILES = "files.json"


class Listing(NamedTuple):
    """What a checkpoint said of itself when it was written."""

    run: str
    files: dict[str, int]
    """Bytes by name."""


def write_listing(directory: Path, run: str) -> None:
    """What is in `directory` now is all there is, and `run` wrote it."""
    files = {name: (directory / name).stat().st_size for name in sorted(_names(directory))}
    (directory / FILES).write_text(json.dumps({"run": run, "files": files}, indent=1), encoding="utf-8")


def removing(ledger: Ledger, limit: int, *, root: Path, run_dir: Path, events: EventLog) -> Iterator[None]:
    """Let go of what is older than the `limit` newest whole checkpoints, one small change at a time. 0: of nothing.

    Leftovers of a removal that was killed are looked for in `root`. What cannot be removed is an event, and stays.
    """
    suffix = f".removed-{ledger.run}"
    for leftover in sorted(root.glob(f"*{suffix}")) if limit else ():
        yield from _removed(leftover, events)
    for version, name in _beyond(ledger.checkpoints(), limit, run_dir):
        directory = run_dir / name
        if directory.exists():
            if not _is_own(directory, ledger.run):
                continue
            try:
                directory = directory.rename(directory.with_name(directory.name + suffix))
            except OSError as error:
                _report(directory, error, events)
                continue
            yield
        ledger.forget_checkpoint(version)
        events.emit("checkpoint.remove", "flow", trained=version)
        yield
        yield from _removed(directory, events)


def _beyond(checkpoints: list[tuple[int, str]], limit: int, run_dir: Path) -> list[tuple[int, str]]:
    """Those that are older than the `limit` newest whole ones."""
    whole = 0
    for place, (_, name) in enumerate(checkpoints if limit else ()):
        whole += _is_whole(run_dir / name)
        if whole == limit:
            return checkpoints[place + 1 :]
    return []


def _is_whole(directory: Path) -> bool:
    listing = _read(directory)
    if listing is None or not listing.files:
        return False
    paths = {directory / name: size for name, size in listing.files.items()}
    return all(path.is_file() and path.stat().st_size == size for path, size in paths.items())


def _is_own(directory: Path, run: str) -> bool:
    """Written by `run`, and nothing has come to it since."""
    listing = _read(directory)
    if listing is None or listing.run != run or directory.is_symlink():
        return False
    return _names(directory) <= {*listing.files, FILES}


def _read(directory: Path) -> Listing | None:
    try:
        said = json.loads((directory / FILES).read_text(encoding="utf-8"))
        return Listing(str(said["run"]), {str(name): int(size) for name, size in said["files"].items()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _names(directory: Path) -> set[str]:
    """Of everything that is no directory, below it too."""
    paths = directory.rglob("*")
    return {path.relative_to(directory).as_posix() for path in paths if path.is_symlink() or not path.is_dir()}


def _removed(directory: Path, events: EventLog) -> Iterator[None]:
    """File by file: a large one takes a while, and others have work in between."""
    try:
        for path in sorted(directory.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
            yield
        if directory.exists():
            directory.rmdir()
    except OSError as error:
        _report(directory, error, events)


def _report(directory: Path, error: OSError, events: EventLog) -> None:
    message = f"{directory} cannot be removed: {error.strerror}"
    events.emit("error", "flow", error=type(error).__name__, message=message)
