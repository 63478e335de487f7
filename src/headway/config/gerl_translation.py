"""Translates what GeRL adds to verl: Flow-GRPO on denoising models, its windows, and its rewards by name."""

from typing import Any

from headway.config.document import ConfigEntries
from headway.config.foreign_entries import ForeignEntries
from headway.errors import ConfigError

_ROLLOUT = "actor_rollout_ref.rollout"
_MINI_BATCH = "actor_rollout_ref.actor.ppo_mini_batch_size"
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
    given = ForeignEntries(entries, notes, problems)
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
    _note_source(given)
    _choose_defaults(given)
    return given.entries


def _note_source(given: ForeignEntries) -> None:
    """Say what the reward compares with, where it is not the text in quotation marks."""
    if (source := given.take("data.data_source")) not in (None, "ocr"):
        what = "the answer of a prompt is what stands in its quotation marks, else the prompt"
        given.notes.append(f"data.data_source: {source}: changes nothing here; {what}")


def _choose_defaults(given: ForeignEntries) -> None:
    """Set defaults of GeRL that depend on other keys."""
    batch = given.get("data.train_batch_size")
    if given.get(_MINI_BATCH) is None and (not isinstance(batch, int) or batch % 8 == 0):
        given.give_default(_MINI_BATCH, 8, "GeRL")
    if not given.has_below("rewards"):
        given.give_default("rewards.default.reward_fn", "ocr", "GeRL")
    if "stable-diffusion" in str(given.get("actor_rollout_ref.model.path")):
        for size in ("height", "width"):
            if given.get(f"{_ROLLOUT}.image_{size}") is None:
                given.give_default(f"denoising.{size}", 512, "GeRL")


def _translate_window(given: ForeignEntries) -> None:
    """Translate the steps that get noise: a window in a range of steps, or all of them."""
    size, span = given.get(f"{_ROLLOUT}.sde_window_size"), given.take(f"{_ROLLOUT}.sde_window_range")
    given.give("denoising.window", "random" if size else "full", f"{_ROLLOUT}.sde_window_size")
    if span is None or not size:
        return
    steps = given.get(f"{_ROLLOUT}.num_inference_steps") or 10
    if isinstance(span, list) and len(span) == 2 and isinstance(steps, int) and span[1] == steps:
        span = [span[0], steps - 1]
        given.notes.append(f"{_ROLLOUT}.sde_window_range: ends at {steps - 1}, because the last step has no noise")
    given.give("denoising.window_range", span, f"{_ROLLOUT}.sde_window_range")


def _translate_rewards(given: ForeignEntries) -> None:
    names = given.take("data.reward_fn")
    if names is None or given.has_below("rewards"):
        return
    names = names if isinstance(names, list) else [names]
    unknown = [str(name) for name in names if str(name) not in _REWARDS]
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
