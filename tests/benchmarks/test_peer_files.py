"""Files of ROLL train here with nothing changed but model, data, sizes and devices: one step of a tiny model each."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks.peer_files import FILES, STEPS, make_arguments, roll_lake, summarise

from headway.cli import main
from headway.models.tiny_model import make_tiny_model

PEERS = Path(__file__).parents[2].parent / "shared" / "peers"

pytestmark = pytest.mark.skipif(not PEERS.is_dir(), reason="the files of other projects are not here")


def make_long_model(directory: Path) -> str:
    """An untaught model that reads letters and has room for an episode."""
    make_tiny_model(directory, steps=0)
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    (directory / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 4096}), encoding="utf-8")
    return str(directory)


@pytest.mark.parametrize("name", ["roll-rlvr", "roll-frozen-lake"])
def test_a_file_of_roll_trains(name: str, tmp_path: Path) -> None:
    arguments = make_arguments(name, PEERS, make_long_model(tmp_path / "model"), tmp_path)
    smaller = ["max_steps=1", "processes=false", "eval_steps=0", "track_with=[]", "save_steps=0"]
    assert main(["train", *arguments, *smaller]) == 0
    found = summarise(tmp_path / "run")
    assert found["steps"] == 1 and found["samples"] in (4, 8) and found["actions"] > 0


def test_single_turns_of_a_gigpo_file_are_trained(tmp_path: Path) -> None:
    """`StepEnvManager`, a template that tells the last turns, roles that share their devices, and a reference."""
    file = PEERS / "roll/qwen2.5-0.5B-agentic/agent_val_frozen_lake_gigpo.yaml"
    words = [word for word in roll_lake(make_long_model(tmp_path / "model"), tmp_path) if "device_mapping" not in word]
    words += [f"{role}.device_mapping=[0]" for role in ("actor_train", "actor_infer", "reference")]
    words += ["actor_train.training_args.per_device_train_batch_size=2", "num_gpus_per_node=1"]
    words += [f"output_dir={tmp_path / 'run'}", "device=cpu", "max_steps=1", "track_with=[]"]
    assert main(["train", str(file), *words, "processes=false", "eval_steps=0", "save_steps=0"]) == 0
    assert summarise(tmp_path / "run")["steps"] == 1


def test_every_file_is_there_and_three_steps_are_asked_for(tmp_path: Path) -> None:
    for name in FILES:
        words = make_arguments(name, PEERS, "smollm2-135m-instruct", tmp_path)
        assert f"max_steps={STEPS}" in words and STEPS == 3
