"""Models that are made once for all tests of the package, and a hub cache that is empty."""

from __future__ import annotations

from pathlib import Path

import pytest

from headway.models.tiny_model import make_tiny_model


@pytest.fixture(scope="session")
def untrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An ordinary model directory."""
    directory = tmp_path_factory.mktemp("untrained")
    make_tiny_model(directory, steps=0)
    return directory


@pytest.fixture(autouse=True)
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where `huggingface_hub` keeps things, for one test; nobody answers unless a test says so."""
    from huggingface_hub import constants

    cache = tmp_path / "hub"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    point_hub_at("http://127.0.0.1:9", monkeypatch)
    return cache


def point_hub_at(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As HF_ENDPOINT does before the library is imported."""
    from huggingface_hub import constants

    template = address + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
