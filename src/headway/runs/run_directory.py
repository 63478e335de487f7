"""The directory of a run, which belongs to one process at a time and holds everything needed to resume.

    config.yaml       the configuration as it was given, overrides included; enough to run it again
    events.jsonl      the newest events of the run; older ones are compressed in `events/`; a resumed run appends
    ledger.sqlite     the state of every sample
    origins.json      every option with its value, and where the value comes from
    samples.jsonl     a few answers of every step
    groups.jsonl      whole groups of every step, token by token
    images.jsonl      a few images of every validation, where there are any
    checkpoints/      what `transformers` loads, and what `headway train` resumes from
    logs/             standard output and error of trainer and engines
    run.lock          held by the process that runs here
    control.sock      takes requests to that process (`headway status`, `headway scale`)
    status.json       what each stage was doing a few seconds ago, and at the end how the run ended

Guarantees: two processes never run in one directory. A directory that cannot be written, or has no space for a
checkpoint, is rejected before anything starts; so is a run that would resume with another model, data or group size, or
with another reward without being told to.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import yaml

from headway.config import ResolvedConfig
from headway.config.resolved_config import get_at_key, to_plain_value
from headway.errors import ConfigError, HeadwayError, TrainerError
from headway.flow.training_flow import AsyncTrainingFlow
from headway.ledger import Ledger, is_unused_ledger, list_recorded_checkpoints
from headway.ledger.checkpoint_hold import hold_checkpoint, release_checkpoint
from headway.monitor.event_files import LOG_FILE, read_last_event_s
from headway.monitor.run_status import RunStatus
from headway.processes.control_socket import ControlHandler
from headway.runs.run_changes import (
    CONFIG_FILE,
    WEIGHTS,
    OptionChange,
    find_content_changes,
    find_option_changes,
    make_config_tree,
    refuse_changed_reward,
)
from headway.runs.stored_paths import (
    WORKING_DIRECTORY,
    is_same_path,
    make_paths_absolute,
    read_working_directory,
)
from headway.trainers.checkpoint_mark import MARK_FILE, read_completion_mark, verify_model

LOCK_FILE = "run.lock"
LEDGER_FILE, IDENTITY_FILE, ORIGINS_FILE = "ledger.sqlite", "identity.json", "origins.json"
_FIXED_OPTIONS = (
    "num_return_sequences_in_group",
    "actor_train.model_args.lora_rank",
    "actor_train.model_args.lora_target",
    "adv_estimator",
)
"""Options that a resumed run cannot change, because the ledger or a checkpoint depends on them."""


def read_checkpoint_version(checkpoint: Path) -> int:
    """Return the version of the weights in a checkpoint that a run is to start from. Raises `ConfigError`."""
    try:
        return read_completion_mark(checkpoint).version
    except TrainerError as error:
        raise ConfigError(
            f"is no checkpoint of a run: {error}",
            key="resume",
            value=str(checkpoint),
            hint="auto, never, or a directory such as output/checkpoints/step-00000050",
        ) from error


class RunDirectory:
    """A context manager that holds the lock of a run directory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.changes: tuple[OptionChange, ...] = ()
        """What differs from the process before, once the identity is written."""
        self._lock: int | None = None

    def __enter__(self) -> RunDirectory:
        self._acquire_lock()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _acquire_lock(self) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            (self.path / "logs").mkdir(exist_ok=True)
            handle = os.open(self.path / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise _make_unwritable_error("output_dir", self.path, error) from error
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

    @property
    def started(self) -> bool:
        """Whether a run was started here before."""
        return (self.path / LEDGER_FILE).exists()

    def count_trained_steps(self) -> int:
        """Return the number of steps in the newest checkpoint."""
        if not self.started:
            return 0
        with closing(Ledger(self.path / LEDGER_FILE)) as ledger:
            return (ledger.last_checkpoint() or (0, ""))[0]

    def save_open_samples(self) -> None:
        """Give an end to samples of a finished run that was killed between its last checkpoint and its end."""
        with closing(Ledger(self.path / LEDGER_FILE)) as ledger:
            if ledger.counts()["open"]:
                ledger.save_open({})

    def read_last_event_s(self) -> float:
        """Return the time of the last event, from which a resumed run goes on. An incomplete last line is removed."""
        if (self.path / LOG_FILE).exists():
            _truncate_torn_line(self.path / LOG_FILE)
        return read_last_event_s(self.path)

    def refuse_lost_ledger(self, checkpoints: Path) -> None:
        """Raise `ConfigError` if there are checkpoints of a run and no ledger: a new run would overwrite them."""
        newest = _find_newest_complete(checkpoints)
        if newest is not None and is_unused_ledger(self.path / LEDGER_FILE):
            what = "is empty" if self.started else "is missing"
            problem = f"{checkpoints} has checkpoints of a run, and {self.path / LEDGER_FILE} {what}"
            hint = f"put the ledger back, or begin in another output_dir with resume={newest}"
            raise ConfigError(problem, key="output_dir", value=str(self.path), hint=hint)

    def start_from_checkpoint(self, checkpoint: Path) -> None:
        """Start a new run from a checkpoint of another one. Raises `ConfigError`."""
        version = read_checkpoint_version(checkpoint)
        with closing(Ledger(self.path / LEDGER_FILE)) as ledger:
            ledger.checkpoint(version, str(checkpoint.resolve()))

    def write_identity(
        self, resolved: ResolvedConfig, identity: Mapping[str, Any], contents: Mapping[str, str] | None = None
    ) -> None:
        """Write the configuration and what identifies the run, after `compare_identity`."""
        wanted = self.compare_identity(resolved, identity, contents or {})
        wanted |= {"contents": contents or {}, WORKING_DIRECTORY: str(Path.cwd())}
        _write_atomically(self.path / IDENTITY_FILE, json.dumps(wanted, indent=2) + "\n")
        config = yaml.safe_dump(make_config_tree(resolved), sort_keys=False, allow_unicode=True)
        _write_atomically(self.path / CONFIG_FILE, config)
        write_config_origins(self.path, resolved)

    def compare_identity(
        self, resolved: ResolvedConfig, identity: Mapping[str, Any], contents: Mapping[str, str]
    ) -> dict[str, Any]:
        """Return what identifies the run, and note `changes`. `contents` are hashes of what its options name.

        Raises `ConfigError` where another run started here, or this one with another reward. Writes nothing.
        """
        if self.path.exists() and not self.path.is_dir():
            raise _make_unwritable_error("output_dir", self.path, NotADirectoryError())
        if self.started and resolved.config.resume == "never":
            problem, hint = "holds a run already, and resume is never", "choose another output_dir, or resume: auto"
            raise ConfigError(problem, key="output_dir", value=str(self.path), hint=hint)
        wanted = {**identity, **{key: get_at_key(resolved.config, key) for key in _FIXED_OPTIONS}}
        path = self.path / IDENTITY_FILE
        if self.started and path.exists():
            written = _read_identity(path)
            started_in = read_working_directory(path)
            changes = find_option_changes(self.path, resolved, started_in)
            for key, value in wanted.items():
                same = key not in written or written[key] == json.loads(json.dumps(value))
                if not same and not (key == "pretrain" and is_same_path(written[key], value, started_in)):
                    raise _make_identity_error(self.path, key, value, written[key], changes)
            changes += find_content_changes(written.get("contents", {}), contents)
            if not resolved.config.accept_changed_reward:
                refuse_changed_reward(changes, self.path)
            self.changes, wanted = tuple(changes), {**wanted, **written}
        return wanted


def write_config_origins(directory: Path, resolved: ResolvedConfig) -> None:
    """Write key, value and origin of every option that a run has, for those who look at it."""
    rows = [(key, to_plain_value(value), origin) for key, value, origin in resolved.rows()]
    _write_atomically(directory / ORIGINS_FILE, json.dumps(rows, ensure_ascii=False, default=str) + "\n")


def _read_identity(path: Path) -> dict[str, Any]:
    """Return what identifies the run. Raise `ConfigError` if the file is damaged."""
    try:
        found = dict(json.loads(path.read_text(encoding="utf-8")))
        if not found.keys() >= set(_FIXED_OPTIONS):
            raise ValueError("it does not say what every run says")
        return found
    except (OSError, ValueError, TypeError) as error:
        problem = f"{path} cannot be read, so nobody knows whether model and tasks are the same: {error}"
        raise ConfigError(problem, hint="put it back from a copy, or remove it") from error


def _make_identity_error(
    path: Path, key: str, value: object, before: object, changes: Sequence[OptionChange]
) -> ConfigError:
    """Return the error about what a run cannot change. Tasks and weights are known by a hash, which is not told."""
    problem = f"the run in {path} was begun with {before!r}"
    if key == "data":
        of_data = [change for change in changes if "data_args" in change.key or change.key == "seed"]
        of_rewards = [change for change in changes if change.key.startswith("rewards.")]  # they name domains of tasks
        told = "; ".join(str(change) for change in of_data or of_rewards)
        problem, value = f"the run in {path} was begun with other tasks", told or "the contents of the files changed"
    if key == WEIGHTS:
        problem, key, value = f"the run in {path} was begun with other weights there", "pretrain", "its files changed"
    return ConfigError(problem, key=key, value=value, hint="go on as it was, or choose another output_dir")


def read_stored_options(path: Path) -> dict[str, Any] | None:
    """Return the configuration of the run in `path` with paths that are right here and now; `None` if it has no others.

    Its file is then read like any other, which has its own errors.
    """
    path = path.absolute()
    try:
        stored = yaml.safe_load((path / CONFIG_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return None
    if not isinstance(stored, dict):
        return None
    started_in = read_working_directory(path / IDENTITY_FILE)
    changed = make_paths_absolute(stored, started_in, moved_to=path)
    is_same = started_in == Path.cwd() and started_in / str(stored.get("output_dir", "")) == path
    return None if is_same or changed == stored else changed


def find_checkpoint_of_run(path: Path, tell: Callable[[str], None] = lambda line: None) -> Path | None:
    """Return the newest whole checkpoint of the run in `path`, which may be running; `tell` about damaged ones.

    The checkpoint is held: a run at work does not remove it before `release_checkpoint`. Raise `HeadwayError` if all
    are damaged.
    """
    problem = ""
    for _, name in list_recorded_checkpoints(path / LEDGER_FILE):
        if not hold_checkpoint(path / name):
            continue
        try:
            verify_model(path / name)
            return path / name
        except TrainerError as error:
            release_checkpoint(path / name)
            problem = problem or str(error)
            tell(f"{error}; the one before it is used")
    if problem:
        raise HeadwayError(f"none of the checkpoints of {path} can be read; the newest: {problem}")
    return None


def _find_newest_complete(checkpoints: Path) -> Path | None:
    """Return the newest complete checkpoint among the directories there, whether a ledger knows it or not."""
    found = [path for path in checkpoints.glob("step-*") if not path.suffix and (path / MARK_FILE).is_file()]
    return max(found, default=None)


def check_disk_space(path: Path, needed_bytes: int, *, key: str, contents: str) -> None:
    """Check that `contents` can be written to `path` and fit there. Raises `ConfigError` for option `key`."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            free = shutil.disk_usage(path).free
    except OSError as error:
        raise _make_unwritable_error(key, path, error) from error
    if free < needed_bytes:
        size, unit = (1e9, "GB") if needed_bytes >= 1e9 else (1e6, "MB")
        problem = f"has {free / size:.2f} {unit} free, and {contents} about {needed_bytes / size:.2f} {unit}"
        raise ConfigError(problem, key=key, value=str(path))


def _make_unwritable_error(key: str, path: Path, error: OSError) -> ConfigError:
    if isinstance(error, FileExistsError | NotADirectoryError):
        return ConfigError("cannot be written: something that is no directory stands there", key=key, value=str(path))
    return ConfigError(f"cannot be written: {error.strerror}", key=key, value=str(path))


def _write_atomically(path: Path, text: str) -> None:
    """Write the whole text or nothing."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def _truncate_torn_line(path: Path) -> None:
    """Remove an incomplete last line, which a killed process may leave."""
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


def make_control_handler(flow: AsyncTrainingFlow, take_status: Callable[[], RunStatus]) -> ControlHandler:
    """Return the handler of `{"engines": n}`, which changes the number of engines, and of `{"status": true}`."""

    def handle(request: Mapping[str, Any]) -> Mapping[str, Any]:
        if "status" in request:
            return take_status().to_json()
        wanted = request.get("engines")
        if not isinstance(wanted, int) or isinstance(wanted, bool):
            raise ConfigError("how many?", key="engines", value=wanted, hint="a whole number")
        if flow.fleet is None:
            raise HeadwayError("the run is still starting: try again in a moment")
        joined, left = flow.fleet.scale(wanted)
        return {"joined": joined, "left": left}

    return handle
