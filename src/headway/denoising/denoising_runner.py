"""One denoising step of a batch of requests, each at its own noise level.

Guarantees: the results of one request depend on no other request, up to rounding. Noise is a function of seed, request
and step, the same on every device. Latents and everything drawn from them are float32; the model computes in its own
precision. Latents leave the device only if a step is trained. Weights change between two steps, on a CPU by pointer.

Legend: B requests of a step, C channels, H and W of a latent, Z slots.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from headway.algorithms.denoising import apply_guidance, logp
from headway.denoising.denoising_scheduler import DenoisingRequest, DenoisingStepResult
from headway.denoising.models.denoiser import Conditioning
from headway.denoising.settings import DenoisingSettings
from headway.engines.native.decode_graphs import round_up_lanes
from headway.types import DenoisingStep, Image

_MAX_CACHED_PROMPTS = 64
ForwardPass = Callable[[], Tensor]
ForwardCapture = Callable[[ForwardPass], ForwardPass]
"""Turns a forward pass into a faster one with the same result."""


class DenoisingRunner:
    """A `Denoiser` on a device, and the latents of all slots. One thread uses it."""

    def __init__(self, model: Any, settings: DenoisingSettings, *, slots: int, device: str, dtype: torch.dtype) -> None:
        self._model = model.to(device=device, dtype=dtype).eval().requires_grad_(False)
        self._device = torch.device(device)
        self._sampler = settings.make_sampler()
        self._timesteps = lru_cache(maxsize=8)(lambda steps: settings.make_timesteps(model, steps).tolist())
        self.latents_ZCHW = torch.zeros(slots, *model.latent_shape, device=self._device)
        self._encode = lru_cache(maxsize=_MAX_CACHED_PROMPTS)(lambda prompt: self._model.encode([prompt]))
        self._batch_conditioning: tuple[tuple[str, ...], Conditioning] | None = None
        self._captured: FixedSizeModel | None = None
        if self._device.type == "cuda":
            self._captured = FixedSizeModel(self._model, make_cuda_graph_capture(self._device), max_rows=2 * slots)
        self.calls = 0
        """Rows that the model computed a velocity for."""

    def install(self, values: Mapping[str, Tensor]) -> None:
        """Use other weights from now on. Raises `KeyError` unless `values` are all weights, in their shapes."""
        live = {**dict(self._model.named_parameters()), **dict(self._model.named_buffers())}
        names = set(self._model.state_dict())
        if names != set(values):
            raise KeyError(f"not a whole version: {sorted(names ^ set(values))[:3]}")
        for name, value in values.items():
            if live[name].shape != value.shape:
                raise KeyError(f"{name} is {tuple(value.shape)} instead of {tuple(live[name].shape)}")
        for name, value in values.items():
            if self._device.type == "cpu":
                live[name].data = value
            else:
                live[name].data.copy_(value)  # captured graphs read the same memory
        self._encode.cache_clear()
        self._batch_conditioning = None

    def begin(self, request: DenoisingRequest) -> None:
        """Write the first latent of the request into its slot."""
        slot = self.latents_ZCHW[request.slot]
        if request.start_latent:
            slot.copy_(bytes_to_latent(request.start_latent, slot.shape))
            request.start_latent = b""
        else:
            slot.copy_(make_noise(request.first_seed(), slot.shape))

    def copy(self, source: int, target: int) -> None:
        """Copy the latent of one slot into another."""
        self.latents_ZCHW[target] = self.latents_ZCHW[source]

    @torch.no_grad()
    def step(self, requests: Sequence[DenoisingRequest]) -> list[DenoisingStepResult]:
        """Compute one step of every request."""
        slots = torch.tensor([one.slot for one in requests], device=self._device)
        x_BCHW = self.latents_ZCHW[slots]
        s_B = self._levels([self._timesteps(one.steps)[one.next_step] for one in requests])
        next_B = self._levels([self._timesteps(one.steps)[one.next_step + 1] for one in requests])
        noisy_B = torch.tensor([one.is_noisy for one in requests], device=self._device)
        v_BCHW = self._velocity(requests, x_BCHW, s_B)
        transition = self._sampler.step(x_BCHW, v_BCHW, s_B, next_B, noisy_B)
        after_BCHW = transition.draw(self._noise(requests, x_BCHW))
        finite = after_BCHW.isfinite().all().float()
        # One host synchronisation for the log-probabilities and the check together.
        *logps, all_finite = torch.cat([logp(after_BCHW, *transition), finite[None]]).tolist()
        if not all_finite:
            raise RuntimeError("latents that are not finite: the weights of the model are broken")
        self.latents_ZCHW[slots] = after_BCHW
        return self._make_results(requests, x_BCHW, after_BCHW, logps)

    def _levels(self, values: list[float]) -> Tensor:
        return torch.tensor(values, device=self._device)

    def _velocity(self, requests: Sequence[DenoisingRequest], x_BCHW: Tensor, s_B: Tensor) -> Tensor:
        """Predict velocities; requests with guidance are computed twice, in the same forward pass."""
        self.calls += len(requests)
        prompts = [one.prompt for one in requests]
        guided = [row for row, one in enumerate(requests) if one.guidance != 1.0]
        if not guided:
            return self._forward(x_BCHW, s_B, prompts)
        self.calls += len(guided)
        where = torch.tensor(guided, device=self._device)
        prompts += [""] * len(guided)
        both = self._forward(torch.cat([x_BCHW, x_BCHW[where]]), torch.cat([s_B, s_B[where]]), prompts)
        v_BCHW, unconditional = both[: len(requests)].float(), both[len(requests) :]
        for number, row in enumerate(guided):
            v_BCHW[row] = apply_guidance(v_BCHW[row], unconditional[number], requests[row].guidance)
        return v_BCHW

    def _forward(self, x: Tensor, s: Tensor, prompts: Sequence[str]) -> Tensor:
        conditioning = self._conditioning(tuple(prompts))
        if self._captured is not None:
            try:
                return self._captured(x, s, conditioning)
            except RuntimeError as error:
                print(f"forward passes of this model cannot be captured: {error}", file=sys.stderr, flush=True)
                self._captured = None
        velocity: Tensor = self._model(x, s, conditioning)
        return velocity

    def _conditioning(self, prompts: tuple[str, ...]) -> Conditioning:
        """Return the conditioning of a batch; it is cached as long as the batch stays the same."""
        if self._batch_conditioning is None or self._batch_conditioning[0] != prompts:
            parts = [self._encode(prompt) for prompt in prompts]
            self._batch_conditioning = (prompts, Conditioning.concatenate(parts).to(self._device))
        return self._batch_conditioning[1]

    def _noise(self, requests: Sequence[DenoisingRequest], x_BCHW: Tensor) -> Tensor:
        """Return standard normal noise for requests that draw, 0 for the others."""
        if not any(one.is_noisy for one in requests):
            return torch.zeros((), device=self._device)
        shape = x_BCHW.shape[1:]
        parts = [make_noise(one.step_seed(), shape) if one.is_noisy else torch.zeros(shape) for one in requests]
        return torch.stack(parts).to(self._device)

    def _make_results(
        self, requests: Sequence[DenoisingRequest], before: Tensor, after: Tensor, logps: list[float]
    ) -> list[DenoisingStepResult]:
        """Return one action per request, with latents if it is trained and a picture if it is the last."""
        trained = [row for row, one in enumerate(requests) if one.is_trained]
        first = [row for row in trained if requests[row].is_noisy and not requests[row].knows_start]
        starts = dict(zip(first, before[first].cpu(), strict=True)) if first else {}
        ends = dict(zip(trained, after[trained].cpu(), strict=True)) if trained else {}
        images = self._images([row for row, one in enumerate(requests) if one.is_last], after)
        return [
            DenoisingStepResult(
                logps[row],
                DenoisingStep(
                    trained=row in ends,
                    before=latent_to_bytes(starts[row]) if row in starts else b"",
                    after=latent_to_bytes(ends[row]) if row in ends else b"",
                    image=images.get(row),
                )
                if row in ends or row in images
                else _UNTRAINED_STEP,
            )
            for row in range(len(requests))
        ]

    def _images(self, rows: list[int], after: Tensor) -> dict[int, Image]:
        """Decode the latents of `rows` into pictures."""
        if not rows:
            return {}
        pictures = self._model.decode(after[rows]).mul(255).round().to(torch.uint8)
        found = pictures.permute(0, 2, 3, 1).contiguous().cpu()
        return {row: tensor_to_image(picture) for row, picture in zip(rows, found, strict=True)}


_UNTRAINED_STEP = DenoisingStep()


def tensor_to_image(picture_HWC: Tensor) -> Image:
    """Return the record of a uint8 tensor."""
    height, width, _ = picture_HWC.shape
    return Image(height=height, width=width, pixels=picture_HWC.numpy().tobytes())


def make_noise(seed: int, shape: Sequence[int]) -> Tensor:
    """Draw standard normal noise on the CPU, so that a seed means the same on every device."""
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed))


def latent_to_bytes(latent: Tensor) -> bytes:
    """Return the float32 bytes of a latent, as actions carry it."""
    return latent.contiguous().numpy().tobytes()


def bytes_to_latent(data: bytes, shape: Sequence[int]) -> Tensor:
    """Return the latent that `latent_to_bytes` was given. Raises `ValueError` if it has another size."""
    found = torch.frombuffer(bytearray(data), dtype=torch.float32)
    if found.numel() != torch.Size(shape).numel():
        raise ValueError(f"a latent of {found.numel()} numbers, the model has {tuple(shape)}")
    return found.view(*shape)


class FixedSizeModel:
    """Replaces a model for batches of at most `max_rows` rows by forward passes of fixed sizes, captured once.

    A step of a denoiser is hundreds of small kernels. Launched one by one, they take longer than they run, and the
    thread that launches them holds the interpreter. So batches are padded to a few sizes, on buffers that stay in
    place, and each size is captured when it is first needed. The content of padding rows does not matter: a row's
    velocity depends on that row alone. The next call overwrites the result.
    """

    def __init__(self, model: Any, capture: ForwardCapture, *, max_rows: int) -> None:
        self._model, self._capture, self._max_rows = model, capture, max_rows
        self._sizes: dict[int, tuple[Tensor, Tensor, Conditioning, ForwardPass]] = {}

    def __call__(self, x: Tensor, s: Tensor, conditioning: Conditioning) -> Tensor:
        rows, size = len(x), round_up_lanes(len(x), self._max_rows)
        if size not in self._sizes:
            self._sizes[size] = self._prepare(size, x, s, conditioning)
        x_buffer, s_buffer, conditioning_buffer, forward = self._sizes[size]
        x_buffer[:rows].copy_(x)
        s_buffer[:rows].copy_(s)
        for name, tensor in conditioning.tensors.items():
            conditioning_buffer[name][:rows].copy_(tensor)
        return forward()[:rows]

    def _prepare(
        self, size: int, x: Tensor, s: Tensor, conditioning: Conditioning
    ) -> tuple[Tensor, Tensor, Conditioning, ForwardPass]:
        """Allocate buffers of one size, filled with valid rows, and capture the forward pass on them."""
        x_buffer, s_buffer = _repeat_first_row(x, size), _repeat_first_row(s, size)
        tensors = {name: _repeat_first_row(tensor, size) for name, tensor in conditioning.tensors.items()}
        buffer = Conditioning(tensors)
        return x_buffer, s_buffer, buffer, self._capture(lambda: self._model(x_buffer, s_buffer, buffer))


def _repeat_first_row(rows: Tensor, size: int) -> Tensor:
    return rows[:1].expand(size, *rows.shape[1:]).contiguous()


def make_cuda_graph_capture(device: torch.device) -> ForwardCapture:
    """Return a capture as CUDA graphs. They share one memory pool, so no two of them may run at once."""
    stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    pool = torch.cuda.graph_pool_handle()

    def capture(forward: ForwardPass) -> ForwardPass:
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for _ in range(2):  # kernels are chosen and loaded outside of the capture
                forward()
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            # Other threads load weights or train: they must not break a capture, nor be broken by it.
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                output = forward()
            finally:
                graph.capture_end()
        torch.cuda.current_stream(device).wait_stream(stream)

        def replay() -> Tensor:
            graph.replay()
            return output

        return replay

    return capture
