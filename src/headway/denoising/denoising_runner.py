"""One denoising step of a batch of rows, each at its own noise level: velocities, draws, log-probabilities, pictures.

Guarantees: what it computes for one row depends on no other, up to rounding; noise is a function of seed, request and
step, on every device the same. Latents and everything that is drawn from them are float32; the model computes in its
own type. Latents leave the device only where a step is trained. Weights change between two steps, on a CPU by pointers.

Legend: B rows of a step, C channels, H and W of a latent, Z slots.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from headway.algorithms.denoising import apply_guidance, logp
from headway.denoising.denoising_graphs import FixedSizeModel, make_cuda_graph_capture
from headway.denoising.denoising_request import DenoisingRequest
from headway.denoising.denoising_scheduler import DenoisingStepResult
from headway.denoising.models.denoiser import Conditioning
from headway.denoising.settings import DenoisingSettings
from headway.types import DenoisingStep, Image

_MOST_PROMPTS = 64
"""Prompts whose conditioning is kept."""


class DenoisingRunner:
    """A `Denoiser` on a device, and the latents of all slots. Lives in one thread."""

    def __init__(self, model: Any, flow: DenoisingSettings, *, slots: int, device: str, dtype: torch.dtype) -> None:
        self._model = model.to(device=device, dtype=dtype).eval().requires_grad_(False)
        self._device = torch.device(device)
        self._sampler = flow.make_sampler()
        self._grid = lru_cache(maxsize=8)(lambda steps: flow.grid_of(model, steps).tolist())
        self.latents_ZCHW = torch.zeros(slots, *model.latent_shape, device=self._device)
        self._prompts: dict[str, Conditioning] = {}
        self._joined: tuple[tuple[str, ...], Conditioning] | None = None
        self._fast: FixedSizeModel | None = None
        if self._device.type == "cuda":
            self._fast = FixedSizeModel(self._model, make_cuda_graph_capture(self._device), most=2 * slots)
        self.calls = 0
        """Rows that the model was asked for a velocity of."""

    def install(self, values: Mapping[str, Tensor]) -> None:
        """Compute with other weights from now on."""
        live = {**dict(self._model.named_parameters()), **dict(self._model.named_buffers())}
        wanted = set(self._model.state_dict())
        if wanted != set(values):
            raise KeyError(f"not a whole version: {sorted(wanted ^ set(values))[:3]}")
        for name, value in values.items():
            if live[name].shape != value.shape:
                raise KeyError(f"{name} is {tuple(value.shape)} instead of {tuple(live[name].shape)}")
        for name, value in values.items():
            if self._device.type == "cpu":
                live[name].data = value
            else:
                live[name].data.copy_(value)  # what was captured stays right
        self._prompts.clear()
        self._joined = None

    def begin(self, row: DenoisingRequest) -> None:
        """Put what the row starts from into its slot."""
        slot = self.latents_ZCHW[row.slot]
        if row.held:
            slot.copy_(bytes_to_latent(row.held, slot.shape))
            row.held = b""
        else:
            slot.copy_(make_noise(row.first_seed(), slot.shape))

    def copy(self, source: int, target: int) -> None:
        """The latent of one slot into another."""
        self.latents_ZCHW[target] = self.latents_ZCHW[source]

    @torch.no_grad()
    def step(self, rows: Sequence[DenoisingRequest]) -> list[DenoisingStepResult]:
        """One step of every row."""
        slots = torch.tensor([row.slot for row in rows], device=self._device)
        x_BCHW = self.latents_ZCHW[slots]
        s_B = self._levels([self._grid(row.steps)[row.at] for row in rows])
        next_B = self._levels([self._grid(row.steps)[row.at + 1] for row in rows])
        noisy_B = torch.tensor([row.noisy for row in rows], device=self._device)
        v_BCHW = self._velocity(rows, x_BCHW, s_B)
        law = self._sampler.step(x_BCHW, v_BCHW, s_B, next_B, noisy_B)
        after_BCHW = law.draw(self._noise(rows, x_BCHW))
        sound = after_BCHW.isfinite().all().float()
        *logps, whole = torch.cat([logp(after_BCHW, *law), sound[None]]).tolist()  # one look at the device
        if not whole:
            raise RuntimeError("latents that are not finite: the model has lost its senses")
        self.latents_ZCHW[slots] = after_BCHW
        return self._made(rows, x_BCHW, after_BCHW, logps)

    # Inside.

    def _levels(self, values: list[float]) -> Tensor:
        return torch.tensor(values, device=self._device)

    def _velocity(self, rows: Sequence[DenoisingRequest], x_BCHW: Tensor, s_B: Tensor) -> Tensor:
        """With guidance where a row wants it: those are computed twice, in the same call."""
        self.calls += len(rows)
        twice = [place for place, row in enumerate(rows) if row.guidance != 1.0]
        if not twice:
            return self._called(x_BCHW, s_B, [row.prompt for row in rows])
        self.calls += len(twice)
        where = torch.tensor(twice, device=self._device)
        prompts = [row.prompt for row in rows] + [""] * len(twice)
        both = self._called(torch.cat([x_BCHW, x_BCHW[where]]), torch.cat([s_B, s_B[where]]), prompts)
        v_BCHW, plain = both[: len(rows)].float(), both[len(rows) :]
        for number, place in enumerate(twice):
            v_BCHW[place] = apply_guidance(v_BCHW[place], plain[number], rows[place].guidance)
        return v_BCHW

    def _called(self, x: Tensor, s: Tensor, prompts: Sequence[str]) -> Tensor:
        conditioning = self._conditioning(tuple(prompts))
        if self._fast is not None:
            try:
                return self._fast(x, s, conditioning)
            except RuntimeError as error:
                print(f"forward passes of this model cannot be captured: {error}", file=sys.stderr, flush=True)
                self._fast = None
        velocity: Tensor = self._model(x, s, conditioning)
        return velocity

    def _conditioning(self, prompts: tuple[str, ...]) -> Conditioning:
        """Of a batch; kept as long as the batch stays the same."""
        if self._joined is None or self._joined[0] != prompts:
            parts = [self._encoded(prompt) for prompt in prompts]
            self._joined = (prompts, Conditioning.joined(parts).to(self._device))
        return self._joined[1]

    def _encoded(self, prompt: str) -> Conditioning:
        found = self._prompts.get(prompt)
        if found is None:
            if len(self._prompts) >= _MOST_PROMPTS:
                del self._prompts[next(iter(self._prompts))]
            found = self._prompts[prompt] = self._model.encode([prompt])
        return found

    def _noise(self, rows: Sequence[DenoisingRequest], x_BCHW: Tensor) -> Tensor:
        """Standard normal where a row draws, 0 elsewhere."""
        if not any(row.noisy for row in rows):
            return torch.zeros((), device=self._device)
        shape = x_BCHW.shape[1:]
        parts = [make_noise(row.step_seed(), shape) if row.noisy else torch.zeros(shape) for row in rows]
        return torch.stack(parts).to(self._device)

    def _made(
        self, rows: Sequence[DenoisingRequest], before: Tensor, after: Tensor, logps: list[float]
    ) -> list[DenoisingStepResult]:
        trained = [place for place, row in enumerate(rows) if row.trained]
        first = [place for place in trained if rows[place].noisy and not rows[place].chained]
        starts = dict(zip(first, before[first].cpu(), strict=True)) if first else {}
        ends = dict(zip(trained, after[trained].cpu(), strict=True)) if trained else {}
        images = self._images([place for place, row in enumerate(rows) if row.last], after)
        return [
            DenoisingStepResult(
                logps[place],
                DenoisingStep(
                    trained=place in ends,
                    before=latent_to_bytes(starts[place]) if place in starts else b"",
                    after=latent_to_bytes(ends[place]) if place in ends else b"",
                    image=images.get(place),
                )
                if place in ends or place in images
                else _PLAIN,
            )
            for place in range(len(rows))
        ]

    def _images(self, places: list[int], after: Tensor) -> dict[int, Image]:
        if not places:
            return {}
        pictures = self._model.decode(after[places]).mul(255).round().to(torch.uint8)
        found = pictures.permute(0, 2, 3, 1).contiguous().cpu()
        return {place: tensor_to_image(picture) for place, picture in zip(places, found, strict=True)}


_PLAIN = DenoisingStep()


def tensor_to_image(picture_HWC: Tensor) -> Image:
    """From uint8."""
    height, width, _ = picture_HWC.shape
    return Image(height=height, width=width, pixels=picture_HWC.numpy().tobytes())


def make_noise(seed: int, shape: Sequence[int]) -> Tensor:
    """Standard normal, made on the CPU so that a seed means the same everywhere."""
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed))


def latent_to_bytes(latent: Tensor) -> bytes:
    """As it travels."""
    return latent.contiguous().numpy().tobytes()


def bytes_to_latent(data: bytes, shape: Sequence[int]) -> Tensor:
    """What `latent_to_bytes` was given. Raises `ValueError` where it has another size."""
    found = torch.frombuffer(bytearray(data), dtype=torch.float32)
    if found.numel() != torch.Size(shape).numel():
        raise ValueError(f"a latent of {found.numel()} numbers, the model has {tuple(shape)}")
    return found.view(*shape)
