"""The supervisor of one sandboxed program: it starts the program, feeds it, enforces limits and reports how it ended.

A bare interpreter runs it once for every program, so it imports only modules that cost nothing. It reads one request
from its standard input: eight bytes of length, then marshalled values, which come from Headway, never from a program.
It writes one report to its standard output: a header line, then stdout and stderr of the program. Its input stays open
while the program runs; when it closes, the caller is gone and everything is killed. If this process itself is killed,
bubblewrap ends with its parent and takes the program with it. The output limits of the request bound its memory.

If it runs as root, it becomes the request's unused user before it starts anything: RLIMIT_NPROC does not bind root. It
opens the files it needs before that, so they may lie in folders of root.
"""

from __future__ import annotations

# ruff: noqa: PTH123, PTH208  (pathlib costs as much to import as the whole of this program)
import marshal
import os
import resource
import select
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from collections.abc import Callable
    from typing import Any

    Request = dict[str, Any]
else:
    import _signal as signal  # without the enumerations of `signal`, which are slow to import


READY_FD, LIBRARY_FD = 3, 4
"""File descriptors of the shell script inside the sandbox, which closes them before the program starts."""
CHECK_S, GRACE_S = 0.05, 2.0
"""Interval of memory checks; how long a killed program may take to end."""


def read_request() -> Request:
    size = int.from_bytes(sys.stdin.buffer.read(8), "big")
    request: Request = marshal.loads(sys.stdin.buffer.read(size))
    return request


def make_memory_file(content: bytes) -> int:
    """Return the descriptor of a new memory file with `content`."""
    fd = os.memfd_create("headway", 0)
    view = memoryview(content)
    while view:
        view = view[os.write(fd, view) :]
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def make_arguments(request: Request, info_fd: int) -> tuple[list[str], list[int]]:
    """Return the arguments of bubblewrap, and the descriptors that it inherits."""
    fds = [info_fd]

    def inherit(fd: int) -> str:
        fds.append(fd)
        return str(fd)

    argv = ["bwrap", "--info-fd", str(info_fd), *request["head"]]
    for path, content in request["files"].items():
        argv += ["--file", inherit(make_memory_file(content)), path]
    argv += ["--seccomp", inherit(make_memory_file(request["seccomp"]))]
    return [*argv, *request["tail"]], fds


def switch_user(uid: int) -> None:
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def start(
    request: Request,
    bwrap_fd: int,
    library_fd: int | None,
    argv: list[str],
    fds: list[int],
    pipes: tuple[tuple[int, int], ...],
) -> int:
    """Fork bubblewrap with the resource limits set; return its process id."""
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setsid()
        for ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and programs would inherit that
            signal.signal(ignored, signal.SIG_DFL)
        for source, target in pipes:
            os.dup2(source, target)
        environment = {}
        if library_fd is not None:
            os.dup2(library_fd, LIBRARY_FD)
            environment["LD_LIBRARY_PATH"] = f"/proc/self/fd/{LIBRARY_FD}"
        for fd in fds:
            os.set_inheritable(fd, True)
        for name, value in request["rlimits"].items():
            resource.setrlimit(getattr(resource, name), (value, value))
        os.execve(bwrap_fd, argv, environment)
    except BaseException as error:
        os.write(2, f"{type(error).__name__}: {error}".encode())
    os._exit(126)


