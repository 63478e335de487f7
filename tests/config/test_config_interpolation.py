"""`${}`: typed, textual, nested, and honest about what it cannot find."""

from __future__ import annotations

from headway.config import load_config

from .factory import only_problem


def test_a_reference_takes_the_value_with_its_type() -> None:
    config = load_config(
        {"response_length": 77, "actor_infer": {"generating_args": {"max_new_tokens": "${response_length}"}}}
    ).config
    assert config.actor_infer.generating_args.max_new_tokens == 77


def test_a_reference_inside_a_text_becomes_text() -> None:
    assert load_config({"seed": 3, "exp_name": "run-${seed}-x"}).config.exp_name == "run-3-x"


def test_references_reach_into_blocks_and_through_each_other() -> None:
    given = {"pretrain": "${actor_train.model_args.model_name_or_path}", "who": "me"}
    given["actor_train"] = {"model_args": {"model_name_or_path": "models/${who}"}}
    assert load_config(given).config.pretrain == "models/me"


def test_a_reference_may_be_a_whole_block() -> None:
    given = {"zero": {"tensor_model_parallel_size": 2}, "num_gpus_per_node": 2}
    given["actor_train"] = {"strategy_args": {"strategy_config": "${zero}"}}
    assert load_config(given).config.actor_train.strategy_args.strategy_config.tensor_model_parallel_size == 2


def test_defaults_can_be_referred_to() -> None:
    assert load_config({"exp_name": "s${seed}"}).config.exp_name == "s42"


def test_a_name_that_exists_only_to_be_referred_to_is_no_unknown_key() -> None:
    assert (
        load_config({"turns": 5, "custom_envs": {"lake": {"max_steps": "${turns}"}}})
        .config.custom_envs["lake"]
        .max_steps
        == 5
    )


def test_overrides_are_seen_by_references() -> None:
    assert (
        load_config(
            {"response_length": 5, "prompt_length": "${response_length}"}, ["response_length=9"]
        ).config.prompt_length
        == 9
    )


def test_an_escaped_reference_stays() -> None:
    assert load_config({"exp_name": "\\${seed}"}).config.exp_name == "${seed}"


def test_a_cycle_is_shown_once() -> None:
    assert "refers to itself: exp_name → output_dir → exp_name" in only_problem(
        {"exp_name": "${output_dir}", "output_dir": "${exp_name}"}
    )


def test_an_unknown_name_is_refused() -> None:
    message = only_problem({"exp_name": "${nobody.there}"})
    assert "exp_name = '${nobody.there}'" in message
    assert "names nothing that is set" in message


def test_the_environment_is_not_read() -> None:
    assert "environment variables are not read" in only_problem({"exp_name": "${oc.env:HOME}"})
