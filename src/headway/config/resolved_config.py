"""The result of loading: the complete tree, derived values, where each value came from, and notes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
from typing import Any, Literal

from headway.config.document import nest_values
from headway.config.schema import Config
from headway.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class DerivedConfig:
    """Values that follow from the configuration, for scheduler, simulator and planner."""

    pipeline: Literal["rlvr", "agentic", "denoising"]
    """Agentic when `train_env_manager` is given, denoising when `denoising` is."""
    async_generation_ratio: float
    """α."""
    bound: int
    """⌈α⌉: most versions a sample may be behind when it is trained."""
    pipeline_depth: float
    """Steps' worth of groups started ahead."""
    slots: int
    """⌊(1 + pipeline_depth)·B⌋: groups that may be outstanding."""
    groups_per_step: int
    """B."""
    group_size: int
    """Members of a group that are trained."""
    members_started: int
    """Members of a group that are started: redundant ones included."""
    additional_groups: int
    """Redundant prompts."""
    samples_per_step: int
    """B · group_size."""
    staleness_window: int
    """Groups that the `window` policy looks ahead."""
    prompt_length: int
    """Longest prompt."""
    response_length: int
    """Longest response, all turns together."""
    sequence_length: int
    """Longest sample."""
    max_new_tokens: int
    """Longest answer of one turn."""
    devices: Mapping[str, tuple[int, ...]]
    """Devices of actor_train, logp, reference, critic, actor_infer, and of rewards.<domain> that have any."""
    hybrid_engine: bool
    """actor_train and actor_infer share devices."""
    num_nodes: int
    """Nodes that the devices are on."""
    num_gpus_per_node: int
    """Devices of a node."""
    replicas: int
    """Engine replicas: devices of actor_infer, for servers / (tensor · pipeline parallel)."""
    data_parallel: int
    """Devices of actor_train / (tensor · pipeline · context parallel)."""
    mini_batch_samples: int
    """Samples of one optimizer step."""
    optimizer_steps: int
    """Optimizer steps of one training step, all epochs."""
    strategies: Mapping[str, str]
    """Back end used, by role."""
    filter_zero_variance: bool
    """`filter_zero_variance`, but never for groups of one."""
    norm_mean_type: Literal["group", "batch", "domain", "none"]
    """What rewards are centred on."""
    norm_std_type: Literal["group", "batch", "domain", "none"]
    """What rewards are scaled by."""
    pg_clip_low: float
    """ε below 1."""
    pg_clip_high: float
    """ε above 1."""
    needs_reference: bool
    """A KL asks for the reference model."""
    needs_critic: bool
    """The estimator asks for values."""
    needs_proximal: bool
    """The loss asks for log-probabilities under the weights at the start of the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedConfig:
    """A configuration that can run."""

    config: Config
    """The tree; whatever was null and could be derived is filled in."""
    derived: DerivedConfig
    """What follows from it."""
    provenance: Mapping[str, str]
    """Dotted key of every leaf → `default`, `file.yaml:12`, `override`, `translated from …`, `derived: …`."""
    notes: tuple[str, ...] = ()
    """One line each: keys that change nothing here, back ends that stand in for others."""

    def rows(self) -> list[tuple[str, Any, str]]:
        """Return key, value and origin of every leaf, in the order of the schema."""
        return [(key, value, self.provenance.get(key, "default")) for key, value in list_leaves(self.config)]

    def changed(self) -> dict[str, Any]:
        """Return every leaf that differs from an empty configuration: enough to load the same one again.

        A derived `hybrid_engine` is left out, because a given `false` would separate devices that are shared, and so
        are steps that `max_epochs` decides.
        """
        return self._fold_names(self._list_changed())

    def given(self) -> dict[str, Any]:
        """Return the same without derived leaves, so that they are derived anew when it is loaded with other overrides.

        Leaves that were translated from a key of another framework count as given.
        """
        return self._fold_names(self.list_given())

    def list_given(self) -> dict[str, Any]:
        """Return the same by the dotted key of each leaf; `split_key` splits it where names have dots themselves."""
        derived = {
            key
            for key, origin in self.provenance.items()
            if origin.startswith("derived: ") and not origin.startswith("derived: translated from ")
        }
        return {key: value for key, value in self._list_changed().items() if key not in derived}

    def _list_changed(self) -> dict[str, Any]:
        usual = dict(list_leaves(Config()))
        return {
            key: to_plain_value(value)
            for key, value, origin in self.rows()
            if (origin != "default" or key not in usual)
            and not (key in ("hybrid_engine", "max_steps") and origin.startswith("derived: "))
        }

    def _fold_names(self, flat: dict[str, Any]) -> dict[str, Any]:
        """Return sections with dots in their names as one value each, since a dotted key could not be read again."""
        for root in ("rewards", "custom_envs"):
            if any("." in name for name in getattr(self.config, root)):
                below = {key: value for key, value in flat.items() if key.startswith(f"{root}.")}
                flat = {key: value for key, value in flat.items() if key not in below}
                parts = {tuple(split_key(self.config, key)[1:]): value for key, value in below.items()}
                flat[root] = nest_values(parts)
        return flat


def list_leaves(block: Any, prefix: str = "") -> list[tuple[str, Any]]:
    """Return dotted keys and values below a dataclass."""
    found: list[tuple[str, Any]] = []
    for item in fields(block):
        key, value = prefix + item.name, getattr(block, item.name)
        if is_dataclass(value):
            found += list_leaves(value, f"{key}.")
        elif isinstance(value, Mapping) and value and all(is_dataclass(child) for child in value.values()):
            for name, child in value.items():
                found += list_leaves(child, f"{key}.{name}.")
        else:
            found.append((key, value))
    return found


def to_plain_value(value: Any) -> Any:
    """Return a leaf as JSON and YAML can hold it."""
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if isinstance(value, list | tuple):
        return [to_plain_value(item) for item in value]
    return value


class ConfigDraft:
    """A configuration while values are derived: keeps the reason of each, and collects notes and problems."""

    def __init__(
        self, config: Config, provenance: Mapping[str, str], notes: list[str], dialect: str | None = None
    ) -> None:
        self.config = config
        self.dialect = dialect
        """Project that the configuration was written for; None for one of our own."""
        self.provenance = dict(provenance)
        self.notes = notes
        self.problems: list[ConfigError] = []

    def given(self, key: str) -> bool:
        """Return whether the user gave this leaf a value other than null."""
        return key in self.provenance and get_at_key(self.config, key) is not None

    def derive(self, key: str, value: Any, reason: str) -> None:
        """Set a leaf that the user did not give."""
        self.config = replace_at_key(self.config, split_key(self.config, key), value)
        self.provenance[key] = f"derived: {reason}"

    def refuse(self, key: str, problem: str, hint: str = "") -> None:
        """Add a problem with the value at `key`; the message shows both."""
        self.problems.append(ConfigError(problem, key=key, value=get_at_key(self.config, key), hint=hint))


def split_key(block: Any, key: str) -> list[str]:
    """Return the parts of a dotted key; a name that the user chose for a section may have dots itself."""
    parts: list[str] = []
    while key:
        names = block if isinstance(block, Mapping) else ()
        fitting = [name for name in names if f"{key}.".startswith(f"{name}.")]
        name = max(fitting, key=len, default=key.partition(".")[0])
        parts.append(name)
        block = block[name] if isinstance(block, Mapping) and fitting else getattr(block, name, None)
        key = key[len(name) + 1 :]
    return parts


def get_at_key(block: Any, key: str) -> Any:
    """Return the value at a dotted key."""
    for name in split_key(block, key):
        block = block[name] if isinstance(block, Mapping) else getattr(block, name)
    return block


def replace_at_key(block: Any, names: list[str], value: Any) -> Any:
    """Return `block` with the value at the path `names` replaced."""
    name, *rest = names
    old = block[name] if isinstance(block, Mapping) else getattr(block, name)
    new = replace_at_key(old, rest, value) if rest else value
    return {**block, name: new} if isinstance(block, Mapping) else dataclasses.replace(block, **{name: new})
