"""A command line of verl means here what it means there."""

from pathlib import Path
from typing import Any

import pytest

from headway.algorithms.advantages import make_advantage_settings
from headway.cli import main
from headway.config import ConfigErrors, ResolvedConfig, load_config
from headway.trainers.local.settings import make_local_settings

PPO = ["-m", "verl.trainer.main_ppo", "data.train_files=train.parquet", "actor_rollout_ref.model.path=model"]
GRPO = [*PPO, "algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=4"]
FULLY_ASYNC = ["-m", "verl.experimental.fully_async_policy.fully_async_main", *GRPO[2:]]
GERL = ["-m", "gerl.trainer.main_flowgrpo", "algorithm.adv_estimator=flow_grpo", "data.train_files=train.txt"]
GERL += ["actor_rollout_ref.rollout.name=diffusers", "actor_rollout_ref.model.path=model", "data.train_batch_size=8"]


def get(resolved: ResolvedConfig, key: str) -> tuple[Any, str]:
    return next((value, origin) for name, value, origin in resolved.rows() if name == key)


DEFAULTS = [
    ("dual_clip_loss", True),
    ("dual_clip_c", 3.0),
    ("lambd", 1.0),
    ("value_clip", 0.5),
    ("init_kl_coef", 0.001),
    ("adv_estimator", "gae"),
    ("filter_zero_variance", False),
    ("actor_train.training_args.weight_decay", 0.01),
    ("critic.training_args.learning_rate", 1e-5),
    ("validation.generating_args.temperature", 0.0),
    ("actor_train.data_args.too_long", "error"),
    ("rollout_batch_size", 1024),
    ("eval_steps", 0),
]


@pytest.mark.parametrize(("key", "value"), DEFAULTS)
def test_a_value_that_is_not_given_is_the_default_of_verl(key: str, value: object) -> None:
    found, origin = get(load_config(None, PPO), key)
    assert found == value
    assert origin in ("default of verl", "default")
    assert (origin == "default") == (key == "dual_clip_c")


def test_single_keys_of_verl_beside_a_file_of_our_own_bring_no_defaults_of_verl() -> None:
    resolved = load_config({"pretrain": "model"}, ["trainer.n_gpus_per_node=2"])
    assert not any(origin == "default of verl" for _, _, origin in resolved.rows())


def test_an_optimizer_step_has_256_prompts_unless_said_otherwise() -> None:
    assert load_config(None, GRPO).derived.optimizer_steps == 4


def test_one_step_off_gives_rollout_devices_of_its_own() -> None:
    words = ["-m", "verl.experimental.one_step_off_policy.main_ppo", *GRPO[2:], "trainer.n_gpus_per_node=6"]
    words += ["rollout.nnodes=1", "rollout.n_gpus_per_node=2", "actor_rollout_ref.hybrid_engine=False"]
    derived = load_config(None, [*words, "data.train_batch_size=1152"]).derived
    assert derived.async_generation_ratio == 1
    assert derived.devices["actor_train"] == (0, 1, 2, 3, 4, 5)
    assert derived.devices["actor_infer"] == (6, 7)
    assert not derived.hybrid_engine
    assert (derived.num_nodes, derived.num_gpus_per_node) == (1, 8)


def test_the_fully_asynchronous_trainer_syncs_weights_after_several_steps() -> None:
    words = [*FULLY_ASYNC, "data.train_batch_size=0", "actor_rollout_ref.actor.ppo_mini_batch_size=32"]
    words += ["trainer.n_gpus_per_node=4", "rollout.n_gpus_per_node=4", "rollout.total_rollout_steps=51200"]
    words += ["async_training.staleness_threshold=0.5", "async_training.require_batches=4", "rollout.test_freq=10"]
    resolved = load_config(None, [*words, "async_training.trigger_parameter_sync_step=4"])
    config = resolved.config
    assert config.rollout_batch_size == 128
    assert config.updates_per_sync == 4
    assert config.async_generation_ratio == 5  # (1 + 0.5) · 4 batches under way, one of which is trained
    assert config.max_steps == 400
    assert config.eval_steps == 40
    assert resolved.derived.optimizer_steps == 4


