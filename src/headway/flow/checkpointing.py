"""Checkpoints: the trainer's state and the ledger's word for it, in an order that a kill at any point survives.

The directory appears under its name only when it is whole; the ledger names it only after that. A resumed run
takes the last one that the ledger names. Older ones go only then (`retention`).
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from headway.errors import TrainerCrashed, TrainerError
from headway.flow.pipeline import Pipeline
from headway.ledger import Ledger
from headway.monitor.event_log import EventLog
from headway.monitor.events import CheckpointRemove, CheckpointSave, ErrorReport


async def save_checkpoint(line: Pipeline) -> None:
    """Write what is needed to go on from here: the trainer, and partial sequences as far as they are known.

    Raises `TrainerError` when it cannot be written now, `TrainerCrashed` when the trainer does not answer.
    """
    trained, ledger = line.headway.trained, line.books.ledger
    last = ledger.last_checkpoint()
    if last is not None and last[0] == trained:
        line.store_partials()  # nothing was trained since: only what is in flight has changed
        return
    ledger.flush()  # a checkpoint never knows more than the ledger
    final = line.checkpoint_dir / f"step-{trained:08d}"
    try:
        await _write(line, trained, final)
    except OSError as error:
        raise TrainerError(f"checkpoint {final} cannot be written: {error}") from error
    line.store_partials()
    inside = final.is_relative_to(line.run_dir)
    ledger.checkpoint(trained, str(final.relative_to(line.run_dir) if inside else final.resolve()))
    line.events.emit(CheckpointSave(who="flow", trained=trained))
    root, limit = line.checkpoint_dir, line.settings.save_total_limit
    for _ in remove_old_checkpoints(ledger, limit, root=root, run_dir=line.run_dir, events=line.events):
        await asyncio.sleep(0)  # removing a large file takes a while


async def _write(line: Pipeline, trained: int, final: Path) -> None:
    """The trainer's state under its final name, whole or not at all."""
    trainer, limit_s = line.backends.trainer, line.settings.reliability.train_timeout_s
    if trainer.version != trained:  # a step that was cut off has gone through after all: nobody knows its samples
        raise TrainerCrashed(f"the trainer is at version {trainer.version}, the line at {trained}")
    draft = final.with_name(final.name + ".partial")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    try:
        async with asyncio.timeout(limit_s):
            await trainer.save(draft)
    except TimeoutError:
        raise TrainerCrashed(f"checkpoint of version {trained}: not written after {limit_s} s") from None
    write_listing(draft, line.books.ledger.run)
    shutil.rmtree(final, ignore_errors=True)
    draft.rename(final)


LISTING_FILE = "files.json"


class CheckpointListing(NamedTuple):
    """What a checkpoint said of itself when it was written."""

    run: str
    files: dict[str, int]
    """Bytes by name."""


def write_listing(directory: Path, run: str) -> None:
    """What is in `directory` now is all there is, and `run` wrote it."""
    files = {name: (directory / name).stat().st_size for name in sorted(_file_names(directory))}
    (directory / LISTING_FILE).write_text(json.dumps({"run": run, "files": files}, indent=1), encoding="utf-8")


def remove_old_checkpoints(
    ledger: Ledger, limit: int, *, root: Path, run_dir: Path, events: EventLog
) -> Iterator[None]:
    """Let go of what is older than the `limit` newest whole checkpoints, one small change at a time. 0: of nothing.

    Leftovers of a removal that was killed are looked for in `root`. What cannot be removed is an event, and stays.
    """
    suffix = f".removed-{ledger.run}"
    for leftover in sorted(root.glob(f"*{suffix}")) if limit else ():
        yield from _remove_tree(leftover, events)
    for version, name in _older_than_limit(ledger.checkpoints(), limit, run_dir):
        directory = run_dir / name
        if directory.exists():
            if not _written_by_run(directory, ledger.run):
                continue
            try:
                directory = directory.rename(directory.with_name(directory.name + suffix))
            except OSError as error:
                _report(directory, error, events)
                continue
            yield
        ledger.forget_checkpoint(version)
        events.emit(CheckpointRemove(who="flow", trained=version))
        yield
        yield from _remove_tree(directory, events)


def _older_than_limit(checkpoints: list[tuple[int, str]], limit: int, run_dir: Path) -> list[tuple[int, str]]:
    """Those that are older than the `limit` newest whole ones."""
    whole = 0
    for place, (_, name) in enumerate(checkpoints if limit else ()):
        whole += _is_whole(run_dir / name)
        if whole == limit:
            return checkpoints[place + 1 :]
    return []


def _is_whole(directory: Path) -> bool:
    listing = _read_listing(directory)
    if listing is None or not listing.files:
        return False
    paths = {directory / name: size for name, size in listing.files.items()}
    return all(path.is_file() and path.stat().st_size == size for path, size in paths.items())


def _written_by_run(directory: Path, run: str) -> bool:
    """Written by `run`, and nothing has come to it since."""
    listing = _read_listing(directory)
    if listing is None or listing.run != run or directory.is_symlink():
        return False
    return _file_names(directory) <= {*listing.files, LISTING_FILE}


def _read_listing(directory: Path) -> CheckpointListing | None:
    try:
        said = json.loads((directory / LISTING_FILE).read_text(encoding="utf-8"))
        return CheckpointListing(str(said["run"]), {str(name): int(size) for name, size in said["files"].items()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _file_names(directory: Path) -> set[str]:
    """Of everything that is no directory, below it too."""
    paths = directory.rglob("*")
    return {path.relative_to(directory).as_posix() for path in paths if path.is_symlink() or not path.is_dir()}


def _remove_tree(directory: Path, events: EventLog) -> Iterator[None]:
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
    events.emit(ErrorReport(who="flow", error=type(error).__name__, message=message))
