"""The small program beside every sandboxed one: starts it, feeds it, cuts it off, reports how it ended.

Run by a bare interpreter, once for every program, so it imports only what costs nothing to import. It reads
one request from its standard input: eight bytes of length, then marshalled values, which come from our own process and
never from a program. It writes one report to its standard output: a line of words, then stdout and stderr as they are.
Its input stays open while the program runs: when it closes, the caller is gone and everything is killed. When this
process itself is killed, bubblewrap sees its parent die and takes the program with it. What it holds in memory is
bounded by the output limits of the request.

Started as root it becomes the request's unused user before anything else is started: RLIMIT_NPROC does not bind root.
Files it needs are opened before that, so they may lie where only root can go.
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
    import _signal as signal  # without the enumerations around it, which cost the most


READY_FD, LIBRARY_FD = 3, 4
"""Open in the prelude inside the sandbox, which closes them before the program starts."""
WATCH_S, GRACE_S = 0.05, 2.0
"""How often memory is looked at; how long the end of a killed program may take."""


def read_request() -> Request:
    request: Request = marshal.loads(_exactly(int.from_bytes(_exactly(8), "big")))
    return request


def _exactly(count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = os.read(0, count - len(data))
        if not part:
            sys.exit(1)
        data += part
    return data


def memory_file(content: bytes) -> int:
    fd = os.memfd_create("headway", 0)
    view = memoryview(content)
    while view:
        view = view[os.write(fd, view) :]
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def arguments(request: Request, info_fd: int) -> tuple[list[str], list[int]]:
    """bubblewrap's arguments, with the descriptors of everything that is handed over as one."""
    fds = [info_fd]

    def opened(fd: int) -> str:
        fds.append(fd)
        return str(fd)

    argv = ["bwrap", "--info-fd", str(info_fd), *request["head"]]
    for path, content in request["files"].items():
        argv += ["--file", opened(memory_file(content)), path]
    argv += ["--seccomp", opened(memory_file(request["seccomp"]))]
    return [*argv, *request["tail"]], fds


