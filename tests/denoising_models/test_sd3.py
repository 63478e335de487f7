"""Stable Diffusion 3 and 3.5 against `diffusers` itself, with tiny random pipelines."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from headway.algorithms.denoising import CpsSampler, add_noise, apply_guidance, euler_step, logp, solve_ode
from headway.denoising.models.denoiser_storage import open_denoiser
from headway.denoising.models.stable_diffusion_3 import SD3_LORA_TARGETS, StableDiffusion3, is_sd3, load_sd3
from headway.errors import ConfigError
from tests.denoising_models.factory import noise, tiny_pipeline, tiny_sd3

pytest.importorskip("diffusers")


@pytest.mark.parametrize("dual", [False, True], ids=["3.0", "3.5"])
def test_one_denoising_step_is_that_of_the_pipeline(dual: bool) -> None:
    """Transformer, guidance and scheduler as the pipeline runs them: one step to s = 0, from its own noise level."""
    pipeline = tiny_pipeline(dual=dual)
    pipeline.set_progress_bar_config(disable=True)
    model = StableDiffusion3(pipeline, prompt_tokens=10)
    x = noise(2, *model.latent_shape)
    theirs = pipeline(
        ["a cat", "42"],
        latents=x.clone(),
        num_inference_steps=1,
        guidance_scale=4.5,
        max_sequence_length=10,
        output_type="latent",
    ).images
    grid = model.make_timesteps(1)
    s, s_next = grid[0].expand(2), grid[1].expand(2)
    with torch.no_grad():
        v = apply_guidance(model(x, s, model.encode(["a cat", "42"])), model(x, s, model.encode(["", ""])), 4.5)
    torch.testing.assert_close(euler_step(x, v, s, s_next), theirs, rtol=1e-5, atol=1e-5)


def test_a_whole_path_and_its_picture_are_those_of_the_pipeline() -> None:
    pipeline = tiny_pipeline()
    pipeline.set_progress_bar_config(disable=True)
    model = StableDiffusion3(pipeline, prompt_tokens=10)
    x, told = noise(2, *model.latent_shape), model.encode(["a cat", "42"])
    options = {"num_inference_steps": 4, "guidance_scale": 1.0, "max_sequence_length": 10}
    theirs = pipeline(["a cat", "42"], latents=x.clone(), output_type="pt", **options).images
    ours = model.decode(solve_ode(lambda x, s: model(x, s, told), x, model.make_timesteps(4)))
    torch.testing.assert_close(ours, theirs.float(), rtol=1e-4, atol=1e-4)


def test_samples_at_different_noise_levels_share_a_batch() -> None:
    pipeline = tiny_pipeline()
    model = StableDiffusion3(pipeline, prompt_tokens=10)
    scheduler, x, told = pipeline.scheduler, noise(3, *model.latent_shape), model.encode(["a", "b", "c"])
    scheduler.set_timesteps(3)
    grid = model.make_timesteps(3)
    with torch.no_grad():
        ours = euler_step(x, model(x, grid[:3], told), grid[:3], grid[1:])
        for row, t in enumerate(scheduler.timesteps):
            one = slice(row, row + 1)
            v = pipeline.transformer(
                hidden_states=x[one],
                timestep=t[None],
                encoder_hidden_states=told["text"][one],
                pooled_projections=told["pooled"][one],
            ).sample
            torch.testing.assert_close(ours[one], scheduler.step(v, t, x[one]).prev_sample, rtol=1e-4, atol=1e-5)


def test_noising_is_the_forward_process_of_the_scheduler() -> None:
    pipeline = tiny_pipeline()
    model = StableDiffusion3(pipeline)
    pipeline.scheduler.set_timesteps(3)
    x0, e = noise(3, *model.latent_shape), noise(3, *model.latent_shape, seed=1)
    theirs = pipeline.scheduler.scale_noise(x0, pipeline.scheduler.timesteps, e)
    torch.testing.assert_close(add_noise(x0, e, model.make_timesteps(3)[:3]), theirs)


def test_one_training_step_has_the_gradients_of_a_plain_computation() -> None:
    """−A·log π of a drawn CPS step, through the adapter, and written out with the transformer alone."""
    pipeline = tiny_pipeline()
    model = StableDiffusion3(pipeline, prompt_tokens=10)
    x, x_next = noise(2, *model.latent_shape), noise(2, *model.latent_shape, seed=1)
    told, grid, advantage = model.encode(["a cat", "42"]), model.make_timesteps(4), torch.tensor([1.5, -0.5])
    s, s_next = grid[1:3], grid[2:4]
    (-advantage * logp(x_next, *CpsSampler(0.8).step(x, model(x, s, told), s, s_next))).sum().backward()
    ours = {name: p.grad.clone() for name, p in model.transformer.named_parameters() if p.grad is not None}
    model.zero_grad()

    v = pipeline.transformer(
        hidden_states=x, timestep=1000 * s, encoder_hidden_states=told["text"], pooled_projections=told["pooled"]
    ).sample
    a, b = s.reshape(2, 1, 1, 1), s_next.reshape(2, 1, 1, 1)
    std = b * torch.sin(torch.tensor(0.4 * torch.pi))
    mean = (1 - b) * (x - a * v) + (b**2 - std**2).sqrt() * (x + (1 - a) * v)
    density = torch.distributions.Normal(mean, std).log_prob(x_next).mean((1, 2, 3))
    (-advantage * density).sum().backward()
    theirs = {name: p.grad for name, p in pipeline.transformer.named_parameters() if p.grad is not None}
    assert ours.keys() == theirs.keys() and len(ours) > 20
    for name, gradient in theirs.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-3, atol=1e-6)


def test_checkpointing_changes_no_gradient() -> None:
    gradients = []
    for checkpointed in (False, True):
        model = tiny_sd3()
        if checkpointed:
            model.enable_gradient_checkpointing()
        x, s = noise(2, *model.latent_shape), torch.tensor([0.9, 0.3])
        model(x, s, model.encode(["a", "b"])).square().mean().backward()
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


def test_only_the_transformer_is_trained_and_sent() -> None:
    model = tiny_sd3()
    assert all(name.startswith("transformer.") for name in model.state_dict())
    assert not any(p.requires_grad for part in model._frozen_modules() for p in part.parameters())
    assert len(model._frozen_modules()) == 4


def test_frozen_parts_keep_their_precision_when_the_transformer_changes_its_own() -> None:
    model = tiny_sd3().to(torch.float64)
    assert next(model.parameters()).dtype == torch.float64
    assert all(p.dtype == torch.float32 for part in model._frozen_modules() for p in part.parameters())


def test_lora_through_peft_trains_adapters_in_the_attention_of_both_streams_only() -> None:
    peft = pytest.importorskip("peft")
    model = tiny_sd3()
    x, s, told = noise(2, *model.latent_shape), torch.tensor([0.9, 0.3]), model.encode(["a", "b"])
    with torch.no_grad():
        before = model(x, s, told)
    model.requires_grad_(False)
    config = peft.LoraConfig(r=2, lora_alpha=4, target_modules=list(SD3_LORA_TARGETS))
    peft.inject_adapter_in_model(config, model)
    torch.testing.assert_close(model(x, s, told), before)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    adapted = {name.split(".lora_")[0].split("attn")[-1].lstrip("2.") for name in trained}
    assert adapted == set(SD3_LORA_TARGETS)
    model(x, s, told).square().mean().backward()
    assert all(p.grad is not None for name, p in model.named_parameters() if ".lora_B." in name and name in trained)


def test_the_pictures_have_the_size_that_was_asked_for() -> None:
    model = tiny_sd3(height=24, width=8)
    assert model.latent_shape == (4, 12, 4)
    assert model.decode(noise(1, 4, 12, 4)).shape == (1, 3, 24, 8)
    with pytest.raises(ConfigError, match="height = 10: must be a multiple of 4 pixels"):
        tiny_sd3(height=10)


def test_without_the_third_text_encoder_its_part_of_the_prompt_is_zero() -> None:
    pipeline = tiny_pipeline()
    pipeline.text_encoder_3 = None
    told = StableDiffusion3(pipeline, prompt_tokens=10).encode(["a cat"])
    assert told["text"].shape == (1, 22, 24) and told["text"][:, 12:].abs().max() == 0


def test_pipelines_and_checkpoints_of_them_are_loaded_from_directories(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    base, trained = tmp_path / "base", tmp_path / "trained"
    tiny_pipeline().save_pretrained(base)
    model = load_sd3(base, height=16, width=24, prompt_tokens=10)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    trained.mkdir()
    model.save_config(trained)
    save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, trained / "model.safetensors")
    again = open_denoiser(trained)
    assert isinstance(again, StableDiffusion3) and is_sd3(base) and is_sd3(trained)
    assert (again.height, again.width, again.prompt_tokens) == (16, 24, 10)
    x, s = noise(1, *model.latent_shape), torch.tensor([0.5])
    with torch.no_grad():
        torch.testing.assert_close(again(x, s, again.encode(["a"])), model(x, s, model.encode(["a"])))


def test_a_directory_without_a_pipeline_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no directory of a StableDiffusion3Pipeline"):
        load_sd3(tmp_path)
