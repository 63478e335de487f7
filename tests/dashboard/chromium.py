"""A real headless Chromium that a test or a script steers through its DevTools protocol; nothing but aiohttp is needed.

async with open_browser() as browser:
    page = await browser.open("http://127.0.0.1:6008")
    await page.wait("document.querySelector('.run')")
    assert not page.problems
"""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp

_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
_OPTIONS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-extensions",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--mute-audio",
    "--hide-scrollbars",
    "--remote-debugging-port=0",
)
_START_S = 60.0


def find_chromium() -> str | None:
    """Return the program, None if there is none."""
    return next((path for name in _NAMES if (path := shutil.which(name))), None)


class Page:
    """One page of the browser. What it complains about is collected in `problems`."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket, self._numbers = socket, count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.problems: list[str] = []
        self._listening = asyncio.ensure_future(self._listen())

    async def start(self) -> None:
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.send(f"{domain}.enable")

    async def close(self) -> None:
        self._listening.cancel()
        with suppress(asyncio.CancelledError):
            await self._listening
        await self._socket.close()

    async def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command of the protocol and return its result."""
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        async with asyncio.timeout(60):
            return await answer

    async def _listen(self) -> None:
        async for message in self._socket:
            data = json.loads(message.data)
            if "id" in data:
                answer = self._answers.pop(data["id"])
                if "error" in data:
                    answer.set_exception(AssertionError(data["error"]["message"]))
                else:
                    answer.set_result(data["result"])
            else:
                self._note(data["method"], data["params"])

    def _note(self, method: str, data: dict[str, Any]) -> None:
        match method:
            case "Runtime.exceptionThrown":
                details = data["exceptionDetails"]
                self.problems.append(str(details.get("exception", {}).get("description", details["text"])))
            case "Runtime.consoleAPICalled" if data["type"] in ("error", "assert", "warning"):
                self.problems.append(" ".join(str(one.get("value", one.get("description"))) for one in data["args"]))
            case "Log.entryAdded" if data["entry"]["level"] in ("error", "warning"):
                self.problems.append(f"{data['entry']['text']} {data['entry'].get('url', '')}")

    async def show(self, url: str) -> None:
        await self.send("Page.navigate", url=url)

    async def run(self, code: str) -> Any:
        """Evaluate JavaScript and return its value."""
        found = await self.send("Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise AssertionError(f"{code}: {found['exceptionDetails']['exception'].get('description')}")
        return found["result"].get("value")

    async def wait(self, code: str, timeout_s: float = 30.0) -> Any:
        """Return the value of the code once it is true."""
        until_s = time.monotonic() + timeout_s
        while True:
            look = f"const found = {code}; return found instanceof Node ? true : found;"
            found = await self.run(f"(() => {{ try {{ {look} }} catch {{ return null; }} }})()")
            if found:
                return found
            if time.monotonic() > until_s:
                text = await self.run("document.querySelector('main')?.innerText.slice(0, 600)")
                raise AssertionError(f"{code} did not become true; {self.problems}; the page says: {text}")
            await asyncio.sleep(0.03)

    async def press(self, key: str) -> None:
        """Press a key."""
        text = {"text": key} if len(key) == 1 else {}
        await self.send("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
        await self.send("Input.dispatchKeyEvent", type="keyUp", key=key)

    async def find(self, selector: str) -> tuple[float, float, float, float]:
        """Return left, top, width and height of an element in the window, after it was scrolled into sight."""
        code = f"""(() => {{ const element = document.querySelector({json.dumps(selector)});
            element.scrollIntoView({{block: 'nearest'}}); const box = element.getBoundingClientRect();
            return [box.left, box.top, box.width, box.height]; }})()"""
        left, top, width, height = await self.run(code)
        return left, top, width, height

    async def click(self, selector: str) -> None:
        """Click on the middle of an element."""
        left, top, width, height = await self.find(selector)
        for kind in ("mousePressed", "mouseReleased"):
            await self.mouse(kind, left + width / 2, top + height / 2, button="left", clickCount=1)

    async def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        await self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    async def resize(self, width: int, height: int, *, scale: float = 1.0, mobile: bool = False) -> None:
        await self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=mobile
        )

    async def photograph(self, path: Path) -> None:
        """Write what is in the window as PNG."""
        found = await self.send("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(found["data"]))


class Browser:
    """A running Chromium."""

    def __init__(self, session: aiohttp.ClientSession, address: str) -> None:
        self._session, self._address = session, address
        self._pages: list[Page] = []

    async def open(self, url: str, *, width: int = 1280, height: int = 900) -> Page:
        """Return a new page that shows an address."""
        async with self._session.put(f"{self._address}/json/new?about:blank") as answer:
            target = await answer.json()
        page = Page(await self._session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0))
        self._pages.append(page)
        await page.start()
        await page.resize(width, height)
        await page.show(url)
        return page

    async def close(self) -> None:
        for page in self._pages:
            await page.close()


@asynccontextmanager
async def open_browser() -> AsyncIterator[Browser]:
    """Start Chromium with a profile of its own, which goes with it."""
    program = find_chromium()
    assert program is not None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [program, *_OPTIONS, f"--user-data-dir={profile}", "about:blank"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            address = await _find_address(Path(profile) / "DevToolsActivePort", process)
            async with aiohttp.ClientSession() as session:
                browser = Browser(session, address)
                yield browser
                await browser.close()
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()


async def _find_address(path: Path, process: subprocess.Popen[bytes]) -> str:
    until_s = time.monotonic() + _START_S
    while time.monotonic() < until_s and process.poll() is None:
        with suppress(OSError, IndexError, ValueError):
            return f"http://127.0.0.1:{int(path.read_text().splitlines()[0])}"
        await asyncio.sleep(0.05)
    raise AssertionError("Chromium has not started")
