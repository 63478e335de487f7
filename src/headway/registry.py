"""Names that a configuration may use for something pluggable: the built-in ones and those that plugins register.

There is one registry for each kind of thing. A registry knows the built-in names from the start, so that a
configuration can be checked before the modules that implement them are imported; those modules and plugins then
register an entry for each name.
"""

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any, Generic, TypeVar

from headway.errors import ConfigError

T = TypeVar("T")


class Registry(Generic[T]):
    """Entries by name. `kind` says what an entry is and appears in error messages."""

    def __init__(self, kind: str, *, built_in: Iterable[str] = ()) -> None:
        self.kind = kind
        self.built_in = tuple(built_in)
        self._entries: dict[str, T] = {}

    def register(self, name: str, entry: T, *, replace: bool = False) -> T:
        """Add `entry` under `name` and return it. Raise `ConfigError` if the name has another entry already.

        A definition that is executed again, as in a notebook, replaces its former self. `replace` allows any other.
        """
        if replace:
            self._entries[name] = entry
            return entry
        module = _identify(entry)[0] or ""
        if name in self.built_in and module.split(".")[0] != "headway":
            hint = f"choose another name{_describe_place(entry)}"
            raise ConfigError(f"is a built-in {self.kind}", key=self.kind, value=name, hint=hint)
        present = self._entries.setdefault(name, entry)
        if present is not entry and _identify(present) == _identify(entry):
            self._entries[name] = entry
        elif present is not entry:
            problem = f"is the name of another {self.kind}{_describe_place(present)}"
            hint = f"choose another name{_describe_place(entry)}"
            raise ConfigError(problem, key=self.kind, value=name, hint=hint)
        return entry

    def unregister(self, name: str) -> None:
        """Remove the entry of `name`, if there is one."""
        self._entries.pop(name, None)

    @contextmanager
    def isolate(self) -> Iterator[None]:
        """Forget at the end of the block whatever was registered inside it."""
        before = dict(self._entries)
        try:
            yield
        finally:
            built_in = {name: entry for name, entry in self._entries.items() if name in self.built_in}
            self._entries = {**built_in, **before}

    def names(self) -> tuple[str, ...]:
        """Return every valid name: built-in names first, then registered ones in order of registration."""
        return tuple(dict.fromkeys((*self.built_in, *self._entries)))

    def get(self, name: str, *, key: str = "") -> T:
        """Return the entry of `name`. Raise `ConfigError` for `key` if there is none."""
        if name not in self._entries:
            raise ConfigError(f"unknown {self.kind}", key=key or self.kind, value=name, hint=self.hint(name))
        return self._entries[name]

    def hint(self, name: str) -> str:
        """Return the closest valid name, if one is close, and the list of all names."""
        close = get_close_matches(name, self.names(), 1)
        return (f"did you mean {close[0]}? " if close else "") + "one of " + ", ".join(self.names())

    def __contains__(self, name: object) -> bool:
        return name in self.built_in or name in self._entries


def _identify(entry: Any) -> tuple[str | None, object]:
    """Return the module and the name under which `entry`, or what it wraps, was defined."""
    definition = getattr(entry, "definition", entry)
    return getattr(definition, "__module__", None), getattr(definition, "__qualname__", definition)


def _describe_place(entry: Any) -> str:
    """Return where `entry` was defined, for the end of a sentence, or nothing if that is not known."""
    file = getattr(sys.modules.get(_identify(entry)[0] or ""), "__file__", None)
    return f" in {file}" if file else ""


POLICY_LOSSES: Registry[Any] = Registry(
    "policy loss",
    built_in=(
        *("ppo", "decoupled_ppo", "vanilla", "tis", "cispo", "topr", "kimi15"),
        *("sapo", "dppo_tv", "dppo_kl", "gmpo", "gspo", "up", "clip_cov", "kl_cov", "cppo", "sao"),
    ),
)
"""Values of `pg_variant`."""
ADVANTAGE_ESTIMATORS: Registry[Any] = Registry(
    "advantage estimator",
    built_in=(
        *("grpo", "reinforce", "reinforce_plus_plus", "rloo", "remax", "opo", "gpg"),
        *("grpo_passk", "gdpo", "codapo", "optimal_token_baseline", "gae", "step_reinforce", "gigpo"),
    ),
)
"""Values of `adv_estimator`."""
STALENESS_POLICIES: Registry[Any] = Registry("staleness policy", built_in=("drop", "wait", "window"))
"""Values of `staleness_policy`."""
ENGINES: Registry[Any] = Registry("engine", built_in=("native", "vllm", "sglang", "hf_infer"))
"""Values of `actor_infer.strategy_args.strategy_name`."""
STAGES: Registry[Any] = Registry(
    "stage",
    built_in=(
        *("dataloader", "generate", "rollout", "logp", "ref_logp", "reward"),
        *("critic", "train", "param_update"),
    ),
)
"""Values of `stages.*.name`; built-in ones are what a stage can stand behind."""
REWARDS: Registry[Any] = Registry(
    "reward",
    built_in=(
        *("code", "code_sandbox", "compressibility", "crossthinkqa", "environment", "exact", "format", "general_val"),
        *("data_source", "ifeval", "image_server", "judge", "llm_judge", "math_rule", "multiple_choice"),
        *("math", "numeric", "ocr", "overlong", "reasoning_gym", "regex", "reward_model", "vision_judge"),
    ),
)
"""Values of `rewards.*.reward_fn`: functions `(text, task_data, **reward_args)`, or classes with `score(episode)`."""
ENVIRONMENTS: Registry[Any] = Registry(
    "environment",
    built_in=(
        *("alfworld", "frozen_lake", "gem", "gymnasium", "question", "reasoning_gym", "repair", "scienceworld", "shop"),
        *("sokoban", "sokoban_native_env", "textworld", "tools", "verifiers", "webshop"),
    ),
)
"""Values of `custom_envs.*.env_type`, besides import paths."""
