"""A converted configuration is one of our own and means the same."""

from io import StringIO
from pathlib import Path

import pytest

from headway.cli import main
from headway.config import load_config
from headway.config.conversion import write_own_shape
from headway.config.resolved_config import list_leaves
from headway.errors import ConfigErrors
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
@pytest.mark.parametrize("system", ["roll", "verl", "dots.rl", "gerl"])
def test_whatever_is_accepted_of_another_project_loads_as_the_same_configuration(system: str, tmp_path: Path) -> None:
    file, tried = tmp_path / "own.yaml", 0
    for name, source, words in list_items(system):
        try:
            resolved = load_config(source, words)
        except ConfigErrors:
            continue
        text = write_own_shape(resolved)
        file.write_text(text, encoding="utf-8")
        again, tried = load_config(file), tried + 1
        assert dict(list_leaves(again.config)) == dict(list_leaves(resolved.config)), name
        assert again.derived == resolved.derived, name
        assert sum(line.startswith("# ") for line in text.splitlines()) == len(resolved.notes), name
        theirs = [key for key, _, origin in resolved.rows() if origin.startswith("default of ")]
        assert text.count("# default of ") == len(theirs), name
    assert tried


def test_names_that_are_not_plain_and_values_with_quotes_survive(tmp_path: Path) -> None:
    tags = {"a b": {"env_type": 'say "x: #1"', "agent_template": "{observation}\n# no comment"}}
    resolved = load_config({"train_env_manager": {"tags": ["a b"]}, "custom_envs": tags})
    file = tmp_path / "own.yaml"
    file.write_text(write_own_shape(resolved), encoding="utf-8")
    assert load_config(file).config.custom_envs == resolved.config.custom_envs


def test_comments_name_defaults_of_theirs_and_keys_that_fell_away(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "convert", "--", *GRPO, "actor_rollout_ref.model.use_shm=True"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "lambd: 1.0  # default of verl" in lines
    assert any(line.startswith("# actor_rollout_ref.model.use_shm: changes nothing here") for line in lines)
    assert any(line.startswith("pretrain: ") and "actor_rollout_ref.model.path" in line for line in lines)


def test_names_with_dots_survive() -> None:
    source = {
        "reward_pretrain": "p",
        "rewards": {"a.b": {"reward_fn": "math"}, "a.b.c": {"reward_fn": "reward_model"}},
        "train_env_manager": {"tags": ["Lake.v0"], "group_size": 2},
        "custom_envs": {"Lake.v0": {"env_type": "frozen_lake"}},
        "rollout_batch_size": 4,
    }
    resolved = load_config(source)
    assert resolved.config.rewards["a.b.c"].model_args.model_name_or_path == "p"
    assert load_config(StringIO(write_own_shape(resolved))).config == resolved.config
    assert load_config(resolved.given()).config == resolved.config
