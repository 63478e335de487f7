"""A report page over HTTP: on the loopback interface, always the newest, and clear about a taken port."""

from __future__ import annotations

import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer

import pytest

from headway.cli.report_command import HOST, make_page_server
from headway.errors import HeadwayError


@contextmanager
def serving(server: ThreadingHTTPServer) -> Iterator[str]:
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    with server:
        thread.start()
        yield f"http://{HOST}:{server.server_port}"
        server.shutdown()
    thread.join()


def test_every_visitor_sees_the_page_of_the_moment() -> None:
    pages = iter(["first ä", "second"])
    with serving(make_page_server(lambda: next(pages), 0)) as url:
        assert urllib.request.urlopen(url).read().decode() == "first ä"
        assert urllib.request.urlopen(f"{url}/?again").read().decode() == "second"
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"{url}/etc/passwd")


def test_a_run_that_cannot_be_read_is_no_end_of_the_server() -> None:
    answers: list[str | Exception] = [HeadwayError("half written"), "whole"]

    def page() -> str:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    with serving(make_page_server(page, 0)) as url:
        with pytest.raises(urllib.error.HTTPError, match="503"):
            urllib.request.urlopen(url)
        assert urllib.request.urlopen(url).read() == b"whole"


def test_a_taken_or_impossible_port_is_said_plainly() -> None:
    taken = r"--serve \d+: the port is taken by another program"
    with socket.create_server((HOST, 0)) as other, pytest.raises(HeadwayError, match=taken):
        make_page_server(str, other.getsockname()[1])
    with pytest.raises(HeadwayError, match="0 to 65535"):
        make_page_server(str, 70_000)