def test_the_penalty_of_dapo_for_long_answers_is_a_reward_of_every_task() -> None:
    buffer = "+reward_model.reward_kwargs.overlong_buffer_cfg"
    words = [f"{buffer}.enable=True", f"{buffer}.len=64", f"{buffer}.penalty_factor=0.5"]
    rewards = load_config(None, [*GRPO, *words, "data.max_response_length=256"]).config.rewards
    assert rewards["overlong"].tag_included == ("*",)
    assert rewards["overlong"].reward_args == {"buffer": 64, "penalty": 0.5, "longest": 256}
    assert rewards["default"].reward_fn == "data_source"


def test_a_weight_on_recomputed_probabilities_is_decoupled_ppo() -> None:
    base = "algorithm.rollout_correction"
    words = [f"{base}.rollout_is=token", f"{base}.rollout_is_threshold=2.0"]
    words += [f"{base}.rollout_rs=seq_mean_k1", f"{base}.rollout_rs_threshold=0.99_1.001"]
    config = load_config(None, [*GRPO, *words]).config
    assert (config.pg_variant, config.decoupled_weight_cap) == ("decoupled_ppo", 2.0)
    (mask,) = config.train_infer_correction.filters
    assert mask.agg_type == "geometric"
    assert (mask.ratio_low, mask.ratio_high) == pytest.approx((1 / 1.001, 1 / 0.99)), "theirs is engine over trainer"


CORRECTION = "algorithm.rollout_correction"


def test_masks_of_verl_by_distance_are_ours() -> None:
    words = [f"{CORRECTION}.rollout_rs='token_k1,seq_max_k2,seq_mean_k3'"]
    words += [f"{CORRECTION}.rollout_rs_threshold='0.5_2.0,2.5,0.1'"]
    filters = load_config(None, [*GRPO, *words]).config.train_infer_correction.filters
    assert [(one.agg_type, one.measure, one.ratio_high) for one in filters] == [
        ("token", "ratio", 2.0),
        ("largest", "k2", 2.5),
        ("geometric", "k3", 0.1),
    ]


@pytest.mark.parametrize(
    ("words", "variant", "weight"),
    [
        (["rollout_is=sequence"], "decoupled_ppo", "sequence"),
        (["rollout_is=token", "bypass_mode=true"], "ppo", None),
        (["rollout_is=token", "bypass_mode=true", "loss_type=reinforce"], "tis", None),
        (["bypass_mode=true", "loss_type=reinforce"], "vanilla", None),
    ],
)
def test_a_weight_counts_once_in_every_mode_of_the_correction(
    words: list[str], variant: str, weight: str | None
) -> None:
    resolved = load_config(None, [*GRPO, *(f"{CORRECTION}.{word}" for word in words)])
    config = resolved.config
    assert config.pg_variant == variant
    assert not config.train_infer_correction.is_weight.enabled
    assert weight is None or config.decoupled_weight_type == weight
    if variant == "tis":
        assert config.tis_upper_bound == 2.0
    if variant == "ppo":
        assert any("rollout_is: changes nothing with bypass_mode" in note for note in resolved.notes)


@pytest.mark.parametrize(
    ("words", "variant"), [([], "decoupled_ppo"), (["bypass_mode=true", "loss_type=reinforce"], "vanilla")]
)
def test_a_weight_that_is_divided_by_its_mean_stands_around_the_loss(words: list[str], variant: str) -> None:
    words = ["rollout_is=token", "rollout_is_threshold=3", "rollout_is_batch_normalize=true", *words]
    resolved = load_config(None, [*GRPO, *(f"{CORRECTION}.{word}" for word in words)])
    config, weight = resolved.config, resolved.config.train_infer_correction.is_weight
    assert (config.pg_variant, config.decoupled_weight_type == "none") == (variant, variant == "decoupled_ppo")
    assert (weight.enabled, weight.weight_type, weight.upper_bound, weight.batch_normalize) == (
        True,
        "token",
        3.0,
        True,
    )
    assert not [note for note in resolved.notes if "twice" in note or "batch_normalize" in note]


