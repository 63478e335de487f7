"""A small multimodal diffusion transformer: it draws text from characters and trains on a CPU.

Two streams with separate weights, patches of the latent and characters of the prompt, meet in joint attention. Noise
level and prompt modulate every block through adaptive layer norms, whose gates start at 0, so that the model starts as
a velocity of 0. The architecture is that of Stable Diffusion 3 at one thousandth of its size; a larger `MmditConfig`
gives a model of hundreds of millions of parameters.

Guarantees: the same configuration and seed give the same weights; a row's velocity depends on that row alone. There is
no VAE: pixels in [−1, 1] are the latents.

Legend: B samples, C channels, H height, W width, L characters, P patches, T tokens of a stream, D width of the streams,
K heads, E width of a head; N rows, I inputs, O outputs of a linear layer.
"""

import json
import string
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import log
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from headway.algorithms.denoising import make_timesteps
from headway.denoising.models.denoiser import CONFIG_FILE, Conditioning, read_checkpoint_config
from headway.errors import ConfigError

DEFAULT_ALPHABET = string.digits + string.ascii_letters + string.punctuation + " "
"""Characters of prompts, unless a model has an alphabet of its own."""
NOISE_LEVEL_FREQUENCIES = 64
"""Number of sines and of cosines that encode a noise level."""
SMALL_MMDIT_TYPE = "headway-small-mmdit"
"""`model_type` in `config.json`; it tells such a directory from a language model's."""
_HIGHEST_FREQUENCY = 1000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MmditConfig:
    """The defaults have about one million parameters. Raises `ConfigError` if the numbers do not fit together."""

    height: int = 16
    width: int = 32
    channels: int = 1
    patch: int = 4
    """Side of the square of pixels that is one token. Half of it costs four times the tokens."""
    characters: int = 8
    """Length of the longest prompt."""
    alphabet: str = DEFAULT_ALPHABET
    dim: int = 96
    depth: int = 4
    heads: int = 4
    mlp_ratio: float = 3.0

    def __post_init__(self) -> None:
        for name in ("height", "width", "channels", "patch", "characters", "dim", "depth", "heads"):
            if getattr(self, name) < 1:
                raise ConfigError("must be at least 1", key=name, value=getattr(self, name))
        for name in ("height", "width"):
            if getattr(self, name) % self.patch:
                raise ConfigError(f"is no multiple of patch = {self.patch}", key=name, value=getattr(self, name))
        if self.channels not in (1, 3):
            raise ConfigError("must be 1 (grey) or 3 (red, green, blue)", key="channels", value=self.channels)
        if self.dim % self.heads:
            raise ConfigError(f"is no multiple of heads = {self.heads}", key="dim", value=self.dim)
        if len(set(self.alphabet)) != len(self.alphabet) or not self.alphabet:
            raise ConfigError("names a character twice or none at all", key="alphabet", value=self.alphabet)

    @property
    def patches(self) -> int:
        """Tokens of a picture."""
        return self.height // self.patch * (self.width // self.patch)

    def tokenize(self, prompt: str) -> list[int]:
        """Return one token per character, padded with 0 to `characters`; 1 stands for an unknown character."""
        if len(prompt) > self.characters:
            raise ConfigError(
                f"is longer than the {self.characters} characters of the model",
                key="prompt",
                value=prompt,
                hint="shorten it, or make a model with more `characters`",
            )
        known = [self.alphabet.find(letter) + 2 if letter in self.alphabet else 1 for letter in prompt]
        return known + [0] * (self.characters - len(known))

    def save(self, directory: Path) -> None:
        """Write `config.json`."""
        content = json.dumps({"model_type": SMALL_MMDIT_TYPE, **asdict(self)}, indent=2, ensure_ascii=False)
        (directory / CONFIG_FILE).write_text(content + "\n", encoding="utf-8")


def is_small_mmdit(directory: Path) -> bool:
    """Return whether the directory holds a `SmallMmdit`."""
    return read_checkpoint_config(directory).get("model_type") == SMALL_MMDIT_TYPE


def read_mmdit_config(directory: Path) -> MmditConfig:
    """Read the shape of a saved model. Raises `ConfigError`."""
    if not is_small_mmdit(directory):
        raise ConfigError(
            f"is no directory of a small MMDiT ({CONFIG_FILE} with model_type {SMALL_MMDIT_TYPE})",
            key="pretrain",
            value=str(directory),
        )
    content = read_checkpoint_config(directory)
    try:
        return MmditConfig(**{name: value for name, value in content.items() if name != "model_type"})
    except TypeError as error:
        problem = f"{CONFIG_FILE} was written for another version: {error}"
        raise ConfigError(problem, key="pretrain", value=str(directory)) from error


