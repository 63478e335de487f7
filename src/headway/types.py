"""The records that travel down the line, each field filled at exactly one stage.

    Task → Turn* → Episode → EpisodeGroup → Sample → SampleGroup → Batch → Snapshot

An *action* is a token or a denoising step: both carry a behaviour log-probability, a mask bit and the policy
version that made them, so that language and image models share everything behind this module.

Records are frozen; a later stage fills its fields by `dataclasses.replace`. Sequences are whatever the back end
found cheap (tuple, array, numpy, range): readers may index, slice and take `len`, nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class DropReason(StrEnum):
    """Why a started sample was not trained. Every drop has one, and they are counted by it."""

    STALE_IN_FLIGHT = "stale_in_flight"
    """Could no longer be trained inside the bound while it was still being made."""
    STALE_IN_QUEUE = "stale_in_queue"
    """Finished, but waited in the line until the bound had passed."""
    SURPLUS_MEMBER = "surplus_member"
    """A redundant member of a group that filled without it."""
    SURPLUS_GROUP = "surplus_group"
    """A redundant prompt of a batch that filled without it."""
    ZERO_VARIANCE = "zero_variance"
    """All rewards of the group are equal: nothing to learn."""
    FILTERED = "filtered"
    """A stage of the user's own let it go."""
    ENGINE_FAILED = "engine_failed"
    ENVIRONMENT_FAILED = "environment_failed"
    REWARD_FAILED = "reward_failed"
    SCORING_FAILED = "scoring_failed"
    GROUP_FAILED = "group_failed"
    """A sibling failed for good, and groups stay whole."""
    LOST_LINEAGE = "lost_lineage"
    """Made by weights that a crash has undone, and too far from those that are left."""

    @property
    def regenerates(self) -> bool:
        """Whether the prompt goes back to the queue: it taught nothing through no fault of its own."""
        return self in _REGENERATING


_REGENERATING = frozenset(
    {
        DropReason.STALE_IN_FLIGHT,
        DropReason.STALE_IN_QUEUE,
        DropReason.SURPLUS_GROUP,
        DropReason.LOST_LINEAGE,
    }
)