def test_loggers_choose_trackers_and_what_is_not_installed_has_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.config.verl_translation.find_spec", lambda name: None if name == "wandb" else name)
    words = ["trainer.logger=['console','wandb','tensorboard','file','clearml']", "trainer.project_name=sums"]
    resolved = load_config(None, [*GRPO, *words])
    assert (resolved.config.track_with, resolved.config.track_project) == (("tensorboard", "jsonl"), "sums")
    lines = [note for note in resolved.notes if "trainer.logger" in note]
    assert ["wandb is not installed" in lines[0], "clearml changes nothing" in lines[1], len(lines)] == [True, True, 2]
    console = load_config(None, [*GRPO, "trainer.logger=console"])
    assert console.config.track_with == ("tensorboard",) and not [note for note in console.notes if "logger" in note]
    assert load_config(None, [*GRPO, *words, "track_with=[jsonl]"]).config.track_with == ("jsonl",)


def test_codapo_is_read_with_a_line_about_its_second_batch() -> None:
    words = ["adv_estimator=codapo", "codapo_top_k=4", "codapo_weight_offset=0.2", "codapo_accuracy_key=right"]
    resolved = load_config(None, [*GRPO, *(f"algorithm.{word}" for word in words)])
    made = make_advantage_settings(resolved)
    assert (made.adv_estimator, made.codapo_weight_offset, made.accuracy_key) == ("codapo", 0.2, "right")
    assert made.norm_std_type == "group"
    assert len([note for note in resolved.notes if "codapo_top_k" in note and "is not drawn" in note]) == 1


def test_the_newer_trainer_says_how_far_rollout_runs_ahead() -> None:
    words = ["trainer.v1.trainer_mode=separate_async", "trainer.v1.separate_async.num_warmup_batches=2"]
    words += ["actor_rollout_ref.rollout.nnodes=1", "actor_rollout_ref.rollout.n_gpus_per_node=4"]
    words += [
        "trainer.n_gpus_per_node=4",
        "data.train_batch_size=128",
        "actor_rollout_ref.actor.ppo_mini_batch_size=32",
    ]
    resolved = load_config(None, [*GRPO, *words])
    assert (resolved.derived.async_generation_ratio, resolved.derived.optimizer_steps) == (2, 4)
    assert resolved.derived.devices["actor_infer"] == (4, 5, 6, 7)
    streamed = [word.replace("separate_async", "fully_async") for word in words]
    streamed += ["trainer.v1.fully_async.parameter_sync_step=4", "trainer.v1.fully_async.staleness_threshold=1"]
    config = load_config(None, [*GRPO, *streamed]).config
    assert (config.updates_per_sync, config.async_generation_ratio, config.rollout_batch_size) == (4, 7, 32)


def test_parts_of_rewards_have_their_weights() -> None:
    words = ["algorithm.adv_estimator=gdpo", 'algorithm.gdpo_reward_keys=["right","short"]']
    assert load_config(None, [*GRPO, *words]).config.gdpo_parts == {"right": 1.0, "short": 1.0}
    weighted = load_config(None, [*GRPO, *words, "algorithm.gdpo_reward_weights=[1.0,0.5]"])
    assert weighted.config.gdpo_parts == {"right": 1.0, "short": 0.5}


def test_groups_of_one_are_not_centred() -> None:
    for name in ("grpo", "rloo", "reinforce_plus_plus_baseline"):
        alone = load_config(None, [*PPO, f"algorithm.adv_estimator={name}"])
        assert alone.config.adv_estimator == "grpo"
        assert (alone.derived.norm_mean_type, alone.derived.norm_std_type) == ("none", "none")


