"""Headless Chromium, driven through its debugging protocol: pages as people see them, and what they complain of."""

import asyncio
import base64
import contextlib
import itertools
import json
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp

PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "chrome")
START_S, ANSWER_S = 60.0, 60.0
FLAGS = (
    "--headless=new",
    "--no-sandbox",  # containers and root have none
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--hide-scrollbars",
    "--remote-debugging-port=0",
)


def find_browser() -> str | None:
    """The program, if this machine has one."""
    return next((path for path in map(shutil.which, PROGRAMS) if path), None)


class Browser:
    """One browser with one tab. `complaints` and `fetched` are of the page that was opened last."""

    def __init__(self, program: str) -> None:
        self.complaints: list[str] = []  # errors and warnings of the console, failed requests, uncaught exceptions
        self.fetched: list[str] = []  # addresses
        self._folder = tempfile.TemporaryDirectory(prefix="browser-", ignore_cleanup_errors=True)
        self._process = subprocess.Popen(
            [program, *FLAGS, f"--user-data-dir={self._folder.name}", "about:blank"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "TMPDIR": self._folder.name},  # it leaves things there
        )
        self._loop = asyncio.new_event_loop()
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._loaded = asyncio.Event()
        try:
            self._loop.run_until_complete(self._connect())
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def open(self, url: str, *, width: int, height: int = 900, dark: bool = False, media: str = "screen") -> None:
        """Load a page into a window of this size. `media` is screen or print."""
        self._loop.run_until_complete(self._open(url, width, height, dark, media))

    def cookie(self, name: str, value: str, url: str) -> None:
        """Have one sent with every request to this address from here on."""
        self._ask("Network.setCookie", name=name, value=value, url=url)

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression on the page, a promise's once it is there."""
        answer = self._ask("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def screenshot(self, path: Path) -> None:
        """The whole page as PNG."""
        answer = self._ask("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(answer["data"]))

    def pdf(self, path: Path) -> None:
        """The page as it prints, on A4."""
        answer = self._ask("Page.printToPDF", paperWidth=8.27, paperHeight=11.69, printBackground=False)
        path.write_bytes(base64.b64decode(answer["data"]))

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self._loop.run_until_complete(self._disconnect())
        self._loop.close()
        self._process.terminate()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._folder.cleanup()

    def _ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._loop.run_until_complete(self._call(method, **parameters))

    async def _connect(self) -> None:
        port_file, give_up_at = Path(self._folder.name) / "DevToolsActivePort", time.monotonic() + START_S
        while not (port_file.exists() and port_file.read_text().count("\n")):
            assert self._process.poll() is None, f"the browser ended with status {self._process.returncode}"
            assert time.monotonic() < give_up_at, f"the browser has not started for {START_S:.0f} s"
            await asyncio.sleep(0.1)
        port = port_file.read_text().split("\n")[0]
        self._session = aiohttp.ClientSession()
        async with self._session.get(f"http://127.0.0.1:{port}/json/list") as answer:
            tab = next(each for each in await answer.json() if each["type"] == "page")
        self._socket = await self._session.ws_connect(tab["webSocketDebuggerUrl"], max_msg_size=0)
        self._reader = asyncio.ensure_future(self._read())
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self._call(f"{domain}.enable")

    async def _disconnect(self) -> None:
        self._reader.cancel()
        await self._socket.close()
        await self._session.close()

    async def _open(self, url: str, width: int, height: int, dark: bool, media: str) -> None:
        await self._call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self._call("Emulation.setEmulatedMedia", media=media, features=[scheme])
        self.complaints.clear()
        self.fetched.clear()
        self._loaded.clear()
        answer = await self._call("Page.navigate", url=url)
        if "loaderId" in answer:  # else only the part behind the # is another one
            await asyncio.wait_for(self._loaded.wait(), ANSWER_S)

    async def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number, coming = next(self._numbers), asyncio.get_running_loop().create_future()
        self._answers[number] = coming
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        try:
            answer = await asyncio.wait_for(coming, ANSWER_S)
        finally:
            del self._answers[number]
        assert "error" not in answer, f"{method}: {answer.get('error')}"
        return dict(answer["result"])

    async def _read(self) -> None:
        async for message in self._socket:
            content = json.loads(message.data)
            if "id" in content:
                answer = self._answers.get(content["id"])
                if answer is not None and not answer.done():
                    answer.set_result(content)
            else:
                self._hear(content["method"], content["params"])

    def _hear(self, method: str, parameters: dict[str, Any]) -> None:
        if method == "Page.loadEventFired":
            self._loaded.set()
        elif method == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning", "assert"):
            self.complaints.append(" ".join(str(each.get("value", each)) for each in parameters["args"]))
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(str(parameters["exceptionDetails"].get("text")))
        elif method == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
            self.complaints.append(parameters["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.fetched.append(parameters["request"]["url"])
        elif method == "Network.loadingFailed":
            self.complaints.append(f"not loaded: {parameters['errorText']}")
