"""What a sandboxed program may use, how it ended, and the errors of a sandbox that cannot be had."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from headway.errors import BackendError, ConfigError


class SandboxRefused(BackendError):
    """This machine cannot enforce what untrusted code needs; the message names what is missing and how to get it."""

    fatal = True


class SandboxBroken(BackendError):
    """The sandbox itself failed: nothing is known about the program, which may be tried again."""


class ProgramEnding(StrEnum):
    """Why a program stopped."""

    EXITED = "exited"
    SIGNALLED = "signalled"
    TIMEOUT = "timeout"
    OUTPUT = "output"
    """It wrote more than its limit."""
    MEMORY = "memory"
    """Its processes together held more than the limit; one that hits it alone gets a MemoryError of its own first."""
    FILES = "files"
    """It made more files than its limit."""
    CANCELLED = "cancelled"
    """The caller went away."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxLimits:
    """Ceilings of one run; each is enforced by the kernel or ends the run."""

    wall_s: float = 10.0
    """From start to end, however little of it is computing."""
    cpu_s: int = 10
    """Computing time of each process."""
    memory_mb: int = 512
    """Address space of each process, and resident memory of all together."""
    disk_mb: int = 64
    """What fits into the private folder, and the largest file."""
    processes: int = 32
    """Processes and threads at one time."""
    open_files: int = 64
    """File descriptors of each process."""
    files: int = 10_000
    """Files and folders made in the private folder."""
    output_kb: int = 256
    """Text on each of stdout and stderr; more ends the run."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if not getattr(self, name) > 0:
                raise ConfigError("must be more than 0", key=f"limits.{name}", value=getattr(self, name))


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramOutcome:
    """What became of one program."""

    ending: ProgramEnding
    exit_code: int | None
    """`None` where the program was ended by a signal or a limit."""
    signal: int | None
    """That ended it. A program that exits with 128 + n by itself looks the same."""
    stdout: str
    stderr: str
    truncated: bool
    """Output was cut at the limit, and the program ended for it."""
    timed_out: bool
    cpu_s: float
    """Of the program and of those of its children that it waited for."""
    wall_s: float

    @property
    def ok(self) -> bool:
        """Ended by itself with exit code 0."""
        return self.exit_code == 0
