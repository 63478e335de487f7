"""Ends a worker process that code of a user has made useless: it has forked and returned twice, or closed all files."""

import os

FILES_CLOSED_CODE = 96
"""Exit code of a worker whose files were closed, so that it can neither answer nor say why."""


class WorkerGuard:
    """Knows the process that it was made in, and one of its files."""

    def __init__(self) -> None:
        self._process = os.getpid()
        self._canary = os.open(os.devnull, os.O_RDONLY)

    def check(self) -> None:
        """Exit if this is a copy of the process, or if its files are closed. Call it after code of a user."""
        if os.getpid() != self._process:
            os._exit(0)
        try:
            os.fstat(self._canary)
        except OSError:
            os._exit(FILES_CLOSED_CODE)
