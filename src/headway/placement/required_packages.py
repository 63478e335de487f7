"""Packages that a configuration needs, by what it asks for, so that a missing one is named before anything starts.

Only Headway's own options are known here. Code of users imports what it needs when it is checked.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec

from headway.config import ResolvedConfig
from headway.errors import ConfigError, ConfigErrors
from headway.extras import suggest_install
from headway.monitor.trackers import TRACKER_MODULES

_ENVIRONMENT_PACKAGES = {
    "alfworld": ("textworld", "alfworld"),
    "gem": ("gem", "gem"),
    "gymnasium": ("gymnasium", "gymnasium"),
    "openai_agent": ("aiohttp", "serve"),
    "reasoning_gym": ("reasoning_gym", "data"),
    "scienceworld": ("scienceworld", "scienceworld"),
    "textworld": ("textworld_express", "textworld"),
    "verifiers": ("verifiers", "verifiers"),
}
"""Module and extra of built-in environments that are others' libraries."""
_REWARD_PACKAGES = {"math": ("math_verify", "math"), "reasoning_gym": ("reasoning_gym", "data")}


@dataclass(frozen=True, slots=True, kw_only=True)
class RequiredPackage:
    """A package that a configuration needs."""

    module: str
    extra: str
    """Extra of Headway that installs it; empty: the package has the name of the module."""
    key: str
    """Key of the configuration that asks for it."""
    value: str

    @property
    def is_installed(self) -> bool:
        return find_spec(self.module) is not None

    @property
    def error(self) -> ConfigError:
        hint = suggest_install(self.extra) if self.extra else f"pip install {self.module}"
        return ConfigError(f"needs {self.module}, which is not installed", key=self.key, value=self.value, hint=hint)


def find_missing_packages(resolved: ResolvedConfig) -> list[RequiredPackage]:
    """Return the packages that a configuration needs and that are not installed, each once."""
    missing = {package.module: package for package in _list_packages(resolved) if not package.is_installed}
    return list(missing.values())


def check_packages(resolved: ResolvedConfig) -> None:
    """Raise `ConfigErrors` that name every missing package and how to install it."""
    if missing := find_missing_packages(resolved):
        raise ConfigErrors([package.error for package in missing])


def _list_packages(resolved: ResolvedConfig) -> Iterator[RequiredPackage]:
    config = resolved.config
    for module in ("torch", "transformers", "safetensors"):
        yield RequiredPackage(module=module, extra="train", key="pretrain", value=config.pretrain or "")
    rank = config.actor_train.model_args.lora_rank
    if rank:
        yield RequiredPackage(module="peft", extra="lora", key="actor_train.model_args.lora_rank", value=str(rank))
    if bits := config.actor_train.model_args.quantization:
        key = "actor_train.model_args.quantization"
        yield RequiredPackage(module="bitsandbytes", extra="qlora", key=key, value=bits)
    for tracker in config.track_with:
        if module := TRACKER_MODULES.get(tracker, ""):
            yield RequiredPackage(module=module, extra="", key="track_with", value=tracker)
    for tag, environment in config.custom_envs.items():
        if environment.env_type in _ENVIRONMENT_PACKAGES:
            module, extra = _ENVIRONMENT_PACKAGES[environment.env_type]
            key = f"custom_envs.{tag}.env_type"
            yield RequiredPackage(module=module, extra=extra, key=key, value=environment.env_type)
    for name, reward in config.rewards.items():
        kind = reward.reward_fn or name
        if kind in _REWARD_PACKAGES:
            module, extra = _REWARD_PACKAGES[kind]
            yield RequiredPackage(module=module, extra=extra, key=f"rewards.{name}.reward_fn", value=kind)
    if config.cluster.kind == "ray":
        yield RequiredPackage(module="ray", extra="ray", key="cluster.kind", value="ray")
    yield from _list_data_packages(resolved)


def _list_data_packages(resolved: ResolvedConfig) -> Iterator[RequiredPackage]:
    config = resolved.config
    blocks = {"actor_train": config.actor_train.data_args, "validation": config.validation.data_args}
    for role, data in blocks.items():
        for name in data.file_name:
            known = {"hf": "datasets", "reasoning_gym": "reasoning_gym"}
            module = "pyarrow" if name.endswith(".parquet") else known.get(name.partition(":")[0], "")
            if module:
                yield RequiredPackage(module=module, extra="data", key=f"{role}.data_args.file_name", value=name)
