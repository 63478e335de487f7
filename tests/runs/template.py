"""Runs that start fast: importing a model's libraries takes seconds, so runs and their children are forks of a process
that has done it.

    run = Template(directory).run(["train", "config.yaml"], output=…)

Each is a process of its own with its own session, as a run from a shell; it only skips the imports, and so do its
trainer and engines. The template runs no torch operation, and forks from its only thread.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import resource
import selectors
import signal
import socket
import subprocess
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from headway.processes import child_main, child_process
from headway.processes.base import ChildSpec

_MODULES = (
    "torch",
    "transformers",
    "transformers.models.auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.llama.modeling_llama",
    "headway.launch.language_components",
    "headway.cli",
    "headway.engines.native.native_engine",
    "headway.models.model_names",
    "headway.models.tiny_model",
    "headway.trainers.remote_trainer",
    "headway.engines.remote_engine",
    "headway.trainers.local.local_trainer",
    "headway.trainers.local.policy_scorer",
    "headway.weights.weight_store",
    "headway.weights.shared_memory",
    "rich._emoji_codes",
    "rich.live",
    "rich.table",
)


class Template:
    """A process that has imported everything, and forks on request."""

    def __init__(self, directory: Path) -> None:
        self._address = str(directory / "template.socket")
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(self._address)
            listening.listen(64)
            environment = {
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "TRANSFORMERS_VERBOSITY": "error",
                "HF_HUB_OFFLINE": "1",
            }
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.runs.template", str(listening.fileno()), self._address],
                pass_fds=[listening.fileno()],
                env=environment,
            )

    def command(self, *words: str, output: Path, cwd: Path | None = None, largest_file: int = 0) -> Forked:
        """`headway WORDS`, in a session of its own, with both streams in `output`; files of `largest_file` bytes at
        most, where that is given."""
        order = {"kind": "headway", "words": words, "cwd": str(cwd or output.parent), "largest_file": largest_file}
        with output.open("ab") as stream:
            return Forked(_ask(self._address, order, [stream.fileno()]))

    def call(self, target: str, *args: Any) -> int:
        """`module:function` with plain arguments, in a fork; its exit code."""
        return Forked(_ask(self._address, {"kind": "call", "target": target, "args": args}, [2])).wait()

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()


class Forked:
    """A `Process` that the template has made: its pid now, its exit code when it has ended."""

    def __init__(self, connection: socket.socket) -> None:
        self._answers = connection.makefile("r")
        self.pid = int(self._answers.readline())
        self._code: int | None = None
        connection.close()

    def fileno(self) -> int:
        """The descriptor that can be read once it has ended."""
        return self._answers.fileno()

    def wait(self) -> int:
        if self._code is None:
            self._code = int(self._answers.readline() or -signal.SIGKILL)
            self._answers.close()
        return self._code


def _ask(address: str, order: dict[str, Any], descriptors: list[int]) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(address)
    socket.send_fds(connection, [json.dumps(order).encode() + b"\n"], descriptors)
    return connection


# -- in the template


def serve(listening: socket.socket, address: str) -> NoReturn:
    """Fork for whoever asks, and tell them how it ended."""
    for name in _MODULES:
        importlib.import_module(name)
    gc.freeze()  # what was imported is not looked through again by every run and child, nor copied for it
    ready = selectors.DefaultSelector()
    ready.register(listening, selectors.EVENT_READ)
    while True:
        for key, _ in ready.select():
            if key.fileobj is listening:
                _fork(listening, address, ready)
            else:
                _reap(key, ready)


def _fork(listening: socket.socket, address: str, ready: selectors.BaseSelector) -> None:
    connection = listening.accept()[0]
    text, descriptors, _, _ = socket.recv_fds(connection, 65536, 4)
    if not text:  # killed before it could say what it wants
        connection.close()
        return
    begun, begin = os.pipe()
    pid = os.fork()
    if not pid:
        ready.close()
        listening.close()
        connection.close()
        os.setsid()
        os.close(begun)
        os.close(begin)
        become(json.loads(text), descriptors, address)
    os.close(begin)
    os.read(begun, 1)  # it leads its own group now: whoever knows its number may kill that
    for one in (begun, *descriptors):
        os.close(one)
    _tell(connection, pid)
    ready.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, connection))


def _reap(key: selectors.SelectorKey, ready: selectors.BaseSelector) -> None:
    pid, connection = key.data
    ready.unregister(key.fileobj)
    assert isinstance(key.fileobj, int)
    os.close(key.fileobj)
    _tell(connection, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    connection.close()


def _tell(connection: socket.socket, number: int) -> None:
    with suppress(OSError):  # whoever asked may have been killed
        connection.sendall(f"{number}\n".encode())


def become(order: dict[str, Any], descriptors: list[int], address: str) -> NoReturn:
    """In the fork: a run, a child of one, or a function."""
    code = 70
    try:
        if order["kind"] == "child":
            for standard in (1, 2):
                os.dup2(descriptors[1], standard)
            os.environ.update(order["env"])
            child_main.main(descriptors[0], os.getppid())
        elif order["kind"] == "call":
            _fork_children(address)
            module, _, name = order["target"].partition(":")
            code = getattr(importlib.import_module(module), name)(*order["args"]) or 0
        else:
            code = _run(order, descriptors[0], address)
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _fork_children(address: str) -> None:
    """Let the children of this process be forks of the template."""

    def spawn(spec: ChildSpec, theirs: socket.socket, output: int) -> child_process.ProcessHandle:
        wanted = {"kind": "child", "env": dict(spec.env)}
        return Forked(_ask(address, wanted, [theirs.fileno(), output]))

    child_process.spawn_child = spawn  # type: ignore[assignment]


def _run(order: dict[str, Any], output: int, address: str) -> int:
    for standard in (1, 2):
        os.dup2(output, standard)
    os.chdir(order["cwd"])
    sys.path.insert(0, order["cwd"])
    if order["largest_file"]:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (order["largest_file"], order["largest_file"]))
    _fork_children(address)
    from headway.cli import main

    try:
        return main(order["words"])
    except SystemExit as stopped:  # argparse
        return int(stopped.code or 0)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2])