class SmallMmdit(nn.Module):
    """Implements `Denoiser`."""

    def __init__(self, config: MmditConfig | None = None, *, seed: int = 0) -> None:
        super().__init__()
        self.config = config = config or MmditConfig()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self._build(config)

    def _build(self, c: MmditConfig) -> None:
        """Create the layers. Attribute names are those of the tensors in checkpoints."""
        patch = c.channels * c.patch**2
        self.patches = FastCpuLinear(patch, c.dim)
        self.places = nn.Parameter(torch.randn(1, c.patches, c.dim) * 0.2)
        self.characters = nn.Embedding(len(c.alphabet) + 2, c.dim)
        self.orders = nn.Parameter(torch.randn(1, c.characters, c.dim) * 0.2)
        self.noise_level = nn.Sequential(
            FastCpuLinear(2 * NOISE_LEVEL_FREQUENCIES, c.dim), nn.SiLU(), FastCpuLinear(c.dim, c.dim)
        )
        self.prompt = nn.Sequential(FastCpuLinear(c.dim, c.dim), nn.SiLU(), FastCpuLinear(c.dim, c.dim))
        self.blocks = nn.ModuleList(
            JointAttentionBlock(c.dim, c.heads, c.mlp_ratio, last=index == c.depth - 1) for index in range(c.depth)
        )
        self.last_modulation = FastCpuLinear(c.dim, 2 * c.dim)
        self.velocity = FastCpuLinear(c.dim, patch)
        for gate in (self.last_modulation, self.velocity):
            nn.init.zeros_(gate.weight)
            nn.init.zeros_(gate.bias)
        nn.init.normal_(self.characters.weight, std=0.5)

    @property
    def latent_shape(self) -> tuple[int, int, int]:
        return self.config.channels, self.config.height, self.config.width

    def encode(self, prompts: Sequence[str]) -> Conditioning:
        """Encode one token per character. Raises `ConfigError` for prompts that are too long."""
        ids = [self.config.tokenize(prompt) for prompt in prompts]
        return Conditioning({"characters": torch.tensor(ids, dtype=torch.long, device=self.places.device)})

    def forward(self, x: Tensor, s: Tensor, conditioning: Conditioning) -> Tensor:
        dtype = self.places.dtype
        text_BLD = self.characters(conditioning["characters"]) + self.orders
        image_BPD = self.patches(self._split_patches(x.to(dtype))) + self.places
        condition_BD = F.silu(self.noise_level(_encode_noise_levels(s, dtype)) + self.prompt(text_BLD.mean(1)))
        for block in self.blocks:
            image_BPD, text_BLD = block(image_BPD, text_BLD, condition_BD)
        shift_BD, scale_BD = self.last_modulation(condition_BD).chunk(2, dim=-1)
        return self._join_patches(self.velocity(modulate(image_BPD, shift_BD, scale_BD)))

    def decode(self, x: Tensor) -> Tensor:
        pictures = ((x.detach().float() + 1) / 2).clamp(0, 1)
        return pictures.expand(-1, 3, -1, -1) if self.config.channels == 1 else pictures

    def make_timesteps(self, steps: int) -> Tensor:
        return make_timesteps(steps)

    def enable_gradient_checkpointing(self) -> None:
        """Do nothing: the activations of this model are small."""

    def save_config(self, directory: Path) -> None:
        self.config.save(directory)

    def _split_patches(self, x_BCHW: Tensor) -> Tensor:
        """Reshape [B, C, H, W] to [B, P, C·patch²]."""
        c = self.config
        patches = x_BCHW.reshape(-1, c.channels, c.height // c.patch, c.patch, c.width // c.patch, c.patch)
        return patches.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)

    def _join_patches(self, patches_BPE: Tensor) -> Tensor:
        """Reshape [B, P, C·patch²] back to [B, C, H, W]."""
        c = self.config
        patches = patches_BPE.reshape(-1, c.height // c.patch, c.width // c.patch, c.channels, c.patch, c.patch)
        return patches.permute(0, 3, 1, 4, 2, 5).reshape(-1, c.channels, c.height, c.width)


def _encode_noise_levels(s_B: Tensor, dtype: torch.dtype) -> Tensor:
    """Return sines and cosines of the noise level at frequencies from 1 to 1000, [B, 2·64]."""
    wide_B = s_B.to(torch.promote_types(dtype, torch.float32))
    steps = torch.arange(NOISE_LEVEL_FREQUENCIES, device=s_B.device, dtype=wide_B.dtype) / (NOISE_LEVEL_FREQUENCIES - 1)
    angle = wide_B[:, None] * torch.exp(log(_HIGHEST_FREQUENCY) * steps)[None]
    return torch.cat([angle.sin(), angle.cos()], dim=1).to(dtype)


def count_parameters(model: nn.Module) -> int:
    """Return the number of trained parameters."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def modulate(x_BTD: Tensor, shift_BD: Tensor, scale_BD: Tensor) -> Tensor:
    """Apply a layer norm without weights, then the scale and shift that noise level and prompt gave."""
    normal = F.layer_norm(x_BTD, x_BTD.shape[-1:])
    return torch.addcmul(shift_BD[:, None], normal, 1 + scale_BD[:, None])


class JointAttentionBlock(nn.Module):
    """One block: image and prompt, each with its own weights, attend to each other and to themselves at once."""

    def __init__(self, dim: int, heads: int, mlp_ratio: float, *, last: bool) -> None:
        super().__init__()
        self.image = MmditStream(dim, heads, mlp_ratio, ends=False)
        self.text = MmditStream(dim, heads, mlp_ratio, ends=last)

    def forward(self, image_BTD: Tensor, text_BTD: Tensor, condition_BD: Tensor) -> tuple[Tensor, Tensor]:
        *image_qkv, image_gates = self.image.project(image_BTD, condition_BD)
        *text_qkv, text_gates = self.text.project(text_BTD, condition_BD)
        q, k, v = (torch.cat(pair, dim=2) for pair in zip(image_qkv, text_qkv, strict=True))
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        patches = image_BTD.shape[1]
        image, text = attended[:, :patches], attended[:, patches:]
        return self.image.update(image_BTD, image, image_gates), self.text.update(text_BTD, text, text_gates)


class MmditStream(nn.Module):
    """The weights of one stream in one block. The prompt's stream ends in the last block, after its attention."""

    def __init__(self, dim: int, heads: int, mlp_ratio: float, *, ends: bool) -> None:
        super().__init__()
        self.heads, self.ends = heads, ends
        hidden = int(dim * mlp_ratio)
        self.modulation = FastCpuLinear(dim, (2 if ends else 6) * dim)
        nn.init.zeros_(self.modulation.weight)
        nn.init.zeros_(self.modulation.bias)
        self.qkv = FastCpuLinear(dim, 3 * dim)
        self.query_norm, self.key_norm = nn.RMSNorm(dim // heads), nn.RMSNorm(dim // heads)
        if not ends:
            self.out = FastCpuLinear(dim, dim)
            self.mlp = nn.Sequential(
                FastCpuLinear(dim, hidden), nn.GELU(approximate="tanh"), FastCpuLinear(hidden, dim)
            )

    def project(self, x_BTD: Tensor, condition_BD: Tensor) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, ...]]:
        """Return queries, keys and values [B, K, T, E], and the modulation that `update` needs."""
        shift, scale, *gates = self.modulation(condition_BD).chunk(2 if self.ends else 6, dim=-1)
        qkv = self.qkv(modulate(x_BTD, shift, scale)).unflatten(-1, (3, self.heads, -1))
        # Queries and keys are normalised in one call, in memory order: half the calls, and each of them faster.
        scale_2KE = torch.stack([self.query_norm.weight, self.key_norm.weight])[:, None]
        normal = F.rms_norm(qkv[:, :, :2], qkv.shape[-1:]) * scale_2KE
        q, k = normal.permute(2, 0, 3, 1, 4).unbind(0)
        return q, k, qkv[:, :, 2].transpose(1, 2), tuple(gates)

    def update(self, x_BTD: Tensor, attended_BTD: Tensor, gates: tuple[Tensor, ...]) -> Tensor:
        """Add the attention output and the MLP to the stream."""
        if self.ends:
            return x_BTD
        gate, mlp_shift, mlp_scale, mlp_gate = gates
        x_BTD = torch.addcmul(x_BTD, gate[:, None], self.out(attended_BTD))
        return torch.addcmul(x_BTD, mlp_gate[:, None], self.mlp(modulate(x_BTD, mlp_shift, mlp_scale)))


class FastCpuLinear(nn.Linear):
    """A `torch.nn.Linear`, also for `peft`, that avoids the overhead of oneDNN for small products on CPUs.

    Some CPUs spend more time on the transposed weights of a small product than on the product. Copied into memory
    order first, the same product is up to five times as fast. Results and gradients are those of `torch.nn.Linear` up
    to rounding; on GPUs and under autocast it is exactly that.
    """

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type != "cpu" or torch.is_autocast_enabled("cpu") or self.bias is None:
            return super().forward(x)
        rows_NI = x.reshape(-1, self.in_features)
        made: Tensor = _ContiguousProduct.apply(rows_NI, self.weight, self.bias)  # type: ignore[no-untyped-call]
        return made.view(*x.shape[:-1], self.out_features)


class _ContiguousProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor) -> Tensor:
        ctx.save_for_backward(x_NI, weight_OI)
        return torch.addmm(bias_O, x_NI, weight_OI.t().contiguous())

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_NO: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x_NI, weight_OI = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        return (
            grad_NO @ weight_OI if needs_x else None,
            grad_NO.t() @ x_NI if needs_weight else None,
            grad_NO.sum(0) if needs_bias else None,
        )
