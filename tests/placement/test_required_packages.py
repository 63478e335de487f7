"""Missing packages are named together, each with its key and how to install it, before anything is started."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from headway.cli import main
from headway.config import load_config
from headway.errors import ConfigErrors
from headway.extras import suggest_install
from headway.placement.required_packages import check_packages

MISSING = {"peft", "wandb", "gymnasium", "math_verify", "datasets", "aiohttp"}
TREE: dict[str, Any] = {
    "pretrain": "tiny-sums",
    "track_with": ["jsonl", "wandb"],
    "actor_train": {"model_args": {"lora_rank": 4}, "data_args": {"file_name": "hf:org/name"}},
    "train_env_manager": {"tags": ["lake"], "group_size": 2},
    "custom_envs": {"lake": {"env_type": "gymnasium", "env_config": {"id": "FrozenLake-v1"}}},
}


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        "headway.placement.required_packages.find_spec", lambda name: None if name in MISSING else found(name)
    )


def test_all_missing_packages_are_named_at_once(bare: None) -> None:
    with pytest.raises(ConfigErrors) as raised:
        check_packages(load_config(TREE))
    lines = str(raised.value).splitlines()
    keys = [line.partition(" =")[0] for line in lines]
    assert keys == [
        "actor_train.model_args.lora_rank",
        "track_with",
        "custom_envs.lake.env_type",
        "actor_train.data_args.file_name",
    ]
    assert "needs gymnasium, which is not installed" in lines[2] and "pip install" in lines[2]


def test_a_dry_run_and_the_check_of_a_cluster_name_them(
    bare: None, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("signal.signal", lambda number, handler: None)  # this process keeps its own
    words = [
        "examples/arithmetic.yaml",
        "pretrain=tiny-sums",
        "actor_train.model_args.lora_rank=8",
        "track_with=[wandb]",
    ]
    assert main(["train", *words, f"output_dir={tmp_path}/run", "--dry-run"]) == 2
    said = capsys.readouterr().err
    assert "needs peft, which is not installed" in said and "needs wandb, which is not installed" in said
    assert main(["cluster", "check", *words]) == 0
    assert "needs peft, which is not installed" in capsys.readouterr().out


def test_a_hint_names_packages_not_an_index_that_may_not_have_headway() -> None:
    assert suggest_install("no-such-extra") == "pip install 'headway[no-such-extra]'"
    assert "headway[" not in suggest_install("lora") or not importlib.util.find_spec("peft")
