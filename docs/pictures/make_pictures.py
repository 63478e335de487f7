"""Make the pictures of the README from a run directory.

    python docs/pictures/make_pictures.py runs/demo-20261115-075000

panel.svg is the live panel at half of the run, replayed from its event log; report.png is a screenshot of its report in
headless Chromium, which has to be installed (`chromium` or `google-chrome`).
"""

from __future__ import annotations

import argparse
import io
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml
from rich.console import Console

from headway.monitor.event_files import read_event_log
from headway.monitor.live_display import LiveDisplay
from headway.monitor.report_page import render_report_page
from headway.monitor.run_report import RunMonitor

HERE = Path(__file__).parent
_BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def draw_panel(run: Path) -> str:
    """Return the panel at half of the run as SVG."""
    events = list(read_event_log(run))
    steps = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8")).get("max_steps")
    monitor = RunMonitor()
    half_s = events[-1].time_s / 2
    for event in events:
        if event.time_s <= half_s:
            monitor(event)
    console = Console(record=True, width=110, file=io.StringIO())
    console.print(LiveDisplay(monitor, console, steps=steps).panel(half_s))
    return console.export_svg(title="headway train examples/arithmetic.yaml")


def photograph_report(run: Path, target: Path, size: str) -> None:
    """Write a screenshot of the report of a run."""
    browser = next((path for name in _BROWSERS if (path := shutil.which(name))), None)
    if browser is None:
        sys.exit(f"none of {', '.join(_BROWSERS)} is installed")
    with tempfile.TemporaryDirectory() as scratch:
        page = Path(scratch) / "report.html"
        page.write_text(render_report_page(run), encoding="utf-8")
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run"]
        options += [f"--user-data-dir={scratch}/profile", f"--window-size={size}", f"--screenshot={target.resolve()}"]
        quiet = ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
        subprocess.run([browser, *options, *quiet, page.as_uri()], check=True, capture_output=True, timeout=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="directory of a finished run")
    parser.add_argument("--size", default="1100,1250", help="width and height of the screenshot")
    args = parser.parse_args()
    (HERE / "panel.svg").write_text(draw_panel(args.run), encoding="utf-8")
    photograph_report(args.run, HERE / "report.png", args.size)


if __name__ == "__main__":
    main()
