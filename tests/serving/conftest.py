"""One small model for all tests here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("aiohttp")
pytest.importorskip("openai")
pytest.importorskip("torch")

from tests.serving.factory import Stage, make_model, ready


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("served") / "model")


@pytest.fixture(scope="session")
def stage(model: Path) -> Iterator[Stage]:
    made = Stage(ready(model))
    yield made
    made.close()
