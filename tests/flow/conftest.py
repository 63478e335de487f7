"""Directories of these tests lie in memory where there is room: thousands of ledgers are opened and closed in them."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

MEMORY = Path("/dev/shm")
ENOUGH_BYTES = 1 << 30


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    has_room = os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > ENOUGH_BYTES
    with tempfile.TemporaryDirectory(prefix="pytest-", dir=MEMORY if has_room else None) as directory:
        yield Path(directory)
