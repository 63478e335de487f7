"""What a run with vLLM or SGLang needs of its machine: packages, interpreters, GPUs. All is checked before a start.

`uses_external_engines` says whether a run has such engines at all. `launch/inference_servers.py` makes them.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec

from headway.config import ResolvedConfig
from headway.config.server_versions import check_server_version
from headway.config.strategies import find_server_package
from headway.errors import ConfigError
from headway.extras import suggest_install
from headway.placement.component_places import ComponentPlace
from headway.processes.child_process import OLDEST_PYTHON

_KEY = "actor_infer.strategy_args.strategy_config"
_MAX_VLLM_TEMPERATURE = 2.0


def uses_external_engines(resolved: ResolvedConfig) -> bool:
    """Return whether the engines of this run are vLLM or SGLang, in whatever process."""
    config = resolved.config.actor_infer.strategy_args.strategy_config
    return bool(config.url or config.launch or config.in_process)


def uses_in_process_vllm(resolved: ResolvedConfig) -> bool:
    """Return whether vLLM runs inside engine processes of this run."""
    return resolved.config.actor_infer.strategy_args.strategy_config.in_process


def check_shared_gpu_memory(resolved: ResolvedConfig, places: Mapping[str, ComponentPlace]) -> None:
    """Check that servers which are to open the trainer's memory are on its GPUs. Raises `ConfigError`.

    Engines of our own see other GPUs as well. Servers see their own, and vLLM wants a handle for each that it sees.
    """
    config = resolved.config.actor_infer.strategy_args.strategy_config
    if not uses_external_engines(resolved) or config.url:
        return
    trained = {card for name, place in places.items() if name.startswith("trainer") for card in place.cards}
    apart = [name for name, place in places.items() if name.startswith("engine/") and not trained & set(place.cards)]
    problem = f"{apart[0]} is on no GPU of the trainer" if apart else ""
    if config.launch and config.tensor_model_parallel_size > 1:
        problem = "a server whose layers are on several GPUs loads files"
    if problem:
        raise ConfigError(problem, key="weight_transfer.transport", value="cuda_ipc", hint="auto")


def check_server_requirements(resolved: ResolvedConfig) -> None:
    """Check that everything needed to reach or start the servers is installed. Raises `ConfigError`."""
    config = resolved.config.actor_infer.strategy_args.strategy_config
    if config.server_python is not None and shutil.which(config.server_python) is None:
        key = f"{_KEY}.server_python"
        raise ConfigError("is no program", key=key, value=config.server_python, hint="…/bin/python")
    if not uses_external_engines(resolved):
        return
    if not config.in_process and find_spec("aiohttp") is None:
        key, value = (f"{_KEY}.url", list(config.url)) if config.url else (f"{_KEY}.launch", True)
        raise ConfigError("servers are reached with aiohttp", key=key, value=value, hint=suggest_install("serve"))
    _check_temperatures(resolved)
    if config.launch or config.in_process:
        key = f"{_KEY}.{'launch' if config.launch else 'in_process'}"
        _check_package(resolved.derived.strategies["actor_infer"], config.server_python, key)
    if config.in_process and resolved.config.processes is False:
        raise ConfigError("vLLM has a process of its own", key="processes", value=False, hint="leave it out")


def _check_temperatures(resolved: ResolvedConfig) -> None:
    if resolved.derived.strategies["actor_infer"] != "vllm":
        return
    config = resolved.config
    for role, sampling in (
        ("actor_infer", config.actor_infer.generating_args),
        ("validation", config.validation.generating_args),
    ):
        if (sampling.temperature or 0.0) > _MAX_VLLM_TEMPERATURE:
            raise ConfigError(
                f"vLLM refuses temperatures above {_MAX_VLLM_TEMPERATURE:g}",
                key=f"{role}.generating_args.temperature",
                value=sampling.temperature,
                hint="our own engine takes any: strategy_name: native",
            )


def _check_package(package: str, python: str | None, key: str) -> None:
    """Check that a package is installed in a supported version. Raises `ConfigError`."""
    version = find_server_package(package, python)
    if version is None:
        raise ConfigError(
            f"{package} is not installed for {python or sys.executable}",
            key=key,
            value=True,
            hint=f"server_python: the interpreter of an environment that has {package}; or url: a server that runs",
        )
    check_server_version(package, version)
    if python is not None and key.endswith("in_process"):
        version_ok = f"import sys; sys.exit(sys.version_info < {OLDEST_PYTHON})"
        if subprocess.run([python, "-c", version_ok], check=False, capture_output=True).returncode != 0:
            problem = f"Headway runs in it, and needs Python {'.'.join(map(str, OLDEST_PYTHON))}"
            raise ConfigError(problem, key=f"{_KEY}.server_python", value=python)
