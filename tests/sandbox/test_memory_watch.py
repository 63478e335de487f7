"""The supervisor checks the program's own root, and not that of the host while the sandbox starts."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from headway.sandbox.sandbox_supervisor import SupervisedRun


@pytest.mark.skipif(sys.platform != "linux", reason="the sandbox is Linux's")
def test_files_are_counted_only_once_the_program_has_its_own_root() -> None:
    child = subprocess.Popen(["sleep", "600"])
    run = SupervisedRun({"memory_bytes": 1 << 40, "max_files": 0, "folder": "/"})
    run.inner, run.inner_fd = child.pid, os.pidfd_open(child.pid)
    run.check_limits()
    assert run.ending is None, "its root is still that of the machine, which has more files than allowed"
    run.ready = True
    run.check_limits()
    assert run.ending == "files" and child.wait(60) == -9
    os.close(run.inner_fd)