def become(uid: int) -> None:
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
    """Fork bubblewrap with the limits on. Returns its process id."""
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setsid()
        for ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # by Python, and programs would inherit that
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
    """One program from start to report."""

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
        # the lowest numbers are kept for the prelude, so nothing opened below can be one of them
        for _ in range(8):
            os.dup(0)
        bwrap_fd = os.open(request["bwrap"], os.O_PATH)
        library = request["library"]
        library_fd = os.open(library, os.O_PATH | os.O_DIRECTORY) if library else None
        info, info_fd = os.pipe()
        argv, fds = arguments(request, info_fd)
        in_read, in_write = os.pipe()
        out_read, out_write = os.pipe()
        err_read, err_write = os.pipe()
        ready_read, ready_write = os.pipe()
        if request["uid"]:
            become(request["uid"])
        pipes = ((in_read, 0), (out_write, 1), (err_write, 2), (ready_write, READY_FD))
        self.started = time.monotonic()
        self.pid = start(request, bwrap_fd, library_fd, argv, fds, pipes)
        for fd in (in_read, out_write, err_write, ready_write, *fds):
            os.close(fd)
        self.outer = os.pidfd_open(self.pid)
        self.feed(in_write, request["stdin"])
        self.collect(out_read, "stdout")
        self.collect(err_read, "stderr")
        self.on(info, self.informed)
        self.on(ready_read, self.is_ready)
        self.on(0, self.abandoned)
        self.on(self.outer, lambda fd: None)

    def on(self, fd: int, handler: Callable[[int], None], events: int = select.POLLIN) -> None:
        self.handlers[fd] = handler
        self.poll.register(fd, events)

    def off(self, fd: int) -> None:
        self.poll.unregister(fd)
        del self.handlers[fd]
        os.close(fd)

    def feed(self, fd: int, data: bytes) -> None:
        os.set_blocking(fd, False)
        left = memoryview(data)

        def write(_: int) -> None:
            nonlocal left
            try:
                left = left[os.write(fd, left[:65536]) :] if left else left
            except BlockingIOError:
                return
            except BrokenPipeError:
                left = left[:0]
            if not left:
                self.off(fd)

        self.on(fd, write, select.POLLOUT)

    def collect(self, fd: int, name: str) -> None:
        text, most = self.texts[name], self.request["output_bytes"]

        def read(_: int) -> None:
            part = os.read(fd, 65536)
            if not part:
                self.off(fd)
            if len(text) + len(part) > most:
                self.stop("output")
            text.extend(part[: most - len(text)])

        self.on(fd, read)

    def informed(self, fd: int) -> None:
        part = os.read(fd, 4096)
        self.info += part
        if not part:
            self.off(fd)
            _, _, tail = bytes(self.info).partition(b'"child-pid":')
            digits = tail.split(b",")[0].split(b"}")[0].strip()
            try:
                self.inner_fd = os.pidfd_open(int(digits))
                self.inner = int(digits)
            except (OSError, ValueError):  # gone already, or never there
                return
            if self.ending is not None:
                self.kill()

    def is_ready(self, fd: int) -> None:
        if os.read(fd, 16):
            self.ready = True
        else:
            self.off(fd)

    def abandoned(self, fd: int) -> None:
        self.off(fd)
        self.stop("cancelled")

    def stop(self, ending: str) -> None:
        if self.ending is None:
            self.ending = ending
            self.killed_at = time.monotonic()
            self.kill()

    def kill(self) -> None:
        """End the first process of the namespace: the kernel ends all others. Its parent then reports."""
        try:
            if self.inner is not None:
                signal.pidfd_send_signal(self.inner_fd, signal.SIGKILL)
            else:
                os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass

    def follow(self) -> tuple[int, resource.struct_rusage]:
        """Until bubblewrap is gone. Returns its status and resource usage."""
        deadline = self.started + self.request["wall_s"]
        gone, watched = False, self.started
        while not gone:
            now = time.monotonic()
            if now >= deadline:
                self.stop("timeout")
            if self.ending is not None and now > self.killed_at + GRACE_S:
                os.killpg(self.pid, signal.SIGKILL)
            if now >= watched + WATCH_S:
                watched = now
                self.watch()
            for fd, _ in self.poll.poll(1000 * min(WATCH_S, max(deadline - now, 0.001))):
                gone = gone or fd == self.outer
                if fd in self.handlers:
                    self.handlers[fd](fd)
        _, status, usage = os.wait4(self.pid, 0)
        self.ended = time.monotonic()
        self.drain()
        return status, usage

    def drain(self) -> None:
        """What is left in the pipes. Nobody can write to them any more, so the end is there already."""
        self.off(self.outer)
        if 0 in self.handlers:
            self.off(0)
        late = time.monotonic() + GRACE_S
        while self.handlers and time.monotonic() < late:
            for fd, _ in self.poll.poll(100):
                if fd in self.handlers:
                    self.handlers[fd](fd)

    def watch(self) -> None:
        """Memory of all processes together and number of files: what no resource limit counts.

        Not before the program's world is there: until then its root is ours, with all our files.
        """
        if not self.ready or self.inner is None or self.ending is not None:
            return
        if memory(self.inner, self.request["memory_bytes"]) > self.request["memory_bytes"]:
            self.stop("memory")
        try:
            room = os.statvfs(f"/proc/{self.inner}/root{self.request['folder']}")
        except OSError:
            return
        if room.f_files - room.f_ffree > self.request["files_most"]:
            self.stop("files")

    def report(self, status: int, usage: resource.struct_rusage) -> bytes:
        code, cpu_s = os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime
        stdout, stderr = self.texts["stdout"], self.texts["stderr"]
        words = (int(self.ready), self.ending or "-", code, cpu_s, self.ended - self.started, len(stdout), len(stderr))
        return " ".join(map(str, words)).encode() + b"\n" + stdout + stderr


def family(pid: int) -> list[str]:
    """A process and its descendants."""
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


def memory(pid: int, enough: int) -> int:
    """Bytes that a process and its descendants hold together.

    Counted quickly, shared pages once for each process; where that is more than `enough`, counted again properly.
    """
    processes = family(pid)
    total = sum(resident(process) for process in processes)
    return total if total <= enough else sum(proportional(process) for process in processes)


def resident(process: str) -> int:
    try:
        with open(f"/proc/{process}/statm") as file:
            return resource.getpagesize() * int(file.read().split()[1])
    except OSError:  # it has ended
        return 0


def proportional(process: str) -> int:
    """Shared pages by share. A process that forbids to look gets none of its pages shared."""
    try:
        with open(f"/proc/{process}/smaps_rollup") as file:
            for line in file:
                if line.startswith("Pss:"):
                    return 1024 * int(line.split()[1])
    except OSError:
        pass
    return resident(process)


def main() -> None:
    run = SupervisedRun(read_request())
    run.launch()
    status, usage = run.follow()
    report = memoryview(run.report(status, usage))
    while report:
        report = report[os.write(1, report) :]
