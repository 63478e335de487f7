"""The socket of a run: only its owner may ask, and whatever is asked wrongly disturbs nobody."""

from __future__ import annotations

import asyncio
import socket
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from headway.cli import main
from headway.errors import ConfigError, HeadwayError
from headway.processes.control_socket import CONTROL_SOCKET, send_control_request, serve_control_socket


def answer(question: Mapping[str, Any]) -> Mapping[str, Any]:
    if question.get("engines") == 0:
        raise ConfigError("a run has at least one engine", key="engines", value=0)
    return {"joined": [f"engine/{n}" for n in range(1, question["engines"])], "left": []}


def asked(directory: Path, question: Any) -> Any:
    async def both() -> Any:
        async with serve_control_socket(directory, answer):
            return await asyncio.to_thread(send_control_request, directory, question)

    return asyncio.run(both())


def test_a_run_answers_its_owner_alone_also_in_a_directory_with_a_long_name(tmp_path: Path) -> None:
    directory = tmp_path / ("long" * 40)
    directory.mkdir()
    (directory / CONTROL_SOCKET).write_text("left behind by somebody who was killed")

    async def look() -> tuple[int, Any]:
        async with serve_control_socket(directory, answer):
            mode = (directory / CONTROL_SOCKET).stat().st_mode
            assert stat.S_ISSOCK(mode)
            return stat.S_IMODE(mode), await asyncio.to_thread(send_control_request, directory, {"engines": 3})

    mode, said = asyncio.run(look())
    assert mode == 0o600
    assert said == {"joined": ["engine/1", "engine/2"], "left": []}
    assert not (directory / CONTROL_SOCKET).exists()


def test_a_refusal_is_what_the_run_said(tmp_path: Path) -> None:
    with pytest.raises(HeadwayError, match="engines = 0: a run has at least one engine"):
        asked(tmp_path, {"engines": 0})


@pytest.mark.parametrize("text", [b"nonsense\n", b"[1]\n", b"", b'{"engines"' + b" " * 9000 + b": 1}\n"])
def test_what_is_not_understood_disturbs_nobody(tmp_path: Path, text: bytes) -> None:
    def speak() -> bytes:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(tmp_path / CONTROL_SOCKET))
            connection.sendall(text)
            connection.shutdown(socket.SHUT_WR)
            return connection.makefile("rb").readline()

    async def both() -> tuple[bytes, Any]:
        async with serve_control_socket(tmp_path, answer):
            return await asyncio.to_thread(speak), await asyncio.to_thread(
                send_control_request, tmp_path, {"engines": 2}
            )

    said, then = asyncio.run(both())
    assert b"not understood" in said or not said
    assert then["joined"] == ["engine/1"]


def test_the_command_says_where_no_run_is_at_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["scale", str(tmp_path), "--engines", "2"]) == 2
    assert "no run is at work there" in capsys.readouterr().err
    made = socket.socket(socket.AF_UNIX)
    made.bind(str(tmp_path / CONTROL_SOCKET))
    made.close()
    assert main(["scale", str(tmp_path), "--engines", "2"]) == 2
    assert "no run is at work there" in capsys.readouterr().err, "a killed run leaves its socket behind"
    assert main(["scale", str(tmp_path / "absent"), "--engines", "2"]) == 2
    assert "there is no such directory" in capsys.readouterr().err
    assert main(["scale", str(tmp_path), "--engines", "0"]) == 2
    assert "--engines = 0: a run has at least one engine" in capsys.readouterr().err