class FinishReason(StrEnum):
    """How a generation ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionRun:
    """A stretch of consecutive actions made by one policy version."""

    version: int
    count: int


def extend_runs(runs: tuple[VersionRun, ...], version: int, count: int) -> tuple[VersionRun, ...]:
    """`runs` with `count` more actions of `version`, merged with the last stretch where it is the same."""
    if count <= 0:
        return runs
    if runs and runs[-1].version == version:
        return (*runs[:-1], VersionRun(version=version, count=runs[-1].count + count))
    return (*runs, VersionRun(version=version, count=count))


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One prompt, or one starting state of an environment."""

    position: int
    """Where the source gave it out; the ledger's cursor. Filled by the dataloader."""
    domain: str = "default"
    """Which environment and which rewards it goes to. Filled by the dataloader."""
    prompt: Sequence[int] = ()
    """Prompt actions (token ids). Filled by the dataloader, or by the environment's first observation."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """Whatever the reward or the environment needs: answer, seed, tests. JSON values only. Filled by the dataloader."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How actions are drawn; log-probabilities are reported after the temperature."""

    max_new_tokens: int = 1024
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    guidance: float = 1.0
    """Of denoising, whose steps `max_new_tokens` counts; a temperature of 0 draws no noise there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """A picture. Filled by the engine, with the last step of a generation."""

    height: int
    width: int
    pixels: bytes = field(repr=False)
    """Red, green, blue, a byte each; row by row from the top."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DenoisingStep:
    """One denoising step as an action. Latents are kept where they are trained, and nowhere else.

    They are float32, little-endian, in the shape that the model has. A step without them follows from the one before
    and can be made again.
    """

    trained: bool = False
    """The mask: it was drawn inside the window. Outside, a step follows from the one before and has no gradient."""
    before: bytes = field(default=b"", repr=False)
    """Where it started from; empty: where the action before it ended."""
    after: bytes = field(default=b"", repr=False)
    """Where it ended."""
    image: Image | None = None
    """What the last one shows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """What an engine made for one request, partial or whole. Filled by `generate`."""

    actions: Sequence[Any]
    logps: Sequence[float]
    """Behaviour log-probability of each action."""
    runs: tuple[VersionRun, ...]
    """Which policy version made which stretch; counts add up to `len(actions)`."""
    finish: FinishReason
    text: str = ""

    @property
    def image(self) -> Image | None:
        """What was made, where it is a picture and done."""
        last = self.actions[-1] if len(self.actions) else None
        return last.image if isinstance(last, DenoisingStep) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One exchange of an episode: what the policy saw and what it did. Filled by `generate`."""

    observation: Sequence[int]
    """Actions-to-condition-on appended before this turn's actions; never trained."""
    generation: Generation
    reward: float = 0.0
    """Reward the environment gave for this turn."""
    fresh: bool = False
    """The context began anew with `observation`: nothing of the turns before was seen when this one was made."""
    state: str = ""
    """Equal in turns that were made in equal states, whatever else their observations hold. Empty: not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialGeneration(Generation):
    """The turn that an interrupted episode was in, and the turns before it. Filled by `generate`.

    A `finish` other than aborted: the turn is whole, and only the environment has not answered yet.
    """

    before: tuple[Turn, ...] = ()
    """Whole turns from the beginning of the episode, each of which the environment has answered."""
    observation: Sequence[int] = ()
    """What this turn began with."""

    @classmethod
    def of(cls, made: Generation, *, before: tuple[Turn, ...], observation: Sequence[int]) -> PartialGeneration:
        """`made`, as the answer to `observation` after the turns `before`."""
        return cls(
            actions=made.actions,
            logps=made.logps,
            runs=made.runs,
            finish=made.finish,
            text=made.text,
            before=before,
            observation=observation,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """One run of one agent from reset to done. Filled by `generate`."""

    sample_id: str
    task: Task
    turns: tuple[Turn, ...]
    truncated: bool = False
    """Ended by a limit of ours, not by the environment."""
    info: Mapping[str, Any] = field(default_factory=dict)
    """What the environment wants the reward to know. JSON values only."""

    @property
    def cut_off(self) -> bool:
        """Whether a limit of ours ended it: `truncated`, or one answer that ran out of tokens.

        In an episode of several turns one that ran out of tokens is an action like others: the environment answered it.
        """
        return self.truncated or (len(self.turns) == 1 and self.turns[0].generation.finish is FinishReason.LENGTH)

    @property
    def runs(self) -> tuple[VersionRun, ...]:
        """Version stretches of all turns, in order."""
        if len(self.turns) == 1:
            return self.turns[0].generation.runs
        runs: tuple[VersionRun, ...] = ()
        for turn in self.turns:
            for run in turn.generation.runs:
                runs = extend_runs(runs, run.version, run.count)
        return runs


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeGroup:
    """All episodes of one prompt, as they came in. Filled by `generate`, consumed by `rollout`."""

    group_id: int
    task: Task
    episodes: tuple[Episode, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """One verdict on one sample. Filled by `reward`."""

    value: float
    parts: Mapping[str, float] = field(default_factory=dict)
    """The weighted rewards that `value` is made of, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionedScores(Sequence[Sequence[float]]):
    """Numbers of a group, a row for each sample, that know the weights they were made with. Filled by who has them."""

    rows: Sequence[Sequence[float]]
    version: int

    def __getitem__(self, index: Any) -> Any:
        return self.rows[index]

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One trajectory, ready to be judged and trained."""

    sample_id: str
    """Group, member and attempt; the ledger's key. Filled by `generate`."""
    episode: Episode
    """Filled by `rollout`."""
    oldest: int
    """Oldest policy version among its actions: what freshness is judged by. Filled by `rollout`."""
    newest: int
    """Newest policy version among its actions. Filled by `rollout`."""
    actions: int
    """How many trained actions it has. Filled by `rollout`."""
    logps: Sequence[float] | None = None
    """Under the proximal policy, where a loss asks for it. Filled by `logp`."""
    logps_version: int | None = None
    """The weights that `logps` were made with; a step that begins with others makes them anew. Filled by `logp`."""
    ref_logps: Sequence[float] | None = None
    """Under the reference model. Filled by `ref_logp`."""
    score: Score | None = None
    """Filled by `reward`."""
    advantage: float = 0.0
    """Group-relative advantage, broadcast over the actions unless the trainer refines it. Filled by `reward`."""
    values: Sequence[float] | None = None
    """What the critic expected when the sample passed it. Filled by `critic`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleGroup:
    """All members of one prompt. Groups are trained whole or not at all."""

    group_id: int
    task: Task
    samples: tuple[Sample, ...]
    """Filled by `rollout`, refined by every later stage."""

    @property
    def oldest(self) -> int:
        """Oldest policy version in the group."""
        return min(sample.oldest for sample in self.samples)

    @property
    def newest(self) -> int:
        """Newest policy version in the group."""
        return max(sample.newest for sample in self.samples)

    @property
    def actions(self) -> int:
        """Trained actions of all members."""
        return sum(sample.actions for sample in self.samples)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What one training step consumes. Filled by `train`."""

    trained: int
    """Optimizer updates done before this step; the step makes `trained + 1`."""
    groups: tuple[SampleGroup, ...]

    @property
    def actions(self) -> int:
        """Trained actions in the whole batch."""
        return sum(group.actions for group in self.groups)


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A version of the weights that exists on the trainer. Filled by `train`, consumed by `param_update`."""

    version: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    """What the trainer reported about the step that made it."""


class RepeatedValue(Sequence[Any]):
    """`length` times the same value, in constant memory: what simulated engines fill records with."""

    __slots__ = ("length", "value")

    def __init__(self, value: Any, length: int) -> None:
        self.value = value
        self.length = max(length, 0)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return RepeatedValue(self.value, len(range(*index.indices(self.length))))
        if not -self.length <= index < self.length:
            raise IndexError(index)
        return self.value

    def __add__(self, other: object) -> Sequence[Any]:
        if not isinstance(other, RepeatedValue):
            return NotImplemented
        if not self.length or not other.length or self.value == other.value:
            return RepeatedValue(other.value if other.length else self.value, self.length + other.length)
        return [*self, *other]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RepeatedValue) and (self.value, self.length) == (other.value, other.length)

    def __hash__(self) -> int:
        return hash((self.value, self.length))

    def __repr__(self) -> str:
        return f"Repeated({self.value!r}, {self.length})"


def concatenate_actions(left: Sequence[Any], right: Sequence[Any]) -> Sequence[Any]:
    """Two stretches in order. `RepeatedValue` stays compact; arrays, which add element by element, become lists."""
    if not len(left):
        return right
    if type(left) is type(right) and isinstance(left, tuple | list | RepeatedValue):
        return left + right  # type: ignore[operator]
    return [*left, *right]