@pytest.mark.parametrize(
    ("word", "key", "value"),
    [
        ("trainer.experiment_name=grpo/a", "output_dir", "./output/grpo-a"),
        ("actor_rollout_ref.model.lora_rank=0", "actor_train.model_args.lora_rank", None),
        ("data.truncation=left", "actor_train.data_args.too_long", "truncate"),
        ("data.filter_overlong_prompts=True", "actor_train.data_args.too_long", "drop"),
        ("data.val_max_samples=32", "val_batch_size", 32),
        ("data.train_max_samples=1000", "actor_train.data_args.max_rows", 1000),
        ("data.train_max_samples=-1", "actor_train.data_args.max_rows", None),
        ("actor_rollout_ref.actor.kl_loss_type=k3+", "kl_loss_type", "k3+"),
        ("actor_rollout_ref.actor.kl_loss_type=low_var_kl+", "kl_loss_type", "k3+"),
        ("actor_rollout_ref.actor.kl_loss_type=mse+", "kl_loss_type", "k2"),
        ("algorithm.kl_penalty=low_var_kl+", "kl_penalty", "k3"),
        ("actor_rollout_ref.actor.loss_scale_factor=8192", "loss_norm_length", 8192),
        ("actor_rollout_ref.actor.policy_loss.loss_mode=kl_cov", "pg_variant", "kl_cov"),
        ("actor_rollout_ref.actor.policy_loss.ppo_kl_coef=1.0", "kl_cov_coef", 1.0),
        ("actor_rollout_ref.actor.tis_imp_ratio_cap=3", "decoupled_weight_cap", 3),
        ("actor_rollout_ref.actor.router_replay.mode=R3", "routing_replay", True),
        ("actor_rollout_ref.actor.strategy=veomni", "actor_train.strategy_args.strategy_name", "fsdp2_train"),
        ("actor_rollout_ref.actor.optim.min_lr_ratio=0.1", "actor_train.training_args.min_lr_ratio", 0.1),
        ("critic.optim.warmup_style=cosine", "critic.training_args.lr_scheduler_type", "cosine"),
        ("algorithm.adv_estimator=tir_optimal_token_baseline", "adv_estimator", "optimal_token_baseline"),
        ("actor_rollout_ref.rollout.agent.default_agent_loop=partial_single_turn_agent", "pg_clip", 0.2),
        ("data.val_batch_size=32", "val_batch_size", None),
    ],
)
def test_a_key_of_verl_has_its_meaning(word: str, key: str, value: object) -> None:
    assert get(load_config(None, [*GRPO, word]), key)[0] == value


def test_a_share_of_warm_up_is_counted_in_the_steps_of_the_run() -> None:
    words = ["actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.1", "trainer.total_training_steps=200"]
    assert make_local_settings(load_config(None, [*GRPO, *words])).optimizer.warmup_steps == 20


@pytest.mark.parametrize(
    ("word", "feature"),
    [
        ("data.image_key=images", "vision"),
        ("actor_rollout_ref.model.path=Qwen/Qwen2.5-VL-7B-Instruct", "vision-language"),
        ("actor_rollout_ref.rollout.agent.default_agent_loop=my_agent", "env_type: module:Class"),
        ("actor_rollout_ref.rollout.multi_turn.tool_config_path=image_zoom_in_tool_config.yaml", "pictures"),
        ("algorithm.adv_estimator=gdpo", "gdpo_reward_keys"),
        ("actor_rollout_ref.rollout.multi_turn.function_tool_path=tools.py", "module:function"),
        ("trainer.v1.trainer_mode=streamed", "separate_async"),
        ("algorithm.kl_ctrl.type=adaptive", "target"),
        ("actor_rollout_ref.actor.policy_loss.loss_mode=dro", "gspo"),
        ("actor_rollout_ref.actor.optim.optimizer=Muon", "AdamW"),
        ("actor_rollout_ref.actor.fsdp_config.qat.enable=True", "QAT"),
        ("reward.reward_manager.source=importlib", "reward manager of your own"),
        ("reward_model.reward_manager=mine", "reward manager of your own"),
        ("actor_rollout_ref.rollout.name=vllm_omni", "pictures"),
    ],
)
def test_what_is_not_offered_is_named_in_one_line(word: str, feature: str) -> None:
    with pytest.raises(ConfigErrors) as raised:
        load_config(None, [*GRPO, word])
    (line,) = str(raised.value).splitlines()
    assert feature in line


def test_a_reward_model_of_verl_scores_every_task() -> None:
    words = [
        "reward_model.enable=True",
        "reward_model.model.path=some/model",
        "reward_model.micro_batch_size_per_gpu=32",
    ]
    resolved = load_config(None, [*GRPO, *words])
    reward = resolved.config.rewards["default"]
    assert (reward.reward_fn, reward.model_args.model_name_or_path) == ("reward_model", "some/model")
    assert resolved.derived.strategies["rewards.default"] == "native"
    with pytest.raises(ConfigErrors, match="a function that asks verl's own reward model"):
        load_config(None, [*GRPO, *words, "custom_reward_function.path=mine.py"])


def test_another_trainer_is_named_in_one_line() -> None:
    with pytest.raises(ConfigErrors, match="PRIME"):
        load_config(None, ["-m", "recipe.prime.main_prime", *GRPO[2:]])
    with pytest.raises(ConfigErrors, match="supervised fine-tuning, which Headway does not offer"):
        load_config(None, ["-m", "verl.trainer.fsdp_sft_trainer", "data.train_files=x"])


