"""Classes of ROLL become rewards and environments here, with the options that they read; the rest gets a line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headway.config import ResolvedConfig, load_config
from headway.config.resolved_config import get_at_key
from headway.settings import make_run_settings
from headway.types import Task
from tests.config.factory import only_problem

REWARDS = "roll.pipeline.rlvr.rewards"
MANAGERS = "roll.pipeline.agentic.env_manager"


def load_reward(worker: str, **options: Any) -> ResolvedConfig:
    reward = {"worker_cls": f"{REWARDS}.{worker}", **options}
    return load_config({"reward_pretrain": "a-judge", "rewards": {"mine": reward}})


@pytest.mark.parametrize(
    ("worker", "function"),
    [
        ("math_rule_reward_worker.MathRuleRewardWorker", "math_rule"),
        ("code_sandbox_reward_worker.CodeSandboxRewardWorker", "code_sandbox"),
        ("llm_judge_reward_worker.LLMJudgeRewardWorker", "llm_judge"),
        ("ifeval_rule_reward_worker.GeneralRuleRewardWorker", "ifeval"),
        ("general_val_rule_reward_worker.GeneralValRuleRewardWorker", "general_val"),
        ("crossthinkqa_rule_reward_worker.CrossThinkQARuleRewardWorker", "crossthinkqa"),
        ("multiple_choice_boxed_rule_reward_worker.MultipleChoiceBoxedRuleRewardWorker", "multiple_choice"),
        ("CrossThinkQARuleRewardWorker", "crossthinkqa"),
    ],
)
def test_a_reward_worker_is_a_reward_of_ours(worker: str, function: str) -> None:
    assert load_reward(worker).config.rewards["mine"].reward_fn == function


def test_options_go_to_the_reward_that_reads_them_and_the_others_get_a_line() -> None:
    options = {"reward_type": "soft", "response_length_penalty_coef": 0.1, "format_pattern": "x", "use_local": True}
    found = load_reward("CrossThinkQARuleRewardWorker", **options)
    assert found.config.rewards["mine"].reward_args == {"reward_type": "soft", "response_length_penalty_coef": 0.1}
    found = load_reward("GeneralRuleRewardWorker", **options, code_url="http://sandbox")
    assert found.config.rewards["mine"].reward_args == {"repetition_penalty": 0.5}
    notes = "\n".join(found.notes)
    for line in (
        "rewards.mine.reward_type: changes nothing here; ifeval does not read it",
        "rewards.mine.code_url: changes nothing here; programs run in the sandbox of this machine",
        "rewards.mine.format_pattern: changes nothing here; ROLL matches it",
    ):
        assert line in notes
    assert "use_local" not in notes


def test_a_worker_without_counterpart_is_refused_unless_a_function_takes_its_place() -> None:
    worker = {"worker_cls": "roll.mine.MyWorker"}
    assert "reward_fn: module:function of your own" in only_problem({"rewards": {"mine": worker}})
    found = load_config({"rewards": {"mine": {**worker, "reward_fn": "exact"}}})
    assert "rewards.mine.worker_cls: changes nothing here; reward_fn is given" in found.notes
    pictures = {"worker_cls": f"{REWARDS}.detection_reward_worker.DetectionRewardWorker"}
    assert "judges pictures or video, not offered here" in only_problem({"rewards": {"mine": pictures}})


def load_environment(manager: str = "traj_env_manager.TrajEnvManager", **custom: Any) -> ResolvedConfig:
    environment = {"env_type": "frozen_lake", "env_manager_cls": f"{MANAGERS}.{manager}", **custom}
    return load_config({"train_env_manager": {"tags": ["Lake"]}, "custom_envs": {"Lake": environment}})


def test_step_managers_train_turns() -> None:
    for manager in ("step_env_manager.StepEnvManager", "step_concat_env_manager.StepConcatEnvManager"):
        lake = load_environment(manager, history_length=5).config.custom_envs["Lake"]
        assert (lake.sample, lake.history, lake.history_length) == ("turn", False, 5)
    lake = load_environment().config.custom_envs["Lake"]
    assert (lake.sample, lake.history) == ("episode", True)
    notes = load_environment("mine.MyManager").notes
    assert any("env_manager_cls: MyManager: changes nothing here" in note for note in notes)


def test_the_penalty_of_an_environment_goes_before_that_of_its_manager() -> None:
    lake = load_environment(env_config={"format_penalty": -0.2, "size": 3}).config.custom_envs["Lake"]
    assert lake.format_penalty == -0.2 and dict(lake.env_config) == {"size": 3}


def test_templates_for_format_become_ours() -> None:
    lake = load_environment(agent_system_template="Play.", agent_template="{observation} \\boxed{{A}}")
    custom = lake.config.custom_envs["Lake"]
    assert custom.agent_template == "{observation} \\boxed{A}"
    assert custom.agent_system_template == "Play.\n\n{env_instruction}"
    custom = load_environment(agent_system_template="Play.", agent_template="{env_instruction} {observation}")
    assert custom.config.custom_envs["Lake"].agent_system_template == "Play."


def test_tools_reach_the_environment_as_one_option() -> None:
    wrapper = {
        "wrapper_args": {"tool_reward": 0, "max_tool_uses": 2},
        "tool_configs": [{"tool_id": "python_code", "tool_args": {"timeout": 5}}],
    }
    custom = load_environment(tool_wrapper=wrapper).config.custom_envs["Lake"]
    assert custom.env_config == {
        "tools": {"tool_reward": 0, "max_tool_uses": 2, "tool_configs": wrapper["tool_configs"]}
    }


def test_one_kind_of_sample_for_all_trained_tags() -> None:
    environments = {"a": {"env_type": "sokoban", "sample": "turn"}, "b": {"env_type": "sokoban"}}
    config = {"train_env_manager": {"tags": ["a", "b"]}, "custom_envs": environments}
    assert "one kind of sample for all tags" in only_problem(config)
    load_config({**config, "train_env_manager": {"tags": ["a"]}, "val_env_manager": {"tags": ["b"]}})


def test_group_filters_reject_by_mean_and_by_spread() -> None:
    rewards = {
        "math": {
            "query_filter_config": {"type": "mean_filter", "filter_args": {"threshold_up": 0.9, "threshold_down": 0.1}},
            "tag_included": ["aime"],
        },
        "code": {"query_filter_config": {"type": "std_filter", "filter_args": {"std_threshold": 0.2}}},
        "qa": {"query_filter_config": {"type": "no_filter"}},
    }
    mean, spread = make_run_settings(load_config({"rewards": rewards})).group_filters
    math, code = Task(position=0, domain="math", data={"tag": "aime"}), Task(position=0, domain="code", data={})
    assert mean.rejects(math, [1, 1, 1, 0.9]) and mean.rejects(math, [0.1, 0.1])
    assert not mean.rejects(math, [1, 0]) and not mean.rejects(math, [1]) and not mean.rejects(code, [1, 1])
    assert spread.rejects(code, [0.5, 0.6]) and not spread.rejects(code, [0, 1])
    problem = only_problem(
        {"rewards": {"math": {"query_filter_config": {"type": "std_filter", "filter_args": {"x": 1}}}}}
    )
    assert "std_filter does not read x" in problem and "expected std_threshold" in problem


def test_single_steps_have_their_own_rewards_as_in_roll() -> None:
    manager = "roll.pipeline.agentic.env_manager.step_env_manager.StepEnvManager"
    source = {
        "adv_estimator": "grpo",
        "render_save_dir": "x",
        "rollout_batch_size": 8,
        "train_env_manager": {"tags": ["Lake"], "group_size": 4, "num_env_groups": 2},
        "custom_envs": {"Lake": {"env_type": "frozen_lake", "env_manager_cls": manager}},
    }
    resolved = load_config(source)
    assert (resolved.config.adv_estimator, resolved.config.step_reward_gamma) == ("step_reinforce", 0.0)
    assert any("a step has its own reward" in note for note in resolved.notes)
    lake = {"env_type": "frozen_lake", "sample": "turn"}
    ours = {**source, "custom_envs": {"Lake": lake}}
    del ours["render_save_dir"]
    assert any("gives every turn the reward of its episode" in note for note in load_config(ours).notes)


def test_settings_of_deepspeed_that_come_with_roll_need_no_file(tmp_path: Path) -> None:
    chosen = "{strategy_name: deepspeed_train, strategy_config: '${deepspeed_zero3_cpuoffload}'}"
    listed = "[../config/deepspeed_zero@_here_, ../config/deepspeed_zero3_cpuoffload@_here_]"
    (tmp_path / "run.yaml").write_text(f"defaults: {listed}\nactor_train: {{strategy_args: {chosen}}}")
    resolved = load_config(tmp_path / "run.yaml")
    assert resolved.config.actor_train.training_args.offload_optimizer
    assert any("zero_optimization" in note and "changes nothing here" in note for note in resolved.notes)
    (tmp_path / "other.yaml").write_text("defaults: [traj_envs@_here_]")
    assert "no such file" in only_problem(tmp_path / "other.yaml")


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"track_with": "ml_tracker"}, "track_with: ml_tracker is no public tracker"),
        (
            {"validation": {"generating_args": {"do_sample": False, "temperature": 0.6}}},
            "validation.generating_args.do_sample: changes nothing here, as in ROLL; temperature 0 is greedy",
        ),
        (
            {
                "train_env_manager": {"tags": ["Lake"], "num_env_groups": 1},
                "custom_envs": {"Lake": {"env_type": "frozen_lake"}},
                "rollout_batch_size": 1,
            },
            "actor_train: says nothing of training; ROLL only plays such a file, which `headway eval` does",
        ),
    ],
)
def test_what_only_roll_has_gets_a_line(given: dict[str, Any], line: str) -> None:
    assert any(note.startswith(line) for note in load_config({"rpc_timeout": 1, **given}).notes)


def test_estimators_that_skip_observations_are_ours() -> None:
    names = {"skip_obs_gae": "gae", "agentic_reinforce": "reinforce"}
    for theirs, ours in names.items():
        assert load_config({"rpc_timeout": 1, "adv_estimator": theirs}).config.adv_estimator == ours
    assert "agentic_reinforce" in only_problem({"rpc_timeout": 1, "adv_estimator": "agentic_reinforce", "gamma": 0.9})


def test_names_with_dots_are_translated() -> None:
    worker = "roll.pipeline.rlvr.rewards.llm_judge_reward_worker.LLMJudgeRewardWorker"
    judge = {"worker_cls": worker, "judge_prompt": "p", "judge_model_type": "api"}
    reward = load_config({"rewards": {"judge.v1": judge}}).config.rewards["judge.v1"]
    assert reward.reward_fn == "llm_judge"
    assert reward.reward_args == {"judge_prompt": "p", "judge_model_type": "api"}


@pytest.mark.parametrize(
    ("given", "key", "value"),
    [
        ({"track_with": "stdout"}, "track_with", ()),
        ({"eval_steps": -1}, "eval_steps", 0),
        ({"use_policy_loss_type": "PG"}, "pg_variant", "vanilla"),
        ({"rl_loss_coef": 0.0, "positive_loss_coef": 0.5, "use_topr_neg_loss_coef": 1.0}, "topr_positive_weight", 0.5),
        ({"actor_train": {"model_args": {"lora_target": "all"}}}, "actor_train.model_args.lora_target", ()),
        (
            {"actor_train": {"training_args": {"lr_scheduler_type": "constant_with_warmup"}}},
            "actor_train.training_args.lr_scheduler_type",
            "constant",
        ),
    ],
)
def test_other_ways_of_roll_to_say_it_are_read(given: dict[str, Any], key: str, value: object) -> None:
    assert get_at_key(load_config({"rpc_timeout": 1, **given}).config, key) == value
