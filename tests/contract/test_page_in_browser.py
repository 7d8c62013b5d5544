"""The page of a run in a real browser, headless Chromium: drawn, clicked, immune to what ranks would inject."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import wait_until
from tests.contract.page_cases import Browser, Capture, watched

pytestmark = [
    pytest.mark.night,
    pytest.mark.usefixtures("no_leaks"),
    pytest.mark.skipif(
        shutil.which("chromedriver") is None, reason="no Chromium here: apt-get install chromium chromium-driver"
    ),
]
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


class Chromium:
    """A browser by the protocol of WebDriver (https://www.w3.org/TR/webdriver2)."""

    def __init__(self, port: int, folder: Path) -> None:
        self._url = f"http://127.0.0.1:{port}/session"
        options = {"args": [*_FLAGS, f"--user-data-dir={folder}"]}
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        self._url += "/" + self.ask("", capabilities={"alwaysMatch": wanted})["sessionId"]

    def ask(self, what: str, method: str = "POST", **body: Any) -> Any:
        data = json.dumps(body).encode() if method == "POST" else None
        request = urllib.request.Request(self._url + what, data, {"Content-Type": "application/json"}, method=method)
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.load(answer)["value"]

    def run(self, script: str) -> Any:
        return self.ask("/execute/sync", script=script, args=[])

    def text(self, query: str) -> str:
        return self.run(f"return document.querySelector({query!r}).textContent")

    def complaints(self) -> list[str]:
        return [each["message"] for each in self.ask("/se/log", type="browser")]


@pytest.fixture
def chromium(tmp_path: Path) -> Iterator[Chromium]:
    # Port 0 means any; the driver prints which, and ends with its input.
    with subprocess.Popen(["chromedriver", "--port=0"], stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        port = next(found[1] for line in driver.stdout if (found := re.search(r"successfully on port (\d+)", line)))
        browser = Chromium(int(port), tmp_path / "profile")
        try:
            yield browser
        finally:
            browser.ask("", "DELETE")
            driver.terminate()


def test_a_run_in_a_browser(chromium: Chromium, capfd: Capture, tmp_path: Path) -> None:
    def visit(browser: Browser) -> None:
        chromium.ask("/url", url=browser.url.geturl())
        wait_until(lambda: chromium.run("return document.querySelectorAll('#plots svg').length") == 3, 60)
        assert chromium.text("#title") == "train_until on 2 ranks"
        assert chromium.run("return document.querySelectorAll('tbody tr').length") == 2
        plots = chromium.run("return [...document.querySelectorAll('#plots h2')].map((each) => each.textContent)")
        assert plots == ["loss", "<i>name</i>", "samples/s"]
        assert "<script>alert(1)</script>" in chromium.text("#output")
        chromium.run("document.querySelector('tbody tr:nth-child(2)').click()")
        wait_until(lambda: "in train_until" in chromium.text("#stacks pre"), 60)
        (tmp_path / "done").touch()
        wait_until(lambda: chromium.text("#state") == "failed", 60)
        assert "ValueError: <i>no</i> batch left" in chromium.text("#error")
        assert chromium.run("return document.querySelectorAll('i, #output script').length") == 0
        assert chromium.complaints() == []  # nothing was blocked by the page's policy, and there was no error
        chromium.run("document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"window.shot = 1\">')")
        wait_until(lambda: any("Content Security Policy" in each for each in chromium.complaints()), 60)
        assert chromium.run("return window.shot ?? null") is None

    with pytest.raises(RuntimeError, match="batch left"):
        watched(visit, capfd, tmp_path / "done", fails=True)
