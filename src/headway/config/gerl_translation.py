"""Translates what GeRL adds to verl: Flow-GRPO on denoising models, its windows, and its rewards by name."""

from typing import Any

from headway.config.document import ConfigEntries
from headway.config.verl_translation import VerlEntries
from headway.errors import ConfigError

_ROLLOUT = "actor_rollout_ref.rollout"
_LOSS = "actor_rollout_ref.actor.policy_loss.loss_mode"
_REWARDS: dict[str, dict[str, Any]] = {
    "paddle-ocr": {"reward_fn": "ocr"},
    "qwenvl-ocr-vllm": {"reward_fn": "vision_judge"},
    "unified-reward-vllm": {"reward_fn": "vision_judge"},
    "jpeg-compressibility": {"reward_fn": "compressibility"},
    "pickscore": {"reward_fn": "image_server"},
    "aesthetic": {"reward_fn": "image_server"},
    "clip": {"reward_fn": "image_server"},
}
"""Their scorers and our rewards of the same kind."""


def translate_gerl(entries: ConfigEntries, notes: list[str], problems: list[ConfigError]) -> ConfigEntries:
    """Return the entries with keys of GeRL replaced by ours."""
    given = VerlEntries(entries, notes, problems)
    given.give("denoising.algorithm", "flow_grpo", "GeRL's trainer")
    for key, ours in (
        ("algorithm.adv_estimator", "flow_grpo"),
        (_LOSS, "flow_grpo"),
        (f"{_ROLLOUT}.name", "diffusers"),
    ):
        if given.get(key) == ours:
            given.take(key)
    given.give("adv_estimator", "grpo", "GeRL's flow_grpo")
    _translate_window(given)
    _translate_rewards(given)
    source = given.take("data.data_source")
    if source is not None:
        given.notes.append(f"data.data_source: {source}: changes nothing here; the files say what they hold")
    return given.entries


def _translate_window(given: VerlEntries) -> None:
    """Translate the steps that get noise: a window in a range of steps, or all of them."""
    size, span = given.get(f"{_ROLLOUT}.sde_window_size"), given.take(f"{_ROLLOUT}.sde_window_range")
    given.give("denoising.window", "random" if size else "full", f"{_ROLLOUT}.sde_window_size")
    steps = given.get(f"{_ROLLOUT}.num_inference_steps") or 10
    if size and span is not None and isinstance(steps, int) and span != [0, steps // 2]:
        half = [0, steps // 2]
        given.notes.append(f"{_ROLLOUT}.sde_window_range: {span}: windows are drawn in the first half, {half}")


def _translate_rewards(given: VerlEntries) -> None:
    names = given.take("data.reward_fn")
    if names is None or given.has_below("rewards"):
        return
    names = names if isinstance(names, list) else [names]
    unknown = [str(name) for name in names if name not in _REWARDS]
    if unknown:
        problem = f"no reward is called {', '.join(unknown)}"
        given.problems.append(
            ConfigError(problem, key="data.reward_fn", value=names, hint=f"one of {', '.join(_REWARDS)}")
        )
        return
    for number, name in enumerate(names):
        domain = "default" if number == 0 else str(name)
        for key, value in _REWARDS[name].items():
            given.give(f"rewards.{domain}.{key}", value, "data.reward_fn")
        if number:
            given.give(f"rewards.{domain}.tag_included", ["*"], "data.reward_fn")
