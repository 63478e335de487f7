"""The dashboard in a real Chromium: a simulated run in every view, and a run that trains meanwhile."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import pytest

from headway.dashboard.dashboard_server import DashboardServer, open_listener
from headway.dashboard.run_catalogue import RunCatalogue
from tests.dashboard.chromium import Browser, Page, find_chromium, open_browser
from tests.dashboard.factory import SCRIPT, add_samples, make_simulated_run

if TYPE_CHECKING:
    from tests.runs.factory import Runs

pytestmark = [
    pytest.mark.skipif(find_chromium() is None, reason="needs Chromium: apt-get install chromium"),
    pytest.mark.xdist_group("browser"),
]
T = TypeVar("T")
VIEWS = {
    "overview": "count('.run .reward') === 2",
    "timeline": "document.querySelector('.lanes').dataset.lanes > 10",
    "learning": "count('.chart canvas') >= 4",
    "headway": "count('.chart canvas') >= 6 && says('.view', 'Trained against served')",
    "samples": "count('.member') === 3 && count('.pair img') === 2",
    "health": "count('.healthpanel') === 1 && says('.healthpanel', 'Incidents') && count('.chart canvas') > 1",
    "config": "count('.config tbody tr') > 3",
}
"""What each view shows of the simulated run, in the order of its keys."""


HELPERS = """
window.count = (selector) => document.querySelectorAll(selector).length;
window.says = (selector, words) => document.querySelector(selector).innerText.includes(words);
window.all = (selector) => [...document.querySelectorAll(selector)];
"""


class Steering:
    """A browser, and the loop that it lives on."""

    def __init__(self, runner: asyncio.Runner, browser: Browser, address: str) -> None:
        self._runner, self.browser, self.address = runner, browser, address

    def visit(self, walk: Callable[[Page], Awaitable[T]], address: str = "", hash: str = "") -> T:
        """Open a page, walk through it, and check that it has complained about nothing."""

        async def go() -> T:
            page = await self.browser.open((address or self.address) + hash)
            await page.wait("document.querySelector('main').dataset.view", timeout_s=60)
            await page.run(HELPERS)
            found = await walk(page)
            assert not page.problems
            assert not await page.run("window.hacked"), "a text has become a script"
            await page.close()
            return found

        return self._runner.run(go())


@pytest.fixture(scope="module")
def steering(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Steering]:
    root = tmp_path_factory.mktemp("browser")
    make_simulated_run(root / "sim <b>1", "seed=1")
    make_simulated_run(root / "sim <b>2", "seed=2")
    add_samples(root / "sim <b>1")
    listener = open_listener("127.0.0.1", 0)
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        runner.run(stack.enter_async_context(DashboardServer(RunCatalogue(root)).serve(listener)))
        browser = runner.run(stack.enter_async_context(open_browser()))
        yield Steering(runner, browser, f"http://127.0.0.1:{listener.getsockname()[1]}/")
        runner.run(stack.aclose())


FIRST = "#/overview?run=sim+%3Cb%3E1"


def test_every_view_is_drawn_by_its_key_wide_and_narrow_light_and_dark(steering: Steering) -> None:
    async def walk(page: Page) -> None:
        for width, height in ((1280, 900), (400, 800)):
            await page.resize(width, height)
            for number, (view, shown) in enumerate(VIEWS.items(), start=1):
                await page.press(str(number))
                await page.wait(f"document.querySelector('main').dataset.view === '{view}' && ({shown})")
                wide = await page.run("document.documentElement.scrollWidth")
                assert wide <= width, f"{view} is {wide} wide in a window of {width}"
            await page.press("t")
        assert await page.run("document.documentElement.dataset.theme") in ("light", "dark")
        assert "sim <b>1" in await page.run("document.querySelector('.picker summary').innerText")

    steering.visit(walk, hash=FIRST)


def test_the_timeline_zooms_into_single_events_and_tells_what_they_are(steering: Steering) -> None:
    async def walk(page: Page) -> None:
        lanes = "document.querySelector('.lanes').dataset"
        await page.wait(f"{lanes}.lanes > 10")
        whole = await page.run(f"{lanes}.to - {lanes}.from")
        left, top, width, height = await page.find(".lanes")
        for _ in range(12):
            await page.mouse("mouseWheel", left + width / 2, top + 100, deltaX=0, deltaY=-400)
        await page.wait(f"{lanes}.exact === 'true' && {lanes}.to - {lanes}.from < {whole / 50}")
        await page.mouse("mouseMoved", left + width / 2, top + 90)
        tip = await page.wait("!document.querySelector('.tip').hidden && document.querySelector('.tip').innerText")
        assert re.search(r"trained \d+, served \d+", tip)
        before = float(await page.run(f"{lanes}.from"))
        await page.press("ArrowRight")
        await page.wait(f"{lanes}.from > {before}")
        await page.press("0")
        await page.wait(f"{lanes}.to - {lanes}.from > {whole * 0.99}")
        assert height > 200

    steering.visit(walk, hash=FIRST.replace("overview", "timeline"))


def test_samples_are_searched_filtered_and_coloured_and_stay_text(steering: Steering) -> None:
    async def fill(page: Page, label: str, value: str) -> None:
        code = f"""(() => {{ const input = document.querySelector('[aria-label="{label}"]'); input.value = '{value}';
            input.dispatchEvent(new Event(input.tagName === 'SELECT' ? 'change' : 'input')); }})()"""
        await page.run(code)

    async def walk(page: Page) -> None:
        await page.wait("count('.member') === 3")
        assert SCRIPT in await page.run("document.querySelector('.detail').textContent")
        assert not await page.run("count('.detail script, .list script, .list img')")
        await page.press("/")
        for letter in "step 7":
            await page.press(letter)
        await page.wait("count('.sample') && all('.sample .meta').every((one) => one.innerText.includes('step 7'))")
        await fill(page, "search prompts and answers", "")
        await fill(page, "reward from", "0.9")
        await page.wait("count('.sample') && all('.sample .score').every((one) => one.innerText === '1')")
        await fill(page, "lag to", "0")
        await page.wait("all('.sample .meta').every((one) => one.innerText.includes('lag 0'))")
        colours = set()
        for what in ("log-probability", "version", "advantage", "mask"):
            await fill(page, "colour tokens by", what)
            colours.add(await page.wait("all('.token').map((one) => one.style.backgroundColor).join()"))
        assert len(colours) == 4
        assert await page.wait("all('.pair img').every((one) => one.naturalWidth === 2)")

    steering.visit(walk, hash=FIRST.replace("overview", "samples"))


def test_runs_are_compared_with_what_differs_and_as_a_band_over_seeds(steering: Steering) -> None:
    both = "?run=sim+%3Cb%3E1&run=sim+%3Cb%3E2"

    async def walk(page: Page) -> None:
        await page.wait("count('.config thead th') === 3")
        rows = await page.wait("all('.config tbody tr td:first-child').map((one) => one.innerText)")
        assert rows == ["seed"]
        await page.press("3")
        await page.wait("document.querySelector('.legend').innerText.includes('2 seeds')")
        await page.press("2")
        await page.wait("count('.lanes') === 2")

    steering.visit(walk, hash=f"#/config{both}")


CHANGE = """(label, value) => { const input = document.querySelector(`[aria-label="${label}"]`); input.value = value;
    input.dispatchEvent(new Event(input.tagName === 'SELECT' ? 'change' : 'input')); }"""


def test_charts_change_their_axis_smooth_hide_lines_and_give_their_numbers_away(steering: Steering) -> None:
    async def read_csv(page: Page) -> list[list[str]]:
        keep = "(blob) => { blob.text().then((text) => { csv = text; }); return '#'; }"
        await page.run(f"window.csv = ''; URL.createObjectURL = {keep}")
        await page.run("document.querySelector('.chart [aria-label=\"download the numbers\"]').click()")
        return [row.split(",") for row in (await page.wait("window.csv")).splitlines()]

    async def walk(page: Page) -> None:
        await page.wait("count('.chart canvas') >= 4")
        steps = await read_csv(page)
        assert steps[0] == ["step", "training"]
        assert [row[0] for row in steps[1:]] == [str(number + 1) for number in range(len(steps) - 1)]
        await page.run(f"({CHANGE})('over', 'samples')")
        samples = [float(row[0]) for row in (await read_csv(page))[1:]]
        assert samples == [samples[0] * (number + 1) for number in range(len(samples))]
        await page.run(f"({CHANGE})('smooth', '3')")
        assert (await read_csv(page))[0] == ["samples", "each step", "training"]
        await page.run("all('.legend button')[0].click()")
        await page.wait("count('.key.off') === 1")
        await page.run("document.querySelector('.chart [aria-label=\"logarithmic scale\"]').click()")
        await page.wait("count('.tool[aria-pressed=true]') === 1")
        await page.run(f"({CHANGE})('find a chart', 'spread')")
        await page.wait("count('.chart') === 1")
        await page.run("localStorage.clear()")

    steering.visit(walk, hash=FIRST.replace("overview", "learning"))


def test_a_run_at_work_is_followed_through_its_link(steering: Steering, runs: Runs, tmp_path: Path) -> None:
    directory = tmp_path / "out"
    run = runs.train(directory, max_steps=4000, save_steps=1000)
    try:
        assert run.until(lambda: "step 2:" in run.text)
        found = re.search(r"live page: (http://127\.0\.0\.1:\d+)", run.text)
        assert found is not None

        async def walk(page: Page) -> None:
            step = "Number(document.querySelector('.progress b').innerText.replace(/\\D/g, ''))"
            first = await page.wait(step)
            await page.wait(f"{step} > {first} + 2")
            assert await page.run("document.querySelector('.live').innerText") == "live"
            await page.press("6")
            await page.wait("count('.stages tr') >= 8 && count('.graph .culprit')")
            assert await page.wait("document.querySelector('.healthpanel').innerText.includes('at work')")
            await page.press("5")
            await page.wait("count('.member .token') > 3")
            await page.press("2")
            end = float(await page.wait("document.querySelector('.lanes').dataset.to"))
            await page.wait(f"document.querySelector('.lanes').dataset.to > {end}")

        steering.visit(walk, address=found[1])
    finally:
        run.kill()
        run.end()
