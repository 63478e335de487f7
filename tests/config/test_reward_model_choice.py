"""Which rewards are models, which model each has, and what serves it."""

from __future__ import annotations

from typing import Any

from headway.config import load_config
from headway.config.reward_model_choice import list_served_rewards

from .factory import only_problem


def load(**rewards: Any) -> Any:
    return load_config({"rewards": rewards})


def test_a_model_without_a_function_is_a_reward_model() -> None:
    resolved = load(helpful={"model_args": {"model_name_or_path": "some/model"}})
    assert resolved.config.rewards["helpful"].reward_fn == "reward_model"
    assert list_served_rewards(resolved.config) == ["helpful"]
    assert resolved.derived.strategies["rewards.helpful"] == "native"


def test_reward_pretrain_is_the_model_of_rewards_that_name_none() -> None:
    rewards = {"a": {"reward_fn": "reward_model"}, "llm_judge": {"reward_args": {"judge_model_type": "inference"}}}
    resolved = load_config({"reward_pretrain": "some/model", "rewards": rewards})
    assert {one.model_args.model_name_or_path for one in resolved.config.rewards.values()} == {"some/model"}
    assert "which model" in only_problem({"rewards": {"a": {"reward_fn": "reward_model"}}})


def test_a_judge_is_served_here_only_if_it_has_a_model() -> None:
    server = {"reward_fn": "judge", "reward_args": {"base_url": "http://localhost:1/v1", "model": "m"}}
    judge = {"reward_fn": "judge", "model_args": {"model_name_or_path": "m"}, "device_mapping": [1]}
    api = {"reward_args": {"judge_model_type": "api", "judge_api_url": "http://localhost:1/v1"}}
    resolved = load(server=server, judge=judge, llm_judge=api)
    assert list_served_rewards(resolved.config) == ["judge"]
    assert resolved.derived.devices["rewards.judge"] == (1,)


def test_what_serves_a_judge_is_chosen_and_substitutes_are_named() -> None:
    def judge(name: str, **options: Any) -> Any:
        strategy = {"strategy_name": name, "strategy_config": options}
        return {"reward_fn": "judge", "model_args": {"model_name_or_path": "m"}, "strategy_args": strategy}

    assert load(a=judge("vllm", launch=True)).derived.strategies["rewards.a"] == "vllm"
    resolved = load(a=judge("sglang"))
    assert resolved.derived.strategies["rewards.a"] == "native"
    assert any("sglang is not used for rewards; native is used instead" in note for note in resolved.notes)
    assert "unknown strategy" in only_problem({"rewards": {"a": judge("vlm")}})
    assert "base_url" in only_problem({"rewards": {"a": judge("vllm", url=["http://localhost:1"])}})


def test_a_model_of_a_reward_that_has_none_is_noted_once_for_all() -> None:
    rule = {"model_args": {"model_name_or_path": "m"}}
    notes = load(math=rule, exact={**rule, "device_mapping": [0]}).notes
    assert (
        "rewards.math.model_args, rewards.exact.model_args: change nothing here; these rewards have no model" in notes
    )
    assert "rewards.exact.device_mapping: changes nothing here; these rewards run on the host" in notes
