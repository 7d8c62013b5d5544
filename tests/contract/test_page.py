"""The page of a run, over real sockets: what browsers see, and that no client can disturb the run."""

from __future__ import annotations

import gzip
import json
import logging
import os
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pytest

from spark_hvd.runner import Reporting, run_elastic_local, run_local
from spark_hvd.runner.config import PageAddress, RunConfig
from spark_hvd.runner.launch.monitor import make_monitor
from spark_hvd.runner.watch.display import page as page_module
from spark_hvd.runner.watch.display import serve
from spark_hvd.runner.watch.display.page import Page
from tests.conftest import wait_until
from tests.contract.page_cases import Browser, Capture, train_elastic, train_until, watched

pytestmark = pytest.mark.usefixtures("no_leaks")


def check_trace(packed: bytes, began: float) -> None:
    """Check two ranks, two steps each, on their host's clock, since the test ``began``."""
    events = json.loads(gzip.decompress(packed))["traceEvents"]
    named = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert named == {0: "rank 0 (127.0.0.1): CPU", 1000: "rank 1 (127.0.0.1): CPU"}
    for pid in named:
        steps = [event for event in events if event["pid"] == pid and event["name"] == "step" and event["ph"] == "X"]
        assert len(steps) == 2
        assert all(began < event["ts"] / 1e6 < time.time() for event in steps)


@pytest.mark.slow  # by day: the next tests, and tests/unit/test_page.py
def test_a_run_is_seen_and_asked_and_leaves_its_last_picture(
    capfd: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_module, "_HEARD_SECONDS", 3.0)
    began = time.time()
    last: list[dict[str, Any]] = []

    def visit(browser: Browser) -> None:
        status, html = browser.ask("")
        assert (status, b"<!doctype html>" in html) == (200, True)
        run = browser.told("run?me=x")
        while not run.get("plots"):  # one picture per second, each requested once
            before, run = run["number"], browser.told(f"run?me=x&after={run['number']}")
            assert run["number"] > before
        assert [(row["rank"], row["host"]) for row in run["ranks"]] == [(0, "127.0.0.1"), (1, "127.0.0.1")]
        assert run["columns"][:4] == ["epoch", "step", "loss", "<i>name</i>"]
        assert sorted(line[1:] for line in run["lines"]) == [
            [rank, "out", "<script>alert(1)</script>"] for rank in range(2)
        ]
        assert browser.told(f"run?me=x&line={run['line']}")["lines"] == []
        found = browser.told("stacks?rank=1", "POST")
        assert any("in train_until" in line for line in found["folded"])
        assert browser.ask("stacks?rank=1")[0] == 404  # following a link requests nothing
        for wrong in ("2", "-1", "x", ""):
            assert browser.ask(f"stacks?rank={wrong}", "POST")[0] == 404
        assert browser.ask("trace.json.gz")[0] == 404
        for wrong in ("steps=0", "steps=1000", "steps=x", ""):
            assert browser.ask(f"profile?{wrong}", "POST")[0] == 400
        assert browser.ask("profile?steps=2&rank=2", "POST")[0] == 404
        assert browser.told("profile?steps=2", "POST")["trace"]["text"] == "profiling 2 steps of ranks 0, 1 ..."
        assert browser.told("profile?steps=2", "POST")["error"] == "ranks are already being profiled"
        while not run.get("trace") or not run["trace"]["ready"]:
            run = browser.told(f"run?me=x&after={run['number']}")
        check_trace(browser.ask("trace.json.gz")[1], began)
        os.kill(run["ranks"][1]["pid"], signal.SIGSTOP)
        try:
            browser.told("profile?steps=1&rank=1", "POST")
            while run["trace"]["text"] != f"rank 1: {page_module._NO_ANSWER}":
                run = browser.told(f"run?me=x&after={run['number']}")
            assert not run["trace"]["ready"]
            stopped = browser.told("stacks?rank=1", "POST")
            assert (stopped["status"], stopped["stacks"]) == ("stopped", "")
        finally:
            os.kill(run["ranks"][1]["pid"], signal.SIGCONT)
        (tmp_path / "done").touch()
        while not run.get("over"):
            run = browser.told(f"run?me=x&after={run['number']}")
        last.append(run)

    assert watched(visit, capfd, tmp_path / "done") == [0, 1]
    (run,) = last
    assert run["error"] is None
    assert run["summary"]["time"]


