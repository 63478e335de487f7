"""Models on this machine: our cache of models that are made once, and the Hugging Face hub with its cache.

docs/models.md says where the caches are and which variables count. Of several processes that want the same entry, one
makes it and the others wait. The next process that makes an entry removes what a killed one left behind. A model in the
hub's cache is used without asking the network, so that every process of a run and every later run gets the same one.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from headway.errors import ConfigError
from headway.models.model_checks import find_directory_problem, model_error

if TYPE_CHECKING:
    from huggingface_hub.hf_api import ModelInfo


def cache_root() -> Path:
    """Return the directory of our cache."""
    chosen = os.environ.get("HEADWAY_CACHE")
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "headway"


def make_once(root: Path, key: str, make: Callable[[Path], None]) -> Path:
    """Return the directory `key` under `root`; if it does not exist, `make` fills an empty one first."""
    final = root / key
    if final.is_dir():
        return final.resolve()
    _check_writable(root)
    with _exclusive_lock(root / f"{key}.lock"):
        if not final.is_dir():
            for leftover in root.glob(f"{key}.part-*"):
                shutil.rmtree(leftover, ignore_errors=True)
            part = Path(tempfile.mkdtemp(prefix=f"{key}.part-", dir=root))
            print(f"making {final}, once; later runs find it there", file=sys.stderr)
            try:
                make(part)
                part.chmod(0o755)
                part.rename(final)
            finally:
                shutil.rmtree(part, ignore_errors=True)
    return final.resolve()


def _check_writable(root: Path) -> None:
    try:
        root.mkdir(parents=True, exist_ok=True)
        writable = os.access(root, os.W_OK)
    except OSError:
        writable = False
    if not writable:
        hint = "set the environment variable HEADWAY_CACHE to a directory of yours"
        raise ConfigError(f"the cache {root} cannot be written to", hint=hint)


@contextmanager
def _exclusive_lock(lock: Path) -> Iterator[None]:
    """Hold an exclusive lock between processes inside the context; it is released if the holder is killed."""
    import fcntl

    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


PROBE_TIMEOUT_S = 5.0
"""Seconds that the hub may take for its first answer."""
_WANTED_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]
_IGNORED_FILES = ["original/*", "onnx/*", "*.bin.index.json"]


class HubUnreachable(ConfigError):
    """The model is not cached and the hub did not answer, for `reason`; it may exist elsewhere."""

    def __init__(self, name: str, reason: str) -> None:
        self.reason = reason
        super().__init__(
            f"is neither a directory here nor in the hub's cache on this machine, and the hub is silent: {reason}",
            key="pretrain",
            value=name,
            hint="copy the model's directory here and give its path, or name a model that needs no network: tiny-sums",
        )


def find_in_hub_cache(name: str) -> Path | None:
    """Return the directory of `name` if it is complete and already on this machine."""
    from huggingface_hub import try_to_load_from_cache

    try:
        config = try_to_load_from_cache(name, "config.json")
    except ValueError:  # no repository can have such a name
        return None
    if not isinstance(config, str):
        return None
    directory = Path(config).parent
    return None if find_directory_problem(directory) else directory.resolve()


def resolve_hub_model(name: str, *, timeout_s: float = PROBE_TIMEOUT_S) -> Path:
    """Return the directory of `name`, downloaded if necessary."""
    from huggingface_hub import is_offline_mode, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    if found := find_in_hub_cache(name):
        return found
    if is_offline_mode():
        raise HubUnreachable(name, "HF_HUB_OFFLINE is set")
    _check_files(_fetch_model_info(name, timeout_s), name)
    try:
        return Path(snapshot_download(name, allow_patterns=_WANTED_FILES, ignore_patterns=_IGNORED_FILES)).resolve()
    except (OSError, HfHubHTTPError, LocalEntryNotFoundError) as error:
        hint = "run it again to go on where it stopped"
        raise model_error(f"cannot be downloaded: {_first_line(error)}", name, hint) from error


def _fetch_model_info(name: str, timeout_s: float) -> ModelInfo:
    """Ask the hub about `name`, on a thread because the lookup of an address has no timeout."""
    found: list[ModelInfo] = []
    failed: list[Exception] = []

    def ask() -> None:
        from huggingface_hub import HfApi

        try:
            found.append(HfApi().model_info(name, timeout=timeout_s))
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=ask, name="headway-hub-probe", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if found:
        return found[0]
    raise _explain_failure(name, failed[0] if failed else TimeoutError(f"no answer within {timeout_s:g} s"))


def _explain_failure(name: str, error: Exception) -> ConfigError:
    from huggingface_hub import constants
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError

    if isinstance(error, GatedRepoError):
        hint = f"accept them at {constants.ENDPOINT}/{name}, then set HF_TOKEN or run `hf auth login`"
        found = model_error("is on the hub, and its owners want their terms accepted first", name, hint)
    elif isinstance(error, RepositoryNotFoundError | HFValidationError):
        hint = "check the spelling; for a private model set HF_TOKEN; for a directory give a path that exists"
        found = model_error("is neither a directory here nor a model on the hub", name, hint)
    else:
        found = HubUnreachable(name, f"{constants.ENDPOINT} does not answer, {_first_line(error)}")
    found.__cause__ = error
    return found


def _check_files(info: ModelInfo, name: str) -> None:
    """Raise `ConfigError` before the download if the model could not be loaded after it."""
    files = [file.rfilename for file in info.siblings or ()]
    if "config.json" in files and any(file.endswith(".safetensors") for file in files):
        return
    ggufs = [file for file in files if file.endswith(".gguf")]
    hint = "take a model with config.json and *.safetensors"
    if ggufs:
        hint = f"download one of its GGUF files, such as {ggufs[0]}, and give the path of the file"
    elif "adapter_config.json" in files:
        hint = "it is a LoRA adapter: give the model it was made for, or merge the two"
    raise model_error("is on the hub, but not as config.json and *.safetensors", name, hint)


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}".rstrip(": ")
