"""Flow models small enough for a test, with weights that say something: nothing is downloaded."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from headway.denoising.models.mmdit import MmditConfig, SmallMmdit
from headway.denoising.models.stable_diffusion_3 import StableDiffusion3

SMALL = MmditConfig(height=8, width=16, patch=4, characters=5, alphabet="0123456789", dim=16, depth=2, heads=2)
PROMPTS = ("42", "7", "31", "")


def small(config: MmditConfig = SMALL, *, seed: int = 0) -> SmallMmdit:
    """With weights as after some training: those that begin at 0 do not stay there."""
    return shaken(SmallMmdit(config, seed=seed), seed)


def shaken(model: Any, seed: int = 0) -> Any:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def tiny_sd3(seed: int = 0, **options: Any) -> StableDiffusion3:
    return StableDiffusion3(tiny_pipeline(seed), **{"prompt_tokens": 10, **options})


def tiny_pipeline(seed: int = 0, *, dual: bool = True) -> Any:
    """A whole `StableDiffusion3Pipeline` of random weights; with `dual` attention and norms it is a 3.5."""
    from diffusers import (
        AutoencoderKL,
        FlowMatchEulerDiscreteScheduler,
        SD3Transformer2DModel,
        StableDiffusion3Pipeline,
    )
    from transformers import T5Config, T5EncoderModel

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        transformer = SD3Transformer2DModel(
            sample_size=8,
            patch_size=2,
            in_channels=4,
            out_channels=4,
            num_layers=2,
            attention_head_dim=8,
            num_attention_heads=2,
            joint_attention_dim=24,
            caption_projection_dim=16,
            pooled_projection_dim=24,
            pos_embed_max_size=12,
            dual_attention_layers=(0,) if dual else (),
            qk_norm="rms_norm" if dual else None,
        )
        vae = AutoencoderKL(
            block_out_channels=(8, 8),
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
            layers_per_block=1,
            norm_num_groups=2,
            latent_channels=4,
            scaling_factor=1.5,
            shift_factor=0.06,
            use_quant_conv=False,
            use_post_quant_conv=False,
        )
        encoders = [_clip(12), _clip(12)]
        t5 = T5EncoderModel(
            T5Config(vocab_size=len(_tokenizer()), d_model=24, d_kv=8, d_ff=24, num_layers=1, num_heads=2)
        )
    return StableDiffusion3Pipeline(
        transformer=shaken(transformer, seed),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=vae.eval(),
        text_encoder=encoders[0],
        text_encoder_2=encoders[1],
        text_encoder_3=t5.eval(),
        tokenizer=_tokenizer(),
        tokenizer_2=_tokenizer(),
        tokenizer_3=_tokenizer(),
    )


def _clip(width: int) -> nn.Module:
    from transformers import CLIPTextConfig, CLIPTextModelWithProjection

    config = CLIPTextConfig(
        vocab_size=len(_tokenizer()),
        hidden_size=width,
        intermediate_size=width,
        num_hidden_layers=2,
        num_attention_heads=2,
        projection_dim=width,
        max_position_embeddings=16,
        eos_token_id=_tokenizer().eos_token_id,
    )
    model: nn.Module = CLIPTextModelWithProjection(config).eval()
    return model


@cache
def _tokenizer() -> Any:
    """Characters, begun and ended as CLIP's are."""
    from tokenizers.processors import TemplateProcessing

    from headway.models.tiny_model import BEGIN, END, make_character_tokenizer

    tokenizer = make_character_tokenizer()
    ends = [(token, tokenizer.convert_tokens_to_ids(token)) for token in (BEGIN, END)]
    tokenizer._tokenizer.post_processor = TemplateProcessing(single=f"{BEGIN} $A {END}", special_tokens=ends)
    tokenizer.model_max_length = 12
    return tokenizer
