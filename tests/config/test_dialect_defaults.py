"""A recognised file means what it means in its project: defaults are theirs, and `explain` says so."""

from __future__ import annotations

from typing import Any

import pytest

from headway.config import load_config
from headway.errors import ConfigErrors
from headway.trainers.local.settings import make_local_settings

ROLL = {"hydra": {"run": {"dir": "."}}, "num_return_sequences_in_group": 2}
ROLL_DEFAULTS = [
    ("loss_agg_mode", "seq-mean-token-mean"),
    ("actor_train.training_args.lr_scheduler_type", "linear"),
    ("critic.training_args.lr_scheduler_type", "linear"),
    ("filter_zero_variance", False),
    ("dual_clip_c", 1.4),
    ("actor_train.training_args.warmup_unit", "optimizer_steps"),
]


@pytest.mark.parametrize(("key", "value"), ROLL_DEFAULTS)
def test_a_file_of_roll_has_the_defaults_of_roll(key: str, value: Any) -> None:
    rows = {row[0]: row[1:] for row in load_config(ROLL).rows()}
    assert rows[key] == (value, "default of ROLL")
    own = {row[0]: row[1:] for row in load_config({"num_return_sequences_in_group": 2}).rows()}
    assert own[key][0] != value or own[key][1].startswith("derived")


def test_what_is_given_wins_over_a_default_of_theirs() -> None:
    given = {"loss_agg_mode": "token-mean", "pg_clip": 0.1, "filter_zero_variance": True}
    config = load_config({**ROLL, **given}).config
    assert (config.loss_agg_mode, config.filter_zero_variance) == ("token-mean", True)
    assert config.dual_clip_c == pytest.approx(1.2)


def test_a_configuration_that_was_written_to_a_run_directory_keeps_their_meaning() -> None:
    first = load_config({**ROLL, "pg_clip": 0.3, "actor_train": {"training_args": {"warmup_steps": 7}}})
    again = load_config(first.given())
    assert again.config.dual_clip_c == first.config.dual_clip_c == pytest.approx(1.6)
    assert again.config.loss_agg_mode == first.config.loss_agg_mode
    assert again.config.actor_train.training_args == first.config.actor_train.training_args


def test_warm_up_steps_of_theirs_are_optimizer_steps() -> None:
    sizes = {"rollout_batch_size": 8, "ppo_epochs": 2, "actor_train": {"training_args": {"warmup_steps": 5}}}
    theirs, own = make_local_settings(load_config({**ROLL, **sizes})), make_local_settings(load_config(sizes))
    assert (theirs.optimizer.warmup_steps, own.optimizer.warmup_steps) == (3, 5)


def test_the_batch_size_of_a_loader_does_not_limit_validation() -> None:
    resolved = load_config({**ROLL, "val_batch_size": 16})
    assert resolved.config.val_batch_size is None
    assert any(note.startswith("val_batch_size: changes nothing here") for note in resolved.notes)
    assert load_config({"val_batch_size": 16}).config.val_batch_size == 16


@pytest.mark.parametrize(
    "given", [{"pretrain": "Qwen/Qwen2.5-VL-7B-Instruct"}, {"actor_train.data_args.image_max_pixels": 9}]
)
def test_a_policy_that_reads_pictures_is_refused_in_one_line(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigErrors, match="asks for pictures, video or sound") as refused:
        load_config({**ROLL, **given})
    assert len(str(refused.value).splitlines()) == 1
    assert load_config({"pretrain": "models/vl/qwen3"}).config.pretrain == "models/vl/qwen3", "a file of our own"
