"""The command line of bubblewrap: what a sandboxed program sees of the machine.

Its world is an empty read-only root with the system's programs and libraries, one interpreter, a private folder in
memory (`/tmp`, home and working directory at once), fresh `/proc` and `/dev`, and nothing else: no home, no `/etc`
but what the loader needs, no other process, no network but an unconnected loopback, no variable of ours.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from headway.errors import ConfigError
from headway.sandbox import seccomp
from headway.sandbox.sandbox_limits import SandboxLimits

FOLDER = "/tmp"
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/alternatives", "/nix/store")
_SHARED_MEMORY_BYTES = 4 << 20
_MOST_FILES = 200
_PRELUDE = (
    'ulimit -u "$0" 2>/dev/null || ulimit -p "$0" || exit 125; '
    "echo ready >&3; exec 3>&- 4>&- 5>&2 2>/dev/null; "
    '(exec "$@" 2>&5 5>&-); exit $?'
)
"""Runs as the first process of the namespace. The limit on processes counts inside the user namespace only when it is
set there; the end of this shell is the end of every process that the program has left behind."""
_VARIABLES = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": FOLDER,
    "TMPDIR": FOLDER,
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",
    "PYTHONDONTWRITEBYTECODE": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxLayout:
    """What every run of one sandbox shares. Filled by the probe."""

    bwrap: str
    library: str | None = None
    """Folder of libraries that came with `bwrap`, where only root may go there."""
    python: str
    """Interpreter inside."""
    prefixes: tuple[str, ...] = ()
    """Folders that are shown read-only, besides the system's."""
    packages: tuple[str, ...] = ()
    """Those of them that Python imports from."""
    hidden: tuple[str, ...] = ()
    """Folders below the system's that are not the system's, such as ours: shown empty."""


def make_supervisor_request(
    jail: SandboxLayout,
    argv: Sequence[str],
    *,
    stdin: bytes,
    files: Mapping[str, bytes],
    limits: SandboxLimits,
    uid: int,
) -> dict[str, Any]:
    """What the supervisor is asked to do, as plain values."""
    disk = limits.disk_mb << 20
    return {
        "bwrap": jail.bwrap,
        "library": jail.library,
        "uid": uid,
        "head": _head(jail, disk),
        "files": {_inside(name): content for name, content in _checked(files, disk)},
        "seccomp": seccomp.make_filter(),
        "tail": [*_tail(jail), str(limits.processes + 1), *argv],
        "stdin": stdin,
        "folder": FOLDER,
        "wall_s": limits.wall_s,
        "output_bytes": limits.output_kb << 10,
        "memory_bytes": limits.memory_mb << 20,
        "files_most": limits.files,
        "rlimits": {
            "RLIMIT_CPU": limits.cpu_s,
            "RLIMIT_AS": limits.memory_mb << 20,
            "RLIMIT_FSIZE": disk,
            "RLIMIT_NOFILE": limits.open_files,
            "RLIMIT_CORE": 0,
        },
    }


def _head(jail: SandboxLayout, disk: int) -> list[str]:
    words = ["--unshare-all", "--unshare-user", "--disable-userns", "--uid", "1000", "--gid", "1000"]
    words += ["--hostname", "sandbox", "--die-with-parent", "--as-pid-1", "--new-session", "--clearenv"]
    variables = _VARIABLES | ({"PYTHONPATH": ":".join(jail.packages)} if jail.packages else {})
    for name, value in variables.items():
        words += ["--setenv", name, value]
    for path in _SYSTEM:
        words += _system(path)
    for path in jail.hidden:
        words += ["--tmpfs", path]
    words += ["--perms", "0700", "--size", str(disk), "--tmpfs", FOLDER]
    words += ["--proc", "/proc", "--dev", "/dev", "--size", str(_SHARED_MEMORY_BYTES), "--tmpfs", "/dev/shm"]
    for path in jail.prefixes:
        words += ["--ro-bind", path, path]
    return words


def _tail(jail: SandboxLayout) -> list[str]:
    words = []
    for path in (*jail.hidden, "/dev", "/"):
        words += ["--remount-ro", path]
    return [*words, "--chdir", FOLDER, "--", "/bin/sh", "-c", _PRELUDE]


def find_hidden_folders(candidates: Sequence[str]) -> tuple[str, ...]:
    """Those of `candidates`, and the system's sources, that would be seen because they lie below a shown folder."""
    shown = tuple(f"{path}/" for path in _SYSTEM)
    paths = {os.path.realpath(path) for path in (*candidates, "/usr/src")}
    return tuple(sorted(path for path in paths if path.startswith(shown) and Path(path).is_dir()))


def _system(path: str) -> list[str]:
    """Merged-usr systems have links where others have folders."""
    place = Path(path)
    if place.is_symlink():
        return ["--symlink", str(place.readlink()), path]
    return ["--ro-bind", path, path] if place.exists() else []


def _inside(name: str) -> str:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in name:
        raise ConfigError("must be a relative path inside the folder", key="files", value=name)
    return f"{FOLDER}/{path}"


def _checked(files: Mapping[str, bytes], disk: int) -> list[tuple[str, bytes]]:
    if len(files) > _MOST_FILES:
        raise ConfigError(f"at most {_MOST_FILES} files", key="files", value=len(files))
    if sum(map(len, files.values())) > disk:
        raise ConfigError("more than limits.disk_mb", key="files", value=sum(map(len, files.values())))
    return list(files.items())
