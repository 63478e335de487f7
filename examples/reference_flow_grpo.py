"""Synchronous Flow-GRPO-Fast in one file: the executable specification of what Headway computes with pictures.

    python examples/reference_flow_grpo.py --steps 40

The small flow model that comes with Headway draws strings and does not always draw the right one; the reward is what an
OCR reads. Each step: a few prompts, a group of pictures for each, rewards, group advantages, one clipped
policy-gradient step. A denoising step is an action: its log-probability is a Gaussian's. Noise is drawn only in a
window of a few steps, and only those are trained; before and behind it the path is the ODE, which has no choice.

Nothing is fast here and everything is in plain sight. Same seed, same numbers.

Legend: B pictures, C channels, H height, W width; s = 1 is noise, s = 0 is data; x_BCHW a latent, v_BCHW a velocity.
"""
# ruff: noqa: N803, N806

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from itertools import pairwise
from math import log, pi, sin
from pathlib import Path

import torch
from torch import Tensor

from headway.data.generated_tasks import StringSet
from headway.denoising.image_evaluation import draw_images, pictures_to_bytes
from headway.denoising.models import Conditioning, SmallMmdit, load_small_mmdit
from headway.denoising.models.denoiser_storage import TEXT_IMAGES, find_shipped_model
from headway.rewards.images.image_reward import array_to_image, image_to_array
from headway.rewards.images.ocr_reward import measure_agreement
from headway.rewards.images.ocr_reward import read_text_line
from headway.seeding import make_rng
from headway.types import Image


@dataclass(frozen=True)
class Options:
    """What a run is made of."""

    prompts_per_step: int = 8
    group_size: int = 8
    steps: int = 40
    denoising_steps: int = 10
    window: int = 2
    noise: float = 0.8
    shift: float = 3.0
    learning_rate: float = 5e-4
    clip: float = 1e-4
    max_grad_norm: float = 1.0
    shared_prefix: bool = False
    """The group follows one path up to the window."""
    seed: int = 0


@dataclass
class Drawing:
    """One picture, with what is needed to train on it."""

    prompt: str
    picture: Image
    befores: Tensor
    """Latents at the beginning of each step of the window, [window, C, H, W]."""
    afters: Tensor
    logps: Tensor
    """Behaviour log-probability of each step of the window."""
    first: int
    """The window's first step."""
    reward: float = 0.0


def grid_of(options: Options) -> Tensor:
    """Noise levels from 1 to 0, denser where there is more noise."""
    even = torch.linspace(1, 0, options.denoising_steps + 1)
    return options.shift * even / (1 + (options.shift - 1) * even)


