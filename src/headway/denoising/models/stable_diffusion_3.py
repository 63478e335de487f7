"""Stable Diffusion 3 and 3.5 of `diffusers` as a `Denoiser`: transformer, scheduler, text encoders, VAE of a pipeline.

Only the transformer is trained and sent to engines: it alone is a submodule, so parameters, `state_dict` and LoRA
through `peft` see nothing else. Text encoders and VAE are frozen and follow it to its device, in the precision they
were loaded in; on a GPU the text encoders, which are larger than the rest together, are bfloat16.

Guarantees: one Euler step on `make_timesteps` is one step of the pipeline with its `FlowMatchEulerDiscreteScheduler`.
Prompts are encoded and pictures decoded as the pipeline does. A noise level s is its timestep 1000·s. Nothing is
downloaded.

Legend: B samples, C channels, H and W of the latent.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headway.denoising.models.denoiser import CONFIG_FILE, WEIGHTS_FILE, Conditioning, read_checkpoint_config
from headway.errors import ConfigError
from headway.extras import import_optional
from headway.models.model_loading import hide_progress_bars

SD3_CHECKPOINT_TYPE = "headway-stable-diffusion-3"
"""`model_type` of a checkpoint, which holds the transformer's weights and the path of the rest of the pipeline."""
SD3_LORA_TARGETS = ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
"""Attention layers of both streams, which Flow-GRPO adapts."""
_PIPELINE = "StableDiffusion3Pipeline"
_PROMPT_TOKENS = 256