def test_a_named_file_is_read_if_it_is_there(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("data: {train_batch_size: 64}\n", encoding="utf-8")
    words = [f"--config-path={tmp_path}", "--config-name=mine", *GRPO[2:], "~data.seed"]
    assert load_config(None, ["-m", "verl.trainer.main_ppo", *words]).config.rollout_batch_size == 64
    with pytest.raises(ConfigErrors, match="no such file"):
        load_config(None, ["--config-name=other", *GRPO])


def test_an_override_with_a_tilde_removes_what_was_given() -> None:
    assert load_config({"seed": 7}, ["~seed"]).config.seed == 42
    two = {"rewards": {"one": {"reward_fn": "exact"}, "other": {"reward_fn": "numeric"}}}
    for word in ("~rewards.other", "rewards.other=null"):
        assert list(load_config(two, [word]).config.rewards) == ["one"]


@pytest.mark.parametrize("dashes", [["--"], []])
def test_the_words_of_a_script_can_follow_a_command(dashes: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "check", *dashes, *GRPO]) == 0
    assert capsys.readouterr().out.startswith("ok: rlvr, α = 0")


def test_flow_grpo_of_gerl_is_a_run_of_images() -> None:
    words = ["actor_rollout_ref.rollout.sde_window_size=3", "actor_rollout_ref.rollout.sde_window_range=[0,5]"]
    words += ["actor_rollout_ref.rollout.sde_type=cps", 'data.reward_fn=["paddle-ocr"]', "data.data_source=ocr"]
    resolved = load_config(None, [*GERL, *words])
    denoising = resolved.config.denoising
    assert denoising is not None
    assert (denoising.window, denoising.window_size, denoising.sampler) == ("random", 3, "cps")
    assert resolved.config.rewards["default"].reward_fn == "ocr"
    assert get(resolved, "kl_loss_coef") == (0.04, "default of GeRL")
    assert get(resolved, "validation.generating_args.num_inference_steps")[0] == 40


def test_gerl_without_a_window_trains_every_step() -> None:
    denoising = load_config(None, GERL).config.denoising
    assert denoising is not None
    assert (denoising.window, denoising.sampler, denoising.noise_level) == ("full", "sde", 0.7)


def test_an_engine_that_is_not_here_is_replaced_and_a_note_says_so() -> None:
    resolved = load_config(None, [*GRPO, "actor_rollout_ref.rollout.name=trtllm"])
    assert resolved.config.actor_infer.strategy_args.strategy_name == "native"
    assert any("trtllm is not in this build, native is used instead" in note for note in resolved.notes)


TURNS = "actor_rollout_ref.rollout.multi_turn"


def test_a_rollout_with_tools_is_an_environment(tmp_path: Path) -> None:
    file = tmp_path / "tools.yaml"
    file.write_text(
        "tools:\n"
        "  - class_name: verl.tools.search_tool.SearchTool\n"
        "    config: {retrieval_service_url: 'http://h/retrieve', topk: 5, num_workers: 9}\n"
        "    tool_schema: {type: function, function: {name: search}}\n"
        "  - {class_name: recipe.retool.retool.CustomSandboxFusionTool, config: {default_timeout: 3}}\n"
    )
    words = [f"{TURNS}.enable=True", f"{TURNS}.tool_config_path={file}", f"{TURNS}.max_assistant_turns=3"]
    resolved = load_config(None, [*GRPO, *words, "actor_rollout_ref.rollout.n=4", "data.train_batch_size=8"])
    config = resolved.config
    assert resolved.derived.pipeline == "agentic"
    assert (config.rollout_batch_size, resolved.derived.groups_per_step, resolved.derived.group_size) == (32, 8, 4)
    assert config.custom_envs["tools"].env_type == "tools"
    options = config.custom_envs["tools"].env_config
    search, python = options["tools"]
    assert (search["name"], search["url"], search["most"]) == ("retrieval", "http://h/retrieve", 5)
    assert python == {"name": "python", "timeout_s": 3}
    assert (options["messages"], options["max_steps"], options["most_calls"], options["longest"]) == (
        "prompt",
        3,
        1,
        256,
    )
    assert config.rewards["default"].reward_fn == "data_source"


