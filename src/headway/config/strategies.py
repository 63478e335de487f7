"""Names of back ends, and which of them stands in for one that this build does not have.

A stand-in is used only where it does the same work; one note says so. Unknown names are errors.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from difflib import get_close_matches
from types import MappingProxyType

from headway.errors import ConfigError

BUILT_IN = frozenset({"fsdp2_train", "native"})
"""Back ends that come with Headway."""

_TRAIN = MappingProxyType(
    {"fsdp2_train": "fsdp2_train", "megatron_train": "fsdp2_train", "deepspeed_train": "fsdp2_train"}
)
_INFER = MappingProxyType({"native": "native", "vllm": "native", "sglang": "native", "hf_infer": "native"})
_SCORE = MappingProxyType(
    {**_INFER, "megatron_infer": "native", "deepspeed_infer": "native", "fsdp2_infer": "native", **_TRAIN}
)
_BY_ROLE: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {"actor_train": _TRAIN, "critic": _TRAIN, "actor_infer": _INFER}
)


def default_strategy(role: str) -> str:
    """The built-in back end of a role."""
    return "fsdp2_train" if _BY_ROLE.get(role) is _TRAIN else "native"


def strategy_for(role: str, name: str, available: Collection[str] = BUILT_IN) -> tuple[str, str | None]:
    """The back end that is used when `name` is asked for, and a note if that is another one."""
    known = _BY_ROLE.get(role, _SCORE)
    key = f"{role}.strategy_args.strategy_name"
    if name not in known:
        close = get_close_matches(name, known, 1)
        hint = (f"did you mean {close[0]}? " if close else "") + "one of " + ", ".join(known)
        raise ConfigError("unknown strategy", key=key, value=name, hint=hint)
    if name in available:
        return name, None
    stand_in = known[name] if known[name] in available or known is not _SCORE else "native"
    if stand_in not in available:
        raise ConfigError("this build cannot serve it", key=key, value=name, hint="one of " + ", ".join(available))
    return stand_in, f"{key}: {name} is not in this build, {stand_in} is used instead"
