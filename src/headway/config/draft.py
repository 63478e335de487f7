"""A configuration while values are being derived: set by dotted key, reason kept, problems collected."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from headway.config.schema import Config
from headway.errors import ConfigError


class Draft:
    """The tree so far. `given` tells what the user said from what is a default."""

    def __init__(self, config: Config, provenance: Mapping[str, str], notes: list[str]) -> None:
        self.config = config
        self.provenance = dict(provenance)
        self.notes = notes
        self.problems: list[ConfigError] = []

    def given(self, key: str) -> bool:
        """Whether the user gave this leaf, and not as null."""
        return key in self.provenance and value_at(self.config, key) is not None

    def derive(self, key: str, value: Any, reason: str) -> None:
        """Fill a leaf in."""
        self.config = replaced(self.config, key.split("."), value)
        self.provenance[key] = f"derived: {reason}"

    def refuse(self, key: str, problem: str, hint: str = "") -> None:
        """Note a problem with the value at `key`; the message shows both."""
        self.problems.append(ConfigError(problem, key=key, value=value_at(self.config, key), hint=hint))


def value_at(block: Any, key: str) -> Any:
    """The value at a dotted key."""
    for name in key.split("."):
        block = block[name] if isinstance(block, Mapping) else getattr(block, name)
    return block


def replaced(block: Any, names: list[str], value: Any) -> Any:
    """`block` with the value at `names` replaced."""
    name, *rest = names
    old = block[name] if isinstance(block, Mapping) else getattr(block, name)
    new = replaced(old, rest, value) if rest else value
    return {**block, name: new} if isinstance(block, Mapping) else dataclasses.replace(block, **{name: new})
