"""Rows of Hugging Face datasets: from a folder, from the hub, or from the hub's cache on this machine.

`hf:owner/name[/config[/split]]` is a dataset of the hub. `hf:path/to/folder` is one that `save_to_disk` wrote, or a
folder of data files. Guarantees: without a network the answer comes within seconds; it is an error that says what to do
unless the dataset is cached. The library is needed only if such an entry is read.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from headway.data.data_files import NumberedRows
from headway.errors import ConfigError
from headway.extras import import_optional

_PROBE_TIMEOUT_S = 10.0
_OPTIONS = ("config", "split")


def read_dataset_rows(name: str, options: Mapping[str, Any], *, folder: Path, key: str) -> NumberedRows:
    """Yield the rows of dataset `name`. The options `config` and `split` (train) complete the name."""
    unknown = sorted(options.keys() - set(_OPTIONS))
    if unknown:
        raise ConfigError(f"hf:{name} has no option {unknown[0]!r}", key=key, hint=f"one of {', '.join(_OPTIONS)}")
    datasets = import_optional("datasets", extra="data", key=key, value=f"hf:{name}", problem="needs datasets")
    config, split = options.get("config"), options.get("split")
    path = folder / Path(name).expanduser()
    if path.is_dir():
        found = _load_folder(path, config, split, key)
    elif Path(name).is_absolute() or name.startswith(("./", "../", "~")):
        raise ConfigError("there is no such folder", key=key, value=f"hf:{name}")
    else:
        owner_and_name, config, split = _parse_name(name, config, split, key)
        found = _load_from_hub(owner_and_name, config, split or "train", key)
    if isinstance(found, datasets.DatasetDict):
        found = _select_split(found, split, f"hf:{name}", key)
    batches = ((list(batch), zip(*batch.values(), strict=True)) for batch in found.iter(1024))
    rows = (dict(zip(columns, values, strict=True)) for columns, batch in batches for values in batch)
    yield from enumerate(rows, start=1)


def _parse_name(name: str, config: str | None, split: str | None, key: str) -> tuple[str, str | None, str | None]:
    parts = [part for part in name.split("/") if part]
    if not parts or len(parts) > 4:
        raise ConfigError("is no dataset", key=key, value=f"hf:{name}", hint="hf:owner/name/config/split, or a folder")
    more = [*parts[2:], None, None]
    return "/".join(parts[:2]), more[0] or config, more[1] or split


def _load_folder(path: Path, config: str | None, split: str | None, key: str) -> Any:
    import datasets

    try:
        if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
            return datasets.load_from_disk(str(path))
        return datasets.load_dataset(str(path), config, split=split)
    except Exception as error:
        raise _load_error(error, str(path), key, "a folder that save_to_disk wrote, or one of data files") from error


def _load_from_hub(name: str, config: str | None, split: str, key: str) -> Any:
    import datasets

    unreachable = _probe_hub(name)
    try:
        with nullcontext() if unreachable is None else _offline():
            return datasets.load_dataset(name, config, split=split)
    except Exception as error:
        if unreachable is None:
            raise _load_error(error, name, key, "hf:owner/name/config/split") from error
        problem = f"the hub does not answer ({unreachable}), there is no folder and no copy on this machine"
        hint = "on a machine with a network: load_dataset(…).save_to_disk(folder), then hf:folder here"
        raise ConfigError(problem, key=key, value=f"hf:{name}", hint=hint) from error


def _probe_hub(name: str) -> str | None:
    """Return why the hub does not answer, or None if it does; the library itself would try for half a minute."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    try:
        HfApi().dataset_info(name, timeout=_PROBE_TIMEOUT_S)
    except HfHubHTTPError:
        return None  # the hub answers, and loading gives a better message
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


def _select_split(found: Any, split: str | None, name: str, key: str) -> Any:
    wanted = split or ("train" if "train" in found or len(found) != 1 else next(iter(found)))
    if wanted not in found:
        hint = f"options.split: one of {', '.join(found)}"
        raise ConfigError(f"has no split {wanted!r}", key=key, value=name, hint=hint)
    return found[wanted]


def _load_error(error: Exception, name: str, key: str, hint: str) -> ConfigError:
    first_line = (str(error).strip().splitlines() or [""])[0]
    problem = f"cannot be loaded: {type(error).__name__}: {first_line}"
    return ConfigError(problem, key=key, value=f"hf:{name}", hint=hint)
