"""Checkpoints on a model hub: the real client of the hub against a small server that keeps what it is sent."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from headway.cli import main


class Hub(ThreadingHTTPServer):
    """Speaks as much of the hub's protocol as an upload needs."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files: dict[str, bytes] = {}
        self.refuses = False
        self.made: list[dict[str, object]] = []
        self.address = f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, format: str, *args: object) -> None: ...

    def do_HEAD(self) -> None:
        self.send_response(404)
        self.send_header("X-Error-Code", "EntryNotFound")
        self.end_headers()

    def do_GET(self) -> None:
        self._answer({"id": "me/model", "sha": "0" * 40, "siblings": []})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        assert self.headers["Authorization"] == "Bearer secret"
        if self.server.refuses:
            self._answer({"error": "no rights"}, status=403)
            return
        if self.path == "/api/repos/create":
            self.server.made.append(json.loads(body))
            self._answer({"url": f"{self.server.address}/me/model"})
        elif "/preupload/" in self.path:
            asked = json.loads(body)["files"]
            files = [{"path": file["path"], "uploadMode": "regular", "shouldIgnore": False} for file in asked]
            self._answer({"files": files})
        elif "/commit/" in self.path:
            for line in body.splitlines():
                row = json.loads(line)
                if row["key"] == "file":
                    self.server.files[row["value"]["path"]] = base64.b64decode(row["value"]["content"])
            self._answer({"commitUrl": f"{self.server.address}/me/model/commit/1", "commitOid": "1", "success": True})
        else:  # the card is checked
            self._answer({"errors": [], "warnings": []})

    def _answer(self, body: object, status: int = 200) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub() as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def push(hub: Hub, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "HF_ENDPOINT": hub.address, "HF_TOKEN": "secret", "HF_HUB_OFFLINE": "0"}
    command = [sys.executable, "-m", "headway", "push", *words]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=200)


def test_a_checkpoint_is_pushed_without_the_state_of_its_optimizer(hub: Hub, tmp_path: Path) -> None:
    model = tmp_path / "step-00000004"
    model.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (model / name).write_text(f"contents of {name}", encoding="utf-8")
    for name in ("optimizer.safetensors", "trainer.json"):
        (model / name).write_text("{}", encoding="utf-8")
    done = push(hub, str(model), "me/model", "--private")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"{hub.address}/me/model"
    assert hub.made[0]["visibility"] == "private"
    assert hub.files["model.safetensors"] == (model / "model.safetensors").read_bytes()
    assert {"config.json", "tokenizer.json", "README.md"} <= hub.files.keys()
    assert not {"optimizer.safetensors", "trainer.json"} & hub.files.keys()
    assert b"step-00000004" in hub.files["README.md"]


def test_what_cannot_be_pushed_is_said_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["push", str(tmp_path), "model"]) == 2
    assert "owner/name" in capsys.readouterr().err
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    assert main(["push", str(tmp_path), "me/model"]) == 2
    assert "no account is known" in capsys.readouterr().err
    words = ["examples/arithmetic.yaml", "push_to_hub=me/model", f"output_dir={tmp_path}/run", "--dry-run"]
    monkeypatch.setattr("signal.signal", lambda number, handler: None)
    assert main(["train", *words]) == 2
    assert "push_to_hub = 'me/model': no account is known" in capsys.readouterr().err
    monkeypatch.setattr("huggingface_hub.get_token", lambda: "secret")
    assert main(["push", str(tmp_path), "me/model"]) == 2
    assert "holds no checkpoint" in capsys.readouterr().err


def test_a_hub_that_refuses_leaves_a_way_to_try_again(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    hub.refuses = True
    done = push(hub, str(tmp_path), "me/model")
    assert done.returncode == 1 and f"try again with: headway push {tmp_path} me/model" in done.stderr
