"""A report page over HTTP, made anew for every visitor: a run can be watched from a browser while it goes on.

On the loopback interface only, and it answers nothing but the page.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from headway.errors import HeadwayError

HOST = "127.0.0.1"


def page_server(make_page: Callable[[], str], port: int) -> ThreadingHTTPServer:
    """A server that has the port already; port 0 takes a free one. Raises `HeadwayError` where it is taken."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path.partition("?")[0] != "/":
                self.send_error(HTTPStatus.NOT_FOUND)
                return
            try:
                body = make_page().encode()
            except HeadwayError as error:
                self.send_error(HTTPStatus.SERVICE_UNAVAILABLE, explain=str(error))
                return
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Visitors are not news."""

    try:
        return ThreadingHTTPServer((HOST, port), Handler)
    except OverflowError as error:
        raise HeadwayError(f"--serve {port}: a port is a number from 0 to 65535") from error
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            problem = "the port is taken by another program; choose another, or 0 for any that is free"
        else:
            problem = str(error.strerror)
        raise HeadwayError(f"--serve {port}: {problem}") from error
