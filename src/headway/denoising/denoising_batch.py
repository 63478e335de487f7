"""Conversion of sample groups to tensors: the trained denoising steps of a batch, and the versions that drew them.

Guarantees: an inconsistent sample (a step without latents, latents of another size, log-probabilities that are missing
or not finite) raises `TrainerError` with the sample's name before anything is computed. Only trained steps are actions
here; the other steps have no gradient.

Legend: N trained steps of the batch, S samples, C channels, H and W of a latent.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from headway.denoising.denoising_runner import bytes_to_latent
from headway.errors import TrainerError
from headway.trainers.local.token_batch import ScoredBatch, read_per_action, read_versions
from headway.types import DenoisingStep, Sample, SampleGroup

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleSteps:
    """The trained steps of one sample."""

    sample: Sample
    group: int
    """Number of its group in the batch."""
    prompt: str
    path_length: int
    """Number of denoising steps, trained or not."""
    trained: tuple[int, ...]
    """Numbers of the trained steps."""
    first: int
    """Position of its first trained step in the batch."""

    @property
    def end(self) -> int:
        """Position in the batch after its last trained step."""
        return self.first + len(self.trained)

    def select(self, values: Sequence[T]) -> list[T]:
        """Return the values of the trained steps."""
        return [values[number] for number in self.trained]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DenoisingBatch(ScoredBatch):
    """All samples of a batch that have trained steps. Latents stay on the host until their micro-batch."""

    rows: tuple[SampleSteps, ...]
    before_NCHW: Tensor
    """Latent before each step; zeros if training uses only the end of a step."""
    after_NCHW: Tensor


def collect_sample_steps(groups: Sequence[SampleGroup]) -> tuple[SampleSteps, ...]:
    """Return the samples of `groups` that have trained steps."""
    rows: list[SampleSteps] = []
    first = 0
    for number, group in enumerate(groups):
        for sample in group.samples:
            row = _read_sample(sample, number, first)
            if row.trained:
                rows.append(row)
                first = row.end
    return tuple(rows)


def _read_sample(sample: Sample, group: int, first: int) -> SampleSteps:
    turns = sample.episode.turns
    if len(turns) != 1:
        raise TrainerError(f"sample {sample.sample_id}: {len(turns)} turns, a picture is made in one")
    actions = turns[0].generation.actions
    if not all(isinstance(step, DenoisingStep) for step in actions):
        raise TrainerError(f"sample {sample.sample_id}: its actions are no denoising steps")
    prompt_bytes = turns[0].observation or sample.episode.task.prompt
    try:
        prompt = bytes(prompt_bytes).decode()
    except ValueError as error:
        raise TrainerError(f"sample {sample.sample_id}: its prompt is no text: {error}") from error
    trained = tuple(number for number, step in enumerate(actions) if step.trained)
    return SampleSteps(
        sample=sample, group=group, prompt=prompt, path_length=len(actions), trained=trained, first=first
    )


def make_denoising_batch(
    groups: Sequence[SampleGroup], *, trained: int, shape: Sequence[int], ends_only: bool, device: str
) -> DenoisingBatch:
    """Convert `groups` to tensors. `ends_only`: training does not use the latents before steps."""
    rows = collect_sample_steps(groups)
    samples = [row.sample for row in rows]
    latents = [pair for row in rows for pair in _read_latents(row, shape, ends_only)]
    lengths = torch.tensor([len(row.trained) for row in rows], dtype=torch.long)
    scores = [sample.score.value for sample in samples if sample.score is not None]
    behaviour_N = _pack_per_step(
        rows, lambda sample: sample.episode.turns[0].generation.logps, "behaviour log-probabilities", device
    )
    versions = [version for row in rows for version in row.select(read_versions(row.sample).tolist())]
    empty = torch.zeros(0, *shape)
    sequence_N = torch.arange(len(rows)).repeat_interleave(lengths).to(device)
    return DenoisingBatch(
        rows=rows,
        groups=len(groups),
        before_NCHW=torch.stack([before for before, _ in latents]) if latents else empty,
        after_NCHW=torch.stack([after for _, after in latents]) if latents else empty,
        behaviour_N=torch.zeros(0, device=device) if behaviour_N is None else behaviour_N,
        sequence_N=sequence_N,
        mask_N=torch.ones_like(sequence_N, dtype=torch.bool),
        lag_N=torch.tensor([float(trained - version) for version in versions]),
        reward_S=torch.tensor(scores, device=device) if scores and len(scores) == len(samples) else None,
        advantage_S=torch.tensor([sample.advantage for sample in samples], device=device),
        group_S=torch.tensor([row.group for row in rows], dtype=torch.long, device=device),
        proximal_N=_pack_per_step(
            rows,
            lambda sample: sample.logps if sample.logps_version == trained else None,
            "proximal log-probabilities",
            device,
        ),
    )


def _read_latents(row: SampleSteps, shape: Sequence[int], ends_only: bool) -> Iterator[tuple[Tensor, Tensor]]:
    """Iterate over the latents before and after each trained step."""
    actions = row.sample.episode.turns[0].generation.actions
    for number in row.trained:
        step, name = actions[number], f"sample {row.sample.sample_id}, step {number}"
        start = step.before or (actions[number - 1].after if number else b"")
        if not step.after or not (start or ends_only):
            raise TrainerError(f"{name}: its latents are missing")
        try:
            after = bytes_to_latent(step.after, shape)
            yield (torch.zeros_like(after) if ends_only else bytes_to_latent(start, shape)), after
        except ValueError as error:
            raise TrainerError(f"{name}: {error}") from error


def _pack_per_step(
    rows: Sequence[SampleSteps], read: Callable[[Sample], Sequence[float] | None], name: str, device: str
) -> Tensor | None:
    """Pack one number per trained step, [N]; None unless `read` finds numbers for every sample."""
    found = read_per_action([row.sample for row in rows], read, name)
    if not found:
        return None
    packed = [value for row, values in zip(rows, found, strict=True) for value in row.select(values.tolist())]
    return torch.tensor(packed, device=device)
