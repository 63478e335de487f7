"""Translates keys of verl about rewards: functions, reward models, penalties, and servers that run programs.

Newer versions of verl have these keys below `reward`, older ones at the top or below `reward_model`. Where no function
is given, the reward `data_source` judges as verl does by itself.
"""

from collections.abc import Mapping
from typing import Any

from headway.config.foreign_entries import ForeignEntries

REWARD_MODELS = ("reward_model", "reward.reward_model")
_FUNCTION = "custom_reward_function"
_SANDBOXES = ("reward.sandbox_fusion", "reward_model.sandbox_fusion", "sandbox_fusion")
_MANAGERS = (
    "naive",
    "dapo",
    "batch",
    "prime",
    "gdpo",
    "limited",
    "rate_limited",
    "remote",
    "visual",
    "diffusion",
    "diffusion-batch",
)
"""Reward managers of verl that call a function, or the judge of a row's source, for every answer."""
_SANDBOX_OPTIONS = {"url": "sandbox_url", "max_concurrent": "concurrency", "memory_limit_mb": "memory_mb"}


def translate_verl_rewards(given: ForeignEntries) -> None:
    """Replace keys about rewards by ours."""
    _translate_function(given)
    _translate_overlong_penalty(given)
    _translate_reward_model(given)
    _choose_reward(given)


def find_own_manager(values: Mapping[str, Any]) -> tuple[str, Any] | None:
    """Return the key and the value that name a reward manager which does not come with verl."""
    for key in ("reward.reward_manager.source", "reward_model.reward_loop_source"):
        if values.get(key) == "importlib":
            return key, "importlib"
    for key in ("reward.reward_manager.name", "reward_model.reward_manager"):
        if values.get(key) not in (None, *_MANAGERS):
            return key, values[key]
    return None


def _translate_function(given: ForeignEntries) -> None:
    """Give older names to the keys of a function, and pass its arguments on."""
    for path in [path for path in given.entries if path[:2] == ("reward", _FUNCTION)]:
        given.entries.setdefault(path[1:], given.entries.pop(path))
    arguments = ((_FUNCTION, "reward_kwargs"), ("reward", "compute_score_kwargs"))
    for path in [path for path in given.entries if path[:2] in arguments]:
        value = given.entries.pop(path).value
        if len(path) > 2:
            given.give(".".join(("rewards", "default", "reward_args", *path[2:])), value, ".".join(path))


def _translate_overlong_penalty(given: ForeignEntries) -> None:
    """Translate the penalty of DAPO for answers that come near the longest length."""
    base = "reward.reward_kwargs" if given.has_below("reward.reward_kwargs") else "reward_model.reward_kwargs"
    buffer = f"{base}.overlong_buffer_cfg"
    enabled, size = given.take(f"{buffer}.enable"), given.take(f"{buffer}.len")
    factor, longest = given.take(f"{buffer}.penalty_factor"), given.take(f"{base}.max_resp_len")
    given.take(f"{buffer}.log")
    if enabled is not True or not size:
        return
    longest = longest or given.get("data.max_response_length")
    arguments = {"buffer": size, "penalty": 1.0 if factor is None else factor, "longest": longest}
    given.give("rewards.overlong.reward_fn", "overlong", buffer)
    given.give("rewards.overlong.tag_included", ["*"], buffer)
    for name, value in arguments.items():
        given.give(f"rewards.overlong.reward_args.{name}", value, buffer)


def _translate_reward_model(given: ForeignEntries) -> None:
    """Translate a learned reward model: its output is the reward of every task, as in verl."""
    for root in REWARD_MODELS:
        enabled, path = given.take(f"{root}.enable"), given.take(f"{root}.model.path")
        path = given.take(f"{root}.model_path") or path
        if enabled is not True:
            continue
        given.give("rewards.default.reward_fn", "reward_model", f"{root}.enable")
        if path is not None:
            given.give("rewards.default.model_args.model_name_or_path", path, f"{root}.model.path")


def _choose_reward(given: ForeignEntries) -> None:
    """Give the reward that asks a row's `data_source`, where no function is given, and the server of its programs."""
    judges = {path[1] for path in given.entries if path[0] == "rewards" and len(path) > 1} - {"overlong"}
    base, names = "rewards.default.reward_args", dict[str, object]()
    for root in _SANDBOXES:
        for option, ours in _SANDBOX_OPTIONS.items():
            if (value := given.take(f"{root}.{option}")) is not None:
                names.setdefault(ours, value)
    is_denoising = given.get("actor_rollout_ref.rollout.name") == "diffusers"
    if given.get(f"{_FUNCTION}.path") or judges or is_denoising or not given.get("data.train_files"):
        if "sandbox_url" in names:
            given.notes.append(
                "sandbox_fusion.url: changes nothing here; the reward that is given runs no programs there"
            )
        return
    given.give_default("rewards.default.reward_fn", "data_source", "verl")
    for name, value in names.items() if "sandbox_url" in names else ():
        given.give(f"{base}.{name}", value, "sandbox_fusion")
    where = names.get("sandbox_url", "the sandbox of this machine")
    given.notes.append(
        f"{_FUNCTION}: none is given, so data_source of each row chooses its judge, as in verl; programs run in "
        f"{where}, and answers of sources that verl does not know are compared by value"
    )