def test_servers_of_mcp_are_tools(tmp_path: Path) -> None:
    servers = tmp_path / "servers.json"
    servers.write_text('{"mcpServers": {"search": {"url": "http://h/mcp"}, "files": {"command": "x", "args": ["y"]}}}')
    file = tmp_path / "tools.yaml"
    file.write_text(
        "tools:\n  - class_name: verl.tools.mcp_search_tool.MCPSearchTool\n"
        f"    mcp: {{mcp_servers_config_path: {servers}, tool_selected_list: [find]}}\n"
    )
    options = load_config(None, [*GRPO, f"{TURNS}.tool_config_path={file}"]).config.custom_envs["tools"].env_config
    assert options["tools"] == [
        {"name": "mcp", "url": "http://h/mcp", "only": ["find"]},
        {"name": "mcp", "command": "x", "args": ["y"], "only": ["find"]},
    ]
    servers.write_text('{"mcpServers": {"search": {"url": "http://h/mcp", "auth_token": "t"}}}')
    with pytest.raises(ConfigErrors, match="an MCP server with a token"):
        load_config(None, [*GRPO, f"{TURNS}.tool_config_path={file}"])


def test_tools_of_files_that_come_with_verl_are_known_without_them() -> None:
    words = ["--config-name=gsm8k_multiturn_grpo", f"{TURNS}.tool_config_path=/x/gsm8k_tool_config.yaml"]
    resolved = load_config(None, [*GRPO, *words])
    options = resolved.config.custom_envs["tools"].env_config
    assert options["tools"][0]["name"] == "check_answer"
    assert options["max_steps"] == 5
    assert any("gsm8k_tool_config.yaml is not here" in note for note in resolved.notes)


def test_a_class_of_a_user_is_a_tool_and_one_of_verl_without_a_counterpart_is_named(tmp_path: Path) -> None:
    file = tmp_path / "tools.yaml"
    file.write_text(
        "tools:\n  - {class_name: mine.WeatherTool, config: {type: native}, tool_schema: {type: function}}\n"
    )
    words = [f"{TURNS}.tool_config_path={file}", f"{TURNS}.tool_response_truncate_side=left"]
    resolved = load_config(None, [*GRPO, *words])
    options = resolved.config.custom_envs["tools"].env_config
    tool = {"class_name": "mine.WeatherTool", "config": {"type": "native"}, "tool_schema": {"type": "function"}}
    assert options["tools"] == [{"name": "verl_class", **tool}]
    assert options["cut_side"] == "left"
    assert any("mine.WeatherTool runs as it is" in note for note in resolved.notes)
    file.write_text("tools:\n  - {class_name: verl.tools.weather.WeatherTool}\n")
    with pytest.raises(ConfigErrors, match=r"WeatherTool of verl has no counterpart"):
        load_config(None, [*GRPO, words[0]])
    with pytest.raises(ConfigErrors, match="left, middle or right"):
        load_config(None, [*GRPO, f"{TURNS}.enable=True", f"{TURNS}.tool_response_truncate_side=top"])
    with pytest.raises(ConfigErrors, match="no such file"):
        load_config(None, [*GRPO, f"{TURNS}.tool_config_path=/x/weather.yaml"])


def test_words_that_choose_files_of_verl_and_keys_like_known_ones_are_noted() -> None:
    words = ["actor@actor_rollout_ref.actor=megatron_actor", "actor_rollout_ref.rollout.seed=1"]
    words += ["actor_rollout_ref.actor.optim.betas=[0.9,0.95]", "--config-name=fully_async_dapo_trainer.yaml"]
    resolved = load_config(None, [*GRPO, *words])
    assert any("actor@actor_rollout_ref.actor=megatron_actor: changes nothing" in note for note in resolved.notes)
    assert any("actor_rollout_ref.rollout.seed: changes nothing" in note for note in resolved.notes)
    assert resolved.config.actor_train.training_args.adam_beta2 == 0.95
    with pytest.raises(ConfigErrors, match="did you mean"):
        load_config(None, [*GRPO, "actor_rollout_ref.rollout.temprature=1"])


def test_an_estimator_that_is_a_list_is_refused_in_words() -> None:
    with pytest.raises(ConfigErrors, match="adv_estimator"):
        load_config(None, [*GRPO[2:], "algorithm.adv_estimator=[grpo]"])
