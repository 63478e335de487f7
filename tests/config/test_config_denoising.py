"""The `denoising` block: what follows from it, and what cannot run with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headway.config import load_config

from .factory import only_problem, problems_of

RUN: dict[str, Any] = {"denoising": {}, "rollout_batch_size": 4, "num_return_sequences_in_group": 4}


def test_an_image_has_as_many_actions_as_steps_and_the_published_defaults() -> None:
    resolved = load_config({**RUN, "actor_infer": {"generating_args": {"num_inference_steps": 12}}})
    derived, config = resolved.derived, resolved.config
    assert derived.pipeline == "denoising"
    assert derived.response_length == derived.max_new_tokens == 12
    assert (derived.pg_clip_low, derived.norm_mean_type, derived.norm_std_type) == (1e-4, "group", "batch")
    assert config.advantage_clip == 5.0 and config.validation.generating_args.temperature == 0.0
    assert load_config(resolved.changed()).config == config


def test_what_is_said_wins_over_what_is_published() -> None:
    resolved = load_config(
        {**RUN, "pg_clip": 1e-3, "norm_std_type": "group", "validation.generating_args.temperature": 1.0}
    )
    assert resolved.derived.pg_clip_low == 1e-3 and resolved.derived.norm_std_type == "group"
    assert resolved.config.validation.generating_args.temperature == 1.0


def test_validation_may_take_more_steps() -> None:
    resolved = load_config({**RUN, "validation": {"generating_args": {"num_inference_steps": 40}}})
    assert resolved.derived.response_length == 40 and resolved.derived.max_new_tokens == 10
    assert resolved.config.validation.generating_args.max_new_tokens == 40


@pytest.mark.parametrize(
    ("keys", "alpha", "hybrid"),
    [
        ({}, 0.0, True),
        ({"hybrid_engine": False, "rollout.mode": "async"}, 1.0, False),
        ({"hybrid_engine": False, "rollout.mode": "async", "async_strategy": "one-step-off"}, 1.0, False),
    ],
)
def test_the_strategies_of_the_seed_document(keys: dict[str, Any], alpha: float, hybrid: bool) -> None:
    dotted = {f"actor_rollout_ref.{key}": value for key, value in keys.items()}
    resolved = load_config({"actor_rollout_ref.rollout.sde_window_size": 3, "data.train_batch_size": 8, **dotted})
    assert (resolved.derived.pipeline, resolved.derived.async_generation_ratio, resolved.derived.hybrid_engine) == (
        "denoising",
        alpha,
        hybrid,
    )
    assert resolved.config.denoising is not None and resolved.config.denoising.window_size == 3
    assert resolved.config.with_reward


def test_the_block_may_have_the_name_that_it_had_before() -> None:
    old = load_config({**{key: value for key, value in RUN.items() if key != "denoising"}, "flow": {"window_size": 3}})
    new = load_config({**RUN, "denoising": {"window_size": 3}})
    assert (old.config, old.derived) == (new.config, new.derived)
    (note,) = set(old.notes) - set(new.notes)
    assert note == "flow: is called denoising now; the old name is still read"
    assert load_config(old.changed()).notes == new.notes
    assert load_config({"flow": {}}).derived.pipeline == "denoising"


def test_without_log_probabilities_any_staleness_is_allowed() -> None:
    nft = {**RUN, "denoising": {"algorithm": "diffusion_nft"}, "pg_variant": "vanilla", "async_generation_ratio": 2}
    assert load_config(nft).derived.bound == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"denoising.window_size": 10}, "denoising.window_size = 10: > 10 denoising steps − 1"),
        ({"denoising.noise_level": 0}, "denoising.noise_level = 0.0: is the ODE"),
        ({"denoising.noise_level": 1.5}, "denoising.noise_level = 1.5: must lie in [0, 1] for cps"),
        ({"denoising.sampler": "euler"}, "denoising.sampler"),
        ({"denoising.windw": "full"}, "did you mean denoising.window?"),
        ({"adv_estimator": "gae"}, "adv_estimator = 'gae': is for language"),
        ({"add_token_level_kl": True}, "add_token_level_kl"),
        ({"entropy_loss_coef": 0.1}, "entropy_loss_coef"),
        ({"actor_infer.generating_args.max_new_tokens": 7}, "but an image has 10 denoising steps"),
        ({"actor_infer.generating_args.temperature": 0, "validation.generating_args.temperature": 0}, "draws no noise"),
    ],
)
def test_what_cannot_run_is_refused(change: dict[str, Any], message: str) -> None:
    assert message in only_problem({**RUN, **change})


def test_environments_have_no_images_to_make() -> None:
    found = problems_of({**RUN, "train_env_manager": {"group_size": 4}})
    assert any("images are made in one turn" in str(problem) for problem in found)


def test_a_simulated_image_has_as_many_steps_as_a_real_one() -> None:
    lengths = load_config(RUN).config.simulation.response_tokens
    assert (lengths.kind, lengths.mean) == ("fixed", 10.0)
    assert load_config({**RUN, "simulation.response_tokens.mean": 7}).config.simulation.response_tokens.mean == 7.0


@pytest.mark.parametrize(
    ("file", "text"),
    [("model_index.json", "{}"), ("config.json", '{"model_type": "headway-small-mmdit"}')],
)
def test_a_directory_with_a_flow_model_makes_the_run_generative(tmp_path: Path, file: str, text: str) -> None:
    (tmp_path / file).write_text(text)
    resolved = load_config({"pretrain": str(tmp_path)})
    assert resolved.derived.pipeline == "denoising" and resolved.provenance["denoising.window"] == "default"
    assert load_config(resolved.changed()).config == resolved.config
    (tmp_path / file).write_text('{"model_type": "llama"}')
    if file == "config.json":
        assert load_config({"pretrain": str(tmp_path)}).derived.pipeline == "rlvr"
