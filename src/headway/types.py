"""The records that travel through the pipeline. Each field is filled at exactly one stage.

    Task → Turn* → Episode → EpisodeGroup → Sample → SampleGroup → Batch → Snapshot

An *action* is a token or a denoising step: both carry a behaviour log-probability, a mask bit and the policy
version that made them, so that language and denoising models share the whole pipeline.

Records are frozen; a later stage fills its fields by `dataclasses.replace`. Sequences have whatever type is cheap for
the back end (tuple, array, numpy, range): readers may only index, slice and take `len`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any


class DropReason(StrEnum):
    """Why a started sample was not trained. Drops are counted by reason."""

    STALE_IN_FLIGHT = "stale_in_flight"
    """The staleness bound passed while the sample was still being generated."""
    STALE_IN_QUEUE = "stale_in_queue"
    """The sample was finished, but the staleness bound passed while it waited."""
    SURPLUS_MEMBER = "surplus_member"
    """A redundant member of a group that filled without it."""
    SURPLUS_GROUP = "surplus_group"
    """A redundant prompt of a batch that filled without it."""
    ZERO_VARIANCE = "zero_variance"
    """All rewards of the group are equal, so that it has no gradient."""
    FILTERED = "filtered"
    """A stage of a plugin dropped it, or `query_filter_config` rejected its rewards."""
    ENGINE_FAILED = "engine_failed"
    ENVIRONMENT_FAILED = "environment_failed"
    REWARD_FAILED = "reward_failed"
    SCORING_FAILED = "scoring_failed"
    GROUP_FAILED = "group_failed"
    """Another member of the group failed finally, and groups are trained whole."""
    LOST_LINEAGE = "lost_lineage"
    """The sample was made by weights that a crash undid, and is too far from those that are left."""
    DAMAGED_RECORD = "damaged_record"
    """What the ledger had stored of it was damaged on the disk."""

    @property
    def regenerates(self) -> bool:
        """Return whether the prompt goes back to the queue, because the drop was not its fault."""
        return self in _REGENERATING


_REGENERATING = frozenset(
    {
        DropReason.STALE_IN_FLIGHT,
        DropReason.STALE_IN_QUEUE,
        DropReason.SURPLUS_GROUP,
        DropReason.LOST_LINEAGE,
        DropReason.DAMAGED_RECORD,
    }
)


class FinishReason(StrEnum):
    """How a generation ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionRun:
    """Consecutive actions that were made by one policy version."""

    version: int
    count: int


