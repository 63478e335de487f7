"""A converted configuration is one of our own and means the same."""

from pathlib import Path

import pytest

from headway.cli import main
from headway.config import load_config
from headway.config.conversion import write_own_shape
from headway.config.resolved_config import list_leaves
from tests.config.test_peers import PEERS, list_items
from tests.config.test_verl_command_line import FULLY_ASYNC, GERL, GRPO, PPO


@pytest.mark.parametrize("words", [PPO, GRPO, FULLY_ASYNC, GERL], ids=["ppo", "grpo", "fully_async", "gerl"])
def test_a_converted_command_line_loads_as_the_same_configuration(words: list[str], tmp_path: Path) -> None:
    resolved = load_config(None, words)
    file = tmp_path / "own.yaml"
    file.write_text(write_own_shape(resolved), encoding="utf-8")
    again = load_config(file)
    assert dict(list_leaves(again.config)) == dict(list_leaves(resolved.config))
    assert again.derived == resolved.derived


@pytest.mark.skipif(not PEERS.is_dir(), reason="the files of other projects are not here")
def test_a_converted_file_of_roll_loads_as_the_same_configuration(tmp_path: Path) -> None:
    name, source, _ = next(item for item in list_items("roll") if "rlvr" in item[0])
    resolved = load_config(source)
    file = tmp_path / name
    file.write_text(write_own_shape(resolved), encoding="utf-8")
    assert dict(list_leaves(load_config(file).config)) == dict(list_leaves(resolved.config))


def test_comments_name_defaults_of_theirs_and_keys_that_fell_away(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "convert", "--", *GRPO, "actor_rollout_ref.model.use_shm=True"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "lambd: 1.0  # default of verl" in lines
    assert any(line.startswith("# actor_rollout_ref.model.use_shm: changes nothing here") for line in lines)
    assert any(line.startswith("pretrain: ") and "actor_rollout_ref.model.path" in line for line in lines)
