"""Names of back ends, and which of them stands in for one that this build does not have.

A stand-in is used only where it does the same work; one note says so. Unknown names are errors. vLLM and SGLang are
servers: our own engine stands in for them unless it is said where they are (`url`), that they are to be started
(`launch`), or that vLLM runs in the processes of our engines (`in_process`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from difflib import get_close_matches
from types import MappingProxyType
from urllib.parse import urlsplit

from headway.config.roles import StrategyConfig
from headway.errors import ConfigError

BUILT_IN_STRATEGIES = frozenset({"fsdp2_train", "native"})
"""Back ends that come with Headway."""

SERVER_STRATEGIES = ("vllm", "sglang")
"""Engines of others."""

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


def get_default_strategy(role: str) -> str:
    """The built-in back end of a role."""
    return "fsdp2_train" if _BY_ROLE.get(role) is _TRAIN else "native"


def choose_strategy(role: str, name: str, available: Collection[str] = BUILT_IN_STRATEGIES) -> tuple[str, str | None]:
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
    ways = "url, launch or in_process" if name == "vllm" else "url or launch"
    how = f"used as a server where strategy_config has {ways}" if name in SERVER_STRATEGIES else "not in this build"
    return stand_in, f"{key}: {name} is {how}, {stand_in} is used instead"


def uses_server(config: StrategyConfig) -> bool:
    """Whether a role is said to be served by somebody else's engine."""
    return bool(_ways(config))


def _ways(config: StrategyConfig) -> dict[str, object]:
    """Ways to have it that are asked for; a run has one."""
    said = {"url": list(config.url), "launch": config.launch, "in_process": config.in_process}
    return {name: value for name, value in said.items() if value}


def find_server_problems(role: str, name: str | None, config: StrategyConfig) -> list[ConfigError]:
    """What is wrong with what is said about servers; nothing where nothing is said."""
    base, found, ways = f"{role}.strategy_args", [], _ways(config)
    start = f"{base}.strategy_config"
    way, value = next(iter(ways.items()), ("", None))
    key = f"{start}.{way}"
    if ways and role != "actor_infer":
        found.append(ConfigError("only engines can be servers", key=key, value=value, hint="actor_infer"))
    if ways and name not in SERVER_STRATEGIES:
        hint = "one of " + ", ".join(SERVER_STRATEGIES)
        problem = f"{key} is given, and this is no server"
        found.append(ConfigError(problem, key=f"{base}.strategy_name", value=name, hint=hint))
    if len(ways) > 1:
        problem = "a server either runs already or is started by us, in one way"
        found.append(ConfigError(problem, key=key, value=value, hint=" or ".join(ways)))
    if config.in_process and name == "sglang":
        found.append(
            ConfigError("only vllm runs in our processes", key=f"{start}.in_process", value=True, hint="launch")
        )
    if (config.server_args or config.server_python) and not (config.launch or config.in_process):
        part = "server_args" if config.server_args else "server_python"
        problem, given = "is for servers that we start", getattr(config, part)
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
