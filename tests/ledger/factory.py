"""Small records for the ledger's tests, and a copy of a file as a killed process leaves it."""

from __future__ import annotations

import shutil
from pathlib import Path

from headway.ledger import Ledger
from headway.types import Episode, FinishReason, Generation, Task, Turn, VersionRun


def make_generation(*versions: int) -> Generation:
    """One action for each version."""
    return Generation(
        actions=tuple(range(len(versions))),
        logps=tuple(-0.1 * number for number in range(len(versions))),
        runs=tuple(VersionRun(version=version, count=1) for version in versions),
        finish=FinishReason.STOP,
    )


def make_episode(sample_id: str, *versions: int, position: int = 0) -> Episode:
    turn = Turn(observation=(1, 2), generation=make_generation(*(versions or (0,))))
    return Episode(sample_id=sample_id, task=Task(position=position), turns=(turn,))


def start_group(ledger: Ledger, group_id: int, members: int = 2, *, position: int | None = None) -> list[str]:
    """A group and its members, named `<group>/<member>`."""
    ledger.start_group(group_id, group_id if position is None else position)
    ids = [f"{group_id}/{member}" for member in range(members)]
    for sample_id in ids:
        ledger.start_sample(sample_id, group_id)
    return ids


def finish_group(ledger: Ledger, group_id: int, members: int = 2, *, made_by: tuple[int, ...] = (0,)) -> list[str]:
    """A group whose members are all finished."""
    ids = start_group(ledger, group_id, members)
    for sample_id in ids:
        ledger.finish_sample(make_episode(sample_id, *made_by, position=group_id))
    return ids


def killed_copy(path: Path, directory: Path) -> Path:
    """The ledger as it would be found if its process were killed now: its files, without a word to their owner."""
    directory.mkdir(parents=True)
    for name in (path.name, path.name + "-wal"):
        if path.with_name(name).exists():
            shutil.copyfile(path.with_name(name), directory / name)
    return directory / path.name
