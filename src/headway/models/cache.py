"""Things that are made once and kept: `$HEADWAY_CACHE`, else `~/.cache/headway`.

Guarantees: an entry is there whole or not at all, whatever is killed when; of several processes that want the same
one, one makes it and the others wait for it. What a killed process left behind is swept by the next that makes the
same entry.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from headway.errors import ConfigError


def cache_root() -> Path:
    """Where everything is kept unless a caller says otherwise."""
    chosen = os.environ.get("HEADWAY_CACHE")
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "headway"


def made_once(root: Path, key: str, make: Callable[[Path], None]) -> Path:
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
