"""Names of back ends, and which back end is used where a name means one that this build does not have.

A substitute is used only where it does the same work, and one note says so. Unknown names are errors. vLLM and SGLang
are used where they run already (`url`), where Headway is told to start them (`launch`, or `in_process` for vLLM), and
by their name alone where they are installed for this interpreter or for `server_python`: then vLLM runs in the
processes of the engines, and SGLang is launched. Where they are not installed, the native engine is used instead,
unless the configuration is `strict`.
"""

import subprocess
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as find_version
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit

from headway.config.roles import EngineStrategyConfig
from headway.config.server_versions import check_server_version, note_version
from headway.errors import ConfigError
from headway.registry import ENGINES, Registry

SERVER_STRATEGIES = ("vllm", "sglang")
"""Engines of other projects."""
DEFAULT_STRATEGIES = MappingProxyType({"actor_train": "fsdp2_train", "actor_infer": "native"})
"""The built-in back end of each role that has a choice."""

_FIND = """
import importlib.metadata, importlib.util, sys
if importlib.util.find_spec({name!r}) is None:
    sys.exit(1)
for distribution in ({name!r}, {name!r} + "-cpu"):
    try:
        print(importlib.metadata.version(distribution))
        break
    except importlib.metadata.PackageNotFoundError:
        pass
"""
_TRAINERS: Registry[Any] = Registry("trainer", built_in=("fsdp2_train", "megatron_train", "deepspeed_train"))


def choose_strategy(role: str, name: str) -> tuple[str, str | None]:
    """Return the back end that is used when `name` is asked for, and a note if that is another one."""
    known = ENGINES if role == "actor_infer" else _TRAINERS
    key = f"{role}.strategy_args.strategy_name"
    if name not in known:
        raise ConfigError("unknown strategy", key=key, value=name, hint=known.hint(name))
    substitute = DEFAULT_STRATEGIES[role]
    is_plugin = role == "actor_infer" and name not in ENGINES.built_in
    if name == substitute or is_plugin:
        return name, None
    return substitute, f"{key}: {name} is not in this build, {substitute} is used instead"


def choose_server(name: str, config: EngineStrategyConfig, *, strict: bool) -> tuple[str, str]:
    """Return the option by which an installed vLLM or SGLang is started, and a note; no option: it is not installed.

    Raises `ConfigError` where it is not installed and `strict` forbids another engine, and for a version too old.
    """
    key, python = "actor_infer.strategy_args.strategy_name", config.server_python
    version = find_server_package(name, python)
    if version is None:
        where = python or "this interpreter"
        if strict:
            hint = "native, or server_python: the interpreter of an environment that has it"
            raise ConfigError(f"is not installed for {where}, and strict is set", key=key, value=name, hint=hint)
        return "", f"{key}: {name} is not installed for {where}, native is used instead (strict: true refuses)"
    check_server_version(name, version)
    option = "in_process" if name == "vllm" else "launch"
    return option, note_version(name, version) or ""


def find_server_package(name: str, python: str | None = None) -> str | None:
    """Return the version of a package in this interpreter or another; empty: unknown; none: it is not installed."""
    if python is not None:
        try:
            found = subprocess.run([python, "-c", _FIND.format(name=name)], capture_output=True, text=True, check=False)
        except OSError:
            return None
        return found.stdout.strip() if found.returncode == 0 else None
    if find_spec(name) is None:
        return None
    for distribution in (name, f"{name}-cpu"):
        with suppress(PackageNotFoundError):
            return find_version(distribution)
    return ""


def uses_server(config: EngineStrategyConfig) -> bool:
    """Return whether the engines are vLLM or SGLang."""
    return bool(_get_server_options(config))


def _get_server_options(config: EngineStrategyConfig) -> Mapping[str, object]:
    """Return the options that ask for a server. A configuration may have one of them."""
    options = {"url": list(config.url), "launch": config.launch, "in_process": config.in_process}
    return {name: value for name, value in options.items() if value}


def find_server_problems(name: str | None, config: EngineStrategyConfig) -> list[ConfigError]:
    """Return what is wrong with the options about servers."""
    base = "actor_infer.strategy_args"
    options, start, found = _get_server_options(config), f"{base}.strategy_config", list[ConfigError]()
    first, value = next(iter(options.items()), ("", None))
    key = f"{start}.{first}"
    if options and name not in SERVER_STRATEGIES:
        hint = "one of " + ", ".join(SERVER_STRATEGIES)
        problem = f"{key} is given, and this is no server"
        found.append(ConfigError(problem, key=f"{base}.strategy_name", value=name, hint=hint))
    if len(options) > 1:
        problem = "a server either runs already or is started by us, in one way"
        found.append(ConfigError(problem, key=key, value=value, hint=" or ".join(options)))
    if config.in_process and name == "sglang":
        found.append(
            ConfigError("only vllm runs in our processes", key=f"{start}.in_process", value=True, hint="launch")
        )
    if (config.server_args or config.server_python) and (config.url or name not in SERVER_STRATEGIES):
        part, given = (
            ("server_args", config.server_args) if config.server_args else ("server_python", config.server_python)
        )
        problem = "is for servers that we start"
        found.append(ConfigError(problem, key=f"{start}.{part}", value=given, hint="launch: true"))
    for url in config.url:
        if not _is_address(url) or config.url.count(url) > 1:
            problem = "is given twice" if _is_address(url) else "is no address of a server"
            found.append(ConfigError(problem, key=f"{start}.url", value=url, hint="such as http://127.0.0.1:8000"))
    return found


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False
