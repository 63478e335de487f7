"""Versions of vLLM and SGLang that are supported: named here, and checked before a server is used."""

import re
from collections.abc import Mapping
from types import MappingProxyType

from headway.errors import ConfigError

OLDEST_VERSIONS: Mapping[str, tuple[int, ...]] = MappingProxyType({"vllm": (0, 26), "sglang": (0, 5, 6)})
"""First versions that have every call that a run makes."""
NEWEST_VERSIONS: Mapping[str, tuple[int, ...]] = MappingProxyType({"vllm": (0, 32), "sglang": (0, 5, 16)})
"""Last versions whose sources were read. Newer ones are used, and a line says so."""
OLDEST_LABELLED_VLLM = (0, 28)
"""First vLLM that knows the label of its weights by itself, which a server of somebody else must."""
_KEY = "actor_infer.strategy_args.strategy_name"


def parse_version(text: str) -> tuple[int, ...]:
    """Return the numbers that a version begins with: `0.5.10.post1` → (0, 5, 10)."""
    found = re.match(r"\d+(\.\d+)*", text)
    return tuple(map(int, found.group().split("."))) if found else ()


def describe_supported(name: str) -> str:
    """Return the supported versions as text."""
    oldest, newest = (".".join(map(str, versions[name])) for versions in (OLDEST_VERSIONS, NEWEST_VERSIONS))
    return f"{name} {oldest} to {newest}"


def check_server_version(name: str, text: str, *, launched: bool = True) -> tuple[int, ...]:
    """Return a version as numbers. Raises `ConfigError` for one that is too old; a version without numbers passes."""
    version = parse_version(text)
    oldest = OLDEST_VERSIONS[name] if launched or name != "vllm" else OLDEST_LABELLED_VLLM
    if version and version < oldest:
        why = "" if oldest == OLDEST_VERSIONS[name] else " where its owner starts it"
        shown = ".".join(map(str, oldest))
        raise ConfigError(f"{name} {text} is too old: {shown} is needed{why}", key=_KEY, value=name)
    return version or NEWEST_VERSIONS[name]


def note_version(name: str, text: str) -> str | None:
    """Return a line about a version that is newer than those that were read."""
    if parse_version(text)[: len(NEWEST_VERSIONS[name])] <= NEWEST_VERSIONS[name]:
        return None
    return f"{name} {text} is newer than what was tried ({describe_supported(name)})"
