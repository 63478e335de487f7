"""Rewards that are models: which model each of them has, and what serves it.

`reward_model` is a model with one number as its output. `judge` and `llm_judge` are models that answer a prompt; the
first is served here if `model_args` names a model, the second unless `judge_model_type` is `api`. All other rewards
have no model, and a note says so if they are given one.
"""

from collections.abc import Sequence

from headway.config.resolved_config import ConfigDraft
from headway.config.roles import RewardConfig
from headway.config.schema import Config
from headway.errors import ConfigError
from headway.registry import ENGINES, REWARDS

CLASSIFIER, JUDGES = "reward_model", ("judge", "llm_judge")


def get_reward_function(name: str, reward: RewardConfig) -> str:
    """Return the name or path of the function behind the reward called `name`."""
    return reward.reward_fn or name


def is_served_here(name: str, reward: RewardConfig) -> bool:
    """Return whether a model that this run serves computes the reward."""
    function, arguments = get_reward_function(name, reward), reward.reward_args
    if function == "judge":
        return reward.model_args.model_name_or_path is not None
    return function == CLASSIFIER or (function == "llm_judge" and arguments.get("judge_model_type") != "api")


def list_served_rewards(config: Config) -> list[str]:
    """Return the names of the rewards that have a model served here."""
    return [name for name, reward in config.rewards.items() if is_served_here(name, reward)]


def derive_reward_models(draft: ConfigDraft) -> dict[str, str]:
    """Fill in functions and models of rewards. Return the back end of each served model by `rewards.<name>`."""
    for name, reward in draft.config.rewards.items():
        has_model = reward.model_args.model_name_or_path is not None
        if reward.reward_fn is None and name not in REWARDS and has_model and draft.dialect is None:
            draft.derive(f"rewards.{name}.reward_fn", CLASSIFIER, "it has a model")
    chosen, served = {}, list_served_rewards(draft.config)
    for name in served:
        _derive_path(draft, name, draft.config.rewards[name])
        chosen[f"rewards.{name}"] = _choose_engine(draft, name, draft.config.rewards[name])
    _note_idle_keys(draft, [name for name in draft.config.rewards if name not in served])
    return chosen


def _derive_path(draft: ConfigDraft, name: str, reward: RewardConfig) -> None:
    key, default = f"rewards.{name}.model_args.model_name_or_path", draft.config.reward_pretrain
    if reward.model_args.model_name_or_path is not None:
        return
    if default is None:
        hint = "a directory or a name, here or as reward_pretrain"
        draft.refuse(key, f"which model is {get_reward_function(name, reward)}?", hint)
    else:
        draft.derive(key, default, "reward_pretrain")


def _choose_engine(draft: ConfigDraft, name: str, reward: RewardConfig) -> str:
    """Return `native` or `vllm`. A back end that is not used becomes a note, an unknown one a problem."""
    key, given = f"rewards.{name}.strategy_args.strategy_name", reward.strategy_args.strategy_name
    options = reward.strategy_args.strategy_config
    if given is not None and given not in ENGINES:
        draft.problems.append(ConfigError("unknown strategy", key=key, value=given, hint=ENGINES.hint(given)))
    elif options.url:
        problem, hint = "a server that runs is asked by its address", "reward_fn: judge with reward_args.base_url"
        draft.problems.append(
            ConfigError(problem, key=f"rewards.{name}.strategy_args.strategy_config.url", value=options.url, hint=hint)
        )
    elif given == "vllm" and (options.launch or options.in_process) and get_reward_function(name, reward) in JUDGES:
        return "vllm"
    elif given not in (None, "native", "hf_infer"):
        way = "used with launch: true in strategy_config, for judges" if given == "vllm" else "not used for rewards"
        draft.notes.append(f"{key}: {given} is {way}; native is used instead")
    return "native"


def _note_idle_keys(draft: ConfigDraft, idle: Sequence[str]) -> None:
    """Say that models were given to rewards without one. Files of ROLL name one everywhere, for its tokenizer."""
    rewards = draft.config.rewards
    models = [f"rewards.{name}.model_args" for name in idle if rewards[name].model_args.model_name_or_path is not None]
    devices = [f"rewards.{name}.device_mapping" for name in idle if rewards[name].device_mapping is not None]
    for keys, why in ((models, "these rewards have no model"), (devices, "these rewards run on the host")):
        if keys:
            draft.notes.append(f"{', '.join(keys)}: change{'s' if len(keys) == 1 else ''} nothing here; {why}")
