"""Synchronous Flow-GRPO-Fast in one file: the executable specification of what Headway computes with pictures.

    python examples/reference_flow_grpo.py --steps 40

The small denoising model that comes with Headway draws strings, often wrong ones; the reward compares them with what an
OCR reads. Each step draws a group of pictures for a few prompts, scores them, computes group advantages and makes one
clipped policy-gradient step. A denoising step is an action: its log-probability is that of a Gaussian. Noise is drawn
only in a window of a few steps, and only these are trained; before and after the window the path is the ODE.

Nothing here is optimised, and everything is visible. The same seed gives the same numbers.

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
from headway.denoising.models.denoiser import Conditioning
from headway.denoising.models.denoiser_storage import TEXT_IMAGES, find_shipped_model, load_small_mmdit
from headway.denoising.models.mmdit import SmallMmdit
from headway.rewards.images.image_reward import array_to_image, image_to_array
from headway.rewards.images.ocr_reward import measure_agreement, read_text_line
from headway.seeding import make_rng
from headway.types import Image


@dataclass(frozen=True)
class Options:
    """Settings of a run."""

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
    """Whether the group follows one path up to the window."""
    seed: int = 0


@dataclass
class Drawing:
    """One picture, with everything needed to train on it."""

    prompt: str
    picture: Image
    befores: Tensor
    """Latents before each step of the window, [window, C, H, W]."""
    afters: Tensor
    logps: Tensor
    """Behaviour log-probability of each step of the window."""
    first: int
    """First step of the window."""
    reward: float = 0.0


def make_timesteps(options: Options) -> Tensor:
    """Return noise levels from 1 to 0, denser where there is more noise."""
    even = torch.linspace(1, 0, options.denoising_steps + 1)
    return options.shift * even / (1 + (options.shift - 1) * even)


def compute_transition(
    x_BCHW: Tensor, v_BCHW: Tensor, s: Tensor, s_next: Tensor, options: Options
) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation of the next latent (coefficients-preserving sampling)."""
    data_BCHW, noise_BCHW = x_BCHW - s * v_BCHW, x_BCHW + (1 - s) * v_BCHW
    std = s_next * sin(options.noise * pi / 2)
    return (1 - s_next) * data_BCHW + (s_next**2 - std**2).sqrt() * noise_BCHW, std


def compute_logp(x_next: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Return the log-density of the latent that was drawn, averaged over its dimensions."""
    return -0.5 * ((x_next - mean) / std).square().flatten(1).mean(1) - std.log() - 0.5 * log(2 * pi)


@torch.no_grad()
def sample_group(
    model: SmallMmdit, prompt: str, first: int, options: Options, generator: torch.Generator
) -> list[Drawing]:
    """Draw `group_size` pictures of one prompt."""
    rows, timesteps = options.group_size, make_timesteps(options)
    paths = 1 if options.shared_prefix else rows
    x_BCHW = torch.randn(paths, *model.latent_shape, generator=generator)
    conditioning = model.encode([prompt] * rows)
    befores, afters, logps = [], [], []
    for step, (s, s_next) in enumerate(pairwise(timesteps)):
        if step == first:
            x_BCHW = x_BCHW.expand(rows, -1, -1, -1)
        used = Conditioning({name: tensor[: len(x_BCHW)] for name, tensor in conditioning.tensors.items()})
        v_BCHW = model(x_BCHW, s.expand(len(x_BCHW)), used)
        if not first <= step < first + options.window:
            x_BCHW = x_BCHW + (s_next - s) * v_BCHW
            continue
        mean, std = compute_transition(x_BCHW, v_BCHW, s, s_next, options)
        befores.append(x_BCHW)
        x_BCHW = mean + std * torch.randn(mean.shape, generator=generator)
        afters.append(x_BCHW)
        logps.append(compute_logp(x_BCHW, mean, std))
    pictures = pictures_to_bytes(model.decode(x_BCHW))
    parts = [torch.stack(part, dim=1) for part in (befores, afters, logps)]
    return [
        Drawing(prompt, array_to_image(pictures[row]), *(part[row] for part in parts), first) for row in range(rows)
    ]


def compute_advantages(groups: list[list[Drawing]]) -> list[Tensor]:
    """Return (R − mean of the group) / std of the batch, at most ±5."""
    rewards = [torch.tensor([drawing.reward for drawing in group]) for group in groups]
    std = torch.cat(rewards).std(correction=0) + 1e-6
    return [((values - values.mean()) / std).clamp(-5, 5) for values in rewards]


def compute_group_loss(model: SmallMmdit, group: list[Drawing], advantage_B: Tensor, options: Options) -> Tensor:
    """Return −min(r·A, clip(r)·A), summed over the window and the group; r is against the behaviour policy."""
    timesteps, conditioning = make_timesteps(options), model.encode([drawing.prompt for drawing in group])
    total = torch.zeros(())
    for number in range(options.window):
        step = group[0].first + number
        before = torch.stack([drawing.befores[number] for drawing in group])
        after = torch.stack([drawing.afters[number] for drawing in group])
        behaviour_B = torch.stack([drawing.logps[number] for drawing in group])
        v_BCHW = model(before, timesteps[step].expand(len(group)), conditioning)
        mean, std = compute_transition(before, v_BCHW, timesteps[step], timesteps[step + 1], options)
        ratio_B = (compute_logp(after, mean, std) - behaviour_B).exp()
        clipped_B = ratio_B.clamp(1 - options.clip, 1 + options.clip)
        total = total - torch.minimum(ratio_B * advantage_B, clipped_B * advantage_B).sum()
    return total


def train_step(
    model: SmallMmdit, optimizer: torch.optim.Optimizer, groups: list[list[Drawing]], options: Options
) -> tuple[float, float]:
    """Make one update; return its loss, and the norm of its gradient before clipping."""
    count = sum(len(group) for group in groups) * options.window
    optimizer.zero_grad()
    total = 0.0
    for group, advantage_B in zip(groups, compute_advantages(groups), strict=True):
        loss = compute_group_loss(model, group, advantage_B, options) / count
        loss.backward()
        total += float(loss.detach())
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), options.max_grad_norm)
    optimizer.step()
    return total, float(norm)


def score_picture(picture: Image, text: str) -> float:
    """Return the OCR reward."""
    return measure_agreement(text, read_text_line(image_to_array(picture)))


def evaluate(model: SmallMmdit, strings: list[str], options: Options) -> float:
    """Return the mean reward of pictures drawn by the ODE."""
    pictures = draw_images(model, strings, steps=options.denoising_steps, shift=options.shift)
    return sum(map(score_picture, pictures, strings)) / len(strings)


def main() -> None:
    """Train the shipped model and print its progress."""
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
            print(f"step {step:3d}  held-out reward {evaluate(model, held_out, options):.3f}", flush=True)
        if step == options.steps:
            return
        groups = []
        for _ in range(options.prompts_per_step):
            first = rng.randrange(0, options.denoising_steps // 2 - options.window + 1)
            groups.append(sample_group(model, strings.draw_trained(rng), first, options, generator))
        for drawing in (drawing for group in groups for drawing in group):
            drawing.reward = score_picture(drawing.picture, drawing.prompt)
        loss, norm = train_step(model, optimizer, groups, options)
        rewards = [drawing.reward for group in groups for drawing in group]
        if step % 5 == 0:
            mean, spent = sum(rewards) / len(rewards), time.perf_counter() - begun
            print(f"step {step:3d}  reward {mean:.3f}  loss {loss:+.6f}  grad {norm:.4f}  {spent:.0f} s", flush=True)


if __name__ == "__main__":
    main()
