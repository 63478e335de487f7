"""Spellings of other frameworks, as tables: `dialects/verl.yaml`, `roll.yaml` and `trl.yaml`.

`headway.config.translation` applies them. Each file says what its sections mean. A rewrite of a value is the name of a
function in `_REWRITES`, or a mapping from their values to ours, where null leaves our key alone. A rewrite that finds a
value without a counterpart raises `ValueError` with what would be right; one that returns `UNSET` leaves our key alone.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Final

import yaml

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


def _rename_value(names: Mapping[Any, Any], *, strict: bool = True) -> Rewrite:
    """Return a rewrite from other names of a choice, or from flags, to ours. Unless `strict`, others pass unchanged."""

    def rewrite(value: Any) -> Any:
        if isinstance(value, str | bool) and value in names:
            return names[value]
        if strict:
            raise ValueError("true or false" if True in names else f"one of {', '.join(names)}")
        return value

    return rewrite


def _replace_negative(off: Any) -> Rewrite:
    """Return a rewrite for keys whose negative values mean "off", which is `off` here."""
    return lambda value: off if isinstance(value, int | float) and value < 0 else value


def _split_layer_names(value: Any) -> Any:
    """Return names given as one text with commas as a list; `all-linear` is the empty list here."""
    names = [name.strip() for name in value.split(",") if name.strip()] if isinstance(value, str) else value
    return [] if names in (["all-linear"], ["all"]) else names


def _choose_trackers(value: Any) -> Any:
    """Return the trackers that TRL's `report_to` names."""
    names = value if isinstance(value, list) else [value]
    known = {"tensorboard", "wandb", "trackio", "jsonl"}
    if value == "all" or not {*map(str, names)} <= known | {"none"}:
        raise ValueError(f"none, or some of {', '.join(sorted(known))}")
    return [name for name in names if name != "none"]


_KL_NAMES = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}


def _name_kl_estimator(value: Any) -> Any:
    """Return the estimator of a KL term, with a plus where its gradient is that of k2."""
    if not isinstance(value, str):
        return value
    name = value.removesuffix("+")
    ours = _KL_NAMES.get(name, name)
    return f"{ours}+" if value.endswith("+") and ours != "k2" else ours


def _name_kl_value(value: Any) -> Any:
    """Return the estimator of a KL inside rewards, which has no gradient."""
    found = _name_kl_estimator(value)
    return found.removesuffix("+") if isinstance(found, str) else found


_REWRITES: Mapping[str, Rewrite] = {
    "trackers": _choose_trackers,
    "layer_names": _split_layer_names,
    "unchanged": lambda value: value,
    "always_true": lambda value: True,
    "negative_is_zero": _replace_negative(0),
    "negative_is_null": _replace_negative(None),
    "negative_is_unset": _replace_negative(UNSET),
    "steps_before": lambda value: max(value - 1, 0) if isinstance(value, int) else value,
    "minus_one_is_zero": lambda value: 0 if value == -1 else value,
    "kl_estimator": _name_kl_estimator,
    "kl_value": _name_kl_value,
    "dtype": _rename_value(
        {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "half": "fp16", "float": "fp32"}, strict=False
    ),
    "schedule": _rename_value({"constant_with_warmup": "constant"}, strict=False),
    "optimizer": _rename_value(
        {
            **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused"), "adamw"),
            **dict.fromkeys(("adamw_bnb_8bit", "paged_adamw_8bit"), "adamw_8bit"),
        },
        strict=False,
    ),
    "trackers_of_roll": lambda value: [] if value in ("stdout", ["stdout"]) else value,
    "resume_flag": _rename_value({True: "auto", False: "never"}, strict=False),
}


def _read_table(name: str) -> dict[str, Any]:
    text = files("headway.config").joinpath("dialects", name).read_text(encoding="utf-8")
    table: dict[str, Any] = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return table


def _make_rules(row: str | Mapping[str, str | Mapping[Any, Any]]) -> tuple[KeyRule, ...]:
    if isinstance(row, str):
        return (KeyRule(row),)
    return tuple(
        KeyRule(
            target,
            _REWRITES[rewrite]
            if isinstance(rewrite, str)
            else _rename_value({name: UNSET if ours is None else ours for name, ours in rewrite.items()}),
        )
        for target, rewrite in row.items()
    )


def _make_foreign_keys(table: Mapping[str, Any]) -> dict[str, ForeignKey]:
    found = {key: ForeignKey(reason) for reason, keys in table["no_effect"].items() for key in keys}
    for reason, rows in table.get("silent", {}).items():
        found |= {key: ForeignKey(reason, silent=tuple(values)) for key, values in rows.items()}
    for reason, rows in table.get("only", {}).items():
        found |= {key: ForeignKey(reason, only=value) for key, value in rows.items()}
    return found


_VERL, _ROLL, _TRL = map(_read_table, ("verl.yaml", "roll.yaml", "trl.yaml"))

EARLIER_NAMES = {"flow": "denoising"}
"""Blocks of Headway's own configuration that had another name in an earlier version, and their names now."""
KEY_RULES: Mapping[str, tuple[KeyRule, ...]] = {
    key: _make_rules(row)
    for key, row in {
        **_VERL["translated"],
        **_ROLL["translated"],
        **_TRL["translated"],
        **EARLIER_NAMES,
    }.items()
}
"""Foreign key → what it sets."""
VALUE_REWRITES: Mapping[str, Rewrite] = {key: _REWRITES[name] for key, name in _ROLL["rewritten"].items()}
"""Our own key → how other ways to write its value are rewritten."""
FOREIGN_KEYS: Mapping[str, ForeignKey] = {
    key: row for table in (_VERL, _ROLL, _TRL) for key, row in _make_foreign_keys(table).items()
}
"""Foreign key (`*`: any role or name) → why it has no effect. It covers the keys below it too."""
DIALECT_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "roll": _ROLL["defaults"],
    "verl": _VERL["defaults"],
    "gerl": {**_VERL["defaults"], **_VERL["defaults_of_gerl"]},
}
"""Dialect → our key → the default that the key has there."""
ROLL_MARKS: Mapping[str, tuple[str, ...]] = _ROLL["marks"]
"""Top keys and names of back ends that only files of ROLL have."""
TRL_NAMES: Mapping[str, str] = _TRL["hints"]
"""TRL's name → our key, as the hint shows it."""
TRL_NAMES_WITHOUT_PLACE: Mapping[str, str] = {
    name: reason for reason, names in _TRL["nothing"].items() for name in names
}
"""TRL's name → why nothing here takes its place."""
