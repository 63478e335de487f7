"""Limits and outcomes of sandboxed programs, and the errors of the sandbox itself."""

from dataclasses import dataclass
from enum import StrEnum

from headway.errors import BackendError, ConfigError


class SandboxRefused(BackendError):
    """This machine cannot isolate untrusted code; the message names what is missing and how to get it."""

    fatal = True


class SandboxBroken(BackendError):
    """The sandbox itself failed. Nothing is known about the program, and a retry may succeed."""


class ProgramEnding(StrEnum):
    """Why a program stopped."""

    EXITED = "exited"
    SIGNALLED = "signalled"
    TIMEOUT = "timeout"
    OUTPUT = "output"
    """It wrote more than its limit."""
    MEMORY = "memory"
    """Its processes together held more than the limit; a single process gets a MemoryError first."""
    FILES = "files"
    """It made more files than its limit."""
    CANCELLED = "cancelled"
    """The caller was cancelled or died."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxLimits:
    """Limits of one run; each is enforced by the kernel or ends the run."""

    wall_s: float = 10.0
    """Wall-clock time of the whole run."""
    cpu_s: int = 10
    """Processor time of each process."""
    memory_mb: int = 512
    """Address space of each process, and resident memory of all together."""
    disk_mb: int = 64
    """Size of the private folder, and of the largest file."""
    processes: int = 32
    """Processes and threads at one time."""
    open_files: int = 64
    """File descriptors of each process."""
    files: int = 10_000
    """Files and folders made in the private folder."""
    output_kb: int = 256
    """Size of stdout and of stderr; more ends the run."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if not getattr(self, name) > 0:
                raise ConfigError("must be more than 0", key=f"limits.{name}", value=getattr(self, name))


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramOutcome:
    """How one program ended, and what it printed."""

    ending: ProgramEnding
    exit_code: int | None
    """`None` if a signal or a limit ended the program."""
    signal: int | None
    """Signal that ended it. A program that exits with 128 + n by itself looks the same."""
    stdout: str
    stderr: str
    truncated: bool
    """Whether the output exceeded its limit, which ended the program."""
    timed_out: bool
    cpu_s: float
    """Processor time of the program and of the children that it waited for."""
    wall_s: float

    @property
    def ok(self) -> bool:
        """Whether it ended by itself with exit code 0."""
        return self.exit_code == 0
