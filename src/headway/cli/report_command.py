"""`headway report`: what came of a run, as a table, as a page, or for machines.

    headway report runs/one
    headway report runs/one --compare runs/two runs/three --out three.html
    headway report runs/one --serve

Reads what the run left in its directory and changes nothing in it but the page. The run may still go on, may have
been killed, or may be a simulated one.
"""

import argparse
import errno
from collections.abc import Callable, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from headway.cli.command_line import make_console, print_json
from headway.errors import HeadwayError
from headway.monitor.report_page import describe_segments, list_facts, render_report_page
from headway.monitor.report_tables import print_training_summary
from headway.monitor.run_record import RunRecord, read_run_record

PAGE_FILE = "report.html"
HELP = "show what came of a run"
HOST = "127.0.0.1"
_PORT = 6007


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", type=Path, metavar="RUN", help="directory of a run, or its event log")
    parser.add_argument("--compare", nargs="+", type=Path, default=[], metavar="RUN", help="further runs, laid over it")
    parser.add_argument("--out", type=Path, metavar="FILE", help=f"where the page goes (RUN/{PAGE_FILE})")
    parser.add_argument("--json", action="store_true", help="print only the report, for machines; a page with --out")
    what = f"show it on 127.0.0.1:PORT ({_PORT})"
    parser.add_argument("--serve", nargs="?", type=int, const=_PORT, metavar="PORT", help=what)


def run_command(args: argparse.Namespace) -> int:
    """Read the runs, print their reports and write the page."""
    runs = (args.directory, *args.compare)
    if args.serve is not None:
        return _serve(runs, args.serve)
    records = [read_run_record(path) for path in runs]
    if args.json:
        reports = [record_to_dict(record) for record in records]
        print_json(reports if args.compare else reports[0])
    else:
        _print(records)
    if args.out or not args.json:
        directory = args.directory if args.directory.is_dir() else args.directory.parent
        page = args.out or directory / PAGE_FILE
        _write_page(records, page)
        if not args.json:
            print(f"{page}  the run as a page, open it in a browser")
    return 0


def _serve(runs: Sequence[Path], port: int) -> int:
    """Serve the page until an interrupt."""

    def page() -> str:
        first, *others = map(read_run_record, runs)
        return render_report_page(first, compare=others)

    page()  # raises before anybody looks if the page cannot be made
    with make_page_server(page, port) as server:
        print(f"http://{HOST}:{server.server_port}  reload for what is new, Ctrl-C to end", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return 0
    return 0


def record_to_dict(record: RunRecord) -> dict[str, Any]:
    """Return the report as JSON values, with facts about the run and its state."""
    state, said = describe_segments(record.segments, is_alive=record.is_alive)
    facts = dict(list_facts(record.config, record.segments))
    return {"name": record.name, "state": {"is": state, "said": said}, "facts": facts, **record.report.to_dict()}


def _print(records: list[RunRecord]) -> None:
    console = make_console(110)
    for record in records:
        facts = ", ".join(f"{name} {text}" for name, text in list_facts(record.config, record.segments)[:4])
        said = describe_segments(record.segments, is_alive=record.is_alive)[1]
        console.print("  ".join(part for part in (record.name, said, facts) if part), soft_wrap=True, markup=False)
        print_training_summary(record.report, console)


def _write_page(records: list[RunRecord], page: Path) -> None:
    try:
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(render_report_page(records[0], compare=records[1:]), encoding="utf-8")
    except OSError as error:
        raise HeadwayError(f"--out {page}: {error.strerror}") from error


def make_page_server(make_page: Callable[[], str], port: int) -> ThreadingHTTPServer:
    """Make a server that holds the port already. Port 0 takes a free one. Raise `HeadwayError` if the port is taken."""

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
            """Print nothing about requests."""

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
