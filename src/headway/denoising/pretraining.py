"""Pretraining of the small base model: it learns to draw strings by flow matching, on a CPU in minutes.

Every batch has new pictures, drawn from the seed and the number of the step. So the model cannot memorise pictures, and
an interrupted run continues as if it had not stopped. The result is the moving average of the weights.

Four in ten letters in the pictures of `BASE_PRETRAINING` are not those of the caption, and some pictures are cluttered.
A model that has learned them perfectly is wrong as often as they are: only a reward helps, not more pretraining.

Legend: B pictures of a batch, C channels, H height, W width.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from math import cos, pi
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from headway.algorithms.denoising import add_noise, shift_noise_levels
from headway.data.generated_tasks import StringSet
from headway.denoising.models.denoiser_storage import save_small_mmdit
from headway.denoising.models.mmdit import MmditConfig, SmallMmdit
from headway.denoising.text_rendering import TextImageStyle, render_text
from headway.errors import ConfigError
from headway.seeding import make_rng

_STATE = "pretraining.safetensors"
_PROGRESS = "pretraining.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class PretrainingSettings:
    """The model, its training pictures, and the optimizer of a pretraining."""

    model: MmditConfig = field(default_factory=MmditConfig)
    strings: StringSet = field(default_factory=StringSet)
    style: TextImageStyle = field(default_factory=TextImageStyle)
    steps: int = 2000
    batch: int = 128
    learning_rate: float = 2e-3
    warmup: int = 100
    average: float = 0.998
    """Decay of the moving average of the weights."""
    without_prompt: float = 0.1
    """Share of pictures that are shown without their caption, for guidance."""
    shift: float = 3.0
    """Shift k of the noise levels, as in sampling."""
    seed: int = 0

    def __post_init__(self) -> None:
        shape = (self.model.height, self.model.width, self.model.channels)
        if shape != (self.style.height, self.style.width, 1):
            raise ConfigError(
                f"the model draws {shape}, the pictures are {(self.style.height, self.style.width, 1)}", key="model"
            )
        if self.model.characters < self.strings.longest:
            raise ConfigError("is shorter than the longest string", key="characters", value=self.model.characters)
        if self.steps < 1 or self.batch < 1:
            raise ConfigError("steps and batch are at least 1", key="steps", value=(self.steps, self.batch))

    def rate(self, step: int) -> float:
        """Return the learning rate of a step: a linear warm-up, then half a cosine."""
        warmup = min((step + 1) / max(self.warmup, 1), 1.0)
        return self.learning_rate * warmup * (0.5 + 0.5 * cos(pi * step / self.steps))

    def examples(self, step: int) -> tuple[list[str], Tensor]:
        """Return captions and pictures [B, 1, H, W] in −1 … 1 of one step."""
        rng = make_rng(self.seed, "pretraining", step)
        captions = [self.strings.draw_trained(rng) for _ in range(self.batch)]
        pictures = np.stack([render_text(caption, self.style, rng)[:, :, 0] for caption in captions])
        captions = ["" if rng.random() < self.without_prompt else caption for caption in captions]
        return captions, torch.from_numpy(pictures).float().div(127.5).sub(1).unsqueeze(1)


BASE_PRETRAINING = PretrainingSettings(
    model=MmditConfig(alphabet="0123456789", characters=4, dim=64, depth=3),
    style=TextImageStyle(wrong=0.4, strokes=0.15, jitter=0),
    steps=2000,
    batch=32,
    learning_rate=2e-3,
    warmup=50,
    average=0.995,
)
"""Settings that made the model that comes with Headway."""


class Pretrainer:
    """The model in training, with all state that is needed to continue later."""

    def __init__(self, settings: PretrainingSettings) -> None:
        self.settings = settings
        self.step = 0
        self.model = SmallMmdit(settings.model, seed=settings.seed)
        self.average = SmallMmdit(settings.model, seed=settings.seed).requires_grad_(False)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.99))

    def advance(self) -> float:
        """Run one step of flow matching and return its loss."""
        settings = self.settings
        captions, x0_BCHW = settings.examples(self.step)
        generator = torch.Generator().manual_seed(make_rng(settings.seed, "noise", self.step).randrange(0, 2**63))
        noise_BCHW = torch.randn(x0_BCHW.shape, generator=generator)
        s_B = shift_noise_levels(torch.rand(len(captions), generator=generator), settings.shift)
        v_BCHW = self.model(add_noise(x0_BCHW, noise_BCHW, s_B), s_B, self.model.encode(captions))
        loss = (v_BCHW - (noise_BCHW - x0_BCHW)).square().mean()
        for group in self.optimizer.param_groups:
            group["lr"] = settings.rate(self.step)
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self._update_average()
        self.step += 1
        return float(loss.detach())

    def save(self, directory: Path) -> None:
        """Save everything, so that `resume` continues bit for bit."""
        directory.mkdir(parents=True, exist_ok=True)
        tensors = {f"model.{name}": tensor for name, tensor in self.model.state_dict().items()}
        tensors |= {f"average.{name}": tensor for name, tensor in self.average.state_dict().items()}
        for number, state in self.optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{number}.{name}": torch.as_tensor(value) for name, value in state.items()}
        _replace(directory / _STATE, lambda path: save_file(tensors, path))
        progress = json.dumps({"step": self.step, "settings": repr(self.settings)})
        _replace(directory / _PROGRESS, lambda path: path.write_text(progress, encoding="utf-8"))

    def resume(self, directory: Path) -> bool:
        """Continue from the last `save` in that directory; return False if there is none."""
        if not (directory / _PROGRESS).is_file():
            return False
        progress = json.loads((directory / _PROGRESS).read_text(encoding="utf-8"))
        if progress["settings"] != repr(self.settings):
            raise ConfigError("holds a pretraining with other settings", key="output_dir", value=str(directory))
        tensors = load_file(directory / _STATE)
        for prefix, model in (("model.", self.model), ("average.", self.average)):
            model.load_state_dict({n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)})
        state: dict[int, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            if name.startswith("optimizer."):
                _, number, key = name.split(".")
                state.setdefault(int(number), {})[key] = tensor
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": state})
        self.step = progress["step"]
        return True

    @torch.no_grad()
    def _update_average(self) -> None:
        decay = min(self.settings.average, (1 + self.step) / (10 + self.step))
        torch._foreach_lerp_(list(self.average.parameters()), list(self.model.parameters()), 1 - decay)


def pretrain(
    settings: PretrainingSettings,
    directory: Path,
    *,
    save_every: int = 250,
    on_step: Callable[[int, float], None] = lambda step, loss: None,
) -> SmallMmdit:
    """Return the moving average after `settings.steps`, also saved in `directory`; continue an interrupted run."""
    trainer = Pretrainer(settings)
    trainer.resume(directory)
    while trainer.step < settings.steps:
        loss = trainer.advance()
        on_step(trainer.step, loss)
        if trainer.step % save_every == 0 or trainer.step == settings.steps:
            trainer.save(directory)
    save_small_mmdit(trainer.average, directory)
    return trainer.average


def save_half_precision(model: SmallMmdit, directory: Path) -> None:
    """Write the model in half precision, as it is shipped, and remove the state of the pretraining."""
    half = SmallMmdit(model.config)
    half.load_state_dict(model.state_dict())
    save_small_mmdit(half.half(), directory)
    for name in (_STATE, _PROGRESS):
        (directory / name).unlink(missing_ok=True)


def _replace(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file atomically: a crash leaves either the new file or the old one."""
    temporary = path.with_name(path.name + ".new")
    write(temporary)
    temporary.replace(path)
