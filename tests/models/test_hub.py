"""Models by hub name, with a hub on this machine, a silent one, and none."""

from __future__ import annotations

import shutil
import socket
from pathlib import Path

import pytest

from headway.errors import ConfigError
from headway.models.model_cache import resolve_hub_model
from headway.models.model_loading import load_tokenizer
from headway.models.model_names import resolve_model
from tests.models.conftest import point_hub_at
from tests.models.factory import local_hub


def test_a_model_is_downloaded_once_and_then_needs_no_network(
    untrained: Path, hub_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with local_hub({"org/name": untrained}) as address:
        point_hub_at(address, monkeypatch)
        found = resolve_model("org/name", tmp_path)
    assert found.is_relative_to(hub_cache.resolve())
    assert load_tokenizer(found).encode("3+5=")
    point_hub_at("http://127.0.0.1:9", monkeypatch)
    assert resolve_model("org/name", tmp_path) == found
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert resolve_model("org/name", tmp_path) == found


def test_a_model_the_hub_does_not_know_is_a_matter_of_spelling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with local_hub({}) as address:
        point_hub_at(address, monkeypatch)
        with pytest.raises(ConfigError, match=r"nor a model on the hub.*spelling.*HF_TOKEN"):
            resolve_model("org/nmae", tmp_path)


def test_a_model_without_safetensors_is_refused_before_the_download(
    untrained: Path, hub_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = tmp_path / "given"
    shutil.copytree(untrained, given)
    (given / "model.safetensors").rename(given / "model.Q4_0.gguf")
    with local_hub({"org/name": given}) as address:
        point_hub_at(address, monkeypatch)
        with pytest.raises(ConfigError, match=r"model\.Q4_0\.gguf"):
            resolve_model("org/name", tmp_path)
    assert not hub_cache.exists()


def test_without_a_network_the_refusal_says_what_was_tried_and_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"http://127\.0\.0\.1:9.*copy the model's directory") as caught:
        resolve_model("org/name", tmp_path)
    assert (caught.value.key, caught.value.value) == ("pretrain", "org/name")


def test_a_hub_that_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        point_hub_at(f"http://127.0.0.1:{silent.getsockname()[1]}", monkeypatch)
        with pytest.raises(ConfigError, match="the hub is silent"):
            resolve_hub_model("org/name", timeout_s=0.2)


def test_offline_mode_asks_nobody(untrained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with local_hub({"org/name": untrained}) as address:
        point_hub_at(address, monkeypatch)
        with pytest.raises(ConfigError, match="HF_HUB_OFFLINE"):
            resolve_model("org/name", tmp_path)
