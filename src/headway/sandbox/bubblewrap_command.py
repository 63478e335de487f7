"""The command line of bubblewrap, which decides what a sandboxed program sees of the machine.

A program sees an empty read-only root with the system's programs and libraries, one interpreter, a private folder in
memory (`/tmp`, home and working directory at once), and fresh `/proc` and `/dev`. It sees nothing else: no home, no
`/etc` but what the loader needs, no other process, no network but an unconnected loopback, and no variable of the host.
"""

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
_MAX_FILES = 200
_PRELUDE = (
    'ulimit -u "$0" 2>/dev/null || ulimit -p "$0" || exit 125; '
    "echo ready >&3; exec 3>&- 4>&- 5>&2 2>/dev/null; "
    '(exec "$@" 2>&5 5>&-); exit $?'
)
"""Shell script that runs as the first process of the namespace. The limit on processes counts inside the user namespace
only if it is set there. When this shell ends, the kernel ends every process that the program has left behind."""
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
    """What all runs of one sandbox share. The probe fills it."""

    bwrap: str
    library: str | None = None
    """Folder of libraries that came with `bwrap`, if only root may read it."""
    python: str
    """Interpreter inside the sandbox."""
    prefixes: tuple[str, ...] = ()
    """Folders that are visible read-only, besides those of the system."""
    packages: tuple[str, ...] = ()
    """Those of the visible folders that Python imports from."""
    hidden: tuple[str, ...] = ()
    """Folders below visible ones that must stay hidden, such as the working directory; they appear empty."""


def make_supervisor_request(
    layout: SandboxLayout,
    argv: Sequence[str],
    *,
    stdin: bytes,
    files: Mapping[str, bytes],
    limits: SandboxLimits,
    uid: int,
) -> dict[str, Any]:
    """Return the request to the supervisor, as plain values."""
    disk = limits.disk_mb << 20
    return {
        "bwrap": layout.bwrap,
        "library": layout.library,
        "uid": uid,
        "head": _make_head(layout, disk),
        "files": {_path_inside(name): content for name, content in _check_files(files, disk)},
        "seccomp": seccomp.make_filter(),
        "tail": [*_make_tail(layout), str(limits.processes + 1), *argv],
        "stdin": stdin,
        "folder": FOLDER,
        "wall_s": limits.wall_s,
        "output_bytes": limits.output_kb << 10,
        "memory_bytes": limits.memory_mb << 20,
        "max_files": limits.files,
        "rlimits": {
            "RLIMIT_CPU": limits.cpu_s,
            "RLIMIT_AS": limits.memory_mb << 20,
            "RLIMIT_FSIZE": disk,
            "RLIMIT_NOFILE": limits.open_files,
            "RLIMIT_CORE": 0,
        },
    }


def _make_head(layout: SandboxLayout, disk: int) -> list[str]:
    """Return the arguments of bubblewrap before the files."""
    arguments = ["--unshare-all", "--unshare-user", "--disable-userns", "--uid", "1000", "--gid", "1000"]
    arguments += ["--hostname", "sandbox", "--die-with-parent", "--as-pid-1", "--new-session", "--clearenv"]
    variables = _VARIABLES | ({"PYTHONPATH": ":".join(layout.packages)} if layout.packages else {})
    for name, value in variables.items():
        arguments += ["--setenv", name, value]
    for path in _SYSTEM:
        arguments += _bind_system_path(path)
    inner = [path for path in layout.hidden if _lies_below(path, layout.prefixes)]
    for path in layout.hidden:
        arguments += ["--tmpfs", path] if path not in inner else []
    arguments += ["--perms", "0700", "--size", str(disk), "--tmpfs", FOLDER]
    arguments += ["--proc", "/proc", "--dev", "/dev", "--size", str(_SHARED_MEMORY_BYTES), "--tmpfs", "/dev/shm"]
    for path in layout.prefixes:
        arguments += ["--ro-bind", path, path]
    for path in inner:
        arguments += ["--tmpfs", path]
    return arguments


def _make_tail(layout: SandboxLayout) -> list[str]:
    """Return the arguments of bubblewrap after the files, up to the shell script."""
    arguments = []
    for path in (*layout.hidden, "/dev", "/"):
        arguments += ["--remount-ro", path]
    return [*arguments, "--chdir", FOLDER, "--", "/bin/sh", "-c", _PRELUDE]


def find_hidden_folders(candidates: Sequence[str], prefixes: Sequence[str]) -> tuple[str, ...]:
    """Return the folders below visible ones that must be hidden.

    They are those of `candidates` and the system's sources below the system's folders, and this package, which knows
    the answers of its own tasks, below any visible folder.
    """
    paths = {os.path.realpath(path) for path in (*candidates, "/usr/src")}
    hidden = {path for path in paths if _lies_below(path, _SYSTEM)}
    package = os.path.realpath(Path(__file__).parents[1])
    hidden |= {package} if _lies_below(package, (*_SYSTEM, *prefixes)) else set()
    return tuple(sorted(path for path in hidden if Path(path).is_dir()))


def _lies_below(path: str, folders: Sequence[str]) -> bool:
    return path.startswith(tuple(f"{folder}/" for folder in folders))


def _bind_system_path(path: str) -> list[str]:
    """Return the arguments that show one folder of the system, which may be a link on merged-usr systems."""
    folder = Path(path)
    if folder.is_symlink():
        return ["--symlink", str(folder.readlink()), path]
    return ["--ro-bind", path, path] if folder.exists() else []


def _path_inside(name: str) -> str:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in name:
        raise ConfigError("must be a relative path inside the folder", key="files", value=name)
    return f"{FOLDER}/{path}"


def _check_files(files: Mapping[str, bytes], disk: int) -> list[tuple[str, bytes]]:
    if len(files) > _MAX_FILES:
        raise ConfigError(f"at most {_MAX_FILES} files", key="files", value=len(files))
    if sum(map(len, files.values())) > disk:
        raise ConfigError("more than limits.disk_mb", key="files", value=sum(map(len, files.values())))
    return list(files.items())