class StableDiffusion3(nn.Module):
    """Implements `Denoiser` with the parts of a `StableDiffusion3Pipeline`."""

    def __init__(
        self,
        pipeline: Any,
        *,
        height: int | None = None,
        width: int | None = None,
        prompt_tokens: int = _PROMPT_TOKENS,
        source: str = "",
    ) -> None:
        """Draw pictures of `height` × `width` pixels (default: the model's own size); `source` is its directory."""
        super().__init__()
        self.transformer: nn.Module = pipeline.transformer
        self._pipeline = pipeline
        default = pipeline.transformer.config.sample_size * pipeline.vae_scale_factor
        self.height, self.width = height or default, width or default
        self.prompt_tokens, self.source = prompt_tokens, source
        self._check_size()
        for module in self._frozen_modules():
            module.requires_grad_(False).eval()
        table = pipeline.transformer.pos_embed
        # The table is constant and up to a gigabyte large: keep it out of what is sent to engines.
        table.register_buffer("pos_embed", table.pos_embed, persistent=False)

    @property
    def latent_shape(self) -> tuple[int, int, int]:
        scale = self._pipeline.vae_scale_factor
        return self._pipeline.transformer.config.in_channels, self.height // scale, self.width // scale

    @torch.no_grad()
    def encode(self, prompts: Sequence[str]) -> Conditioning:
        text, _, pooled, _ = self._pipeline.encode_prompt(
            list(prompts),
            None,
            None,
            device=self._pipeline.text_encoder.device,
            do_classifier_free_guidance=False,
            max_sequence_length=self.prompt_tokens,
        )
        return Conditioning({"text": text, "pooled": pooled})

    def forward(self, x: Tensor, s: Tensor, conditioning: Conditioning) -> Tensor:
        weights = next(self.transformer.parameters()).dtype
        velocity: Tensor = self.transformer(
            hidden_states=x.to(weights),
            timestep=s * self._pipeline.scheduler.config.num_train_timesteps,
            encoder_hidden_states=conditioning["text"].to(weights),
            pooled_projections=conditioning["pooled"].to(weights),
            return_dict=False,
        )[0]
        return velocity

    @torch.no_grad()
    def decode(self, x: Tensor) -> Tensor:
        vae = self._pipeline.vae
        latents = x / vae.config.scaling_factor + (vae.config.shift_factor or 0.0)
        pictures: Tensor = vae.decode(latents.to(vae.dtype), return_dict=False)[0]
        return (pictures.float() / 2 + 0.5).clamp(0, 1)

    def make_timesteps(self, steps: int) -> Tensor:
        """Return the noise levels of the pipeline's scheduler, with its shift and its last step."""
        scheduler = type(self._pipeline.scheduler).from_config(self._pipeline.scheduler.config)
        scheduler.set_timesteps(steps, **self._dynamic_shift(scheduler.config))
        levels: Tensor = scheduler.sigmas
        return levels

    def enable_gradient_checkpointing(self) -> None:
        """Compute the activations of each block again for its gradient instead of storing them."""
        self._pipeline.transformer.enable_gradient_checkpointing()

    def save_config(self, directory: Path) -> None:
        """Write what `load_sd3` needs besides the weights of a checkpoint."""
        shape = {"model_type": SD3_CHECKPOINT_TYPE, "base": self.source, "height": self.height, "width": self.width}
        shape["prompt_tokens"] = self.prompt_tokens
        (directory / CONFIG_FILE).write_text(json.dumps(shape, indent=2) + "\n", encoding="utf-8")

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> StableDiffusion3:
        """Move or convert the transformer; the frozen modules follow it to its device only."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        device = next(self.transformer.parameters()).device
        for module in self._frozen_modules():
            module.to(device)
            if device.type == "cuda" and module is not self._pipeline.vae:
                module.to(torch.bfloat16)
        return self

    def _frozen_modules(self) -> list[nn.Module]:
        p = self._pipeline
        return [one for one in (p.text_encoder, p.text_encoder_2, p.text_encoder_3, p.vae) if one is not None]

    def _dynamic_shift(self, config: Any) -> dict[str, float]:
        """Return the shift for schedulers that shift by the size of the picture."""
        if not config.get("use_dynamic_shifting"):
            return {}
        from diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3 import calculate_shift

        _, height, width = self.latent_shape
        patch = self._pipeline.transformer.config.patch_size
        sizes = (config.base_image_seq_len, config.max_image_seq_len, config.base_shift, config.max_shift)
        return {"mu": calculate_shift(height // patch * (width // patch), *sizes)}

    def _check_size(self) -> None:
        unit = self._pipeline.vae_scale_factor * self._pipeline.transformer.config.patch_size
        for name in ("height", "width"):
            if getattr(self, name) % unit:
                raise ConfigError(f"must be a multiple of {unit} pixels", key=name, value=getattr(self, name))


def load_sd3(
    directory: Path | str,
    *,
    height: int | None = None,
    width: int | None = None,
    prompt_tokens: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> StableDiffusion3:
    """Load the directory of a `StableDiffusion3Pipeline`, or a checkpoint that was trained from one."""
    saved = read_checkpoint_config(Path(directory))
    if saved.get("model_type") != SD3_CHECKPOINT_TYPE:
        saved = {}
    base = saved.get("base", str(directory))
    model = StableDiffusion3(
        _load_pipeline(base, dtype),
        height=height or saved.get("height"),
        width=width or saved.get("width"),
        prompt_tokens=prompt_tokens or saved.get("prompt_tokens", _PROMPT_TOKENS),
        source=base,
    )
    if saved:
        from safetensors.torch import load_file

        model.load_state_dict(load_file(Path(directory) / WEIGHTS_FILE))
    return model


def is_sd3(directory: Path) -> bool:
    """Return whether `load_sd3` can load the directory."""
    if read_checkpoint_config(directory).get("model_type") == SD3_CHECKPOINT_TYPE:
        return True
    try:
        index = json.loads((directory / "model_index.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return bool(index.get("_class_name") == _PIPELINE)


def _load_pipeline(directory: str, dtype: torch.dtype) -> Any:
    problem = "Stable Diffusion needs diffusers"
    diffusers = import_optional("diffusers", extra="images", key="pretrain", value=directory, problem=problem)
    if not (Path(directory) / "model_index.json").is_file():
        raise ConfigError(
            f"is no directory of a {_PIPELINE}", key="pretrain", value=directory, hint="save_pretrained writes one"
        )
    with _hide_all_progress_bars():
        pipeline = diffusers.StableDiffusion3Pipeline.from_pretrained(directory, dtype=dtype, local_files_only=True)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@contextmanager
def _hide_all_progress_bars() -> Iterator[None]:
    """Hide the progress bars of both libraries inside the block."""
    from diffusers.utils import logging

    were_shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        with hide_progress_bars():
            yield
    finally:
        if were_shown:
            logging.enable_progress_bar()
