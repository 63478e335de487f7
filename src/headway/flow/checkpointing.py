"""Saves checkpoints and removes old ones, in an order that survives a kill at any point.

A checkpoint directory gets its final name only when it is complete, and the ledger names it only after that. A resumed
run takes the last checkpoint that the ledger names.

Each checkpoint has a list of its files with their lengths, and the id of the run that wrote it. A checkpoint that lost
a file, or the end of one, does not count as complete; one that holds a file of somebody else's is never removed. An old
checkpoint is removed only when `limit` newer ones are complete and recorded: it is renamed, then forgotten by the
ledger, then deleted file by file. One that another process reads stays until a later removal. A kill in between leaves
complete checkpoints under their names, names in the ledger without a directory, which a resume skips, and leftovers,
which the next removal deletes. File contents are not read: a flipped bit shows when a checkpoint is loaded.
"""

import asyncio
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from headway.errors import TrainerCrashed, TrainerError
from headway.flow.pipeline import Pipeline
from headway.ledger import Ledger
from headway.ledger.checkpoint_hold import LISTING_FILE, lock_for_removal
from headway.monitor.event_log import EventLog
from headway.monitor.events import CheckpointRemove, CheckpointSave, ErrorReport


async def save_checkpoint(pipeline: Pipeline) -> None:
    """Write what is needed to continue from here: the trainer's state and partial sequences.

    Raise `TrainerError` if it cannot be written now, `TrainerCrashed` if the trainer does not answer.
    """
    trained, ledger = pipeline.headway.trained, pipeline.recorder.ledger
    last = ledger.last_checkpoint()
    if last is not None and last[0] == trained:
        pipeline.store_partials()  # nothing was trained since: only sequences in flight have changed
        return
    ledger.flush()  # a checkpoint never knows more than the ledger
    final = pipeline.checkpoint_dir / f"step-{trained:08d}"
    try:
        await _write(pipeline, trained, final)
    except OSError as error:
        raise TrainerError(f"checkpoint {final} cannot be written: {error}") from error
    pipeline.store_partials()
    inside = final.is_relative_to(pipeline.run_dir)
    ledger.checkpoint(trained, str(final.relative_to(pipeline.run_dir) if inside else final.resolve()))
    pipeline.events.emit(CheckpointSave(who="flow", trained=trained))
    root, limit = pipeline.checkpoint_dir, pipeline.settings.save_total_limit
    for _ in remove_old_checkpoints(ledger, limit, root=root, run_dir=pipeline.run_dir, events=pipeline.events):
        await asyncio.sleep(0)  # removing a large file takes a while


async def _write(pipeline: Pipeline, trained: int, final: Path) -> None:
    """Write the trainer's state under its final name, completely or not at all."""
    trainer, limit_s = pipeline.backends.trainer, pipeline.settings.reliability.train_timeout_s
    if trainer.version != trained:  # a cancelled step went through after all, and its samples are unknown
        raise TrainerCrashed(f"the trainer is at version {trainer.version}, the scheduler at {trained}")
    draft = final.with_name(final.name + ".partial")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True, exist_ok=True)  # a save that was interrupted may still be writing the same files there
    try:
        with pipeline.waits.waiting("train", f"checkpoint {final.name}", "trainer"):
            async with asyncio.timeout(limit_s):
                await trainer.save(draft)
    except TimeoutError:
        raise TrainerCrashed(f"checkpoint of version {trained}: not written after {limit_s} s") from None
    write_listing(draft, pipeline.recorder.ledger.run)
    shutil.rmtree(final, ignore_errors=True)
    draft.rename(final)


class CheckpointListing(NamedTuple):
    """The list of files that a checkpoint was written with."""

    run: str
    files: dict[str, int]
    """Length in bytes by file name."""


def write_listing(directory: Path, run: str) -> None:
    """Write the list of the files that `directory` holds now, and that `run` wrote them."""
    files = {name: (directory / name).stat().st_size for name in sorted(_file_names(directory))}
    (directory / LISTING_FILE).write_text(json.dumps({"run": run, "files": files}, indent=1), encoding="utf-8")


def remove_old_checkpoints(
    ledger: Ledger, limit: int, *, root: Path, run_dir: Path, events: EventLog
) -> Iterator[None]:
    """Remove checkpoints that are older than the `limit` newest complete ones, one small change at a time. 0: none.

    Leftovers of a killed removal are searched for in `root`. What cannot be removed is reported as an event and stays.
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
                with lock_for_removal(directory) as is_free:
                    if not is_free:
                        continue  # somebody reads it: it is removed after a later checkpoint
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
    """Return the checkpoints that are older than the `limit` newest complete ones."""
    whole = 0
    for state, (_, name) in enumerate(checkpoints if limit else ()):
        whole += _is_whole(run_dir / name)
        if whole == limit:
            return checkpoints[state + 1 :]
    return []


def _is_whole(directory: Path) -> bool:
    listing = _read_listing(directory)
    if listing is None or not listing.files:
        return False
    paths = {directory / name: size for name, size in listing.files.items()}
    return all(path.is_file() and path.stat().st_size == size for path, size in paths.items())


def _written_by_run(directory: Path, run: str) -> bool:
    """Return whether `run` wrote the checkpoint and nobody has added a file since."""
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
    """Return the names of all files below `directory`."""
    paths = directory.rglob("*")
    return {path.relative_to(directory).as_posix() for path in paths if path.is_symlink() or not path.is_dir()}


def _remove_tree(directory: Path, events: EventLog) -> Iterator[None]:
    """Delete a directory file by file, and yield in between so that other tasks run."""
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
