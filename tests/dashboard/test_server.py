"""The server of the dashboard: who may read, what is answered, and that nothing is changed."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from headway.cli import dashboard_command, main
from headway.dashboard.dashboard_server import DashboardServer, open_listener
from headway.dashboard.run_catalogue import RunCatalogue
from headway.errors import ConfigError
from headway.monitor.event_files import LOG_FILE
from tests.dashboard.factory import add_samples, make_simulated_run

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("dashboard")
    make_simulated_run(directory / "one", "seed=1")
    add_samples(directory / "one")
    return directory


@asynccontextmanager
async def serving(root: Path, token: str | None = None) -> AsyncIterator[aiohttp.ClientSession]:
    listener = open_listener("127.0.0.1", 0)
    async with DashboardServer(RunCatalogue(root), token=token).serve(listener):
        jar = aiohttp.CookieJar(unsafe=True)  # it would not keep cookies of a number otherwise
        async with aiohttp.ClientSession(f"http://127.0.0.1:{listener.getsockname()[1]}", cookie_jar=jar) as session:
            yield session


async def ask(session: aiohttp.ClientSession, path: str, **query: Any) -> Any:
    async with session.get(f"/api/{path}", params={name: str(value) for name, value in query.items()}) as answer:
        assert answer.status == 200, await answer.text()
        return await answer.json()


def test_every_view_is_answered_from_the_files_of_the_run_and_nothing_else_is_written(root: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in root.rglob("*") if path.is_file()}

    async def visit() -> None:
        async with serving(root) as session:
            curves = await ask(session, "run/curves", run="one")
            assert curves["step"] == list(range(1, 11)) and len(curves["series"]["lag/mean"]) == 10
            (head,) = (await ask(session, "runs"))["runs"]
            assert head["step"] == 10 and head["state"] == "simulated" and head["alpha"] is not None
            assert (await ask(session, "run/curves", run="one", **{"from": 3, "to": 5}))["step"] == [3, 4, 5]
            whole = await ask(session, "run/timeline", run="one", bins=100)
            kinds = {lane["kind"] for lane in whole["lanes"]}
            assert kinds >= {"state", "engine", "pool", "groups"} and not whole["exact"]
            near = await ask(session, "run/timeline", run="one", **{"from": 10, "to": 10.5, "bins": 400})
            assert near["exact"] and {lane["name"] for lane in near["lanes"]} >= {"train", "engine/0"}
            flow = await ask(session, "run/flow", run="one")
            assert max(flow["in_flight"]) > 0 and flow["versions"][-1][1] == 10
            config = await ask(session, "run/config", run="one")
            assert ["rollout_batch_size", 4, "override"] in config["rows"]
            assert (await ask(session, "run/health", run="one"))["status"] is None
            async with session.get("/api/run/trace", params={"run": "one", "from": "0", "to": "30"}) as answer:
                trace = json.loads(gzip.decompress(await answer.read()))
            assert {row["ph"] for row in trace["traceEvents"]} >= {"X", "M", "C"}

    asyncio.run(visit())
    after = {path: path.stat().st_mtime_ns for path in root.rglob("*") if path.is_file()}
    assert {path.parent.name for path in after if after[path] != before.get(path)} <= {"event_index"}


def test_samples_are_found_by_step_reward_task_lag_and_text(root: Path) -> None:
    async def visit() -> None:
        async with serving(root) as session:

            async def find(**query: Any) -> list[dict[str, Any]]:
                rows: list[dict[str, Any]] = (await ask(session, "run/samples", run="one", **query))["rows"]
                return rows

            assert {row["step"] for row in await find(step_from=3, step_to=4, kind="group")} == {3, 4}
            assert {row["reward"] for row in await find(reward_from=0.9, kind="group")} == {1.0}
            assert {row["task"] for row in await find(task=2)} == {2}
            assert {row["lag"] for row in await find(lag_to=0)} == {0}
            assert {row["kind"] for row in await find(text="IT IS")} == {"held_out"}
            assert not await find(text="nowhere")
            (row, *_) = await find(step_from=7, step_to=7, reward_to=0)
            group = await ask(session, "run/group", run="one", sample=row["id"])
            assert len(group["columns"]) == 3 and group["chosen"] == 0
            assert group["columns"][1]["turns"][0]["logps"] == [-0.1, -0.5, -4.0, 0.0]
            (held_out, *_) = await find(kind="held_out")
            steps = [
                one["sample"] for one in (await ask(session, "run/group", run="one", sample=held_out["id"]))["columns"]
            ]
            assert steps == ["step 0", "step 4", "step 8"], "answers to the same task at several steps"
            (picture,) = await ask(session, "run/pictures", run="one")
            assert [shot["step"] for shot in picture["shots"]] == [0, 5]
            async with session.get("/api/run/picture", params={"run": "one", "id": "1"}) as answer:
                assert answer.content_type == "image/png" and (await answer.read()).startswith(b"\x89PNG")

    asyncio.run(visit())


def test_only_those_may_read_who_know_the_token_or_sit_at_this_machine(root: Path) -> None:
    async def visit() -> None:
        async with serving(root) as session:
            for host, status in (("localhost", 200), ("evil.example", 403), ("127.0.0.1.evil.example", 403)):
                async with session.get("/api/runs", headers={"Host": host}) as answer:
                    assert answer.status == status
            async with session.post("/api/runs") as answer:
                assert answer.status == 405, "nothing can be changed"
            async with session.get("/") as answer:
                assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
                assert "unsafe" not in answer.headers["Content-Security-Policy"]
            for path in ("/static/..%2fdashboard_server.py", "/static/nothing", "/api/run/curves?run=../../etc"):
                async with session.get(path) as answer:
                    assert answer.status == 404
            async with session.get("/api/run/timeline?run=one&from=soon") as answer:
                assert answer.status == 400
        async with serving(root, token="secret") as session:
            for path, status in (("/", 401), ("/?token=wrong", 401), ("/?token=secret", 200), ("/api/runs", 200)):
                async with session.get(path) as answer:
                    assert answer.status == status, "the cookie of the page is enough for the rest"
        bearer = {"Authorization": "Bearer secret"}
        async with serving(root, token="secret") as session, session.get("/api/runs", headers=bearer) as answer:
            assert answer.status == 200

    asyncio.run(visit())


def test_an_address_beyond_this_machine_needs_a_token(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dashboard", str(root), "--host", "0.0.0.0", "--port", "0"]) == 2
    assert "there is no token" in capsys.readouterr().err
    assert main(["dashboard", str(root / "nowhere")]) == 2


def test_a_port_that_is_taken_is_refused_only_if_it_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(dashboard_command, "_PORT", port)
        with dashboard_command._open_port("127.0.0.1", None) as listener:
            assert listener.getsockname()[1] != port
        with pytest.raises(ConfigError, match="cannot listen there"):
            dashboard_command._open_port("127.0.0.1", port)


def test_what_is_new_arrives_by_itself_and_a_resumed_run_continues_its_curves(root: Path, tmp_path: Path) -> None:
    lines = (root / "one" / LOG_FILE).read_text().splitlines(keepends=True)
    ends = [place for place, line in enumerate(lines) if '"step.end"' in line]
    log = tmp_path / "two" / LOG_FILE
    log.parent.mkdir()
    log.write_text("".join(lines[: ends[3] + 1]))

    async def visit() -> None:
        async with serving(tmp_path) as session, session.get("/api/stream?run=two") as stream:

            async def read() -> dict[str, Any]:
                async with asyncio.timeout(30):
                    while True:
                        line = await stream.content.readline()
                        if line.startswith(b"data: ") and (news := json.loads(line[6:])).get("runs"):
                            return dict(news["runs"]["two"])

            first = await read()
            assert first["reload"] and first["head"]["step"] == 4
            with log.open("a") as more:
                more.write("".join(lines[ends[3] + 1 : ends[4] + 1]))
            second = await read()
            assert [point["step"] for point in second["points"]] == [5]
            resumed = json.dumps([int(1e9), "run.begin", "run", {"resumed": True, "trained": 3}])
            with log.open("a") as more:
                more.write(f"{resumed}\n")
            assert [(point["step"], point["rewind"]) for point in (await read())["points"]] == [(4, True)]
            assert (await ask(session, "run/curves", run="two"))["step"] == [1, 2, 3]

    asyncio.run(visit())


def test_the_bundle_belongs_to_the_sources() -> None:
    frontend = ROOT / "frontend"
    names = ["package.json", *(f"src/{path.name}" for path in sorted((frontend / "src").iterdir()))]
    found = hashlib.sha256()
    for name in names:
        found.update(f"{name}\0".encode() + (frontend / name).read_bytes() + b"\0")
    built = (ROOT / "src/headway/dashboard/static/sources.sha256").read_text().strip()
    assert built == found.hexdigest(), "the page was changed and not built: make frontend"
