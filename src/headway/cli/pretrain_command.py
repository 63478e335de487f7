"""`headway pretrain`: train a small denoising model that draws strings, from scratch, on a CPU in minutes.

    headway pretrain runs/base                     the model that comes with Headway, made again
    headway pretrain runs/base --wrong 0 --steps 500

Says how far it is, goes on where it was interrupted, and ends with what an OCR reads on held-out strings.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from headway.errors import ConfigError

if TYPE_CHECKING:
    from headway.denoising.models.mmdit import SmallMmdit
    from headway.denoising.pretraining import PretrainingSettings

HELP = "train a small denoising model that draws strings"
_REPORT_STEPS = 100
_HELD_OUT = 200


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", type=Path, help="where the model goes")
    parser.add_argument("--steps", type=int, help="steps of flow matching")
    parser.add_argument("--seed", type=int, help="of weights, pictures and noise")
    parser.add_argument("--wrong", type=float, help="share of letters that are not the caption's")
    parser.add_argument("--strokes", type=float, help="share of pictures with a stroke across them")
    parser.add_argument("--threads", type=int, default=1, help="processor cores (1)")
    parser.add_argument("--half", action="store_true", help="keep the weights in half precision, for shipping")


def run_command(args: argparse.Namespace) -> int:
    """Pretrain and save the model, and print how legible its images are."""
    import torch

    from headway.denoising.models.mmdit import count_parameters
    from headway.denoising.pretraining import pretrain, save_half_precision

    torch.set_num_threads(args.threads)
    settings, begun = _make_settings(args), time.perf_counter()
    losses: list[float] = []

    def report_step(step: int, loss: float) -> None:
        losses.append(loss)
        if step % _REPORT_STEPS == 0 or step == settings.steps:
            mean = sum(losses[-_REPORT_STEPS:]) / len(losses[-_REPORT_STEPS:])
            spent_s = time.perf_counter() - begun
            print(f"step {step:5d} of {settings.steps}  loss {mean:.4f}  {spent_s:.0f} s", flush=True)

    model = pretrain(settings, args.directory, on_step=report_step)
    if args.half:
        save_half_precision(model, args.directory)
    print(f"{args.directory}: {count_parameters(model):,} parameters")
    _print_legibility(model, settings)
    return 0


def _make_settings(args: argparse.Namespace) -> PretrainingSettings:
    from headway.denoising.pretraining import BASE_PRETRAINING

    chosen = {name: getattr(args, name) for name in ("steps", "seed") if getattr(args, name) is not None}
    style = {name: getattr(args, name) for name in ("wrong", "strokes") if getattr(args, name) is not None}
    return replace(BASE_PRETRAINING, style=replace(BASE_PRETRAINING.style, **style), **chosen)


def _print_legibility(model: SmallMmdit, settings: PretrainingSettings) -> None:
    """Print how much of the model's images each OCR that is installed can read."""
    from headway.denoising.image_evaluation import draw_images, measure_legibility
    from headway.rewards.images.ocr_reward import READERS, make_reader

    strings = settings.strings.list_held_out(_HELD_OUT)
    images = draw_images(model, strings, shift=settings.shift)
    for name in READERS:
        try:
            reader = make_reader(name, alphabet=settings.strings.alphabet)
        except ConfigError as error:
            print(f"{name}: {error}")
            continue
        found = asyncio.run(measure_legibility(images, strings, reader))
        print(f"{name}: reward {found.reward:.3f}, {found.exact:.0%} of {found.samples} held-out strings exact")
