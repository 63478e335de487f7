"""From sample groups to tensors: the trained denoising steps of a batch, and what each was drawn under.

Guarantees: whatever is inconsistent in a sample (a step without its latents, latents of another size, log-probabilities
that are missing or not finite) raises `TrainerError` with its name before anything is computed. Only trained steps are
actions here; the others brought the latents where they are and have no gradient.

Legend: N trained steps of the batch, S samples, C channels, H and W of a latent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import isfinite

import torch
from torch import Tensor

from headway.denoising.denoising_runner import bytes_to_latent
from headway.errors import TrainerError
from headway.types import DenoisingStep, Sample, SampleGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleSteps:
    """The trained steps of one sample."""

    sample: Sample
    group: int
    """Number of its group in the batch."""
    prompt: str
    steps: int
    """Of the whole path."""
    places: tuple[int, ...]
    """Which of them are trained."""
    first: int
    """Number of its first one in the batch."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DenoisingBatch:
    """All samples of a batch that have trained steps. Latents stay on the host until their micro-batch."""

    rows: tuple[SampleSteps, ...]
    groups: int
    before_NCHW: Tensor
    """Where each step began; zeros where only its end is trained on."""
    after_NCHW: Tensor
    behaviour_N: Tensor
    sequence_N: Tensor
    lag_N: Tensor
    reward_S: Tensor | None
    advantage_S: Tensor
    group_S: Tensor
    proximal_N: Tensor | None

    @property
    def mask_N(self) -> Tensor:  # noqa: N802
        """Every one is trained."""
        return torch.ones_like(self.sequence_N, dtype=torch.bool)


def collect_sample_steps(groups: Sequence[SampleGroup]) -> tuple[SampleSteps, ...]:
    """The samples of `groups` that have trained steps."""
    rows: list[SampleSteps] = []
    first = 0
    for number, group in enumerate(groups):
        for sample in group.samples:
            row = _drawn(sample, number, first)
            if row.places:
                rows.append(row)
                first += len(row.places)
    return tuple(rows)


def _drawn(sample: Sample, group: int, first: int) -> SampleSteps:
    turns = sample.episode.turns
    if len(turns) != 1:
        raise TrainerError(f"sample {sample.sample_id}: {len(turns)} turns, a picture is made in one")
    actions = turns[0].generation.actions
    if not all(isinstance(step, DenoisingStep) for step in actions):
        raise TrainerError(f"sample {sample.sample_id}: its actions are no denoising steps")
    seen = turns[0].observation or sample.episode.task.prompt
    try:
        prompt = bytes(seen).decode()
    except ValueError as error:
        raise TrainerError(f"sample {sample.sample_id}: its prompt is no text: {error}") from error
    places = tuple(place for place, step in enumerate(actions) if step.trained)
    return SampleSteps(sample=sample, group=group, prompt=prompt, steps=len(actions), places=places, first=first)


def make_denoising_batch(
    groups: Sequence[SampleGroup], *, trained: int, shape: Sequence[int], ends_only: bool, device: str
) -> DenoisingBatch:
    """Everything that training on `groups` reads. `ends_only`: where a step began does not matter."""
    rows = collect_sample_steps(groups)
    samples = [row.sample for row in rows]
    latents = [pair for row in rows for pair in _latents(row, shape, ends_only)]
    lengths = torch.tensor([len(row.places) for row in rows], dtype=torch.long)
    scores = [sample.score.value for sample in samples if sample.score is not None]
    behaviour_N = _packed(rows, _behaviour, "behaviour log-probabilities", device)
    empty = torch.zeros(0, *shape)
    return DenoisingBatch(
        rows=rows,
        groups=len(groups),
        before_NCHW=torch.stack([before for before, _ in latents]) if latents else empty,
        after_NCHW=torch.stack([after for _, after in latents]) if latents else empty,
        behaviour_N=torch.zeros(0, device=device) if behaviour_N is None else behaviour_N,
        sequence_N=torch.arange(len(rows)).repeat_interleave(lengths).to(device),
        lag_N=torch.tensor([float(trained - version) for row in rows for version in _versions(row)]),
        reward_S=torch.tensor(scores, device=device) if scores and len(scores) == len(samples) else None,
        advantage_S=torch.tensor([sample.advantage for sample in samples], device=device),
        group_S=torch.tensor([row.group for row in rows], dtype=torch.long, device=device),
        proximal_N=_packed(
            rows,
            lambda sample: sample.logps if sample.logps_version == trained else None,
            "proximal log-probabilities",
            device,
        ),
    )


def _latents(row: SampleSteps, shape: Sequence[int], ends_only: bool) -> Iterator[tuple[Tensor, Tensor]]:
    """Where each trained step began and ended."""
    actions = row.sample.episode.turns[0].generation.actions
    for place in row.places:
        step, name = actions[place], f"sample {row.sample.sample_id}, step {place}"
        start = step.before or (actions[place - 1].after if place else b"")
        if not step.after or not (start or ends_only):
            raise TrainerError(f"{name}: its latents are missing")
        try:
            after = bytes_to_latent(step.after, shape)
            yield (torch.zeros_like(after) if ends_only else bytes_to_latent(start, shape)), after
        except ValueError as error:
            raise TrainerError(f"{name}: {error}") from error


def _behaviour(sample: Sample) -> Sequence[float]:
    return sample.episode.turns[0].generation.logps


def _versions(row: SampleSteps) -> list[int]:
    """The policy version that made each trained step."""
    versions = [run.version for run in row.sample.episode.runs for _ in range(run.count)]
    if len(versions) != row.steps:
        raise TrainerError(f"sample {row.sample.sample_id}: {len(versions)} versions for {row.steps} steps")
    return [versions[place] for place in row.places]


def _packed(
    rows: Sequence[SampleSteps], read: Callable[[Sample], Sequence[float] | None], name: str, device: str
) -> Tensor | None:
    """One number per trained step; None unless every sample has them."""
    numbers: list[float] = []
    for row in rows:
        found = read(row.sample)
        if found is None:
            return None
        if len(found) != row.steps:
            raise TrainerError(f"sample {row.sample.sample_id}: {len(found)} {name} for {row.steps} steps")
        values = [float(found[place]) for place in row.places]
        if not all(isfinite(value) for value in values):
            raise TrainerError(f"sample {row.sample.sample_id}: {name} that are not finite")
        numbers += values
    return torch.tensor(numbers, device=device) if rows else None
