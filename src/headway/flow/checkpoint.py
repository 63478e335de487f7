"""Checkpoints: the trainer's state and the ledger's word for it, in an order that a kill at any point survives.

The directory appears under its name only when it is whole; the ledger names it only after that. A resumed run
takes the last one that the ledger names. Older ones go only then (`retention`).
"""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

from headway.errors import TrainerCrashed, TrainerError
from headway.flow.line import Line
from headway.flow.retention import removing, write_listing


async def save_checkpoint(line: Line) -> None:
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
    line.events.emit("checkpoint", "flow", trained=trained)
    root, limit = line.checkpoint_dir, line.settings.keep_checkpoints
    for _ in removing(ledger, limit, root=root, run_dir=line.run_dir, events=line.events):
        await asyncio.sleep(0)  # removing a large file takes a while


async def _write(line: Line, trained: int, final: Path) -> None:
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