class SupervisedRun:
    """One program, from start to report."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.texts = {"stdout": bytearray(), "stderr": bytearray()}
        self.info = bytearray()
        self.ready = False
        self.ending: str | None = None
        self.inner: int | None = None
        self.pid = self.outer = self.inner_fd = -1
        self.started = self.killed_at = self.ended = 0.0
        self.poll = select.poll()
        self.handlers: dict[int, Callable[[int], None]] = {}

    def launch(self) -> None:
        request = self.request
        # Reserve the lowest descriptors for the shell script, so that nothing opened below uses one of them.
        for _ in range(8):
            os.dup(0)
        bwrap_fd = os.open(request["bwrap"], os.O_PATH)
        library = request["library"]
        library_fd = os.open(library, os.O_PATH | os.O_DIRECTORY) if library else None
        info, info_fd = os.pipe()
        argv, fds = make_arguments(request, info_fd)
        in_read, in_write = os.pipe()
        out_read, out_write = os.pipe()
        err_read, err_write = os.pipe()
        ready_read, ready_write = os.pipe()
        if request["uid"]:
            switch_user(request["uid"])
        pipes = ((in_read, 0), (out_write, 1), (err_write, 2), (ready_write, READY_FD))
        self.started = time.monotonic()
        self.pid = start(request, bwrap_fd, library_fd, argv, fds, pipes)
        for fd in (in_read, out_write, err_write, ready_write, *fds):
            os.close(fd)
        self.outer = os.pidfd_open(self.pid)
        self.feed_stdin(in_write, request["stdin"])
        self.collect_output(out_read, "stdout")
        self.collect_output(err_read, "stderr")
        self.watch_fd(info, self.read_info)
        self.watch_fd(ready_read, self.read_ready)
        self.watch_fd(0, self.stop_without_caller)
        self.watch_fd(self.outer, lambda fd: None)

    def watch_fd(self, fd: int, handler: Callable[[int], None], events: int = select.POLLIN) -> None:
        self.handlers[fd] = handler
        self.poll.register(fd, events)

    def close_fd(self, fd: int) -> None:
        self.poll.unregister(fd)
        del self.handlers[fd]
        os.close(fd)

    def feed_stdin(self, fd: int, data: bytes) -> None:
        os.set_blocking(fd, False)
        rest = memoryview(data)

        def write(_: int) -> None:
            nonlocal rest
            try:
                rest = rest[os.write(fd, rest[:65536]) :] if rest else rest
            except BlockingIOError:
                return
            except BrokenPipeError:
                rest = rest[:0]
            if not rest:
                self.close_fd(fd)

        self.watch_fd(fd, write, select.POLLOUT)

    def collect_output(self, fd: int, name: str) -> None:
        text, most = self.texts[name], self.request["output_bytes"]

        def read(_: int) -> None:
            part = os.read(fd, 65536)
            if not part:
                self.close_fd(fd)
            if len(text) + len(part) > most:
                self.stop("output")
            text.extend(part[: most - len(text)])

        self.watch_fd(fd, read)

    def read_info(self, fd: int) -> None:
        """Read the process id inside the namespace from bubblewrap."""
        part = os.read(fd, 4096)
        self.info += part
        if not part:
            self.close_fd(fd)
            _, _, tail = bytes(self.info).partition(b'"child-pid":')
            digits = tail.split(b",")[0].split(b"}")[0].strip()
            try:
                self.inner_fd = os.pidfd_open(int(digits))
                self.inner = int(digits)
            except (OSError, ValueError):  # it has ended already, or never started
                return
            if self.ending is not None:
                self.kill()

    def read_ready(self, fd: int) -> None:
        """Note that the program's own root is in place."""
        if os.read(fd, 16):
            self.ready = True
        else:
            self.close_fd(fd)

    def stop_without_caller(self, fd: int) -> None:
        """Stop the program because the caller has closed the request."""
        self.close_fd(fd)
        self.stop("cancelled")

    def stop(self, ending: str) -> None:
        if self.ending is None:
            self.ending = ending
            self.killed_at = time.monotonic()
            self.kill()

    def kill(self) -> None:
        """Kill the first process of the namespace; the kernel then kills all others."""
        try:
            if self.inner is not None:
                signal.pidfd_send_signal(self.inner_fd, signal.SIGKILL)
            else:
                os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass

    def wait_for_end(self) -> tuple[int, resource.struct_rusage]:
        """Handle events until bubblewrap ends; return its status and resource usage."""
        deadline = self.started + self.request["wall_s"]
        gone, checked = False, self.started
        while not gone:
            now = time.monotonic()
            if now >= deadline:
                self.stop("timeout")
            if self.ending is not None and now > self.killed_at + GRACE_S:
                os.killpg(self.pid, signal.SIGKILL)
            if now >= checked + CHECK_S:
                checked = now
                self.check_limits()
            for fd, _ in self.poll.poll(1000 * min(CHECK_S, max(deadline - now, 0.001))):
                gone = gone or fd == self.outer
                if fd in self.handlers:
                    self.handlers[fd](fd)
        _, status, usage = os.wait4(self.pid, 0)
        self.ended = time.monotonic()
        self.drain_pipes()
        return status, usage

    def drain_pipes(self) -> None:
        """Read the rest of the pipes. No process can write to them any more, so they end."""
        self.close_fd(self.outer)
        if 0 in self.handlers:
            self.close_fd(0)
        deadline = time.monotonic() + GRACE_S
        while self.handlers and time.monotonic() < deadline:
            for fd, _ in self.poll.poll(100):
                if fd in self.handlers:
                    self.handlers[fd](fd)

    def check_limits(self) -> None:
        """Check the memory of all processes together and the number of files, which no resource limit counts.

        Nothing is checked before the program has its own root: until then its root is that of the host.
        """
        if not self.ready or self.inner is None or self.ending is not None:
            return
        if measure_memory(self.inner, self.request["memory_bytes"]) > self.request["memory_bytes"]:
            self.stop("memory")
        try:
            disk = os.statvfs(f"/proc/{self.inner}/root{self.request['folder']}")
        except OSError:
            return
        if disk.f_files - disk.f_ffree > self.request["max_files"]:
            self.stop("files")

    def report(self, status: int, usage: resource.struct_rusage) -> bytes:
        code, cpu_s = os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime
        stdout, stderr = self.texts["stdout"], self.texts["stderr"]
        header = (int(self.ready), self.ending or "-", code, cpu_s, self.ended - self.started, len(stdout), len(stderr))
        return " ".join(map(str, header)).encode() + b"\n" + stdout + stderr


def list_descendants(pid: int) -> list[str]:
    """Return a process and its descendants."""
    found, waiting = [], [str(pid)]
    while waiting:
        process = waiting.pop()
        found.append(process)
        try:
            for thread in os.listdir(f"/proc/{process}/task"):
                with open(f"/proc/{process}/task/{thread}/children") as file:
                    waiting += file.read().split()
        except OSError:  # it has ended
            continue
    return found


def measure_memory(pid: int, enough: int) -> int:
    """Return the bytes that a process and its descendants hold together.

    The quick count has shared pages once for each process; if it exceeds `enough`, the exact count decides.
    """
    processes = list_descendants(pid)
    total = sum(measure_resident(process) for process in processes)
    return total if total <= enough else sum(measure_proportional(process) for process in processes)


def measure_resident(process: str) -> int:
    try:
        with open(f"/proc/{process}/statm") as file:
            return resource.getpagesize() * int(file.read().split()[1])
    except OSError:  # it has ended
        return 0


def measure_proportional(process: str) -> int:
    """Count shared pages by share. A process that forbids access counts with all its pages."""
    try:
        with open(f"/proc/{process}/smaps_rollup") as file:
            for line in file:
                if line.startswith("Pss:"):
                    return 1024 * int(line.split()[1])
    except OSError:
        pass
    return measure_resident(process)


def main() -> None:
    run = SupervisedRun(read_request())
    run.launch()
    status, usage = run.wait_for_end()
    sys.stdout.buffer.write(run.report(status, usage))
    sys.stdout.buffer.flush()
