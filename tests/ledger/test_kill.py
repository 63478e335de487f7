"""A real `kill -9`: whatever was reported after a flush is there, and nothing ends twice."""

from __future__ import annotations

import os
import random
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from headway.errors import LedgerError
from headway.ledger import Ledger

WRITER = """
import sys
from ledger.factory import make_episode, make_generation
from headway.ledger import Ledger
from headway.types import DropReason

ledger = Ledger(sys.argv[1], defer=lambda flush: None)
last = ledger.last_checkpoint()
version = last[0] if last else 0
restored = ledger.restore(version)
ready = [(group.group_id, list(group.episodes)) for group in restored.groups if group.episodes and not group.open]
for group in restored.groups:
    if group.open or not group.episodes:
        ledger.drop_group(group.group_id, DropReason.LOST_LINEAGE)
print("ready", flush=True)
for group_id in range(restored.next_group_id, 10**9):
    ids = [f"{group_id}/{member}" for member in range(4)]
    ledger.start_group(group_id, group_id)
    for sample_id in ids:
        ledger.start_sample(sample_id, group_id)
    for sample_id in ids:
        ledger.finish_sample(make_episode(sample_id, *[version] * 40, position=group_id))
    ready.append((group_id, ids))
    ledger.flush()
    print("finished", *ids, flush=True)
    if len(ready) > 3:
        version += 1
        for trained in ready[:2]:
            ledger.train_group(*trained, version)
        del ready[:2]
        ledger.flush()
        print("trained", version, flush=True)
        if version % 5 == 0:
            ledger.checkpoint(version, f"c{version}")
            print("checkpoint", version, flush=True)
"""


def write_until_killed(path: Path, rng: random.Random) -> list[list[str]]:
    """What a writer reported before it was killed, at a moment that only the seed knows."""
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
    )
    assert writer.stdout is not None
    said = b""
    enough = rng.randrange(1, 8000)
    try:
        while len(said) < enough:
            select.select([writer.stdout], [], [], 20.0)
            chunk = os.read(writer.stdout.fileno(), 512)
            assert chunk, "the writer died by itself"
            said += chunk
        if rng.random() < 0.3:
            with pytest.raises(LedgerError, match=f"in use by process {writer.pid}"):
                Ledger(path)
    finally:
        os.kill(writer.pid, signal.SIGKILL)
        rest = writer.stdout.read()
        writer.wait()
        writer.stdout.close()
    whole, _, _ = (said + rest).rpartition(b"\n")
    return [line.split() for line in whole.decode().splitlines()]


def test_a_killed_writer_loses_nothing_it_reported_and_ends_nothing_twice(tmp_path: Path) -> None:
    rng = random.Random(0)
    path = tmp_path / "ledger.db"
    finished: set[str] = set()
    for _ in range(10):
        reports = write_until_killed(path, rng)
        finished.update(name for kind, *names in reports if kind == "finished" for name in names)
        checkpoints = [int(rest[0]) for kind, *rest in reports if kind == "checkpoint"]
        trained = [int(rest[0]) for kind, *rest in reports if kind == "trained"]
        ledger = Ledger(path)
        assert ledger.audit() == []
        rows = ledger._journal.db.execute(
            "SELECT sample_id, end, trained_at, row IN (SELECT row FROM payloads) FROM samples"
        ).fetchall()
        assert len(rows) == len({name for name, *_ in rows})
        last = ledger.last_checkpoint()
        assert last is None or not checkpoints or last[0] >= checkpoints[-1]
        kept = {name for name, end, at, payload in rows if payload or (end == "trained" and last and at <= last[0])}
        assert finished <= kept
        assert not trained or trained[-1] <= max((at for _, _, at, _ in rows if at is not None), default=0)
        ledger.close()
    assert len(finished) > 20
