"""Children under another interpreter, whose libraries are other than ours.

    Child.start(spec, timeout_s, spawn=under("/opt/vllm/bin/python"))

Such a child finds this package and nothing else of ours: the package may lie among libraries which that interpreter has
in other versions. So what is on its path is a directory with a link to it. The interpreter must be as new as ours
needs (`OLDEST`), and have PyYAML where the child reads configurations.
"""

from __future__ import annotations

import os
import socket
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import IO

from headway import errors
from headway.cluster.base import ChildSpec
from headway.cluster.process import Process, Spawn, environment_of

OLDEST = (3, 11)
"""Python that the package runs under."""


def under(python: str) -> Spawn:
    """How children are made by `python`."""

    def spawned(spec: ChildSpec, theirs: socket.socket, output: IO[bytes]) -> Process:
        return subprocess.Popen(
            [python, "-P", "-m", "headway.cluster.child", str(theirs.fileno()), str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, "PYTHONPATH": _alone().name, "PYTHONUNBUFFERED": "1", **environment_of(spec)},
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )

    return spawned


@cache
def _alone() -> tempfile.TemporaryDirectory[str]:
    """A directory with this package in it; removed when this process ends."""
    made = tempfile.TemporaryDirectory(prefix="headway-path-")
    package = Path(errors.__file__).parent
    (Path(made.name) / package.name).symlink_to(package, target_is_directory=True)
    return made
