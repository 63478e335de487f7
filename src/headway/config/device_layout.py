"""Places roles on devices, and cuts a training step into optimizer steps, micro-batches and devices.

Devices come from `device_mapping`, else from `use_nodes_ratios`. Roles without either: logp, reference and critic run
where actor_train does; actor_infer shares its devices if the engine is hybrid and takes the rest if not. A single
device is always shared, in turns if the engine is hybrid, else side by side.

    samples per step = optimizer steps × per_device_train_batch_size × gradient_accumulation_steps × data parallel
    data parallel    = devices of actor_train / (tensor · pipeline · context parallel)
    replicas         = devices of actor_infer, for servers / (tensor · pipeline parallel)

Batches that do not divide are refused. Parallel sizes of actor_train that do not divide its devices are not used.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headway.config.document import ConfigEntry
from headway.config.resolved_config import ConfigDraft
from headway.config.strategies import uses_server
from headway.errors import ConfigError

DeviceIds = tuple[int, ...]
RATIO_ROLES = ("actor_train", "logp", "reference", "actor_infer")
"""Roles in the order of `use_nodes_ratios`: train, logp, ref_logp, generate."""
_MAPPED = ("actor_train", "actor_infer", "reference", "critic")


def place_roles(draft: ConfigDraft) -> dict[str, DeviceIds]:
    """Return the devices of each role, and derive num_gpus_per_node, num_nodes and hybrid_engine."""
    given = {role: getattr(draft.config, role).device_mapping for role in _MAPPED}
    mapped = {role: devices for role, devices in given.items() if devices is not None}
    for domain, reward in draft.config.rewards.items():
        if reward.device_mapping:
            mapped[f"rewards.{domain}"] = reward.device_mapping
    _derive_device_kind(draft)
    total = _count_devices(draft, mapped)
    problems = len(draft.problems)
    placed = {**_place_by_ratio(draft, total), **mapped}
    _place_actors(draft, placed, total)
    for role in ("logp", "reference", "critic"):
        placed.setdefault(role, placed["actor_train"])
    if len(draft.problems) > problems:
        return placed
    for role in _MAPPED:
        if not placed[role]:
            draft.refuse(f"{role}.device_mapping", "is an empty pool: 0 devices", "name at least one device")
    _derive_hybrid(draft, placed)
    return placed


def _derive_device_kind(draft: ConfigDraft) -> None:
    """Bring `device`, the short form, and `devices` together."""
    devices = draft.config.devices
    if devices.kind != "auto" and draft.config.device == "auto":
        draft.derive("device", devices.kind, "devices.kind")
    elif devices.kind not in ("auto", draft.config.device):
        draft.refuse("devices.kind", f"but device = {draft.config.device}", "keep one of them")
    shared = devices.physical or 0
    if shared > (devices.count or shared) and draft.config.device != "cpu":  # a device may have several cores
        draft.refuse("devices.physical", f"more cards than the {devices.count} devices of devices.count have work for")


def _count_devices(draft: ConfigDraft, mapped: dict[str, DeviceIds]) -> int:
    """Return the number of all devices of the run."""
    config = draft.config
    decoupled = config.hybrid_engine is False or config.use_nodes_ratios is not None
    highest = max((device for devices in mapped.values() for device in devices), default=-1)
    count = config.devices.count
    if config.num_gpus_per_node is None and count is not None:
        draft.derive("num_gpus_per_node", count, "devices.count")
    elif config.num_gpus_per_node is None:
        silent = not mapped and not decoupled and config.num_nodes is None
        reason = "nothing is said about devices" if silent else "usual size of a node"
        draft.derive("num_gpus_per_node", 1 if silent else 8, reason)
    per_node = draft.config.num_gpus_per_node or 1
    if count is not None and per_node > count:
        draft.refuse("devices.count", f"but num_gpus_per_node = {per_node}", "keep one of them, or as many of both")
    if config.num_nodes is None:
        nodes = max(1, -(-(highest + 1) // per_node))
        draft.derive("num_nodes", nodes, f"highest device {highest}, {per_node} per node" if mapped else "one node")
    total = per_node * (draft.config.num_nodes or 1)
    if highest >= total:
        hint = f"{draft.config.num_nodes} nodes × {per_node} devices = {total}, numbered from 0"
        draft.refuse("num_nodes", f"device {highest} is used but there are only {total}", hint)
    return total


def _place_by_ratio(draft: ConfigDraft, total: int) -> dict[str, DeviceIds]:
    """Place roles by their shares: separately if the shares add up to at most 1, else the first three share devices."""
    ratios, key = draft.config.use_nodes_ratios, "use_nodes_ratios"
    if ratios is None:
        return {}
    if len(ratios) != len(RATIO_ROLES):
        draft.refuse(key, f"has {len(ratios)} shares", "four are needed: [train, logp, ref_logp, generate]")
        return {}
    placed = divide_by_ratio(ratios, total)
    for role, ratio in zip(RATIO_ROLES, ratios, strict=True):
        if not placed[role]:
            draft.refuse(key, f"{role} gets {ratio:g} × {total} = {ratio * total:g} devices, an empty pool")
    generate, trainers = placed["actor_infer"], max(len(placed[role]) for role in RATIO_ROLES[:3])
    if trainers + len(generate) > total and not draft.config.hybrid_engine:
        hint = "lower the shares, or hybrid_engine: true to let them share"
        draft.refuse(key, f"{trainers} devices for training + {len(generate)} for generate > {total}", hint)
    return placed


def divide_by_ratio(ratios: Sequence[float], total: int) -> dict[str, DeviceIds]:
    """Return the devices of the four shares: one after the other if there are enough, else the first three together."""
    counts = [int(ratio * total + 1e-6) for ratio in ratios]
    if sum(counts) <= total:
        ends = [sum(counts[: i + 1]) for i in range(4)]
        return {role: tuple(range(e - n, e)) for role, e, n in zip(RATIO_ROLES, ends, counts, strict=True)}
    placed = {role: tuple(range(n)) for role, n in zip(RATIO_ROLES, counts, strict=True)}
    placed["actor_infer"] = tuple(range(total - counts[3], total))
    return placed


def _place_actors(draft: ConfigDraft, placed: dict[str, DeviceIds], total: int) -> None:
    """Place actor_train and actor_infer if nothing has placed them yet."""
    everything = tuple(range(total))
    shared = draft.config.hybrid_engine is not False or total == 1
    if "actor_train" not in placed and "actor_infer" not in placed:
        half = max(1, total // 2)
        placed["actor_train"] = everything if shared else everything[:half]
        placed["actor_infer"] = everything if shared else everything[half:]
    for role, other in (("actor_train", "actor_infer"), ("actor_infer", "actor_train")):
        if role not in placed:
            alone = draft.config.hybrid_engine is None and draft.config.async_generation_ratio == 0
            rest = tuple(device for device in everything if device not in placed[other])
            placed[role] = placed[other] if draft.config.hybrid_engine or alone else rest


def _derive_hybrid(draft: ConfigDraft, placed: dict[str, DeviceIds]) -> None:
    train, infer = set(placed["actor_train"]), set(placed["actor_infer"])
    mapped = any(getattr(draft.config, role).device_mapping is not None for role in ("actor_train", "actor_infer"))
    if draft.config.hybrid_engine is None:
        if not train & infer:
            draft.derive("hybrid_engine", False, "actor_train and actor_infer have devices of their own")
        elif train == infer and draft.config.async_generation_ratio == 0:
            draft.derive("hybrid_engine", True, "actor_train and actor_infer have the same devices")
        elif draft.config.async_generation_ratio == 0:
            draft.derive("hybrid_engine", True, "actor_train and actor_infer share devices, and α is 0")
        elif train == infer and not mapped:
            draft.derive("hybrid_engine", False, "rollout runs ahead, beside training on the same devices")
        else:
            _refuse_overlap(draft, train, infer)
    elif not draft.config.hybrid_engine and train & infer and (mapped or len(train | infer) > 1):
        _refuse_overlap(draft, train, infer)


def _refuse_overlap(draft: ConfigDraft, train: set[int], infer: set[int]) -> None:
    both = sorted(train & infer)
    draft.refuse(
        "actor_infer.device_mapping",
        f"devices {both} are also in actor_train.device_mapping = {sorted(train)}",
        "give each role its own devices, or hybrid_engine: true to let them share; "
        "identical devices need no hybrid_engine when async_generation_ratio is 0",
    )


_ACCUMULATION = "actor_train.training_args.gradient_accumulation_steps"
_SIZES = {
    "tensor": "tensor_model_parallel_size",
    "pipeline": "pipeline_model_parallel_size",
    "context": "context_parallel_size",
}
_MINI_BATCH = "actor_rollout_ref.actor.ppo_mini_batch_size"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSizes:
    """Groups that one training step consumes."""

    per_step: int
    size: int
    members_started: int
    additional: int

    @property
    def samples(self) -> int:
        """Return the samples of one training step."""
        return self.per_step * self.size


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSizes:
    """How one training step is cut into optimizer steps on its devices."""

    data_parallel: int
    replicas: int
    mini_batch_samples: int
    optimizer_steps: int


def compute_step_sizes(
    draft: ConfigDraft, devices: Mapping[str, tuple[int, ...]], groups: GroupSizes, mini_batch: ConfigEntry | None
) -> StepSizes:
    """Compute the sizes of one step, and derive gradient_accumulation_steps if it is not given.

    `mini_batch` is the size of an optimizer step in prompts, as verl's key gives it.
    """
    training = draft.config.actor_train.training_args
    ways = _count_trainer_copies(draft, len(devices["actor_train"]))
    replicas = _count_replicas(draft, len(devices["actor_infer"]))
    micro = _fit_micro_batch(draft, groups, mini_batch, ways)
    if training.gradient_accumulation_steps is None:
        samples, reason = groups.samples, f"{groups.samples} samples / ({micro} per device × {ways} data parallel)"
        if mini_batch is not None:
            samples, reason = _convert_mini_batch(draft, mini_batch, groups, micro * ways)
        draft.derive(_ACCUMULATION, max(1, samples // (micro * ways)), reason)
    accumulation = _fit_accumulation(draft, groups.samples, micro * ways)
    one_step = micro * accumulation * ways
    if groups.samples % one_step:
        batch = f"{groups.per_step} groups × {groups.size} members = {groups.samples} samples"
        factors = f"{micro} per device × {accumulation} accumulation × {ways} data parallel = {one_step}"
        hint = "change the batch, per_device_train_batch_size or gradient_accumulation_steps of actor_train"
        draft.refuse("rollout_batch_size", f"batch not divisible: {batch}, one optimizer step takes {factors}", hint)
    return StepSizes(
        data_parallel=ways,
        replicas=replicas,
        mini_batch_samples=one_step,
        optimizer_steps=max(1, groups.samples // one_step) * draft.config.ppo_epochs,
    )


def _fit_micro_batch(draft: ConfigDraft, groups: GroupSizes, mini_batch: ConfigEntry | None, ways: int) -> int:
    """Return the samples of a micro-batch: for verl, which has uneven ones, the largest number that divides."""
    key = "actor_train.training_args.per_device_train_batch_size"
    given = draft.config.actor_train.training_args.per_device_train_batch_size
    prompts = mini_batch.value if mini_batch is not None else groups.per_step
    share, rest = divmod(prompts * groups.size, ways) if isinstance(prompts, int) else (0, 1)
    if draft.dialect not in ("verl", "gerl") or rest or share < 1 or share % given == 0:
        return given
    micro = max(size for size in range(1, min(given, share) + 1) if share % size == 0)
    source = "translated from ppo_micro_batch_size_per_gpu"
    draft.derive(key, micro, f"{source}: {given} does not divide the {share} samples of a device")
    return micro


def _fit_accumulation(draft: ConfigDraft, samples: int, unit: int) -> int:
    """Return gradient_accumulation_steps, lowered to the batch in a file of ROLL, which adjusts batches instead."""
    given = draft.config.actor_train.training_args.gradient_accumulation_steps or 1
    if draft.dialect != "roll" or samples % unit or given * unit <= samples:
        return given
    fitting = samples // unit
    draft.derive(_ACCUMULATION, fitting, f"{given} × {unit} samples are more than the batch of {samples}")
    draft.notes.append(f"{_ACCUMULATION}: {given} is more than a batch of {samples} samples has; {fitting} is used")
    return fitting


def _count_trainer_copies(draft: ConfigDraft, count: int) -> int:
    """Return how many shares a batch has. Sizes that do not divide the devices are not used, and each has a share."""
    sizes = draft.config.actor_train.strategy_args.strategy_config
    one = math.prod(int(getattr(sizes, name)) for name in _SIZES.values())
    return max(1, count // one) if count % one == 0 or count < one else count


def _count_replicas(draft: ConfigDraft, count: int) -> int:
    """Return how many engines there are: servers share a model among devices, an engine of ours has one device."""
    sizes, key = draft.config.actor_infer.strategy_args.strategy_config, "actor_infer.strategy_args.strategy_config"
    factors = {name: int(getattr(sizes, _SIZES[name])) for name in ("tensor", "pipeline")}
    one, largest = math.prod(factors.values()), max(factors, key=lambda name: factors[name])
    if one == 1:
        return count
    if not uses_server(sizes):
        draft.notes.append(
            f"{key}.{_SIZES[largest]} = {factors[largest]}: has no effect on engines of our own, each of which holds "
            f"the whole model on one device: {count} engines; vllm and sglang with launch: true share a model"
        )
        return count
    if count % one:
        product = " × ".join(f"{name} {size}" for name, size in factors.items())
        problem = f"{count} devices are not whole copies of the model, one copy takes {product} = {one}"
        hint = f"1, or a multiple of {one} devices in actor_infer.device_mapping"
        draft.refuse(f"{key}.{_SIZES[largest]}", problem, hint)
    return max(1, count // one)


def _convert_mini_batch(draft: ConfigDraft, mini_batch: ConfigEntry, groups: GroupSizes, unit: int) -> tuple[int, str]:
    """Return the samples of an optimizer step that is given in prompts, and where they come from."""
    prompts = mini_batch.value
    if isinstance(prompts, bool) or not isinstance(prompts, int) or prompts < 1:
        problem = f"is not a count of prompts [{mini_batch.origin}]"
        draft.problems.append(ConfigError(problem, key=_MINI_BATCH, value=prompts, hint="expected an integer ≥ 1"))
        return groups.samples, "the whole batch"
    samples = prompts * groups.size
    if samples % unit:
        problem = f"{prompts} prompts × {groups.size} members = {samples} samples, not divisible by {unit}"
        hint = f"micro-batch × data parallel = {unit}"
        draft.problems.append(ConfigError(problem, key=_MINI_BATCH, value=prompts, hint=hint))
    return samples, f"translated from {_MINI_BATCH} ({mini_batch.origin})"