def extend_runs(runs: tuple[VersionRun, ...], version: int, count: int) -> tuple[VersionRun, ...]:
    """Return `runs` with `count` more actions of `version`, merged with the last run if it has the same version."""
    if count <= 0:
        return runs
    if runs and runs[-1].version == version:
        return (*runs[:-1], VersionRun(version=version, count=runs[-1].count + count))
    return (*runs, VersionRun(version=version, count=count))


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One prompt, or one starting state of an environment."""

    position: int
    """Position in the data source; the ledger's cursor. Filled by the dataloader."""
    domain: str = "default"
    """Selects the environment and the rewards. Filled by the dataloader."""
    prompt: Sequence[int] = ()
    """Prompt actions (token ids). Filled by the dataloader, or by the environment's first observation."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """Data for the reward or the environment: answer, seed, tests. JSON values only. Filled by the dataloader."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How actions are drawn. Log-probabilities are reported after the temperature."""

    max_new_tokens: int = 1024
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    guidance: float = 1.0
    """Guidance of denoising, whose steps `max_new_tokens` counts; a temperature of 0 draws no noise there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """An image. Filled by the engine, with the last step of a generation."""

    height: int
    width: int
    pixels: bytes = field(repr=False)
    """Red, green and blue, one byte each; row by row from the top."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DenoisingStep:
    """One denoising step as an action. It holds latents only if it is trained.

    Latents are float32, little-endian, in the shape of the model. A step without them follows from the step before and
    can be computed again.
    """

    trained: bool = False
    """The mask: noise was drawn, because the step is inside the window. Steps outside have no gradient."""
    before: bytes = field(default=b"", repr=False)
    """Latents before the step. Empty: those at the end of the action before."""
    after: bytes = field(default=b"", repr=False)
    """Latents after the step."""
    image: Image | None = None
    """The finished image, in the last step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertRouting:
    """The experts that a mixture chose for consecutive tokens of prompt and actions. Filled by the engine."""

    start: int
    """Index of the first of these tokens in prompt and actions."""
    layers: int
    experts: int
    """Experts of a token in each layer."""
    width: int
    """Bytes of the number of an expert, little-endian; all bits set means that it is not known."""
    data: bytes = field(repr=False)
    """Tokens × layers × experts: 384 bytes a token for 48 layers, 8 experts a token and up to 254 in all."""

    def __len__(self) -> int:
        """Return the number of tokens."""
        return len(self.data) // (self.layers * self.experts * self.width)


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """Result of one request, partial or whole. Filled by `generate`."""

    actions: Sequence[Any]
    logps: Sequence[float]
    """Behaviour log-probability of each action."""
    runs: tuple[VersionRun, ...]
    """Policy versions that made the actions; counts add up to `len(actions)`."""
    finish: FinishReason
    text: str = ""
    routing: ExpertRouting | None = None
    """Experts of the tokens that the trainer computes for this turn, if the model is a mixture and they are known."""

    @property
    def image(self) -> Image | None:
        """Return the image, if the generation is a finished one."""
        last = self.actions[-1] if len(self.actions) else None
        return last.image if isinstance(last, DenoisingStep) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One exchange of an episode: what the policy saw and what it did. Filled by `generate`."""

    observation: Sequence[int]
    """Tokens that come before the actions of this turn; never trained."""
    generation: Generation
    reward: float = 0.0
    """Reward the environment gave for this turn."""
    starts_new_context: bool = False
    """The context restarted with `observation`: the policy saw nothing of the turns before."""
    state: str = ""
    """Identifies the state of the environment: equal in turns with equal states. Empty: not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialGeneration(Generation):
    """The unfinished turn of an interrupted episode, and the turns before it. Filled by `generate`.

    If `finish` is not aborted, the turn is whole and only the environment has not answered yet.
    """

    before: tuple[Turn, ...] = ()
    """Whole turns from the start of the episode, each of which the environment has answered."""
    observation: Sequence[int] = ()
    """Tokens that come before this turn."""

    @classmethod
    def of(cls, made: Generation, *, before: tuple[Turn, ...], observation: Sequence[int]) -> PartialGeneration:
        """Make one from `made`, the answer to `observation` after the turns `before`."""
        values = {one.name: getattr(made, one.name) for one in fields(Generation)}
        return cls(**values, before=before, observation=observation)


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """One run of one agent from reset to done. Filled by `generate`."""

    sample_id: str
    task: Task
    turns: tuple[Turn, ...]
    truncated: bool = False
    """A limit of the run ended it, not the environment."""
    info: Mapping[str, Any] = field(default_factory=dict)
    """Facts from the environment for the reward. JSON values only."""

    @property
    def cut_off(self) -> bool:
        """Return whether a limit of the run ended it: `truncated`, or a single answer that ran out of tokens.

        In an episode of several turns a turn that ran out of tokens does not count: the environment answered it.
        """
        return self.truncated or (len(self.turns) == 1 and self.turns[0].generation.finish is FinishReason.LENGTH)

    @property
    def runs(self) -> tuple[VersionRun, ...]:
        """Return the version runs of all turns, in order."""
        if len(self.turns) == 1:
            return self.turns[0].generation.runs
        runs: tuple[VersionRun, ...] = ()
        for turn in self.turns:
            for run in turn.generation.runs:
                runs = extend_runs(runs, run.version, run.count)
        return runs


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeGroup:
    """All episodes of one prompt, in order of arrival. Filled by `generate`, consumed by `rollout`."""

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
    """Numbers of a group, one row for each sample, and the version of the weights that computed them."""

    rows: Sequence[Sequence[float]]
    version: int

    def __getitem__(self, index: Any) -> Any:
        return self.rows[index]

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One trajectory, ready to be scored and trained."""

    sample_id: str
    """Group, member and attempt; the ledger's key. Filled by `generate`."""
    episode: Episode
    """Filled by `rollout`."""
    oldest: int
    """Oldest policy version among its actions, which decides its freshness. Filled by `rollout`."""
    newest: int
    """Newest policy version among its actions. Filled by `rollout`."""
    actions: int
    """Number of trained actions. Filled by `rollout`."""
    logps: Sequence[float] | None = None
    """Log-probabilities under the proximal policy, if the loss needs them. Filled by `logp`."""
    logps_version: int | None = None
    """Version that computed `logps`; a step from another version computes them again. Filled by `logp`."""
    ref_logps: Sequence[float] | None = None
    """Log-probabilities under the reference model. Filled by `ref_logp`."""
    score: Score | None = None
    """Filled by `reward`."""
    advantage: float = 0.0
    """Group-relative advantage, broadcast over the actions unless the trainer refines it. Filled by `reward`."""
    values: Sequence[float] | None = None
    """Values that the critic estimated. Filled by `critic`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleGroup:
    """All members of one prompt. Groups are trained whole or not at all."""

    group_id: int
    task: Task
    samples: tuple[Sample, ...]
    """Filled by `rollout`, refined by every later stage."""

    @property
    def oldest(self) -> int:
        """Return the oldest policy version in the group."""
        return min(sample.oldest for sample in self.samples)

    @property
    def newest(self) -> int:
        """Return the newest policy version in the group."""
        return max(sample.newest for sample in self.samples)

    @property
    def actions(self) -> int:
        """Return the number of trained actions of all members."""
        return sum(sample.actions for sample in self.samples)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Groups that one training step consumes. Filled by `train`."""

    trained: int
    """Training steps done before this one, which makes version `trained + 1`."""
    groups: tuple[SampleGroup, ...]

    @property
    def actions(self) -> int:
        """Return the number of trained actions in the whole batch."""
        return sum(group.actions for group in self.groups)


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A version of the weights that exists on the trainer. Filled by `train`, consumed by `param_update`."""

    version: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the step that made it."""


class RepeatedValue(Sequence[Any]):
    """The same value `length` times in constant memory. Simulated engines fill records with it."""

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
    """Return two sequences joined. `RepeatedValue` stays compact; arrays, which `+` would add, become lists."""
    if not len(left):
        return right
    if type(left) is type(right) and isinstance(left, tuple | list | RepeatedValue):
        return left + right  # type: ignore[operator]
    return [*left, *right]
