"""Make the pictures of the dashboard: every view, light and dark, wide and as on a phone.

    python docs/pictures/make_dashboard_pictures.py runs --run sums-1 --compare sums-2

Needs Chromium (`apt-get install chromium`) and Pillow, which makes the files small.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from PIL import Image
from tests.dashboard.chromium import Page, find_chromium, open_browser

from headway.dashboard.dashboard_server import DashboardServer, open_listener
from headway.dashboard.run_catalogue import RunCatalogue

HERE = Path(__file__).parent
VIEWS = ("overview", "timeline", "learning", "headway", "samples", "health", "config")
_SIZE, _PHONE = (1120, 760), (400, 760)
_COLOURS = 250


async def photograph(page: Page, view: str, runs: list[str], name: str, settle_s: float) -> None:
    """Show a view of some runs and write its picture."""
    chosen = "&".join(f"run={run}" for run in runs)
    await page.run(f"location.hash = '#/{view}?{chosen}'")
    await page.wait(f"document.querySelector('main').dataset.view === '{view}'")
    await asyncio.sleep(settle_s)
    path = HERE / f"dashboard-{name}.png"
    await page.photograph(path)
    whole = Image.open(path).convert("RGB")
    few = whole.quantize(_COLOURS, method=Image.Quantize.MEDIANCUT, kmeans=2, dither=Image.Dither.NONE)
    few.save(path, optimize=True)
    print(f"{path}  {path.stat().st_size // 1024} KB", flush=True)


async def make_pictures(root: Path, run: str, others: list[str], settle_s: float) -> None:
    listener = open_listener("127.0.0.1", 0)
    async with DashboardServer(RunCatalogue(root)).serve(listener), open_browser() as browser:
        page = await browser.open(f"http://127.0.0.1:{listener.getsockname()[1]}/", width=_SIZE[0], height=_SIZE[1])
        await page.wait("document.querySelector('main').dataset.view", timeout_s=120)
        for view in VIEWS:
            together = [run, *others] if view in ("overview", "learning", "config") else [run]
            await photograph(page, view, together, view, settle_s)
        await page.press("t")
        await photograph(page, "timeline", [run], "dark", settle_s)
        await page.resize(*_PHONE, mobile=True)
        await photograph(page, "overview", [run], "phone", settle_s)
        assert not page.problems, page.problems


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="directory of runs")
    parser.add_argument("--run", required=True, help="the run that is shown")
    parser.add_argument("--compare", nargs="*", default=[], help="runs that it is compared with")
    parser.add_argument("--settle", type=float, default=2.0, help="seconds until a view is drawn")
    args = parser.parse_args()
    if find_chromium() is None:
        sys.exit("Chromium is not installed")
    asyncio.run(make_pictures(args.directory, args.run, args.compare, args.settle))


if __name__ == "__main__":
    main()
