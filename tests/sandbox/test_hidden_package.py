"""The package knows the answers of its own tasks: no program may read it, wherever it is installed."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import headway
from headway.sandbox import Sandbox
from headway.sandbox.bubblewrap_command import find_hidden_folders
from tests.sandbox.factory import require_sandbox, run

PACKAGE = Path(headway.__file__).resolve().parent


def test_a_program_cannot_read_the_package_below_a_visible_folder() -> None:
    require_sandbox()
    sandbox = Sandbox(packages=[str(PACKAGE.parent)])
    if reason := asyncio.run(sandbox.probe()).reason:
        pytest.skip(reason)
    outcome = run(
        f"import os; print(os.listdir({str(PACKAGE)!r}))\n"
        "try: import headway.environments.library\n"
        "except ImportError: print('no package')\n"
        f"open('{PACKAGE}/x', 'w')",
        sandbox=Sandbox(packages=[str(PACKAGE.parent)]),
    )
    assert outcome.stdout == "[]\nno package\n" and "Read-only" in outcome.stderr, outcome


def test_the_package_is_hidden_only_where_it_could_be_seen() -> None:
    assert str(PACKAGE) in find_hidden_folders([], [str(PACKAGE.parent)])
    assert str(PACKAGE) not in find_hidden_folders([], ["/opt/elsewhere"])