def test_the_error_of_a_run_is_its_last_picture(
    capfd: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARK_HVD_PAGE", "1")  # for programs that cannot be changed
    last: list[dict[str, Any]] = []

    def visit(browser: Browser) -> None:
        run = browser.told("run?me=x")
        (tmp_path / "done").touch()
        while not run.get("over"):
            run = browser.told(f"run?me=x&after={run['number']}")
        last.append(run)

    with pytest.raises(RuntimeError, match="<i>no</i> batch left"):
        watched(visit, capfd, tmp_path / "done", fails=True, page=None)
    assert "ValueError: <i>no</i> batch left" in last[0]["error"]


def test_nobody_who_asks_disturbs_the_run(capfd: Capture, tmp_path: Path) -> None:
    def visit(browser: Browser) -> None:
        good = f"GET {browser.url.path}run HTTP/1.1\r\nHost: localhost\r\n".encode()
        assert browser.ask("run")[0] == 200
        assert browser.ask("", path="/wrong/")[0] == 403
        assert browser.ask("run", Host="rebound.example.com")[0] == 403
        assert browser.ask("stacks?rank=0", "POST", Origin="http://rebound.example.com")[0] == 403
        with ThreadPoolExecutor(10) as pool:
            assert [status for status, _ in pool.map(lambda _: browser.ask("run"), range(10))] == [200] * 10
        for _ in range(20):
            browser.raw(good + b"\r\n").close()  # leaves while it is answered
        # A flood of clients that send nothing, or a byte now and then: the oldest are cut.
        held = [browser.raw(part) for part in (b"", good, b"\0" * 9000, good + b"X: " + b"y" * 9000) for _ in range(25)]
        assert browser.ask("run")[0] == 200
        for connection in held:
            connection.close()

    assert watched(visit, capfd, tmp_path / "done") == [0, 1]
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.slow
def test_members_of_an_elastic_run_are_asked_by_their_ranks(capfd: Capture, tmp_path: Path) -> None:
    began = time.time()

    def visit(browser: Browser) -> None:
        run: dict[str, Any] = {"number": 0}
        while not run.get("plots"):
            run = browser.told(f"run?me=x&after={run['number']}")
        assert any("in step_until" in line for line in browser.told("stacks?rank=1", "POST")["folded"])
        browser.told("profile?steps=2", "POST")
        while not run.get("trace") or not run["trace"]["ready"]:
            run = browser.told(f"run?me=x&after={run['number']}")
        check_trace(browser.ask("trace.json.gz")[1], began)

    assert watched(visit, capfd, tmp_path / "done", start=run_elastic_local, fn=train_elastic) == [0, 1]


def test_who_says_nothing_has_no_connection_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "_HEAD_SECONDS", 0.2)
    page = Page(PageAddress(), lambda rank: None, lambda *asked: None)
    try:
        with Browser(page.url).raw(b"GET / HT") as connection:
            connection.settimeout(30)
            assert connection.recv(100) == b""
    finally:
        page.close()


def test_a_rank_that_does_not_answer_is_said_to(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(page_module, "_STACKS_SECONDS", 0.5)
    page = Page(PageAddress(), asked.append, lambda *asked: None)
    try:
        page._server.call(page._publish, {"ranks": [{}, {}]})
        browser = Browser(page.url)
        with ThreadPoolExecutor(5) as pool:
            answers = [*pool.map(lambda _: browser.ask("stacks?rank=1", "POST"), range(5))]
        assert {status for status, _ in answers} == {504}
        assert "rank 1 does not answer: it has not started yet or has ended" in json.loads(answers[0][1])["error"]
        assert set(asked) == {1}
        assert len(asked) < 5  # simultaneous requests share one look
    finally:
        page.close()


def test_a_page_that_fails_ends_itself_and_not_the_run(
    capfd: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*args: Any) -> None:
        raise KeyError("injected")

    monkeypatch.setattr(page_module, "picture", fails)

    def visit(browser: Browser) -> None:
        connection = browser.raw(f"GET {browser.url.path}run HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        wait_until(lambda: "injected" in caplog.text)
        connection.close()

    with caplog.at_level(logging.WARNING):
        assert watched(visit, capfd, tmp_path / "done") == [0, 1]
    assert caplog.text.count("the page of the run has failed (KeyError('injected')); the run continues") == 1


def test_an_address_that_is_taken_is_a_warning(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    (tmp_path / "done").touch()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        assert run_local(train_until, [tmp_path / "done"], reporting=Reporting(page=address), verbose=0) == [0, 1]
    assert "the page of the run has failed (OSError(98" in caplog.text


def test_a_burst_of_those_who_say_nothing_is_cut_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "_HEAD_SECONDS", 60.0)
    page, gate, most = Page(PageAddress(), lambda rank: None, lambda *asked: None), threading.Event(), 32
    try:
        page._server.call(gate.wait)  # so that it sees all of them at once
        held = [Browser(page.url).raw(b"") for _ in range(100)]
        gate.set()
        wait_until(lambda: len(wait(held, 0)) == 100 - most)
        assert wait(held[-most:], 0) == []  # the newest may still send their request
    finally:
        gate.set()
        page.close()
    for connection in held:
        connection.close()


def test_a_rank_that_makes_no_step_keeps_no_other_profile_from_being_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_module, "_BUSY_SECONDS", 0.5)
    asked: list[tuple[int, ...]] = []
    page = Page(PageAddress(), lambda rank: None, lambda *profile: asked.append(profile))
    try:
        page._server.call(page._publish, {"ranks": [{}]})
        browser = Browser(page.url)
        assert browser.told("profile?steps=2", "POST")["trace"]["busy"]
        page.profiled(0, {"number": 1, "part": 0, "parts": 0, "data": "", "error": None})  # it was heard
        wait_until(lambda: not browser.told("run")["trace"]["busy"])
        assert browser.told("profile?steps=3", "POST")["trace"]["busy"]
        assert asked == [(0, 1, 2), (0, 2, 3)]
    finally:
        page.close()


class Record:
    """A tracker that records whether its run has ended."""

    def __init__(self) -> None:
        self.ended = False

    def start(self, facts: Any) -> None:
        pass

    def take(self, vitals: Any) -> None:
        pass

    def end(self, error: Any, summary: Any) -> None:
        self.ended = True


@pytest.mark.parametrize("where", ["display", "page"])
def test_an_interrupt_at_the_end_leaves_nothing_open(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: Any) -> None:
        raise KeyboardInterrupt

    record = Record()
    monitor = make_monitor(RunConfig(page=True, progress="off", tracker=record), train_until, 1)
    monkeypatch.setattr(Page if where == "page" else type(monitor._display), "end", interrupted)
    with pytest.raises(KeyboardInterrupt), monitor:
        pass
    assert monitor._page is not None
    assert record.ended
    with pytest.raises(ConnectionRefusedError):
        Browser(monitor._page.url).raw(b"")
