"""Rows of the dialect tables: keys that are translated, keys without effect, and how values are rewritten.

A rewrite that finds a value without a counterpart raises `ValueError` with what would be right. A rewrite that returns
`UNSET` leaves our key alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

UNSET: Final = object()
"""Stands for "not given"."""

Rewrite = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class KeyRule:
    """Says which of our keys a foreign key sets, and how its value changes on the way."""

    target: str
    """Our key. A leading `*` repeats the role of the foreign key."""
    rewrite: Rewrite = lambda value: value


@dataclass(frozen=True, slots=True)
class ForeignKey:
    """A key of another framework that has no effect here, and why."""

    reason: str
    silent: tuple[Any, ...] = ()
    """Values that ask for what happens anyway; other values are mentioned in a note."""
    only: Any = UNSET
    """The one value that is possible, if there is only one; other values are errors."""


KeyRules = Mapping[str, str | KeyRule | tuple[KeyRule, ...]]
"""Foreign key → our key, or a rule, or several rules."""
ForeignKeys = Mapping[str, str | ForeignKey]
"""Foreign key (`*`: any role or name) → why it has no effect. It covers the keys below it too."""

OWN_TRACKING = "metrics go to the run directory and to what `track_with` names; `headway report` shows them"
OWN_PROFILE = "the event log is the profile; see `headway report`"
OWN_DEADLINES = "processes and their deadlines are set by `reliability`"
OWN_CLASSES = "classes of another framework; subclass a stage instead"
IN_LEDGER = "finished samples are in the ledger of the run directory"

DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "half": "fp16", "float": "fp32"}
KL_ESTIMATORS = {"kl": "k1", "mse": "k2", "low_var_kl": "k3", "k3+": "k3"}


def keep_names(theirs: str, ours: str, names: str) -> dict[str, str]:
    """Return rows for keys whose last part is the same: `theirs` and `ours` are what stands before it."""
    return {theirs + name: ours + name for name in names.split()}


def rename_value(names: Mapping[str, Any], *, strict: bool = True) -> Rewrite:
    """Return a rewrite from other names of a choice to ours. Unless `strict`, unlisted names pass unchanged."""

    def rewrite(value: Any) -> Any:
        if isinstance(value, str) and value in names:
            return names[value]
        if strict:
            raise ValueError("one of " + ", ".join(names))
        return value

    return rewrite


def replace_negative(off: Any) -> Rewrite:
    """Return a rewrite for keys whose negative values mean "off", which is `off` here."""
    return lambda value: off if isinstance(value, int | float) and value < 0 else value


def choose_by_flag(*, when_true: Any, when_false: Any) -> Rewrite:
    """Return a rewrite from true and false to two values of ours."""

    def rewrite(value: Any) -> Any:
        if not isinstance(value, bool):
            raise ValueError("true or false")
        return when_true if value else when_false

    return rewrite
