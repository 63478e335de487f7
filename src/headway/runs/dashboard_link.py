"""A link to the dashboard of a run at work that costs nothing until somebody opens it.

A port of this machine is bound when the run starts. The first visitor's connection starts `headway dashboard` as a
process of its own, with low priority, which takes the port over; it ends with the run, in whatever way that ends. If it
ends before, the next visitor starts another. So a run that nobody looks at pays for one socket, and one that is looked
at shares no interpreter with the page.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

HOST = "127.0.0.1"
_PORT = 6008
_NICENESS = 10
_MOST_STARTS = 5


class DashboardLink:
    """A context manager around a run; `address` is what to open."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._listener: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._loop = asyncio.get_running_loop()
        self._starts = 0
        self._end: int | None = None
        """Descriptor that is readable once the server has ended."""

    @property
    def address(self) -> str:
        """Address of the page; empty if no port could be had, or if a package that the page needs is missing."""
        return "" if self._listener is None else f"http://{HOST}:{self._listener.getsockname()[1]}"

    def __enter__(self) -> DashboardLink:
        if find_spec("aiohttp") is None or find_spec("numpy") is None:
            return self
        for port in (_PORT, 0):  # the usual one, or any that is free
            try:
                self._listener = socket.create_server((HOST, port))
                self._loop.add_reader(self._listener.fileno(), self._start)
                break
            except OSError:
                continue
        return self

    def __exit__(self, *exception: object) -> None:
        if self._listener is not None:
            self._loop.remove_reader(self._listener.fileno())
            self._listener.close()
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()  # which ends it
            try:
                self._process.wait(2.0)
            except subprocess.TimeoutExpired:
                self._process.kill()
        self._forget_process()

    def _replace(self) -> None:
        """Wait for the next visitor: the server has ended, though the run has not."""
        self._forget_process()
        if self._listener is not None and self._starts < _MOST_STARTS:
            self._loop.add_reader(self._listener.fileno(), self._start)
        elif self._listener is not None:
            self._listener.close()  # it cannot work here, and a visitor shall not wait
            self._listener = None

    def _forget_process(self) -> None:
        if self._process is not None:
            self._process.wait()
        if self._end is not None:
            self._loop.remove_reader(self._end)
            os.close(self._end)
        self._process = self._end = None

    def _start(self) -> None:
        """Start the server, which accepts the connection that waits."""
        assert self._listener is not None
        handle = self._listener.fileno()
        self._loop.remove_reader(handle)
        self._starts += 1
        command = [sys.executable, "-m", "headway", "dashboard", str(self._directory), "--listener", str(handle)]
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(handle,),
                start_new_session=True,
            )
            os.setpriority(os.PRIO_PROCESS, self._process.pid, _NICENESS)
            if hasattr(os, "pidfd_open"):  # elsewhere than on Linux it is not replaced
                self._end = os.pidfd_open(self._process.pid)
                self._loop.add_reader(self._end, self._replace)
        except OSError:
            self._listener.close()  # nothing more can be started; the run goes on
            self._listener = None
