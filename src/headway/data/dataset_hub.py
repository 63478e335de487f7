"""Rows of Hugging Face datasets: from a folder, from the hub, or from the copy of it on this machine.

`hf:owner/name[/config[/split]]` is a dataset of the hub, `hf:path/to/folder` one that `save_to_disk` wrote or a
folder of data files. Guarantees: without a network the answer comes within seconds, and is an error that says what to
do unless a copy is in the cache. Does not need the library unless such an entry is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headway.data.data_files import NumberedRows
from headway.errors import ConfigError

_REACHABLE_S = 10.0
_KNOWN = ("config", "split")


def read_dataset_rows(name: str, options: Mapping[str, Any], *, folder: Path, key: str) -> NumberedRows:
    """The rows of dataset `name`. Options: `config` and `split` (train), where the name does not say them."""
    unknown = sorted(options.keys() - set(_KNOWN))
    if unknown:
        raise ConfigError(f"hf:{name} has no option {unknown[0]!r}", key=key, hint=f"one of {', '.join(_KNOWN)}")
    try:
        import datasets
    except ImportError as error:
        raise ConfigError("needs datasets", key=key, value=f"hf:{name}", hint="pip install 'headway[data]'") from error
    config, split = options.get("config"), options.get("split")
    path = folder / Path(name).expanduser()
    if path.is_dir():
        found = _from_folder(path, config, split, key)
    elif Path(name).is_absolute() or name.startswith(("./", "../", "~")):
        raise ConfigError("there is no such folder", key=key, value=f"hf:{name}")
    else:
        owner_and_name, config, split = _parted(name, config, split, key)
        found = _from_hub(owner_and_name, config, split or "train", key)
    if isinstance(found, datasets.DatasetDict):
        found = _split(found, split, f"hf:{name}", key)
    number = 0
    for batch in found.iter(1024):
        for values in zip(*batch.values(), strict=True):
            number += 1
            yield number, dict(zip(batch, values, strict=True))


def _parted(name: str, config: str | None, split: str | None, key: str) -> tuple[str, str | None, str | None]:
    parts = [part for part in name.split("/") if part]
    if not parts or len(parts) > 4:
        raise ConfigError("is no dataset", key=key, value=f"hf:{name}", hint="hf:owner/name/config/split, or a folder")
    more = [*parts[2:], None, None]
    return "/".join(parts[:2]), more[0] or config, more[1] or split


def _from_folder(path: Path, config: str | None, split: str | None, key: str) -> Any:
    import datasets

    try:
        if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
            return datasets.load_from_disk(str(path))
        return datasets.load_dataset(str(path), config, split=split)
    except Exception as error:
        raise _failed(error, str(path), key, "a folder that save_to_disk wrote, or one of data files") from error


def _from_hub(name: str, config: str | None, split: str, key: str) -> Any:
    import datasets

    unreachable = _unreachable(name)
    hint = "on a machine with a network: load_dataset(…).save_to_disk(folder), then hf:folder here"
    try:
        if unreachable is None:
            return datasets.load_dataset(name, config, split=split)
        with _offline():
            return datasets.load_dataset(name, config, split=split)
    except Exception as error:
        if unreachable is None:
            raise _failed(error, name, key, "hf:owner/name/config/split") from error
        problem = f"the hub does not answer ({unreachable}), there is no folder and no copy on this machine"
        raise ConfigError(problem, key=key, value=f"hf:{name}", hint=hint) from error


def _unreachable(name: str) -> str | None:
    """Why the hub gives nothing; the library itself would try for half a minute."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    try:
        HfApi().dataset_info(name, timeout=_REACHABLE_S)
    except HfHubHTTPError:
        return None  # it answers; loading says better what is wrong
    except Exception as error:
        return str(error) or type(error).__name__
    return None


@contextmanager
def _offline() -> Iterator[None]:
    import datasets
    from huggingface_hub import constants

    before = datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE
    datasets.config.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE = before


def _split(found: Any, split: str | None, name: str, key: str) -> Any:
    wanted = split or ("train" if "train" in found or len(found) != 1 else next(iter(found)))
    if wanted not in found:
        hint = f"options.split: one of {', '.join(found)}"
        raise ConfigError(f"has no split {wanted!r}", key=key, value=name, hint=hint)
    return found[wanted]


def _failed(error: Exception, name: str, key: str, hint: str) -> ConfigError:
    said = (str(error).strip().splitlines() or [""])[0]
    return ConfigError(f"cannot be loaded: {type(error).__name__}: {said}", key=key, value=f"hf:{name}", hint=hint)
