"""Checkpoints: the trainer's state and the ledger's word for it, in an order that a kill at any point survives.

The directory appears under its name only when it is whole; the ledger names it only after that. A resumed run
takes the last one that the ledger names.
"""

from __future__ import annotations

import asyncio
import shutil

from headway.errors import TrainerCrashed
from headway.flow.line import Line


async def save_checkpoint(line: Line) -> None:
    """Write what is needed to go on from here: the trainer, and partial sequences as far as they are known."""
    trained = line.headway.trained
    last = line.books.ledger.last_checkpoint()
    if last is not None and last[0] == trained:
        line.store_partials()  # nothing was trained since: only what is in flight has changed
        return
    final = line.run_dir / "checkpoints" / f"step-{trained:08d}"
    draft = final.with_name(final.name + ".partial")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    line.books.ledger.flush()  # a checkpoint never knows more than the ledger
    limit = line.settings.reliability.train_timeout_s
    try:
        async with asyncio.timeout(limit):
            await line.backends.trainer.save(draft)
    except TimeoutError:
        raise TrainerCrashed(f"checkpoint of version {trained}: not written after {limit} s") from None
    shutil.rmtree(final, ignore_errors=True)
    draft.rename(final)
    line.store_partials()
    line.books.ledger.checkpoint(trained, str(final.relative_to(line.run_dir)))
    line.events.emit("checkpoint", "flow", trained=trained)
