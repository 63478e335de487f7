"""Sample groups as arrays: the tokens of each sample, which of them the policy chose, and everything known about them.

The tokens of a sample are the observations and actions of its turns in order. Only actions are trained; observations
are context. A turn that starts a fresh context begins another context segment of its sample, which sees nothing of the
segments before it. The actions of a batch are numbered consecutively, sample after sample: this is the N of losses.

Guarantees: an inconsistent sample (missing log-probabilities, unknown tokens, no prompt, NaN) raises `TrainerError`
with its name before anything is computed.

Legend: N actions, S samples, K turns.
"""

# ruff: noqa: N815

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway.algorithm_traits import is_greedy_member
from headway.algorithms.returns import TurnRewards
from headway.algorithms.sample_weights import TRAIN_EVERYTHING, SampleSelection
from headway.errors import TrainerError
from headway.models.expert_routing import unpack_routing
from headway.types import RepeatedValue, Sample, SampleGroup

_NEARLY_ONE = 1e-6
"""How far the number that says that an answer is right may be from 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRow:
    """One sample as tokens."""

    sample_id: str
    group: int
    """Number of its group in the batch."""
    tokens: tuple[int, ...]
    actions: tuple[int, ...]
    """Indices in `tokens` of those that the policy chose."""
    first: int
    """Number of its first action in the batch."""
    starts: tuple[int, ...] = (0,)
    """Indices in `tokens` at which a context segment begins."""
    routing: NDArray[np.int32] | None = field(default=None, compare=False, repr=False)
    """Experts of each token, (tokens, layers, experts of a token), −1 where they are not known; None if all are not."""

    @property
    def context_segments(self) -> tuple[TokenRow, ...]:
        """One row for each context segment. Segments without actions train nothing and are left out."""
        if len(self.starts) == 1:
            return (self,)
        found, first = [], self.first
        for start, end in zip(self.starts, (*self.starts[1:], len(self.tokens)), strict=True):
            inside = tuple(place - start for place in self.actions if start <= place < end)
            if inside:
                routing = None if self.routing is None else self.routing[start:end]
                tokens = self.tokens[start:end]
                found.append(replace(self, tokens=tokens, actions=inside, first=first, starts=(0,), routing=routing))
            first += len(inside)
        return tuple(found)

    @property
    def prompt_length(self) -> int:
        """Number of tokens before the first action."""
        return self.actions[0]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScoredBatch:
    """The actions of a batch, whatever they are, with their scores."""

    groups: int
    behaviour_N: Tensor
    sequence_N: Tensor
    lag_N: Tensor
    """Number of versions by which each action is behind the trained one."""
    reward_S: Tensor | None
    advantage_S: Tensor
    group_S: Tensor
    proximal_N: Tensor | None
    """ℓ_p under the current weights, 0 for actions without. None if no action has it."""
    mask_N: Tensor
    """Actions that are trained; the others count in no denominator of a loss."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenBatch(ScoredBatch):
    """All samples of a batch that have actions."""

    rows: tuple[TokenRow, ...]
    unscored: tuple[TokenRow, ...]
    """Rows whose ℓ_p no stage has computed with the current weights."""
    reference_N: Tensor | None
    value_N: Tensor | None
    steps: TurnRewards
    domain_S: Tensor
    """Number of the domain of each sample."""
    part_PS: Tensor | None = None
    """Parts of each reward that the estimator reads; None if it reads none."""
    correct_S: Tensor | None = None
    """Samples whose answers are right; None if the estimator does not ask."""
    weight_S: Tensor | None = None
    """How much each sample counts in the policy loss; None if all count the same."""
    by_turn: bool = False
    """Turns are the sequences of the loss, instead of samples."""

    @property
    def greedy_S(self) -> Tensor:  # noqa: N802
        """Return which samples are greedy answers."""
        return torch.tensor([is_greedy_member(row.sample_id) for row in self.rows], device=self.group_S.device)

    @property
    def loss_sequence(self) -> Tensor:
        """Return the sequence that each action belongs to in the loss."""
        return self.steps.step_N if self.by_turn else self.sequence_N

    @property
    def loss_sequences(self) -> int:
        """Return the number of sequences of the loss."""
        return self.steps.sample_K.numel() if self.by_turn else len(self.rows)


def make_token_rows(groups: Sequence[SampleGroup], vocabulary: int) -> tuple[TokenRow, ...]:
    """Return the samples of `groups` that have actions, as tokens."""
    rows: list[TokenRow] = []
    first = 0
    for number, group in enumerate(groups):
        for sample in group.samples:
            row = _make_row(sample, number, first, vocabulary)
            if row.actions:
                rows.append(row)
                first += len(row.actions)
    return tuple(rows)


