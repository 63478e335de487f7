"""Hugging Face datasets: from folders, and a clear answer where the hub cannot be reached."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headway.errors import ConfigError
from tests.data_sources.factory import epoch, sources, sums, write

datasets: Any = pytest.importorskip("datasets")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def answers(name: str, folder: Path, **options: str) -> list[str]:
    args = {"file_name": f"hf:{name}", "dataset_dir": str(folder), "shuffle": False, "options": options}
    return [task.data["answer"] for task in epoch(sources(args).train)]


def test_a_saved_dataset_with_and_without_splits_is_read_offline(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", sums(3))
    loaded = datasets.load_dataset("json", data_files=file, cache_dir=str(tmp_path / "cache"))
    loaded["train"].save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": loaded["train"], "test": loaded["train"].select([2])}).save_to_disk(tmp_path / "two")
    assert answers("one", tmp_path) == ["1", "2", "3"]
    assert answers(str(tmp_path / "two"), Path()) == ["1", "2", "3"]
    assert answers("two", tmp_path, split="test") == ["3"]
    with pytest.raises(ConfigError, match=r"hf:two.*has no split 'dev' \(options\.split: one of train, test\)"):
        answers("two", tmp_path, split="dev")


def test_a_folder_of_data_files_is_a_dataset(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    write(tmp_path / "mine" / "train.jsonl", sums(2))
    write(tmp_path / "mine" / "test.jsonl", sums(1))
    assert answers("mine", tmp_path) == ["1", "2"]
    assert answers("mine", tmp_path, split="test") == ["1"]


def test_what_cannot_be_loaded_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="cannot be loaded"):
        answers("empty", tmp_path)
    with pytest.raises(ConfigError, match="there is no such folder"):
        answers(str(tmp_path / "nowhere"), Path())
    with pytest.raises(ConfigError, match="is no dataset"):
        answers("a/b/c/d/e", tmp_path)
    with pytest.raises(ConfigError, match=r"has no option 'spilt' \(one of config, split\)"):
        answers("empty", tmp_path, spilt="x")


def test_without_a_network_the_error_comes_at_once_and_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    with pytest.raises(ConfigError, match=r"hf:openai/gsm8k.*the hub does not answer.*no copy.*save_to_disk"):
        answers("openai/gsm8k/main/train", tmp_path)
    assert datasets.config.HF_HUB_OFFLINE is False
