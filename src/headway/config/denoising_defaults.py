"""Defaults and checks of runs that train a denoising model.

A denoising step is an action, so lengths are counted in steps: a response has as many actions as an image has steps.
Published defaults of Flow-GRPO are filled in where the configuration says nothing: clip 1e-4, rewards scaled by the
batch, advantages within ±5.
"""

import json
from pathlib import Path

from headway.algorithm_traits import ADVANTAGE_TRAITS
from headway.config.config_blocks import DenoisingConfig
from headway.config.resolved_config import ConfigDraft, get_at_key

_STEPS = 10
_PROMPT = 256
"""Longest prompt in bytes."""
_TRAIN, _VALIDATION = "actor_infer.generating_args", "validation.generating_args"
_KINDS = ("headway-small-mmdit", "headway-stable-diffusion-3")
_USUAL = {"pg_clip": 1e-4, "norm_std_type": "batch", "advantage_clip": 5.0}


def derive_denoising(draft: ConfigDraft) -> None:
    """Derive lengths, validation and algorithm of a run that makes images."""
    if draft.config.denoising is None:
        if not is_denoising_model(draft.config.pretrain):
            return
        draft.derive("denoising", DenoisingConfig(), "pretrain is a denoising model")
    if draft.config.actor_infer.generating_args.num_inference_steps is None:
        draft.derive(f"{_TRAIN}.num_inference_steps", _STEPS, "denoising is given")
    steps = draft.config.actor_infer.generating_args.num_inference_steps or _STEPS
    if draft.config.validation.generating_args.num_inference_steps is None:
        draft.derive(f"{_VALIDATION}.num_inference_steps", steps, f"{_TRAIN}.num_inference_steps")
    held_out = draft.config.validation.generating_args.num_inference_steps or steps
    if draft.config.prompt_length is None:
        draft.derive("prompt_length", _PROMPT, "denoising is given")
    for key, value in (
        ("response_length", max(steps, held_out)),
        (f"{_TRAIN}.max_new_tokens", steps),
        (f"{_VALIDATION}.max_new_tokens", held_out),
    ):
        if not draft.given(key):
            draft.derive(key, value, "num_inference_steps")
        elif get_at_key(draft.config, key) != value:
            draft.refuse(key, f"but an image has {value} denoising steps", f"set {_TRAIN}.num_inference_steps instead")
    _derive_simulation(draft, steps)
    if not draft.given(f"{_VALIDATION}.temperature"):
        draft.derive(f"{_VALIDATION}.temperature", 0.0, "validation draws no noise")
    for key, usual in _USUAL.items():
        if not draft.given(key):
            draft.derive(key, usual, "denoising is given")


def _derive_simulation(draft: ConfigDraft, steps: int) -> None:
    """Give a simulated image as many steps as a real one has."""
    lengths = {"kind": "fixed", "mean": float(steps), "std": 0.0, "min": 1.0, "max": None}
    if not any(draft.given(f"simulation.response_tokens.{key}") for key in lengths):
        for key, value in lengths.items():
            draft.derive(f"simulation.response_tokens.{key}", value, "num_inference_steps")


def is_denoising_model(pretrain: str | None) -> bool:
    """Return whether a directory holds a denoising model: a pipeline of `diffusers`, or a model of ours."""
    if not pretrain:
        return False
    try:
        if (Path(pretrain) / "model_index.json").is_file():
            return True
        kind = json.loads((Path(pretrain) / "config.json").read_text(encoding="utf-8")).get("model_type")
    except (OSError, ValueError, AttributeError):
        return False
    return kind in _KINDS


def check_denoising(draft: ConfigDraft) -> None:
    """Refuse what cannot run together with `denoising`."""
    config, denoising = draft.config, draft.config.denoising
    if denoising is None:
        for role, args in (("actor_infer", config.actor_infer), ("validation", config.validation)):
            if args.generating_args.num_inference_steps is not None:
                draft.refuse(f"{role}.generating_args.num_inference_steps", "is read only where `denoising` is given")
        return
    steps = config.actor_infer.generating_args.num_inference_steps or _STEPS
    if denoising.algorithm == "flow_grpo":
        if steps < 2:
            draft.refuse(f"{_TRAIN}.num_inference_steps", "leaves no step to train: the last one has no noise", "≥ 2")
        elif denoising.window != "full" and denoising.window_size > steps - 1:
            draft.refuse("denoising.window_size", f"> {steps} denoising steps − 1", f"1 to {steps - 1}")
        elif denoising.window_range:
            _check_window_range(draft, denoising, steps)
        if config.actor_infer.generating_args.temperature == 0:
            draft.refuse(f"{_TRAIN}.temperature", "draws no noise, so there is nothing to train", "1")
        if denoising.noise_level == 0:
            draft.refuse("denoising.noise_level", "is the ODE, whose steps have no log-probability", "0.8 for cps")
    if denoising.sampler == "cps" and denoising.noise_level is not None and denoising.noise_level > 1:
        draft.refuse("denoising.noise_level", "must lie in [0, 1] for cps", "0.8 is usual")
    if config.train_env_manager is not None:
        draft.refuse("train_env_manager", "images are made in one turn, without an environment")
    if config.add_token_level_kl:
        draft.refuse("add_token_level_kl", "an image's reward has no parts to subtract it from", "use_kl_loss")
    estimator = ADVANTAGE_TRAITS.get(config.adv_estimator)
    reads_language = estimator.reads_turns or estimator.reads_accuracy or estimator.needs_gradient_norms
    if estimator.needs_critic or reads_language or estimator.needs_greedy_member:
        draft.refuse("adv_estimator", "is for language", "grpo")
    if config.mask_truncated_samples:
        draft.refuse("mask_truncated_samples", "an image always has all of its steps", "false")
    for key in ("difficulty_mask", "difficulty_loss_weight", "length_loss_weight"):
        if get_at_key(config, key):
            draft.refuse(key, "is for language", "false")
    if config.entropy_loss_coef:
        draft.refuse("entropy_loss_coef", "the noise of a step is given, its entropy cannot be raised", "0")


def _check_window_range(draft: ConfigDraft, denoising: DenoisingConfig, steps: int) -> None:
    """Refuse a range of steps that no window fits into, or that is never read."""
    span, key = denoising.window_range, "denoising.window_range"
    if denoising.window != "random":
        draft.refuse(key, f"is read with window: random, and window is {denoising.window}")
    elif len(span) != 2 or span[1] - span[0] < denoising.window_size or span[1] > steps - 1:
        problem = f"has no room for {denoising.window_size} of the {steps - 1} steps that may get noise"
        draft.refuse(key, problem, f"first and end, such as [0, {max(steps // 2, denoising.window_size)}]")
