"""What a program in the sandbox tries and must not get: one test for each way out."""

from __future__ import annotations

import asyncio
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from headway.sandbox import ProgramEnding, Sandbox, SandboxLimits
from tests.sandbox.factory import play, processes_with, run


def test_it_has_no_network() -> None:
    outcome = run(
        """
import socket
for address in (("127.0.0.1", 22), ("169.254.169.254", 80), ("1.1.1.1", 53)):
    try:
        socket.create_connection(address, timeout=1)
        print("reached", address)
    except OSError as error:
        print("no", error.errno)
try:
    print(socket.getaddrinfo("example.org", 80))
except OSError:
    print("no name")
print(open("/proc/net/dev").read().count(":"))
"""
    )
    assert outcome.ok, outcome
    assert "reached" not in outcome.stdout
    assert outcome.stdout.splitlines()[-2:] == ["no name", "1"], "only the loopback of its own"


def test_a_server_on_the_host_cannot_be_reached() -> None:
    async def scene() -> None:
        served = []
        server = await asyncio.start_server(lambda r, w: served.append(1), "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        code = f"import socket; socket.create_connection(('127.0.0.1', {port}), timeout=1)"
        outcome = await Sandbox().run_python(code)
        server.close()
        assert outcome.exit_code == 1 and "refused" in outcome.stderr
        assert not served

    play(scene())


@pytest.mark.parametrize("family", ["AF_VSOCK", "AF_NETLINK", "AF_PACKET", "AF_ALG"])
def test_sockets_that_no_network_namespace_holds_back_are_denied(family: str) -> None:
    kind = "SOCK_SEQPACKET" if family == "AF_ALG" else "SOCK_RAW" if family == "AF_PACKET" else "SOCK_STREAM"
    outcome = run(f"import socket; socket.socket(socket.{family}, socket.{kind})")
    assert outcome.exit_code == 1
    assert "Operation not permitted" in outcome.stderr


def test_it_reads_no_file_of_the_host(tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("hunter2")
    secret.chmod(0o644)
    outcome = run(
        f"""
import os
for path in ({str(secret)!r}, {str(Path.home())!r}, "/etc/shadow", "/etc/passwd", {str(Path.cwd())!r}, "/var", "/run"):
    print(os.path.exists(path))
print(sorted(os.listdir("/")), sorted(os.listdir("/etc")))
"""
    )
    assert outcome.ok, outcome
    assert "True" not in outcome.stdout
    assert "home" not in outcome.stdout.splitlines()[-1]


def test_it_writes_nowhere_but_in_its_folder() -> None:
    outcome = run(
        """
import os
for path in ("/x", "/usr/x", "/usr/bin/python3", "/etc/x", "/dev/x", "/proc/sys/kernel/hostname", "/proc/self/oom_adj"):
    try:
        open(path, "w").write("1")
        print("wrote", path)
    except OSError:
        pass
open("/tmp/mine", "w").write("1")
try:
    os.remount = os.system("mount -o remount,rw / 2>/dev/null || umount /tmp 2>/dev/null")
except OSError:
    pass
print(open("/tmp/mine").read(), os.path.exists("/tmp/mine"))
"""
    )
    assert outcome.ok, outcome
    assert [line for line in outcome.stdout.splitlines() if "oom_adj" not in line] == ["1 True"]
    assert not Path("/tmp/mine").exists()


def test_links_lead_nowhere(tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("hunter2")
    outcome = run(
        f"""
import os
os.symlink({str(secret)!r}, "a")
os.symlink("/proc/1/root{secret}", "b")
os.symlink("../../../../../../../etc/shadow", "c")
for name in "abc":
    try:
        print(open(name).read())
    except OSError as error:
        print("no", error.errno)
for fd in os.listdir("/proc/self/fd"):
    try:
        print(os.path.exists(f"/proc/self/fd/{{fd}}/../../../..{secret}"))
    except OSError:
        pass
try:
    os.link("/usr/bin/env", "d")
    print("linked")
except OSError:
    pass
"""
    )
    assert outcome.ok, outcome
    assert "hunter2" not in outcome.stdout and "root:" not in outcome.stdout and "linked" not in outcome.stdout
    assert "True" not in outcome.stdout


def test_no_descriptor_of_ours_is_open_inside() -> None:
    outcome = run(
        "import os; print([os.readlink(f'/proc/self/fd/{n}') for n in (0, 1, 2)], os.listdir('/proc/self/fd'))"
    )
    assert outcome.stdout.count("pipe:") == 3
    assert outcome.stdout.strip().endswith("['0', '1', '2', '3']"), "the fourth is the folder being listed"


def test_a_fork_bomb_stays_small_and_ends() -> None:
    marker = f"bomb{os.getpid()}"
    code = """
import os
while True:
    try:
        os.fork()
    except OSError:
        pass
"""

    async def scene() -> int:
        sandbox, most = Sandbox(), 0
        await sandbox.probe()
        limits = SandboxLimits(wall_s=1.5, processes=16)
        running = asyncio.create_task(sandbox.run_python(code, arguments=[marker], limits=limits))
        while not running.done():
            await asyncio.sleep(0.1)
            most = max(most, len(processes_with(marker)))
        assert (await running).ending is ProgramEnding.TIMEOUT
        return most

    assert 1 < play(scene()) <= 40, "16 programs, their shell and bubblewrap"
    assert not processes_with(marker)


def test_threads_count_as_processes() -> None:
    outcome = run(
        """
import threading, time
for n in range(200):
    try:
        threading.Thread(target=time.sleep, args=(5,), daemon=True).start()
    except RuntimeError:
        break
print(n)
""",
        processes=16,
    )
    assert int(outcome.stdout) <= 16


def test_one_process_cannot_take_all_memory() -> None:
    outcome = run("x = []\nwhile True: x.append(bytearray(10 << 20))", memory_mb=128)
    assert outcome.exit_code == 1
    assert "MemoryError" in outcome.stderr


@pytest.mark.parametrize(("kind", "dumpable"), [("MAP_PRIVATE", 1), ("MAP_SHARED", 1), ("MAP_PRIVATE", 0)])
def test_many_processes_together_cannot_take_all_memory(kind: str, dumpable: int) -> None:
    outcome = run(
        f"""
import ctypes, mmap, os, time
ctypes.CDLL(None).prctl(4, {dumpable}, 0, 0, 0)  # 0: nobody may look into this process
for _ in range(8):
    if os.fork() == 0:
        x = mmap.mmap(-1, 60 << 20, mmap.{kind} | mmap.MAP_ANONYMOUS)
        for place in range(0, 60 << 20, 4096):
            x[place] = 1
        time.sleep(5)
        os._exit(0)
time.sleep(5)
""",
        memory_mb=128,
    )
    assert outcome.ending is ProgramEnding.MEMORY
    assert outcome.wall_s < 4


def test_memory_that_processes_share_counts_once() -> None:
    outcome = run(
        """
import os, time
x = bytearray(b"1") * (60 << 20)
for _ in range(6):
    if os.fork() == 0:
        time.sleep(0.5)
        os._exit(0)
for _ in range(6):
    os.wait()
print("done")
""",
        memory_mb=128,
    )
    assert outcome.stdout == "done\n", outcome


@pytest.mark.parametrize("call", ["memfd_create", "shmget"])
def test_memory_that_no_limit_counts_is_denied(call: str) -> None:
    code = {
        "memfd_create": "import os; os.memfd_create('x')",
        "shmget": "import ctypes; c = ctypes.CDLL(None, use_errno=True)\n"
        "assert c.shmget(1, 1 << 20, 0o1700) == -1 and ctypes.get_errno() == 1\nraise OSError('not permitted')",
    }[call]
    outcome = run(code)
    assert outcome.exit_code == 1
    assert "not permitted" in outcome.stderr


@pytest.mark.parametrize("folder", ["/tmp", "/dev/shm"])
def test_the_disk_cannot_be_filled(folder: str) -> None:
    outcome = run(
        f"""
written = 0
try:
    for n in range(100):
        with open(f"{folder}/{{n}}", "wb") as file:
            written += file.write(bytes(1 << 20))
except OSError as error:
    print("stopped", written >> 20, error.errno)
"""
    )
    words = outcome.stdout.split()
    assert words[0] == "stopped" and int(words[1]) <= 8, outcome


def test_one_file_cannot_outgrow_its_limit() -> None:
    outcome = run("open('/tmp/x', 'wb').truncate(1 << 40)")
    assert outcome.exit_code == 1
    assert "too large" in outcome.stderr


def test_files_without_number_end_the_run() -> None:
    outcome = run("n = 0\nwhile True:\n    open(f'/tmp/{n}', 'w'); n += 1", files=500)
    assert outcome.ending is ProgramEnding.FILES


def test_signals_reach_nobody_else() -> None:
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        outcome = run(
            f"""
import os, signal
for pid in (-1, 1, {os.getpid()}, {bystander.pid}, os.getppid()):
    for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP):
        try:
            os.kill(pid, number)
            print("sent", pid)
        except OSError as error:
            print("no", pid, error.errno)
print("alive")
"""
        )
        assert outcome.ok, outcome
        assert f"sent {bystander.pid}" not in outcome.stdout and f"sent {os.getpid()}" not in outcome.stdout
        assert outcome.stdout.endswith("alive\n")
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_it_sees_no_process_but_its_own() -> None:
    outcome = run(
        f"""
import os
pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
print(pids == [1, 2], os.path.exists("/proc/{os.getpid() + 100000}"))
for pid in pids:
    print(open(f"/proc/{{pid}}/cmdline").read().replace(chr(0), " "))
"""
    )
    assert outcome.stdout.startswith("True False")
    assert "supervisor" not in outcome.stdout and "bwrap" not in outcome.stdout


def test_it_reads_no_variable_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWAY_TEST_TOKEN", "hunter2")
    outcome = run(
        """
import os
print(dict(os.environ))
for pid in os.listdir("/proc"):
    if pid.isdigit():
        try:
            print(open(f"/proc/{pid}/environ").read())
        except OSError:
            pass
"""
    )
    assert outcome.ok
    assert "hunter2" not in outcome.stdout and "HEADWAY" not in outcome.stdout


def test_it_has_no_rights_and_gets_none() -> None:
    outcome = run(
        """
import ctypes, os
status = open("/proc/self/status").read().splitlines()
print([line.split()[1] for line in status if line.startswith(("CapEff", "CapBnd", "NoNewPrivs", "Seccomp:"))])
print(os.getuid(), ctypes.CDLL(None).unshare(0x10000000))
for change in (os.setuid, os.setgid):
    try:
        change(0)
        print("became root")
    except OSError:
        pass
try:
    os.chroot("/tmp")
    print("chroot")
except OSError:
    pass
"""
    )
    assert outcome.stdout.splitlines() == ["['0000000000000000', '0000000000000000', '1', '2']", "1000 -1"], outcome


def test_endless_output_is_cut_and_ended() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    outcome = run("import sys\nwhile True: sys.stdout.write('x' * 65536)")
    assert outcome.ending is ProgramEnding.OUTPUT and outcome.truncated
    assert len(outcome.stdout) == 64 << 10
    assert outcome.wall_s < 4
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50 << 10


def test_endless_output_on_the_other_channel_is_cut_as_well() -> None:
    outcome = run("import sys\nprint('first', flush=True)\nwhile True: sys.stderr.write('x' * 65536)")
    assert outcome.ending is ProgramEnding.OUTPUT
    assert outcome.stdout == "first\n"


def test_an_endless_loop_runs_out_of_computing_time() -> None:
    outcome = run("while True: pass", cpu_s=1)
    assert outcome.ending is ProgramEnding.SIGNALLED and outcome.exit_code is None
    assert 0.8 < outcome.cpu_s < 3


def test_sleeping_runs_out_of_time() -> None:
    outcome = run("import time; print('hm', flush=True); time.sleep(60)", wall_s=0.5)
    assert outcome.ending is ProgramEnding.TIMEOUT and outcome.timed_out
    assert outcome.stdout == "hm\n", "what it said before is kept"
    assert outcome.wall_s < 3 and outcome.cpu_s < 0.5


def test_limits_cannot_be_raised_again() -> None:
    outcome = run(
        """
import resource
for name in ("CPU", "AS", "NPROC", "FSIZE", "NOFILE", "CORE"):
    limit = getattr(resource, f"RLIMIT_{name}")
    soft, hard = resource.getrlimit(limit)
    assert soft == hard != resource.RLIM_INFINITY, name
    try:
        resource.setrlimit(limit, (hard + 1, hard + 1))
        print("raised", name)
    except (ValueError, OSError):
        pass
print("done")
"""
    )
    assert outcome.stdout == "done\n", outcome


def test_children_left_behind_end_with_their_program() -> None:
    marker = f"leftover{os.getpid()}"
    outcome = run(
        f"""
import os, subprocess, sys
for hidden in (False, True):
    subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(60) # {marker}"], start_new_session=True,
        stdout=subprocess.DEVNULL if hidden else None, stderr=subprocess.DEVNULL if hidden else None,
    )
if os.fork() == 0:  # a daemon, and a zombie beside it
    os.setsid()
    if os.fork() == 0:
        import time
        time.sleep(60)
    os._exit(0)
print("done")
"""
    )
    assert outcome.exit_code == 0 and outcome.stdout == "done\n"
    assert outcome.wall_s < 4, "nobody waits for them"
    assert not processes_with(marker)


def test_nothing_survives_a_cancelled_run() -> None:
    marker = f"cancelled{os.getpid()}"

    async def scene() -> None:
        sandbox = Sandbox()
        running = asyncio.create_task(sandbox.run(["/bin/sh", "-c", f"sleep 60; echo {marker}"]))
        while not processes_with(marker):
            assert not running.done(), running.result()
            await asyncio.sleep(0.02)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert not processes_with(marker)

    play(scene())


def test_nothing_survives_the_sudden_death_of_its_owner() -> None:
    marker = f"orphan{os.getpid()}"
    call = f"asyncio.run(Sandbox().run(['/bin/sh', '-c', 'sleep 60; echo {marker}']))"
    code = f"import asyncio; from headway.sandbox import *; {call}"

    async def scene() -> None:
        owner = await asyncio.create_subprocess_exec(sys.executable, "-c", code)
        while len(processes_with(f"echo {marker}")) < 3:  # itself, the supervisor's bubblewrap, the shells inside
            assert owner.returncode is None
            await asyncio.sleep(0.02)
        owner.kill()
        await owner.wait()
        async with asyncio.timeout(60):
            while processes_with(marker):  # noqa: ASYNC110  (nobody is left to tell us)
                await asyncio.sleep(0.02)

    play(scene())
