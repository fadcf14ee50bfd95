"""Controls a real browser without a window over a pipe (Chrome's DevTools protocol), for tests of pages."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

__all__ = ["Browser", "find"]

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def find() -> str | None:
    """Return the path of a browser, or None."""
    return next((path for name in _NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page of a browser; `events` are all events that it has sent."""

    def __init__(self, program: str, profile: Path) -> None:
        ours, theirs = os.pipe()
        self._in, their_out = os.pipe()
        self._out = theirs
        self._data = b""
        self._next = 0
        self.events: list[dict[str, Any]] = []

        def descriptors() -> None:
            # The browser reads from 3 and writes to 4. Move our descriptors to higher numbers first.
            high = [os.dup(ours), os.dup(their_out)]
            while min(high) < 10:
                high = [os.dup(fd) for fd in high]
            os.dup2(high[0], 3)
            os.dup2(high[1], 4)

        self.process = subprocess.Popen(
            [
                program,
                *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
                *("--remote-debugging-pipe", f"--user-data-dir={profile}", "--host-resolver-rules=MAP * ~NOTFOUND"),
                "about:blank",
            ],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            preexec_fn=descriptors, close_fds=False, env={**os.environ, "HOME": str(profile)},
        )  # fmt: skip
        os.close(ours)
        os.close(their_out)
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session: str | None = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")

    _session: str | None = None

    def ask(self, method: str, limit: float = 100.0, **parameters: Any) -> dict[str, Any]:
        """Send a command; return its result."""
        self._next += 1
        number = self._next
        command: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            command["sessionId"] = self._session
        data = json.dumps(command).encode() + b"\0"
        while data:
            data = data[os.write(self._out, data) :]
        until = time.monotonic() + limit
        while True:
            for message in self._receive(until):
                if message.get("id") == number:
                    assert "result" in message, message
                    found: dict[str, Any] = message["result"]
                    return found
                self.events.append(message)

    def _receive(self, until: float) -> list[dict[str, Any]]:
        while b"\0" not in self._data:
            left = until - time.monotonic()
            assert left > 0, "the browser does not answer"
            if select.select([self._in], [], [], left)[0]:
                new = os.read(self._in, 1 << 20)
                assert new, "the browser has ended"
                self._data += new
        *whole, self._data = self._data.split(b"\0")
        return [json.loads(part) for part in whole]

    def value(self, script: str) -> Any:
        """Evaluate a script in the page; return its value. AssertionError if it raises."""
        found = self.ask("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def open(self, url: str, ready: str, size: tuple[int, int] = (1200, 900), limit: float = 100.0) -> None:
        """Open a page and wait until the script `ready` is true in it."""
        self.ask("Emulation.setDeviceMetricsOverride", width=size[0], height=size[1], deviceScaleFactor=1, mobile=False)
        self.ask("Page.navigate", url=url)
        until = time.monotonic() + limit
        while not self.value(ready):
            assert time.monotonic() < until, f"the page never came to {ready}: {self.complaints()}"
            time.sleep(0.05)

    def complaints(self) -> list[Any]:
        """Return messages of the console and the log, and uncaught errors."""
        kinds = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
        return [event["params"] for event in self.events if event.get("method") in kinds]

    def requests(self) -> list[str]:
        """Return the requested addresses."""
        sent = (event for event in self.events if event.get("method") == "Network.requestWillBeSent")
        return [event["params"]["request"]["url"] for event in sent]

    def picture(self) -> bytes:
        """Return the full page as PNG."""
        found = self.ask("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        return base64.b64decode(found["data"])

    def close(self) -> None:
        """End the browser."""
        for fd in (self._out, self._in):
            os.close(fd)
        try:
            self.process.wait(10)  # it ends when its pipe is closed
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