def _make_row(sample: Sample, group: int, first: int, vocabulary: int) -> TokenRow:
    name = f"sample {sample.sample_id}"
    parts: list[NDArray[np.int64]] = []
    actions: list[int] = []
    starts, length = [0], 0
    for index, turn in enumerate(sample.episode.turns):
        if index and turn.starts_new_context:
            starts.append(length)
        observation = turn.observation if index or len(turn.observation) else sample.episode.task.prompt
        seen, chosen = (np.asarray(some, dtype=np.int64) for some in (observation, turn.generation.actions))
        length += len(seen)
        if len(chosen) and length == starts[-1]:
            raise TrainerError(f"{name}: its first action follows nothing; a prompt has at least 1 token")
        actions += range(length, length + len(chosen))
        length += len(chosen)
        parts += [seen, chosen]
    tokens = np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)
    if len(actions) != sample.actions:
        raise TrainerError(f"{name}: {len(actions)} actions in its turns, {sample.actions} counted")
    unknown = tokens[(tokens < 0) | (tokens >= vocabulary)]
    if len(unknown):
        raise TrainerError(f"{name}: token {unknown[0]}, the model knows 0 to {vocabulary - 1}")
    return TokenRow(
        sample_id=sample.sample_id,
        group=group,
        tokens=tuple(tokens.tolist()),
        actions=tuple(actions),
        first=first,
        starts=tuple(starts),
        routing=_read_routing(sample, len(tokens), starts),
    )


def _read_routing(sample: Sample, tokens: int, starts: Sequence[int]) -> NDArray[np.int32] | None:
    """Return the experts of all tokens of a sample; a turn has those of its context segment from `start` on."""
    found: NDArray[np.int32] | None = None
    segment = -1
    for index, turn in enumerate(sample.episode.turns):
        segment += not index or turn.starts_new_context
        routing = turn.generation.routing
        if routing is None:
            continue
        if found is None:
            found = np.full((tokens, routing.layers, routing.experts), -1, dtype=np.int32)
        first = starts[segment] + routing.start
        found[first : first + len(routing)] = unpack_routing(routing)[: tokens - first]
    return found


def make_token_batch(
    groups: Sequence[SampleGroup],
    *,
    trained: int,
    vocabulary: int,
    dtype: torch.dtype,
    device: str,
    selection: SampleSelection = TRAIN_EVERYTHING,
    parts: Sequence[str] = (),
    accuracy: str | None = None,
) -> TokenBatch:
    """Return everything that training on `groups` reads.

    `parts` are those of rewards that the estimator reads, and `accuracy` the one that is 1 where an answer is right.
    """
    rows = make_token_rows(groups, vocabulary)
    samples = [sample for group in groups for sample in group.samples if sample.actions]

    def packed(read: Callable[[Sample], Sequence[float] | None], name: str) -> Tensor | None:
        found = read_per_action(samples, read, name)
        return torch.from_numpy(np.concatenate(found)).to(dtype).to(device) if found else None

    def proximal(sample: Sample) -> Sequence[float]:
        current = sample.logps is not None and sample.logps_version == trained
        return sample.logps if current and sample.logps is not None else RepeatedValue(0.0, sample.actions)

    behaviour_N = packed(_behaviour, "behaviour log-probabilities")
    current = [sample.logps is not None and sample.logps_version == trained for sample in samples]
    lengths = torch.tensor([sample.actions for sample in samples], dtype=torch.long)
    sequence_N = torch.arange(len(samples)).repeat_interleave(lengths)
    trained_S, weights = torch.tensor(selection.select(groups), dtype=torch.bool), selection.weigh(samples)
    domains = [sample.episode.task.domain for sample in samples]
    numbers = {domain: number for number, domain in enumerate(dict.fromkeys(domains))}
    scores = [sample.score.value for sample in samples if sample.score is not None]
    return TokenBatch(
        rows=rows,
        groups=len(groups),
        behaviour_N=torch.zeros(0, dtype=dtype, device=device) if behaviour_N is None else behaviour_N,
        sequence_N=sequence_N.to(device),
        lag_N=torch.from_numpy(trained - _concatenate([read_versions(sample) for sample in samples])).to(dtype),
        reward_S=torch.tensor(scores, dtype=dtype, device=device) if len(scores) == len(samples) else None,
        advantage_S=torch.tensor([sample.advantage for sample in samples], dtype=dtype, device=device),
        group_S=torch.tensor([row.group for row in rows], dtype=torch.long, device=device),
        proximal_N=packed(proximal, "proximal log-probabilities") if any(current) else None,
        unscored=tuple(row for row, scored in zip(rows, current, strict=True) if not scored),
        reference_N=packed(lambda sample: sample.ref_logps, "reference log-probabilities"),
        value_N=packed(lambda sample: sample.values, "values"),
        domain_S=torch.tensor([numbers[domain] for domain in domains], dtype=torch.long, device=device),
        steps=_make_turn_rewards(samples, [row.group for row in rows], dtype, device),
        mask_N=trained_S[sequence_N].to(device),
        by_turn=selection.by_turn,
        part_PS=torch.tensor(_read_parts(samples, parts), dtype=dtype, device=device) if parts else None,
        correct_S=None if accuracy is None else torch.tensor(_read_accuracy(samples, accuracy), device=device),
        weight_S=None if weights is None else torch.tensor(weights, dtype=dtype, device=device),
    )


