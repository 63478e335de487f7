"""Small makers that the configuration tests share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headway.config import ConfigErrors, load_config
from headway.errors import ConfigError

CONFIGS = Path(__file__).parent.parent / "data" / "configs"


def problems_of(source: Any = None, overrides: Any = ()) -> list[ConfigError]:
    """Every problem that loading reports; fails if there is none."""
    with pytest.raises(ConfigErrors) as caught:
        load_config(source, overrides)
    return caught.value.problems


def only_problem(source: Any = None, overrides: Any = ()) -> str:
    """The message of the one problem there is."""
    (problem,) = problems_of(source, overrides)
    return str(problem)


_REQUIRED = {"faults[]": {"kind": "crash", "target": "engine/0"}, "changes[]": {"kind": "leave"}}


def nested(key: str, value: Any) -> dict[str, Any]:
    """`{"a": {"b": value}}` from `a.b`; `<name>` becomes a name, `[]` a list of one element."""
    name, _, rest = key.partition(".")
    inner = nested(rest, value) if rest else value
    if name == "<name>":
        return {"mine": inner}
    if name.endswith("[]"):
        return {name.removesuffix("[]"): [{**_REQUIRED.get(name, {}), **inner}]}
    return {name: inner}


def path_of(key: str) -> str:
    """The key as messages show it for what `nested` makes."""
    return key.replace("<name>", "mine").replace("[]", "[0]")
