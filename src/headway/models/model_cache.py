"""Things that are made once and kept: `$HEADWAY_CACHE`, else `~/.cache/headway`.

Guarantees: an entry is there whole or not at all, whatever is killed when; of several processes that want the same
one, one makes it and the others wait for it. What a killed process left behind is swept by the next that makes the
same entry.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from headway.errors import ConfigError
from headway.models.model_checks import find_directory_problem

if TYPE_CHECKING:
    from huggingface_hub.hf_api import ModelInfo


def cache_root() -> Path:
    """Where everything is kept unless a caller says otherwise."""
    chosen = os.environ.get("HEADWAY_CACHE")
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "headway"


def make_once(root: Path, key: str, make: Callable[[Path], None]) -> Path:
    """Directory `key` under `root`; `make` fills an empty one where there is none yet."""
    final = root / key
    if final.is_dir():
        return final.resolve()
    _prepare(root)
    with _alone(root / f"{key}.lock"):
        if not final.is_dir():
            for left_behind in root.glob(f"{key}.part-*"):
                shutil.rmtree(left_behind, ignore_errors=True)
            part = Path(tempfile.mkdtemp(prefix=f"{key}.part-", dir=root))
            try:
                make(part)
                part.chmod(0o755)
                part.rename(final)
            finally:
                shutil.rmtree(part, ignore_errors=True)
    return final.resolve()


def _prepare(root: Path) -> None:
    try:
        root.mkdir(parents=True, exist_ok=True)
        writable = os.access(root, os.W_OK)
    except OSError:
        writable = False
    if not writable:
        hint = "set the environment variable HEADWAY_CACHE to a directory of yours"
        raise ConfigError(f"the cache {root} cannot be written to", hint=hint)


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """Inside, no other process is. A killed holder lets go by dying."""
    import fcntl

    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


PROBE_S = 5.0
"""How long a hub may take for its first answer."""
_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]
_NOT = ["original/*", "onnx/*", "*.bin.index.json"]


class HubUnreachable(ConfigError):
    """`name` is not in the cache and the hub did not answer, for `reason`: something else may have the model."""

    def __init__(self, name: str, reason: str) -> None:
        self.reason = reason
        super().__init__(
            f"is neither a directory here nor in the hub's cache on this machine, and the hub is silent: {reason}",
            key="pretrain",
            value=name,
            hint="copy the model's directory here and give its path, or name a model that needs no network: tiny-sums",
        )


def find_in_hub_cache(name: str) -> Path | None:
    """The directory of `name` if it is whole and already on this machine."""
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(name, "config.json")
    if not isinstance(config, str):
        return None
    directory = Path(config).parent
    return None if find_directory_problem(directory) else directory.resolve()


def resolve_hub_model(name: str, *, probe_s: float = PROBE_S) -> Path:
    """The directory of `name`, downloaded if need be."""
    from huggingface_hub import is_offline_mode, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    if found := find_in_hub_cache(name):
        return found
    if is_offline_mode():
        raise HubUnreachable(name, "HF_HUB_OFFLINE is set")
    _check_files(_asked(name, probe_s), name)
    try:
        return Path(snapshot_download(name, allow_patterns=_FILES, ignore_patterns=_NOT)).resolve()
    except (OSError, HfHubHTTPError, LocalEntryNotFoundError) as error:
        problem = f"cannot be downloaded: {_first_line(error)}"
        hint = "run it again to go on where it stopped"
        raise ConfigError(problem, key="pretrain", value=name, hint=hint) from error


def _asked(name: str, probe_s: float) -> ModelInfo:
    """What the hub says about `name`. In a thread, because looking up an address knows no timeout."""
    found: list[ModelInfo] = []
    failed: list[Exception] = []

    def ask() -> None:
        from huggingface_hub import HfApi

        try:
            found.append(HfApi().model_info(name, timeout=probe_s))
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=ask, name="headway-hub-probe", daemon=True)
    thread.start()
    thread.join(probe_s)
    if found:
        return found[0]
    raise _explained(name, failed[0] if failed else TimeoutError(f"no answer within {probe_s:g} s"))


def _explained(name: str, error: Exception) -> ConfigError:
    from huggingface_hub import constants
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError

    about = {"key": "pretrain", "value": name}
    if isinstance(error, GatedRepoError):
        hint = f"accept them at {constants.ENDPOINT}/{name}, then set HF_TOKEN or run `hf auth login`"
        made = ConfigError("is on the hub, and its owners want their terms accepted first", hint=hint, **about)
    elif isinstance(error, RepositoryNotFoundError | HFValidationError):
        hint = "check the spelling; for a private model set HF_TOKEN; for a directory give a path that exists"
        made = ConfigError("is neither a directory here nor a model on the hub", hint=hint, **about)
    else:
        made = HubUnreachable(name, f"{constants.ENDPOINT} does not answer, {_first_line(error)}")
    made.__cause__ = error
    return made


def _check_files(info: ModelInfo, name: str) -> None:
    """Refuse, before the download, what could not be loaded after it."""
    files = [file.rfilename for file in info.siblings or ()]
    if "config.json" in files and any(file.endswith(".safetensors") for file in files):
        return
    ggufs = [file for file in files if file.endswith(".gguf")]
    hint = "take a model with config.json and *.safetensors"
    if ggufs:
        hint = f"download one of its GGUF files, such as {ggufs[0]}, and give the path of the file"
    elif "adapter_config.json" in files:
        hint = "it is a LoRA adapter: give the model it was made for, or merge the two"
    raise ConfigError("is on the hub, but not as config.json and *.safetensors", key="pretrain", value=name, hint=hint)


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}".rstrip(": ")
