"""Stable Diffusion 3 and 3.5 of `diffusers` as a `Denoiser`: transformer, scheduler, text encoders, VAE of a pipeline.

The transformer is what is trained and sent to engines: it alone is a submodule, so parameters, `state_dict` and LoRA
through `peft` see nothing else. Text encoders and VAE are frozen and follow it to its device, in the precision they
were loaded in; on a GPU the text encoders, which are larger than the rest together, are bfloat16.

Guarantees: one Euler step on `grid` is one step of the pipeline with its `FlowMatchEulerDiscreteScheduler`; prompts are
encoded and pictures decoded as the pipeline does. A noise level s is its timestep 1000·s. Never asks a network.

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

from headway.denoising.models.denoiser import Conditioning
from headway.errors import ConfigError
from headway.models.model_loading import hide_progress_bars

CONFIG, WEIGHTS = "config.json", "model.safetensors"
SD3_CHECKPOINT_TYPE = "headway-stable-diffusion-3"
"""`model_type` of a checkpoint: the transformer's weights, and where the rest of the pipeline is."""
SD3_LORA_TARGETS = ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
"""Attention of both streams: what Flow-GRPO adapts."""
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
        """Pictures of `height` × `width` pixels, by default the model's own; `source` is the directory it came from."""
        super().__init__()
        self.transformer: nn.Module = pipeline.transformer
        self._pipeline = pipeline
        native = pipeline.transformer.config.sample_size * pipeline.vae_scale_factor
        self.height, self.width = height or native, width or native
        self.prompt_tokens, self.source = prompt_tokens, source
        self._check()
        for part in self._frozen():
            part.requires_grad_(False).eval()
        table = pipeline.transformer.pos_embed
        table.register_buffer(
            "pos_embed", table.pos_embed, persistent=False
        )  # constant, and up to a gigabyte: not sent

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

    def grid(self, steps: int) -> Tensor:
        """The noise levels of the pipeline's scheduler, [steps + 1], from 1 to 0: its own shift, its own last step."""
        scheduler = type(self._pipeline.scheduler).from_config(self._pipeline.scheduler.config)
        scheduler.set_timesteps(steps, **self._dynamic_shift(scheduler.config))
        levels: Tensor = scheduler.sigmas
        return levels

    def enable_gradient_checkpointing(self) -> None:
        """Keep the activations of no block: they are computed again for its gradient."""
        self._pipeline.transformer.enable_gradient_checkpointing()

    def save_description(self, directory: Path) -> None:
        """What `load_sd3` needs beside the weights of a checkpoint."""
        shape = {"model_type": SD3_CHECKPOINT_TYPE, "base": self.source, "height": self.height, "width": self.width}
        shape["prompt_tokens"] = self.prompt_tokens
        (directory / CONFIG).write_text(json.dumps(shape, indent=2) + "\n", encoding="utf-8")

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> StableDiffusion3:
        """Move or convert the transformer; the frozen parts only go where it is."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        device = next(self.transformer.parameters()).device
        for part in self._frozen():
            part.to(device)
            if device.type == "cuda" and part is not self._pipeline.vae:
                part.to(torch.bfloat16)
        return self

    def _frozen(self) -> list[nn.Module]:
        p = self._pipeline
        return [part for part in (p.text_encoder, p.text_encoder_2, p.text_encoder_3, p.vae) if part is not None]

    def _dynamic_shift(self, config: Any) -> dict[str, float]:
        """Schedulers that shift by the size of the picture want to be told."""
        if not config.get("use_dynamic_shifting"):
            return {}
        from diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3 import calculate_shift

        _, height, width = self.latent_shape
        patch = self._pipeline.transformer.config.patch_size
        sizes = (config.base_image_seq_len, config.max_image_seq_len, config.base_shift, config.max_shift)
        return {"mu": calculate_shift(height // patch * (width // patch), *sizes)}

    def _check(self) -> None:
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
    """From the directory of a `StableDiffusion3Pipeline`, or of a checkpoint that was trained from one."""
    said = _described(Path(directory))
    base = said.get("base", str(directory))
    model = StableDiffusion3(
        _pipeline(base, dtype),
        height=height or said.get("height"),
        width=width or said.get("width"),
        prompt_tokens=prompt_tokens or said.get("prompt_tokens", _PROMPT_TOKENS),
        source=base,
    )
    if said:
        from safetensors.torch import load_file

        model.load_state_dict(load_file(Path(directory) / WEIGHTS))
    return model


def is_sd3(directory: Path) -> bool:
    """Whether `load_sd3` would take it."""
    if _described(directory):
        return True
    try:
        index = json.loads((directory / "model_index.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return bool(index.get("_class_name") == _PIPELINE)


def _described(directory: Path) -> dict[str, Any]:
    """What `save_description` wrote there; nothing where it did not."""
    try:
        said = json.loads((directory / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return said if isinstance(said, dict) and said.get("model_type") == SD3_CHECKPOINT_TYPE else {}


def _pipeline(directory: str, dtype: torch.dtype) -> Any:
    try:
        from diffusers import StableDiffusion3Pipeline
    except ImportError as error:
        hint = "pip install 'headway[images]'"
        raise ConfigError("Stable Diffusion needs diffusers", key="pretrain", value=directory, hint=hint) from error
    if not (Path(directory) / "model_index.json").is_file():
        raise ConfigError(
            f"is no directory of a {_PIPELINE}", key="pretrain", value=directory, hint="save_pretrained writes one"
        )
    with _without_bars():
        pipeline = StableDiffusion3Pipeline.from_pretrained(directory, dtype=dtype, local_files_only=True)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@contextmanager
def _without_bars() -> Iterator[None]:
    """Inside, neither library draws progress bars."""
    from diffusers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        with hide_progress_bars():
            yield
    finally:
        if shown:
            logging.enable_progress_bar()
