"""Which role runs on which devices: from `device_mapping`, else from `use_nodes_ratios`, else shared.

Roles that are not given devices: logp, reference and critic go where actor_train is; actor_infer shares them when
the engine is hybrid and takes what is left over when it is not. A single device is always shared: in turns when the
engine is hybrid, else side by side.
"""

from __future__ import annotations

from headway.config.draft import Draft

Devices = tuple[int, ...]
RATIO_ROLES = ("actor_train", "logp", "reference", "actor_infer")
"""In the order of `use_nodes_ratios`: train, logp, ref_logp, generate."""
_MAPPED = ("actor_train", "actor_infer", "reference", "critic")


def place(draft: Draft) -> dict[str, Devices]:
    """Devices by role; also derives num_gpus_per_node, num_nodes and hybrid_engine."""
    given = {role: getattr(draft.config, role).device_mapping for role in _MAPPED}
    mapped = {role: devices for role, devices in given.items() if devices is not None}
    for domain, reward in draft.config.rewards.items():
        if reward.device_mapping:
            mapped[f"rewards.{domain}"] = reward.device_mapping
    total = _count(draft, mapped)
    problems = len(draft.problems)
    placed = {**_by_ratio(draft, total), **mapped}
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


def _count(draft: Draft, mapped: dict[str, Devices]) -> int:
    """All devices of the run."""
    config = draft.config
    decoupled = config.hybrid_engine is False or config.use_nodes_ratios is not None
    highest = max((device for devices in mapped.values() for device in devices), default=-1)
    if config.num_gpus_per_node is None:
        silent = not mapped and not decoupled and config.num_nodes is None
        reason = "nothing is said about devices" if silent else "usual size of a node"
        draft.derive("num_gpus_per_node", 1 if silent else 8, reason)
    per_node = draft.config.num_gpus_per_node or 1
    if config.num_nodes is None:
        nodes = max(1, -(-(highest + 1) // per_node))
        draft.derive("num_nodes", nodes, f"highest device {highest}, {per_node} per node" if mapped else "one node")
    total = per_node * (draft.config.num_nodes or 1)
    if highest >= total:
        hint = f"{draft.config.num_nodes} nodes × {per_node} devices = {total}, numbered from 0"
        draft.refuse("num_nodes", f"device {highest} is used but there are only {total}", hint)
    return total


def _by_ratio(draft: Draft, total: int) -> dict[str, Devices]:
    """Devices by share: disjoint where the shares add up to at most 1, else the first three share."""
    ratios, key = draft.config.use_nodes_ratios, "use_nodes_ratios"
    if ratios is None:
        return {}
    if len(ratios) != len(RATIO_ROLES):
        draft.refuse(key, f"has {len(ratios)} shares", "four are needed: [train, logp, ref_logp, generate]")
        return {}
    counts = [int(ratio * total + 1e-6) for ratio in ratios]
    for role, ratio, count in zip(RATIO_ROLES, ratios, counts, strict=True):
        if count == 0:
            draft.refuse(key, f"{role} gets {ratio:g} × {total} = {ratio * total:g} devices, an empty pool")
    train, logp, reference, generate = counts
    if sum(counts) <= total:
        ends = [sum(counts[: i + 1]) for i in range(4)]
        return {role: tuple(range(e - n, e)) for role, e, n in zip(RATIO_ROLES, ends, counts, strict=True)}
    trainers = max(train, logp, reference)
    if trainers + generate > total and not draft.config.hybrid_engine:
        hint = "lower the shares, or hybrid_engine: true to let them share"
        draft.refuse(key, f"{trainers} devices for training + {generate} for generate > {total}", hint)
    placed = {role: tuple(range(n)) for role, n in zip(RATIO_ROLES, counts, strict=True)}
    placed["actor_infer"] = tuple(range(total - generate, total))
    return placed


def _place_actors(draft: Draft, placed: dict[str, Devices], total: int) -> None:
    """Devices of actor_train and actor_infer where nothing has placed them yet."""
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


def _derive_hybrid(draft: Draft, placed: dict[str, Devices]) -> None:
    train, infer = set(placed["actor_train"]), set(placed["actor_infer"])
    mapped = any(getattr(draft.config, role).device_mapping is not None for role in ("actor_train", "actor_infer"))
    if draft.config.hybrid_engine is None:
        if not train & infer:
            draft.derive("hybrid_engine", False, "actor_train and actor_infer have devices of their own")
        elif train == infer and draft.config.async_generation_ratio == 0:
            draft.derive("hybrid_engine", True, "actor_train and actor_infer have the same devices")
        elif train == infer and not mapped:
            draft.derive("hybrid_engine", False, "rollout runs ahead, beside training on the same devices")
        else:
            _refuse_overlap(draft, train, infer)
    elif not draft.config.hybrid_engine and train & infer and (mapped or len(train | infer) > 1):
        _refuse_overlap(draft, train, infer)


def _refuse_overlap(draft: Draft, train: set[int], infer: set[int]) -> None:
    both = sorted(train & infer)
    draft.refuse(
        "actor_infer.device_mapping",
        f"devices {both} are also in actor_train.device_mapping = {sorted(train)}",
        "give each role its own devices, or hybrid_engine: true to let them share; "
        "identical devices need no hybrid_engine when async_generation_ratio is 0",
    )
