"""`${}`: typed, textual, nested, and honest about what it cannot find."""

from __future__ import annotations

import pytest

from headway.config import load_config
from headway.errors import ConfigErrors

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


def test_the_environment_and_other_values_are_read_by_the_functions_of_omegaconf(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NAME_OF_RUN", "seven")
    monkeypatch.delenv("NO_SUCH_VARIABLE", raising=False)
    for text, value in {
        "${oc.env:NAME_OF_RUN}": "seven",
        "${oc.env:NO_SUCH_VARIABLE,eight}": "eight",
        "${oc.select:pretrain,none}": "model",
        "${oc.select:no.such,nine}": "nine",
        "x-${oc.env:NAME_OF_RUN}-${seed}": "x-seven-3",
        "${.pretrain}": "model",
    }.items():
        assert load_config({"exp_name": text, "pretrain": "model", "seed": 3}).config.exp_name == value
    assert "has no variable NO_SUCH_VARIABLE" in only_problem({"exp_name": "${oc.env:NO_SUCH_VARIABLE}"})
    assert "is not a name" in only_problem({"exp_name": "${hydra:runtime.cwd}"})


def test_what_is_given_below_a_reference_is_merged_with_what_it_stands_for() -> None:
    config = load_config(
        {
            "actor_train": {"training_args": {"learning_rate": 1e-4, "weight_decay": 0.5, "warmup_steps": 3}},
            "critic": {"training_args": "${actor_train.training_args}"},
            "adv_estimator": "gae",
        },
        ["critic.training_args.learning_rate=1e-5"],
    ).config
    args = config.critic.training_args
    assert (args.learning_rate, args.weight_decay, args.warmup_steps) == (1e-5, 0.5, 3)


def test_a_value_inside_a_section_that_is_a_reference_can_be_referred_to() -> None:
    values = {"base": {"inner": {"seed": 7}}, "copy": "${base}", "seed": "${copy.inner.seed}"}
    assert load_config(values).config.seed == 7


def test_a_long_chain_of_references_is_refused() -> None:
    chain = {f"v{n}": f"${{v{n + 1}}}" for n in range(3000)}
    with pytest.raises(ConfigErrors) as refused:
        load_config({**chain, "v3000": 1, "seed": "${v0}"})
    assert "chain of more than 100 references" in str(refused.value.problems[0])
