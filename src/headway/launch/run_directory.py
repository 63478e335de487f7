"""The directory of a run, which belongs to one process at a time and holds everything needed to resume.

    config.yaml       the configuration as it was given, overrides included; enough to run it again
    events.jsonl      every event of the run; a resumed run appends
    ledger.sqlite     the state of every sample
    samples.jsonl     a few answers of every step
    images.jsonl      a few images of every validation, where there are any
    checkpoints/      what `transformers` loads, and what `headway train` resumes from
    logs/             standard output and error of trainer and engines
    run.lock          held by the process that runs here
    control.sock      takes requests to that process (`headway scale`)

Guarantees: two processes never run in one directory. A directory that cannot be written, or has no space for a
checkpoint, is rejected before anything starts; so is a run that would resume with another model, data or group size.

The control socket takes one line of JSON and answers with one:

    {"engines": 3}  →  {"joined": ["engine/1", "engine/2"], "left": []}   or   {"error": "engines = 0: …"}

Only the owner of the run may connect (mode 600). An invalid request is answered with an error and never disturbs the
run. The socket is removed at the end of the run; the next run replaces one that a killed run left behind.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import shutil
import socket
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import yaml

from headway.config import ResolvedConfig
from headway.errors import ConfigError, HeadwayError
from headway.flow.training_flow import AsyncTrainingFlow
from headway.ledger import Ledger, find_newest_checkpoint
from headway.monitor.event_log import read_events

CONFIG_FILE, EVENTS_FILE, LEDGER_FILE, IDENTITY_FILE = "config.yaml", "events.jsonl", "ledger.sqlite", "identity.json"
_FIXED_OPTIONS = (
    "num_return_sequences_in_group",
    "actor_train.model_args.lora_rank",
    "actor_train.model_args.lora_target",
    "adv_estimator",
)
"""Options that a resumed run cannot change, because the ledger or a checkpoint depends on them."""
CONTROL_SOCKET = "control.sock"
_MAX_REQUEST_BYTES = 4096
_REPLY_TIMEOUT_S = 10.0

ControlHandler = Callable[[Mapping[str, Any]], Mapping[str, Any]]
"""Function from a request to its reply; a `HeadwayError` becomes an error reply."""


class RunDirectory:
    """A context manager that holds the lock of a run directory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: int | None = None

    def __enter__(self) -> RunDirectory:
        self._acquire_lock()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _acquire_lock(self) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            (self.path / "logs").mkdir(exist_ok=True)
            handle = os.open(self.path / "run.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
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
        return (_read_last_checkpoint(self.path) or (0, ""))[0]

    def read_last_event_s(self) -> float:
        """Return the time of the last event, from which a resumed run goes on. An incomplete last line is removed."""
        path = self.path / EVENTS_FILE
        if not path.exists():
            return 0.0
        _truncate_torn_line(path)
        with path.open(encoding="utf-8") as lines:
            return max((event.time_s for event in read_events(lines)), default=0.0)

    def start_from_checkpoint(self, checkpoint: Path) -> None:
        """Start a new run from a checkpoint of another one. Raises `ConfigError`."""
        try:
            version = int(json.loads((checkpoint / "trainer.json").read_text(encoding="utf-8"))["version"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                "is no checkpoint of a run",
                key="resume",
                value=str(checkpoint),
                hint="auto, never, or a directory such as output/checkpoints/step-00000050",
            ) from error
        ledger = Ledger(self.path / LEDGER_FILE)
        try:
            ledger.checkpoint(version, str(checkpoint.resolve()))
        finally:
            ledger.close()

    def check_disk_space(self, checkpoint_bytes: int, checkpoint_dir: Path) -> None:
        """Raise `ConfigError` where not even one checkpoint would fit."""
        try:
            checkpoint_dir.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=checkpoint_dir):
                free = shutil.disk_usage(checkpoint_dir).free
        except OSError as error:
            raise _make_unwritable_error("checkpoint_dir", checkpoint_dir, error) from error
        if free < checkpoint_bytes:
            raise ConfigError(
                f"has {free / 1e9:.2f} GB free, and one checkpoint needs about {checkpoint_bytes / 1e9:.2f} GB",
                key="checkpoint_dir",
                value=str(checkpoint_dir),
            )

    def write_identity(self, resolved: ResolvedConfig, identity: Mapping[str, Any]) -> None:
        """Write the configuration and what identifies the run. Raises `ConfigError` where another run started here."""
        wanted = {**identity, **{key: _read_option(resolved, key) for key in _FIXED_OPTIONS}}
        path = self.path / IDENTITY_FILE
        if self.started and path.exists():
            written = json.loads(path.read_text(encoding="utf-8"))
            for key, value in wanted.items():
                if key in written and written[key] != json.loads(json.dumps(value)):
                    raise ConfigError(
                        f"the run in {self.path} was begun with {written[key]!r}",
                        key=key,
                        value=value,
                        hint="go on as it was, or choose another output_dir",
                    )
        else:
            _write_atomically(path, json.dumps(wanted, indent=2) + "\n")
        tree: dict[str, Any] = {}
        for key, value in resolved.given().items():
            _set_nested(tree, key, value)
        _write_atomically(self.path / CONFIG_FILE, yaml.safe_dump(tree, sort_keys=False, allow_unicode=True))


def find_checkpoint_of_run(path: Path) -> Path | None:
    """Return the newest checkpoint of the run in `path`, which may be running."""
    last = find_newest_checkpoint(path / LEDGER_FILE)
    return None if last is None else path / last[1]


def _read_last_checkpoint(path: Path) -> tuple[int, str] | None:
    if not (path / LEDGER_FILE).exists():
        return None
    ledger = Ledger(path / LEDGER_FILE)
    try:
        return ledger.last_checkpoint()
    finally:
        ledger.close()


def _make_unwritable_error(key: str, path: Path, error: OSError) -> ConfigError:
    if isinstance(error, FileExistsError | NotADirectoryError):
        return ConfigError("cannot be written: something that is no directory stands there", key=key, value=str(path))
    return ConfigError(f"cannot be written: {error.strerror}", key=key, value=str(path))


def _read_option(resolved: ResolvedConfig, key: str) -> Any:
    value: Any = resolved.config
    for part in key.split("."):
        value = getattr(value, part)
    return value


def _set_nested(tree: dict[str, Any], key: str, value: Any) -> None:
    *above, last = key.split(".")
    for part in above:
        tree = tree.setdefault(part, {})
    tree[last] = value


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


# -- control socket


@asynccontextmanager
async def serve_control_socket(directory: Path, handler: ControlHandler) -> AsyncIterator[None]:
    """Answer requests until the block ends. Raises `OSError` where no socket can be made."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with suppress(OSError, TimeoutError, ValueError):
                async with asyncio.timeout(_REPLY_TIMEOUT_S):
                    reply = _handle_request(await reader.readline(), handler)
                    writer.write(json.dumps(reply).encode() + b"\n")
                    await writer.drain()
        finally:
            writer.close()

    server = await asyncio.start_unix_server(serve, sock=_bind_socket(directory), limit=_MAX_REQUEST_BYTES)
    try:
        yield
    finally:
        server.close()
        (directory / CONTROL_SOCKET).unlink(missing_ok=True)


def make_scale_handler(flow: AsyncTrainingFlow) -> ControlHandler:
    """Return the handler of `{"engines": n}`, which changes the number of engines."""

    def scale(request: Mapping[str, Any]) -> Mapping[str, Any]:
        wanted = request.get("engines")
        if not isinstance(wanted, int) or isinstance(wanted, bool):
            raise ConfigError("how many?", key="engines", value=wanted, hint="a whole number")
        if flow.fleet is None:
            raise HeadwayError("the run is still starting: try again in a moment")
        joined, left = flow.fleet.scale(wanted)
        return {"joined": joined, "left": left}

    return scale


def send_control_request(directory: Path, request: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the reply of the run in `directory`. Raises `HeadwayError` where none is running, or where it refuses."""
    if not directory.is_dir():
        raise HeadwayError(f"{directory}: there is no such directory")
    try:
        with socket.socket(socket.AF_UNIX) as connection, _shorten_socket_path(directory) as address:
            connection.settimeout(_REPLY_TIMEOUT_S)
            connection.connect(address)
            connection.sendall(json.dumps(request).encode() + b"\n")
            reply = json.loads(connection.makefile("rb").readline(_MAX_REQUEST_BYTES) or b"{}")
    except (FileNotFoundError, ConnectionRefusedError) as error:
        raise HeadwayError(f"{directory}: no run is at work there") from error
    except TimeoutError as error:
        raise HeadwayError(f"{directory}: the run does not answer") from error
    except PermissionError as error:
        raise HeadwayError(f"{directory}: the run belongs to somebody else") from error
    except (OSError, ValueError) as error:
        raise HeadwayError(f"{directory}: the run was lost while it was asked: {error}") from error
    if "error" in reply or not reply:
        raise HeadwayError(str(reply.get("error", f"{directory}: the run ended while it was asked")))
    return dict(reply)


def _handle_request(line: bytes, handler: ControlHandler) -> Mapping[str, Any]:
    try:
        request = json.loads(line)
        if not isinstance(request, dict):
            raise ValueError("not an object")
        return handler(request)
    except ValueError as error:
        return {"error": f"not understood: {error}"}
    except HeadwayError as error:
        return {"error": str(error)}


def _bind_socket(directory: Path) -> socket.socket:
    """Make the listening socket, which only its owner may use from the moment that it exists."""
    (directory / CONTROL_SOCKET).unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX)
    try:
        os.fchmod(listener.fileno(), 0o600)
        with _shorten_socket_path(directory) as address:
            listener.bind(address)
        (directory / CONTROL_SOCKET).chmod(0o600)
    except BaseException:
        listener.close()
        raise
    return listener


@contextmanager
def _shorten_socket_path(directory: Path) -> Iterator[str]:
    """Yield a path to the socket that stays below the limit of about a hundred characters."""
    descriptors = Path("/proc/self/fd")
    if not descriptors.is_dir():
        yield str(directory / CONTROL_SOCKET)
        return
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield str(descriptors / str(handle) / CONTROL_SOCKET)
    finally:
        os.close(handle)