def _read_parts(samples: Sequence[Sample], names: Sequence[str]) -> list[list[float]]:
    """Return the named parts of all scores; a part of one reward may be given without the name of that reward."""
    rows = []
    for name in names:
        row = []
        for sample in samples:
            found = _find_part(sample, name)
            if len(found) != 1:
                known = ", ".join(sorted(sample.score.parts if sample.score else ())) or "nothing"
                raise TrainerError(f"sample {sample.sample_id}: gdpo_parts names {name!r}, its reward has {known}")
            row += found
        rows.append(row)
    return rows


def _read_accuracy(samples: Sequence[Sample], name: str) -> list[bool]:
    """Return whose part `name` is 1; a reward without such a part is judged itself."""
    values = [_find_part(sample, name) or ([sample.score.value] if sample.score else []) for sample in samples]
    return [len(found) > 0 and all(abs(value - 1) < _NEARLY_ONE for value in found) for found in values]


def _find_part(sample: Sample, name: str) -> list[float]:
    parts = {} if sample.score is None else sample.score.parts
    return [value for key, value in parts.items() if key == name or key.endswith(f"/{name}")]


def _behaviour(sample: Sample) -> Sequence[float]:
    turns = sample.episode.turns
    return turns[0].generation.logps if len(turns) == 1 else [logp for turn in turns for logp in turn.generation.logps]


def _concatenate(parts: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)


def read_versions(sample: Sample) -> NDArray[np.int64]:
    """Return the policy version that made each action."""
    runs = sample.episode.runs
    versions = np.repeat([run.version for run in runs], [run.count for run in runs]).astype(np.int64)
    if len(versions) != sample.actions:
        raise TrainerError(f"sample {sample.sample_id}: {len(versions)} versions for {sample.actions} actions")
    return versions


def read_per_action(
    samples: Sequence[Sample], read: Callable[[Sample], Sequence[float] | None], name: str
) -> list[NDArray[np.float64]] | None:
    """Return one number per action of each sample, or None unless every sample has them."""
    numbers: list[NDArray[np.float64]] = []
    for sample in samples:
        found = read(sample)
        if found is None:
            return None
        values = np.asarray(found, dtype=np.float64)
        if len(values) != sample.actions:
            raise TrainerError(f"sample {sample.sample_id}: {len(values)} {name} for {sample.actions} actions")
        if not np.isfinite(values).all():
            raise TrainerError(f"sample {sample.sample_id}: {name} that are not finite")
        numbers.append(values)
    return numbers


def _make_turn_rewards(
    samples: Sequence[Sample], groups: Sequence[int], dtype: torch.dtype, device: str
) -> TurnRewards:
    """Return the turns. What a score says beyond the rewards of the turns goes to the last one, so that both agree."""
    lengths_K: list[int] = []
    sample_K: list[int] = []
    reward_K: list[float] = []
    states: dict[tuple[int, str | bytes], int] = {}
    state_K: list[int] = []
    for number, sample in enumerate(samples):
        turns = sample.episode.turns
        for turn in turns:
            lengths_K.append(len(turn.generation.actions))
            sample_K.append(number)
            reward_K.append(turn.reward)
            state = (groups[number], turn.state or np.asarray(turn.observation, dtype=np.int64).tobytes())
            state_K.append(states.setdefault(state, len(states)))
        if sample.score is not None:
            reward_K[-1] += sample.score.value - sum(turn.reward for turn in turns)
    return TurnRewards(
        step_N=torch.from_numpy(np.arange(len(lengths_K)).repeat(lengths_K)).to(device),
        sample_K=torch.tensor(sample_K, dtype=torch.long, device=device),
        reward_K=torch.tensor(reward_K, dtype=dtype, device=device),
        state_K=torch.tensor(state_K, dtype=torch.long, device=device),
    )