def noisy_step(x_BCHW: Tensor, v_BCHW: Tensor, s: Tensor, s_next: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of the next latent: coefficients-preserving sampling."""
    data_BCHW, noise_BCHW = x_BCHW - s * v_BCHW, x_BCHW + (1 - s) * v_BCHW
    std = s_next * sin(options.noise * pi / 2)
    return (1 - s_next) * data_BCHW + (s_next**2 - std**2).sqrt() * noise_BCHW, std


def logp_of(x_next: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Log-density of the latent that was drawn, the mean over its dimensions."""
    return -0.5 * ((x_next - mean) / std).square().flatten(1).mean(1) - std.log() - 0.5 * log(2 * pi)


@torch.no_grad()
def sample_group(
    model: SmallMmdit, prompt: str, first: int, options: Options, generator: torch.Generator
) -> list[Drawing]:
    """`group_size` pictures of one prompt."""
    rows, grid = options.group_size, grid_of(options)
    paths = 1 if options.shared_prefix else rows
    x_BCHW = torch.randn(paths, *model.latent_shape, generator=generator)
    told = model.encode([prompt] * rows)
    befores, afters, logps = [], [], []
    for step, (s, s_next) in enumerate(pairwise(grid)):
        if step == first:
            x_BCHW = x_BCHW.expand(rows, -1, -1, -1)
        some = Conditioning({name: told[name][: len(x_BCHW)] for name in told.tensors})
        v_BCHW = model(x_BCHW, s.expand(len(x_BCHW)), some)
        if not first <= step < first + options.window:
            x_BCHW = x_BCHW + (s_next - s) * v_BCHW
            continue
        mean, std = noisy_step(x_BCHW, v_BCHW, s, s_next, options)
        befores.append(x_BCHW)
        x_BCHW = mean + std * torch.randn(mean.shape, generator=generator)
        afters.append(x_BCHW)
        logps.append(logp_of(x_BCHW, mean, std))
    pictures = pictures_to_bytes(model.decode(x_BCHW))
    parts = [torch.stack(part, dim=1) for part in (befores, afters, logps)]
    return [
        Drawing(prompt, array_to_image(pictures[row]), *(part[row] for part in parts), first) for row in range(rows)
    ]


def advantages_of(groups: list[list[Drawing]]) -> list[Tensor]:
    """(R − mean of the group) / std of the batch, at most ±5."""
    rewards = [torch.tensor([drawing.reward for drawing in group]) for group in groups]
    spread = torch.cat(rewards).std(correction=0) + 1e-6
    return [((values - values.mean()) / spread).clamp(-5, 5) for values in rewards]


def group_loss(model: SmallMmdit, group: list[Drawing], advantage_B: Tensor, options: Options) -> Tensor:
    """−min(r·A, clip(r)·A), r against the behaviour policy; the sum over the steps of the window and the group."""
    grid, told = grid_of(options), model.encode([drawing.prompt for drawing in group])
    total = torch.zeros(())
    for place in range(options.window):
        step = group[0].first + place
        before = torch.stack([drawing.befores[place] for drawing in group])
        after = torch.stack([drawing.afters[place] for drawing in group])
        behaviour_B = torch.stack([drawing.logps[place] for drawing in group])
        v_BCHW = model(before, grid[step].expand(len(group)), told)
        mean, std = noisy_step(before, v_BCHW, grid[step], grid[step + 1], options)
        ratio_B = (logp_of(after, mean, std) - behaviour_B).exp()
        clipped_B = ratio_B.clamp(1 - options.clip, 1 + options.clip)
        total = total - torch.minimum(ratio_B * advantage_B, clipped_B * advantage_B).sum()
    return total


def train_step(
    model: SmallMmdit, optimizer: torch.optim.Optimizer, groups: list[list[Drawing]], options: Options
) -> tuple[float, float]:
    """One update; its loss, and the norm of its gradient before the clip."""
    count = sum(len(group) for group in groups) * options.window
    optimizer.zero_grad()
    total = 0.0
    for group, advantage_B in zip(groups, advantages_of(groups), strict=True):
        loss = group_loss(model, group, advantage_B, options) / count
        loss.backward()
        total += float(loss.detach())
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), options.max_grad_norm)
    optimizer.step()
    return total, float(norm)


def legible(picture: Image, text: str) -> float:
    """The OCR reward."""
    return measure_agreement(text, read_text_line(image_to_array(picture)))


def held_out_reward(model: SmallMmdit, strings: list[str], options: Options) -> float:
    """Of pictures by the ODE."""
    pictures = draw_images(model, strings, steps=options.denoising_steps, shift=options.shift)
    return sum(map(legible, pictures, strings)) / len(strings)


def main() -> None:
    """Train the shipped model and say how it goes."""
    parser = argparse.ArgumentParser(description="synchronous Flow-GRPO-Fast in one file")
    parser.add_argument("--model", type=Path, default=None, help="directory; left out, the one that comes with Headway")
    parser.add_argument("--steps", type=int, default=Options.steps)
    parser.add_argument("--seed", type=int, default=Options.seed)
    parser.add_argument("--rate", type=float, default=Options.learning_rate)
    parser.add_argument("--shared-prefix", action="store_true")
    chosen = parser.parse_args()
    options = Options(
        steps=chosen.steps, seed=chosen.seed, learning_rate=chosen.rate, shared_prefix=chosen.shared_prefix
    )
    torch.set_num_threads(1)
    model = load_small_mmdit(chosen.model or find_shipped_model(TEXT_IMAGES))
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate, weight_decay=0.0)
    generator, rng = torch.Generator().manual_seed(options.seed), make_rng(options.seed, "reference")
    strings, begun = StringSet(), time.perf_counter()
    held_out = strings.list_held_out(100)
    for step in range(options.steps + 1):
        if step % 20 == 0 or step == options.steps:
            print(f"step {step:3d}  held-out reward {held_out_reward(model, held_out, options):.3f}", flush=True)
        if step == options.steps:
            return
        groups = []
        for _ in range(options.prompts_per_step):
            first = rng.randrange(0, options.denoising_steps // 2 - options.window + 1)
            groups.append(sample_group(model, strings.draw_trained(rng), first, options, generator))
        for drawing in (drawing for group in groups for drawing in group):
            drawing.reward = legible(drawing.picture, drawing.prompt)
        loss, norm = train_step(model, optimizer, groups, options)
        rewards = [drawing.reward for group in groups for drawing in group]
        if step % 5 == 0:
            mean, spent = sum(rewards) / len(rewards), time.perf_counter() - begun
            print(f"step {step:3d}  reward {mean:.3f}  loss {loss:+.6f}  grad {norm:.4f}  {spent:.0f} s", flush=True)


if __name__ == "__main__":
    main()
