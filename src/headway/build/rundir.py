"""The directory of a run: one run at a time, and everything that is needed to go on with it.

    config.yaml       the configuration as it was given, overrides included; enough to run it again
    events.jsonl      everything that happened; a resumed run appends
    ledger.sqlite     where every sample is
    samples.jsonl     a few answers of every step
    images.jsonl      a few pictures of every validation, where there are any
    checkpoints/      what `transformers` loads, and what `headway train` resumes from
    logs/             what trainer and engines wrote to their standard streams
    run.lock          held while a process works here
    control.sock      where that process is spoken to (`headway scale`)

Guarantees: two processes never work in one directory; a directory that cannot be written, or has no room for a
checkpoint, is refused before anything starts; so is a run that would go on with another model, data or group size.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import yaml

from headway.config import Resolved
from headway.errors import ConfigError
from headway.ledger import Ledger, newest_of
from headway.monitor.events import read_events

CONFIG, EVENTS, LEDGER, IDENTITY = "config.yaml", "events.jsonl", "ledger.sqlite", "identity.json"
_FIXED = (
    "num_return_sequences_in_group",
    "actor_train.model_args.lora_rank",
    "actor_train.model_args.lora_target",
    "adv_estimator",
)
"""Options that a run cannot change on the way: what is in the ledger or in a checkpoint depends on them."""


class RunDirectory:
    """An open run directory; a context manager that gives the lock back."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: int | None = None

    def __enter__(self) -> RunDirectory:
        self._take()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _take(self) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            (self.path / "logs").mkdir(exist_ok=True)
            handle = os.open(self.path / "run.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise _unwritable("output_dir", self.path, error) from error
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner = os.read(handle, 32).decode(errors="replace").strip() or "unknown"
            os.close(handle)
            raise ConfigError(
                f"a run is at work here (process {owner})",
                key="output_dir",
                value=str(self.path),
                hint="stop it first, or choose another output_dir",
            ) from error
        os.ftruncate(handle, 0)
        os.pwrite(handle, str(os.getpid()).encode(), 0)
        self._lock = handle

    # -- what is there already

    @property
    def started(self) -> bool:
        """A run has begun here."""
        return (self.path / LEDGER).exists()

    def trained(self) -> int:
        """Steps of the newest checkpoint."""
        return (_last(self.path) or (0, ""))[0]

    def last_event_s(self) -> float:
        """When the log ends; a resumed run goes on from there. A torn last line is cut off."""
        path = self.path / EVENTS
        if not path.exists():
            return 0.0
        _mend(path)
        with path.open(encoding="utf-8") as lines:
            return max((event.time_s for event in read_events(lines)), default=0.0)

    # -- what is written

    def adopt(self, checkpoint: Path) -> None:
        """Begin a new run from a checkpoint of another one. Raises `ConfigError`."""
        try:
            version = int(json.loads((checkpoint / "trainer.json").read_text(encoding="utf-8"))["version"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                "is no checkpoint of a run",
                key="resume",
                value=str(checkpoint),
                hint="auto, never, or a directory such as output/checkpoints/step-00000050",
            ) from error
        ledger = Ledger(self.path / LEDGER)
        try:
            ledger.checkpoint(version, str(checkpoint.resolve()))
        finally:
            ledger.close()

    def check_room(self, checkpoint_bytes: int, checkpoint_dir: Path) -> None:
        """Raises `ConfigError` where not even one checkpoint would fit."""
        try:
            checkpoint_dir.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=checkpoint_dir):
                free = shutil.disk_usage(checkpoint_dir).free
        except OSError as error:
            raise _unwritable("checkpoint_dir", checkpoint_dir, error) from error
        if free < checkpoint_bytes:
            raise ConfigError(
                f"has {free / 1e9:.2f} GB free, and one checkpoint needs about {checkpoint_bytes / 1e9:.2f} GB",
                key="checkpoint_dir",
                value=str(checkpoint_dir),
            )

    def identify(self, resolved: Resolved, identity: Mapping[str, Any]) -> None:
        """Write down what this run is; or raise `ConfigError` where an earlier process began another one here."""
        mine = {**identity, **{key: _leaf(resolved, key) for key in _FIXED}}
        path = self.path / IDENTITY
        if self.started and path.exists():
            theirs = json.loads(path.read_text(encoding="utf-8"))
            for key, value in mine.items():
                if key in theirs and theirs[key] != json.loads(json.dumps(value)):
                    raise ConfigError(
                        f"the run in {self.path} was begun with {theirs[key]!r}",
                        key=key,
                        value=value,
                        hint="go on as it was, or choose another output_dir",
                    )
        else:
            _write(path, json.dumps(mine, indent=2) + "\n")
        tree: dict[str, Any] = {}
        for key, value in resolved.given().items():
            _nest(tree, key, value)
        _write(self.path / CONFIG, yaml.safe_dump(tree, sort_keys=False, allow_unicode=True))


def newest_checkpoint(path: Path) -> Path | None:
    """Of the run in `path`, also while a process is at work there."""
    last = newest_of(path / LEDGER)
    return None if last is None else path / last[1]


def _last(path: Path) -> tuple[int, str] | None:
    if not (path / LEDGER).exists():
        return None
    ledger = Ledger(path / LEDGER)
    try:
        return ledger.last_checkpoint()
    finally:
        ledger.close()


def _unwritable(key: str, path: Path, error: OSError) -> ConfigError:
    if isinstance(error, FileExistsError | NotADirectoryError):
        return ConfigError("cannot be written: something that is no directory stands there", key=key, value=str(path))
    return ConfigError(f"cannot be written: {error.strerror}", key=key, value=str(path))


def _leaf(resolved: Resolved, key: str) -> Any:
    value: Any = resolved.config
    for part in key.split("."):
        value = getattr(value, part)
    return value


def _nest(tree: dict[str, Any], key: str, value: Any) -> None:
    *above, last = key.split(".")
    for part in above:
        tree = tree.setdefault(part, {})
    tree[last] = value


def _write(path: Path, text: str) -> None:
    """Whole or not at all."""
    draft = path.with_name(path.name + ".partial")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)


def _mend(path: Path) -> None:
    """Cut off what a killed process left of its last line."""
    with path.open("r+b") as log:
        end = log.seek(0, os.SEEK_END)
        while end:
            start = max(end - 65536, 0)
            log.seek(start)
            line = log.read(end - start).rfind(b"\n")
            if line >= 0 or not start:
                log.truncate(start + line + 1)
                return
            end = start
