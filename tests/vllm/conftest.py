"""One place for all tests here. They are started by `make test-vllm`, and otherwise not even imported."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.vllm.server_pool import ServerPool

collect_ignore_glob = [] if os.environ.get("HEADWAY_VLLM") else ["test_*.py"]


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerPool]:
    from tests.vllm.server_pool import ServerPool

    made = ServerPool(tmp_path_factory.mktemp("vllm"))
    try:
        yield made
    finally:
        made.close()
